"""How many rows the next step has: as many as give the most tokens per second, learnt while decoding."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from math import inf, sqrt
from typing import NamedTuple, TypeAlias

from ..step.chances import CUTS

Expected: TypeAlias = "Sequence[float]"
"""[EXPECTED] expected tokens of trees of different sizes: see `nodes.plant`."""

HOPE = [1.0 + 0.25 * place for place in range(len(CUTS))]  # expected tokens where nothing is known yet
RATE = 0.1  # smoothing of a sequence's expected tokens
SURE = 0.03  # smoothing of its acceptance
SLOWLY = 0.01  # smoothing of the prior for new sequences
WAIT = 8  # one-row steps before the largest is tried again
LONGEST = 128  # the same, after repeated failures
TIMING = 0.1  # smoothing of step times
BOLD = 1.1  # smaller steps must be this much faster: recycling learns from rejected rows too
DOUBT = 0.15  # steps without costly sources must be this much faster, for one sequence: see `_certain`
TRIED = 12  # the least steps with them before a sequence drops them
AGAIN = 8  # unbatched sequences before they are tried again, if they did not pay
LENGTH = 128.0  # expected length of a sequence before any has ended


class Arm(NamedTuple):
    """A kind of step that could come next."""

    rows: int
    costly: bool  # whether it includes costly sources, such as heads
    kind: tuple[Hashable, ...]  # steps of one kind take the same time


class _Known:
    """Statistics of one kind of tree of a sequence."""

    def __init__(self, before: _Known | None = None) -> None:
        self.tokens: list[float] = [*before.tokens] if before else [*HOPE]  # expected, by CUTS
        self.hoped: float = before.hoped if before else 1.0  # accepted draft tokens per step, expected
        self.right: float = before.right if before else 1.0  # and observed

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
    """Expected tokens per step of one sequence, by rows, with costly sources and without.

    The expected tokens of a tree are the sum of its acceptance probabilities, so they are known for trees of any size
    whenever one is built. They are scaled by the observed acceptance in this sequence.

    >>> gains = Gains()
    >>> for _ in range(200):  # half the expected acceptance; free sources as expected
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
        """Learn from a step that gave `tokens`; `free` of them from sources that cost nothing, or the model."""
        if arm.costly:
            self.asked += 1
            self._with.learn(expected[: len(CUTS)], _between(expected, arm.rows) - 1.0, tokens - 1)
        self._without.learn(expected[len(CUTS) : -1], expected[-1], min(free, tokens) - 1)

    def tokens(self, rows: int, costly: bool = True) -> float:
        """Expected tokens of a step with this many rows."""
        return (self._with if costly else self._without).brings(rows)

    def follow(self, other: Gains, rate: float) -> None:
        """Move towards another sequence's statistics."""
        self._with.follow(other._with, rate)
        self._without.follow(other._without, rate)


def _between(tokens: Sequence[float], rows: int) -> float:
    """Interpolate values by CUTS for this many rows."""
    right = min(bisect_left(CUTS, rows), len(CUTS) - 1)
    left = max(right - 1, 0)
    if rows >= CUTS[right]:
        return tokens[right]
    return tokens[left] + (tokens[right] - tokens[left]) * (rows - CUTS[left]) / (CUTS[right] - CUTS[left])


def _certain(texts: Sequence[Gains]) -> float:
    """How much faster steps without costly sources must seem, before these sequences do without.

    Expected tokens vary by a third from step to step, they are compared in every step, and there is no way back: with a
    small margin most sequences would drop sources that pay. The more sequences, the better the mean is known.

    >>> [round(_certain([Gains()] * count), 3) for count in (1, 4, 25)]
    [1.15, 1.075, 1.03]
    """
    return 1.0 + DOUBT / sqrt(len(texts))


