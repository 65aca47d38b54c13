"""Whole steps as one program: every text is plain decoding's, whoever is beside it. No tolerance anywhere in this file.

What a GPU captures as one graph runs here kernel by kernel.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from outpace import (
    AdaDecode,
    Amphista,
    Auto,
    Autoregressive,
    BatchError,
    CostCurve,
    Decoder,
    DraftModel,
    Hydra,
    InputError,
    InvalidLogits,
    Jacobi,
    Lookahead,
    Medusa,
    Method,
    PromptLookup,
    Sampling,
    Step,
)
from outpace.bench.calibration import calibrate
from outpace.loop import decode
from outpace.models.adapter import FixedRows
from outpace.models.hf import HFModel
from outpace.models.toy import Bigram
from outpace.receipt import check
from outpace.runtime import program
from outpace.runtime.fixed import FixedStep
from outpace.runtime.graphs import PROGRAMS, GraphEngine
from outpace.runtime.program import Program
from outpace.runtime.sizes import Sizes
from outpace.trace import Trace, read_trace, record

from .models import CONTEXT, VOCABULARY, examples, mostly_slow, tiny
from .test_adadecode import random_exits
from .test_heads import random_heads
from .test_lossless import prompt_of

NAMES = ["Llama", "Gemma2", "Qwen3", "GPT2", "Mistral"]
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
PLAIN: dict[str, Method] = {
    "autoregressive": Autoregressive(),
    "jacobi": Jacobi(window=5),
    "jacobi without": Jacobi(window=0),
    "prompt-lookup": PromptLookup(rows=12, depth=6),
    "prompt-lookup chain": PromptLookup(tree=False, depth=6),
    "prompt-lookup gated": PromptLookup(rows=6, gate=0.2, depth=3),
    "lookahead": Lookahead(window=3, ngram=3, guesses=3, reach=6),
    "auto": Auto(heads=False, rows=12),
    "lookahead small": Lookahead(window=1, ngram=2, guesses=1, longest_key=1),
    "lookahead as published": Lookahead(window=2, ngram=4, guesses=2, published=True),
    "lookahead by n-grams": Lookahead(window=3, ngram=3, guesses=3, reach=0, longest_key=2),
    "lookahead without guesses": Lookahead(window=3, ngram=3, guesses=0),
}
QUICK = (
    "autoregressive",
    "prompt-lookup",
    "lookahead",
    "lookahead as published",
    "auto",
    "medusa",
    "hydra",
    "amphista by a tree",
    "exits",
    "draft-model",
)
HEADED = (
    "medusa",
    "medusa by a tree",
    "hydra",
    "amphista",
    "amphista by a tree",
    "exits",
    "exits alone",
    "draft-model",
)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_p=0.8, top_k=20, min_p=0.01, seed=2**63 + 5),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4),
    Sampling(temperature=0.9, frequency_penalty=0.7, logit_bias={5: 2.0, 7: -3.0, 9: -float("inf")}, seed=-1),
]


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of lanes that nobody has cost nothing on a GPU, but time here."""
    monkeypatch.setattr(program, "GROUPS", (1, 4, 8, 64))


@functools.cache
def plain_decoder(name: str) -> Decoder:
    return Decoder(tiny(name), method=Autoregressive())


@functools.cache
def shared(name: str) -> Decoder:
    """One engine for many tests: nothing may be left of a text that has ended."""
    return decoder_of(tiny(name))


def decoder_of(model: Any, capacity: int = 1024, **options: Any) -> Decoder:
    decoder = Decoder(model, method=Autoregressive())
    decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=capacity, **options)
    return decoder


@functools.cache
def method_of(name: str, label: str) -> Method:
    if label in PLAIN:
        return PLAIN[label]
    kind, _, tree = label.partition(" ")
    if kind == "draft-model":
        return shared(name).prepare(DraftModel(model=tiny(name, seed=5), length=3))
    if kind == "exits":
        alone: dict[str, Any] = {"widths": "4,2,2", "beam": 3, "lookup": 0.0, "rows": 6} if tree else {"rows": 12}
        return shared(name).prepare(AdaDecode(random_exits(tiny(name)), control="tree", **alone))
    settings: dict[str, Any] = {"tree": TREE} if tree else {"rows": 12}
    cls = {"medusa": Medusa, "hydra": Hydra, "amphista": Amphista}[kind]
    return shared(name).prepare(cls(heads=random_heads(kind, tiny(name)), **settings))


