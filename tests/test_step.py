"""One step as functions of tensors: each equals its simplest form, and lanes know nothing of each other."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import InputError, InvalidLogits, Sampling
from outpace.draft import find_best
from outpace.picking import Picker
from outpace.picking import gumbel as noise_of_one
from outpace.step.choosing import Choices, gumbel
from outpace.step.lanes import Lanes, pack
from outpace.step.nodes import NEVER, Nodes, Rows, mix, plant
from outpace.step.texts import Texts, signed
from outpace.step.walking import Walk, walk

from . import oracles
from .models import examples
from .oracles import Offer, Path

WORDS = 6  # few, so that sources guess the same paths
SIZES = (9, 5, 12)  # nodes of each offer


def random_paths(draw: random.Random, count: int, deepest: int) -> list[Path]:
    """So many paths or fewer, each behind its beginning."""
    paths: list[Path] = [()]
    for _ in range(count):
        path = (*draw.choice(paths), draw.randrange(WORDS))
        if len(path) <= deepest and path not in paths:
            paths.append(path)
    return paths[1:]


def random_offers(draw: random.Random) -> list[Offer]:
    """What some sources guess. No path is likelier than its beginning, and no two rank alike."""
    offers = list[Offer]()
    for source, size in enumerate(SIZES, 1):
        less, chances, last = source, {Path(): 0.0}, Path()
        for path in random_paths(draw, size, 6):
            # Now and then as likely as its beginning, if nothing came between.
            alike = path[:-1] == last and last and draw.random() < 0.3
            less += 0 if alike else 4  # so that sources share no chance
            chances[path] = -less / 256
            last = path
        del chances[Path()]
        offers.append(Offer(chances, source))
    return offers


def nodes_of(lanes: Sequence[Offer]) -> Nodes:
    """One source's offers to several lanes, in fixed places."""
    count = max(1, *(len(offer.paths) for offer in lanes))
    deepest = max((len(path) for offer in lanes for path in offer.paths), default=1)
    tokens, depths = torch.zeros(len(lanes), count, dtype=torch.long), torch.ones(len(lanes), count, dtype=torch.long)
    paths = torch.zeros(len(lanes), count, deepest + 1, dtype=torch.long)
    chances = torch.full((len(lanes), count), NEVER)
    for lane, offer in enumerate(lanes):
        for place, (path, chance) in enumerate(offer.paths.items()):
            tokens[lane, place], depths[lane, place], chances[lane, place] = path[-1], len(path), chance
            added = mix(torch.tensor(path), torch.arange(1, len(path) + 1)).cumsum(0)
            paths[lane, place, 1 : len(path) + 1] = added
    first = lanes[0]
    return Nodes(tokens, depths, paths, chances, first.source, first.probe, first.accepted)


def paths_of(rows: Rows, lane: int) -> list[Path]:
    """The path of each row that is there. Its parents come before it, and it sees them and itself alone."""
    count = int(rows.valid[lane].sum())
    assert rows.valid[lane].tolist() == [True] * count + [False] * (rows.valid.shape[1] - count)
    paths: list[Path] = [()]
    sees = [{0}]
    for row in range(1, count):
        parent = int(rows.parents[lane, row])
        assert parent < row
        paths.append((*paths[parent], int(rows.tokens[lane, row])))
        sees.append({*sees[parent], row})
        assert int(rows.depths[lane, row]) == len(paths[row])
    for row in range(rows.valid.shape[1]):
        seen = set(rows.sees[lane, row].nonzero().flatten().tolist())
        assert seen == (sees[row] if row < count else {row})
    assert len(set(paths)) == count
    return paths


@examples(60)
@given(
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
    st.integers(1, 30),
)
def test_one_tree_of_all_guesses(draw: random.Random, probing: bool, gate: float, priced: bool, most: int) -> None:
    each = [random_offers(draw) for _ in range(3)]
    if probing:
        place, accepted = draw.randrange(3), draw.random() < 0.5
        for offers in each:
            probes = dict.fromkeys(random_paths(draw, 8, 5), 0.0)
            offers.insert(place, Offer(probes, 4, probe=True, accepted=accepted))
        most += 8
    room = [draw.randrange(8) for _ in each]
    prices = sorted(1.0 + draw.random() * row for row in range(most + 2)) if priced else None
    roots = torch.tensor([draw.randrange(WORDS) for _ in each])
    nodes = [nodes_of(offers) for offers in zip(*each, strict=True)]
    tensor = None if prices is None else torch.tensor(prices, dtype=torch.float64)
    rows = plant(roots, nodes, most, torch.tensor(room), gate, tensor, most + 3)
    for lane, offers in enumerate(each):
        expected = oracles.plant(offers, most, room[lane], gate, prices)
        assert int(rows.tokens[lane, 0]) == int(roots[lane])
        paths = paths_of(rows, lane)
        count = len(paths)
        assert paths[1:] == [row.path for row in expected]
        assert rows.sources[lane, 1:count].tolist() == [row.source for row in expected]
        assert rows.accepted[lane, 1:count].tolist() == [row.accepted for row in expected]
        alone = [nodes_of([offer]) for offer in offers]
        single = plant(roots[lane : lane + 1], alone, most, torch.tensor(room[lane : lane + 1]), gate, tensor, most + 3)
        for whole, part in zip(rows[:8], single[:8], strict=True):  # those behind are of kernels, or of learnt chances
            assert torch.equal(whole[lane], part[0])


