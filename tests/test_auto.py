"""`auto`: what it learns about guesses, how it sizes steps, and that its text is plain decoding's."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from outpace import (
    Amphista,
    Auto,
    Autoregressive,
    CostCurve,
    Decoder,
    InputError,
    Lookahead,
    OutpaceWarning,
    PromptLookup,
    Sampling,
    Step,
    chart,
)
from outpace.bench import calibration
from outpace.methods import auto
from outpace.methods.beliefs import Beliefs
from outpace.models.hf import HFModel
from outpace.runtime import calibrate, program
from outpace.runtime.costs import Running
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.sizes import AGAIN, LONGEST, TRIED, WAIT, Arm, Gains, Sizes
from outpace.sources.recycle import SALTS, Recycle
from outpace.step.chances import CUTS, FREE, KNOTS, LOWEST, SOURCES, Chances
from outpace.step.nodes import NEVER, believed, knots_of, plant

from .models import examples, mostly_slow, tiny, tiny_chain
from .test_heads import random_heads
from .test_lossless import prompt_of
from .test_step import nodes_of, random_offers

SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3), Sampling(repetition_penalty=1.2)]


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "GROUPS", (1, 4, 64))


def decoder_of(model: Any) -> Decoder:
    decoder = Decoder(model, method=Autoregressive())
    decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=1024)
    return decoder


@given(draw=st.randoms(use_true_random=False))
@examples(30)
def test_what_is_believed_follows_the_counts_and_never_rises(draw: random.Random) -> None:
    chances = Chances(["model", "one", "two", "two"])
    for _ in range(draw.randrange(4)):
        sources = [draw.randrange(1, 4) for _ in range(200)]
        chances.count(sources, [draw.randrange(KNOTS) for _ in sources], [draw.random() < 0.3 for _ in sources])
    table = chances.table()
    assert table.shape == (4, KNOTS)
    assert (np.diff(table, axis=1) <= 0).all()
    assert (table < 0).all()
    assert (table[2] == table[3]).all()  # counted together
    said = torch.linspace(-9, 0, 50)[None]
    for source in range(4):
        found = believed(said, torch.full_like(said, source, dtype=torch.long), torch.tensor(table))
        assert (found.diff() >= -1e-6).all()
        assert (knots_of(said) >= 0).all()
        assert (knots_of(said) < KNOTS).all()
    never = torch.full((1, 1), NEVER)
    assert believed(never, torch.ones(1, 1, dtype=torch.long), torch.tensor(table)).item() == NEVER


def test_the_least_likely_tokens_are_still_told_apart() -> None:
    chances = Chances(["model", "lookup"])
    chances.count([1] * 4000, [KNOTS - 1] * 4000, [False] * 4000)
    said = torch.tensor([[LOWEST, LOWEST - 1.0, LOWEST - 5.0]])
    found = believed(said, torch.ones_like(said, dtype=torch.long), torch.tensor(chances.table()))
    assert torch.allclose(found - found[:, :1], said - said[:, :1])
    beliefs = Beliefs(chances)
    assert beliefs.of("lookup", 1e-4) == pytest.approx(10 * beliefs.of("lookup", 1e-5))


def test_counts_fade_and_many_of_them_outweigh_what_was_said() -> None:
    chances = Chances(["model", "lookup"])
    for right in (True, False):
        for _ in range(200):
            chances.count([1] * 50, [2] * 50, [right] * 50)
    assert np.exp(chances.table()[1, 2]) < 0.05
    assert chances.offered.max() <= 2048


@given(draw=st.randoms(use_true_random=False), lanes=st.integers(1, 3), most=st.integers(1, 12))
@examples(30)
def test_whatever_is_believed_no_guess_is_without_the_one_before_it(draw: random.Random, lanes: int, most: int) -> None:
    each = [random_offers(draw) for _ in range(lanes)]
    nodes = [nodes_of(offers) for offers in zip(*each, strict=True)]
    chances = Chances(["model", "one", "two"])
    sources = [draw.randrange(1, 3) for _ in range(300)]
    chances.count(sources, [draw.randrange(KNOTS) for _ in sources], [draw.random() < 0.4 for _ in sources])
    offers = [offer._replace(sources=1 + number % 2, costly=number % 2 == 0) for number, offer in enumerate(nodes)]
    room = torch.full((lanes,), 9)
    rows = plant(torch.arange(lanes), offers, most, room, rows=most + 2, table=torch.tensor(chances.table()))
    for lane in range(lanes):
        for row in range(1, int(rows.valid[lane].sum())):
            parent = int(rows.parents[lane, row])
            assert parent < row
            assert rows.depths[lane, parent] == rows.depths[lane, row] - 1
            assert rows.sees[lane, row].sum() == rows.depths[lane, row] + 1
            assert rows.sources[lane, row] % SOURCES in (1, 2)
            free = any(
                (paths[lane].gather(1, depths[lane, :, None])[:, 0] == rows.hashes[lane, row])
                .logical_and(said[lane] > NEVER)
                .any()
                for _, depths, paths, said, *_ in offers[1::2]
            )
            assert (rows.sources[lane, row] >= FREE) == free


def arms_of(sizes: Sizes, times: dict[tuple[int, bool], float]) -> list[Arm]:
    """Steps of such rows, with costly sources or without, that take so many milliseconds."""
    arms = [Arm(rows, costly, (rows, costly)) for rows, costly in times]
    for arm, ms in zip(arms, times.values(), strict=True):
        sizes.timed(arm.kind, ms)
    return arms


def trees(most: float, few: float, free: float) -> list[float]:
    """Trees that are expected to bring so many tokens with 64 rows and with 16, and of free guesses in both."""
    return [*(1, 1, 1, 1, few, few, most), *(1, 1, 1, 1, free, free, free), free - 1]


def test_a_size_is_chosen_by_what_it_brings_and_costs() -> None:
    sizes = Sizes()
    arms = arms_of(sizes, {(1, False): 1.0, (16, False): 1.05, (64, False): 1.2})
    gains = sizes.begin()
    assert sizes.choose([gains], arms).rows == 64
    for _ in range(200):
        gains.learn(trees(2, 2, 2), arms[2], 2, 2)
    assert sizes.choose([gains], arms).rows == 16
    for _ in range(200):
        gains.learn(trees(2, 2, 2), arms[2], 1, 1)  # none of them is right
    chosen = [sizes.choose([gains], arms).rows for _ in range(600)]
    assert {*chosen} == {1, 64}
    assert 600 // LONGEST <= chosen.count(64) <= 10  # now and then, and ever more seldom
    sizes.end(gains, 1000, 1000)
    fresh = sizes.begin()
    assert sizes.choose([fresh], arms).rows == 1  # the next text begins with what the last has taught


def test_heads_are_left_out_where_they_bring_less_than_they_cost() -> None:
    sizes = Sizes()
    arms = arms_of(sizes, {(1, False): 1.0, (64, False): 1.2, (64, True): 1.5})
    gains = sizes.begin()
    for _ in range(200):
        gains.learn(trees(4, 3, 2), arms[2], tokens=4, free=2)
    assert sizes.choose([gains], arms).costly  # twice the tokens for a quarter more time
    for _ in range(200):
        gains.learn(trees(4, 3, 4), arms[2], tokens=4, free=4)
    assert sizes.choose([gains], arms) == arms[1]  # others have guessed all of it
    for _ in range(99):
        sizes.timed(arms[2].kind, 1.21)
    assert sizes.choose([gains], arms).costly  # there is no way back, so a percent is not enough


def test_a_text_begins_without_heads_where_they_did_not_pay() -> None:
    sizes = Sizes()
    arms = arms_of(sizes, {(1, False): 1.0, (64, False): 1.2, (64, True): 1.5})
    gains = sizes.begin()
    assert not sizes.spares([gains], arms, 100)  # nothing is known yet
    for _ in range(200):
        gains.learn(trees(4, 3, 4), arms[2], tokens=4, free=4)  # others have guessed all of it
    sizes.end(gains, 200, 800)
    begun = [sizes.spares([sizes.begin()], arms, 100) for _ in range(3 * AGAIN)]
    assert begun == 3 * [*(AGAIN - 1) * [True], False]  # now and then they are tried again
    gains = sizes.begin()
    for _ in range(200):
        gains.learn(trees(4, 3, 3), arms[2], tokens=4, free=3)  # worth a little more than it costs
    sizes.end(gains, 200, 800)
    assert not sizes.spares([sizes.begin()], arms, 100)
    sizes.read(20.0)
    assert sizes.spares([sizes.begin()], arms, 100)  # but not if they read the prompt first
    assert sizes.spares([sizes.begin() for _ in range(4)], arms, 400)  # for which all others wait
    for _ in range(99):
        sizes.end(sizes.begin(), 1, 2000)
    assert not sizes.spares([sizes.begin()], arms, 2000)  # a long text makes up for it


@pytest.mark.parametrize("seed", range(3))
def test_heads_that_pay_are_not_lost_to_chance(seed: int) -> None:
    """What trees may bring varies from step to step. In the mean heads bring a fifth more, for a sixth of the time."""
    sizes, rng = Sizes(), random.Random(seed)
    arms = arms_of(sizes, {(64, False): 4.6, (64, True): 5.4})
    for _ in range(60):
        gains, frugal = sizes.begin(), False
        for step in range(40):
            allowed = arms[:1] if frugal else arms if step >= TRIED else arms[1:]
            arm = sizes.choose([gains], allowed)
            frugal |= not arm.costly
            luck, other = rng.lognormvariate(-0.18, 0.6), rng.lognormvariate(-0.125, 0.5)
            most = 2.6 * luck
            free = min(1.94 * luck * other, most)
            right, hoped = 0, most if arm.costly else free
            while rng.random() < hoped / (1 + hoped):
                right += 1
            shared = sum(rng.random() < free / most for _ in range(right)) if arm.costly else right
            gains.learn(trees(1 + most, 1 + most, 1 + free), arm, 1 + right, 1 + shared)
        sizes.end(gains, 40, 128)
    assert sizes.chosen[64, False] == 0


def test_steps_that_were_never_timed_drift_with_those_that_were() -> None:
    sizes = Sizes()
    for kind, ms in (("one", 1.0), ("two", 2.0)):
        sizes.rested(kind, ms)
    assert sizes.costs("one", "two") == (1.0, 2.0)
    sizes.timed("one", 1.5)
    assert sizes.costs("one", "two") == (1.5, 3.0)
    assert sizes.costs("one", "three") is None


def test_a_text_goes_on_without_heads_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    decoder = decoder_of(model)
    method = decoder.prepare(Auto(heads=random_heads("amphista", model), rows=8))
    monkeypatch.setattr(Sizes, "ms", lambda self, kind: 9.0 if kind[2] else 1.0)
    for prompts in ([prompt_of(1)], [prompt_of(seed) for seed in range(3)]):
        steps: dict[int, list[Step]] = {number: [] for number in range(len(prompts))}
        for number, step in decoder.stream(prompts, method=method, max_new_tokens=40):
            steps[number].append(step)
        for number, prompt in enumerate(prompts):
            written = [token for step in steps[number] for token in step.tokens]
            assert written == Decoder(model, method=Autoregressive()).generate(prompt, max_new_tokens=40).token_ids
            asked = [any(source.startswith("head") for source in step.draft.sources) for step in steps[number]]
            assert any(asked[:TRIED]) == (len(prompts) == 1)  # later texts begin without them
            assert not any(asked[2 * TRIED :])


def test_steps_that_waited_for_something_else_say_little() -> None:
    sizes = Sizes()
    sizes.timed("one", 1.0)
    for _ in range(50):
        sizes.timed("one", 9.0)
    assert sizes._ms["one"] == 1.0
    for _ in range(50):
        sizes.timed("one", 1.2)
    assert 1.15 < sizes._ms["one"] < 1.21
    assert WAIT < LONGEST


@given(draw=st.randoms(use_true_random=False), lanes=st.integers(1, 3))
@examples(30)
def test_what_trees_may_bring_is_the_sum_of_the_chances_of_their_guesses(draw: random.Random, lanes: int) -> None:
    each = [random_offers(draw) for _ in range(lanes)]
    nodes = [nodes_of(offers) for offers in zip(*each, strict=True)]
    offers = [offer._replace(sources=1 + number % 2, costly=number % 2 == 0) for number, offer in enumerate(nodes)]
    table = torch.tensor(Chances(["model", "one", "two"]).table())
    room = torch.full((lanes,), 9)
    tree = plant(torch.arange(lanes), offers, 8, room, table=table)
    expected = tree.expected
    assert expected is not None
    for lane in range(lanes):
        paths = [int(tree.hashes[lane, row]) for row in range(1, 8) if tree.valid[lane, row]]
        hoped = sum(likeliest_of(offers[1::2], lane, path, table) for path in paths)
        assert abs(float(expected[lane, -1]) - hoped) < 0.01 * (1 + hoped)
    for kind, some in enumerate((offers, offers[1::2])):
        for place, cut in enumerate(CUTS):
            rows = plant(torch.arange(lanes), some, cut, room, table=table) if some and cut > 1 else None
            for lane in range(lanes):
                right = 0.0
                for row in range(1, cut) if rows else ():
                    if rows is not None and rows.valid[lane, row]:
                        right += likeliest_of(some, lane, int(rows.hashes[lane, row]), table)
                brings = float(expected[lane, kind * len(CUTS) + place])
                assert abs(brings - 1 - right) < 0.01 * (1 + right)  # but for what depth takes off


def likeliest_of(offers: list[Any], lane: int, path: int, table: torch.Tensor) -> float:
    """The greatest chance that is believed of a path."""
    found = []
    for offer in offers:
        hashes = offer.paths[lane].gather(1, offer.depths[lane, :, None])[:, 0]
        said = offer.chances[lane][hashes == path]
        found += believed(said[None], torch.full_like(said[None], offer.sources, dtype=torch.long), table)[0].tolist()
    return math.exp(max(found, default=NEVER))


@pytest.mark.parametrize("heads", mostly_slow([None, "medusa", "hydra", "amphista"], quick=[None, "amphista"]))
@pytest.mark.parametrize("name", mostly_slow(["Llama", "Gemma2", "GPT2", "Mistral", "Qwen3"], quick=["Llama"]))
def test_each_text_is_plain_decodings(name: str, heads: str | None) -> None:
    model = tiny(name)
    decoder = decoder_of(model)
    method = decoder.prepare(Auto(heads=random_heads(heads, model) if heads else False, rows=16))
    prompts = [prompt_of(seed) for seed in range(3)]
    plain = Decoder(model, method=Autoregressive())
    for turn in range(2):  # with what was learnt, too
        found = decoder.generate(prompts, method=method, sampling=SAMPLINGS, max_new_tokens=8 + 10 * turn)
        for result, prompt, sampling in zip(found, prompts, SAMPLINGS, strict=True):
            alone = plain.generate(prompt, sampling=sampling, max_new_tokens=8 + 10 * turn)
            assert result.token_ids == alone.token_ids
    (entry,) = decoder.engine._programs  # type: ignore[attr-defined]
    assert entry[-1].chances.counted > 0
    assert decoder.engine.pool.held == 0


def test_steps_have_one_row_where_guesses_never_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(tiny("Llama"))
    monkeypatch.setattr(Gains, "tokens", lambda self, rows, costly=True: 1.0)
    monkeypatch.setattr(Sizes, "ms", lambda self, kind: 1.0 + kind[1])
    steps = list(decoder.stream(prompt_of(1), method=Auto(heads=False, rows=8), max_new_tokens=40))
    assert sum(len(step.draft) == 1 for step in steps) > 0.8 * len(steps)


def test_a_result_says_what_guesses_came_to() -> None:
    model = tiny("Llama")
    for decoder in (decoder_of(model), Decoder(model)):
        result = decoder.generate(prompt_of(2), method=Auto(heads=False, rows=8), max_new_tokens=40)
        assert result.rows == result.steps + sum(result.offered.values())
        assert sum(result.accepted.values()) == sum(source != "model" for source in result.sources)
        assert all(result.accepted[name] <= result.offered[name] for name in result.accepted)
        assert result.times_plain is not None
        assert result.times_plain > 0
        assert result.to_json()["offered"] == result.offered
    plain = decoder.generate(prompt_of(2), method=Autoregressive(), max_new_tokens=4)
    assert (plain.rows, plain.offered, plain.times_plain) == (4, {}, None)


def test_what_was_learnt_is_stored_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a process that decodes a single short sequence."""
    monkeypatch.setattr(calibrate, "folder", lambda: tmp_path)
    decoder = decoder_of(tiny("Llama"))
    decoder.generate(prompt_of(1), method=Auto(heads=False), max_new_tokens=20)
    (file,) = tmp_path.iterdir()
    known = calibrate.remembered(decoder.engine, ["model", "lookup", "recycled"])
    assert known.offered.sum() > 0
    assert known.counted == 0
    whole = file.read_text()
    for text in (
        whole[: len(whole) // 2],
        json.dumps({"version": 0}),
        "[]",
        '{"version": 1, "counts": {"lookup": [[1]]}}',
    ):
        file.write_text(text)
        with pytest.warns(OutpaceWarning, match="ignored") as caught:
            fresh = calibrate.remembered(decoder.engine, ["model", "lookup"])
        assert len(caught) == 1
        assert fresh.offered.sum() == 0


def test_what_cannot_be_stored_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibrate, "folder", lambda: tmp_path / "file")
    monkeypatch.setattr(calibrate, "NEWS", 1)
    decoder = decoder_of(tiny("Llama"))
    with pytest.warns(OutpaceWarning, match="could not be written"):
        decoder.generate(prompt_of(0), method=Auto(heads=False), max_new_tokens=20)
    decoder.generate(prompt_of(1), method=Auto(heads=False), max_new_tokens=20)  # warnings are errors here


