"""How many rows the next step has: as many as bring the most tokens a second, found while texts are written."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

CUTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows that gains are known for
HOPE = [1.0 + 0.25 * place for place in range(len(CUTS))]  # what is expected where nothing is known yet
RATE = 0.1  # how quickly a text's gains follow its steps
SLOWLY = 0.01  # how quickly those of the next text's beginning do
WAIT = 8  # steps with fewer rows until the most are tried again
LONGEST = 128  # the same, where they were tried in vain again and again
TIMING = 0.1  # how quickly the known milliseconds follow the measured ones
CERTAIN = 1.02  # so much quicker steps without costly sources must be
TRIED = 8  # steps with them, at least, before a text goes on without


class Arm(NamedTuple):
    """A step that could be taken."""

    rows: int
    costly: bool  # whether sources whose own work takes time, like heads, are asked, too
    kind: tuple[Hashable, ...]  # steps of one kind take as long as each other


class Gains:
    """The tokens that steps of one text bring, by their rows.

    Rows come likeliest first. So a step says what it would have brought with fewer of them; and, where there were no
    more guesses, with more. Of its guesses some were also made by a source that costs nothing, so it says what it would
    have brought without the others, too, or a little less: then there would be room for more guesses.

    >>> gains = Gains()
    >>> for _ in range(99):
    ...     gains.learn((0, 1, 9), rows=16, real=16, free=2, costly=True)
    >>> gains.tokens(1), round(gains.tokens(8), 2), round(gains.tokens(16), 2), gains.tokens(64)
    (1.0, 2.0, 3.0, 2.5)
    >>> round(gains.tokens(16, costly=False), 2)
    2.0
    """

    def __init__(self, before: Gains | None = None) -> None:
        self._with: list[float] = [*before._with] if before else [*HOPE]
        self._without: list[float] = [*before._without] if before else [*HOPE]

    def learn(self, path: Sequence[int], rows: int, real: int, free: int, costly: bool) -> None:
        """A step of `rows` rows, of which `real` were there, accepted those of `path`, row 0 included.

        The first `free` of them were free guesses. `costly` says whether others were asked for at all.
        """
        for place, cut in enumerate(CUTS):
            if rows >= cut or real < rows:
                brought = bisect_left(path, cut)
                if costly:
                    self._with[place] += RATE * (brought - self._with[place])
                self._without[place] += RATE * (min(brought, free) - self._without[place])

    def tokens(self, rows: int, costly: bool = True) -> float:
        """What a step of so many rows is expected to bring."""
        known = self._with if costly else self._without
        right = min(bisect_left(CUTS, rows), len(CUTS) - 1)
        left = max(right - 1, 0)
        if rows >= CUTS[right]:
            return known[right]
        return known[left] + (known[right] - known[left]) * (rows - CUTS[left]) / (CUTS[right] - CUTS[left])

    def follow(self, other: Gains, rate: float) -> None:
        """Become more like another text's."""
        for mine, theirs in ((self._with, other._with), (self._without, other._without)):
            mine[:] = [known + rate * (new - known) for known, new in zip(mine, theirs, strict=True)]


class Sizes:
    """Chooses among steps, by what they bring and how long they took."""

    def __init__(self) -> None:
        self.chosen = Counter[tuple[int, bool]]()  # steps, by their rows and whether costly sources were asked
        self._before = Gains()  # what is expected of a text of which nothing is known
        self._ms: dict[Hashable, float] = {}
        self._wait, self._waited = WAIT, 0

    def begin(self) -> Gains:
        """A text begins."""
        return Gains(self._before)

    def end(self, gains: Gains, steps: int) -> None:
        """A text has ended after so many steps."""
        self._before.follow(gains, min(1.0, SLOWLY * steps))

    def timed(self, kind: Hashable, ms: float) -> None:
        """A step of this kind took so long. One that waited for something else says nothing."""
        known = self._ms.get(kind)
        if known is None or ms < known:
            self._ms[kind] = ms if known is None else known + 3 * TIMING * (ms - known)
        elif ms < 1.5 * known:
            self._ms[kind] = known + TIMING * (ms - known)

    def costs(self, kind: Hashable, other: Hashable) -> tuple[float, float] | None:
        """Milliseconds of steps of these two kinds; None where one is not known."""
        spent, single = self._ms.get(kind), self._ms.get(other)
        return None if spent is None or single is None else (spent, single)

    def choose(self, texts: Sequence[Gains], arms: Sequence[Arm]) -> Arm:
        """Which of these steps comes next for all texts."""
        arm = self._choose(texts, arms)
        self.chosen[arm.rows, arm.costly] += 1
        return arm

    def _choose(self, texts: Sequence[Gains], arms: Sequence[Arm]) -> Arm:
        values = {arm: self._value(texts, arm) for arm in arms}
        best = max(arms, key=lambda arm: (values[arm], -arm.rows))
        alike = [arm for arm in arms if arm.costly == best.costly]
        if not best.costly and len(alike) < len(arms):  # there is no way back to costly sources, so it must be certain
            alike = [arm for arm in arms if arm.costly]
            other = max(alike, key=lambda arm: (values[arm], -arm.rows))
            if values[best] > CERTAIN * values[other]:
                return best
            best = other
        most = max(alike, key=lambda arm: arm.rows)
        if best == most:
            self._wait, self._waited = WAIT, 0
            return best
        self._waited += 1
        if self._waited < self._wait:
            return best
        self._wait, self._waited = min(2 * self._wait, LONGEST), 0
        return most

    def _value(self, texts: Sequence[Gains], arm: Arm) -> float:
        """Tokens a millisecond."""
        return sum(gains.tokens(arm.rows, arm.costly) for gains in texts) / self._ms.get(arm.kind, 1.0)
