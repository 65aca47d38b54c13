"""Training exits on a tiny model: the same trainer as for other heads, another layer, the same position."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import AdaDecode, Autoregressive, Decoder, InputError
from outpace.heads import ExitHeads
from outpace.heads.exits import BINS
from outpace.heads.storing import read_config
from outpace.models.hf import HFModel
from outpace.models.whole import states_behind
from outpace.training.data import Text, batches, read_answers, write_answers
from outpace.training.run import Texts, make_heads
from outpace.training.run import train as run
from outpace.training.trainer import Plan, Trainer

from .models import VOCABULARY, tiny


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    folder = tmp_path_factory.mktemp("answers")
    rng = random.Random(0)
    prompts = [rng.choices(range(VOCABULARY), k=rng.randrange(2, 9)) for _ in range(96)]
    write_answers(tiny("Llama"), prompts, folder, [], batch=16, new_tokens=24)
    return read_answers(folder)


def exits(name: str = "Llama", **settings: Any) -> ExitHeads:
    adapted = HFModel(tiny(name))
    found = make_heads(tiny(name), adapted.ends(), "exits", settings)
    assert isinstance(found, ExitHeads)
    return found


def trainer(heads: ExitHeads, plan: Plan, name: str = "Llama") -> Trainer:
    adapted = HFModel(tiny(name))
    return Trainer(tiny(name), adapted.norm, adapted.ends(), {"exits": heads}, plan)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2", "GPTNeoX"])
def test_states_in_training_are_those_of_decoding(name: str) -> None:
    """What an exit reads in training is what a row that climbed to it is left with."""
    model, adapted = tiny(name), HFModel(tiny(name))
    tokens = torch.tensor([[5, 9, 5, 9, 7, 3]])
    final, behind = states_behind(model, adapted.norm, tokens, (1, 3))
    engine = Decoder(model).engine
    with engine.pool.sequence(tokens[0].tolist()) as sequence:
        rows = engine.pool.place_text(sequence, 6)
        for stop, expected in ((1, behind[1]), (3, behind[3]), (4, final)):
            found = engine.climb(sequence, rows, 0, 0, stop).hidden
            torch.testing.assert_close(found, expected[0], rtol=1e-3, atol=1e-3)


def test_a_fitted_exit_is_the_best_matrix(texts: list[Text]) -> None:
    for norm in ("first", "last"):
        heads = exits(norm=norm)
        one = trainer(heads, Plan(updates=1))
        (example, *_) = one._examples(heads, texts)
        heads.fit([example], one.ends)
        assert heads.layers == (1, 2, 3)
        with torch.no_grad():
            given, wanted = heads._pair(example.read[0], example.final, one.ends)
            error = (heads.maps[0](given) - wanted).square().mean()
            assert error < (given - wanted).square().mean()
            best = given @ torch.linalg.lstsq(given, wanted).solution
            assert error < 1.2 * (best - wanted).square().mean()


def test_without_text_a_fitted_exit_is_the_identity() -> None:
    heads = exits(layers="2")
    with torch.no_grad():
        heads.maps[0].weight.zero_()
    heads.fit([], HFModel(tiny("Llama")).ends())
    torch.testing.assert_close(heads.maps[0].weight, torch.eye(32))


def test_the_frequent_tokens_are_those_of_the_text(texts: list[Text]) -> None:
    heads = exits(frequent=10)
    one = trainer(heads, Plan(updates=1))
    examples = list(one._examples(heads, texts))
    heads.fit(examples, one.ends)
    often = torch.cat([example.tokens for example in examples]).bincount(minlength=VOCABULARY)
    assert often[heads.ids].tolist() == often.sort(descending=True).values[:10].tolist()


def test_loss_is_of_the_right_places(texts: list[Text]) -> None:
    """Against the definition: an exit is asked what the last layer says at the same position."""
    heads = exits(layers="1,3")
    one = trainer(heads, Plan(updates=1))
    model = tiny("Llama")
    (batch,) = batches(texts[:3], 10**6, random.Random(0))
    final, behind = states_behind(model, one.norm, batch.tokens, (1, 3))
    rows, weights = batch.rows, one._weights(batch)
    learnt = one._learnt(heads, one._compute(batch.tokens), batch.tokens, rows, None).leaves()
    found = one._backward({"exits": learnt}, final, rows, weights, torch.Generator())["exits"]
    for place, layer in enumerate((1, 3)):
        losses = []
        for row in range(3):
            for at in range(int(batch.prompts[row]), int(batch.lengths[row]) - 1):
                target = model.lm_head(model.model.norm(final[row, at])).softmax(-1)
                logits = model.lm_head(model.model.norm(behind[layer][row, at]))
                losses.append(-(target * logits.log_softmax(-1)).sum())
        assert found[place] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


@pytest.mark.parametrize("settings", [{}, pytest.param({"norm": "last"}, marks=pytest.mark.slow), {"output": "full"}])
def test_exits_learn(texts: list[Text], settings: dict[str, Any]) -> None:
    heads = exits(**settings)
    one = trainer(heads, Plan(updates=40, tokens=600))
    untrained = one.accuracies(texts)["exits"][:, 0]
    heads.fit(one._examples(heads, texts), one.ends)
    fitted = one.accuracies(texts)["exits"][:, 0]
    one.run(texts)
    trained = one.accuracies(texts)["exits"][:, 0]
    assert (fitted > untrained).all()
    assert (trained > fitted).all()
    assert len(one.progress.losses["exits"]) == 3


def test_a_training_ends_with_exits_that_draft(texts: list[Text], tmp_path: Path) -> None:
    model, adapted = tiny("Llama"), HFModel(tiny("Llama"))
    plan = Plan(updates=30, tokens=600, rate=3e-3)
    heads = exits(frequent=60)
    found = run(model, adapted, {"exits": heads}, Texts(texts[:80], texts[80:], []), plan, tmp_path).held_out
    config = read_config(tmp_path / "exits")
    assert config["settings"]["layers"] == [1, 2, 3]
    assert config["tree"] == []
    places = sum(len(text.tokens) - text.prompt - 1 for text in texts[80:])
    for line, accuracy in zip(config["calibration"], found["exits"], strict=True):
        assert len(line) == BINS
        assert sum(asked for asked, _ in line) == places
        # A little less than the accuracy over the whole vocabulary: some tokens are not compared.
        assert sum(right for _, right in line) / places <= float(accuracy[0]) + 0.05
    decoder = Decoder(model)
    method = decoder.prepare(AdaDecode(str(tmp_path / "exits"), control="fixed", gamma=0.03))
    answer = decoder.generate([5, 9, 5], method=method, max_new_tokens=30)
    assert answer.token_ids == decoder.generate([5, 9, 5], method=Autoregressive(), max_new_tokens=30).token_ids
    assert answer.steps < 30


def test_training_goes_on_after_a_stop(texts: list[Text], tmp_path: Path) -> None:
    plan = Plan(updates=6, tokens=300, save_every=0)
    first = trainer(exits(), plan)

    def stop(share: float, text: str) -> None:
        if share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(texts, stop, tmp_path / "checkpoint.pt")
    second = trainer(exits(), plan)
    second.resume(tmp_path / "checkpoint.pt")
    assert second.progress.update == 2
    assert not torch.equal(second.heads["exits"].maps[0].weight, torch.eye(32))  # type: ignore[index, union-attr]
    second.run(texts, checkpoint=tmp_path / "checkpoint.pt")
    assert second.progress.update == 6


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to train"):
        exits(output="original")
    with pytest.raises(InputError, match="an exit after layer 4"):
        exits(layers="2,4")
    with pytest.raises(InputError, match="setting of exits heads"):
        exits(depth=3)
