"""Sources: each guesses what its simplest form guesses, step for step, in several lanes at once."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import AdaDecode, Auto, Decoder, DraftModel, Lookahead, Method, PromptLookup, Sampling
from outpace.draft import Draft, Step
from outpace.heads import BlockHeads
from outpace.heads.block import Guesses, feelings
from outpace.methods.headed import FLOOR, LONGEST, PLACES, REACH
from outpace.models.hf import HFModel
from outpace.picking import Picker, likeliest
from outpace.runtime import program
from outpace.runtime.graphs import GraphEngine
from outpace.sources.heads import CANDIDATES, HeadGuesses, PairedGuesses, SequentialGuesses, likely_paths
from outpace.sources.history import History, matches
from outpace.sources.jacobi import Jacobi
from outpace.sources.ngrams import NONE, Ngrams
from outpace.sources.prediction import Predicted, Prediction
from outpace.sources.recycle import DEEPEST, Recycle
from outpace.sources.window import Settings, Window
from outpace.step.choosing import Choices
from outpace.step.nodes import NEVER, Nodes, Rows, plant
from outpace.step.texts import Texts, signed
from outpace.step.walking import walk

from . import oracles
from .models import CONTEXT, examples, mostly_slow, tiny
from .oracles import Path
from .test_adadecode import random_exits
from .test_heads import random_heads
from .test_lossless import prompt_of
from .test_step import paths_of

CPU = torch.device("cpu")
WORDS = 5  # few, so that texts repeat themselves
LANES = 3


@pytest.fixture(autouse=True)
def _rows_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes need not share rows: a text's trees are those that it has alone."""
    monkeypatch.setattr(program, "ROWS", 1024)


def texts_of(draw: random.Random, longest: int = 30) -> list[list[int]]:
    """One text for each lane; the last has one token."""
    return [draw.choices(range(WORDS), k=draw.randrange(1, longest)) for _ in range(LANES - 1)] + [[3]]


def lanes_with(texts: list[list[int]], seeds: list[int], span: int = 64) -> Texts:
    lanes = Texts(LANES + 2, span, "cpu")
    lanes.tokens.random_(WORDS)  # what lies behind a text is anything
    for lane, (text, seed) in enumerate(zip(texts, seeds, strict=True)):
        lanes.open(lane, text, seed)
    return lanes.view(LANES, span)


def offered(nodes: Nodes, lane: int) -> dict[Path, float]:
    """The paths that a source offers to a lane, with the logarithms of their chances. A path's own beginnings count."""
    rows = plant(torch.zeros(LANES, dtype=torch.long), [nodes], 1 + nodes.tokens.shape[1], torch.full((LANES,), 999))
    chances: dict[int, float] = {}
    ends = nodes.paths.gather(2, nodes.depths[..., None])[lane, :, 0].tolist()
    for end, chance in zip(ends, nodes.chances[lane].tolist(), strict=True):
        if chance > NEVER:
            chances[end] = max(chance, chances.get(end, NEVER))
    paths = paths_of(rows, lane)
    assert len(paths) == len(chances) + 1
    return {path: chances[int(rows.hashes[lane, row])] for row, path in enumerate(paths) if row}


def assert_alike(found: dict[Path, float], expected: dict[Path, float]) -> None:
    assert found.keys() == expected.keys()
    for path, chance in expected.items():
        assert found[path] == pytest.approx(chance, abs=2e-4)


