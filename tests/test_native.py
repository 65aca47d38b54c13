"""The native runtime: a forward pass in float32 is one call of C++. A row's bits do not depend on other rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from platform import machine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import outpace
from outpace import Autoregressive, Decoder, InputError, Method, Sampling
from outpace.errors import InvalidLogits, ModelError, OutpaceWarning
from outpace.models import layers, packing
from outpace.models.hf import HFModel
from outpace.models.loading import load
from outpace.models.packed import FLAGS, NUMBERS, Matrix, PackedEmbedding, PackedLinear, library
from outpace.receipt import check
from outpace.runtime import choose
from outpace.runtime.choose import engine_for
from outpace.trace import record

from .models import CONTEXT, VOCABULARY, build, examples, mostly_slow, tiny
from .test_lossless import methods_for, prompt_of
from .test_packed import saved

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
SHAPE = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}
NAMES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "SmolLM3")
KINDS = [pytest.param(dtype, id=kind.name) for dtype, kind in NUMBERS.items()]


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(weights: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    found: torch.Tensor = PackedLinear(Matrix.over(weights), bias)(rows)
    return found


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 16), (37, 576), (100, 1088)])
def test_products_are_those_of_the_numbers(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weights, bias = draw(outputs, inputs).to(dtype), draw(outputs, seed=7)
    for count in (1, 11, 80):
        rows = draw(count, inputs, seed=count)
        expected = rows.double() @ weights.double().T + bias
        torch.testing.assert_close(product(weights, rows, bias).double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(product(weights, rows), product(weights.float(), rows))


@examples(60)
@given(
    dtype=st.sampled_from(list(NUMBERS)),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 20).map(lambda lanes: 16 * lanes),
    count=st.integers(1, 90),
    data=st.data(),
)
def test_a_row_has_the_same_bits_beside_any_rows(
    dtype: torch.dtype, outputs: int, inputs: int, count: int, data: st.DataObject
) -> None:
    """Few rows are computed in another way than many."""
    weights, rows = draw(outputs, inputs).to(dtype), draw(count, inputs, seed=count)
    whole = product(weights, rows)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    assert torch.equal(product(weights, rows[start:stop]), whole[start:stop])
    assert torch.equal(product(weights, rows[start : start + 1]), whole[start : start + 1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "extra",
    [("-DPORTABLE", "-O1"), ("-mno-avx512f" if machine() == "x86_64" else "-march=armv8-a",)],
    ids=["portable", "old"],
)
def test_other_instruction_sets_compute_the_same(
    dtype: torch.dtype, extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = draw(50, 544).to(dtype)
    weights[7, 3] = float("inf")
    here = [product(weights, draw(count, 544)) for count in (1, 7, 40)]
    there = library((*FLAGS, *extra))
    monkeypatch.setattr("outpace.models.packed.library", lambda: there)
    assert all(torch.equal(product(weights, draw(len(rows), 544)), rows) for rows in here)


@pytest.mark.parametrize("dtype", KINDS)
def test_rows_of_a_matrix_are_its_numbers(dtype: torch.dtype) -> None:
    weights = draw(20, 48).to(dtype)
    matrix = Matrix.over(weights)
    assert torch.equal(matrix.numbers, weights.float())
    assert torch.equal(PackedEmbedding(matrix, 2.0)(torch.tensor([[3, 19]])), 2 * weights[[3, 19]].float()[None])


def test_nan_stays_in_its_row() -> None:
    rows = draw(40, 64)
    rows[3, 40] = float("nan")
    for some in (rows, rows[:5]):
        found = product(draw(16, 64), some)
        assert found[3].isnan().all()
        assert not found[[0, 1, 2, 4]].isnan().any()


@pytest.mark.parametrize("name", mostly_slow(NAMES, quick=("Llama", "Gemma3Text")))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_writes_the_text_of_torch(name: str, temperature: float) -> None:
    model, prompt, sampling = tiny(name, **SIZES), prompt_of(3), Sampling(temperature=temperature, seed=5)
    torchs = Decoder(model, method=Autoregressive(), runtime="plain")
    native = Decoder(model, method=Autoregressive())
    assert native.engine.name == "native"
    assert native.engine.exact
    options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 40}
    expected = torchs.generate(prompt, **options).token_ids
    for label, method in {"plain": Autoregressive(), **methods_for(name, **SIZES)}.items():
        found = native.generate(prompt, method=native.prepare(method), **options).token_ids
        assert found == expected, label
    prompts: list[Any] = [prompt, prompt[::-1], prompt_of(4, 48), prompt[2:]]
    alone = [native.generate(each, **options).token_ids for each in prompts]
    methods: list[str | Method] = ["auto", "lookahead", "autoregressive", "prompt-lookup"]
    together = native.generate(prompts, method=methods, **options)
    assert [result.token_ids for result in together] == alone


FAMILIES: dict[str, dict[str, Any]] = {
    "Phi3": {"sliding_window": 5},  # weights of several matrices in one
    "Granite": {"residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 5.0},
    "Olmo2": {},  # norms behind, none before; of all heads together
    "Exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},  # layers without rotary embedding
    "Glm4": {},  # norms around, rotary embedding of neighbours, and of a part
    "Ernie4_5": {"use_bias": True},
    "GPTNeoX": {},  # an MLP without gates beside attention, whose weights are joined by heads; LayerNorms
    "GPT2": {"n_inner": 96},  # positions in the embeddings, matrices that loading turns
    "Cohere2": {"sliding_window": 5},  # one norm without a bias; neighbours with angles of their own
    "Falcon": {"alibi": False},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Phi": {"vocab_size": 112},  # a bias of the output head, in whole panels
    "StableLm": {"use_parallel_residual": True},
    "Starcoder2": {"sliding_window": 5},
    "Nemotron": {},  # norms that add to their weights
    "GPTBigCode": {"n_inner": 96},
    "Arcee": {},
}


def turned(model: Any) -> Any:
    """The same model, with GPT-2's matrices as loading turns them."""
    return packing.narrow_weights(copy.deepcopy(model))


