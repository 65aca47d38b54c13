"""Acceptance rates by source and by the source's own estimate, counted while decoding.

A source estimates the probability of each of its draft tokens, and may be wrong for this model or kind of text. The
counts correct it, along a curve for each source with knots at probabilities 1, 0.7, 0.5, 0.35, … Below the last knot,
estimates are corrected by the same factor as there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..files import write_whole

KNOTS = 16  # of a curve
HALVING = 2  # knots per halving of the probability
SAID = 0.5 ** (np.arange(KNOTS) / HALVING)  # the probability at each knot
LOWEST = float(np.log(SAID[-1]))  # the log probability at the last knot
PRIOR = 8.0  # weight of the source's own estimate, in draft tokens
MEMORY = 2048.0  # draft tokens remembered per knot; older ones fade
NEWS = 256  # draft tokens counted before the table is rebuilt
MOST = 0.98  # the highest probability
SOURCES = 256  # more than one tree can have
VERSION = 2  # raised when sources estimate differently: older counts are ignored
CUTS = (1, 2, 4, 8, 16, 32, 64)  # sizes of trees for which expected tokens are reported
EXPECTED = 2 * len(CUTS) + 1  # how many numbers that takes: see `nodes.plant`
FREE = SOURCES * KNOTS  # flag: a source that is not costly offers the same node

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Marks: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


class Chances:
    """Acceptance counts of some sources, by name: sources of the same name are counted together.

    >>> chances = Chances(["model", "lookup"])
    >>> chances.count([1] * 100, [0] * 100, [True] * 30 + [False] * 70)
    >>> round(float(np.exp(chances.table()[1, 0])), 2)
    0.35
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [*dict.fromkeys(names)]
        self._rows = np.array([self.names.index(name) for name in names])  # by source
        self.offered: Counts = np.zeros((len(self.names), KNOTS))
        self.right: Counts = np.zeros((len(self.names), KNOTS))
        self.counted = 0  # draft tokens so far
        self._others: dict[str, Any] = {}  # stored counts of other sources, kept unchanged

    def count(self, sources: Any, knots: Any, right: Any) -> None:
        """Count draft tokens of these sources and knots, accepted or not."""
        at = (self._rows[np.asarray(sources, dtype=np.int64)], np.asarray(knots, dtype=np.int64))
        np.add.at(self.offered, at, 1.0)
        np.add.at(self.right, at, np.asarray(right, dtype=np.float64))
        self.counted += len(sources)
        fading = np.minimum(1.0, MEMORY / np.maximum(self.offered, 1.0))
        self.offered *= fading
        self.right *= fading

    def learn(self, said: Numbers, right: Marks) -> bool:
        """Learn from draft tokens: the code of each (source + SOURCES × knot + …), and whether it was accepted.

        Returns whether enough is new to rebuild the table.
        """
        before = self.counted // NEWS
        self.count(said % SOURCES, said // SOURCES % KNOTS, right)
        return self.counted // NEWS > before

    def believed(self) -> Counts:
        """[names, knots] corrected probabilities. They never rise from a knot to a less likely one."""
        curves: Counts = (self.right + PRIOR * SAID) / (self.offered + PRIOR)
        return np.minimum(np.minimum.accumulate(curves, axis=1), MOST)

    def table(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[sources, knots] corrected log probabilities."""
        return np.asarray(np.log(self.believed())[self._rows], dtype=np.float32)

    def pause(self) -> None:
        """A sequence has ended."""

    def keep(self, path: Path) -> None:
        """Store the counts atomically."""
        lines = self._others | {
            name: [self.offered[row].round(2).tolist(), self.right[row].round(2).tolist()]
            for row, name in enumerate(self.names)
        }
        write_whole(path, json.dumps({"version": VERSION, "counts": lines}))

    def load(self, path: Path) -> bool:
        """Load stored counts of sources with the same names; False if they cannot be read."""
        try:
            stored = json.loads(path.read_text())
            if stored["version"] != VERSION:
                return False
            found = {name: np.array(counts, dtype=np.float64) for name, counts in stored["counts"].items()}
            whole = all(
                counts.shape == (2, KNOTS) and np.isfinite(counts).all() and (counts[0] >= counts[1]).all()
                for counts in found.values()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if not whole or any((counts < 0).any() for counts in found.values()):
            return False
        for row, name in enumerate(self.names):
            if name in found:
                self.offered[row], self.right[row] = found[name]
        self._others = {name: counts.tolist() for name, counts in found.items() if name not in self.names}
        return True
