"""The CUDA runtime: a step is a captured graph of compiled layers on rows in fixed places.

Launching a step's thousand kernels from Python takes several times as long as the kernels. A graph launches them at once.
It computes a fixed number of rows (a few sizes are kept; what is missing is filled up with rows that nobody sees) over a
text up to a fixed length. All that a step needs goes over in one copy, and the best token of each row comes back in one.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from ..draft import Draft, Scores, find_best
from ..errors import InputError, OutpaceWarning
from ..models.adapter import FixedRows, Model, Output
from ..models.attention import SlotLists, side_stream
from ..pool import Pool, Rows, Sequence
from .plain import Engine

SIZES = (2, 8, 16, 32, 64, 128, 256)  # rows of a graph; one row alone would be compiled apart
FIRST_SPAN = 1024
WIDTH = 128  # how many tokens ahead a draft may reach in exact mode


class GraphEngine(Engine):
    """An engine that replays graphs where it can, and says so where it cannot."""

    def __init__(self, model: Any, compiled: bool = True, exact_rows: int = 0, capacity: int = 4096) -> None:
        super().__init__(model)
        self.pool = Pool(model.device, capacity=capacity)
        self.sizes = (exact_rows,) if exact_rows else SIZES
        self.exact = exact_rows > 0
        self.compiled = compiled
        if compiled:
            model.compile_layers()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._memory: Any = None  # one memory pool for all graphs: they never run at the same time
        self._text = torch.zeros(0, dtype=torch.long)
        self._reader: Sequence | None = None  # whose slots `_text` holds

    def score(self, sequence: Sequence, draft: Draft) -> Scores:
        self._read(sequence, leave=0)
        rows = self.pool.place(sequence, draft)
        if self.pool.stored(0) is None:
            self.model.forward(self.pool, rows, logits=0)  # makes the storage
        if len(rows) > self.sizes[-1] and not self.exact:
            output = self.model.forward(self.pool, rows, logits=len(rows))
            return Scores(output.logits, output.hidden)
        self._update_text(sequence, rows)
        if not self.exact:
            return self._replay(rows.numbers, rows.bits(), len(rows.text))
        tails = rows.tails()
        if tails.shape[1] > WIDTH:
            raise InputError(f"a draft reaches {tails.shape[1]} tokens ahead; in exact mode it may reach {WIDTH}.")
        # More rows than the graph takes go through it in parts. A row's ancestors are never in a later part.
        step = self.sizes[0]
        parts: list[Scores] = []
        for start in range(0, len(rows), step):
            parts = [*parts[:-1], *map(_copy, parts[-1:])]
            parts.append(self._replay(rows.numbers[:, start : start + step], tails[start : start + step], len(rows.text)))
        return parts[0] if len(parts) == 1 else _join(parts)

    def _replay(self, numbers: Any, tree: Any, past: int) -> Scores:
        count = numbers.shape[1]
        graph = self._graph(count, past)
        graph.run(numbers, tree, past)
        return Scores(graph.output.logits[:count], graph.output.hidden[:count], graph.found[:, :count])

    def _update_text(self, sequence: Sequence, rows: Rows) -> None:
        """Bring the list of the text's slots up to date on the device."""
        if len(self._text) != self.pool.capacity:  # the pool has grown: graphs on the old storage are of no use
            self._graphs.clear()
            self._text = torch.zeros(self.pool.capacity, dtype=torch.long, device=self.pool.device)
            self._reader = None
        start = sequence.stable if self._reader is sequence else 0
        if start < len(rows.text):
            new = torch.tensor(rows.text[start:])
            self._text[start : len(rows.text)].copy_(new)
        self._reader, sequence.stable = sequence, len(rows.text)

    def _graph(self, count: int, length: int) -> _Graph:
        size = next(size for size in self.sizes if size >= count)
        span = FIRST_SPAN
        while span < length:
            span *= 2
        graph = self._graphs.get((size, span))
        if graph is None:
            graph = self._graphs[size, span] = self._capture(size, span)
        return graph

    def _capture(self, size: int, span: int) -> _Graph:
        graph = _Graph(self.model, self.pool, self._text, size, span, self.compiled, self.exact)
        self._memory = graph.capture(self._memory)
        return graph


class _Graph:
    """One step for a fixed number of rows."""

    def __init__(
        self, model: Model, pool: Pool, text: torch.Tensor, size: int, span: int, compiled: bool, exact: bool
    ) -> None:
        self.model = model
        self.pool = pool
        self.size = size
        self._on_gpu = pool.device.type == "cuda"
        width = WIDTH if exact else -(-size // 64)
        self._host = torch.zeros(1 + 3 * size + size * width, dtype=torch.long, pin_memory=self._on_gpu)
        numbers = self._host.numpy()
        self._past: Any = numbers[:1]
        self._rows: Any = numbers[1 : 1 + 3 * size].reshape(3, size)
        self._tree: Any = numbers[1 + 3 * size :].reshape(size, width)
        self._rows[2] = pool.scratch
        # A row that fills up sees itself alone: in exact mode by its slot, otherwise by a bit.
        itself = np.eye(size, width * 64, dtype=np.bool_)
        self._alone = pool.scratch if exact else np.packbits(itself, axis=1, bitorder="little").view(np.int64)
        self._tree[:] = self._alone
        self._box = self._host.to(pool.device)
        length, tokens, positions, slots, tree = self._box.split([1, size, size, size, size * width])
        lists = SlotLists(text, length, positions, slots, tree.view(size, width), span, exact)
        self.rows = FixedRows(tokens, positions, slots, lists, compiled)
        self._graph: Any = None
        self.output: Output
        self.found: torch.Tensor

    def capture(self, memory: Any) -> Any:
        """Record the step, its memory from the pool `memory`. Its rows write to the scratch slot meanwhile."""
        if not self._on_gpu:
            return None  # there are no graphs on a CPU: steps run as they are, for tests
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles, and chooses kernels
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=memory):
                side = side_stream(self.pool.device)
                side.wait_stream(torch.cuda.current_stream())
                self._step()
                torch.cuda.current_stream().wait_stream(side)
        self._graph = graph
        return graph.pool()

    def _step(self) -> None:
        self.output = self.model.forward(self.pool, self.rows, logits=self.size)
        self.found = find_best(self.output.logits)

    def run(self, numbers: Any, tree: Any, past: int) -> None:
        """Compute rows, and as many as are missing that nobody sees: they write to the scratch slot."""
        count, width = tree.shape
        self._past[0] = past
        self._rows[:, :count] = numbers
        self._rows[:, count:] = [[0], [past], [self.pool.scratch]]
        self._tree[:] = self._alone
        self._tree[:count] = 0
        self._tree[:count, :width] = tree
        self._box.copy_(self._host, non_blocking=True)
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()


def _copy(scores: Scores) -> Scores:
    """Scores that outlive the next replay."""
    return Scores(scores.logits.clone(), scores.hidden.clone())


def _join(parts: list[Scores]) -> Scores:
    return Scores(torch.cat([part.logits for part in parts]), torch.cat([part.hidden for part in parts]))
