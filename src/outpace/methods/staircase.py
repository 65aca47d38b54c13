"""The staircase: rows of one chain that have run different numbers of layers.

A row may stop at a layer while the next row starts at the bottom. When that one reaches the layer, both continue
together: the layers above run once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..draft import Scores
from ..models.adapter import Output
from ..pool import Sequence
from ..runtime.plain import Asking, Engine, Question, Work


class Climb(NamedTuple):
    """Run the rows from `first` on through layers `start` to `stop`."""

    first: int
    start: int
    stop: int


class Heights:
    """How many layers each row of a chain has run. Pure: it lists the climbs to run, in order.

    >>> heights = Heights()
    >>> heights.push(), list(heights.climb(16))
    (0, [Climb(first=0, start=0, stop=16)])
    >>> heights.push(), list(heights.climb(30))
    (1, [Climb(first=1, start=0, stop=16), Climb(first=0, start=16, stop=30)])
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def push(self) -> int:
        """Add a row at the bottom; returns its number."""
        self.rows.append(0)
        return len(self.rows) - 1

    def climb(self, to: int) -> Iterator[Climb]:
        """The climbs that bring the last row to layer `to`. Rows that wait on the way join it."""
        while (start := self.rows[-1]) < to:
            first = self.rows.index(start)
            stop = min(to, self.rows[first - 1]) if first else to
            # The rows before `first` have written their slots in every layer that is run now.
            assert all(height >= stop for height in self.rows[:first])
            yield Climb(first, start, stop)
            self.rows[first:] = [stop] * (len(self.rows) - first)
            assert all(earlier >= later for earlier, later in zip(self.rows, self.rows[1:], strict=False))


class Staircase:
    """The rows after a sequence's last token, each computed up to some layer.

    Everything before that token must be computed. Rows write to slots that await the verdict (`sequence.drafted`), so
    they are freed as usual when the sequence ends or part of the chain is kept.
    """

    def __init__(self, engine: Engine, sequence: Sequence, most: int) -> None:
        assert len(sequence.slots) == sequence.position
        assert not sequence.drafted
        self.engine = engine
        self.sequence = sequence
        self.top = engine.model.layers
        self.tokens: list[int] = []
        self.heights = Heights()
        model = engine.model
        self._hidden = torch.zeros(most, model.width, dtype=model.dtype, device=model.device)  # of rows

    def push(self, token: int) -> None:
        """Add a row at the bottom, after the last."""
        self.tokens.append(token)
        self.heights.push()
        self.engine.pool.extend(self.sequence)

    def climb(self, to: int, question: Question | None = None) -> Asking[Output]:
        """Run the last row up to layer `to`, if it is not there yet, together with rows that wait on the way.

        Returns the output of the last climb. A question is asked about the last row once it is there.
        """
        assert self.heights.rows[-1] < to
        for first, start, stop in self.heights.climb(to):
            rows = self.engine.pool.chain_from(self.sequence, self.tokens, first)
            there = self._hidden[first : len(self.tokens)]
            asked = len(rows) if stop == self.top else 0
            hidden = there if start else None
            output = yield Work(
                self.engine, self.sequence, rows, asked, start, stop, hidden, question if stop == to else None
            )
            there.copy_(output.hidden[:, : self._hidden.shape[1]])
        return output

    def finish(self) -> Asking[Scores]:
        """Run every row to the top."""
        output = yield from self.climb(self.top)
        assert len(output.logits) == len(self.tokens)
        assert self.heights.rows == [self.top] * len(self.tokens)
        return Scores(output.logits, self._hidden[: len(self.tokens)], output.found)
