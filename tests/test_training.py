"""Training heads on a tiny model: what it reads, that it learns, that it goes on after a stop."""

from __future__ import annotations

import copy
import gzip
import json
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import InputError
from outpace.heads import KINDS, AmphistaSettings, BlockSettings, HeadSettings, MedusaSettings
from outpace.heads.base import CALM, begin_norm
from outpace.heads.blocks import BlockShape
from outpace.models.hf import HFModel
from outpace.models.whole import CHECKED, last_layers, layer_sizes, states_behind, write_batch
from outpace.training.data import Text, batches, read_answers, read_prompts, write_answers
from outpace.training.muon import Muon, orthogonal
from outpace.training.prompts import Exchange, derive, distinct
from outpace.training.run import _claim, _digest, make_heads
from outpace.training.trainer import Plan, Trainer, _two

from .models import VOCABULARY, mostly_slow, tiny

SETTINGS: dict[str, HeadSettings] = {
    "medusa": MedusaSettings(count=2),
    "hydra": HeadSettings(count=2),
    "amphista": AmphistaSettings(count=2),
    "block": BlockSettings(count=3, depth=2, layers="1,3"),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    folder = tmp_path_factory.mktemp("answers")
    rng = random.Random(0)
    prompts = [rng.choices(range(VOCABULARY), k=rng.randrange(2, 9)) for _ in range(48)]
    write_answers(tiny("Llama"), prompts, folder, [], batch=16, new_tokens=24)
    return read_answers(folder)


def trainer(plan: Plan, seed: int = 0) -> Trainer:
    model = tiny("Llama")
    torch.manual_seed(seed)
    shape = BlockShape(**layer_sizes(model))
    heads = {name: KINDS[name](SETTINGS[name], shape) for name in KINDS}
    adapted = HFModel(model)
    for part in heads.values():
        part.begin_from(adapted.ends(), last_layers(model, 2))
    return Trainer(model, adapted.norm, adapted.ends(), heads, plan)


def test_answers_are_the_models_own(texts: list[Text]) -> None:
    assert len(texts) == 48
    greedy = 0
    for text in texts[::5]:
        ids = text.tokens[None, : text.prompt]
        own = tiny("Llama").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        greedy += torch.equal(own[0], text.tokens)
    assert 0 < greedy < 10  # some batches are sampled


@pytest.mark.parametrize("name", mostly_slow(["Llama", "Mistral", "Gemma2", "GPTNeoX", "Qwen3", "GPT2"]))
def test_answers_in_batches_are_those_one_by_one(name: str, tmp_path: Path) -> None:
    """Prompts of several lengths, in a batch with the batch's own attention, against transformers one at a time."""
    model = tiny(name)
    before = model.config._attn_implementation
    rng = random.Random(name)
    prompts = [rng.choices(range(VOCABULARY), k=length) for length in (3, 7, 4, 12)]
    shares = list[float]()
    write_answers(model, prompts, tmp_path, [], batch=4, new_tokens=CHECKED + 8, greedy=True, show=shares.append)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert any(0 < share < 1 for share in shares)  # within the only batch
    assert model.config._attn_implementation == before
    for text in read_answers(tmp_path):
        ids = text.tokens[None, : text.prompt]
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=CHECKED + 8, do_sample=False)
        assert torch.equal(own[0], text.tokens)


def test_answers_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    prompts = [[1, 2], [3, 4, 5]]
    write_answers(tiny("Llama"), prompts, tmp_path, [], batch=1, new_tokens=4)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(before) == 2
    next(iter(before)).unlink()
    write_answers(tiny("Llama"), prompts, tmp_path, [], batch=1, new_tokens=4)
    after = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert sum(after[file] == before[file] for file in before) == 1