def family(name: str) -> Any:
    return build(
        name, {**SHAPE, "hidden_size": 64, "intermediate_size": 96, **FAMILIES.get(name, {})}, 0, torch.float32
    )


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, quick=[*FAMILIES][:10]))
def test_other_families_write_the_text_of_torch(name: str) -> None:
    model = family(name)
    native = Decoder(turned(model), method="lookahead", runtime="native")
    torchs = Decoder(model, method="lookahead", runtime="plain")
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        texts = [
            [decoder.generate(prompt_of(seed), sampling=sampling, max_new_tokens=30).token_ids for seed in range(3)]
            for decoder in (native, torchs)
        ]
        assert texts[0] == texts[1]
    narrow = packing.narrow_weights(copy.deepcopy(model).bfloat16().float())
    assert any(isinstance(module, PackedLinear) for module in narrow.modules())
    assert Decoder(narrow, method="autoregressive").engine.name == "native"


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
SCALED = {"rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(("name", "rope"), [("Llama", LONGROPE), ("Ministral3", {**SCALED, "rope_theta": 1e4})])
def test_what_depends_on_positions_in_other_ways_runs_in_torch(name: str, rope: dict[str, Any]) -> None:
    """Small positions do not show it."""
    model = build(name, {**SHAPE, **SIZES, "rope_parameters": rope}, 0, torch.float32)
    assert Decoder(model).engine.name == "plain"


def test_rotary_angles_end_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, some models change all of them. Tables grow, and are computed in parts."""
    monkeypatch.setattr(layers, "POSITIONS", 16)
    monkeypatch.setattr("outpace.models.hf.ANGLES", 50)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = build("Llama", {**SHAPE, **SIZES, "rope_parameters": rope}, 0, torch.float32)
    native, torchs = (Decoder(model, method="autoregressive", runtime=runtime) for runtime in ("native", "plain"))
    for length in (10, 60, 130, 20):
        prompt = prompt_of(2, length)
        found, expected = (decoder.generate(prompt, max_new_tokens=20).token_ids for decoder in (native, torchs))
        assert found == expected


@pytest.mark.parametrize("name", ["Mistral", "GPTNeoX", "GPT2", "OPT"])
def test_the_prompt_has_the_same_bits_in_any_chunks(name: str) -> None:
    text = prompt_of(1, 120)
    engine = engine_for(HFModel(turned(family(name))), "native")
    found = []
    for chunk in (120, 1, 7, 33):
        with engine.pool.sequence(text) as sequence:
            logits = []
            for start in range(0, len(text), chunk):
                count = min(chunk, len(text) - start)
                output = engine.model.forward(engine.pool, engine.pool.place_text(sequence, count), count)
                logits.append(output.logits)
        found.append(torch.cat(logits))
    assert all(torch.equal(logits, found[0]) for logits in found[1:])


def test_a_long_prompt_can_be_interrupted_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompt = Decoder(fresh(), method="autoregressive"), prompt_of(1, 2 * layers.MANY)
    expected = decoder.generate(prompt, max_new_tokens=8).token_ids
    decoder.forget()
    real, calls = library(), list[int]()

    def interrupted(stack: Any, step: Any) -> None:
        calls.append(step._obj.start)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real.decoder_step(stack, step)

    monkeypatch.setattr(layers, "library", lambda: SimpleNamespace(decoder_step=interrupted))
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(prompt, max_new_tokens=8)
    assert calls == [0, 1]
    assert decoder.generate(prompt, max_new_tokens=8).token_ids == expected
    assert decoder.engine.pool.used == decoder.engine.pool.kept


def test_traces_are_checked_without_tolerance() -> None:
    decoder = Decoder(tiny("Llama", **SIZES), method="lookahead")
    prompt, sampling = prompt_of(2), Sampling()
    steps = [*decoder.stream(prompt, sampling=sampling, max_new_tokens=20)]
    receipt = check(decoder, record(decoder, decoder.method, prompt, steps, sampling=sampling, max_new_tokens=20))
    assert receipt.passed
    assert receipt.tolerance == 0


def fresh(name: str = "Llama") -> Any:
    return copy.deepcopy(tiny(name, **SIZES))


def written(decoder: Decoder) -> list[int]:
    return decoder.generate(prompt_of(6), max_new_tokens=24).token_ids


@pytest.mark.parametrize("way", ["in place", "data", "parameter", "norm"])
def test_changed_weights_are_used(way: str) -> None:
    model = fresh()
    decoder = Decoder(model, method="autoregressive")
    before = written(decoder)
    layer = model.model.layers[1]
    linear = layer.post_attention_layernorm if way == "norm" else layer.mlp.up_proj
    with torch.no_grad():
        if way == "data":
            linear.weight.data = -linear.weight.data
        elif way == "parameter":
            linear.weight = nn.Parameter(-linear.weight)
        else:
            linear.weight.mul_(-1.5)
    decoder.forget()
    found = written(decoder)
    assert found == written(Decoder(model, method="autoregressive", runtime="plain"))
    assert found != before
    assert decoder.engine.name == "native"


@pytest.mark.parametrize("way", ["in place", "parameter", "gone"])
def test_changed_biases_of_norms_are_used(way: str) -> None:
    model = family("GPTNeoX")
    decoder = Decoder(model, method="autoregressive")
    before = written(decoder)
    norm = model.gpt_neox.layers[1].input_layernorm
    with torch.no_grad():
        if way == "in place":
            norm.bias.add_(1.0)
        else:
            norm.bias = nn.Parameter(norm.bias + 1.0) if way == "parameter" else None
    decoder.forget()
    found = written(decoder)
    assert found == written(Decoder(model, method="autoregressive", runtime="plain"))
    assert found != before
    assert decoder.engine.name == "native"


def zeroed(*weights: torch.Tensor) -> None:
    for weight in weights:
        with torch.no_grad():
            weight.zero_()


def trained(*weights: torch.Tensor) -> None:
    for number, weight in enumerate(weights):
        with torch.no_grad():
            weight.copy_(draw(*weight.shape, seed=number))


NEUTRAL = {  # weights that show nothing as long as they are zero, and which engine can do without
    "learned positions": ("GPT2", "native", lambda model: [model.transformer.wpe.weight]),
    "a norm": ("Llama", "native", lambda model: [model.model.layers[1].post_attention_layernorm.weight]),
    "queries": ("Glm", "plain", lambda model: _numbers(layer.self_attn.q_proj for layer in model.model.layers)),
    "attention": ("Cohere2", "plain", lambda model: [layer.self_attn.o_proj.weight for layer in model.model.layers]),
    "MLPs": ("GPTNeoX", "plain", lambda model: _numbers(layer.mlp.dense_4h_to_h for layer in model.gpt_neox.layers)),
}


def _numbers(linears: Iterable[nn.Linear]) -> list[torch.Tensor]:
    return [part for linear in linears for part in (linear.weight, linear.bias) if part is not None]


@pytest.mark.parametrize("what", NEUTRAL)
def test_what_weights_do_not_show_at_load_is_not_guessed(what: str) -> None:
    name, engine, of = NEUTRAL[what]
    model = turned(family(name))
    zeroed(*of(model))
    decoder = Decoder(model, method="autoregressive")
    assert decoder.engine.name == engine
    before = written(decoder)
    trained(*of(model))
    found = written(decoder)
    assert found == written(Decoder(model, method="autoregressive", runtime="plain"))
    assert found != before


def test_a_layer_of_each_kind_has_one_form() -> None:
    """Also where one layer shows less than it is off by elsewhere."""
    model = family("Exaone4")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.self_attn.q_norm.weight.mul_(0.03)
    stack = HFModel(model)
    assert stack.compute_natively()
    assert stack._stack is not None
    assert [layer.rotary for layer in stack._stack._layers] == [0, -1, 0, -1]


def test_a_large_row_does_not_hide_the_others() -> None:
    expected = draw(4, 32)
    expected[0] *= 1e6
    found = expected.clone()
    found[2] += 0.1
    assert layers._error(found, expected) > 0.05
    assert layers._error(found, expected, slack=expected.norm()) < 1e-6
    assert layers._error(torch.zeros(2, 8), torch.zeros(2, 8)) == 0  # embedded padding
    assert layers._error(torch.full((2, 8), torch.nan), torch.ones(2, 8)) > 1e6


def test_matrices_of_other_shapes_run_in_torch() -> None:
    model = fresh()
    ends, layer = HFModel(model).ends(), model.model.layers[0]
    layer.self_attn.q_proj = nn.Linear(64, 128, bias=False)  # as with gates in the same matrix
    with pytest.raises(layers.Unusual, match="other shapes"):
        layers.Stack(ends, [layers.Part(layer, "", 0, None)], 64, CONTEXT, lambda count: {})


@pytest.mark.parametrize("tokens", [50, 99, 700])
def test_a_model_may_get_more_tokens(tokens: int) -> None:
    model = fresh()
    decoder = Decoder(model, method="autoregressive")
    written(decoder)
    model.resize_token_embeddings(tokens, mean_resizing=False)
    short = [token % 50 for token in prompt_of(6)]
    expected = Decoder(model, method="autoregressive").generate(short, max_new_tokens=24).token_ids
    assert decoder.generate(short, max_new_tokens=24).token_ids == expected


@pytest.mark.parametrize("how", ["gelu_10", "factor"])
def test_what_is_no_common_mlp_runs_in_torch(how: str) -> None:
    """The first differs from another activation for large states only, the second from no factor when trained."""
    if how == "gelu_10":
        model = build("Llama", {**SHAPE, **SIZES, "hidden_act": how}, 0, torch.float32)
    else:
        model = fresh()
        model.model.layers[2].mlp.register_parameter("factor", nn.Parameter(torch.ones(())))
    assert Decoder(model).engine.name == "plain"


def test_a_softcap_that_is_not_used_is_none() -> None:
    """Gemma 3 keeps the number, and its attention ignores it."""
    cap = {"attn_logit_softcapping": 20.0}
    stack = HFModel(build("Gemma3Text", {**SHAPE, **SIZES, **cap}, 0, torch.float32))
    assert stack.compute_natively()
    assert stack._stack is not None
    assert {layer.softcap for layer in stack._stack._layers} == {0.0}


def test_a_cache_of_another_layout_runs_in_torch() -> None:
    """Falcon's has the keys of every head: C++ and torch could not take turns."""
    falcon = {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "hidden_size": 64}
    assert Decoder(build("Falcon", {**SHAPE, **falcon}, 0, torch.float32)).engine.name == "plain"


def test_hooks_on_all_modules_are_called() -> None:
    model = fresh()
    decoder = Decoder(model, method="autoregressive")
    written(decoder)
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        written(decoder)
    finally:
        handle.remove()
    assert nn.Linear in seen


def test_a_softcap_keeps_small_logits_apart() -> None:
    model = copy.deepcopy(tiny("Gemma2", tie_word_embeddings=False, **SIZES))
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    native, torchs = (Decoder(model, method="autoregressive", runtime=runtime) for runtime in ("native", "plain"))
    text = prompt_of(4, 40)
    torch.testing.assert_close(_logits(native, text), _logits(torchs, text), rtol=1e-4, atol=1e-8)


def transposed(model: Any) -> None:
    linear = model.model.layers[1].self_attn.q_proj
    linear.weight.data = linear.weight.data.T


def biased(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.bias = nn.Parameter(draw(SIZES["intermediate_size"]))


def hooked(model: Any) -> None:
    model.model.layers[2].mlp.register_forward_hook(lambda _module, _given, found: found * -2)


@pytest.mark.parametrize("change", [transposed, biased, hooked])
def test_what_cannot_be_computed_any_more_runs_in_torch(change: Any) -> None:
    model = fresh()
    decoder = Decoder(model, method="autoregressive")
    before = written(decoder)
    change(model)
    found = written(decoder)
    assert found == written(Decoder(model, method="autoregressive", runtime="plain"))
    assert found != before
    known = decoder.engine
    assert (known.name, known.exact) == (("native", True) if change is biased else ("plain", False))
    assert written(decoder) == found
    assert decoder.engine is known


def test_embeddings_of_another_dtype_are_an_error() -> None:
    model = copy.deepcopy(tiny("Llama", tie_word_embeddings=False, **SIZES))
    decoder = Decoder(model, method="autoregressive")
    written(decoder)
    model.model.embed_tokens.bfloat16()
    with pytest.raises(ModelError, match=r"embeddings are .* in torch.bfloat16.*make a new Decoder"):
        written(decoder)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"])
def test_nan_is_an_error(name: str, part: str) -> None:
    """In scores, behind a softmax, and under a softcap."""
    model = fresh(name)
    decoder = Decoder(model, method="autoregressive")
    with torch.no_grad():
        model.model.layers[1].get_submodule(part).weight[3, 5] = float("nan")
    assert decoder.engine.name == "native"
    with pytest.raises(InvalidLogits, match="NaN"):
        written(decoder)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.device("meta")])
