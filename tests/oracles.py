"""What guesses, what makes a tree of it and what walks it, once more in their simplest form: lists and dicts alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Path = tuple[int, ...]
LEAST = (1, 2, 3, 4, 6, 8, 12, 16)  # lengths of matches that are believed one after the other
RUNNERS = (0.05, 0.03, 0.03, 0.02, 0.02, 0.015, 0.015)  # by rank, from the second on
DEEPER = 2.0**-12  # taken off the logarithm of a chance for each token of depth, where nodes are ranked


# History


def match_length(text: Sequence[int], place: int, longest: int) -> int:
    """How many of the text's last tokens, up to `longest`, stand before and at an earlier place."""
    length = 0
    while length < min(longest, place + 1) and text[place - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def history(text: Sequence[int], longest: int, depth: int, places: int, floor: float = 0.0) -> dict[Path, float]:
    """The chance of each path that followed one of the places that match best: the longest, then the newest."""
    found = [(match_length(text, place, longest), place) for place in range(len(text) - 1)]
    best = sorted((pair for pair in found if pair[0]), reverse=True)[:places]
    follows = []
    for length, place in best:
        ahead = list(text[place + 1 :])
        while len(ahead) < depth:  # behind the end of the text the match begins again
            ahead += text[place + 1 :]
        follows.append((length, tuple(ahead[:depth])))
    return _paths(follows, longest, floor)


def store(
    text: Sequence[int], earlier: Sequence[Sequence[int]], longest: int, depth: int, places: int, floor: float
) -> dict[Path, float]:
    """The same from earlier texts, the newest last. Behind the end of one there is nothing."""
    found = []
    for number, other in enumerate(earlier):
        for place in range(len(other)):
            length = 0
            while length < min(longest, place + 1, len(text)) and other[place - length] == text[-1 - length]:
                length += 1
            if length:
                found.append((length, number, place))
    best = sorted(found, reverse=True)[:places]
    follows = [(length, tuple(earlier[number][place + 1 :][:depth])) for length, number, place in best]
    return _paths(follows, longest, floor)


def _paths(follows: Sequence[tuple[int, Path]], longest: int, floor: float) -> dict[Path, float]:
    """The chance of each path that followed a match of such a length."""
    chances: dict[Path, float] = {}
    for _, path in follows:
        product = 1.0
        for at in range(1, len(path) + 1):
            product *= _next_chance(follows, path[:at], longest)
            if product >= floor:
                chances[path[:at]] = product
    return chances


def _next_chance(follows: Sequence[tuple[int, Path]], path: Path, longest: int) -> float:
    """The chance of the last token of a path behind the others. Longer matches are believed first."""
    before = len(path) - 1
    # Of places that have followed the path: how long their match has grown, and how they go on.
    votes = [(length + before, way[before : before + 1]) for length, way in follows if way[:before] == path[:-1]]
    chance, belief = 0.0, 1.0
    for least in reversed(LEAST):
        heard = [token for length, token in votes if length >= least]
        if heard and least <= longest:
            ways = len(set(heard))
            doubt = min(0.98, 0.7 * 0.75 ** (len(heard) - ways) * 1.25 ** (ways - 1))
            chance += belief * (1 - doubt) * heard.count(path[-1:]) / len(heard)
            belief *= doubt
    return chance


# The memory of n-grams


class Memory:
    """The newest `size` n-grams, looked through from the newest. One that comes again leaves its old place empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.runs: list[Path] = []

    def add(self, ngrams: Sequence[Path]) -> None:
        new = [*reversed(dict.fromkeys(reversed(ngrams)))]
        self.runs = [*(() if run in new else run for run in self.runs), *new][-self.size :]

    def after(self, end: Sequence[int], most: int) -> list[tuple[int, Path]]:
        """Length of the key and run, longest key first, then newest first; none twice."""
        found = list[tuple[int, Path]]()
        for run in reversed(self.runs):
            keys = range(1, min(len(end), len(run) - 1) + 1)
            key = max((key for key in keys if run[:key] == tuple(end[-key:])), default=0)
            if key:
                found.append((key, run[key:]))
        found.sort(key=lambda item: -item[0])
        once = dict[Path, int]()
        for key, run in found:
            once.setdefault(run, key)
        return [(key, run) for run, key in once.items()][:most]


# Lookahead Decoding as published


@dataclass
class PublishedLookahead:
    """N-1 levels of a window of W columns, and a pool of G n-grams under each token (arXiv 2402.02057, Algorithm 2).

    `reference`: n-grams of the prompt and of the answer so far are in the pool too ("prompt as reference").
    """

    window: int
    ngram: int
    guesses: int
    reference: bool = False
    levels: list[list[int]] = field(default_factory=list)  # level 0 without the current token
    pool: dict[int, list[Path]] = field(default_factory=dict)  # newest last

    def open(self, tokens: Sequence[int], seed: int) -> None:
        self.levels = [random.Random(seed).choices(tokens, k=self.window - 1 + self.ngram - 2)]
        self.pool = {}
        self.read(tokens, len(tokens))

    def read(self, text: Sequence[int], new: int) -> None:
        """Take in the n-grams that end with the last `new` tokens."""
        for end in range(max(len(text) - new + 1, self.ngram), len(text) + 1):
            if self.reference:
                self.insert(*text[end - self.ngram : end])

    def insert(self, first: int, *run: int) -> None:
        known = [other for other in self.pool.get(first, []) if other != run]
        self.pool[first] = [*known, run][-self.guesses :] if self.guesses else []

    @property
    def full(self) -> bool:
        return len(self.levels) == self.ngram - 1

    def columns(self) -> list[Path]:
        """The path to the end of each column: along level 0, then down."""
        spine = self.levels[0]
        return [(*spine[:column], *(level[column] for level in self.levels[1:])) for column in range(len(spine) + 1)]

    def draft(self, current: int, room: int) -> tuple[set[Path], set[Path]]:
        """The paths that may be accepted, and those that are probed."""
        runs = self.pool.get(current, []) if self.full else []
        guesses = {run[:at] for run in runs for at in range(1, min(len(run), room) + 1)}
        if not self.probes(room):
            return guesses, set()
        spine = tuple(self.levels[0])
        ways = [spine, *self.columns()]
        return guesses, {way[:at] for way in ways for at in range(1, len(way) + 1)}

    def probes(self, room: int) -> bool:
        """Whether the window is in the draft: near the end of the context it is not."""
        return room >= self.window + self.ngram - 3

    def learn(self, current: int, said: Mapping[Path, int], room: int) -> None:
        """`said`: the model's best token behind each path."""
        if not self.probes(room):
            return
        new = [said[path] for path in self.columns()]
        if not self.full:
            self.levels = [level[1:] for level in [*self.levels, new]]
            return
        for column, first in enumerate([current, *self.levels[0]]):
            self.insert(first, *(level[column] for level in self.levels[1:]), new[column])
        _, first_level, *others = [*self.levels, new]
        self.levels = [first_level[1:], *others]

    def write(self, said: Callable[[Path], int], prompt: Sequence[int], seed: int, room: int) -> Iterator[list[int]]:
        """The tokens of each step, where `said` gives the model's best token behind a text; `room` is enough for all.

        Greedy verification, Algorithm 3: n-grams that go on with the model's own token stay, until none is left.
        """
        text = list(prompt)
        self.open(text, seed)
        while True:
            left, new = list(self.pool.get(text[-1], [])) if self.full else [], list[int]()
            for place in range(self.ngram):
                new.append(said((*text, *new)))
                left = [run for run in left if place < len(run) and run[place] == new[-1]]
                if not left:
                    break
            current, columns = text[-1], {path: said((*text, *path)) for path in self.columns()}
            text += new
            self.read(text, len(new))
            self.learn(current, columns, room)
            yield new


# Jacobi decoding


def _wrapped(number: int) -> int:
    """As 64 bits with a sign have it."""
    return (number + 2**63) % 2**64 - 2**63


def pick_from(text: Sequence[int], seed: int, count: int) -> list[int]:
    """Tokens of the text by chance."""
    picked = []
    for place in range(count):
        state = _wrapped(seed + len(text) * 0x1E3779B97F4A7C15 + place * 0x1B873593)
        state = _wrapped((state ^ (state >> 33)) * 0x2545F4914F6CDD1D)
        state = _wrapped((state ^ (state >> 29)) * 0x1E3779B97F4A7C15)
        picked.append(text[(state >> 20) % len(text)])
    return picked


def jacobi(said: Sequence[int], accepted: int, text: Sequence[int], seed: int, window: int) -> list[int]:
    """The next guesses: what the model said behind the accepted rows, then tokens of the text."""
    better = list(said[accepted:])
    return [*better, *pick_from(text, seed, window)[len(better) :]]


# Heads


def head_paths(
    tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], ranks: Sequence[Path]
) -> dict[Path, float]:
    """The logarithm of the chance of each path of ranks, where head k guesses tokens[k] with chances[k]."""
    return {
        tuple(tokens[head][rank] for head, rank in enumerate(path)): sum(
            chances[head][rank] for head, rank in enumerate(path)
        )
        for path in ranks
    }