def test_an_answer_ends_with_the_first_end_token(tmp_path: Path) -> None:
    write_answers(tiny("Llama"), [[1, 2, 3]], tmp_path, [], batch=1, new_tokens=8, greedy=True)
    (whole,) = read_answers(tmp_path)
    end = int(whole.tokens[5])
    write_answers(tiny("Llama"), [[1, 2, 3]], tmp_path / "cut", [end], batch=1, new_tokens=8, greedy=True)
    (cut,) = read_answers(tmp_path / "cut")
    assert cut.tokens.tolist() == whole.tokens[: whole.tokens.tolist().index(end, 3) + 1].tolist()


def test_each_answer_has_a_temperature_of_its_own() -> None:
    """Those at 0 are greedy, whatever is beside them, and texts that end make room for the others."""
    model, rng = tiny("Llama"), random.Random(1)
    prompts = [rng.choices(range(VOCABULARY), k=rng.randrange(2, 9)) for _ in range(8)]
    warm = [0.0, 0.9] * 4
    whole = write_batch(model, prompts, [], 40, warm, seed=3)
    greedy = write_batch(model, prompts, [], 40, [0.0] * 8, seed=3)
    assert [line == other for line, other in zip(whole, greedy, strict=True)] == [True, False] * 4
    end = greedy[0][5]
    cut = write_batch(model, prompts, [end], 40, [0.0] * 8, seed=3)
    assert cut == [line[: line.index(end) + 1] if end in line else line for line in greedy]


def test_prompts_are_made_of_prompts_and_answers() -> None:
    said = [Exchange(f"What is {number}?", f"It is {number}. It comes after {number - 1}.") for number in range(9)]
    made = derive(said, 40, seed=1)
    assert made == derive(said, 40, seed=1)
    talks = [prompt for prompt in made if not isinstance(prompt, str)]
    assert len(talks) == 16
    assert all([each["role"] for each in talk][:2] == ["user", "assistant"] for talk in talks)
    assert all(talk[-1]["role"] == "user" for talk in talks)
    texts = " ".join(prompt for prompt in made if isinstance(prompt, str))
    assert all(word in texts for word in ("Translate", "ummar"))
    assert derive([], 9, seed=1) == []


def test_no_prompt_shares_thirteen_words_with_one_that_is_held_out() -> None:
    held = " ".join(f"w{number}" for number in range(20))
    shares, shorter = held.upper().replace("W3 ", "other "), " ".join(held.split()[:12]) + " else"
    talk = [{"role": "user", "content": "so"}, {"role": "user", "content": held}]
    assert distinct([shares, shorter, "short", talk], [held, "Short!"]) == [shorter]


def test_batches_hold_every_text_once(texts: list[Text]) -> None:
    seen = []
    for batch in batches(texts, 200, random.Random(1)):
        assert batch.tokens.numel() <= 200
        for tokens, length in zip(batch.tokens, batch.lengths, strict=True):
            seen.append(tuple(tokens[:length].tolist()))
    assert sorted(seen) == sorted(tuple(text.tokens.tolist()) for text in texts)


def test_heads_learn(texts: list[Text]) -> None:
    one = trainer(Plan(updates=30, tokens=400, rate=1e-2))
    before = one.accuracies(texts)
    shares: list[float] = []
    losses: list[dict[str, list[float]]] = []

    def show(share: float, text: str) -> None:
        shares.append(share)
        losses.append(dict(one.progress.losses))

    one.run(texts, show)
    after = one.accuracies(texts)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for name in KINDS:
        assert sum(losses[-1][name]) < sum(losses[1][name]), name  # near its floor, the target's entropy
        assert after[name].sum() > before[name].sum(), name
        assert (after[name].sum(1) <= 1.0001).all()