@pytest.mark.parametrize("heads", mostly_slow([None, "medusa", "hydra", "amphista"], quick=[None, "hydra"]))
def test_where_the_host_drafts_each_text_is_plain_decodings(heads: str | None) -> None:
    model = tiny("Llama")
    decoder = Decoder(model, method=Auto(heads=random_heads(heads, model) if heads else False, rows=16))
    prompts = [prompt_of(seed) for seed in range(3)]
    found = decoder.generate(prompts, sampling=SAMPLINGS, max_new_tokens=40)
    for result, prompt, sampling in zip(found, prompts, SAMPLINGS, strict=True):
        alone = decoder.generate(prompt, method=Autoregressive(), sampling=sampling, max_new_tokens=40)
        assert result.token_ids == alone.token_ids
    assert decoder.engine.costs is None  # others draft as before
    assert decoder.engine.pool.held == 0


def test_a_method_that_brings_less_than_it_costs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = CostCurve({}, (1, 2, 64), (64,), ((1.0, 1.0, 1.1),))  # rows cost little, so the window is wide
    monkeypatch.setattr(auto, "glance", lambda engine: cheap)
    choose = auto.Known.choose
    monkeypatch.setattr(auto.Known, "choose", lambda self, methods: 0)
    decoder = Decoder(tiny("Llama"), method=Auto(heads=False))
    steps = list(decoder.stream(prompt_of(3), max_new_tokens=60))
    assert max(len(step.draft) for step in steps) > 20
    dear = CostCurve({}, (1, 2, 64), (64,), ((1.0, 9.0, 99.0),))
    monkeypatch.setattr(auto, "glance", lambda engine: dear)
    monkeypatch.setattr(auto, "TRIAL", 4)
    bold = Lookahead(window=7, ngram=4, guesses=7)
    monkeypatch.setattr(Auto, "_methods", lambda self: [bold, PromptLookup()])
    decoder = Decoder(tiny("Llama"), method=Auto(heads=False))
    steps = list(decoder.stream(prompt_of(3), max_new_tokens=60))
    assert min(len(step.draft) for step in steps[:4]) > 1
    assert all(len(step.draft) == 1 for step in steps[4:])
    monkeypatch.setattr(auto.Known, "choose", choose)
    steps = list(decoder.stream(prompt_of(4), max_new_tokens=20))
    assert all(len(step.draft) == 1 for step in steps)  # the next text begins so


