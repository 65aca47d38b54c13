"""The host drafts by a plan what a program drafts, step for step. No tolerance anywhere in this file."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from outpace import Amphista, CostCurve, Decoder, Hydra, Jacobi, Lookahead, Medusa, Method, PromptLookup, Sampling, Step
from outpace.draft import Draft
from outpace.methods.headed import Headed
from outpace.methods.lookahead import PUBLISHED
from outpace.methods.planned import SPAN, PlannedDrafter
from outpace.models.hf import HFModel
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.plain import Engine

from .conftest import tiny
from .test_heads import random_heads
from .test_lossless import prompt_of

METHODS: dict[str, Method] = {
    "prompt-lookup": PromptLookup(rows=12, depth=6),
    "prompt-lookup chain": PromptLookup(tree=False, depth=6),
    "prompt-lookup gated": PromptLookup(rows=6, gate=0.2, depth=3),
    "jacobi": Jacobi(window=5),
    "lookahead": Lookahead(window=3, ngram=3, guesses=3, reach=6),
    "lookahead 7,4,7": Lookahead(window=7, ngram=4, guesses=7),
    "lookahead as published": Lookahead(window=2, ngram=4, guesses=2, **PUBLISHED),
    "lookahead by token": Lookahead(window=3, ngram=3, guesses=3, shift="token", reach=0, longest_key=2),
}
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_p=0.8, top_k=20, repetition_penalty=1.2, logit_bias={5: 2.0}, seed=2**63 + 5),
]
PROMPTS = [prompt_of(1), [7], prompt_of(2)]
LENGTH = 20


@pytest.fixture(autouse=True)
def _by_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods of this file draft so on the host."""

    def start(self: Method, engine: Engine, *text: Any) -> PlannedDrafter:
        plan = self.plan(engine)
        assert plan is not None
        return PlannedDrafter(plan, engine, *text)

    for kind in (Jacobi, Lookahead, PromptLookup, Headed):
        monkeypatch.setattr(kind, "start", start)


@functools.cache
def decoders(**changes: Any) -> tuple[Decoder, Decoder]:
    """The host's, and one that takes whole steps."""
    model = tiny("Llama", **changes)
    host, whole = Decoder(model), Decoder(model)
    whole.engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    return host, whole


def steps_of(decoder: Decoder, method: Any, prompt: list[int], sampling: Sampling, length: int = LENGTH) -> list[Step]:
    return list(decoder.stream(prompt, method=method, sampling=sampling, max_new_tokens=length))


def text_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def drafts_of(steps: list[Step]) -> dict[int, Draft]:
    """By the number of tokens written before."""
    ends = [0, *(sum(len(step.tokens) for step in steps[: place + 1]) for place in range(len(steps)))]
    return {end: step.draft for end, step in zip(ends, steps, strict=False)}


@pytest.mark.parametrize("label", METHODS)
def test_the_host_drafts_as_a_program(label: str) -> None:
    host, whole = decoders()
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        expected = host.generate(prompt, method="autoregressive", sampling=sampling, max_new_tokens=LENGTH).token_ids
        found = steps_of(host, METHODS[label], prompt, sampling)
        programs = steps_of(whole, METHODS[label], prompt, sampling)
        assert text_of(found) == text_of(programs) == expected
        assert [step.draft for step in found] == [step.draft for step in programs]
        assert [step.rows for step in found[:-1]] == [step.rows for step in programs[:-1]]
    assert host.engine.pool.held == 0


@pytest.mark.parametrize("kind", [Medusa, Hydra, Amphista])
def test_heads_guess_for_the_host_as_in_a_program(kind: Any) -> None:
    """The program has read the prompt before the first step, so steps may differ; drafts at the same text do not."""
    host, whole = decoders()
    heads, common = random_heads(kind.name, tiny("Llama")), 0
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        expected = host.generate(prompt, method="autoregressive", sampling=sampling, max_new_tokens=LENGTH).token_ids
        found = steps_of(host, host.prepare(kind(heads=heads, rows=12)), prompt, sampling)
        programs = steps_of(whole, whole.prepare(kind(heads=heads, rows=12)), prompt, sampling)
        assert text_of(found) == text_of(programs) == expected
        drafts, known = drafts_of(found), drafts_of(programs)
        both = (drafts.keys() & known.keys()) - {0}
        common += len(both)
        assert [drafts[end] for end in both] == [known[end] for end in both]
    assert common > LENGTH


@pytest.mark.parametrize("label", ["prompt-lookup", "lookahead"])
def test_a_text_that_outgrows_its_places(label: str) -> None:
    host, whole = decoders(max_position_embeddings=1024)
    prompt = prompt_of(4, SPAN - 16)
    found = steps_of(host, METHODS[label], prompt, Sampling(), 40)
    programs = steps_of(whole, METHODS[label], prompt, Sampling(), 40)
    assert [step.draft for step in found] == [step.draft for step in programs]


def test_what_is_too_dear_is_not_drafted() -> None:
    host, whole = decoders(num_hidden_layers=1)
    for decoder in (host, whole):
        decoder.engine.costs = CostCurve({}, (1, 2, 128), (100,), ((1.0, 1.1, 6.0),))
    drafts = [
        [step.draft for step in steps_of(decoder, PromptLookup(), prompt_of(1), Sampling())]
        for decoder in (host, whole)
    ]
    assert drafts[0] == drafts[1]
    assert 1 < max(map(len, drafts[0])) < 30


def test_under_the_rejection_rule_heads_do_not_know_the_noise() -> None:
    """All texts are the same by the bias, so their drafts may differ by the noise alone."""
    host, _ = decoders()
    method = host.prepare(Medusa(heads=random_heads("medusa", tiny("Llama")), rows=12, lookup=0.0))
    same = {}
    for rule in ("keyed", "rejection"):
        samplings = [Sampling(temperature=1.0, rule=rule, seed=seed, logit_bias={7: 1e4}) for seed in (1, 2)]
        one, other = (steps_of(host, method, [5, 9, 5], sampling, 4) for sampling in samplings)
        assert text_of(one) == text_of(other) == [7] * 4
        same[rule] = drafts_of(one)[1] == drafts_of(other)[1]
    assert same == {"keyed": False, "rejection": True}