def test_loss_is_of_the_right_places(texts: list[Text]) -> None:
    """Against the definition, one text and one head at a time."""
    one = trainer(Plan(updates=1))
    (batch,) = batches(texts[:3], 10**6, random.Random(0))
    model, heads = tiny("Llama"), one.heads["hydra"]
    adapted = HFModel(model)
    ends = adapted.ends()

    hidden = states_behind(model, adapted.norm, batch.tokens, ())[0]
    with torch.no_grad():
        states = heads.states(hidden, ends.embed(batch.tokens), ends)
        for row in range(3):
            length = int(batch.lengths[row])
            alone = states_behind(model, adapted.norm, batch.tokens[row : row + 1, :length], ())[0]
            torch.testing.assert_close(alone[0], hidden[row, :length], rtol=1e-3, atol=1e-3)
    rows, weights = batch.rows, one._weights(batch)
    target = one._compute(batch.tokens)
    learnt = {name: one._learnt(part, target, batch.tokens, rows, None).leaves() for name, part in one.heads.items()}
    found = one._backward(learnt, hidden, rows, weights, torch.Generator())
    for head in range(2):
        losses = []
        for row in range(3):
            for guessed in range(int(batch.prompts[row]) + 1 + head, int(batch.lengths[row])):
                target = model.lm_head(model.model.norm(hidden[row, guessed - 1])).softmax(-1)
                logits = model.lm_head(states[head, row, guessed - 2 - head])
                losses.append(-(target * logits.log_softmax(-1)).sum())
        assert found["hydra"][head] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


def test_training_goes_on_after_a_stop(texts: list[Text], tmp_path: Path) -> None:
    plan = Plan(updates=6, tokens=300, save_every=0)
    first = trainer(plan)
    with pytest.raises(KeyboardInterrupt):
        first.run(texts, _stop_at(0.5), tmp_path / "checkpoint.pt")
    second = trainer(plan, seed=5)
    second.resume(tmp_path / "checkpoint.pt")
    assert second.progress.update == 2  # the third was not saved any more
    second.run(texts, checkpoint=tmp_path / "checkpoint.pt")
    assert second.progress.update == 6
    never = trainer(plan)
    never.run(texts)
    for name, part in never.heads.items():  # the weights of one that was never stopped, bit for bit
        found = second.heads[name].state_dict()
        assert all(torch.equal(weight, found[key]) for key, weight in part.state_dict().items()), name
    with pytest.raises(InputError, match="with updates=6, not 7"):
        trainer(replace(plan, updates=7)).resume(tmp_path / "checkpoint.pt")
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(InputError, match="Delete it to start over"):
        second.resume(tmp_path / "checkpoint.pt")


def _stop_at(share: float) -> Any:
    def show(done: float, text: str) -> None:
        if done >= share:
            raise KeyboardInterrupt

    return show


