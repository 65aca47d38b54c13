"""Runtimes: whatever executes the rows, the text is plain decoding's. Steps run uncaptured here, as there is no GPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from outpace import Autoregressive, Decoder, Jacobi, Lookahead, Method, OutpaceWarning, PromptLookup, Sampling
from outpace.draft import Draft, chain
from outpace.errors import InputError, UnknownNameError, UnsupportedModel
from outpace.models.adapter import FixedRows
from outpace.models.hf import HFModel
from outpace.pool import Pool
from outpace.runtime import choose, graphs
from outpace.runtime.choose import engine_for
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.plain import Work

from .models import ARCHITECTURES, VOCABULARY, mostly_slow, tiny

METHODS = (
    Jacobi(window=5),
    PromptLookup(rows=12),
    Lookahead(window=5, ngram=4, guesses=5),
    Lookahead(window=2, ngram=3, guesses=2),
)
BY_LISTS = [name for name in ARCHITECTURES if name not in ("GPTJ", "GptOss", "Falcon", "StableLm")]
PROMPT = [5, 9, 5, 9, 7, 3] * 4


def decoder_on(engine: GraphEngine, model: Any, whole_steps: bool = True) -> Decoder:
    decoder = Decoder(model)
    engine.whole_steps = whole_steps
    decoder.engine = engine
    return decoder


@pytest.mark.parametrize(
    ("name", "exact_rows"),
    mostly_slow(
        [*((name, 0) for name in BY_LISTS), ("Llama", 8), ("Gemma3Text", 8), ("GPT2", 8)],
        [*((name, 0) for name in ("Llama", "Gemma2", "GPT2", "Mistral", "Mixtral")), ("Llama", 8), ("Gemma3Text", 8)],
    ),
)
def test_fixed_rows_write_plain_decodings_text(name: str, exact_rows: int) -> None:
    check_fixed_rows(name, exact_rows, Sampling(), [Autoregressive(), *METHODS])


@pytest.mark.parametrize("name", mostly_slow(BY_LISTS))
def test_fixed_rows_write_plain_decodings_sample(name: str) -> None:
    check_fixed_rows(name, 0, Sampling(temperature=0.8, top_p=0.95, seed=3), METHODS[1:3])


def check_fixed_rows(name: str, exact_rows: int, sampling: Sampling, methods: Sequence[Method]) -> None:
    model = tiny(name)
    adapted = HFModel(model)
    assert adapted.lists
    decoder = decoder_on(GraphEngine(adapted, compiled=False, exact_rows=exact_rows, capacity=256), model)
    expected = Decoder(model).generate(PROMPT, method=Autoregressive(), sampling=sampling, max_new_tokens=12)
    for method in methods:
        found = decoder.generate(PROMPT, method=method, sampling=sampling, max_new_tokens=12)
        assert found.token_ids == expected.token_ids
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize(
    ("capability", "triton", "lists", "words"),
    [
        ((7, 5), True, True, "a T4 has compute capability 7.5; 8.0 or later is needed"),
        ((9, 0), False, True, "triton is not installed"),
        ((9, 0), True, False, "it has attention that slot lists cannot express"),
    ],
)
def test_why_there_are_no_graphs_on_a_gpu_is_said(
    capability: tuple[int, int], triton: bool, lists: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, lists=lists, name="it")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a T4")
    monkeypatch.setattr(choose, "find_spec", lambda name: triton or None)
    with pytest.raises(InputError, match=f"runtime='graphs' cannot be used: {words}. Use runtime='plain'."):
        engine_for(model, "graphs")
    with pytest.raises(InputError, match=f"exact mode needs CUDA graphs: {words}."):
        engine_for(model, exact=True)
    with pytest.raises(InputError, match="exact mode needs runtime='graphs', not 'plain'"):
        engine_for(model, "plain", exact=True)


def test_models_that_lists_cannot_express_say_so() -> None:
    assert not HFModel(tiny("GptOss")).lists  # attention sinks
    assert not HFModel(tiny("Llama", dtype=torch.float64)).lists


def test_sequences_take_turns() -> None:
    """The device holds one sequence's list of slots; another one's step must not leave it stale."""
    model = tiny("Llama")
    engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    alone = Decoder(model).generate(PROMPT, max_new_tokens=12).token_ids
    decoder = decoder_on(engine, model)
    first, second = (decoder.stream(PROMPT, method=method, max_new_tokens=12) for method in METHODS[1:3])
    texts: list[list[int]] = [[], []]
    for _ in range(12):
        for text, stream in zip(texts, (first, second), strict=True):
            text += getattr(next(stream, None), "tokens", ())
    assert texts == [alone, alone]


@given(st.data())
def test_lists_and_bits_say_what_the_mask_says(data: Any) -> None:
    rows = data.draw(st.integers(1, 70))
    parents = [-1, *(data.draw(st.integers(0, row - 1)) for row in range(1, rows))]
    pool = Pool(capacity=8)
    with pool.sequence(range(data.draw(st.integers(1, 9)))) as sequence:
        placed = pool.place(sequence, Draft((0,) * rows, tuple(parents), rows, ("",) * rows))
        tails, bits = placed.tails(), placed.bits()
        for row in range(len(placed)):
            seen = placed.among[row].nonzero()[0]
            assert tails[row, : len(seen)].tolist() == placed.numbers[2][seen].tolist()
            assert [
                other for other in range(len(placed)) if bits[row, other // 64] >> (other % 64) & 1
            ] == seen.tolist()


def test_segments_make_a_whole() -> None:
    engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, capacity=512)
    with engine.pool.sequence([3, 1, 4, 1, 5]) as sequence:
        whole = engine.score(sequence, chain(5, [9, 2], "")).logits.clone()
        engine.pool.free(sequence.drafted)
        sequence.drafted = []
        rows = engine.pool.place(sequence, chain(5, [9, 2], ""))
        middle = engine.climb(sequence, rows, 0, 0, 3).hidden.clone()
        assert torch.equal(engine.climb(sequence, rows, 3, 3, None, middle).logits, whole)


def test_drafts_that_reach_further_than_exact_attention() -> None:
    """They are computed in several forwards, alone and beside another text, and by every method that makes them."""
    model = tiny("Llama")
    engine = GraphEngine(HFModel(model), compiled=False, exact_rows=16, capacity=512)
    plain, rng = Decoder(model).engine, random.Random(0)
    drafts = [chain(3, [row % VOCABULARY for row in range(5, 75)], "")]
    parents = [-1, *(rng.randrange(max(0, row - 2), row) for row in range(1, 100))]
    tokens = (3, *(rng.randrange(VOCABULARY) for _ in parents[1:]))
    drafts.append(Draft(tokens, tuple(parents), len(tokens), ("",) * len(tokens)))
    texts = [[5, 9, 7, 3], [8, 8, 3]]
    found: list[list[Any]] = []
    for each in (engine, plain):
        with each.pool.sequence(texts[0]) as first, each.pool.sequence(texts[1]) as second:
            both = (first, second)
            each.run([Work(each, text, each.pool.place_text(text, len(text.tokens) - 1), 0) for text in both])
            works = [
                Work(each, text, each.pool.place(text, draft), len(draft) - 3)
                for text, draft in zip(both, drafts, strict=True)
            ]
            found.append([output._replace(found=None) for output in (*each.run(works), works[1].do())])  # type: ignore
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits)
        torch.testing.assert_close(ours.hidden, theirs.hidden)
    decoder = decoder_on(engine, model)
    expected = Decoder(model).generate(PROMPT, method=Autoregressive(), max_new_tokens=9).token_ids
    for method in (Jacobi(window=40), PromptLookup(rows=64, depth=50)):
        assert decoder.generate(PROMPT, method=method, max_new_tokens=9).token_ids == expected
        assert engine.program_for(method, Sampling()) is None
    assert engine.program_for(Jacobi(window=31), Sampling()) is not None


def test_exact_mode_checks_itself() -> None:
    engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, exact_rows=8, capacity=512)
    right = engine.model.forward
    noise = 0.0

    def forward(pool: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        output = right(pool, rows, *args, **kwargs)
        if isinstance(rows, FixedRows) and len(
            output.logits
        ):  # logits by the row's token alone, and a little by what is beside the row
            logits = rows.tokens[:, None] * torch.ones_like(output.logits)
            output = output._replace(logits=logits + noise * rows.lists.tree.float().std())
        return output

    engine.model.forward = forward  # type: ignore[method-assign]
    assert not engine.is_exact()  # layers that are not compiled need one size
    engine.use_one_size()
    assert engine.sizes == [8]
    assert engine.is_exact()
    noise = 1e-5
    assert not engine.is_exact()


@pytest.mark.parametrize("wrong", [False, True])
def test_exact_mode_tries_texts_together(wrong: bool) -> None:
    """Where a text beside another has other bits than alone, texts take turns."""
    engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, exact_rows=8, capacity=512)
    right = engine.model.forward

    def forward(pool: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        output = right(pool, rows, *args, **{**kwargs, "compiled": False})
        if isinstance(rows, FixedRows) and len(output.logits):
            output = output._replace(
                logits=rows.tokens[:, None] + 1e-3 * (wrong and rows.lists.packed > 0) + 0 * output.logits
            )
        return output

    engine.model.forward = forward  # type: ignore[method-assign]
    engine._compile, engine._prepared = True, {False, True}  # as if layers were compiled
    assert engine.is_exact()
    assert engine.most_texts == (1 if wrong else graphs.TEXTS[-1])
    assert engine.name.endswith("one text at a time") == wrong


@pytest.mark.parametrize(("family", "kinds"), [("Llama", (3,)), ("Gemma2", (2, 3))])
def test_kernels_of_every_kind_of_attention_are_compiled_ahead(
    family: str, kinds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HFModel(tiny(family))
    assert model.kinds == kinds
    engine = GraphEngine(model, compiled=False, capacity=256)
    seen = set[tuple[int, int]]()

    class Step:
        def __init__(self, *given: Any) -> None:
            self.layers = given[5]

        def compute(self) -> None:
            seen.add(self.layers)

        def warm_up(self) -> None:
            assert self.layers == (0, model.layers)

    monkeypatch.setattr(graphs, "_Graph", Step)
    monkeypatch.setattr(engine, "_compile_layers", lambda: None)
    engine._prepare(8, 1024, (0, model.layers), 0)
    assert seen == {(layer, layer + 1) for layer in {*model.kinds, model.layers - 1}}


def test_exact_mode_computes_as_many_rows_outside_of_layers_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    engine = GraphEngine(HFModel(model), compiled=False, exact_rows=8, capacity=512)
    seen: list[int] = []
    norm = engine.model._mirror.get_decoder().norm
    run = norm.forward._run
    monkeypatch.setattr(norm.forward, "_run", lambda states: seen.append(states.shape[-2]) or run(states))
    with engine.pool.sequence([3, 1, 4]) as sequence:
        engine.score(sequence, chain(4, (), ""))
        engine.pool.free(sequence.drafted)
        sequence.drafted = []
        seen.clear()
        for count in (0, 1, 7):
            exact = engine.score(sequence, chain(4, [*range(count)], "")).logits
            engine.pool.free(sequence.drafted)
            sequence.drafted = []
    assert set(seen) == {256}
    text = torch.tensor([[3, 1, 4, *range(7)]])
    torch.testing.assert_close(exact, model(text).logits[0, 2:])  # the model itself has none of it
    assert "forward" not in vars(model.model.norm)


@pytest.fixture
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are traced, and run as they are."""
    compile_for_real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile_for_real(*args, **kwargs, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_without_inductor")
def test_layers_of_a_kind_share_one_compilation() -> None:
    model = tiny("Qwen3")
    adapted = HFModel(model)
    adapted.fuse()
    try:
        decoder = decoder_on(GraphEngine(adapted, capacity=1024), model)
        expected = Decoder(model).generate(PROMPT, method=Autoregressive(), max_new_tokens=16).token_ids
        for method in METHODS:
            assert decoder.generate(PROMPT, method=method, max_new_tokens=16).token_ids == expected
        for count in (3, 9):  # rows of several texts too
            found = decoder.generate([PROMPT] * count, method=[*METHODS, *METHODS, *METHODS][:count], max_new_tokens=16)
            assert all(result.token_ids == expected for result in found)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    finally:
        adapted.unfuse()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_compiled_layers_write_the_same_text(name: str) -> None:
    model = tiny(name)
    decoder = Decoder(model, runtime="compiled")
    expected = Decoder(model).generate(PROMPT, method=Autoregressive(), max_new_tokens=16).token_ids
    for method in (Autoregressive(), *METHODS):
        assert decoder.generate(PROMPT, method=method, max_new_tokens=16).token_ids == expected


def test_joined_weights_are_the_models_own_and_come_apart_again() -> None:
    model = tiny("Qwen2", seed=4)  # with biases
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = torch.tensor([PROMPT])
    logits = model(ids).logits
    adapted = HFModel(model)
    text = Decoder(model).generate(PROMPT, max_new_tokens=12).token_ids
    assert adapted.fuse() == 3 * model.config.num_hidden_layers
    assert adapted.fuse() == 3 * model.config.num_hidden_layers  # nothing is left to join
    attention = model.model.layers[0].self_attn
    storage = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == storage
    engine = GraphEngine(adapted, compiled=False, capacity=512)
    assert decoder_on(engine, model).generate(PROMPT, max_new_tokens=12).token_ids == text
    assert torch.equal(model(ids).logits, logits)
    adapted.unfuse()
    assert attention.v_proj.weight.untyped_storage().data_ptr() != storage
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


class Eighths(torch.Tensor):
    """Weights as a quantizing library has them: small whole numbers, of a type that products alone know."""

    whole: torch.Tensor

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Eighths:
        made: Eighths = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.whole = weight.mul(8).round().to(torch.int8)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], Eighths):
            return F.linear(args[0], args[1].whole.float() / 8, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of quantized weights")


def test_quantized_weights_stay_as_they_are() -> None:
    model = copy.deepcopy(tiny("Llama"))
    for part in model.model.layers.modules():
        if isinstance(part, nn.Linear):
            part._parameters["weight"] = cast(nn.Parameter, Eighths(part.weight.data))
    adapted = HFModel(model)
    text = Decoder(adapted).generate(PROMPT, max_new_tokens=12).token_ids
    assert adapted.fuse() == 0
    assert adapted.replace_products() == 1  # the output head
    for method in METHODS:
        assert Decoder(adapted).generate(PROMPT, method=method, max_new_tokens=12).token_ids == text
    with pytest.raises(UnsupportedModel, match=r"weights of type Eighths\. Use exact=False"):
        engine_for(adapted, exact=True)
    assert Decoder(adapted).generate(PROMPT, max_new_tokens=12).token_ids == text


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"runtime": "grafs"}, UnknownNameError, "Did you mean 'graphs'"),
        ({"runtime": "graphs"}, InputError, "the model is on cpu"),
        ({"exact": True, "runtime": "graphs"}, InputError, "on a CPU exact mode needs runtime='auto'"),
    ],
)
def test_what_a_machine_cannot_do_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        engine_for(HFModel(tiny("Llama")), **options)