@pytest.mark.parametrize("recycled", [2, 8])
def test_lookup_that_recycles_writes_plain_decodings_text(recycled: int) -> None:
    model = tiny("Llama")
    for decoder in (decoder_of(model), Decoder(model)):
        method = PromptLookup(rows=12, recycled=recycled)
        prompts = [prompt_of(seed) for seed in range(3)]
        found = decoder.generate(prompts, method=method, sampling=SAMPLINGS, max_new_tokens=16)
        for result, prompt, sampling in zip(found, prompts, SAMPLINGS, strict=True):
            alone = decoder.generate(prompt, method=Autoregressive(), sampling=sampling, max_new_tokens=16)
            assert result.token_ids == alone.token_ids
        assert {"recycled", "runner-up"} & {name for result in found for name in result.offered}


def test_where_the_host_drafts_it_recycles_and_carries_that_to_texts_of_the_same_salt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cheap = CostCurve({}, (1, 2, 64), (64,), ((1.0, 1.0, 1.1),))
    monkeypatch.setattr(auto, "glance", lambda engine: cheap)
    monkeypatch.setattr(auto.Known, "choose", lambda self, methods: 0)
    decoder = Decoder(tiny("Llama"))
    offered: list[Counter[str]] = []
    for salt, carried in (("a", True), ("b", True), ("a", True), ("a", False)):
        batch = decoder.batch()
        batch.add(prompt_of(4), method=Auto(heads=False, carried=carried), max_new_tokens=2, salt=salt)
        steps = [step for _, step in batch if isinstance(step, Step)]
        offered.append(Counter(steps[0].draft.sources))
    assert [bool(first["recycled"]) for first in offered] == [False, False, True, False]
    known = decoder.engine.notes[Auto]
    assert known.beliefs.chances.counted > 0
    for number in range(2 * SALTS):
        known.leave(str(number), known.recall("a"))
    assert [*known._left] == [str(number) for number in range(SALTS, 2 * SALTS)]


