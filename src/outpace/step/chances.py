"""How often guesses prove right, by source and by how likely they are said to be: counted as texts are written.

A source says how likely each of its guesses is, and may be wrong about it for this model or this kind of text. The
counts say what to believe instead: along a curve for each source, with knots where the chance is 1, 0.7, 0.5, 0.35, …
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

KNOTS = 16  # of a curve
HALVING = 2  # knots for each halving of the chance
SAID = 0.5 ** (np.arange(KNOTS) / HALVING)  # the chance at each knot
PRIOR = 8.0  # what a source says counts as so many guesses
MEMORY = 2048.0  # so many guesses at a knot are remembered; older ones fade
NEWS = 256  # guesses that are counted until a table is worth being made anew
MOST = 0.98  # nothing is believed more
SOURCES = 256  # there are fewer, all of a tree together
VERSION = 1
CUTS = (1, 2, 4, 8, 16, 32, 64)  # rows of trees of which is said what they are expected to bring
EXPECTED = 2 * len(CUTS) + 1  # numbers that say it: see `nodes.plant`
FREE = SOURCES * KNOTS  # is added to what is said of a guess that a source without costs of its own has made, too

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Marks: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


class Chances:
    """The counts of some sources, by name: sources of the same name are counted together.

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
        self.counted = 0  # guesses, since it was made
        self._others: dict[str, Any] = {}  # stored counts of other sources, which are kept as they are

    def count(self, sources: Any, knots: Any, right: Any) -> None:
        """Guesses of these sources, said to be as likely as these knots, were right or not."""
        at = (self._rows[np.asarray(sources, dtype=np.int64)], np.asarray(knots, dtype=np.int64))
        np.add.at(self.offered, at, 1.0)
        np.add.at(self.right, at, np.asarray(right, dtype=np.float64))
        self.counted += len(sources)
        fading = np.minimum(1.0, MEMORY / np.maximum(self.offered, 1.0))
        self.offered *= fading
        self.right *= fading

    def learn(self, said: Numbers, right: Marks) -> bool:
        """Learn from guesses: what was said of each (source + SOURCES × knot + …), and whether it was accepted.

        Says whether enough is new for the table to be told.
        """
        before = self.counted // NEWS
        self.count(said % SOURCES, said // SOURCES % KNOTS, right)
        return self.counted // NEWS > before

    def believed(self) -> Counts:
        """[names, knots] what to believe. It never rises from a knot to a less likely one."""
        curves: Counts = (self.right + PRIOR * SAID) / (self.offered + PRIOR)
        return np.minimum(np.minimum.accumulate(curves, axis=1), MOST)

    def table(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[sources, knots] the logarithms of what to believe."""
        return np.asarray(np.log(self.believed())[self._rows], dtype=np.float32)

    def pause(self) -> None:
        """A text has ended."""

    def keep(self, path: Path) -> None:
        """Store the counts, whole or not at all."""
        lines = self._others | {
            name: [self.offered[row].round(2).tolist(), self.right[row].round(2).tolist()]
            for row, name in enumerate(self.names)
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps({"version": VERSION, "counts": lines}))
        half.replace(path)

    def load(self, path: Path) -> bool:
        """Take over stored counts of sources with the same names; False where they cannot be read."""
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