@examples(60)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 4, 6, 9, 20]), st.integers(1, 7), st.integers(1, 9))
def test_history(draw: random.Random, longest: int, depth: int, places: int) -> None:
    texts = texts_of(draw)
    texts[0] = (texts[0][:9] * 30)[: len(texts[0])]  # long matches
    source = History(longest, depth, places, "history", CPU, floor=draw.choice([0.0, 0.0002, 0.03]))
    for _ in range(3):
        lanes = lanes_with(texts, [0] * LANES)
        lengths = matches(lanes, longest)
        (nodes,) = source.guess(lanes, torch.full((LANES,), 99))
        floor = math.exp(source.floor) if source.floor > NEVER else 0.0
        for lane, text in enumerate(texts):
            for place in range(64):
                there = place < len(text) - 1
                assert int(lengths[lane, place]) == (oracles.match_length(text, place, longest) if there else 0)
            expected = oracles.history(text, longest, depth, places, floor)
            found = offered(nodes, lane)
            near = {path for path, chance in expected.items() if floor and chance < floor * 1.001}
            assert_alike(
                {path: chance for path, chance in found.items() if path not in near},
                {path: math.log(chance) for path, chance in expected.items() if path not in near},
            )
            text.append(draw.randrange(WORDS))


def test_a_text_shorter_than_the_places_that_are_followed() -> None:
    texts = [[1, 2], [2, 2, 2], [3]]
    (nodes,) = History(4, 3, 8, "history", CPU).guess(lanes_with(texts, [0] * 3, 4), torch.full((3,), 9))
    assert offered(nodes, 0) == offered(nodes, 2) == {}
    assert offered(nodes, 1).keys() == {(2,), (2, 2), (2, 2, 2)}


@examples(60)
@given(st.randoms(use_true_random=False), st.integers(1, 20))
def test_predictions(draw: random.Random, deepest: int) -> None:
    """What the host follows of a prediction, a program follows too; and nothing where a text has none."""
    texts = texts_of(draw)
    source = Predicted(LANES + 2, 64, deepest, CPU)
    told: list[Prediction | None] = [
        Prediction(draw.choices(range(WORDS), k=draw.randrange(1, 60)), draw.randrange(1, len(text) + 1))
        for text in texts[:2]
    ]
    source.tell(2, told[0])  # an earlier text's
    told.append(None)
    for lane, prediction in enumerate(told):
        source.tell(lane, prediction)
    for _ in range(4):
        (nodes,) = source.guess(lanes_with(texts, [0] * LANES), torch.full((LANES,), 99))
        for lane, (text, prediction) in enumerate(zip(texts, told, strict=True)):
            path = tuple(prediction.after(text, deepest)) if prediction else ()
            assert {*offered(nodes, lane)} == {path[:depth] for depth in range(1, len(path) + 1)}
            text.append(draw.randrange(WORDS))


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 0.8], quick=[0.0]))
@pytest.mark.parametrize("method", [PromptLookup(), Lookahead(window=3, ngram=3, guesses=24), Auto(heads=False)])
def test_a_programs_steps_have_what_the_host_follows_of_a_prediction(method: Method, temperature: float) -> None:
    how = Sampling(temperature=temperature, seed=4)
    decoder = Decoder(tiny("Llama"), method=method)
    decoder.engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, capacity=1024)
    prompts = [prompt_of(seed, 12) for seed in range(LANES)]
    plain = [decoder.generate(prompt, max_new_tokens=40, sampling=how).token_ids for prompt in prompts]
    other = [*plain[0][:9], 1, 2, *plain[0][12:]]  # two words in place of three
    predictions = [other, other, None]  # nearly right, another text's, none
    batch = decoder.batch()
    for prompt, prediction in zip(prompts, predictions, strict=True):
        batch.add(prompt, max_new_tokens=40, sampling=how, prediction=prediction)
    texts, steps = [[*prompt] for prompt in prompts], [0] * LANES
    hints = [prediction and Prediction(prediction, len(prompts[0])) for prediction in predictions]
    for number, step in batch:
        assert isinstance(step, Step)
        hint, paths = hints[number], _paths(step.draft)
        (part,) = [entry[-1] for entry in decoder.engine._programs]
        path = (*hint.after(texts[number], part.deepest),) if hint else ()
        assert len(step.draft) == 1 or path in paths  # it may be that the step drafts nothing
        told = {path for path, source in zip(paths, step.draft.sources, strict=True) if source == "prediction"}
        assert told <= {path[:depth] for depth in range(1, len(path) + 1)}
        texts[number] += step.tokens
        steps[number] += 1
    assert [text[len(prompts[0]) :] for text in texts] == plain
    assert steps[0] < min(steps[1:])
    assert decoder.engine.pool.held == 0