def random_rows(draw: random.Random, lanes: int, most: int, deepest: int = 6) -> tuple[Rows, list[list[Path]]]:
    each = [[Offer({p: -n / 64 for n, p in enumerate(random_paths(draw, 24, deepest))}, 1)] for _ in range(lanes)]
    nodes = [nodes_of(offers) for offers in zip(*each, strict=True)]
    rows = plant(torch.arange(lanes), nodes, most, torch.full((lanes,), deepest), rows=most + 2)
    refused = torch.tensor([[draw.random() < 0.1 for _ in range(most + 2)] for _ in range(lanes)])
    refused[:, 0] = False
    rows = rows._replace(accepted=rows.accepted & ~refused)
    return rows, [paths_of(rows, lane) for lane in range(lanes)]


@examples(50)
@given(st.randoms(use_true_random=False), st.integers(1, 20))
def test_the_walk_and_what_is_kept(draw: random.Random, most: int) -> None:
    lanes, deepest = 4, 6
    rows, paths = random_rows(draw, lanes, most, deepest)
    picks = torch.tensor([[draw.randrange(WORDS) for _ in range(most + 2)] for _ in range(lanes)])
    for lane, row in enumerate(draw.randrange(len(lane)) for lane in paths):  # one path is right, often
        way = paths[lane][row]
        for at, token in enumerate(way):
            picks[lane, paths[lane].index(way[:at])] = token
    found = walk(rows, picks, deepest)
    texts = [[draw.randrange(WORDS) for _ in range(draw.randrange(1, 9))] for _ in range(lanes)]
    state = Lanes(lanes + 1, 48, "cpu")
    before = []
    for lane, text in enumerate(texts):
        slots = draw.sample(range(100), 40)
        before.append(slots)
        state.open(lane, text, 0)
        state.place(lane, slots, len(text) + draw.choice([0, 1, 2, 40]))
    limits = state.limits.tolist()
    view = state.view(lanes, 48)
    kept = view.keep(rows, found)
    for lane, text in enumerate(texts):
        accepted = rows.accepted[lane].tolist()
        path, tokens = oracles.walk(paths[lane], accepted, picks[lane].tolist())
        assert found.rows[lane, : len(path)].tolist() == path
        assert found.tokens[lane, : len(path)].tolist() == tokens
        assert (int(found.counts[lane]), int(found.rows[lane, len(path) :].sum())) == (len(path), 0)
        count = min(len(path), limits[lane] - len(text))
        assert int(kept.counts[lane]) == count
        assert state.tokens[lane, : len(text) + count].tolist() == [*text, *tokens[:count]]
        assert int(state.lengths[lane]) == len(text) + count
        after = oracles.keep(before[lane], len(text) - 1, most + 2, path[:count])
        assert state.slots[lane, :40].tolist() == after
        assert sorted(after) == sorted(before[lane])
    assert int(state.lengths[lanes]) == 0


@examples(20)
@given(st.randoms(use_true_random=False))
def test_rows_write_the_slots_behind_the_text(draw: random.Random) -> None:
    rows, paths = random_rows(draw, 3, 10)
    state = Lanes(3, 40, "cpu")
    for lane in range(3):
        state.open(lane, [1] * (lane + 1), 0)
        state.place(lane, range(100 * lane, 100 * lane + 30), [9, 9, 3][lane])  # the last rests
    slots = state.slots_for(rows, scratch=999)
    for lane, there in enumerate(paths):
        count = 0 if lane == 2 else len(there)
        expected = [*range(100 * lane + lane, 100 * lane + lane + count)]
        assert slots[lane].tolist() == expected + [999] * (12 - count)