def test_torchs_defaults_do_not_matter(default: Any) -> None:
    decoder = Decoder(fresh(), method="autoregressive")
    weights, bias, rows = draw(20, 16), draw(20), draw(3, 16)
    expected, products = written(decoder), product(weights, rows, bias)
    before = torch.get_default_dtype()
    with default if isinstance(default, torch.device) else nullcontext():
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        try:
            assert torch.equal(product(weights, rows, bias), products)
            if isinstance(default, torch.dtype):
                assert written(decoder) == expected
        finally:
            torch.set_default_dtype(before)


def test_flushing_denormal_numbers_does_not_matter() -> None:
    weights, rows = 1e-20 * draw(160, 640), 1e-20 * draw(3, 640)
    expected = product(weights, rows)
    assert expected.abs().max() < 1e-37
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush them")
    try:
        found = [product(weights, rows) for _ in range(20)]
        assert (torch.tensor([1e-30]) * 1e-10).item() == 0  # it is set again
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("place", ["model.layers.0.mlp.up_proj", "model.layers.1", "model.norm"])
def test_a_model_with_hooks_runs_in_torch(place: str) -> None:
    model = fresh()
    called: list[int] = []
    model.get_submodule(place).register_forward_hook(lambda *_: called.append(1))
    decoder = Decoder(model, method="autoregressive")
    assert decoder.engine.name == "plain"
    written(decoder)
    assert called
    with pytest.raises(InputError, match="no layers like those"):
        Decoder(model, runtime="native")


