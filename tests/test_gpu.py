"""The CUDA runtime against the plain one. Runs where there is a GPU: `python -m pytest tests/test_gpu.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace import (
    AdaDecode,
    Autoregressive,
    Decoder,
    DraftModel,
    Jacobi,
    Lookahead,
    PromptLookup,
    Sampling,
    SelfSpeculative,
    Swift,
)
from outpace.draft import Draft, Verdict, chain
from outpace.heads import KINDS
from outpace.methods import METHODS as METHODS_BY_NAME
from outpace.models.checking import disagreement
from outpace.models.gated import GatedMLP
from outpace.models.hf import HFModel
from outpace.models.launching import fetches_tiles
from outpace.runtime.choose import engine_for
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.plain import Engine

from .test_adadecode import random_exits
from .test_heads import random_heads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def small_llama(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=2048,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval().to("cuda", dtype)


def one_by_one(engine: Engine, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The logits after the prompt and after each token of the answer but the last."""
    found = []
    with engine.pool.sequence(prompt) as sequence:
        for token in answer:
            draft = chain(sequence.tokens[-1], (), "")
            found.append(engine.score(sequence, draft).logits[0].clone())
            engine.pool.keep(sequence, draft, Verdict((0,), (token,)))
    return torch.stack(found)


def hidden_path(root: int, answer: list[int], rows: int, rng: random.Random) -> tuple[Draft, list[int]]:
    """A random tree of `rows` rows in which some path carries the answer, and the rows of that path."""
    tokens, parents, path = [root], [-1], [0]
    while len(tokens) < rows:
        left = len(answer) - len(path)
        if left and rng.random() < left / (rows - len(tokens)):
            parents.append(path[-1])
            path.append(len(tokens))
            tokens.append(answer[len(path) - 2])
        else:
            parents.append(rng.randrange(len(tokens)))
            tokens.append(rng.randrange(2048))
    return Draft(tuple(tokens), tuple(parents), rows, ("",) * rows), path


def in_a_tree(engine: Engine, prompt: list[int], answer: list[int], rows: int, rng: random.Random) -> torch.Tensor:
    with engine.pool.sequence(prompt) as other, engine.pool.sequence(prompt) as sequence:
        if rng.random() < 0.5:  # so that slots are not in order
            engine.score(other, chain(prompt[-1], rng.choices(range(2048), k=5), ""))
        draft, path = hidden_path(prompt[-1], answer, rows, rng)
        return engine.score(sequence, draft).logits[path].clone()


@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_compute_what_forwards_compute(compiled: bool) -> None:
    model = HFModel(small_llama(torch.float32))
    if compiled:
        model.fuse()
    plain, graphs = Engine(model), GraphEngine(model, compiled=compiled, capacity=2048)
    rng = random.Random(0)
    for length in (1, 60, 700):
        prompt, answer = rng.choices(range(2048), k=length), rng.choices(range(2048), k=6)
        expected = one_by_one(plain, prompt, answer)
        torch.testing.assert_close(one_by_one(graphs, prompt, answer), expected, rtol=1e-3, atol=1e-3)
        for rows in (6, 20, 100, 300):
            found = in_a_tree(graphs, prompt, answer, rows, rng)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_products_of_our_own_change_no_more_than_rounding_does() -> None:
    model = HFModel(small_llama(torch.bfloat16))
    rng = random.Random(0)
    prompt, answer = rng.choices(range(2048), k=60), rng.choices(range(2048), k=6)
    expected = one_by_one(Engine(model), prompt, answer)
    model.fuse()
    model.replace_products()
    joined = any(isinstance(module, GatedMLP) for module in model._mirror.modules())
    assert joined == fetches_tiles(model.device)
    engine = GraphEngine(model, capacity=2048)
    for rows in (6, 20, 50, 100, 200, 300):
        assert disagreement(in_a_tree(engine, prompt, answer, rows, rng), expected) < 0.05


def test_a_step_has_the_same_bits_every_time() -> None:
    """Kernels that start before those before them are done must wait for what they read."""
    engine = engine_for(HFModel(small_llama(torch.bfloat16)), "graphs", exact=False)
    rng = random.Random(0)
    prompt = rng.choices(range(2048), k=300)
    for rows in (1, 20, 50, 100):
        draft, _ = hidden_path(prompt[-1], [], rows, rng)
        found = []
        with engine.pool.sequence(prompt) as sequence:
            for _ in range(50):
                found.append(engine.score(sequence, draft).logits.clone())
                engine.pool.free(sequence.drafted[-rows:])
                sequence.slots += sequence.drafted[:-rows]
                sequence.drafted = []
        assert all(torch.equal(logits, found[1]) for logits in found[2:])


