"""Batches: each text is the one that it is alone, whoever is beside it. No tolerance anywhere in this file."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import (
    AdaDecode,
    Amphista,
    Autoregressive,
    Decoder,
    DraftModel,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    Method,
    PromptLookup,
    Sampling,
    SelfSpeculative,
    Step,
)
from outpace.models.hf import HFModel
from outpace.runtime.graphs import GraphEngine

from .conftest import tiny
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
    decoder.engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, **options)
    return decoder


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_each_text_is_the_one_it_is_alone(count: int) -> None:
    texts = some(count, seed=count)
    decoder = Decoder(tiny("Llama"))
    expected = alone(decoder, *texts)
    assert together(decoder, *texts) == expected


@settings(max_examples=15)
@given(st.data())
def test_joins_and_cancellations_change_nobody_else(data: Any) -> None:
    """Texts join and are cancelled at random steps; whoever is written to the end has the text it has alone."""
    count = data.draw(st.integers(1, 6))
    prompts, methods, samplings, lengths = some(count, data.draw(st.integers(0, 20)))
    decoder = _decoder()
    expected = alone(decoder, prompts, methods, samplings, lengths)
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


_known: list[Decoder] = []


def _decoder() -> Decoder:
    if not _known:
        _known.append(Decoder(tiny("Llama")))
    return _known[0]