@functools.cache
def expected(name: str, prompt: tuple[int, ...], sampling: int, length: int) -> list[int]:
    found = plain_decoder(name).generate(list(prompt), sampling=SAMPLINGS[sampling], max_new_tokens=length)
    return found.token_ids


def programs(decoder: Decoder) -> list[Program]:
    assert isinstance(decoder.engine, GraphEngine)
    return [entry[-1] for entry in decoder.engine._programs]


def assert_all_is_given_back(decoder: Decoder) -> None:
    pool = decoder.engine.pool
    assert pool.held == 0
    decoder.forget()  # what is kept for the next turn of a chat
    assert (pool.held, pool.used, pool.texts) == (0, 0, 0)
    for each in programs(decoder):
        assert each.idle
        assert each.choices.needs == frozenset()
        assert not each.lanes.active().any()


def write(decoder: Decoder, method: Method, prompts: Sequence[Sequence[int]], samplings: Any, lengths: Any) -> Any:
    results = decoder.generate(
        [list(prompt) for prompt in prompts], method=method, sampling=samplings, max_new_tokens=lengths
    )
    assert_all_is_given_back(decoder)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("label", mostly_slow([*PLAIN, *HEADED], QUICK))
@pytest.mark.parametrize("name", mostly_slow(NAMES, quick=["Llama"]))
def test_each_text_is_plain_decodings(name: str, label: str) -> None:
    decoder, method = shared(name), method_of(name, label)
    for count in (1, 3, 6):
        prompts = [tuple(prompt_of(seed, 24)[: 24 - seed]) for seed in range(count)]
        ways = [(count + place) % len(SAMPLINGS) for place in range(count)]
        lengths = [3 + 3 * (place % 3) for place in range(count)]
        known = [expected(name, *text) for text in zip(prompts, ways, lengths, strict=True)]
        assert write(decoder, method, prompts, [SAMPLINGS[way] for way in ways], lengths) == known
    assert any(program.deepest or not program.sources for program in programs(decoder))


@pytest.mark.parametrize("name", ["Gemma2", "GPT2"])
def test_windows_and_learned_positions(name: str) -> None:
    for label in ("autoregressive", "prompt-lookup", "lookahead", "amphista", "exits", "exits alone", "draft-model"):
        prompts = [tuple(prompt_of(seed)) for seed in range(3)]
        known = [expected(name, prompt, way, 8) for way, prompt in enumerate(prompts)]
        assert write(shared(name), method_of(name, label), prompts, SAMPLINGS[:3], 8) == known


def test_a_program_takes_what_it_can_and_the_host_the_rest() -> None:
    decoder = decoder_of(tiny("Llama"))
    engine = decoder.engine
    method = PromptLookup(rows=8)
    asked = {
        "program": Sampling(temperature=1.0),
        "processors": Sampling(processors=[lambda ids, scores: scores]),
        "the papers' rule": Sampling(temperature=1.0, rule="rejection"),
    }
    takes = {name: engine.program_for(method, sampling) is not None for name, sampling in asked.items()}
    assert takes == {"program": True, "processors": False, "the papers' rule": False}
    assert engine.program_for(PromptLookup(rows=8), Sampling()) is engine.program_for(method, Sampling())
    mixed = [Sampling(), *asked.values()][:3]
    known = [plain_decoder("Llama").generate([3, 1, 4], sampling=each, max_new_tokens=9).token_ids for each in mixed]
    assert write(decoder, method, [[3, 1, 4]] * 3, mixed, 9) == known


def test_a_draft_model_that_cannot_have_lanes_is_the_hosts() -> None:
    decoder, prompt = decoder_of(tiny("Llama")), tuple(prompt_of(1))
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    method = decoder.prepare(DraftModel(model=Bigram(table), length=3))
    assert decoder.engine.program_for(method, Sampling()) is None
    assert write(decoder, method, [prompt], None, 9) == [expected("Llama", prompt, 0, 9)]


def test_programs_outlive_the_first_text() -> None:
    decoder = decoder_of(tiny("Llama"))
    decoder.generate([1, 2, 3], max_new_tokens=2)
    (before,) = programs(decoder)
    decoder.generate([1, 2, 3], max_new_tokens=2)
    assert programs(decoder) == [before]