def _paths(draft: Draft) -> list[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


@examples(30)
@given(st.randoms(use_true_random=False), st.integers(2, 5), st.sampled_from([4, 8, 50]), st.integers(1, 6))
def test_the_memory_of_ngrams(draw: random.Random, width: int, size: int, most: int) -> None:
    memory, simple = Ngrams(LANES + 1, width, CPU, size), [oracles.Memory(size) for _ in range(LANES)]
    for _ in range(6):
        added = torch.full((LANES, 4, width), NONE)
        for lane in range(LANES):
            runs: list[Path] = []
            for place in range(4):
                if draw.random() < 0.7:
                    run = tuple(draw.choices(range(3), k=draw.randrange(2, width + 1)))
                    added[lane, place, : len(run)] = torch.tensor(run)
                    runs.append(run)
            simple[lane].add(runs)
        memory.add(added)
        longest = draw.randrange(1, 4)
        ends = torch.tensor([[draw.choices(range(3), k=longest) for _ in range(2)] for _ in range(LANES)])
        found, keys = memory.after(ends, most)
        for lane in range(LANES):
            for end in range(2):
                expected = simple[lane].after(ends[lane, end].tolist(), most)
                runs = [tuple(token for token in run if token != NONE) for run in found[lane, end].tolist()]
                here = [*zip(keys[lane, end].tolist(), runs, strict=True)]
                assert here[: len(expected)] == expected
                assert all(pair == (0, ()) for pair in here[len(expected) :])
    memory.clear(1)
    assert not memory.after(ends, most)[1][1].any()


def said_by(draw: random.Random, rows: Rows, texts: list[list[int]]) -> torch.Tensor:
    """What a model might say after each row: the same after the same two tokens."""
    best = torch.zeros_like(rows.tokens)
    for lane, text in enumerate(texts):
        for row, path in enumerate(paths_of(rows, lane)):
            best[lane, row] = hash((*text, *path)[-2:]) % WORDS
    return best


def steps(draw: random.Random, source: Any, count: int, most: int) -> Any:
    """Lets a source guess and learn along random texts; gives what it drafted, and what was said, each time."""
    texts, seeds = texts_of(draw, 8), [draw.randrange(-(2**65), 2**65) for _ in range(LANES)]
    lanes = lanes_with(texts, seeds)
    for lane, text in enumerate(texts):
        source.open(lane, text, seeds[lane])
    yield [list(text) for text in texts], seeds
    for _ in range(count):
        room = torch.tensor([draw.choice([0, 2, 99]), 99, 99])
        rows = plant(lanes.roots(), source.guess(lanes, room), most, room)
        best = said_by(draw, rows, texts)
        picks = best.clone()
        picks[0] += torch.tensor([draw.random() < 0.3 for _ in picks[0]])  # a sampled text: not always the best
        picks %= WORDS
        found = walk(rows, picks, source.deepest)
        lanes.append(found.tokens, found.counts)
        logits = torch.randn(best.numel(), WORDS)
        logits[torch.arange(len(logits)), best.flatten()] = 4.0 + torch.rand(len(logits))
        source.learn(lanes, rows, best, found, logits)
        before = [list(text) for text in texts]
        for lane, text in enumerate(texts):
            text += found.tokens[lane, : found.counts[lane]].tolist()
        yield before, rows, best, found, room.tolist(), [list(text) for text in texts], logits.view(LANES, -1, WORDS)


@examples(40)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_jacobi(draw: random.Random, window: int) -> None:
    run = steps(draw, Jacobi(window, LANES + 2, CPU), 5, window + 1)
    texts, seeds = next(run)
    guesses = [random.Random(seed).choices(text, k=window) for text, seed in zip(texts, seeds, strict=True)]
    for _, rows, best, found, room, after, _ in run:
        for lane, text in enumerate(after):
            drafted = guesses[lane][: room[lane]]
            assert paths_of(rows, lane) == [tuple(drafted[:at]) for at in range(len(drafted) + 1)]
            said = best[lane, : len(drafted) + 1].tolist()
            guesses[lane] = oracles.jacobi(said, int(found.counts[lane]), text, signed(seeds[lane]), window)


@examples(40)
@given(st.randoms(use_true_random=False), st.integers(1, 7), st.integers(1, 20), st.sampled_from([1, 3, 8]))
def test_recycling(draw: random.Random, ranks: int, paths: int, size: int) -> None:
    torch.manual_seed(draw.randrange(2**32))
    runners = draw.randrange(ranks)
    source, ways = Recycle(ranks, paths, LANES + 2, CPU, size, runners), likely_paths(DEEPEST, ranks, paths)
    source._known.random_(WORDS)  # what a text that has ended left behind
    source._chances.fill_(-1.0)
    run = steps(draw, source, 6, 1 + source.nodes)
    texts, _ = next(run)
    simple = [oracles.Recycled(size, runners) for _ in texts]
    for before, rows, _, found, room, _, logits in run:
        for lane, text in enumerate(before):
            guesses = {**simple[lane].guess(text[-1], ways), **simple[lane].guess_second()}
            expected = {path for path in guesses if len(path) <= room[lane]}
            paths_here = paths_of(rows, lane)
            assert {*paths_here} == {(), *expected}
            ranked = likeliest(logits[lane], ranks)
            said = [
                [(int(token), chance) for token, chance in zip(*line, strict=True)]
                for line in zip(*ranked.tolist(), strict=True)
            ]
            last = int(found.rows[lane, found.counts[lane] - 1])
            simple[lane].learn(rows.tokens[lane, : len(paths_here)].tolist(), said[: len(paths_here)], last)
    lanes = lanes_with([text[-9:] for text in before], [0] * LANES)
    recycled, *second = source.guess(lanes, torch.full((LANES,), 99))
    for lane, text in enumerate(before):
        assert_alike(offered(recycled, lane), simple[lane].guess(text[-1], ways))
        for nodes in second:
            assert nodes.sources == 1
            assert_alike(offered(nodes, lane), simple[lane].guess_second())
    assert len(second) == (runners > 0)


def test_what_is_not_a_chance_is_not_recycled() -> None:
    source = Recycle(2, 4, 1, CPU, runners=1)
    texts, none = lanes_with([[1], [1], [1]], [0] * 3).view(1, 8), torch.zeros(0)
    rows = plant(texts.roots(), [], 1, torch.tensor([9]))
    kept = walk(rows, rows.tokens, 0)
    for line in ([math.nan] * WORDS, [-math.inf, 0.0, -math.inf, -math.inf, -math.inf]):
        source.learn(texts, rows, none, kept, torch.tensor([line]))
        recycled, second = source.guess(texts, torch.tensor([9]))
        assert (recycled.chances > NEVER).sum() == (0 if math.isnan(line[0]) else source.deepest)
        assert not (second.chances > NEVER).any()


def published(window: int, ngram: int, guesses: int) -> Settings:
    return Settings(window, ngram, guesses, 1, recycle=False, published=True, read=False)


def assert_published(
    simple: oracles.PublishedLookahead, current: int, room: int, paths: list[Path], accepted: list[bool]
) -> None:
    guesses, probes = simple.draft(current, room)
    assert {path for path, takes in zip(paths, accepted, strict=True) if takes} == {(), *guesses}
    assert set(paths) == {(), *guesses, *probes}


@examples(25)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(2, 5), st.integers(0, 4))
def test_the_published_lookahead(draw: random.Random, window: int, ngram: int, guesses: int) -> None:
    source = Window(published(window, ngram, guesses), LANES + 2, CPU)
    run = steps(draw, source, 8, 1 + source.nodes)
    texts, seeds = next(run)
    simple = [oracles.PublishedLookahead(window, ngram, guesses) for _ in texts]
    for lane, text in enumerate(texts):
        simple[lane].open(text, seeds[lane])
    for before, rows, best, _, room, _, _ in run:
        for lane, text in enumerate(before):
            paths = paths_of(rows, lane)
            assert_published(simple[lane], text[-1], room[lane], paths, rows.accepted[lane, : len(paths)].tolist())
            simple[lane].learn(text[-1], dict(zip(paths, best[lane].tolist(), strict=False)), room[lane])