class Sizes:
    """Chooses the next step by expected tokens and measured time."""

    def __init__(self) -> None:
        self.chosen = Counter[tuple[int, bool]]()  # number of steps, by rows and use of costly sources
        self._before = Gains()  # the prior for new sequences
        self._rested: dict[Hashable, float] = {}  # milliseconds of each kind of step without sequences
        self._ms: dict[Hashable, float] = {}  # and with sequences
        self._drift = 1.0  # ratio of the second to the first
        self._wait, self._waited = WAIT, 0
        self._reading: float | None = None  # milliseconds of costly sources' prefill
        self._length = LENGTH  # mean length of a sequence
        self._taught = False  # whether the benefit of costly sources is known
        self._spared = 0  # consecutive sequences started without them

    def begin(self) -> Gains:
        """The statistics that a new sequence starts with."""
        return Gains(self._before)

    def end(self, gains: Gains, steps: int, tokens: int) -> None:
        """A sequence has ended after this many steps and tokens."""
        self._before.follow(gains, min(1.0, SLOWLY * steps))
        self._taught |= gains.asked >= TRIED
        if steps:
            self._length += TIMING * (tokens - self._length)

    def read(self, ms: float) -> None:
        """Costly sources took this long to prefill."""
        self._reading = ms if self._reading is None else self._reading + TIMING * (ms - self._reading)

    def spares(self, texts: Sequence[Gains], arms: Sequence[Arm], limit: int) -> bool:
        """Whether a new sequence, the last of these, should do without costly sources from its first step on.

        That is, whether all sequences would then finish sooner, by earlier statistics: costly sources prefill before
        they draft anything, and all others wait for that. The sequence has at most `limit` tokens.
        """
        length = min(limit, self._length)

        def spent(costly: bool) -> float:
            values = [self._value(texts, arm) for arm in arms if arm.costly == costly]
            return length * len(texts) / max(values) if values else float("inf")

        reading = len(texts) * (self._reading or 0.0)
        if not self._taught or spent(False) * _certain(texts) > spent(True) + reading:
            self._spared = 0
            return False
        self._spared += len(texts) == 1
        if self._spared == AGAIN:
            self._spared = 0
            return False
        return True

    def rested(self, kind: Hashable, ms: float) -> None:
        """A step of this kind took this long, without sequences."""
        self._rested[kind] = ms

    def timed(self, kind: Hashable, ms: float) -> None:
        """A step of this kind took this long. Outliers, which waited for something else, are ignored."""
        known = self._ms.get(kind)
        if known is None or ms < known:
            self._ms[kind] = ms if known is None else known + 3 * TIMING * (ms - known)
        elif ms < 1.5 * known:
            self._ms[kind] = known + TIMING * (ms - known)
        if kind in self._rested:
            self._drift = self._ms[kind] / self._rested[kind]

    def quickest(self) -> float:
        """Seconds of the fastest kind of step that was timed with sequences; infinite if none was."""
        return min(self._ms.values(), default=inf) / 1000

    def ms(self, kind: Hashable) -> float | None:
        """Milliseconds of this kind of step; kinds not timed with sequences are scaled like the others."""
        if kind in self._ms or kind not in self._rested:
            return self._ms.get(kind)
        return self._drift * self._rested[kind]

    def costs(self, kind: Hashable, other: Hashable) -> tuple[float, float] | None:
        """Milliseconds of these two kinds of steps; None if one is unknown."""
        spent, single = self.ms(kind), self.ms(other)
        return None if spent is None or single is None else (spent, single)

    def choose(self, texts: Sequence[Gains], arms: Sequence[Arm]) -> Arm:
        """The next step for all sequences, out of these."""
        arm = self._choose(texts, arms)
        self.chosen[arm.rows, arm.costly] += 1
        return arm

    def _choose(self, texts: Sequence[Gains], arms: Sequence[Arm]) -> Arm:
        most = max(arm.rows for arm in arms)
        values = {arm: self._value(texts, arm) / (BOLD if 1 < arm.rows < most else 1.0) for arm in arms}
        best = max(arms, key=lambda arm: (values[arm], -arm.rows))
        alike = [arm for arm in arms if arm.costly == best.costly]
        if not best.costly and len(alike) < len(arms):  # costly sources cannot be resumed, so be certain
            alike = [arm for arm in arms if arm.costly]
            other = max(alike, key=lambda arm: (values[arm], -arm.rows))
            if values[best] > _certain(texts) * values[other]:
                return best
            best = other
        if best.rows > 1:
            self._wait, self._waited = WAIT, 0
            return best
        self._waited += 1
        if self._waited < self._wait:
            return best
        self._wait, self._waited = min(2 * self._wait, LONGEST), 0
        return max(alike, key=lambda arm: arm.rows)  # one-row steps tell nothing about the benefit of drafts

    def _value(self, texts: Sequence[Gains], arm: Arm) -> float:
        """Tokens per millisecond."""
        return sum(gains.tokens(arm.rows, arm.costly) for gains in texts) / (self.ms(arm.kind) or 1.0)
