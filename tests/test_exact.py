"""Exact mode on a CPU: a row has the same bits whatever is beside it. No tolerance but where values are checked."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from outpace import Autoregressive, Decoder, InputError, Sampling, UnsupportedModel
from outpace.draft import Draft, chain
from outpace.models import products
from outpace.models.adapter import Output
from outpace.models.exact import ExactFunctions, Seen, attend_exactly, seen_by
from outpace.models.hf import HFModel
from outpace.models.toy import Bigram
from outpace.pool import Packed, Pool
from outpace.receipt import check
from outpace.runtime.choose import engine_for
from outpace.runtime.exact import ExactEngine
from outpace.runtime.plain import Work
from outpace.trace import record

from .models import ARCHITECTURES, VOCABULARY, examples, mostly_slow, tiny
from .test_attention import placed, random_tree
from .test_batch import methods_for
from .test_lossless import prompt_of

REFUSED = ("Falcon", "GPT2", "GPTJ", "GptOss", "Mixtral", "StableLm")
NAMES = [name for name in ARCHITECTURES if name not in REFUSED]


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@functools.cache
def exact_engine(name: str) -> ExactEngine:
    engine = engine_for(HFModel(tiny(name)), exact=True)
    assert isinstance(engine, ExactEngine)
    return engine


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 203), (1536, 64), (61, 101), (7, 5)])
def test_any_number_of_rows_has_the_bits_of_one(inputs: int, outputs: int) -> None:
    products.load()
    x, w, b = draw(600, inputs), draw(outputs, inputs, seed=1), draw(outputs, seed=2)
    alone = torch.cat([torch.ops.outpace.linear(row[None], w, b) for row in x])
    torch.testing.assert_close(alone, F.linear(x, w, b), rtol=1e-4, atol=1e-4)
    for first, last in ((0, 2), (1, 34), (5, 69), (3, 132), (100, 357), (0, 600)):
        assert torch.equal(torch.ops.outpace.linear(x[first:last], w, b, True), alone[first:last])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    "function", [torch.cos, torch.sin, torch.tanh, torch.sigmoid, torch.exp, F.silu, F.gelu, "gelu_tanh"]
)
def test_a_function_has_the_same_bits_in_any_place(function: Any) -> None:
    products.load()
    if function == "gelu_tanh":
        function = functools.partial(F.gelu, approximate="tanh")
    x = 3 * draw(2001)
    with ExactFunctions("a model"):
        alone = torch.cat([function(number[None]) for number in x])
        assert torch.equal(function(x), alone)
        assert torch.equal(function(x[1:]), alone[1:])
        assert torch.equal(function(x[::2]), alone[::2])
        assert function(x.double()).dtype == torch.float64
    torch.testing.assert_close(alone, function(x.double()).float(), rtol=2e-6, atol=2e-7)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("width", [8, 20, 61, 576])
def test_norms_have_the_same_bits_beside_any_rows(width: int) -> None:
    products.load()
    x, w, b = 1 + draw(300, width), draw(width, seed=1), draw(width, seed=2)
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: x - torch.mean(x, dim=1)[:, None],
        lambda x: F.layer_norm(x, (width,), w.to(x), b.to(x), 1e-6),
        lambda x: F.rms_norm(x, (width,), w.to(x)),
        lambda x: x - x.mean(-1, keepdim=True, dtype=torch.float64).to(x),
    ]
    for function in functions:
        expected = function(x.double())
        with ExactFunctions("a model"):
            alone = torch.cat([function(row[None]) for row in x])
            for first, last in ((0, 2), (1, 34), (3, 132), (0, 300)):
                assert torch.equal(function(x[first:last]), alone[first:last])
        torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-5)


@given(st.randoms(use_true_random=False), st.sampled_from([0, 3, 90]), st.sampled_from([0.0, 5.0]))
@examples(30)
def test_attention(rng: random.Random, window: int, softcap: float) -> None:
    """It is what the mask shows; and a row has the bits that it has alone in other slots, and beside another text."""
    products.load()
    heads, key_heads, size = rng.choice([(4, 4, 16), (6, 2, 24), (9, 3, 64), (2, 1, 100)])
    length, count = rng.choice([0, 1, 40, 200]), rng.choice([1, 2, 11, 40])
    pool, rows = placed(length, random_tree(count, rng), rng)
    query = draw(1, count, heads, size, seed=length).transpose(1, 2)
    keys, values = draw(2, 1, key_heads, pool.capacity + 1, size, seed=count)
    scaling = 1 / math.sqrt(size)
    found = attend_exactly(query, keys, values, seen_by(rows)._replace(window=window), scaling, softcap)

    sees = rows.sees & (rows.positions[:, None] - rows.slot_positions < (window or math.inf))
    groups, used = heads // key_heads, len(rows.slot_positions)
    doubled = [part[:, :, :used].double().repeat_interleave(groups, 1) for part in (keys, values)]
    scores = query.double() @ doubled[0].transpose(2, 3) * scaling
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    expected = scores.masked_fill(~sees, -math.inf).softmax(-1) @ doubled[1]
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)

    other_pool, other = placed(length, random_tree(count, rng), rng)
    moved, beside = (draw(1, key_heads, other_pool.capacity + pool.capacity + 2, size) for _ in range(2))
    for row in range(count):
        slots = [*rows.text, *rows.tails()[row]][: int(rows.positions[row]) + 1]
        places = rng.sample(range(moved.shape[2]), len(slots))
        moved[:, :, places], beside[:, :, places] = keys[:, :, slots], values[:, :, slots]
        alone = Seen(
            text=torch.tensor([7, *places[:-1]]),
            first=torch.tensor([1]),
            past=torch.tensor([len(places) - 1]),
            positions=rows.positions[row : row + 1],
            tails=torch.tensor([places[-1:]]),
            window=window,
        )
        mine = attend_exactly(query[:, :, row : row + 1], moved, beside, alone, scaling, softcap)
        assert torch.equal(mine, found[:, row : row + 1])
    both = Packed([rows, other])
    double = torch.cat([query, query], 2)
    packed = attend_exactly(double, keys, values, seen_by(both)._replace(window=window), scaling, softcap)
    assert torch.equal(packed[:, :count], found)


def logits_of(engine: ExactEngine, texts: list[list[int]], drafts: list[Draft], pieces: int) -> list[torch.Tensor]:
    """Of each draft behind its text, all together; the texts are read so many tokens at a time."""
    with ExitStack() as stack:
        pool = engine.pool
        sequences = [stack.enter_context(pool.sequence(text)) for text in texts]
        while left := [each for each in sequences if len(each.slots) < len(each.tokens) - 1]:
            counts = [min(pieces, len(each.tokens) - 1 - len(each.slots)) for each in left]
            works = [Work(engine, each, pool.place_text(each, n), 0) for each, n in zip(left, counts, strict=True)]
            engine.run(works)
        works = [
            Work(engine, each, pool.place(each, draft), len(draft))
            for each, draft in zip(sequences, drafts, strict=True)
        ]
        outputs = engine.run(works)
        assert all(isinstance(output, Output) for output in outputs)
        return [output.logits.clone() for output in outputs if isinstance(output, Output)]


def check_bits(engine: ExactEngine, rng: random.Random) -> None:
    """Rows of three drafts that are computed together, against the same rows alone."""
    texts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 50))] for _ in range(3)]
    drafts = []
    for text in texts:
        tree = random_tree(rng.choice([1, 4, 20]), rng)
        tokens = (text[-1], *(rng.randrange(VOCABULARY) for _ in tree.tokens[1:]))
        drafts.append(Draft(tokens, tree.parents, len(tokens), tree.sources))
    together = logits_of(engine, texts, drafts, rng.randint(1, 60))
    for text, draft, found in zip(texts, drafts, together, strict=True):
        row = rng.randrange(len(draft))
        path = [draft.tokens[above] for above in range(1, len(draft)) if draft.ancestors()[row, above]]
        whole = text + path
        (alone,) = logits_of(engine, [whole], [chain(whole[-1], (), "")], rng.choice([1, len(whole)]))
        assert torch.equal(found[row], alone[0])
    assert engine.pool.held == 0


@pytest.mark.parametrize("name", mostly_slow(NAMES, ("Llama", "Gemma3Text", "GPTNeoX")))
@given(rng=st.randoms(use_true_random=False))
@examples(3)
def test_a_row_has_the_same_bits_in_any_tree_piece_and_batch(name: str, rng: random.Random) -> None:
    check_bits(exact_engine(name), rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPTNeoX", "OPT"])
def test_compiled_layers_too(name: str) -> None:
    engine = engine_for(HFModel(tiny(name)), "compiled", exact=True)
    assert isinstance(engine, ExactEngine)
    assert engine.name == "exact, compiled"
    rng = random.Random(0)
    for _ in range(6):
        check_bits(engine, rng)


class Recorder:
    """A logits processor that keeps what it is given: one row for each token of the text."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(scores[0].clone())
        return scores