def paths_of_draft(draft: Draft) -> list[Path]:
    paths: list[Path] = [()]
    for row in range(1, len(draft)):
        paths.append((*paths[draft.parents[row]], draft.tokens[row]))
    return paths


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(4, 4, 4), (2, 3, 2), (1, 2, 3), (3, 5, 1)])
def test_a_models_steps_are_those_of_the_published_lookahead(window: int, ngram: int, guesses: int) -> None:
    """Through the whole program, with two texts. What the model says behind a path is asked of the model itself."""
    model = tiny("Llama")
    decoder = Decoder(model)
    decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    method = Lookahead(window=window, ngram=ngram, guesses=guesses, published=True, prompt_pool=False)
    prompts, texts = [prompt_of(1), prompt_of(2)], list[list[int]]()
    drafted: list[list[Step]] = [[], []]
    for number, step in decoder.stream(prompts, method=method, sampling=Sampling(seed=5), max_new_tokens=30):
        assert isinstance(step, Step)
        drafted[number].append(step)
    for prompt, each in zip(prompts, drafted, strict=True):
        simple = oracles.PublishedLookahead(window, ngram, guesses)
        simple.open(prompt, 5)
        text = list(prompt)
        for step in each:
            room = decoder.model.room(len(text) - 1)
            paths = paths_of_draft(step.draft)
            accepted = [row < step.draft.candidates for row in range(len(paths))]
            assert step.draft.tokens[0] == text[-1]
            assert_published(simple, text[-1], room, paths, accepted)
            said = {path: said_behind(model, (*text, *path)) for path in {(), *simple.columns()} & {*paths}}
            simple.learn(text[-1], said, room)
            text += step.tokens
        texts.append(text)
    assert [len(text) for text in texts] == [len(prompt) + 30 for prompt in prompts]


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(("window", "ngram", "guesses"), [(5, 3, 5), (3, 4, 2)])
def test_steps_are_those_of_the_papers_own_loop(window: int, ngram: int, guesses: int, reference: bool) -> None:
    """A text without a KV cache, a tree or a mask: one forward for each token that the paper's algorithm asks for."""
    model, prompt = tiny("Llama"), prompt_of(3)
    said = cache(lambda text: said_behind(model, text))
    simple = oracles.PublishedLookahead(window, ngram, guesses, reference).write(said, prompt, 7, CONTEXT)
    method = Lookahead(window=window, ngram=ngram, guesses=guesses, prompt_pool=reference, published=True)
    found = [*Decoder(model).stream(prompt, method=method, sampling=Sampling(seed=7), max_new_tokens=60)]
    assert [list(step.tokens) for step in found[:-1]] == [next(simple) for _ in found[:-1]]
    assert len(found) < 50  # or nothing was guessed