@examples(20)
@given(st.integers(1, 130), st.randoms(use_true_random=False))
def test_bits_say_what_is_seen(count: int, draw: random.Random) -> None:
    sees = torch.tensor([[[draw.random() < 0.5 for _ in range(count)] for _ in range(3)]])
    words = pack(sees)
    assert words.shape == (1, 3, -(-count // 64))
    for row in range(3):
        for other in range(count):
            assert bool(int(words[0, row, other // 64]) >> other % 64 & 1) == bool(sees[0, row, other])


@given(
    st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(1, 2**20)), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_noise_is_the_pickers(places: list[tuple[int, int]], words: int) -> None:
    seeds = torch.tensor([signed(seed) for seed, _ in places])
    positions = torch.tensor([position for _, position in places])
    found = gumbel(seeds, positions, words)
    some = torch.arange(words).flip(0)[::2].expand(len(places), -1)
    chosen = gumbel(seeds, positions, 0, some)
    for line, (seed, position) in enumerate(places):
        assert torch.equal(found[line], noise_of_one(seed, position, 0, torch.arange(words)))
        assert torch.equal(chosen[line], noise_of_one(seed, position, 0, some[line]))


VOCABULARY = 40
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-4, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    repetition_penalty=st.sampled_from([None, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {5: 2.0, 7: -3.0}, {3: -math.inf}]),
    seed=st.integers(-(2**70), 2**70),
)


@examples(50)
@given(st.lists(SAMPLINGS, min_size=1, max_size=4), st.randoms(use_true_random=False), st.integers(0, 9))
def test_choices_are_the_pickers(samplings: list[Sampling], draw: random.Random, spoiled: int) -> None:
    lanes, most = len(samplings), 12
    rows, paths = random_rows(draw, lanes, most - 2)
    texts, choices = Texts(lanes, 64, "cpu"), Choices(lanes + 1, VOCABULARY, "cpu")
    prompts = [draw.choices(range(VOCABULARY), k=draw.randrange(1, 9)) for _ in samplings]
    for lane, (sampling, prompt) in enumerate(zip(samplings, prompts, strict=True)):
        texts.open(lane, prompt, sampling.seed)
        choices.open(lane, sampling, prompt)
    needs = choices.needs
    answers = torch.tensor([draw.choices(range(VOCABULARY), k=5) for _ in samplings])
    counts = torch.tensor([draw.randrange(6) for _ in samplings])
    texts.append(answers, counts)
    choices.learn(answers, counts, needs)
    torch.manual_seed(draw.randrange(2**32))
    logits = torch.randn(lanes * most, VOCABULARY).mul(3).round(decimals=1)  # with ties
    logits[spoiled, 2] = math.nan
    logits[spoiled + 1] = -math.inf
    picks, there = choices.choose(logits, find_best(logits), texts, rows, needs)
    for lane, (sampling, prompt) in enumerate(zip(samplings, prompts, strict=True)):
        picker = Picker(sampling, len(prompt))
        text = [*prompt, *answers[lane, : counts[lane]].tolist()]
        for row, path in enumerate(paths[lane]):
            line = logits[lane * most + row]
            try:
                expected = picker.choose(line, [*text, *path])
            except InvalidLogits:
                assert not there[lane, row]
            else:
                assert there[lane, row]
                assert int(picks[lane, row]) == expected


def test_what_no_lane_asks_for_is_left_out() -> None:
    choices = Choices(4, VOCABULARY, "cpu")
    assert choices.needs == frozenset()
    choices.open(0, Sampling(), [1])
    choices.open(1, Sampling(temperature=1.0), [1])
    choices.open(2, Sampling(top_p=0.5), [1])  # greedy: nothing is cut
    assert choices.needs == {"noise"}
    choices.open(3, Sampling(temperature=1.0, top_k=3, presence_penalty=1.0), ())  # nothing counts yet
    assert choices.needs == {"noise", "top_k", "penalties"}
    choices.close(3)
    choices.close(1)
    choices.close(1)
    assert choices.needs == frozenset()


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_bias_names_a_token_that_there_is(token: int) -> None:
    with pytest.raises(InputError, match=f"logit_bias names token {token}; the vocabulary has ids 0 to 39"):
        Choices(1, VOCABULARY, "cpu").check(Sampling(logit_bias={token: 1.0}))


def test_lanes_at_rest_stay_as_they_are() -> None:
    rows, _ = random_rows(random.Random(1), 2, 8)
    state = Lanes(2, 40, "cpu")
    for lane in range(2):
        state.open(lane, [1, 2, 3], 0)
        state.place(lane, range(20), 3 if lane else 0)
    before: Any = (state.tokens[:, :3].clone(), state.slots.clone(), state.lengths.clone())
    none = torch.zeros(2, 7, dtype=torch.long)
    kept = state.keep(rows, Walk(none, none + 1, none[:, 0] + 1))
    assert kept.counts.tolist() == [0, 0]
    assert not state.active().any()
    assert all(map(torch.equal, before, (state.tokens[:, :3], state.slots, state.lengths)))
