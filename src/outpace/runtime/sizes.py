"""How many rows the next step has: as many as bring the most tokens a second, found while texts are written."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

Tokens: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

CUTS = np.array([1, 2, 4, 8, 16, 32, 64])  # numbers of rows that gains are known for
RATE = 0.1  # how quickly a text's gains follow its steps
SLOWLY = 0.01  # how quickly those of the next text's beginning do
WAIT = 8  # steps with fewer rows until the most are tried again
LONGEST = 128  # the same, where they were tried in vain again and again
TIMING = 0.1  # how quickly the known milliseconds follow the measured ones


class Gains:
    """The tokens that steps of one text bring, by their rows.

    Rows come likeliest first. So a step says what it would have brought with fewer of them; and, where there were no
    more guesses, with more.

    >>> gains = Gains(np.ones(len(CUTS)))
    >>> for _ in range(99):
    ...     gains.learn((0, 1, 9), rows=16, real=16)
    >>> gains.tokens(1), round(gains.tokens(8), 2), round(gains.tokens(16), 2), gains.tokens(64)
    (1.0, 2.0, 3.0, 1.0)
    """

    def __init__(self, before: Tokens) -> None:
        self._tokens = before.copy()

    def learn(self, path: Sequence[int], rows: int, real: int) -> None:
        """A step of `rows` rows, of which `real` were there, accepted those of `path`, row 0 included."""
        brought = np.searchsorted(np.asarray(path), CUTS)
        known = (rows >= CUTS) | (real < rows)
        self._tokens += RATE * known * (brought - self._tokens)

    def tokens(self, rows: int) -> float:
        """What a step of so many rows is expected to bring."""
        return float(np.interp(rows, CUTS, self._tokens))


class Sizes:
    """Chooses among numbers of rows, by what they bring and how long steps took."""

    def __init__(self) -> None:
        self._before: Tokens = 1.0 + 0.25 * np.log2(CUTS)  # what is expected of a text of which nothing is known
        self._ms: dict[Hashable, float] = {}
        self._wait, self._waited = WAIT, 0

    def begin(self) -> Gains:
        """A text begins."""
        return Gains(self._before)

    def end(self, gains: Gains, steps: int) -> None:
        """A text has ended after so many steps."""
        self._before += min(1.0, SLOWLY * steps) * (gains._tokens - self._before)

    def timed(self, key: Hashable, ms: float) -> None:
        """A step of this kind took so long. One that waited for something else says nothing."""
        known = self._ms.get(key)
        if known is None or ms < known:
            self._ms[key] = ms if known is None else known + 3 * TIMING * (ms - known)
        elif ms < 1.5 * known:
            self._ms[key] = known + TIMING * (ms - known)

    def costs(self, kind: Hashable, other: Hashable) -> tuple[float, float] | None:
        """Milliseconds of steps of these two kinds; None where one is not known."""
        spent, single = self._ms.get(kind), self._ms.get(other)
        return None if spent is None or single is None else (spent, single)

    def choose(self, texts: Sequence[Gains], kinds: Sequence[tuple[int, Hashable]]) -> int:
        """Which of these numbers of rows, each with the kind of step that it makes, comes next for all texts."""
        most = max(rows for rows, _ in kinds)
        if len(kinds) == 1 or not texts:
            return most
        values = {rows: sum(gains.tokens(rows) for gains in texts) / self._ms.get(kind, 1.0) for rows, kind in kinds}
        best = max(values, key=lambda rows: (values[rows], -rows))
        if best == most:
            self._wait, self._waited = WAIT, 0
            return best
        self._waited += 1
        if self._waited < self._wait:
            return best
        self._wait, self._waited = min(2 * self._wait, LONGEST), 0
        return most
