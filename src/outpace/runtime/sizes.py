"""How many rows the next step has: as many as bring the most tokens a second, found while texts are written."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

from ..step.chances import CUTS

Expected: TypeAlias = "Sequence[float]"
"""[EXPECTED] what trees of so many rows may bring: see `nodes.plant`."""

HOPE = [1.0 + 0.25 * place for place in range(len(CUTS))]  # what is expected where nothing is known yet
RATE = 0.1  # how quickly what is known of a text's trees follows them
SURE = 0.03  # how quickly what is known of how often they are right does
SLOWLY = 0.01  # how quickly what is known of the next text's beginning follows the steps of texts
WAIT = 8  # steps of one row until the most are tried again
LONGEST = 128  # the same, where they were tried in vain again and again
TIMING = 0.1  # how quickly the known milliseconds follow the measured ones
BOLD = 1.1  # so much quicker steps with fewer guesses must be: those that are wrong teach recycling, too
CERTAIN = 1.03  # so much quicker steps without costly sources must be
TRIED = 12  # steps with them, at least, before a text goes on without
AGAIN = 8  # so many texts that are written alone until one begins with them again, where they did not pay
LENGTH = 128.0  # tokens that a text is expected to have before any has ended


class Arm(NamedTuple):
    """A step that could be taken."""

    rows: int
    costly: bool  # whether sources whose own work takes time, like heads, are asked, too
    kind: tuple[Hashable, ...]  # steps of one kind take as long as each other


class _Known:
    """What is known of one kind of tree of a text."""

    def __init__(self, before: _Known | None = None) -> None:
        self.tokens: list[float] = [*before.tokens] if before else [*HOPE]  # expected, by CUTS
        self.hoped: float = before.hoped if before else 1.0  # guesses that were expected to be right, in a step
        self.right: float = before.right if before else 1.0  # and that were

    def learn(self, tokens: Sequence[float], hoped: float, right: int) -> None:
        self.tokens = [known + RATE * (new - known) for known, new in zip(self.tokens, tokens, strict=True)]
        self.hoped += SURE * (hoped - self.hoped)
        self.right += SURE * (right - self.right)

    def brings(self, rows: int) -> float:
        return 1.0 + (_between(self.tokens, rows) - 1.0) * self.right / max(self.hoped, 0.01)

    def follow(self, other: _Known, rate: float) -> None:
        self.tokens = [known + rate * (new - known) for known, new in zip(self.tokens, other.tokens, strict=True)]
        self.hoped += rate * (other.hoped - self.hoped)
        self.right += rate * (other.right - self.right)


class Gains:
    """The tokens that steps of one text bring, by their rows, with costly sources and without.

    What a tree is expected to bring is the sum of the chances of its guesses, and so it is known of trees of any size
    whenever one is made. How often guesses are right in this text, beside what is expected, is counted.

    >>> gains = Gains()
    >>> for _ in range(200):  # guesses are right half as often as expected; those that are free, as expected
    ...     gains.learn([1, 1.5, 2, 3, 3, 3, 3, 1, 1, 1, 1.5, 2, 2, 2, 1], Arm(16, True, ()), tokens=2, free=2)
    >>> [round(gains.tokens(rows), 1) for rows in (1, 4, 8, 64)]
    [1.0, 1.5, 2.0, 2.0]
    >>> [round(gains.tokens(rows, costly=False), 1) for rows in (1, 4, 8, 64)]
    [1.0, 1.0, 1.5, 2.0]
    """

    def __init__(self, before: Gains | None = None) -> None:
        self.asked = 0  # steps with costly sources
        self._with: _Known = _Known(before._with if before else None)
        self._without: _Known = _Known(before._without if before else None)

    def learn(self, expected: Expected, arm: Arm, tokens: int, free: int) -> None:
        """Such a step has brought so many tokens; `free` of them come of guesses that cost nothing, or of none."""
        if arm.costly:
            self.asked += 1
            self._with.learn(expected[: len(CUTS)], _between(expected, arm.rows) - 1.0, tokens - 1)
        self._without.learn(expected[len(CUTS) : -1], expected[-1], min(free, tokens) - 1)

    def tokens(self, rows: int, costly: bool = True) -> float:
        """What a step of so many rows is expected to bring."""
        return (self._with if costly else self._without).brings(rows)

    def follow(self, other: Gains, rate: float) -> None:
        """Become more like another text's."""
        self._with.follow(other._with, rate)
        self._without.follow(other._without, rate)


def _between(tokens: Sequence[float], rows: int) -> float:
    """Of what is known by CUTS, for so many rows."""
    right = min(bisect_left(CUTS, rows), len(CUTS) - 1)
    left = max(right - 1, 0)
    if rows >= CUTS[right]:
        return tokens[right]
    return tokens[left] + (tokens[right] - tokens[left]) * (rows - CUTS[left]) / (CUTS[right] - CUTS[left])