# Recycling


@dataclass
class Recycled:
    """What the model ranked next after tokens; those that are equal modulo `size` push each other out."""

    size: int
    runners: int = 0
    entries: dict[int, tuple[int, list[tuple[int, float]]]] = field(default_factory=dict)  # of the newest step
    second: list[int] = field(default_factory=list)  # the runners-up of the text's last token, the best first

    def learn(self, tokens: Sequence[int], ranked: Sequence[list[tuple[int, float]]], last: int) -> None:
        """After each row the tokens with the logarithms of their chances, the best first. Of rows the first wins.

        After row `last` the text's last token was chosen.
        """
        for token, following in reversed([*zip(tokens, ranked, strict=True)]):
            self.entries[token % self.size] = token, following
        self.second = [token for token, _ in ranked[last][1 : 1 + self.runners]]

    def guess_second(self) -> dict[Path, float]:
        """The logarithm of the chance of each runner-up, and of the best token that is known after it."""
        found: dict[Path, float] = {}
        for token, chance in zip(self.second, RUNNERS, strict=False):
            found[token,] = math.log(chance)
            for path, more in self.guess(token, [(0,)]).items():
                found[(token, *path)] = math.log(chance) + more
        return found

    def guess(self, root: int, ranks: Sequence[Path]) -> dict[Path, float]:
        """The logarithm of the chance of each path of ranks that is known."""
        found: dict[Path, float] = {}
        for path in ranks:
            token, tokens, chance = root, Path(), 0.0
            for rank in path:
                known, following = self.entries.get(token % self.size, (None, []))
                if known != token or rank >= len(following):
                    break
                token = following[rank][0]
                tokens, chance = (*tokens, token), chance + following[rank][1]
            else:
                found[tokens] = chance
        return found