def test_a_forward_without_a_graph_waits_for_no_compiler_and_plans_no_attention() -> None:
    model = HFModel(small_llama(torch.bfloat16))
    model.fuse()
    model.replace_products()
    engine = Engine(model)
    used = torch.backends.cuda.cudnn_sdp_enabled()
    with (
        engine.pool.sequence(list(range(40))) as sequence,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiled,
    ):
        engine.score(sequence, chain(39, range(9), ""))
        torch.cuda.synchronize()
    kernels = {event.key for event in profiled.key_averages()}
    assert [name for name in kernels if "fmha" in name]  # torch's attention that keeps no scores
    assert not [name for name in kernels if name in ("product", "gated", "gate") or "cudnn" in name]
    assert torch.backends.cuda.cudnn_sdp_enabled() == used
    assert model.norm == "norm"  # what such a forward shows


METHODS = (Jacobi(window=5), PromptLookup(), Lookahead(), Lookahead(window=3, ngram=3, guesses=4))


@pytest.mark.parametrize("runtime", ["plain", "graphs"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=5)])
def test_every_method_writes_the_same_text(runtime: str, sampling: Sampling) -> None:
    decoder = Decoder(small_llama(torch.float32), runtime=runtime, exact=False)
    prompt = [5, 9, 5, 9, 7] * 9
    options = {"sampling": sampling, "max_new_tokens": 100}
    plain = decoder.generate(prompt, method=Autoregressive(), **options)
    for method in METHODS:
        assert decoder.generate(prompt, method=method, **options).token_ids == plain.token_ids
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize("runtime", ["plain", "graphs"])
def test_each_text_of_a_batch_is_the_one_it_is_alone(runtime: str) -> None:
    model = small_llama(torch.float32)
    decoder = Decoder(model, runtime=runtime, exact=False)
    heads = [METHODS_BY_NAME[kind](heads=random_heads(kind, model), rows=24) for kind in ("medusa", "amphista")]
    methods = [decoder.prepare(method) for method in (Autoregressive(), *METHODS, *heads, SelfSpeculative(length=3))]
    rng = random.Random(1)
    for count in (2, 7, 16, 40):
        prompts = [rng.choices(range(2048), k=rng.choice([3, 40, 600])) for _ in range(count)]
        chosen = [methods[place % len(methods)] for place in range(count)]
        samplings = [rng.choice([Sampling(), Sampling(temperature=0.9, seed=place)]) for place in range(count)]
        found = decoder.generate(prompts, method=chosen, sampling=samplings, max_new_tokens=24)
        for result, prompt, sampling in zip(found, prompts, samplings, strict=True):
            alone = decoder.generate(prompt, method=Autoregressive(), sampling=sampling, max_new_tokens=24)
            assert result.token_ids == alone.token_ids, result.method
    assert decoder.engine.pool.held == 0


def test_batches_in_exact_mode() -> None:
    decoder = Decoder(small_llama(torch.bfloat16), exact=True)
    prompts = [[5, 9, 5, 9, 7] * 9, [3, 1, 4], [5, 9, 5, 9] * 30]
    found = decoder.generate(prompts, method=[*METHODS[:3]], max_new_tokens=40)
    alone = [decoder.generate(prompt, method=Autoregressive(), max_new_tokens=40) for prompt in prompts]
    assert [result.token_ids for result in found] == [result.token_ids for result in alone]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=5)])
def test_heads_draft_in_graphs(kind: str, sampling: Sampling) -> None:
    model = small_llama(torch.float32)
    plain, graphs = Decoder(model, runtime="plain"), Decoder(model, runtime="graphs", exact=False)
    method = METHODS_BY_NAME[kind](heads=random_heads(kind, model), rows=24)
    prompt = [5, 9, 5, 9, 7] * 9
    options = {"sampling": sampling, "max_new_tokens": 100}
    expected = plain.generate(prompt, method=Autoregressive(), **options)
    steps = [list(decoder.stream(prompt, method=decoder.prepare(method), **options)) for decoder in (plain, graphs)]
    for found in steps:
        assert [token for step in found for token in step.tokens] == expected.token_ids
    assert graphs.engine._programs
    assert any("head" in source for step in steps[1] for source in step.draft.sources)