@pytest.mark.parametrize("label", ["autoregressive", "lookahead", "medusa", "amphista", "exits", "draft-model"])
def test_a_prompt_of_one_token_in_a_fresh_engine(label: str) -> None:
    decoder = decoder_of(tiny("Llama"))
    found = decoder.generate([7], method=method_of("Llama", label), max_new_tokens=8)
    assert found.token_ids == expected("Llama", (7,), 0, 8)


@examples(6)
@given(st.data())
def test_texts_join_and_leave(data: Any) -> None:
    decoder = shared("Llama")
    labels = ("autoregressive", "prompt-lookup", "lookahead", "medusa", "amphista", "exits", "draft-model")
    count = data.draw(st.integers(2, 6))
    pick = random.Random(data.draw(st.integers(0, 999)))
    texts = [(tuple(prompt_of(pick.randrange(4), 16)), pick.randrange(5), pick.randrange(1, 12)) for _ in range(count)]
    methods = [method_of("Llama", pick.choice(labels)) for _ in texts]
    joins = sorted(pick.randrange(9) for _ in texts)
    leaves = {pick.randrange(count): pick.randrange(12) for _ in range(count // 2)}
    batch, found = decoder.batch(most=pick.randrange(1, 6)), list[list[int]]()
    gone = set()

    def join(step: int) -> None:
        while len(found) < count and joins[len(found)] <= step:
            prompt, way, length = texts[len(found)]
            options: dict[str, Any] = {"method": methods[len(found)], "sampling": SAMPLINGS[way]}
            options |= {"max_new_tokens": length, "prediction": pick.choice([None, prompt_of(pick.randrange(4), 16)])}
            assert batch.add(list(prompt), **options) == len(found)
            found.append([])

    join(joins[0])
    for step, (number, item) in enumerate(batch):
        assert isinstance(item, Step)
        found[number] += item.tokens
        join(step)
        for other, when in leaves.items():
            if when == step and other < len(found):
                batch.cancel(other)
                gone.add(other)
    for number, text in enumerate(found):
        whole = expected("Llama", *texts[number])
        assert text == (whole[: len(text)] if number in gone else whole)
    assert_all_is_given_back(decoder)


@pytest.mark.parametrize("label", ["autoregressive", "lookahead", "amphista"])
def test_streams_that_take_turns_lose_no_step(label: str) -> None:
    """One asks more often than the other, and a third is left standing."""
    decoder, method = shared("Llama"), method_of("Llama", label)
    prompts = [tuple(prompt_of(seed)) for seed in range(3)]
    streams = [
        decoder.stream(list(prompt), method=method, sampling=SAMPLINGS[way], max_new_tokens=14)
        for way, prompt in enumerate(prompts)
    ]
    texts: list[list[int]] = [[], [], [*next(streams[2]).tokens]]
    for turn in range(60):
        which = int(turn % 3 == 2)
        texts[which] += getattr(next(streams[which], None), "tokens", ())
    for _ in range(2):
        texts[2] += next(streams[2]).tokens
    known = [expected("Llama", prompt, way, 14) for way, prompt in enumerate(prompts)]
    assert texts[:2] == known[:2]
    assert texts[2] == known[2][: len(texts[2])]
    streams[2].close()  # type: ignore[attr-defined]
    assert_all_is_given_back(decoder)


class _Letters:
    """Tokens are letters."""

    eos_token_id = None
    chat_template = None

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(0x100 + token) for token in tokens)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 0x100 for letter in text]}


@pytest.mark.parametrize("label", ["autoregressive", "prompt-lookup", "lookahead"])
def test_stop_strings_end_tokens_and_limits(label: str) -> None:
    decoder = shared("Llama")
    prompt, method = prompt_of(3), method_of("Llama", label)
    whole = expected("Llama", tuple(prompt), 1, 20)
    for length in (1, 2, 7):
        found = decoder.generate(prompt, method=method, sampling=SAMPLINGS[1], max_new_tokens=length)
        assert (found.token_ids, found.finish_reason) == (whole[:length], "length")
    with_text, ending = copy.copy(decoder), copy.copy(decoder)
    with_text.tokenizer = _Letters()
    stop = _Letters().decode(whole[4:6])
    found = with_text.generate(prompt, method=method, sampling=SAMPLINGS[1], max_new_tokens=20, stop=stop)
    place = next(at for at in range(20) if whole[at : at + 2] == whole[4:6])
    assert (found.token_ids, found.finish_reason) == (whole[: place + 2], "stop")
    assert found.text == _Letters().decode(whole[:place])
    ending.ends = [whole[6]]
    found = ending.generate(prompt, method=method, sampling=SAMPLINGS[1], max_new_tokens=20)
    assert (found.token_ids, found.finish_reason) == (whole[: whole.index(whole[6]) + 1], "stop")
    assert_all_is_given_back(decoder)