@pytest.mark.parametrize("name", mostly_slow(["Llama", "Gemma3Text", "GPTNeoX"]))
def test_all_methods_have_the_bits_of_plain_decoding_alone_and_in_batches(name: str) -> None:
    model = tiny(name)
    decoder = Decoder(model, exact=True)
    methods = methods_for(model)
    prompts = [prompt_of(seed)[: 5 + 4 * seed] for seed in range(len(methods))]
    expected = []
    for prompt in prompts:
        record = Recorder()
        text = decoder.generate(
            prompt, method=Autoregressive(), sampling=Sampling(processors=(record,)), max_new_tokens=12
        ).token_ids
        assert text == Decoder(model).generate(prompt, method=Autoregressive(), max_new_tokens=12).token_ids
        expected.append((text, torch.stack(record.rows)))
    records = [Recorder() for _ in prompts]
    results = decoder.generate(
        prompts, method=methods, sampling=[Sampling(processors=(each,)) for each in records], max_new_tokens=12
    )
    for (text, logits), result, record in zip(expected, results, records, strict=True):
        assert result.token_ids == text
        assert torch.equal(torch.stack(record.rows), logits)
    assert decoder.engine.pool.held == 0


def test_texts_are_packed() -> None:
    engine = exact_engine("Llama")
    assert engine.most_texts > 1
    assert (engine.name, engine.for_one_text()) == ("exact", engine)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_it_cannot_compute_are_refused_and_left_as_they_were(name: str) -> None:
    model = tiny(name)
    ids = torch.tensor([[5, 9, 7]])
    before = model(ids).logits
    with pytest.raises(UnsupportedModel, match=r"ForCausalLM|LMHeadModel.*exact=False"):
        Decoder(model, exact=True)
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("dtype", "runtime", "words"),
    [
        (torch.bfloat16, "auto", "is in bfloat16. Use dtype='float32'"),
        (torch.float64, "auto", "is in float64"),
        (torch.float32, "graphs", "needs runtime='auto', 'native', 'plain' or 'compiled', not 'graphs'"),
    ],
)
def test_what_cannot_be_exact_is_named(dtype: torch.dtype, runtime: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        engine_for(HFModel(tiny("Llama", dtype=dtype)), runtime, exact=True)


def test_models_that_are_not_transformers_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="bigram has attention that exact mode does not support"):
        Decoder(Bigram(torch.eye(3)), exact=True)


