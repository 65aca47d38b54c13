"""Layers compiled together: few checks, and still none computes what another should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from outpace import Autoregressive, Decoder
from outpace.draft import chain
from outpace.models import compiling
from outpace.models.compiling import compile_together
from outpace.models.hf import HFModel
from outpace.runtime.plain import Engine

from .models import ARCHITECTURES, tiny
from .test_runtime import METHODS, PROMPT


class Layer(nn.Module):
    def __init__(self, place: int, scale: float = 2.0, turns: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.place = place
        self.scale = scale
        self.turns = turns
        self.calls = 0

    def forward(self, states: torch.Tensor, by_place: bool = False) -> torch.Tensor:
        for _ in range(self.turns):
            states = self.linear(states) * self.scale
        return states * self.place if by_place else states


class Counting(Layer):
    def forward(self, states: torch.Tensor, by_place: bool = False) -> torch.Tensor:
        self.calls += 1
        return super().forward(states) * self.calls


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    compile_for_real = torch.compile

    def compile_quickly(function: Any, options: dict[str, Any], **settings: Any) -> Any:
        options = {"guard_filter_fn": options["guard_filter_fn"]}
        return compile_for_real(function, backend="eager", options=options, **settings)

    if "slow" not in request.keywords:
        monkeypatch.setattr(torch, "compile", compile_quickly)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@torch.inference_mode()
def check(layers: list[Layer], run: Callable[..., Any], **options: bool) -> None:
    states = torch.randn(3, 4)
    for layer in layers * 2:
        assert torch.equal(run(layer, states, **options), layer(states, **options))


def test_layers_that_are_alike_share_what_is_compiled_and_hardly_check() -> None:
    kept = []
    real = compiling._needed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_needed", lambda *args: kept.append(real(*args)) or kept[-1])
        layers = [Layer(place) for place in range(4)]
        check(layers, compile_together(layers))
    assert compilations() == 1
    assert sum(kept[0]) < len(kept[0]) / 2


def test_layers_that_differ_are_told_apart() -> None:
    check(layers := [Layer(place, turns=1 + place % 2) for place in range(4)], compile_together(layers))
    assert compilations() == 2
    check(layers := [Layer(place, scale=0.5 * place) for place in range(4)], compile_together(layers))
    check(layers := [Layer(place) for place in range(4)], compile_together(layers), by_place=True)


def test_another_model_never_meets_what_is_compiled() -> None:
    for turns in (1, 2):  # the second model's layers are alike among themselves, but not like the first's
        layers = [Layer(place, turns=turns) for place in range(3)]
        check(layers, compile_together(layers))


def test_what_a_layer_changes_itself_is_checked() -> None:
    layers, twins = ([Counting(place) for place in range(2)] for _ in range(2))
    for layer, twin in zip(layers, twins, strict=True):
        twin.load_state_dict(layer.state_dict())
    run = compile_together(layers)
    states = torch.randn(3, 4)
    with torch.inference_mode():
        for _ in range(4):
            for layer, twin in zip(layers, twins, strict=True):
                assert torch.equal(run(layer, states), twin(states))


def compiled_decoder(model: Any) -> Decoder:
    decoder = Decoder(model)
    adapted = HFModel(model)
    adapted.compile_layers()
    decoder.engine = Engine(adapted, compiled=True)
    return decoder


def check_texts(decoder: Decoder, model: Any) -> None:
    expected = Decoder(model).generate(PROMPT, method=Autoregressive(), max_new_tokens=8).token_ids
    for method in (Autoregressive(), *METHODS):
        assert decoder.generate(PROMPT, method=method, max_new_tokens=8).token_ids == expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma2", {}),  # every other layer slides
        pytest.param("SmolLM3", {"no_rope_layer_interval": 2}, marks=pytest.mark.slow),  # no positions in every other
        ("GPT2", {"scale_attn_by_inverse_layer_idx": True, "num_hidden_layers": 2}),  # every layer scales otherwise
    ],
)
def test_models_with_layers_of_several_kinds(name: str, changes: dict[str, Any]) -> None:
    model = tiny(name, **changes)
    decoder = compiled_decoder(model)
    check_texts(decoder, model)
    engine, draft = decoder.engine, chain(5, [9, 7], "")
    with engine.pool.sequence(PROMPT[:5]) as text:
        found = engine.score(text, draft).logits
    with engine.pool.sequence(PROMPT[:5]) as text:
        engine.compiled = False
        torch.testing.assert_close(found, engine.score(text, draft).logits)


def test_unfused_layers_are_compiled_anew() -> None:
    model = tiny("Llama", seed=5)
    decoder = Decoder(model, runtime="compiled")
    check_texts(decoder, model)
    adapted: Any = decoder.model
    adapted.unfuse()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
    check_texts(decoder, model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_compiled(name: str) -> None:
    model = tiny(name)
    decoder = Decoder(model, runtime="compiled")
    check_texts(decoder, model)
    decoder.model.unfuse()  # type: ignore[attr-defined]