@torch.inference_mode()
def said_behind(model: Any, text: Path) -> int:
    return int(model(torch.tensor([text])).logits[0, -1].argmax())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@examples(20)
@given(draw=st.randoms(use_true_random=False), top=st.integers(1, 4), rows=st.integers(1, 9))
def test_paths_of_heads(draw: random.Random, top: int, rows: int, temperature: float) -> None:
    count, words, ranks = 3, 7, likely_paths(3, top, rows)
    torch.manual_seed(draw.randrange(2**32))
    logits = torch.randn(count, LANES, words)

    class Heads:
        count, reads_text = 3, False

        def fixed(self, *_: Any) -> torch.Tensor:
            return logits

    source = HeadGuesses(Heads(), (None, None, 0), lambda hidden: hidden, ranks, LANES + 1, CPU)
    texts, seeds = texts_of(draw), [draw.randrange(99) for _ in range(LANES)]
    lanes, choices = lanes_with(texts, seeds), Choices(LANES, words, CPU)
    samplings = [Sampling(temperature=temperature, seed=seed) for seed in seeds]
    for lane, sampling in enumerate(samplings):
        source.open(lane, texts[lane], seeds[lane])
        choices.open(lane, sampling, texts[lane])
    (nothing,) = source.guess(lanes, torch.full((LANES,), 9))
    assert all(offered(nothing, lane) == {} for lane in range(LANES))
    source.expect(0, source.feed(None, torch.zeros(0), torch.zeros(LANES)), lanes, choices, choices.needs)
    (nodes,) = source.guess(lanes, torch.full((LANES,), 9))
    for lane, (text, sampling) in enumerate(zip(texts, samplings, strict=True)):
        found = likeliest(logits[:, lane], words)
        foreseen = Picker(sampling, 0).foresee(found, range(len(text), len(text) + count), words)
        expected = oracles.head_paths(foreseen.tokens.tolist(), foreseen.chances.tolist(), ranks)
        assert_alike(offered(nodes, lane), expected)
    assert (nodes.sources == nodes.depths - 1).all()


