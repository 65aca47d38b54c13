"""The CUDA runtime: a step is a captured graph of compiled layers on rows in fixed places.

Launching a step's many kernels from Python takes several times as long as the kernels. A graph launches them at
once. It computes a fixed number of rows (a few sizes are kept; what is missing is filled up with rows that nobody sees)
over a text up to a fixed length. All that a step needs goes over in one copy, and the best tokens come back in one.

In exact mode there is one size. A row then has the same bits whatever rows are beside it, so that the logits of an
accepted guess are bit for bit those of plain decoding in the same mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from ..draft import Draft, Verdict, chain, find_best
from ..errors import InputError, OutpaceWarning
from ..models.adapter import FixedRows, Model, Output
from ..models.attention import SlotLists
from ..pool import Numbers, Pool, Rows, Sequence
from .plain import Engine, HeadFunction, Question, answered

SIZES = (2, 8, 16, 32, 64, 128, 256)  # rows of a graph; one row alone would be compiled apart
READING = 256  # rows of text at a time
WIDTH = 256  # how many tokens ahead a draft may reach, in exact mode
FIRST_SPAN = 1024
PRIME = 11
HEAD_ROWS = 8  # the most new rows that heads read in a graph


class GraphEngine(Engine):
    """An engine that replays graphs where it can, and says so where it cannot."""

    name = "graphs"

    def __init__(self, model: Any, compiled: bool = True, exact_rows: int = 0, capacity: int = 4096) -> None:
        super().__init__(model)
        self.pool = Pool(model.device, capacity=capacity)
        self.exact = exact_rows > 0
        self.sizes = [exact_rows] if self.exact else [*SIZES]
        self._compile = compiled
        if compiled:
            model.compile_layers()
        if self.exact:
            self.name = f"exact, {exact_rows} rows"
        # By rows, length of text, layers, and whose question.
        self._graphs: dict[tuple[int, int, tuple[int, int], Hashable], _Graph] = {}
        self._head_steps: dict[tuple[Hashable, int], _HeadStep] = {}  # by whose heads, length of text
        self._eager: set[Hashable] = set()  # whose heads cannot be captured
        self._memory: Any = None  # one memory pool for all graphs: they never run at the same time
        self._text = torch.zeros(0, dtype=torch.long)  # on the device: the slots of one sequence
        self._reader: Sequence | None = None  # whose

    @property
    def reading(self) -> tuple[int, int]:
        return READING, 0

    def climb(
        self,
        sequence: Sequence,
        rows: Rows,
        logits: int,
        start: int = 0,
        stop: int | None = None,
        hidden: torch.Tensor | None = None,
        question: Question | None = None,
    ) -> Output:
        """Logits are there when the last layer has run."""
        self._make_storage(rows)
        self._update_text(sequence, rows)
        whole = start == 0 and stop is None
        if whole and self.exact:
            return self._compute_exactly(rows, logits)
        graph = None
        if self._graphs or logits or not whole:  # the first text does not wait for a graph to read it
            layers = (start, self.model.layers if stop is None else stop)
            tree = rows.tails if self.exact else rows.bits
            graph = self._launch(rows.numbers, tree, len(rows.text), layers, hidden, question)
        if graph is None:
            return answered(self.model.forward(self.pool, rows, logits, start, stop, hidden), question)
        return graph.share(len(rows), logits)

    def _compute_exactly(self, rows: Rows, logits: int) -> Output:
        """In parts, where there are more rows than the graph takes. A row's ancestors are never in a later part."""
        tails = rows.tails()
        if tails.shape[1] > WIDTH:
            raise InputError(f"a draft reaches {tails.shape[1]} tokens ahead; in exact mode it may reach {WIDTH}.")
        size = self.sizes[0] if logits else READING
        parts: list[Output] = []
        for start in range(0, len(rows), size):
            parts = [*parts[:-1], *map(_copy, parts[-1:])]
            graph = self._graph(size, len(rows.text))
            graph.launch(rows.numbers[:, start : start + size], tails[start : start + size], len(rows.text))
            count = min(size, len(rows) - start)
            parts.append(graph.share(count, count if logits else 0))
        return parts[0] if len(parts) == 1 else _join(parts)

    def is_exact(self) -> bool:
        """Whether the rows of a tree have the bits that they have one by one, tried on this model and device."""
        text = [token % self.model.vocabulary for token in range(7, 7 + 3 * 41, 3)]
        answer = [token % self.model.vocabulary for token in (11, 5, 29, 17)]
        rows = min(3 * len(answer), self.sizes[0])
        parents, path = [-1], [0]
        for row in range(1, rows):  # every second row goes on with the answer, while it lasts
            on_path = row % 2 == 0 and len(path) < len(answer)
            parents.append(path[-1] if on_path else row - 1)
            path += [row] if on_path else []
        tokens = [text[-1], *(row % self.model.vocabulary for row in range(1, rows))]
        for place, row in enumerate(path[1:]):
            tokens[row] = answer[place]
        draft = Draft(tuple(tokens), tuple(parents), rows, ("",) * rows)
        with self.pool.sequence(text) as sequence:
            together = self.score(sequence, draft).logits[path].clone()
        with self.pool.sequence(text) as sequence:
            for row, token in zip(range(len(path)), answer, strict=False):
                alone = chain(sequence.tokens[-1], (), "")
                if not torch.equal(self.score(sequence, alone).logits[0], together[row]):
                    return False
                self.pool.keep(sequence, alone, Verdict((0,), (token,)))
        return True

    def _launch(
        self,
        numbers: Numbers,
        tree: Callable[[], Numbers],
        past: int,
        layers: tuple[int, int],
        hidden: torch.Tensor | None,
        question: Question | None,
    ) -> _Graph | None:
        """A graph that has computed the rows; None where there is none for so many."""
        count = numbers.shape[1]
        while size := next((size for size in self.sizes if size >= count), 0):
            try:
                graph = self._graph(size, past, layers, question)
                if hidden is not None:
                    graph.hidden[:count] = hidden
                graph.launch(numbers, tree(), past)
                return graph
            except _NoGraph as error:  # noqa: PERF203 (at most once for each size)
                warnings.warn(str(error), OutpaceWarning, stacklevel=2)
        return None

    def guess_with(
        self,
        function: HeadFunction,
        owner: Hashable,
        sequence: Sequence,
        tokens: Items[int],
        hidden: torch.Tensor,
    ) -> torch.Tensor | None:
        count = len(hidden)
        past = len(sequence.slots) - count
        known = self._reader is sequence and sequence.stable >= past and len(self._text) == self.pool.capacity
        if count > HEAD_ROWS or not known or owner in self._eager:
            return None
        step = self._head_step(function, owner, past)
        if step is None:
            return None
        step.hidden[:count] = hidden
        chain_bits = np.packbits(np.tri(count, 64, dtype=np.bool_), axis=1, bitorder="little").view(np.int64)
        step.launch(np.array([tokens, range(past, past + count), sequence.slots[past:]]), chain_bits, past)
        return step.found

    def _head_step(self, function: HeadFunction, owner: Hashable, past: int) -> _HeadStep | None:
        key = (owner, _span(past))
        step = self._head_steps.get(key)
        if step is None:
            step = _HeadStep(function, self.model, self.pool, self._text, key[1])
            try:
                self._memory = step.capture(self._memory)
            except Exception as error:
                self._eager.add(owner)
                reason = str(error).strip().split("\n")[0]
                warnings.warn(
                    f"heads cannot be captured in a CUDA graph ({reason}). They run without, and slower.",
                    OutpaceWarning,
                    stacklevel=2,
                )
                return None
            self._head_steps[key] = step
        return step

    def _make_storage(self, rows: Rows) -> None:
        if self.pool.stored(0) is None:
            self.model.forward(self.pool, rows, logits=0)

    def _update_text(self, sequence: Sequence, rows: Rows) -> None:
        """Bring the list of the text's slots up to date on the device."""
        if len(self._text) != self.pool.capacity:  # the pool has grown: graphs on the old storage are of no use
            self._graphs.clear()
            self._head_steps.clear()
            self._memory = None
            self._text = torch.zeros(self.pool.capacity, dtype=torch.long, device=self.pool.device)
            self._reader = None
        start = sequence.stable if self._reader is sequence else 0
        if start < len(rows.text):
            self._text[start : len(rows.text)].copy_(torch.tensor(rows.text[start:]))
        self._reader, sequence.stable = sequence, max(start, len(rows.text))

    def _graph(
        self, size: int, length: int, layers: tuple[int, int] | None = None, question: Question | None = None
    ) -> _Graph:
        span, layers = _span(length), layers or (0, self.model.layers)
        key = (size, span, layers, question.owner if question else None)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(size, span, layers, question)
        return graph

    def _capture(self, size: int, span: int, layers: tuple[int, int], question: Question | None) -> _Graph:
        try:
            if self._compile and not self._graphs:
                # Compiled first for a number of rows that is no other size in the model, layers serve all numbers.
                _Graph(self.model, self.pool, self._text, PRIME, span, layers, True, self.exact).warm_up()
            graph = _Graph(self.model, self.pool, self._text, size, span, layers, self._compile, self.exact, question)
            self._memory = graph.capture(self._memory)
            return graph
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.pool.device)
            need = f"a graph of {size} rows over {span} tokens; {free >> 20} of {total >> 20} MiB are free"
            if self.exact or size == SIZES[0]:
                raise InputError(f"no memory for {need}. Use a smaller model, or runtime='plain'.") from error
            self.sizes = [smaller for smaller in self.sizes if smaller < size]
            raise _NoGraph(f"No memory for {need}: steps of so many rows run without a graph.") from error
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            if self._compile:
                self._compile = False
                warnings.warn(
                    f"{self.model.name}: layers cannot be compiled ({reason}). They run as they are, and slower.",
                    OutpaceWarning,
                    stacklevel=2,
                )
                return self._capture(size, span, layers, question)
            if self.exact:
                raise InputError(f"exact mode needs steps that a CUDA graph can capture: {reason}") from error
            self.sizes = []
            raise _NoGraph(
                f"{self.model.name}: steps cannot be captured in a CUDA graph ({reason}). They run without, and slower."
            ) from error


