"""The staircase: rows of one chain that have climbed to different layers.

A row may stop at a layer while the next row starts at the bottom. When that one reaches the layer, both go on together:
the layers above are run once for all of them.
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
    """The rows from `first` on go together from layer `start` to layer `stop`."""

    first: int
    start: int
    stop: int


class Heights:
    """How many layers each row of a chain has behind it. Pure: it says which climbs to run, and in what order.

    >>> heights = Heights()
    >>> heights.push(), list(heights.climb(16))
    (0, [Climb(first=0, start=0, stop=16)])
    >>> heights.push(), list(heights.climb(30))
    (1, [Climb(first=1, start=0, stop=16), Climb(first=0, start=16, stop=30)])
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def push(self) -> int:
        """A row at the bottom; its number."""
        self.rows.append(0)
        return len(self.rows) - 1

    def climb(self, to: int) -> Iterator[Climb]:
        """What brings the last row to layer `to`. Rows that wait on the way go on with it."""
        while (start := self.rows[-1]) < to:
            first = self.rows.index(start)
            stop = min(to, self.rows[first - 1]) if first else to
            # The rows before `first` have written their slots in every layer that is run now.
            assert all(height >= stop for height in self.rows[:first])
            yield Climb(first, start, stop)
            self.rows[first:] = [stop] * (len(self.rows) - first)
            assert all(earlier >= later for earlier, later in zip(self.rows, self.rows[1:], strict=False))


class Staircase:
    """The rows below the last token of a text, computed as far as they were asked to climb.

    All of the text before that token must be computed. Rows write to slots that await the verdict
    (`sequence.drafted`), so whoever ends the text or keeps a part of the chain leaves nothing behind.
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
        self._hidden = torch.zeros(most, model.width, dtype=model.dtype, device=model.device)  # where rows are left

    def push(self, token: int) -> None:
        """Add a row at the bottom, behind the last."""
        self.tokens.append(token)
        self.heights.push()
        self.engine.pool.extend(self.sequence)

    def climb(self, to: int, question: Question | None = None) -> Asking[Output]:
        """Bring the last row to layer `to`, where it is not yet, and with it those that wait on the way.

        The output is that of the last climb. A question is put to the last row once it is there.
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
        """Bring every row to the top."""
        output = yield from self.climb(self.top)
        assert len(output.logits) == len(self.tokens)
        assert self.heights.rows == [self.top] * len(self.tokens)
        return Scores(output.logits, self._hidden[: len(self.tokens)], output.found)