def test_segments_make_a_whole() -> None:
    model = HFModel(small_llama(torch.float32))
    engine = GraphEngine(model, compiled=False)
    with engine.pool.sequence([3, 1, 4, 1, 5]) as sequence:
        whole = engine.score(sequence, chain(5, [9, 2], "")).logits.clone()
        engine.pool.free(sequence.drafted)
        sequence.drafted = []
        rows = engine.pool.place(sequence, chain(5, [9, 2], ""))
        middle = engine.climb(sequence, rows, 0, 0, 3).hidden.clone()
        found = engine.climb(sequence, rows, 3, 3, None, middle).logits
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=5)])
def test_exact_mode_writes_the_same_text_in_bfloat16(sampling: Sampling) -> None:
    decoder = Decoder(small_llama(torch.bfloat16), exact=True)
    prompt = [5, 9, 5, 9, 7] * 60
    options = {"sampling": sampling, "max_new_tokens": 100}
    plain = decoder.generate(prompt, method=Autoregressive(), **options)
    for method in (*METHODS, AdaDecode("original", exits="2", control="tree"), DraftModel(small_llama(torch.bfloat16))):
        assert decoder.generate(prompt, method=decoder.prepare(method), **options).token_ids == plain.token_ids


def test_exact_mode_is_the_default_where_it_is_cheap() -> None:
    model = HFModel(small_llama(torch.bfloat16))
    engine = engine_for(model)
    assert engine.exact == fetches_tiles(model.device)
    assert engine.mode == "exact" or "tensor descriptors" in engine.mode


def test_a_model_that_fails_the_test_of_exact_mode_runs_as_in_fast_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GraphEngine.is_exact
    monkeypatch.setattr(GraphEngine, "is_exact", lambda self: right(self) and False)
    fast, fallen = (engine_for(HFModel(small_llama(torch.bfloat16)), exact=exact) for exact in (False, None))
    assert not fallen.exact
    prompt, answer = [5, 9, 5, 9, 7] * 9, [3, 1, 4]
    assert torch.equal(one_by_one(fallen, prompt, answer), one_by_one(fast, prompt, answer))


@pytest.mark.parametrize(("rows", "heads", "key_heads", "size"), [(32, 12, 4, 64), (32, 8, 2, 128), (16, 6, 6, 64)])
def test_exact_attention_has_the_same_bits_wherever_the_text_ends(
    rows: int, heads: int, key_heads: int, size: int
) -> None:
    """A chain of rows against one row at a time, over all borders of blocks and splits up to 1,500 tokens."""
    torch.manual_seed(0)
    ahead, scratch, options = rows - 3, 1600, (True, 0, size**-0.5, 0.0)
    keys, values = torch.randn(2, 1, key_heads, scratch + 1, size, dtype=torch.bfloat16, device="cuda").unbind()
    query = 2 * torch.randn(1, heads, 1600, size, dtype=torch.bfloat16, device="cuda")
    text = torch.randperm(1600, device="cuda")

    def attend(past: int, count: int) -> torch.Tensor:
        positions = torch.full((rows,), past, device="cuda")
        positions[:count] += torch.arange(count, device="cuda")
        tree = torch.full((rows, 64), scratch, device="cuda")
        tree[:count, :count] = text[past : past + count]
        slots = torch.full((rows,), scratch, device="cuda")
        slots[:count] = text[past : past + count]
        length = torch.tensor([past], device="cuda")
        unused = torch.zeros(1, dtype=torch.long, device="cuda")
        lists = (text[None], length, unused, unused, positions, slots, tree, 2048, 0)
        return torch.ops.outpace.slot_attention(query[:, :, positions], keys, values, *lists, *options)[0, :count]

    alone = torch.stack([attend(past, 1)[0] for past in range(1500 + ahead)])
    for past in range(0, 1500, 7):
        assert torch.equal(attend(past, ahead), alone[past : past + ahead]), past