@given(
    said=st.lists(st.tuples(st.sampled_from(["lookup", "recycled"]), st.floats(0, 1), st.booleans()), max_size=200),
    chances=st.lists(st.floats(1e-9, 1), min_size=2, max_size=2).map(sorted),
)
def test_what_is_called_likelier_is_believed_no_less(said: list[tuple[str, float, bool]], chances: list[float]) -> None:
    beliefs = Beliefs(Chances(["lookup", "recycled"]))
    right = {number for number, (*_, true) in enumerate(said) if true}
    beliefs.learn([name for name, *_ in said], [chance for _, chance, _ in said], right)
    for name in ("lookup", "recycled"):
        low, high = (beliefs.of(name, chance) for chance in chances)
        assert 0 < low <= high * (1 + 1e-6) <= 1


def test_counts_of_other_sources_are_kept_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chances.json"
    first = Chances(["heads", "lookup"])
    first.count([0, 1], [0, 0], [True, False])
    first.keep(path)
    second = Chances(["lookup"])
    assert second.load(path)
    second.count([0], [0], [True])
    second.keep(path)
    assert first.load(path)
    assert (first.offered[0, 0], first.offered[1, 0]) == (1, 2)


def test_the_quickest_method_is_taken_and_the_boldest_tried_again() -> None:
    known = auto.Known(Decoder(tiny("Llama")).engine)
    methods = [Lookahead(), PromptLookup()]
    assert known.choose(methods) == 1
    known.learn(methods[1], 1.2)
    assert known.choose(methods) == 0
    known.learn(methods[0], 0.9)
    assert [known.choose(methods) for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    for _ in range(9):
        known.learn(methods[0], 1.5)
    assert known.choose(methods) == 0
    assert known.begun == {"lookahead": 3, "prompt-lookup": 6}
    assert known.speeds["prompt-lookup"] == 1.2


def test_the_boldest_is_tried_more_and_more_seldom() -> None:
    known = auto.Known(Decoder(tiny("Llama")).engine)
    methods = [Lookahead(), PromptLookup()]
    known.learn(methods[0], 0.5)
    known.learn(methods[1], 1.5)
    chosen = [known.choose(methods) for _ in range(200)]
    assert [text for text, place in enumerate(chosen, 1) if place == 0] == [8, 24, 56, 120, 184]
    for _ in range(20):
        known.learn(methods[0], 2.0)
    assert {known.choose(methods) for _ in range(30)} == {0}


def test_prices_follow_the_steps_as_they_run() -> None:
    """A glance that found 16 rows as cheap as one; then a step of one row is due now and then."""
    running = Running(CostCurve({}, (1, 2, 4, 8, 16), (64,), ((1.0,) * 5,)))
    due = []
    for step in range(400):
        rows = 1 if running.due else 16
        due += [step] if running.due else []
        running.add(rows, {1: 0.03, 16: 0.06}[rows])
    assert due[:4] == [8, 25, 58, 123]
    assert max(later - sooner for sooner, later in itertools.pairwise(due)) == 65
    assert running.curve.step(1) == pytest.approx(0.03)
    assert 1.8 < running.curve.price(16) <= 2.0
    assert running.curve.price(4) == 1.0  # nothing is known of it


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(1e-4, 10)), max_size=100))
def test_running_prices_never_fall_with_rows(steps: list[tuple[int, float]]) -> None:
    running = Running(CostCurve({}, (1, 2, 4, 8, 16), (64,), ((0.01, 0.012, 0.02, 0.03, 0.05),)))
    for rows, seconds in steps:
        running.add(rows, seconds)
    prices = [running.curve.price(rows) for rows in range(1, 40)]
    assert prices[0] == pytest.approx(1.0)
    assert all(later >= sooner * (1 - 1e-9) for sooner, later in itertools.pairwise(prices))
    assert running.curve.step(1) > 0


