"""Batches: each text is the one that it is alone, whoever is beside it. No tolerance anywhere in this file."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from itertools import chain
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from outpace import (
    AdaDecode,
    Amphista,
    Autoregressive,
    BatchError,
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
    SelfSpeculative,
    Step,
    Swift,
)
from outpace.models.hf import HFModel
from outpace.models.toy import Bigram
from outpace.runtime import graphs
from outpace.runtime.graphs import GraphEngine

from .models import examples, tiny, tiny_chain
from .test_adadecode import random_exits
from .test_heads import random_heads
from .test_lossless import prompt_of


def methods_for(model: Any) -> list[Method]:
    """All methods, those with heads and exits too. They are prepared, as they are used by many texts."""
    heads = {kind: random_heads(kind, model) for kind in ("medusa", "hydra", "amphista")}
    ready = Decoder(model)
    found: list[Method] = [
        Autoregressive(),
        Lookahead(window=4, ngram=3, guesses=4),
        PromptLookup(rows=8),
        Amphista(heads=heads["amphista"], rows=12),
        Jacobi(window=3),
        AdaDecode(heads=random_exits(model), control="fixed", gamma=0.026),
        Medusa(heads=heads["medusa"], rows=8),
        DraftModel(model=tiny("Llama", seed=5), length=3),
        SelfSpeculative(length=3),
        Swift(length=3, confidence=0.01),
        Hydra(heads=heads["hydra"], rows=8),
    ]
    return [ready.prepare(method) for method in found]


_METHODS: list[Method] = []


def some(count: int, seed: int = 0) -> tuple[list[list[int]], list[Method], list[Sampling], list[int]]:
    """Prompts, methods, samplings and lengths of so many texts, all mixed."""
    if not _METHODS:
        _METHODS.extend(methods_for(tiny("Llama")))
    draw = random.Random(seed)
    prompts = [prompt_of(draw.randrange(5), draw.choice([8, 24, 40]))[: draw.randrange(3, 41)] for _ in range(count)]
    methods = [_METHODS[(place + seed) % len(_METHODS)] for place in range(count)]
    samplings = [draw.choice([Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=place)]) for place in range(count)]
    return prompts, methods, samplings, [draw.randrange(1, 16) for _ in range(count)]


def alone(decoder: Decoder, *texts: Any) -> list[list[int]]:
    return [
        decoder.generate(prompt, method=method, sampling=sampling, max_new_tokens=length).token_ids
        for prompt, method, sampling, length in zip(*texts, strict=True)
    ]


def together(decoder: Decoder, prompts: Any, methods: Any, samplings: Any, lengths: Any) -> list[list[int]]:
    results = decoder.generate(prompts, method=methods, sampling=samplings, max_new_tokens=lengths)
    assert decoder.engine.pool.held == 0
    assert [result.method for result in results] == [method.name for method in methods]
    return [result.token_ids for result in results]


def graph_decoder(**options: Any) -> Decoder:
    decoder = Decoder(tiny("Llama"))
    decoder.engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, capacity=1024, **options)
    return decoder


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_each_text_is_the_one_it_is_alone(count: int) -> None:
    texts = some(count, seed=count)
    decoder = Decoder(tiny("Llama"))
    expected = alone(decoder, *texts)
    assert together(decoder, *texts) == expected


@pytest.mark.parametrize("exact_rows", [0, 8])
def test_on_fixed_rows_too(exact_rows: int) -> None:
    """Packed rows in fixed places, in exact mode too."""
    texts = some(10, seed=3)
    decoder = graph_decoder(exact_rows=exact_rows)
    assert together(decoder, *texts) == alone(Decoder(tiny("Llama")), *texts)
    assert isinstance(decoder.engine, GraphEngine)
    assert any(key[-2] for key in decoder.engine._graphs)


@pytest.mark.parametrize("exact_rows", [0, 64])
def test_a_long_prompt_beside_texts_that_the_host_writes(exact_rows: int) -> None:
    """In exact mode its rows are deeper than a draft may be; log probabilities need the host."""
    prompts = [[*range(3, 9)], [*range(5, 50)]]
    decoder = graph_decoder(exact_rows=exact_rows)
    batch, written = decoder.batch(4), dict[int, list[int]]()

    def join(prompt: list[int]) -> None:
        written[batch.add(prompt, method="prompt-lookup", max_new_tokens=12, logprobs=0)] = []

    join(prompts[0])
    for number, step in batch:
        assert not isinstance(step, Exception)
        written[number] += step.tokens
        if len(written) == 1:
            join(prompts[1])
    plain = Decoder(tiny("Llama"))
    assert [*written.values()] == [plain.generate(prompt, max_new_tokens=12).token_ids for prompt in prompts]


def test_auto_by_the_host_beside_another_method() -> None:
    """`auto` copies an engine without measured costs; both write slots of their texts to the same lists."""
    prompts, plain, decoder = ([*range(3, 40)], [*range(50, 70)]), Decoder(tiny("Llama")), graph_decoder()
    texts = [
        decoder.stream(prompt, method=method, max_new_tokens=12, logprobs=0)
        for prompt, method in zip(prompts, ("auto", "prompt-lookup"), strict=True)
    ]
    written: list[list[int]] = [[], []]
    for steps in itertools.zip_longest(*texts):  # a step of each in turn
        for text, step in zip(written, steps, strict=True):
            text += step.tokens if step else ()
    assert written == [plain.generate(prompt, max_new_tokens=12).token_ids for prompt in prompts]


def test_more_texts_and_rows_than_a_graph_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "TEXTS", (2, 4))
    monkeypatch.setattr(graphs, "LINES", 6)
    decoder = graph_decoder()
    monkeypatch.setattr(decoder.engine, "sizes", [2, 8, 16])
    texts = some(9, seed=5)
    assert together(decoder, *texts) == alone(Decoder(tiny("Llama")), *texts)


@examples(8)
@given(st.data())
def test_joins_and_cancellations_change_nobody_else(data: Any) -> None:
    """Texts join and are cancelled at random steps; whoever is written to the end has the text it has alone."""
    count = data.draw(st.integers(1, 6))
    prompts, methods, samplings, lengths = some(count, data.draw(st.integers(0, 20)))
    decoder = data.draw(st.sampled_from([_decoder(), _on_fixed_rows()]))
    expected = alone(_decoder(), prompts, methods, samplings, lengths)
    joins = sorted(data.draw(st.lists(st.integers(0, 8), min_size=count, max_size=count)))
    cancels = {data.draw(st.integers(0, count - 1)): data.draw(st.integers(0, 12)) for _ in range(count // 2)}
    batch = decoder.batch(most=data.draw(st.integers(1, 6)))
    found: list[list[int]] = []
    cancelled = set()

    def join(step: int) -> None:
        while len(found) < count and joins[len(found)] <= step:
            number = len(found)
            options = {"sampling": samplings[number], "max_new_tokens": lengths[number], "method": methods[number]}
            assert batch.add(prompts[number], **options) == number
            found.append([])

    join(joins[0])
    for step, (number, item) in enumerate(batch):
        assert isinstance(item, Step)
        assert number not in cancelled
        found[number] += item.tokens
        join(joins[0] + step)
        for other, when in cancels.items():
            if step >= when and other < len(found) and other not in cancelled:
                batch.cancel(other)
                cancelled.add(other)
    assert decoder.engine.pool.held == 0
    for number, text in enumerate(found):
        assert text == expected[number] if number not in cancelled else text == expected[number][: len(text)]


@functools.cache
def _decoder() -> Decoder:
    return Decoder(tiny("Llama"))


@functools.cache
def _on_fixed_rows() -> Decoder:
    return graph_decoder()


@pytest.mark.parametrize("name", ["Gemma2", "GPT2", "Phi3"])
def test_other_architectures(name: str) -> None:
    decoder = Decoder(tiny(name))
    methods = [Autoregressive(), Lookahead(window=3, ngram=3), PromptLookup(), SelfSpeculative(length=2)]
    texts = ([prompt_of(seed, 16)[seed:] for seed in range(4)], methods, [Sampling()] * 4, [12] * 4)
    assert together(decoder, *texts) == alone(decoder, *texts)


@pytest.mark.parametrize("name", ["Bloom", "GPTNeo"])
def test_models_that_see_their_whole_pool_have_one_for_each_text(name: str) -> None:
    decoder = Decoder(tiny_chain(name), method="jacobi")
    methods = [Autoregressive(), Jacobi(window=3), PromptLookup(tree=False)]
    texts = ([prompt_of(seed, 16) for seed in range(3)], methods, [Sampling()] * 3, [10] * 3)
    assert together(decoder, *texts) == alone(decoder, *texts)


def test_angles_that_depend_on_the_longest_text_are_not_shared() -> None:
    """LongRoPE: a forward with a position beyond the threshold turns all its rows by other angles."""
    model = tiny("Phi3", sliding_window=None)
    config = copy.deepcopy(model.config)
    config.original_max_position_embeddings = 20
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 20,
    }
    long = transformers.AutoModelForCausalLM.from_config(config).eval()
    long.load_state_dict(model.state_dict(), strict=False)
    decoder = Decoder(long)
    assert not decoder.model.packs
    texts = ([prompt_of(1, 40), prompt_of(1, 16), prompt_of(2, 8)], [Lookahead()] * 3, [Sampling()] * 3, [14] * 3)
    assert together(decoder, *texts) == alone(decoder, *texts)


def test_a_packed_forward_takes_the_rows_of_all_texts() -> None:
    decoder = Decoder(tiny("Llama"))
    counts = []
    forward = decoder.model.forward

    def watched(pool: Any, rows: Any, *rest: Any) -> Any:
        counts.append(len(rows))
        return forward(pool, rows, *rest)

    decoder.model.forward = watched  # type: ignore[method-assign]
    decoder.generate([[1, 2, 3], [4, 5], [6], [7, 8]], method=Autoregressive(), max_new_tokens=5)
    assert counts == [8, 4, 4, 4, 4]


def test_rows_that_want_the_same_layers_climb_together() -> None:
    decoder = Decoder(tiny("Llama"))
    method = decoder.prepare(SelfSpeculative(exit=2, length=2))
    ran = []
    forward = decoder.model.forward

    def watched(pool: Any, rows: Any, logits: Any, start: int = 0, stop: Any = None, *rest: Any) -> Any:
        ran.append((len(rows), start, stop))
        return forward(pool, rows, logits, start, stop, *rest)

    decoder.model.forward = watched  # type: ignore[method-assign]
    decoder.generate([[1, 2, 3], [4, 5], [6, 7]], method=method, max_new_tokens=4)
    assert ran[0] == (7, 0, None)  # the prompts
    assert ran[1:5] == [(3, 0, 2), (3, 0, 2), (3, 0, 2), (9, 2, 4)]


def test_samples_of_a_prompt_share_its_slots() -> None:
    decoder = Decoder(tiny("Llama"), method=Autoregressive())
    prompt = prompt_of(1, 40)
    sampling = Sampling(temperature=0.9, seed=5)
    expected = [
        decoder.generate(prompt, sampling=Sampling(temperature=0.9, seed=5 + sample), max_new_tokens=9).token_ids
        for sample in range(4)
    ]
    assert len({tuple(text) for text in expected}) > 1
    most = 0
    batch = decoder.stream(prompt, n=4, sampling=sampling, max_new_tokens=9)
    found: list[list[int]] = [[] for _ in range(4)]
    for number, item in batch:
        assert isinstance(item, Step)
        found[number] += item.tokens
        most = max(most, decoder.engine.pool.held)
    assert found == expected
    assert most <= len(prompt) + 4 * 9
    assert decoder.engine.pool.held == 0


@examples(6)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=2, max_size=5), st.integers(0, 9))
def test_texts_that_begin_alike_share_and_stay_apart(pairs: list[tuple[int, int]], seed: int) -> None:
    beginning = prompt_of(seed, 40)
    prompts = [[*beginning[:kept], 90, number] for number, (kept, _) in enumerate(pairs)]
    methods = [some(len(pairs), seed)[1][number] for number in range(len(pairs))]
    texts = (prompts, methods, [Sampling()] * len(pairs), [length for _, length in pairs])
    assert together(_decoder(), *texts) == alone(_decoder(), *texts)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_slot_is_leaked_by_many_requests(count: int) -> None:
    torch.manual_seed(0)
    decoder = Decoder(Bigram(torch.randn(12, 12)))
    draw = random.Random(4)
    methods = [Autoregressive(), Jacobi(window=3), PromptLookup(rows=6), Lookahead(window=2, ngram=3, guesses=2)]
    batch = decoder.batch(most=16)

    def ask() -> int:
        return batch.add(
            draw.choices(range(12), k=draw.randrange(1, 9)),
            method=draw.choice(methods),
            sampling=Sampling(temperature=draw.choice([0.0, 1.0]), seed=draw.randrange(99)),
            max_new_tokens=draw.randrange(1, 6),
        )

    last = [ask() for _ in range(20)][-1]
    for number, item in batch:
        assert isinstance(item, Step)
        if item.finish is not None and last < count - 1:
            last = ask()
        if draw.random() < 0.1:
            batch.cancel(draw.randrange(last + 1))
            if last < count - 1:
                last = ask()
        assert number <= last
    assert last == count - 1
    assert decoder.engine.pool.held == decoder.engine.pool.used == 0
    assert not any(decoder.engine.pool._owners)


def nan_for(token: int) -> Any:
    """A model that computes NaN once it sees a token: its keys are NaN, too."""
    model = copy.deepcopy(tiny("Llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    return model


@pytest.mark.parametrize("place", [0, 4, -1])
def test_a_texts_error_is_its_own(place: int) -> None:
    decoder = Decoder(nan_for(96), method=Autoregressive())
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5], [8, 9]]
    expected = [decoder.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts]
    assert 96 not in chain(*expected)
    bad = [2] * 5
    bad[place] = 96
    decoder.model.chunk = 3  # type: ignore[misc]
    with pytest.raises(BatchError, match=r"sequence 1 of the batch failed: at new token 1: .* contain NaN") as caught:
        decoder.generate([prompts[0], bad, *prompts[1:]], max_new_tokens=6)
    found = caught.value.results
    assert isinstance(found.pop(1).error, InvalidLogits)
    assert [result.token_ids for result in found] == expected
    assert decoder.engine.pool.held == 0
    assert [decoder.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts] == expected


def test_a_processors_error_is_its_texts_own() -> None:
    def refuse(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 5:
            raise RuntimeError("enough")
        return scores

    decoder = Decoder(tiny("Llama"), method=PromptLookup())
    samplings = [Sampling(), Sampling(processors=[refuse]), Sampling()]
    events = list(decoder.stream([[1, 2, 3]] * 3, sampling=samplings, max_new_tokens=6))
    errors = [(number, str(item)) for number, item in events if not isinstance(item, Step)]
    assert errors == [(1, "enough")]
    assert sorted(number for number, item in events if isinstance(item, Step) and item.finish) == [0, 2]
    assert decoder.engine.pool.held == 0


def test_a_forward_that_fails_ends_its_texts_and_leaves_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny("Llama"), method=Autoregressive())
    batch = decoder.stream([[1, 2], [3, 4]], max_new_tokens=5)
    steps = iter(batch)
    next(steps)
    next(steps)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(decoder.model, "forward", fail)
    assert [(number, str(item)) for number, item in steps] == [(0, "no room"), (1, "no room")]
    assert decoder.engine.pool.held == 0


def test_leaving_the_loop_leaves_the_pool_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny("Llama"))
    prompts, methods, *_ = some(7)
    for _ in decoder.stream(prompts, method=methods):
        break
    assert decoder.engine.pool.held == 0
    forward = decoder.model.forward
    calls = []

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return forward(*given)

    monkeypatch.setattr(decoder.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(prompts, method=methods)
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1, 2], []], {}, "prompt 1: the prompt is empty"),
        ([[1, 2], 3], {}, "or a list of such prompts"),
        ([[1, 2], [3, 9999]], {}, "prompt 1: the prompt has token id 9999"),
        (torch.tensor([[1, 2], [0, 3]]), {}, "2 dimensions, which may have padding"),
        ([[1], [2]], {"method": ["jacobi"]}, "method has 1 values for 2 prompts"),
        ([[1], [2]], {"max_new_tokens": [3, 0]}, "prompt 1: max_new_tokens=0"),
        ([[1], [2]], {"n": 0, "sampling": Sampling(temperature=1.0)}, "n=0 must be 1 or more"),
        ([1, 2], {"n": 2}, "without sampling all outputs are the same"),
        (["a", "b"], {}, "prompt 0: a prompt as text needs a tokenizer"),
    ],
)
def test_bad_input_is_named(prompts: Any, options: dict[str, Any], words: str) -> None:
    decoder = _decoder()
    with pytest.raises(InputError, match=words):
        decoder.generate(prompts, **options)
    assert decoder.engine.pool.held == 0


def test_there_must_be_room_for_a_text() -> None:
    with pytest.raises(InputError, match="most=0 must be 1 or more"):
        _decoder().batch(0)


def test_a_method_by_name_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder()
    prepared = []
    prepare = decoder.prepare
    monkeypatch.setattr(decoder, "prepare", lambda method: prepared.append(method) or prepare(method))
    decoder.generate([[1, 2], [3, 4], [5]], method=["jacobi", "jacobi", Autoregressive()], max_new_tokens=2)
    assert prepared.count("jacobi") == 1


def test_an_unknown_text_cannot_be_cancelled() -> None:
    with pytest.raises(InputError, match="there is no request 2 to cancel; this batch has 1"):
        _decoder().stream([[1, 2]]).cancel(2)


def test_one_prompt_in_a_list_is_a_batch_of_one() -> None:
    decoder = _decoder()
    (found,) = decoder.generate([[1, 2, 3]], max_new_tokens=4)
    assert found.token_ids == decoder.generate([1, 2, 3], max_new_tokens=4).token_ids
    assert found.seconds > 0
