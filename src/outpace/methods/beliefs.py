"""Learned acceptance for drafting on the host: `Chances` in plain Python."""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import exp, log2

from ..step.chances import HALVING, KNOTS, SAID, Chances

LEAST = float(SAID[-1])  # the probability at the last knot
NEWS = 64  # draft tokens counted before the table is rebuilt


class Beliefs:
    """Acceptance probabilities by a source's own estimates.

    >>> beliefs = Beliefs(Chances(["lookup", "recycled"]))
    >>> beliefs.learn(["recycled"] * 100, [0.5] * 100, right=range(25))
    >>> round(beliefs.of("lookup", 0.5), 2), round(beliefs.of("recycled", 0.5), 2)
    (0.5, 0.27)
    """

    def __init__(self, chances: Chances) -> None:
        self.chances = chances
        self._number = {name: number for number, name in enumerate(chances.names)}
        self._counted = chances.counted
        self._form()

    def _form(self) -> None:
        self._logs: list[list[float]] = self.chances.table().tolist()

    def of(self, source: str, said: float) -> float:
        """The probability of a path, given the source's own estimate."""
        place = min(-HALVING * log2(said), KNOTS - 1.0) if said > 0 else KNOTS - 1.0
        left = min(int(place), KNOTS - 2)
        logs = self._logs[self._number[source]]
        return exp(logs[left] + (logs[left + 1] - logs[left]) * (place - left)) * min(1.0, said / LEAST)

    def learn(self, sources: Sequence[str], said: Sequence[float], right: Container[int]) -> None:
        """Count draft tokens: their sources, the sources' estimates, and the indices of accepted ones."""
        knots = [min(round(-HALVING * log2(chance)), KNOTS - 1) if chance > 0 else KNOTS - 1 for chance in said]
        numbers = [self._number[source] for source in sources]
        self.chances.count(numbers, knots, [number in right for number in range(len(numbers))])
        if self.chances.counted - self._counted >= NEWS:
            self._counted = self.chances.counted
            self._form()