@pytest.mark.usefixtures("_without_inductor")
def test_a_model_that_cannot_be_captured_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, memory: Any) -> None:
        raise RuntimeError("no capture today\nand more lines")

    monkeypatch.setattr(graphs._Graph, "capture", fail)
    model = tiny("Llama")
    adapted = HFModel(model)
    decoder = decoder_on(GraphEngine(adapted, capacity=512), model, whole_steps=False)
    with pytest.warns(OutpaceWarning) as warned:
        text = decoder.generate(PROMPT, method=Lookahead(), max_new_tokens=12).token_ids
    ours = [str(warning.message) for warning in warned if warning.category is OutpaceWarning]
    assert [message.partition(" (no")[0] for message in ours] == [
        f"{adapted.name}: layers cannot be compiled",
        f"{adapted.name}: steps cannot be captured in a CUDA graph",
    ]
    assert text == Decoder(model).generate(PROMPT, max_new_tokens=12).token_ids


def test_without_memory_for_large_graphs_small_ones_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(self: Any, memory: Any) -> None:
        if self.size > 16:
            raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(graphs._Graph, "capture", scarce)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = tiny("Llama")
    engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    with pytest.warns(OutpaceWarning, match=r"No memory for a graph of \d+ rows over 1024 tokens; 1 of 1024 MiB"):
        text = (
            decoder_on(engine, model, whole_steps=False)
            .generate(PROMPT, method=Lookahead(), max_new_tokens=12)
            .token_ids
        )
    assert engine.sizes == [2, 8, 16, 32]  # 64 was tried, so what is larger is not
    assert text == Decoder(model).generate(PROMPT, max_new_tokens=12).token_ids
    assert all(0 <= token < VOCABULARY for token in text)