# One tree


@dataclass(frozen=True)
class Offer:
    """What one source guesses: paths with the logarithms of their chances."""

    paths: Mapping[Path, float]
    source: int
    probe: bool = False
    accepted: bool = True


@dataclass(frozen=True)
class Row:
    """A row of a tree, but for the root."""

    path: Path
    source: int
    accepted: bool


def plant(
    offers: Sequence[Offer], most: int, room: int, gate: float = 0.0, prices: Sequence[float] | None = None
) -> list[Row]:
    """The likeliest guesses, then the probes, without the root: `most` - 1 rows at most."""
    probes, guesses = dict[Path, Offer](), dict[Path, tuple[float, Offer]]()
    accepted = set[Path]()
    for offer in offers:
        for path, chance in offer.paths.items():
            if len(path) > room or chance == -math.inf:
                continue
            if offer.probe:
                probes.setdefault(path, offer)
            elif path not in guesses or chance > guesses[path][0]:
                guesses[path] = chance, offer
    if gate and (not guesses or max(math.exp(chance) for chance, _ in guesses.values()) < gate):
        guesses = {}
    for offer in offers:
        accepted |= {path for path in offer.paths if offer.accepted and (path in guesses or path in probes)}
    # A guess that is probed too is there anyway, and as the probe.
    both = [Row(path, offer.source, path in accepted) for path, offer in probes.items() if path in guesses]
    rest = [Row(path, offer.source, path in accepted) for path, offer in probes.items() if path not in guesses]
    ranked = [(chance - len(path) * DEEPER, path) for path, (chance, _) in guesses.items() if path not in probes]
    ranked.sort(key=lambda item: -item[0])
    taken = ranked[: most - 1 - len(probes)]
    if prices is not None:
        taken = taken[: _worthwhile([key for key, _ in taken], prices, len(both))]
    return [*both, *(Row(path, guesses[path][1].source, path in accepted) for _, path in taken), *rest]


def _worthwhile(keys: Sequence[float], prices: Sequence[float], before: int) -> int:
    """How many guesses, the likeliest first, bring the most expected tokens for their price behind other rows."""
    expected, worths = 1.0, [1.0 / prices[row] for row in range(before + 1)]
    for number, key in enumerate(keys, 1):
        expected += math.exp(key)
        worths.append(expected / prices[before + number])
    return max(0, worths.index(max(worths)) - before)


def walk(tree: Sequence[Path], accepted: Sequence[bool], picks: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rows of a tree, row 0 with the path (), that hold from the root on, and what was picked after each."""
    rows = {path: row for row, path in enumerate(tree) if accepted[row]}
    path, found = Path(), list[int]()
    while path in rows:
        found.append(rows[path])
        path = (*path, picks[rows[path]])
    return found, list(path)


def keep(slots: Sequence[int], start: int, count: int, path: Sequence[int]) -> list[int]:
    """A lane's slots: of the `count` rows from `start` on, those of the path come first, then the others."""
    window = slots[start : start + count]
    others = [slot for row, slot in enumerate(window) if row not in path]
    return [*slots[:start], *(window[row] for row in path), *others, *slots[start + count :]]


def sequential_paths(
    likely: Callable[[Path], list[tuple[int, float]]], widths: Sequence[int], beam: int
) -> dict[Path, float]:
    """Paths by heads that know the guesses before them, `likely` after each; from a depth the `beam` best go on.

    Behind each of them come so many guesses as `widths` has for the depth.
    """
    found: dict[Path, float] = {}
    level: dict[Path, float] = {(): 0.0}
    for width in widths:
        best = sorted(level, key=lambda path: -level[path])[:beam]
        level = {(*path, token): level[path] + chance for path in best for token, chance in likely(path)[:width]}
        found |= level
    return found
