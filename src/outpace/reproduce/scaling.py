"""Lookahead's scaling law: tokens per step by the number of speculated n-grams (arXiv 2402.02057, section 4).

One of every `scarcity` steps (the paper's f) finds n-grams, whose tokens are accepted with probability `alpha` each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from ..draft import Tree
from ..parallel import deal


class Point(NamedTuple):
    """A setting and its result."""

    ngram: int  # N
    batch: int  # W = G
    rows: float  # per step
    tokens: float  # per step: S


class Fit(NamedTuple):
    """The best fit of Eq. 7."""

    alpha: float
    scarcity: float
    error: float  # root mean square

    def tokens(self, ngram: int, batch: int) -> float:
        """Eq. 7: tokens per step."""
        return 1 + (expected(self.alpha, ngram, batch) - 1) / self.scarcity


def expected(alpha: float, ngram: int, batch: int) -> float:
    """Eq. 5: tokens per step with `batch` n-grams, each of `ngram` - 1 draft tokens.

    >>> expected(1.0, 5, 3), expected(0.0, 5, 3), expected(0.5, 2, 1)
    (5.0, 1.0, 1.5)
    """
    return ngram - sum((1 - alpha**length) ** batch for length in range(1, ngram))


def fit(points: Sequence[Point]) -> Fit:
    """The best of a thousand values of alpha; for each, least squares gives the best scarcity (1 or more)."""
    best = Fit(0.0, 1.0, math.inf)
    for alpha in (step / 1000 for step in range(1, 1000)):
        gains = [expected(alpha, point.ngram, point.batch) - 1 for point in points]
        share = sum(gain * (point.tokens - 1) for gain, point in zip(gains, points, strict=True))
        share /= sum(gain * gain for gain in gains)
        found = Fit(alpha, 1 / min(1.0, max(1e-6, share)), 0.0)
        error = math.sqrt(fmean((found.tokens(point.ngram, point.batch) - point.tokens) ** 2 for point in points))
        if error < best.error:
            best = found._replace(error=error)
    return best


def straight(points: Sequence[Point]) -> tuple[float, float]:
    """The slope of tokens per step over log2 of rows, and the R² of the line.

    >>> straight([Point(5, 1, 2, 1.0), Point(5, 2, 4, 1.5), Point(5, 4, 8, 2.0)])
    (0.5, 1.0)
    """
    across, up = [math.log2(point.rows) for point in points], [point.tokens for point in points]
    middle, level = fmean(across), fmean(up)
    spread = sum((x - middle) ** 2 for x in across)
    together = sum((x - middle) * (y - level) for x, y in zip(across, up, strict=True))
    variance = sum((y - level) ** 2 for y in up)
    return together / spread, together**2 / (spread * variance) if variance else 0.0


def share(ngram: int, window: int, guesses: int, devices: int) -> int:
    """The most rows of any device in Lookahead Parallelism, for a full window and n-grams without common prefixes.

    >>> [share(5, 15, 15, devices) for devices in (1, 2, 4, 8)]
    [120, 61, 36, 21]
    """
    tree, tokens = Tree(0), iter(range(1, window * ngram + guesses * ngram))
    for _ in range(guesses):
        tree.insert([next(tokens) for _ in range(ngram - 1)], "")
    spine = [0, *tree.insert([next(tokens) for _ in range(window - 1)], "")]
    for row in spine:
        tree.insert([next(tokens) for _ in range(ngram - 2)], "", below=row)
    return max(map(len, deal(tree.draft(), devices)))


def price(known: Sequence[tuple[int, float]], rows: int) -> float:
    """The time of a step by rows, from measured (rows, time): linear in between and beyond; never below the first.

    >>> [price([(1, 1.0), (9, 1.4), (17, 2.4)], rows) for rows in (1, 5, 17, 25)]
    [1.0, 1.2, 2.4, 3.4]
    """
    places = sorted(known)
    right = next((place for place in range(1, len(places) - 1) if places[place][0] >= rows), len(places) - 1)
    (low, least), (high, most) = places[right - 1], places[right]
    return max(places[0][1], least + (most - least) * (rows - low) / (high - low))