@pytest.mark.parametrize("compiled", [False, True])
def test_the_last_norm_has_the_same_bits_for_any_number_of_rows_in_exact_mode(compiled: bool) -> None:
    model = HFModel(small_llama(torch.float32))
    norm, states = model.ends().norm, torch.randn(1, 256, model.width, device="cuda")
    expected = norm(states)
    model.compile_layers()
    model._control.steady, model._control.compiled = True, compiled
    together = norm(states)
    assert torch.allclose(together, expected, rtol=1e-5, atol=1e-5)
    for count in (2, 8, 16, 32) if compiled else (1, 2, 8, 16, 32):  # steps have at least two rows
        for first in range(0, 256, count):
            part = slice(first, first + count)
            assert torch.equal(norm(states[:, part]), together[:, part])


@pytest.mark.parametrize("rows", [16, 64])
def test_exact_mode_gives_the_same_bits_in_any_tree(rows: int) -> None:
    engine = engine_for(HFModel(small_llama(torch.bfloat16)), exact=True, exact_rows=rows)
    rng = random.Random(0)
    for _ in range(12):
        prompt, answer = rng.choices(range(2048), k=rng.randrange(1, 700)), rng.choices(range(2048), k=10)
        expected = one_by_one(engine, prompt, answer)
        found = in_a_tree(engine, prompt, answer, rng.randrange(10, 2 * rows), rng)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=5)])
def test_early_exits_in_graphs(sampling: Sampling) -> None:
    model = small_llama(torch.float32)
    plain, graphs = Decoder(model, runtime="plain"), Decoder(model, runtime="graphs", exact=False)
    prompt = [5, 9, 5, 9, 7] * 9
    options = {"sampling": sampling, "max_new_tokens": 100}
    expected = plain.generate(prompt, method=Autoregressive(), **options)
    heads = random_exits(model, (1, 2, 3))
    for method in (
        SelfSpeculative(exit=2, length=3),
        AdaDecode(heads=heads, control="fixed", gamma=0.01),
        AdaDecode(heads=heads),
        Swift(length=3, confidence=0.0),
    ):
        found = graphs.generate(prompt, method=graphs.prepare(method), **options)
        assert found.token_ids == expected.token_ids
        assert graphs.engine.pool.held == 0
    assert any(key[3] is not None for key in graphs.engine._graphs)  # questions were answered in graphs


@pytest.mark.parametrize("texts", [1, 3, 6])
@pytest.mark.parametrize(
    "needs", [Sampling(), Sampling(temperature=0.9, top_p=0.9, top_k=40, seed=3, logit_bias={5: 1.0})]
)
def test_whole_steps_write_the_same_texts(needs: Sampling, texts: int) -> None:
    """Lanes of one captured graph against plain forwards with the host between."""
    model = small_llama(torch.float32)
    plain, graphs = Decoder(model, runtime="plain"), Decoder(model, runtime="graphs", exact=False)
    prompts = [[5, 9, 5, 9, 7 + number] * 7 for number in range(texts)]
    options = {"sampling": needs, "max_new_tokens": 50}
    expected = [plain.generate(prompt, method=Autoregressive(), **options).token_ids for prompt in prompts]
    tree = AdaDecode(random_exits(model, (1, 2, 3)), control="tree", exits="2")
    ahead = [graphs.prepare(method) for method in (tree, DraftModel(model=small_llama(torch.float32), length=3))]
    for method in (Autoregressive(), *METHODS, *ahead):
        found = graphs.generate(prompts, method=method, **options)
        assert [result.token_ids for result in found] == expected
        assert all(graphs.engine.program_for(method, needs)._graphs.values())  # they were captured
    assert graphs.engine.pool.held == 0


def test_predictions_are_drafted_in_graphs() -> None:
    model = small_llama(torch.float32)
    plain, graphs = Decoder(model, runtime="plain"), Decoder(model, runtime="graphs", exact=False)
    prompt, method = [5, 9, 5, 9, 7] * 7, PromptLookup()
    expected = plain.generate(prompt, method=Autoregressive(), max_new_tokens=60, temperature=0.9, seed=3).token_ids
    for right in (True, False):
        told = expected if right else expected[::-1]
        found = graphs.generate(prompt, method=method, max_new_tokens=60, temperature=0.9, seed=3, prediction=told)
        assert found.token_ids == expected
        assert found.steps < 12 or not right
    (program,) = [entry[-1] for entry in graphs.engine._programs]
    assert any("prediction" in key[-1] for key in program._graphs)
    assert all(program._graphs.values())
