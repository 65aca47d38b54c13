"""Lookup tables for drafts from repetition.

`History` has the sequence itself, `Recycled` the model's top tokens after each token, `NgramPool` n-grams from any
source.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import exp
from typing import NamedTuple

import torch

from ..draft import Tree
from ..picking import likeliest
from ..runtime.costs import Prices
from ..sources.history import BETWEEN, STORED, doubt_of
from ..sources.recycle import NAMES, RUNNERS
from .beliefs import Beliefs

RECYCLED, RUNNER_UP = NAMES
MEMORY = 2**14  # the most tokens with stored successors


class Expected(NamedTuple):
    """A token that heads expect: its probability after the one before it, and what they expect after it."""

    chance: float
    after: dict[int, Expected]


class Recycled:
    """The model's `ranks` top tokens after each token, from the last time that it computed that token.

    >>> recycled = Recycled(ranks=2)
    >>> recycled.learn([7, 5, 7], torch.tensor([[0.0, 2.0, 2.0], [9.0, 0.0, 1.0], [8.0, 8.0, 8.0]]), last=1)
    >>> {token: round(chance, 2) for token, chance in recycled.after(7).items()}
    {1: 0.47, 2: 0.47}
    >>> recycled.runners
    {2: 0.05}
    """

    def __init__(self, ranks: int, known: Recycled | None = None) -> None:
        """Starts with a copy of `known`, another sequence's, if given."""
        self._ranks = ranks
        self._next: dict[int, dict[int, float]] = dict(known._next) if known else {}  # token -> next -> probability
        self.runners: dict[int, float] = {}  # the runners-up to the last token, with probabilities to be the next

    def learn(self, tokens: Sequence[int], logits: torch.Tensor, last: int) -> None:
        """Store the top tokens of the logits [tokens, vocabulary] after these tokens. Of equal tokens the first counts.

        The sequence's newest token was chosen after the one with index `last`.
        """
        found = likeliest(logits, self._ranks)
        for token, best, chances in zip(reversed(tokens), *found.flip(1).tolist(), strict=True):
            self._next[token] = {int(other): exp(chance) for other, chance in zip(best, chances, strict=True)}
        while len(self._next) > MEMORY:
            del self._next[next(iter(self._next))]
        self.runners = dict(zip(map(int, found[0, last, 1:].tolist()), RUNNERS, strict=False))

    def after(self, token: int) -> dict[int, float]:
        """The probability of each stored successor."""
        return self._next.get(token, {})