@examples(15)
@given(
    draw=st.randoms(use_true_random=False),
    top=st.integers(1, 4),
    rows=st.integers(1, 20),
    words=st.sampled_from([CANDIDATES - 1, 97]),
)
def test_paths_of_heads_that_know_the_guess_before(draw: random.Random, top: int, rows: int, words: int) -> None:
    """Against the definition, path by path: the candidates' logits behind the guess before, and the confidence."""
    model = tiny("Llama", vocab_size=words)
    heads, ends = random_heads("block", model, seed=draw.randrange(99)), HFModel(model).ends()
    assert isinstance(heads, BlockHeads)
    ranks = likely_paths(heads.count, top, rows)
    logits, states = 3 * torch.randn(heads.count, LANES, words), torch.randn(heads.count, LANES, 32)
    source = PairedGuesses(heads, (ends, None, 0), lambda hidden: hidden, ranks, LANES + 1, CPU)
    texts = texts_of(draw)
    lanes, choices = lanes_with(texts, [0] * LANES), Choices(LANES, words, CPU)
    with torch.inference_mode():
        source.expect(0, Guesses(logits, states), lanes, choices, choices.needs)
        (nodes,) = source.guess(lanes, torch.full((LANES,), 9))
        for lane in range(LANES):
            found = {}
            for path in ranks:
                tokens: tuple[int, ...] = ()
                chance = 0.0
                for place, rank in enumerate(path):
                    own = logits[place, lane].log_softmax(-1)
                    candidates = own.topk(min(CANDIDATES, words)).indices
                    told = own[candidates].clone()
                    if place:
                        before = ends.embed(torch.tensor(tokens[-1]))
                        told += ends.head(heads.pair(states[place, lane], before))[candidates]
                    rest = 1 - own[candidates].exp().sum()
                    said = told - (told.exp().sum() + rest).log()
                    best, order = said.sort(descending=True)
                    doubt = states[place, lane] @ heads.doubt_state
                    sure = torch.sigmoid(heads.sure(place, doubt, feelings(best)))
                    share = sure if rank == 0 else (1 - sure) * best[rank].exp() / (1 - best[0].exp())
                    chance += math.log(min(float(share), float(sure)))
                    tokens = (*tokens, int(candidates[order[rank]]))
                found[tokens] = chance
            assert offered(nodes, lane).keys() == found.keys()
            for tokens, chance in offered(nodes, lane).items():
                assert chance == pytest.approx(found[tokens], abs=1e-3)