def test_prompts_are_read_in_all_formats(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"question": "b"}, {"turns": ["c", "d"]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(file) == ["a", "b", "c"]
    with gzip.open(tmp_path / "prompts.jsonl.gz", "wt") as packed:
        packed.write(file.read_text())
    assert read_prompts(tmp_path / "prompts.jsonl.gz") == ["a", "b", "c"]
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no prompts"), ('{"prompt": "a"}\n{"prompt"', "line 2"), ('{"text": "a"}', "line 1"), ("[1]", "line 1")],
)
def test_broken_prompt_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_prompts(file)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 16), (1, 16, 4)])
def test_muons_steps_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64)
    found = orthogonal(matrices)
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    for matrix, near in zip(matrices, found, strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        off = left.T @ near @ right.T
        assert (off - off.diagonal().diag()).abs().max() < 1e-9  # the singular vectors stay


def test_muon_agrees_with_torchs_own() -> None:
    """In its first steps, as near as bfloat16 allows."""
    torch.manual_seed(0)
    one, other = (torch.nn.Parameter(torch.ones(6, 9)) for _ in range(2))
    mine, theirs = Muon([one], 0.1), torch.optim.Muon([other], 0.1, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        one.grad = torch.randn(6, 9)
        other.grad = one.grad.clone()
        mine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.step()
    torch.testing.assert_close(one, other, rtol=0.02, atol=0.005)


def test_bad_plans_are_refused() -> None:
    for options in ({}, {"updates": 1, "minutes": 1.0}, {"updates": 1, "hard": 2.0}, {"updates": 1, "rate": 0.0}):
        with pytest.raises(InputError):
            Plan(**options)


@pytest.mark.slow
def test_several_processes_train_the_same_heads_together(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, "-m", "tests.team", str(tmp_path)], check=True, capture_output=True, timeout=600)
    told = {(tmp_path / f"process-{number}.txt").read_text() for number in range(2)}
    assert len(told) == 1  # the same weights
    assert told.pop().startswith("2 24 ")  # two processes, all answers
    assert len(list((tmp_path / "answers").iterdir())) == 6
    stored = json.loads((tmp_path / "exits" / "config.json").read_text())["training"]
    assert (stored["processes"], stored["updates"]) == (2, 4)


def test_the_best_two_words_are_those_of_topk() -> None:
    logits = torch.randn(7, 100)
    best, chances = _two(logits)
    expected = logits.log_softmax(-1).topk(2)
    assert torch.equal(best, expected.indices[:, 0])
    torch.testing.assert_close(chances, expected.values)


def test_training_does_not_wait_for_plans_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN plans attention anew for every length of a batch, which took most of an update."""
    model = tiny("Llama")
    adapted = HFModel(model)
    heads = {"block": make_heads(model, adapted.ends(), "block", {"count": 2, "depth": 1, "rank": 4})}
    attend, allowed = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    texts = [Text(torch.randint(0, VOCABULARY, (12 + number,)), 4) for number in range(4)]
    Trainer(model, adapted.norm, adapted.ends(), heads, Plan(updates=1, tokens=64)).run(texts)
    assert allowed
    assert not any(allowed)


def test_answers_of_others_are_refused_and_their_batches_kept(tmp_path: Path) -> None:
    """Of as many other prompts too; and a training that goes on has the batches that it began with."""
    about = {"prompts": _digest(["a", "b"]), "batch": 0}
    assert _claim(tmp_path, about, 7) == 7
    assert _claim(tmp_path, about, 9) == 7
    with pytest.raises(InputError, match="answers of another model, to other prompts"):
        _claim(tmp_path, {**about, "prompts": _digest(["a", "c"])}, 7)
    (tmp_path / "about.json").write_text("5")
    with pytest.raises(InputError, match="answers of another model, to other prompts"):
        _claim(tmp_path, about, 7)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2"])
def test_a_new_heads_last_norm_is_like_the_targets(name: str) -> None:
    """Also where the weights are stored as differences from 1, and where the norm subtracts the mean and has a bias."""
    adapted = HFModel(copy.deepcopy(tiny(name)))
    ends = adapted.ends()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in ends.norm.parameters():
            weight.normal_()
    norm = torch.nn.RMSNorm(adapted.width)
    begin_norm(norm, ends._replace(head=torch.nn.Linear(adapted.width, 50).requires_grad_(False)))
    states = torch.nn.functional.rms_norm(torch.randn(5, adapted.width) @ centred(adapted.width), (adapted.width,))
    with torch.no_grad():
        torch.testing.assert_close(norm(states), ends.norm(states) - ends.norm(torch.zeros_like(states)))


def centred(width: int) -> torch.Tensor:
    """[width, width] a map that subtracts the mean."""
    return torch.eye(width) - 1 / width


def test_a_new_heads_logits_are_calm() -> None:
    """Gemma 3 scales its final states by 54: heads that began so would have to unlearn certainty first."""
    adapted = HFModel(copy.deepcopy(tiny("Gemma2")))
    ends = adapted.ends()
    with torch.no_grad():
        next(ends.norm.parameters()).fill_(1000.0)
        norm = torch.nn.RMSNorm(adapted.width)
        begin_norm(norm, ends)
        spread = ends.head(norm(torch.randn(200, adapted.width))).std(-1).mean()
    assert 0.9 * CALM < spread < 1.1 * CALM