@pytest.mark.parametrize("wrong", ["tree", "batch"])
def test_it_checks_itself(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = HFModel.forward

    def forward(self: HFModel, pool: Any, rows: Any, *args: Any, **kwargs: Any) -> Output:
        output = right(self, pool, rows, *args, **kwargs)
        beside = len(rows.parts) > 1 if wrong == "batch" else len(rows) > 1
        return output._replace(logits=torch.nextafter(output.logits, output.logits + 1)) if beside else output

    monkeypatch.setattr(HFModel, "forward", forward)
    model = HFModel(tiny("Llama"), check=False)
    with pytest.raises(UnsupportedModel, match="does not have the same bits"):
        engine_for(model, exact=True)
    assert not model._exact


def test_other_engines_stay_as_they_are() -> None:
    model = HFModel(tiny("Llama"))

    def logits() -> torch.Tensor:
        pool = Pool(model.device, capacity=16)
        with pool.sequence([5, 9, 7, 3]) as sequence:
            return model.forward(pool, pool.place(sequence, chain(3, (8, 2), "")), logits=3).logits

    before = logits()
    engine_for(model, exact=True)
    model.unfuse()
    assert torch.equal(logits(), before)


def test_a_receipt_of_exact_mode_compares_bits() -> None:
    model = tiny("Llama")
    exact, fast = Decoder(model, exact=True), Decoder(tiny("Llama"))
    for decoder in (exact, fast):
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        steps = [*decoder.stream(prompt, method="lookahead", max_new_tokens=20)]
        trace = record(decoder, decoder.prepare("lookahead"), prompt, steps, sampling=Sampling(), max_new_tokens=20)
        receipt = check(decoder, trace)
        assert receipt.passed
        assert receipt.tolerance == (0.0 if decoder is exact else 1e-3)
        assert all(mark.token == mark.picked for mark in receipt.marks)
    assert check(exact, trace).tolerance == 1e-3  # it was written in fast mode