class _NoGraph(Exception):
    """There is no graph for this, and the message says why. `sizes` are those that are left."""


class _FixedStep:
    """A computation on a fixed number of rows. Without a capture it runs kernel by kernel, as on a CPU."""

    def __init__(self, model: Model, pool: Pool, text: torch.Tensor, size: int, span: int, exact: bool) -> None:
        self.pool = pool
        self.size = size
        self.on_gpu = pool.device.type == "cuda"
        width = WIDTH if exact else max(2, -(-size // 64))  # a width of 1 would be compiled apart
        self._host = torch.zeros(1 + 3 * size + size * width, dtype=torch.long, pin_memory=self.on_gpu)
        numbers = self._host.numpy()
        self._past: Numbers = numbers[:1]
        self._rows: Numbers = numbers[1 : 1 + 3 * size].reshape(3, size)
        self._tree: Numbers = numbers[1 + 3 * size :].reshape(size, width)
        # A row that fills up sees itself beyond the text: in exact mode by its slot, otherwise by a bit.
        itself = np.eye(size, width * 64, dtype=np.bool_)
        self._alone = pool.scratch if exact else np.packbits(itself, axis=1, bitorder="little").view(np.int64)
        self._fill(np.zeros((3, 0), dtype=np.int64), np.zeros((0, width), dtype=np.int64), 0)
        self._box = self._host.to(pool.device)
        length, tokens, positions, slots, tree = torch.split(self._box, [1, size, size, size, size * width])
        lists = SlotLists(text, length, positions, slots, tree.view(size, width), span, exact)
        self.rows = FixedRows(tokens, positions, slots, lists)
        # Rows that come from the middle, or from the end, bring their hidden states.
        self.hidden = torch.zeros(size, model.width, dtype=model.dtype, device=pool.device)
        self._graph: Any = None
        self._copied: Any = None  # tells when the last copy to the device is done
        if self.on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _step(self) -> None:
        """What is computed, on `rows` and `hidden`."""
        raise NotImplementedError

    def capture(self, memory: Any) -> Any:
        """Record the step, its memory from the pool `memory`. All rows write to the scratch slot meanwhile."""
        self.warm_up()
        if not self.on_gpu:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=memory):
            self._step()
        self._graph = graph
        return graph.pool()

    def warm_up(self) -> None:
        """Compile, and let libraries choose their kernels, on a stream of its own as captures want it."""
        with torch.inference_mode():
            if not self.on_gpu:
                self._step()
                return
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)

    def _fill(self, numbers: Numbers, tree: Numbers, past: int) -> None:
        count, width = tree.shape
        self._past[0] = past
        self._rows[:, :count] = numbers
        self._rows[:, count:] = [[0], [past], [self.pool.scratch]]
        self._tree[:] = self._alone
        self._tree[:count] = 0
        self._tree[:count, :width] = tree

    def launch(self, numbers: Numbers, tree: Numbers, past: int) -> None:
        """Compute rows, and as many as are missing that nobody sees: they write to the scratch slot."""
        if self._copied:
            self._copied.synchronize()  # the copy before this one may still be reading
        self._fill(numbers, tree, past)
        self._box.copy_(self._host, non_blocking=True)
        if self._copied:
            self._copied.record()
        if self._graph is None:
            with torch.inference_mode():
                self._step()
        else:
            self._graph.replay()


