"""A computation on rows in static buffers, which can be captured as a CUDA graph."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..draft import Mask
from ..models.adapter import FixedRows, Model
from ..models.attention import OWN, SlotLists
from ..pool import Numbers, Pool, Rows

TILE = 16  # the most rows of one sequence in an attention tile, if there are several sequences


class FixedStep:
    """A computation on a fixed number of rows. Without a capture it runs eagerly, as on a CPU."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        text: torch.Tensor,
        size: int,
        span: int,
        exact: bool,
        texts: int = 0,
        ahead: int = OWN,
    ) -> None:
        """In exact mode rows attend to up to `ahead` tokens beyond the sequence, at most OWN."""
        self.pool = pool
        self.size = size
        self.on_gpu = pool.device.type == "cuda"
        self.exact = exact
        width = max(2, ahead if exact else -(-size // 64))  # a width of 1 would be compiled separately
        # Sizes that differ from each other are compiled as sizes that may change independently.
        self._tile = min(TILE, max(4, size // texts)) if texts else 0  # the most rows of a tile
        tiles = size // self._tile + texts + 1 if texts else 3
        parts = [len(text), size, 3 * tiles, size, size, size, size * width]
        self._host = torch.zeros(sum(parts), dtype=torch.long)
        lengths, whose, table, tokens, positions, slots, tree = torch.split(self._host, parts)
        self._lengths: Numbers = lengths.numpy()
        self._whose: Numbers = whose.numpy()
        self._tiles: Numbers = table.view(3, tiles).numpy()
        self._rows: Numbers = self._host.numpy()[sum(parts[:3]) : sum(parts[:6])].reshape(3, size)
        self._tree: Numbers = tree.view(size, width).numpy()
        # A padding row attends to itself: in exact mode by its slot, otherwise by a bit.
        self._itself = np.eye(size, width * 64, dtype=np.bool_)
        self._alone = pool.scratch if exact else bits(self._itself)
        if texts:
            self._fill_packed([], [])
        else:
            self._fill(np.zeros((3, 0), dtype=np.int64), np.zeros((0, width), dtype=np.int64), 0)
        self._box = self._host.to(pool.device)
        length, whose, table, tokens, positions, slots, tree = torch.split(self._box, parts)
        seen = (text, length, whose, table, positions, slots, tree.view(size, width))
        self.rows = FixedRows(tokens, positions, slots, SlotLists(*seen, span, self._tile, exact))
        # The input of rows that start after the first layer.
        self.hidden = torch.zeros(size, model.width, dtype=model.dtype, device=pool.device)
        self._graph: Any = None

    def _step(self) -> None:
        """The computation, on `rows` and `hidden`."""
        raise NotImplementedError

    def compute(self) -> None:
        """Run eagerly."""
        with torch.inference_mode():
            self._step()

    def capture(self, memory: Any) -> Any:
        """Capture the step, with the memory pool `memory`. All rows write to the scratch slot meanwhile."""
        self.warm_up()
        if not self.on_gpu:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self.compute()
        self._graph = graph
        return graph.pool()

    def warm_up(self) -> None:
        """Compile, and let libraries choose kernels, on a side stream, as a capture requires."""
        if not self.on_gpu:
            self.compute()
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.compute()
        torch.cuda.current_stream().wait_stream(stream)

    def _fill(self, numbers: Numbers, tree: Numbers, past: int) -> None:
        count, width = tree.shape
        self._lengths[0] = past
        self._rows[:, :count] = numbers
        self._rows[:, count:] = [[0], [past], [self.pool.scratch]]
        self._tree[:] = self._alone
        self._tree[:count] = 0
        self._tree[:count, :width] = tree

    def _fill_packed(self, parts: list[Rows], lines: list[int], listed: bool = False) -> None:
        if self.exact:
            self._tree[:] = self._alone
        else:
            among = self._itself.copy()
        tiles: list[tuple[int, int, int]] = []
        first = 0
        for rows, line in zip(parts, lines, strict=True):
            stop = first + len(rows)
            self._rows[:, first:stop] = rows.numbers
            self._whose[first:stop] = line
            self._lengths[line] = len(rows.text) + len(rows) * listed
            if not self.exact:
                among[first:stop, first:stop] = rows.among
            elif not listed:
                tails = rows.tails()
                self._tree[first:stop] = 0
                self._tree[first:stop, : tails.shape[1]] = tails
            tiles += [(start, min(start + self._tile, stop), first) for start in range(first, stop, self._tile)]
            first = stop
        self._rows[:, first:] = [[0], [0], [self.pool.scratch]]
        self._whose[first:] = len(self._lengths) - 1  # the empty sequence
        tiles += [(start, min(start + self._tile, self.size), start) for start in range(first, self.size, self._tile)]
        self._tiles[:] = 0
        self._tiles[:, : len(tiles)] = np.array(tiles).T
        if not self.exact:
            self._tree[:] = bits(among)

    def _place_lanes(self, each: int) -> None:
        """Assign rows to sequences for good, `each` to every sequence in turn."""
        texts = self.size // each
        self._whose[:] = np.repeat(np.arange(texts), each)
        starts = [start for text in range(texts) for start in range(text * each, (text + 1) * each, self._tile)]
        stops = [min(start + self._tile, (start // each + 1) * each) for start in starts]
        self._tiles[:] = 0
        self._tiles[:, : len(starts)] = [starts, stops, [start // each * each for start in starts]]
        self._box.copy_(self._host)

    def launch(self, numbers: Numbers, tree: Numbers, past: int) -> None:
        """Compute rows, padded with rows that write to the scratch slot."""
        self._fill(numbers, tree, past)
        self._go()

    def launch_packed(self, parts: list[Rows], lines: list[int], listed: bool = False) -> None:
        """The same with rows of several sequences. `lines` are the indices of their slot lists.

        `listed`: the lists already contain the rows' own slots.
        """
        self._fill_packed(parts, lines, listed)
        self._go()

    def _go(self) -> None:
        # A copy in pinned memory, which torch keeps until it is read: this one may be filled again at once.
        self._box.copy_(self._host.pin_memory() if self.on_gpu else self._host, non_blocking=True)
        self.run()

    def run(self) -> None:
        """Compute what is in the static buffers."""
        if self._graph is None:
            self.compute()
        else:
            self._graph.replay()


class Clock:
    """Times the device from now until it has done the work submitted before `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[Any] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._times = [perf_counter()]

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        self._times.append(perf_counter())

    def wait(self) -> None:
        """Wait until the device has done the work."""
        if self._events:
            self._events[1].synchronize()

    def ms(self) -> float:
        """Milliseconds, after `wait`."""
        if self._events:
            start, stop = self._events
            return float(start.elapsed_time(stop))
        return 1000 * (self._times[1] - self._times[0])


def bits(mask: Mask) -> Numbers:
    """Words of 64 bits from a mask."""
    words: Numbers = np.packbits(mask, axis=1, bitorder="little").view(np.int64)
    return words
