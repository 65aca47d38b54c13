"""A store of earlier texts: what it holds, what is guessed from it, and that no text is another for it."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import Auto, Autoregressive, Decoder, InputError, Method, PromptLookup, Sampling, Step
from outpace.cli.settings import choose_for_race, choose_method
from outpace.methods import auto
from outpace.methods.ngrams import History as Runs
from outpace.methods.store import Earlier, Store
from outpace.models.hf import HFModel
from outpace.runtime import program
from outpace.runtime.costs import CostCurve
from outpace.runtime.graphs import GraphEngine
from outpace.sources.history import BETWEEN, STORED, History
from outpace.step.nodes import NEVER
from outpace.trace import settings_of

from . import oracles
from .models import examples, mostly_slow, tiny, tiny_chain
from .test_heads import random_heads
from .test_lossless import prompt_of
from .test_sources import CPU, LANES, WORDS, assert_alike, lanes_with, offered, texts_of

SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3), Sampling(repetition_penalty=1.2)]
CHEAP = CostCurve({}, (1, 2, 64), (64,), ((1.0, 1.0, 1.1),))  # rows cost little


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "GROUPS", (1, 4, 64))
    monkeypatch.setattr(auto, "glance", lambda engine: CHEAP)


def decoder_of(name: str, programs: bool) -> Decoder:
    model = tiny(name)
    decoder = Decoder(model, method=Autoregressive())
    if programs:
        decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=1024)
    return decoder


def filled(texts: list[list[int]], size: int) -> list[int]:
    """What a store of so many tokens holds of these texts."""
    return ([BETWEEN] * size + [token for text in texts for token in (*text, BETWEEN)])[-size:]


def parted(tokens: list[int]) -> list[list[int]]:
    """The texts in it, as far as they are there."""
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token == BETWEEN:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts


def text_of(draw: random.Random, longest: int) -> list[int]:
    return draw.choices(range(WORDS), k=draw.randrange(1, longest))


@examples(60)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 7, 40]), st.booleans())
def test_the_newest_tokens_are_there_and_the_oldest_are_forgotten(draw: random.Random, size: int, early: bool) -> None:
    store, texts = Earlier(size, CPU), list[list[int]]()
    place, runs = store.tokens.data_ptr(), store.runs if early else None
    for _ in range(draw.randrange(6)):
        texts.append(text_of(draw, 30))
        store.add(texts[-1])
        assert store.tokens.tolist() == filled(texts, size)
        assert store.tokens.data_ptr() == place  # graphs read it there
    fresh = Runs(4, shortest=2)
    for text in parted(filled(texts, size)):
        fresh.extend([*text, BETWEEN])
    assert store.runs._next == fresh._next
    assert runs in (None, store.runs)


@examples(60)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 4, 9, 20]), st.integers(1, 7), st.integers(1, 9))
def test_guesses_follow_earlier_texts_to_their_ends(draw: random.Random, longest: int, depth: int, places: int) -> None:
    texts, size, floor = texts_of(draw), draw.choice([1, 8, 60]), draw.choice([0.0, 0.03])
    store, before = Earlier(size, CPU), list[list[int]]()
    source = History(longest, depth, places, STORED, CPU, floor, store.tokens)
    for _ in range(4):
        lanes = lanes_with(texts, [0] * LANES)
        (nodes,) = source.guess(lanes, torch.full((LANES,), 99))
        earlier = parted(filled(before, size))
        assert (nodes.tokens[nodes.chances > NEVER] >= 0).all()
        for lane, text in enumerate(texts):
            expected = oracles.store(text, earlier, longest, depth, places, floor)
            found = offered(nodes, lane)
            near = {path for path, chance in expected.items() if floor and chance < floor * 1.001}
            assert_alike(
                {path: chance for path, chance in found.items() if path not in near},
                {path: math.log(chance) for path, chance in expected.items() if path not in near},
            )
            for path in found:  # a piece of one text, behind what ends this one
                piece = [text[-1], *path]
                assert any(other[at : at + len(piece)] == piece for other in earlier for at in range(len(other)))
        before.append((draw.choice(texts) + text_of(draw, 9))[-draw.randrange(1, 30) :])
        store.add(before[-1])


METHODS: dict[str, Method] = {
    "auto": Auto(heads=False, rows=16, store=600),
    "auto, small": Auto(heads=False, rows=16, store=50),  # less than two texts
    "lookup": PromptLookup(rows=12, depth=6, store=120),
    "lookup, chain": PromptLookup(tree=False, depth=6, store=120),
}


@pytest.mark.parametrize(
    ("label", "programs"),
    mostly_slow(
        product([*METHODS, "medusa", "amphista"], [True, False]),
        [*product(["auto", "lookup, chain", "amphista"], [True]), *product(["auto, small", "lookup"], [False])],
    ),
)
@pytest.mark.parametrize("name", mostly_slow(["Llama", "Gemma2", "GPT2", "Qwen3"], quick=["Llama"]))
def test_each_text_is_plain_decodings(name: str, label: str, programs: bool) -> None:
    decoder = decoder_of(name, programs)
    method = METHODS.get(label)
    if method is None:
        method = decoder.prepare(Auto(heads=random_heads(label, tiny(name)), rows=16, store=600))
    prompts = [prompt_of(seed) for seed in range(3)]
    plain = [
        decoder.generate(prompt, method=Autoregressive(), sampling=sampling, max_new_tokens=22).token_ids
        for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]
    for length in (10, 22):
        found = decoder.generate(prompts, method=method, sampling=SAMPLINGS, max_new_tokens=length)
        assert [result.token_ids for result in found] == [text[:length] for text in plain]
    for prompt, sampling, text in zip(prompts, SAMPLINGS, plain, strict=True):  # one after the other
        assert decoder.generate(prompt, method=method, sampling=sampling, max_new_tokens=9).token_ids == text[:9]
    assert decoder.engine.pool.held == 0


def steps_of(decoder: Decoder, method: Method, seed: int, **options: Any) -> list[Step]:
    return list(decoder.stream(prompt_of(seed), method=method, max_new_tokens=50, **options))


@pytest.mark.parametrize(
    ("method", "sampled", "programs"),
    mostly_slow(
        product([Auto, PromptLookup], [False, True], [True, False]),
        [*product([Auto, PromptLookup], [False], [True, False]), (Auto, True, False)],
    ),
)
def test_a_text_that_was_written_before_takes_far_fewer_steps(
    method: Any, sampled: bool, programs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SAMPLINGS[sampled]
    monkeypatch.setattr(program.Sizes, "choose", lambda self, texts, arms: max(arms, key=lambda arm: arm.rows))
    decoder = decoder_of("Llama", programs)
    stored, none = decoder.prepare(method(store=600)), decoder.prepare(method())
    first, second = (steps_of(decoder, stored, 5, sampling=sampling) for _ in range(2))
    without = steps_of(decoder, none, 5, sampling=sampling)
    texts = [[token for step in steps for token in step.tokens] for steps in (first, second, without)]
    assert texts[0] == texts[1] == texts[2]
    assert len(second) < 0.6 * min(len(first), len(without))
    assert sum(source == STORED for step in second for source in step.sources) > 20


@pytest.mark.parametrize("programs", [True, False])
def test_what_a_text_holds_when_it_ends_or_is_left(programs: bool) -> None:
    decoder, prompt = decoder_of("Llama", programs), prompt_of(1)
    method = decoder.prepare(PromptLookup(rows=12, depth=6, store=500))
    tokens = method.store.of(decoder.model).tokens
    text = decoder.generate(prompt, method=method, max_new_tokens=20).token_ids
    decoder.ends = [text[12]]
    short = decoder.generate(prompt, method=method, max_new_tokens=20).token_ids
    assert len(short) < 20
    decoder.ends = []
    stream = decoder.stream(prompt, method=method, max_new_tokens=20)
    left = [*next(stream).tokens, *next(stream).tokens]
    stream.close()  # type: ignore[attr-defined]
    assert tokens.tolist() == filled([[*prompt, *text], [*prompt, *short], [*prompt, *left]], 500)


@pytest.mark.parametrize("programs", [True, False])
def test_no_method_knows_the_texts_of_another_nor_of_another_decoder(programs: bool) -> None:
    decoder, other = decoder_of("Llama", programs), decoder_of("Llama", programs)
    one, two = Auto(heads=False, rows=16, store=500), Auto(heads=False, rows=16, store=500)
    assert one != two

    def offers(decoder: Decoder, method: Method) -> bool:
        return any(STORED in step.draft.sources for step in steps_of(decoder, method, 1))

    assert not offers(decoder, one)
    assert offers(decoder, one)  # given unprepared, too
    assert offers(decoder, decoder.prepare(one))
    assert not offers(decoder, two)
    assert not offers(other, one)
    if programs:
        assert len(decoder.engine._programs) == 2  # type: ignore[attr-defined]


def test_models_that_compute_chains_only() -> None:
    decoder = Decoder(tiny_chain("Bloom"), method=Auto(store=500))
    plain = decoder.generate(prompt_of(1), method=Autoregressive(), max_new_tokens=30)
    first, second = (decoder.generate(prompt_of(1), max_new_tokens=30) for _ in range(2))
    assert first.token_ids == second.token_ids == plain.token_ids
    assert second.accepted[STORED] > 10
    assert second.steps < first.steps


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_for_race(["auto"], ["auto.store=65536"], "cpu") == [("auto", {"store": 65536})]
    assert choose_method("prompt-lookup", ["store=9"], "cpu") == ("prompt-lookup", {"store": 9})
    for wrong, message in (("many", "whole number"), ("-1", "out of range"), ("2000000", "out of range")):
        with pytest.raises(InputError, match=message):
            choose_method("auto", [f"store={wrong}"], "cpu")
    assert Auto() == Auto(store=0)
    method = Auto(store=70)
    assert isinstance(method.store, Store)
    assert repr(method).endswith("store=70)")
    assert settings_of(method)["store"] == "70 tokens"
    assert not PromptLookup(store=70).dealt  # ranks may have written other texts