@pytest.mark.parametrize("name", mostly_slow(["Llama", "GPT2"], quick=["GPT2"]))
def test_the_end_of_the_context(name: str) -> None:
    prompts = [tuple(prompt_of(2, 144)), tuple(prompt_of(3, 152))]
    known = [expected(name, prompt, way, CONTEXT - len(prompt)) for way, prompt in enumerate(prompts)]
    assert [len(text) for text in known] == [16, 8]
    for label in (
        "autoregressive",
        "jacobi",
        "prompt-lookup",
        "lookahead",
        "lookahead as published",
        "amphista",
        "exits alone",
        "draft-model",
    ):
        assert write(shared(name), method_of(name, label), prompts, SAMPLINGS[:2], 1000) == known


@pytest.mark.parametrize(("label", "sampling"), [("autoregressive", 0), ("autoregressive", 3), ("lookahead", 1)])
def test_nan_ends_its_own_text_alone(label: str, sampling: int) -> None:
    """The model computes NaN once it sees one token, which the bias makes a text write sooner or later."""
    model = copy.deepcopy(tiny("Llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = float("nan")
    decoder, method = decoder_of(model), method_of("Llama", label)
    bad = replace(SAMPLINGS[sampling], logit_bias={96: 1000.0})
    prompts = [[3, 1, 4], [1, 5, 9], [5, 3, 5], [2, 96, 6]]
    samplings = [SAMPLINGS[sampling], bad, SAMPLINGS[sampling], SAMPLINGS[sampling]]
    plain = Decoder(model, method=Autoregressive())
    known = [plain.generate(prompts[at], sampling=samplings[at], max_new_tokens=9).token_ids for at in (0, 2)]
    for _ in range(2):  # nothing is left in the slots that others take next
        with pytest.raises(
            BatchError, match=r"sequence 1 of the batch failed \(and 1 more\): at new token 2: .* NaN"
        ) as error:
            decoder.generate(prompts, method=method, sampling=samplings, max_new_tokens=9)
        found = error.value.results
        assert [result.token_ids for result in found] == [known[0], [96], known[1], []]
        assert isinstance(found[1].error, InvalidLogits)
        assert "at new token 1: " in str(found[3].error)
        assert_all_is_given_back(decoder)


def test_when_every_token_is_ruled_out_the_text_ends_so() -> None:
    decoder = shared("Llama")
    nothing = Sampling(logit_bias=dict.fromkeys(range(VOCABULARY), -float("inf")))
    with pytest.raises(InvalidLogits, match=r"at new token 1: .*every token is ruled out"):
        decoder.generate([1, 2, 3], method=PLAIN["lookahead"], sampling=nothing)
    with pytest.raises(InputError, match=f"logit_bias names token {VOCABULARY}; the vocabulary has ids 0 to"):
        decoder.generate([1, 2, 3], sampling=Sampling(logit_bias={VOCABULARY: 1.0}))
    assert_all_is_given_back(decoder)


@pytest.mark.parametrize("label", ["autoregressive", "lookahead", "amphista", "exits alone"])
def test_what_does_not_fit_is_refused_before_anything_runs(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, method = decoder_of(tiny("Llama"), capacity=130), method_of("Llama", label)
    ran, forward = [], decoder.engine.model.forward

    def watched(pool: Any, *args: Any, **more: Any) -> Any:
        ran.append(pool is decoder.engine.pool)  # heads try the model in another, when they are loaded
        return forward(pool, *args, **more)

    monkeypatch.setattr(decoder.engine.model, "forward", watched)
    with pytest.raises(InputError, match=r"\d+ KV slots are needed, and 130 of 130 are free\. Shorten the prompt"):
        decoder.generate(prompt_of(2, 120), method=method, max_new_tokens=60)
    assert not any(ran)
    assert_all_is_given_back(decoder)
    prompts = [tuple(prompt_of(1, 8)), tuple(prompt_of(2, 120)), tuple(prompt_of(3, 8))]
    with pytest.raises(
        BatchError, match=r"sequence 1 of the batch failed: \d+ KV slots are needed, and \d+ of 130"
    ) as error:
        decoder.generate([list(prompt) for prompt in prompts], method=method, max_new_tokens=[6, 60, 6])
    found = error.value.results
    assert [found[at].token_ids for at in (0, 2)] == [expected("Llama", prompts[at], 0, 6) for at in (0, 2)]
    assert_all_is_given_back(decoder)


def test_a_text_for_which_no_lane_is_left_is_written_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LANES", 4)
    monkeypatch.setattr(program, "GROUPS", (1, 4))
    decoder = decoder_of(tiny("Llama"))
    prompts = [tuple(prompt_of(seed, 8)) for seed in range(7)]
    known = [expected("Llama", prompt, 0, 8) for prompt in prompts]
    assert write(decoder, PLAIN["lookahead"], prompts, None, 8) == known


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_requests_lose_no_slot_and_no_lane(count: int) -> None:
    model = tiny("Llama", num_hidden_layers=1, seed=3)
    decoder, draw = decoder_of(model, capacity=300), random.Random(4)
    methods = [Autoregressive(), Jacobi(window=3), PromptLookup(rows=6), Lookahead(window=2, ngram=3, guesses=2)]
    nothing = dict.fromkeys(range(VOCABULARY), -float("inf"))
    batch, last, errors = decoder.batch(most=8), -1, {"slots": 0, "ruled": 0}

    def ask() -> None:
        nonlocal last
        if last < count - 1:
            kind = draw.random()
            length = 150 if kind < 0.02 else draw.randrange(1, 5)
            bias = nothing if 0.02 <= kind < 0.05 else {}
            last = batch.add(
                draw.choices(range(VOCABULARY), k=draw.randrange(1, 9)),
                method=draw.choice(methods),
                sampling=Sampling(temperature=draw.choice([0.0, 1.0]), seed=draw.randrange(99), logit_bias=bias),
                max_new_tokens=length,
            )

    for _ in range(20):
        ask()
    for number, item in batch:
        if not isinstance(item, Step):
            errors["slots" if isinstance(item, InputError) else "ruled"] += 1
            assert isinstance(item, InputError | InvalidLogits)
        if not isinstance(item, Step) or item.finish is not None:
            ask()
        if draw.random() < 0.1:
            batch.cancel(draw.randrange(last + 1))
            ask()
        assert number <= last
    assert last == count - 1
    assert errors["ruled"]
    assert not errors["slots"]  # those for which there are no slots wait
    assert_all_is_given_back(decoder)


@pytest.mark.parametrize(
    "label", mostly_slow([*PLAIN, *HEADED], ["autoregressive", "lookahead", "auto", "hydra", "exits", "draft-model"])
)
def test_a_receipt_of_its_steps(label: str, tmp_path: Any) -> None:
    decoder, method = shared("Llama"), method_of("Llama", label)
    prompt = prompt_of(5)
    for sampling in SAMPLINGS[:2]:
        steps = [*decoder.stream(prompt, method=method, sampling=sampling, max_new_tokens=12)]
        trace = record(decoder, method, prompt, steps, sampling=sampling, max_new_tokens=12)
        assert isinstance(trace, Trace)
        trace.save(tmp_path / "trace.json")
        receipt = check(decoder, read_trace(tmp_path / "trace.json"))
        assert receipt.passed, receipt.verdict
        assert all(mark.token == mark.picked for mark in receipt.marks)
        for step in steps:
            assert len(step.rows) == len(step.tokens) == len(step.sources)
            assert len(step.draft) == len(step.draft.sources) == len(step.draft.parents)
    assert_all_is_given_back(decoder)


def test_where_rows_have_a_price_drafts_are_as_large_as_pays() -> None:
    """Also with a window whose probes are always taken, and with more prices than there are rows."""
    decoder, prompt = decoder_of(tiny("Llama")), prompt_of(1)
    decoder.engine.costs = CostCurve({}, (1, 2, 4, 8, 256), (0,), ((1.0, 1.2, 1.4, 1.9, 60.0),))
    known = expected("Llama", tuple(prompt), 0, 20)
    for method in (PromptLookup(depth=2), PromptLookup(), Lookahead(window=1, ngram=4, guesses=6)):
        steps = [*decoder.stream(prompt, method=method, max_new_tokens=20)]
        assert [token for step in steps for token in step.tokens] == known
        trace = record(decoder, method, prompt, steps, sampling=Sampling(), max_new_tokens=20)
        assert check(decoder, trace).passed
        assert max(len(step.draft) for step in steps) < 20


@pytest.mark.parametrize(
    "label",
    mostly_slow(
        ["autoregressive", "jacobi", "prompt-lookup", "lookahead", "auto", "exits", "exits alone", "draft-model"],
        ["autoregressive", "lookahead", "auto", "exits alone", "draft-model"],
    ),
)
def test_exact_mode(label: str) -> None:
    decoder = decoder_of(tiny("Llama"), exact_rows=8)
    prompts = [tuple(prompt_of(seed)) for seed in range(3)]
    known = [expected("Llama", prompt, way, 8) for way, prompt in enumerate(prompts)]
    assert write(decoder, method_of("Llama", label), prompts, SAMPLINGS[:3], 8) == known


@pytest.mark.parametrize("label", ["prompt-lookup", "exits", "draft-model"])
def test_a_lane_at_rest_reads_nothing_beyond_its_rows(label: str) -> None:
    """In exact mode a row's ancestors are listed by their distance from the text, as far as the list reaches."""
    decoder, method = decoder_of(tiny("Llama"), exact_rows=8), method_of("Llama", label)
    prompt = tuple(prompt_of(1))
    assert write(decoder, method, [prompt], SAMPLINGS[:1], 8) == [expected("Llama", prompt, 0, 8)]
    (each,) = programs(decoder)
    assert int(each.lanes.lengths[0]) > len(prompt)  # what was written is still there
    for graph in each._graphs.values():
        graph.run()
        for step in (graph, *(climb for climbs in graph.climbs.values() for climb in climbs)):
            ahead = step.rows.positions - step.rows.lists.length[0]
            assert 0 <= int(ahead.min()) <= int(ahead.max()) <= step.deepest


@pytest.mark.parametrize("exact_rows", [0, 8])
def test_rows_that_climb_write_to_no_slot_that_is_in_use(exact_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only behind the text of their own lane, from its last token on; those that fill up write to the scratch slot."""
    decoder, method = decoder_of(tiny("Llama"), exact_rows=exact_rows), method_of("Llama", "exits alone")
    engine, forward, climbed = decoder.engine, decoder.engine.model.forward, list[int]()

    def watched(pool: Any, rows: Any, logits: Any, start: int = 0, stop: Any = None, *args: Any, **more: Any) -> Any:
        if isinstance(rows, FixedRows) and stop == 1:
            lanes = programs(decoder)[0].lanes
            whose = rows.lists.whose.tolist() if rows.lists.packed else [0] * len(rows)
            for lane, slot in zip(whose, rows.slots.tolist(), strict=True):
                if slot != pool.scratch:
                    assert slot in lanes.slots[lane, int(lanes.lengths[lane]) - 1 : int(lanes.limits[lane]) + 20]
                    climbed.append(lane)
        return forward(pool, rows, logits, start, stop, *args, **more)

    monkeypatch.setattr(engine.model, "forward", watched)
    prompts = [tuple(prompt_of(seed)) for seed in range(3)]
    known = [expected("Llama", prompt, way, 8) for way, prompt in enumerate(prompts)]
    assert write(decoder, method, prompts, SAMPLINGS[: len(prompts)], 8) == known
    assert {*climbed} == {*range(len(prompts))}


def test_programs_follow_the_costs_and_few_are_kept() -> None:
    model = tiny("Llama")
    engine = GraphEngine(HFModel(model), compiled=False, capacity=1024)
    first = engine.program_for(PromptLookup(), Sampling())
    assert engine.program_for(PromptLookup(), Sampling()) is first
    assert first.plan.prices is None
    engine.costs = CostCurve({}, (1, 128), (100,), ((1.0, 20.0),))
    priced = engine.program_for(PromptLookup(), Sampling())
    assert priced is not first
    assert priced.plan.prices is not None
    for rows in range(2, 30):
        engine.program_for(PromptLookup(rows=rows), Sampling())
    assert len(engine._programs) == PROGRAMS


def test_whole_steps_can_be_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    decoder = Decoder(model)
    decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    flat = CostCurve({}, (1, 128), (100,), ((1.0, 1.04),))
    monkeypatch.setattr("outpace.bench.calibration.measure", lambda engine, done: flat)
    monkeypatch.setattr("outpace.bench.calibration.TOKENS", 5)
    curve = calibrate(decoder).curve
    assert curve.paces["prompt-lookup"] > 0
    assert curve.drafting["prompt-lookup"] == 0


def test_texts_that_may_not_share_a_forward_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """LongRoPE's angles depend on all positions of a forward. Then the host writes all texts but one."""
    model = tiny("Llama")
    adapted = HFModel(model)
    adapted.packs = False
    decoder = Decoder(model)
    decoder.engine = engine = GraphEngine(adapted, compiled=False, capacity=1024)
    groups: list[int] = []
    monkeypatch.setattr(program, "_group", lambda texts: groups.append(texts) or 1)
    prompts = [prompt_of(number) for number in range(3)]
    found = decoder.generate(prompts, method=PromptLookup(), max_new_tokens=12)
    expected = [Decoder(model).generate(prompt, method="autoregressive", max_new_tokens=12) for prompt in prompts]
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert set(groups) == {1}
    assert engine.pool.held == 0


@pytest.mark.parametrize("label", ["prompt-lookup", "lookahead", "amphista"])
def test_texts_that_are_left_move_together(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When others have ended, those in the last lanes go on in the first, with more rows each."""
    monkeypatch.setattr(program, "ROWS", 8)
    decoder = decoder_of(tiny("Llama"))
    sizes: list[tuple[int, int]] = []
    launch = Program._launch

    def record(self: Program) -> Any:
        flight = launch(self)
        assert {*flight.places} <= {*range(program._group(len(flight.places)))}
        sizes.append((len(flight.places), flight.size))
        return flight

    monkeypatch.setattr(Program, "_launch", record)
    prompts = [tuple(prompt_of(seed, 8)) for seed in range(6)]
    lengths = [3, 3, 3, 3, 12, 30]
    known = [expected("Llama", prompt, 0, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert write(decoder, method_of("Llama", label), prompts, None, lengths) == known
    alone = [size for texts, size in sizes if texts == 1]
    many = [size for texts, size in sizes if texts > 4]
    assert alone
    assert many
    assert min(alone) >= max(many)


def test_no_step_in_vain_where_the_length_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(tiny("Llama"))
    launched: list[int] = []
    launch = Program._launch
    monkeypatch.setattr(Program, "_launch", lambda self: launched.append(1) or launch(self))
    write(decoder, Autoregressive(), [tuple(prompt_of(3, 8))], None, 9)
    assert len(launched) == 9


@pytest.mark.parametrize(("pace", "left"), [(1.0, 1), (2.0, 4), (4.0, 10)])
def test_no_step_is_launched_ahead_where_the_one_before_may_be_the_last(pace: float, left: int) -> None:
    place = program.Place(100, Sizes().begin())
    place.pace = pace
    place.length = 100 - left
    assert not place.goes_on
    place.length -= 1
    assert place.goes_on


@pytest.mark.parametrize(
    ("label", "sampling"),
    mostly_slow(
        product(["prompt-lookup", "lookahead", "amphista", "exits"], [0, 1]),
        [("prompt-lookup", 0), ("lookahead", 0), ("amphista", 1), ("exits", 0)],
    ),
)
def test_the_host_knows_the_slots_without_asking(label: str, sampling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it follows by the accepted rows is what the device has, wherever texts end."""
    decoder = decoder_of(tiny("Llama"))
    moved: list[bool] = []
    hand_back = Program._hand_back

    def compared(self: Program, place: Any, sequence: Any, written: Any) -> None:
        before = [*sequence.slots, *sequence.reserved]
        hand_back(self, place, sequence, written)
        assert sequence.slots == self.lanes.slots[place.lane, : len(sequence.tokens) - 1].tolist()
        assert sorted(sequence.slots + sequence.reserved) == sorted(before)
        moved.append(sequence.slots != before[: len(sequence.slots)])

    monkeypatch.setattr(Program, "_hand_back", compared)
    decoder.engine.pool.keeps = 512
    method = method_of("Llama", label)
    for seed in range(6):
        prompts = [prompt_of(seed + 10 * number, 12) * 2 for number in range(1 + seed % 3)]
        decoder.ends = [expected("Llama", tuple(prompts[0]), sampling, 40)[seed * 5]]
        decoder.generate(prompts, method=method, sampling=SAMPLINGS[sampling], max_new_tokens=40)
    assert any(moved) or sampling  # random texts repeat themselves seldom


def test_a_text_without_a_limit_takes_slots_as_it_grows() -> None:
    """As transformers' hook may ask for one. The context is larger than the pool, and the text is not."""
    model = tiny("Llama")
    engine = GraphEngine(HFModel(model), compiled=False, capacity=60)
    prompt = prompt_of(1)
    left = [None] * 7 + ["stop"]
    steps = list(decode(engine, PromptLookup(), prompt, Sampling(), lambda token: left.pop(0)))
    expected = plain_decoder("Llama").generate(prompt, max_new_tokens=8).token_ids
    assert [token for step in steps for token in step.tokens] == expected
    assert engine.pool.held == 0


class _Recorded(TorchDispatchMode):
    """Refuses what a CUDA graph cannot have: numbers that come from the host or go to it, shapes that depend on data.

    A single number that is assigned or compared is among a kernel's arguments.
    """

    refused: ClassVar = {
        *("item", "is_nonzero", "_local_scalar_dense", "equal"),
        *("nonzero", "argwhere", "masked_select", "_unique2", "unique_dim", "bincount", "one_hot"),
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.refused, f"{name} asks the host"
        assert name != "lift_fresh" or args[0].ndim == 0, f"{args[0].tolist()} is a tensor of the host"
        if name in ("index", "index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), "a mask as an index"
        return func(*args, **kwargs or {})


class _Placed(TorchFunctionMode):
    """Refuses tensors that are made of the host's numbers, and those of drafting that are made without a device."""

    hosts: ClassVar = {torch.tensor, torch.as_tensor, torch.from_numpy}
    makers: ClassVar = {torch.arange, torch.empty, torch.eye, torch.full, torch.ones, torch.zeros}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in self.hosts, f"{func.__name__}{args}"
        if func in self.makers and kwargs.get("device") is None:
            caller = sys._getframe(1).f_globals["__name__"]
            assert not caller.startswith(("outpace.step", "outpace.sources")), f"{func.__name__}{args} is the host's"
        return func(*args, **kwargs)


@pytest.fixture
def _captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a GPU would capture runs under the limits of a capture."""
    step = FixedStep.compute

    def compute(self: FixedStep) -> None:
        with _Placed(), _Recorded():
            step(self)

    monkeypatch.setattr(FixedStep, "compute", compute)


@pytest.mark.usefixtures("_captured")
@pytest.mark.parametrize("label", mostly_slow([*PLAIN, *HEADED], ["jacobi", "lookahead by n-grams", *QUICK[3:]]))
def test_a_step_asks_the_host_for_nothing(label: str) -> None:
    """All that a step computes can be captured as a CUDA graph, in torch's form too, for two texts and for the last."""
    decoder, method = decoder_of(tiny("Llama")), method_of("Llama", label)
    decoder.engine.costs = CostCurve({}, (1, 2, 4, 8, 256), (0,), ((1.0, 1.2, 1.4, 1.9, 60.0),))
    prompts, lengths = [tuple(prompt_of(seed, 8)) for seed in range(2)], [1, 4]
    known = [expected("Llama", prompts[way], way, lengths[way]) for way in range(2)]
    assert write(decoder, method, prompts, SAMPLINGS[:2], lengths) == known
    found = decoder.generate(
        list(prompts[1]), method=method, sampling=SAMPLINGS[1], max_new_tokens=4, prediction=[7, 5]
    )
    assert found.token_ids == known[1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x[:, [0, 1]],
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1], device=x.device),
        lambda x: torch.tensor(1, device=x.device),
    ],
)
def test_what_asks_the_host_is_found(spoil: Any) -> None:
    with torch.inference_mode():
        numbers = torch.arange(6).view(2, 3)
        with pytest.raises(AssertionError), _Placed(), _Recorded():
            spoil(numbers)


def test_a_prediction_keeps_plain_decoding_on_the_host() -> None:
    """Its program cannot draft from one."""
    model = tiny("Llama")
    decoder = Decoder(model)
    decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    answer = decoder.generate([1, 2, 3], method="autoregressive", max_new_tokens=24)
    assert answer.steps == 24
    again = decoder.generate([1, 2, 3], method="autoregressive", max_new_tokens=24, prediction=answer.token_ids)
    assert again.token_ids == answer.token_ids
    assert again.steps < 24