def test_what_the_runtime_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="computes in float32, and the model is in float64"):
        Decoder(tiny("Llama", dtype=torch.float64, **SIZES), runtime="native")
    with pytest.raises(InputError, match="no layers like those"):
        Decoder(tiny("GPT2"), runtime="native")
    monkeypatch.setattr(choose, "compiler", lambda: None)
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler"):
        Decoder(tiny("Llama", **SIZES), runtime="native")
    assert Decoder(tiny("Llama", **SIZES)).engine.name == "plain"


def test_code_that_cannot_be_built_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise InputError("g++ failed with status 1 (no such file).")

    monkeypatch.setattr("outpace.models.layers.library", fail)
    with pytest.warns(OutpaceWarning, match=r"torch is slower: g\+\+ failed"):
        decoder = Decoder(fresh(), method="autoregressive")
    assert decoder.engine.name == "plain"
    with pytest.raises(InputError, match="failed with status 1"), pytest.warns(OutpaceWarning):
        Decoder(fresh(), runtime="native")


def test_an_engine_whose_bits_depend_on_the_batch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.runtime.exact.ExactEngine.is_exact", lambda engine: False)
    decoder = Decoder(fresh(), method="autoregressive")
    assert decoder.engine.name == "plain"
    assert decoder.model._stack is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_fit_16_bits_are_kept_in_16(dtype: torch.dtype, tmp_path: Path) -> None:
    with torch.no_grad():
        model = fresh("Gemma3Text").to(dtype).float()
    folder = saved("Llama", tmp_path)  # for its tokenizer
    model.save_pretrained(folder)
    narrow = outpace.load(folder, method="autoregressive")
    full = outpace.load(folder, method="autoregressive", weights="float32")
    kinds = {module.matrix.kind for module in _modules(narrow) if isinstance(module, PackedLinear | PackedEmbedding)}
    assert kinds == {NUMBERS[dtype]}
    assert not any(isinstance(module, nn.Linear) for module in _modules(narrow))
    assert {narrow.engine.name, full.engine.name} == {"native"}
    assert written(narrow) == written(full)
    rows = prompt_of(5)
    logits = [_logits(decoder, rows) for decoder in (narrow, full)]
    assert torch.equal(*logits)


