"""What a Decoder keeps for a chat's next turn, and models whose weights or adapters change under it."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import Amphista, Autoregressive, Decoder, InputError, Lookahead, Method, ModelError, UnsupportedModel
from outpace.models.adapters import Watch
from outpace.models.hf import HFModel
from outpace.runtime.graphs import GraphEngine

from .models import mostly_slow, tiny
from .test_cli import folder
from .test_heads import random_heads
from .test_lossless import prompt_of

assert folder  # a fixture
METHODS: dict[str, Method] = {
    "plain": Autoregressive(),
    "lookahead": Lookahead(window=3, ngram=3, guesses=3),
    "amphista": Amphista(heads=random_heads("amphista", tiny("Llama")), rows=8, lookup=0.0),
}


def decoder_of(graphs: bool = False) -> Decoder:
    decoder = Decoder(tiny("Llama"), method="autoregressive")
    if graphs:
        decoder.engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, capacity=512)
    return decoder


@pytest.mark.parametrize(
    ("name", "graphs"),
    mostly_slow(
        product(METHODS, [False, True]),
        [("plain", False), ("lookahead", True), ("amphista", False), ("amphista", True)],
    ),
)
def test_the_next_turn_reads_only_what_is_new(name: str, graphs: bool) -> None:
    """Its text and its guesses are those of a Decoder that reads all."""
    decoder, other = decoder_of(graphs), decoder_of(graphs)
    method = decoder.prepare(METHODS[name])
    text = prompt_of(3, 30)
    for turn in range(3):
        found = decoder.generate(text, method=method, max_new_tokens=12)
        other.forget()
        expected = other.generate(text, method=method, max_new_tokens=12)
        assert found.token_ids == expected.token_ids
        assert found.accepted_per_step == expected.accepted_per_step
        assert expected.reused == 0
        assert found.reused == 0 if turn == 0 else found.reused > len(text) - 12
        text = [*text, *found.token_ids, 5, 9, turn]
    assert decoder.engine.pool.held == 0
    decoder.forget()
    assert (decoder.engine.pool.kept, decoder.engine.pool.used) == (0, 0)


def test_a_prompt_that_is_repeated_is_read_again_and_others_forget_it() -> None:
    decoder = decoder_of()
    prompt = prompt_of(3, 40)
    for again in (prompt, prompt, [*prompt[:20], 1, 2, 3], [7, *prompt, 8], [9] * 60):
        assert decoder.generate(again, max_new_tokens=5).reused == 0
    assert decoder.engine.pool.kept == 64  # the last alone: a token's slot is computed when it is read
    texts = decoder.generate([prompt, [*prompt, 4]], max_new_tokens=5)
    assert [text.reused for text in texts] == [0, 0]
    assert decoder.engine.pool.kept == 0  # batches are no chats


def test_a_template_may_end_the_prompt_in_another_way_next_time() -> None:
    decoder = decoder_of()
    prompt = prompt_of(3, 40)
    decoder.generate([*prompt, 1, 2, 3], max_new_tokens=5)
    assert decoder.generate([*prompt, 4, 5, 6, 7], max_new_tokens=5).reused == len(prompt)


def test_another_salt_shares_nothing() -> None:
    decoder = decoder_of()
    first = decoder.generate(prompt_of(3, 40), max_new_tokens=5, salt="a")
    assert decoder.generate([*prompt_of(3, 40), *first.token_ids, 1], max_new_tokens=5, salt="b").reused == 0


def test_a_stream_that_is_left_goes_on_in_the_next_turn() -> None:
    decoder = decoder_of()
    prompt = prompt_of(3, 40)
    steps = decoder.stream(prompt, max_new_tokens=30)
    written = [token for _ in range(4) for token in next(steps).tokens]
    steps.close()  # type: ignore[attr-defined]
    assert decoder.generate([*prompt, *written, 1], max_new_tokens=3).reused == len(prompt) + 3


def test_weights_that_were_trained_on_are_noticed() -> None:
    model = copy.deepcopy(tiny("Llama"))
    decoder = Decoder(model, method="autoregressive")
    prompt = prompt_of(3, 40)
    first = decoder.generate(prompt, max_new_tokens=5)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(0.5)
    longer = [*prompt, *first.token_ids, 1]
    found = decoder.generate(longer, max_new_tokens=12)
    assert found.reused == 0
    assert found.token_ids == Decoder(model, method="autoregressive").generate(longer, max_new_tokens=12).token_ids


def test_every_change_of_weights_and_modules_is_noticed() -> None:
    model = copy.deepcopy(tiny("Llama"))
    watch = Watch(model)
    layer = model.model.layers[0].mlp
    stamps = [(watch.adapters(), watch.stamp())]
    assert (watch.adapters(), watch.stamp()) == stamps[0]
    with torch.no_grad():
        layer.up_proj.weight.add_(0.5)
    stamps.append((watch.adapters(), watch.stamp()))
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.clone())
    stamps.append((watch.adapters(), watch.stamp()))
    layer.gate_proj = copy.deepcopy(layer.gate_proj)
    stamps.append((watch.adapters(), watch.stamp()))
    with torch.no_grad():
        layer.gate_proj.weight.add_(0.5)  # of the new module
    stamps.append((watch.adapters(), watch.stamp()))
    assert len({*stamps}) == 5


def with_lora(model: Any, seed: int = 0) -> Any:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        copy.deepcopy(model),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"),
    ).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.5)
    return adapted


def greedy(model: Any, prompt: list[int], count: int = 16) -> list[int]:
    ids = torch.tensor([prompt])
    text = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    found: list[int] = text[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("exact", [False, True])
def test_adapters_may_be_switched_under_a_decoder(exact: bool) -> None:
    model, prompt = with_lora(tiny("Llama")), prompt_of(3, 30)
    adapted, plain = greedy(model, prompt), greedy(tiny("Llama"), prompt)
    assert adapted != plain
    decoder = Decoder(model, method="lookahead", exact=exact)
    assert decoder.generate(prompt, max_new_tokens=16).token_ids == adapted
    with model.disable_adapter():
        assert decoder.generate(prompt, max_new_tokens=16).token_ids == plain
    assert decoder.generate([prompt], max_new_tokens=16)[0].token_ids == adapted
    if not exact:  # exact mode has joined weights, which merging would part
        model.merge_adapter()
        assert decoder.generate(prompt, max_new_tokens=16).token_ids == adapted


def test_a_folder_with_an_adapter(folder: Path, tmp_path: Path) -> None:
    base = outpace.load(folder, device="cpu", method="autoregressive")
    model = with_lora(base._given)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path / "adapter")
    decoder = outpace.load(tmp_path / "adapter", device="cpu", method="lookahead")
    prompt = base.encode("hello")
    expected = Decoder(model, base.tokenizer, "autoregressive").generate(prompt, max_new_tokens=12).token_ids
    assert decoder.generate("hello", max_new_tokens=12).token_ids == expected
    assert expected != base.generate(prompt, max_new_tokens=12).token_ids


def test_an_adapter_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": ""}')
    with pytest.raises(ModelError, match="names no base model"):
        outpace.load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json is not an adapter's JSON"):
        outpace.load(tmp_path)


def test_adapters_before_the_prompt_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModel, match="prepends virtual tokens"):
        Decoder(peft.get_peft_model(copy.deepcopy(tiny("Llama")), config))


def test_a_changed_scale_of_an_adapter_is_noticed() -> None:
    model, prompt = with_lora(tiny("Llama")), prompt_of(3, 30)
    decoder = Decoder(model, method="lookahead")
    first = decoder.generate(prompt, max_new_tokens=8).token_ids
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)
    longer = [*prompt, *first, 1]
    found = decoder.generate(longer, max_new_tokens=16)
    assert found.reused == 0
    assert found.token_ids == greedy(model, longer)


def test_an_engine_that_could_not_be_made_is_made_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = with_lora(tiny("Llama")), prompt_of(3, 30)
    decoder = Decoder(model, method="lookahead")
    make = decoder._runtime
    with model.disable_adapter():
        monkeypatch.setattr(decoder, "_runtime", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            decoder.generate(prompt)
        monkeypatch.setattr(decoder, "_runtime", make)
        plain = greedy(tiny("Llama"), prompt)
        assert decoder.generate(prompt, max_new_tokens=16).token_ids == plain


def test_threads_that_find_adapters_switched_have_one_new_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = with_lora(tiny("Llama")), prompt_of(3, 30)
    decoder, engines = Decoder(model, method="lookahead"), []
    make = decoder._runtime

    def making(given: Any) -> Any:
        engines.append(make(given))
        return engines[-1]

    monkeypatch.setattr(decoder, "_runtime", making)
    with model.disable_adapter(), ThreadPoolExecutor(6) as threads:
        plain = greedy(tiny("Llama"), prompt)
        found = list(threads.map(lambda _: decoder.generate(prompt, max_new_tokens=16).token_ids, range(6)))
    assert found == [plain] * 6
    assert len(engines) == 1


def test_a_batch_keeps_the_engine_that_it_began_with() -> None:
    model, prompt = with_lora(tiny("Llama")), prompt_of(3, 30)
    adapted = greedy(model, prompt)
    decoder = Decoder(model, method="lookahead")
    batch = decoder.batch()
    batch.add(prompt, max_new_tokens=16)
    with model.disable_adapter(), pytest.raises(InputError, match="Start another batch"):
        batch.add(prompt)
    assert [token for _, step in batch for token in step.tokens] == adapted