class Sizes:
    """Chooses among steps, by what they bring and how long they took."""

    def __init__(self) -> None:
        self.chosen = Counter[tuple[int, bool]]()  # steps, by their rows and whether costly sources were asked
        self._before = Gains()  # what is expected of a text of which nothing is known
        self._rested: dict[Hashable, float] = {}  # milliseconds of each kind of step without a text
        self._ms: dict[Hashable, float] = {}  # and with texts
        self._drift = 1.0  # what the second have of the first
        self._wait, self._waited = WAIT, 0
        self._reading: float | None = None  # milliseconds in which costly sources read a prompt
        self._length = LENGTH  # tokens of a text
        self._taught = False  # whether a text has told what costly sources bring
        self._spared = 0  # texts that have begun without them, one after the other

    def begin(self) -> Gains:
        """A text begins."""
        return Gains(self._before)

    def end(self, gains: Gains, steps: int, tokens: int) -> None:
        """A text has ended after so many steps, which wrote so many tokens."""
        self._before.follow(gains, min(1.0, SLOWLY * steps))
        self._taught |= gains.asked >= TRIED
        if steps:
            self._length += TIMING * (tokens - self._length)

    def read(self, ms: float) -> None:
        """Costly sources have read a prompt in so long."""
        self._reading = ms if self._reading is None else self._reading + TIMING * (ms - self._reading)

    def spares(self, texts: Sequence[Gains], arms: Sequence[Arm], limit: int) -> bool:
        """Whether a text that begins, the last of these, had better do without costly sources from its first step on.

        So it is where, by what earlier texts have taught, all of them would be done sooner: costly sources read a
        prompt before they bring anything, and all others wait for that. The text has `limit` tokens at most.
        """
        length = min(limit, self._length)

        def spent(costly: bool) -> float:
            values = [self._value(texts, arm) for arm in arms if arm.costly == costly]
            return length * len(texts) / max(values) if values else float("inf")

        reading = len(texts) * (self._reading or 0.0)
        if not self._taught or spent(False) * CERTAIN > spent(True) + reading:
            self._spared = 0
            return False
        self._spared += len(texts) == 1
        if self._spared == AGAIN:
            self._spared = 0
            return False
        return True

    def rested(self, kind: Hashable, ms: float) -> None:
        """A step of this kind took so long, without a text."""
        self._rested[kind] = ms

    def timed(self, kind: Hashable, ms: float) -> None:
        """A step of this kind took so long. One that waited for something else says nothing."""
        known = self._ms.get(kind)
        if known is None or ms < known:
            self._ms[kind] = ms if known is None else known + 3 * TIMING * (ms - known)
        elif ms < 1.5 * known:
            self._ms[kind] = known + TIMING * (ms - known)
        if kind in self._rested:
            self._drift = self._ms[kind] / self._rested[kind]

    def ms(self, kind: Hashable) -> float | None:
        """How long steps of this kind take. What was never timed drifts with what was."""
        if kind in self._ms or kind not in self._rested:
            return self._ms.get(kind)
        return self._drift * self._rested[kind]

    def costs(self, kind: Hashable, other: Hashable) -> tuple[float, float] | None:
        """Milliseconds of steps of these two kinds; None where one is not known."""
        spent, single = self.ms(kind), self.ms(other)
        return None if spent is None or single is None else (spent, single)

    def choose(self, texts: Sequence[Gains], arms: Sequence[Arm]) -> Arm:
        """Which of these steps comes next for all texts."""
        arm = self._choose(texts, arms)
        self.chosen[arm.rows, arm.costly] += 1
        return arm

    def _choose(self, texts: Sequence[Gains], arms: Sequence[Arm]) -> Arm:
        most = max(arm.rows for arm in arms)
        values = {arm: self._value(texts, arm) / (BOLD if 1 < arm.rows < most else 1.0) for arm in arms}
        best = max(arms, key=lambda arm: (values[arm], -arm.rows))
        alike = [arm for arm in arms if arm.costly == best.costly]
        if not best.costly and len(alike) < len(arms):  # there is no way back to costly sources, so it must be certain
            alike = [arm for arm in arms if arm.costly]
            other = max(alike, key=lambda arm: (values[arm], -arm.rows))
            if values[best] > CERTAIN * values[other]:
                return best
            best = other
        if best.rows > 1:
            self._wait, self._waited = WAIT, 0
            return best
        self._waited += 1
        if self._waited < self._wait:
            return best
        self._wait, self._waited = min(2 * self._wait, LONGEST), 0
        return max(alike, key=lambda arm: arm.rows)  # what guesses would bring is not known of steps without them

    def _value(self, texts: Sequence[Gains], arm: Arm) -> float:
        """Tokens a millisecond."""
        return sum(gains.tokens(arm.rows, arm.costly) for gains in texts) / (self.ms(arm.kind) or 1.0)