def _modules(decoder: Decoder) -> Any:
    return decoder._given.modules()


def _logits(decoder: Decoder, text: list[int]) -> torch.Tensor:
    engine = decoder.engine
    with engine.pool.sequence(text) as sequence:
        rows = engine.pool.place_text(sequence, len(text))
        return engine.model.forward(engine.pool, rows, len(text)).logits


def test_other_numbers_stay_in_32_bits() -> None:
    model = packing.narrow_weights(fresh())
    assert not any(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())
    with torch.no_grad():
        up = model.model.layers[0].mlp.up_proj
        up.weight.copy_(up.weight.bfloat16())
    packing.narrow_weights(model)
    assert model.model.layers[0].mlp.up_proj.matrix.kind == Kind.BF16
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear
    expected = Decoder(tiny("Llama", **SIZES), method="autoregressive")
    assert written(Decoder(model, method="autoregressive")) != [] != written(expected)


@pytest.mark.parametrize("name", ["Mixtral", "GPTJ"])
def test_other_layers_stay_in_32_bits(name: str) -> None:
    """torch is faster with those."""
    model = copy.deepcopy(tiny(name, hidden_size=64)).bfloat16().float()
    assert packing.narrow_weights(model) is model
    assert not any(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())


def test_weights_of_another_kind_are_left_alone() -> None:
    """As quantization libraries have them."""
    model = fresh().bfloat16().float()
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = nn.Parameter(layer.up_proj.weight.to(torch.float8_e4m3fn), requires_grad=False)
    packing.narrow_weights(model)
    assert type(layer.gate_proj) is nn.Linear
    assert layer.up_proj.weight.dtype == torch.float8_e4m3fn


def test_narrow_layers_that_compute_something_else_run_in_torch() -> None:
    def altered() -> Any:
        model = fresh().bfloat16().float()
        mlp = model.model.layers[1].mlp
        forward = mlp.forward
        mlp.forward = lambda states: forward(states).abs()
        return model

    expected = written(Decoder(altered(), method="autoregressive"))
    model = packing.narrow_weights(altered())
    decoder = Decoder(model, method="autoregressive")
    assert decoder.engine.name == "plain"
    assert any(isinstance(module, PackedLinear) for module in _modules(decoder))
    assert written(decoder) == expected
    assert written(Decoder(model, method="autoregressive", exact=True)) == expected


def test_narrow_weights_are_for_cpus_in_float32(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="are for CPUs in float32"):
        load(str(tmp_path), dtype="bfloat16", weights="narrow")


def test_raw_rows_may_be_numbers_or_bytes() -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float16)
    for raw in (numbers, numbers.view(np.uint8)):
        assert np.array_equal(Matrix(raw, Kind.F16).numbers.numpy(), numbers.astype(np.float32))