@examples(20)
@given(draw=st.randoms(use_true_random=False), top=st.integers(1, 4), beam=st.integers(1, 5))
def test_paths_of_heads_that_wait_for_each_other(draw: random.Random, top: int, beam: int) -> None:
    words = 7
    torch.manual_seed(draw.randrange(2**32))
    table = torch.randn(3, 50, words)

    def logits_after(tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, tokens.shape[1] + 1)
        return table[tokens.shape[1] - 1, (tokens * places * 3).sum(1) % 50]

    class Heads:
        count, reads_text = 3, False

        def guess(self, ends: Any, final: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return logits_after(tokens)

    class Ends:
        @staticmethod
        def norm(states: torch.Tensor) -> torch.Tensor:
            return states

    class Kept:
        tokens = torch.tensor([draw.randrange(words) for _ in range(LANES)])

    source = SequentialGuesses(Heads(), (Ends, None, 0), lambda hidden: hidden, top, beam, LANES + 1, CPU)
    texts = texts_of(draw)
    lanes, choices = lanes_with(texts, [0] * LANES), Choices(LANES, words, CPU)
    source.expect(0, source.feed(Kept, torch.zeros(LANES, 1), torch.arange(LANES)), lanes, choices, frozenset())
    (nodes,) = source.guess(lanes, torch.full((LANES,), 9))
    assert nodes.tokens.shape[1] == source.nodes
    for lane, newest in enumerate(Kept.tokens.tolist()):

        def likely(path: Path, newest: int = newest) -> list[tuple[int, float]]:
            tokens, chances = likeliest(logits_after(torch.tensor([[newest, *path]])), words)[:, 0].tolist()
            return [(int(token), chance) for token, chance in zip(tokens, chances, strict=True)]

        assert_alike(offered(nodes, lane), oracles.sequential_paths(likely, [top] * 3, beam))


def steps_of(decoder: Decoder, method: Any, prompts: list[list[int]], sampling: Sampling) -> list[list[Step]]:
    """What was done for twelve new tokens of each text."""
    drafted: list[list[Step]] = [[] for _ in prompts]
    for number, step in decoder.stream(prompts, method=method, sampling=sampling, max_new_tokens=12):
        assert isinstance(step, Step)
        drafted[number].append(step)
    return drafted


def foreseen(logits: torch.Tensor, sampling: Sampling, position: int, count: int) -> list[tuple[int, float]]:
    """What to expect the target to choose at a position by logits [1, words], with the logarithms of chances."""
    picker = Picker(sampling, 0)
    tokens, chances = picker.foresee(likeliest(logits, picker.candidates(count)), [position], count)
    return [*zip(tokens[0].tolist(), chances[0].tolist(), strict=True)]


EXITS: list[tuple[float, str, int, dict[str, Any]]] = [  # `make test` has this temperature alone
    (0.0, "Llama", 1, {"exits": "1"}),
    (0.9, "Llama", 3, {"exits": "2", "rows": 24, "lookup": 0.3}),
    (0.0, "Gemma2", 3, {"exits": "2", "rows": 20, "widths": "4,3,2", "beam": 3, "lookup": 0.0}),
    (0.9, "GPT2", 0, {"exits": "3", "rows": 40}),
]


@pytest.mark.parametrize(
    ("name", "texts", "settings", "temperature"),
    [
        pytest.param(*case, temperature, marks=() if temperature == quick else pytest.mark.slow)
        for quick, *case in EXITS
        for temperature in (0.0, 0.9)
    ],
)
def test_a_models_steps_are_trees_of_its_exit(
    name: str, texts: int, settings: dict[str, Any], temperature: float
) -> None:
    """Through the whole program with several texts, and where there is none (0). An exit is asked by whole forwards."""
    model = tiny(name)
    decoder = Decoder(model)
    if texts:
        decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=1024)
    exits = random_exits(model)
    method: Any = decoder.prepare(AdaDecode(exits, control="tree", recycled=0, priced=False, **settings))
    sampling, ends, layer = Sampling(temperature=temperature, seed=5), decoder.model.ends(), method.exits[0]
    prompts = [prompt_of(seed) for seed in range(max(texts, 1))]
    for prompt, each in zip(prompts, steps_of(decoder, method, prompts, sampling), strict=True):
        text = list(prompt)
        for step in each:

            def likely(path: Path, text: list[int] = text) -> list[tuple[int, float]]:
                with torch.inference_mode():
                    hidden = model(torch.tensor([[*text, *path]]), output_hidden_states=True).hidden_states[layer]
                    logits = exits.probe(exits.layers.index(layer), hidden[0, -1:], ends)
                return foreseen(logits, sampling, len(text) + len(path), max(method.widths))

            repeated = int(method.lookup * (method.rows - 1))
            offers = [oracles.Offer(oracles.sequential_paths(likely, method.widths, method.beam), 1)]
            if repeated:
                known = oracles.history(text, LONGEST, min(REACH, repeated), min(PLACES, repeated), FLOOR)
                offers.append(oracles.Offer({path: math.log(chance) for path, chance in known.items()}, 2))
            expected = oracles.plant(offers, method.rows, decoder.model.room(len(text) - 1))
            assert step.draft.tokens[0] == text[-1]
            assert {*paths_of_draft(step.draft)} == {(), *(row.path for row in expected)}
            assert len(step.draft) == 1 + len(expected)
            text += step.tokens
        assert len(text) == len(prompt) + 12
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("name", "texts"), [("Llama", 1), ("Gemma2", 3)])
def test_a_small_model_writes_ahead(name: str, texts: int, temperature: float) -> None:
    """One with fewer layers and a shorter context: where that ends it guesses no more."""
    model, small = tiny(name), tiny(name, seed=5, num_hidden_layers=2, max_position_embeddings=32)
    decoder = Decoder(model)
    decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=1024)
    method: Any = decoder.prepare(DraftModel(model=small, length=3))
    sampling, prompts = Sampling(temperature=temperature, seed=5), [prompt_of(seed) for seed in range(texts)]
    for prompt, each in zip(prompts, steps_of(decoder, method, prompts, sampling), strict=True):
        text = list(prompt)
        for step in each:
            expected: list[int] = []
            for _ in range(min(3, method.model.room(len(text) - 1))):
                with torch.inference_mode():
                    logits = small(torch.tensor([[*text, *expected]])).logits[0, -1:]
                expected.append(foreseen(logits, sampling, len(text) + len(expected), 1)[0][0])
            assert step.draft.tokens == (text[-1], *expected)
            assert step.draft.is_chain
            text += step.tokens
        assert len(text) == len(prompt) + 12 > 32
    assert decoder.engine.pool.held == 0
    assert decoder.engine.program_for(method, sampling) is not None


def test_paths_of_ranks_have_their_beginnings_before_them() -> None:
    for count, top, most, deeper in ((1, 1, 9, 1), (4, 10, 256, 1), (3, 2, 99, 1), (8, 32, 256, 1.5), (3, 4, 99, 3)):
        paths = likely_paths(count, top, most, deeper)
        products = [math.prod(rank + 1 for rank in path) * deeper ** len(path) for path in paths]
        assert products == sorted(products)
        assert len({*paths}) == len(paths) <= most
        for place, path in enumerate(paths):
            assert len(path) == 1 or path[:-1] in paths[:place]
            assert max(path) < top
    assert len(likely_paths(3, 2, 99)) == 2 + 4 + 8