class _Graph(_FixedStep):
    """One step of the model, or of some of its layers."""

    output: Output
    found: torch.Tensor
    answer: torch.Tensor | None = None

    def __init__(
        self,
        model: Model,
        pool: Pool,
        text: torch.Tensor,
        size: int,
        span: int,
        layers: tuple[int, int],
        compiled: bool,
        exact: bool,
        question: Question | None = None,
    ) -> None:
        super().__init__(model, pool, text, size, span, exact)
        self.question = question
        self.model = model
        self.start, self.stop = layers
        self.compiled = compiled

    def _step(self) -> None:
        whole = self.stop == self.model.layers
        self.output = self.model.forward(
            self.pool,
            self.rows,
            logits=self.size if whole else 0,
            start=self.start,
            stop=self.stop,
            hidden=self.hidden if self.start else None,
            compiled=self.compiled,
        )
        self.found = find_best(self.output.logits) if whole else torch.zeros(2, self.size)
        if self.question is not None:
            last = (self.rows.slots != self.pool.scratch).sum(0, keepdim=True).sub(1).clamp(min=0)
            self.answer = self.question.function(self.output.hidden.index_select(0, last))

    def share(self, count: int, logits: int, first: int = 0) -> Output:
        """What the last launch left of `count` rows from `first` on, with the logits of their last ones."""
        rows = slice(first, first + count)
        if not logits:
            return Output(self.output.logits[:0], self.output.hidden[rows], answer=self.answer)
        last = slice(first + count - logits, first + count)
        return Output(self.output.logits[last], self.output.hidden[rows], self.found[:, last], self.answer)


class _HeadStep(_FixedStep):
    """One step of heads that draft."""

    found: torch.Tensor

    def __init__(self, function: HeadFunction, model: Model, pool: Pool, text: torch.Tensor, span: int) -> None:
        super().__init__(model, pool, text, HEAD_ROWS, span, exact=False)
        self.function = function

    def _step(self) -> None:
        self.found = self.function(self.rows, self.hidden)


def _span(length: int) -> int:
    """The length of text that a graph is made for, if the text has this length."""
    span = FIRST_SPAN
    while span < length:
        span *= 2
    return span


def _copy(output: Output) -> Output:
    """An output that outlives the next replay."""
    return Output(output.logits.clone(), output.hidden.clone())


def _join(parts: list[Output]) -> Output:
    return Output(torch.cat([part.logits for part in parts]), torch.cat([part.hidden for part in parts]))