class History:
    """The successors of each n-gram of `shortest` to `longest` tokens in a growing sequence; BETWEEN separates several.

    >>> history = History(longest=2)
    >>> history.extend([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2])
    >>> {token: round(chance, 2) for token, chance in history.chances([1, 2]).items()}
    {3: 0.38, 4: 0.19}
    """

    def __init__(self, longest: int, shortest: int = 1) -> None:
        self._longest, self._shortest = longest, shortest
        self.earlier: History | None = None  # of stored sequences, to draft from too
        self._end: list[int] = []  # the last tokens of the sequence
        self._next: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)  # run -> token -> how often

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens."""
        for token in tokens:
            if token == BETWEEN:
                self._end = []
                continue
            for length in range(self._shortest, len(self._end) + 1):
                counts = self._next[tuple(self._end[-length:])]
                counts[token] = counts.get(token, 0) + 1
            self._end = [*self._end, token][-self._longest :]

    def forget(self, tokens: Sequence[int], count: int) -> None:
        """Remove the oldest `count` tokens. `tokens` are these and up to `longest` after them."""
        for start in range(count):
            for stop in range(start + 1, min(start + 1 + self._longest, len(tokens))):
                run, token = tuple(tokens[start:stop]), tokens[stop]
                if run[-1] == BETWEEN or token == BETWEEN:
                    break
                if len(run) < self._shortest:
                    continue
                counts = self._next[run]
                counts[token] -= 1
                if not counts[token]:
                    del counts[token]
                if not counts:
                    del self._next[run]

    def chances(self, end: Sequence[int]) -> dict[int, float]:
        """The probability of each next token after this end, longer matches first."""
        chances: dict[int, float] = {}
        belief = 1.0
        end = tuple(end)
        for length in range(min(self._longest, len(end)), self._shortest - 1, -1):
            counts = self._next.get(end[-length:])
            if counts:
                total = sum(counts.values())
                doubt = doubt_of(total, len(counts))
                share = belief * (1 - doubt) / total
                for token, count in counts.items():
                    chances[token] = chances.get(token, 0.0) + share * count
                belief *= doubt
        return chances

    def grow(
        self,
        tree: Tree,
        rows: int,
        depth: int,
        source: str,
        floor: float = 0.0,
        gate: float = 0.0,
        branching: bool = True,
        price: Prices | None = None,
        recycled: Recycled | None = None,
        heads: dict[int, Expected] | None = None,
        beliefs: Beliefs | None = None,
        said: list[float] | None = None,
    ) -> float:
        """Add the most likely draft tokens to the tree, up to `rows` rows, and none with a probability below `floor`.

        They come from the sequence, from stored ones, from `recycled`, and from what `heads` expect next. Their
        probabilities are the source's own estimates, or those that `beliefs` correct; the estimate of every added row
        is appended to `said`.

        Nothing is added if the best one is below the probability `gate`. With the `price` of a step by rows, as many
        are added as maximize expected tokens per cost, possibly none. Returns the expected tokens of the step.
        """
        # A heap of draft tokens: -probability, order, parent row, token, depth, the tokens before it, what heads expect
        # after it, source, its own estimate.
        waiting: list[tuple[float, int, int, int, int, tuple[int, ...], dict[int, Expected], str, float]] = []
        order = 0

        def consider(row: int, depth: int, end: tuple[int, ...], expected: dict[int, Expected], called: float) -> None:
            nonlocal order
            offers = [(source, self.chances(end)), (STORED, self.earlier.chances(end) if self.earlier else {})]
            if recycled:
                offers += [(RECYCLED, recycled.after(tree.tokens[row])), (RUNNER_UP, {} if row else recycled.runners)]
            if expected:
                offers.append((f"head {depth}", {token: found.chance for token, found in expected.items()}))
            guesses: dict[int, tuple[float, str, float]] = {}
            for by, shares in offers:
                for token, share in shares.items():
                    chance = beliefs.of(by, share * called) if beliefs else share * called
                    if chance > max(floor, guesses[token][0] if token in guesses else 0.0):
                        guesses[token] = (chance, by, share * called)
            if not branching and guesses:
                likeliest = max(guesses, key=lambda token: guesses[token][0])
                guesses = {likeliest: guesses[likeliest]}
            for token, (chance, by, share) in guesses.items():
                order += 1
                after = expected[token].after if token in expected else {}
                heapq.heappush(waiting, (-chance, order, row, token, depth, end, after, by, share))

        if depth > 0:
            consider(0, 1, tuple(self._end), heads or {}, 1.0)
        expected, best_rows = 1.0, len(tree)
        if waiting and -waiting[0][0] < gate:
            return expected
        best, best_expected = expected / price(best_rows) if price else 0.0, expected
        while waiting and len(tree) < rows:
            negative, _, parent, token, at, end, after, by, called = heapq.heappop(waiting)
            # All further ones are less likely, so none of them can pay.
            if price and -negative <= best * price.slope(len(tree)):
                break
            (row,) = tree.insert((token,), by, below=parent)
            if said is not None:
                said.append(called)
            if at < depth:
                consider(row, at + 1, (*end, token)[-self._longest :], after, called)
            expected -= negative
            if price:
                worth = expected / price(len(tree))
                if worth > best:
                    best, best_rows, best_expected = worth, len(tree), expected
        if not price:
            return expected
        tree.cut(best_rows)
        return best_expected


class NgramPool:
    """For each key of one or more tokens, its latest continuations: at most `capacity`, newest first.

    >>> pool = NgramPool(longest=1, capacity=2)
    >>> for run in ([7, 1, 1], [7, 2, 2], [7, 3, 3], [7, 2, 2]): pool.add(run)
    >>> list(pool.continuations([5, 7]))
    [(2, 2), (3, 3)]
    """

    def __init__(self, longest: int, capacity: int) -> None:
        self._longest = longest
        self._capacity = capacity
        self._runs: dict[tuple[int, ...], dict[tuple[int, ...], None]] = defaultdict(dict)  # key -> runs, newest last

    def add(self, *ngrams: Sequence[int]) -> None:
        """Add n-grams, each under all of its prefixes that may be keys."""
        runs_after, longest, capacity = self._runs, self._longest, self._capacity  # this runs a hundred times a step
        for ngram in map(tuple, ngrams):
            for key in range(1, min(longest, len(ngram) - 1) + 1):
                runs = runs_after[ngram[:key]]
                run = ngram[key:]
                if run in runs:
                    del runs[run]
                runs[run] = None
                if len(runs) > capacity:
                    del runs[next(iter(runs))]

    def continuations(self, text: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Continuations of `text`: longest key first, then newest first."""
        for _, runs in self.by_key(text):
            yield from runs

    def by_key(self, text: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        """The same, with the length of the key."""
        for key in range(min(self._longest, len(text)), 0, -1):
            if runs := self._runs.get(tuple(text[-key:])):
                yield key, [*reversed(runs)]