def test_where_the_host_drafts_steps_of_one_row_are_taken_for_their_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that repeats itself, where every step would have drafts."""
    decoder = Decoder(tiny("Llama"))
    monkeypatch.setattr(auto, "glance", lambda engine: CostCurve({}, (1, 2, 4, 8, 16), (64,), ((1.0,) * 5,)))
    expected = decoder.generate([1, 2, 3], method=Autoregressive(), max_new_tokens=120).token_ids
    method = decoder.prepare(Auto(heads=False))
    steps = [*decoder.stream([1, 2, 3], method=method, max_new_tokens=120)]
    assert [token for step in steps for token in step.tokens] == expected
    known = decoder.engine.notes[auto.Auto]
    assert known.running is not None
    assert known.running.curve is known.engine.costs
    assert decoder.engine.costs is None  # other methods draft as before
    since = 0
    for step in steps[2:]:  # the first is not counted: it may read the prompt
        since = 0 if len(step.draft) == 1 else since + 1
        assert since <= 64


@pytest.mark.parametrize(("price", "methods"), [(1.9, 3), (2.1, 2)])
def test_heads_are_not_tried_where_rows_are_dear(price: float, methods: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, offered = tiny("Llama"), list[int]()
    monkeypatch.setattr(auto, "glance", lambda engine: CostCurve({}, (1, 8), (64,), ((1.0, price),)))
    monkeypatch.setattr(auto.Known, "choose", lambda self, methods: offered.append(len(methods)) or 0)
    decoder = Decoder(model)
    method = decoder.prepare(Auto(heads=random_heads("medusa", model)))
    decoder.generate([1, 2, 3], method=method, max_new_tokens=3)
    assert offered == [methods]


def test_steps_of_a_batch_tell_no_prices() -> None:
    engine = Decoder(tiny("Llama")).engine
    known = auto.Known(engine)
    sequences = [engine.turns.begin((step for step in ()), batched=True) for _ in range(2)]
    assert known.learns is None
    known.ran(1, 5.0)
    assert known.running is not None
    assert known.running.curve.step(1) < 5
    engine.turns.end(sequences[0])
    assert known.learns is known.running


def test_on_a_cpu_the_first_texts_try_the_boldest_last() -> None:
    known = auto.Known(Decoder(tiny("Llama")).engine)
    methods = [Amphista(), PromptLookup(recycled=8), PromptLookup()]
    for place, speed in ((2, 1.3), (1, 1.4), (0, 1.1)):
        assert known.choose(methods) == place
        known.learn(methods[place], speed)
    assert known.choose(methods) == 1


@pytest.mark.parametrize(("patience", "steps"), [(1e9, 16), (0.0, 6)])
def test_a_glance_is_short_where_steps_take_long(patience: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "PATIENCE", patience)
    engine, asked = Decoder(tiny("Llama")).engine, []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda text, draft: asked.append(len(text.slots)) or score(text, draft))
    curve = calibrate.glance(engine)
    assert len(asked) == steps
    assert asked[0] == 0
    assert all(asked[1:])  # steps that count find the text computed
    assert all(0 < seconds < float("inf") for seconds in curve.seconds[0])
    assert engine.pool.held == 0


def test_a_look_at_what_it_believes_and_chose(tmp_path: Path) -> None:
    decoder = decoder_of(tiny("Llama"))
    decoder.method = decoder.prepare("autoregressive")  # whatever the decoder's own is
    curve = CostCurve({"model": "tiny"}, (1, 2, 4), (64,), ((1.0, 1.1, 1.2),))
    found = calibration.look(decoder)
    assert found.total.new_tokens == calibration.LONG
    assert sum(found.steps.values()) >= found.total.steps  # the step behind the last may have been begun
    assert {rows for rows, _ in found.steps} <= {1, 16, 64}
    assert not any(heads for _, heads in found.steps)
    assert set(found.beliefs) >= {"lookup", "recycled"}
    for belief in found.beliefs.values():
        assert len(belief.said) == len(belief.believed) == len(belief.guesses) == KNOTS
        assert belief.said == sorted(belief.said, reverse=True)
        assert belief.believed == sorted(belief.believed, reverse=True)
    assert sum(sum(belief.guesses) for belief in found.beliefs.values()) > 0
    assert (found.texts, found.speeds) == ({}, {})  # the host does not draft
    stored = json.loads(json.dumps(found.to_json()))
    assert sum(line["steps"] for line in stored["steps"]) == sum(found.steps.values())
    console = Console(file=io.StringIO(), width=200)
    chart.print_look(console, found)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(words in shown for words in ("lookup: acceptance (drafted)", "steps that auto chose", "tokens per step"))
    if chart.can_plot():
        chart.save_calibration(curve, found, tmp_path / "look.svg")
        assert (tmp_path / "look.svg").stat().st_size > 1000


def test_models_that_compute_chains_only_and_bad_settings() -> None:
    assert Decoder(tiny_chain("Bloom"), method=Auto()).method.name == "prompt-lookup"
    assert Auto(heads="false").heads is False
    with pytest.raises(InputError, match="heads=True"):
        Auto(heads=True)
    with pytest.raises(InputError, match="rows=0"):
        Auto(rows=0)


def test_what_the_model_said_is_carried_to_the_next_text_of_the_same_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    for name in ("recall", "leave"):
        whole = getattr(Recycle, name)

        def told(self: Recycle, lane: int, salt: str, name: str = name, whole: Any = whole) -> None:
            said.append((name, salt))
            whole(self, lane, salt)

        monkeypatch.setattr(Recycle, name, told)
    decoder = decoder_of(tiny("Llama"))
    for salt in ("a", "b"):
        batch = decoder.batch()
        batch.add(prompt_of(4), method=Auto(heads=False), max_new_tokens=8, salt=salt)
        assert all(isinstance(step, Step) for _, step in batch)
    assert said == [("recall", "a"), ("leave", "a"), ("recall", "b"), ("leave", "b")]


@pytest.mark.parametrize("carried", [True, False])
def test_nothing_is_carried_from_one_salt_to_another(carried: bool) -> None:
    source = Recycle(2, 8, 3, torch.device("cpu"), carried=carried)
    source._known[0, 5] = 5
    source._chances[0, -1] = 0.0
    source.leave(0, "a")
    for salt in ("b", "a"):
        source.open(1, [1], 0)
        source.recall(1, salt)
        assert (source._known[1, 5] == 5) == (carried and salt == "a")
        assert (source._chances[1, -1] == NEVER).all()  # runners-up are a text's own
    for number in range(2 * SALTS):
        source.leave(0, str(number))
    assert [*source._left] == [str(number) for number in range(SALTS, 2 * SALTS) if carried]
