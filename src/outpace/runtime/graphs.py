"""The CUDA runtime: forward passes as CUDA graphs of compiled layers, on rows in static buffers.

Launching a step's many kernels from Python takes several times as long as running them; a graph launches them at once.
It computes a fixed number of rows (there are a few sizes; steps are padded) over a context up to a fixed length. All
inputs of a step go to the device in one copy, and the best tokens come back in one.

In exact mode a row has the same bits whatever other rows are in the batch, so the logits of an accepted draft token are
bit for bit those of plain decoding in the same mode. If a device's matrix products have other bits for few rows than
for many, all steps have one size, and sequences take turns. A draft deeper than exact attention supports
(`attention.OWN`) is computed in several forward passes.

A graph may also compute rows of several sequences.

If the host is not needed in a step, whole steps run as programs (`program.py`), launched one step ahead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Items
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch

from ..draft import Draft, Verdict, chain
from ..errors import InputError, InvalidLogits, OutpaceWarning
from ..models.adapter import Model, Output
from ..models.ahead import Ahead
from ..models.attention import OWN
from ..models.best import find_best
from ..picking import Sampling
from ..pool import Numbers, Pool, Rows, Sequence
from ..sending import put, send
from .costs import CostCurve
from .exact import PIECE, in_pieces
from .fixed import FixedStep
from .plain import Engine, Question, Work, answered, joined
from .program import LANES, Program

SIZES = (2, 8, 16, 32, 64, 128, 256)  # rows of a graph; a single row would be compiled separately
READING = 512  # prefill rows of one sequence at a time
LARGE = (384, 512, 768, 1024)  # further sizes of prefill graphs
RIDERS = 64  # prefill tokens that may be computed in one pass with a draft
FIRST_SPAN = 1024
PRIME = 11
TEXTS = (4, 16, 64)  # batch sizes of graphs for several sequences
PROGRAMS = 8  # programs that are kept, each with its graphs
MEMORY = 0.5  # the share of free memory for the KV cache
LONGEST = 2**16  # the longest sequence that memory is budgeted for
LINES = TEXTS[-1] + 2  # slot lists: one for a single sequence, one for each of several, and an empty one
Captured = TypeVar("Captured", bound=FixedStep)


class GraphEngine(Engine):
    """An engine that replays CUDA graphs where it can, and warns where it cannot."""

    name = "graphs"

    def __init__(
        self, model: Any, compiled: bool = True, exact_rows: int = 0, capacity: int = 0, memory: float = MEMORY
    ) -> None:
        """With a pool of `capacity` slots; 0: as many as fit in the share `memory` of the device's free memory."""
        super().__init__(model)
        self.pool = Pool(model.device, capacity or affordable(model, memory), fixed=True)
        self.exact = exact_rows > 0
        self.sizes = [*(size for size in SIZES if size < exact_rows), exact_rows] if self.exact else [*SIZES]
        self._compile = compiled
        self._compile_layers = cache(lambda: model.compile_layers())  # once; it takes seconds to import the compiler
        if self.exact:
            self.name = f"exact, up to {exact_rows} rows"
        # By rows, context length, layers, owner of the question, batch size (0: unbatched), and whether for prefill.
        self._graphs: dict[tuple[int, int, tuple[int, int], Hashable, int, bool, tuple[int, ...]], _Graph] = {}
        self._memory: Any = None  # one memory pool for all graphs: they never run at the same time
        # Slot lists on the device, and the sequence of each.
        longest = min(self.pool.capacity, model.context)
        self._texts = torch.zeros(LINES, longest, dtype=torch.long, device=self.pool.device)
        self._readers: list[Sequence | None] = [None] * LINES
        # With the method and the costs that it was sized by; newest last.
        self._programs: list[tuple[Any, CostCurve | None, Program]] = []
        self._most_programs = PROGRAMS
        self._read = False  # whether any sequence was prefilled
        self.takes_turns = False  # whether sequences take turns in exact mode, because bits differ in a batch
        self._prepared: set[bool] = set()  # whether layers are compiled for one sequence, for several
        self.lines = LINES
        self.whole_steps = True  # False: the host takes part in every step, for comparison

    @property
    def most_rows(self) -> int:
        return self.sizes[0] if self.one_size else LARGE[-1]

    @property
    def most_drafted(self) -> int:
        return max(self.sizes, default=SIZES[-1])

    @property
    def most_texts(self) -> int:
        return TEXTS[-1] if self.model.packs and not self.one_size and not self.takes_turns else 1

    @property
    def one_size(self) -> bool:
        """Whether all steps have the same number of rows: in exact mode, if bits depend on it."""
        return self.exact and len(self.sizes) == 1

    @property
    def compiling(self) -> bool:
        """Whether layers are compiled."""
        return self._compile

    def span(self, length: int) -> int:
        """The context length of the graph for a sequence of this length."""
        return _span(length)

    def program_for(self, method: Any, sampling: Sampling) -> Any:
        rejects = sampling.temperature > 0 and sampling.rule != "keyed"
        if not self.whole_steps or not self.sizes or sampling.processors or rejects:
            return None
        for known, costs, program in self._programs:
            if costs is self.costs and (known is method or known == method):
                return program if program.fits else None
        plan = method.plan(self)
        if plan is None:
            return None
        idle = [entry for entry in self._programs if entry[2].idle]
        for entry in idle[: max(0, len(self._programs) + 1 - self._most_programs)]:
            self._programs.remove(entry)
        program = Program(self, plan)
        self._programs.append((method, self.costs, program))
        return program if program.fits else None

    def keep_programs(self, count: int) -> None:
        self._most_programs = max(self._most_programs, count)

    def captured(self, make: Callable[[], Captured], size: int, span: int, texts: int) -> Captured | None:
        """A captured step of a program; None, with a warning, if there is no memory or it cannot be captured."""
        try:
            self.make_ready(size, span, texts)
            step = make()
            self._memory = step.capture(self._memory)
            return step
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.pool.device)
            reason = (
                f"no memory for a graph of {size} rows, batch size {texts} ({free >> 20} of {total >> 20} MiB are free)"
            )
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            if self._compile:
                self._do_without_compiler(reason)
                return self.captured(make, size, span, texts)
        warnings.warn(
            f"{self.model.name}: whole steps cannot be captured in a CUDA graph ({reason}). The host runs the "
            "parts of a step, which is slower.",
            OutpaceWarning,
            stacklevel=2,
        )
        return None

    def make_ready(self, size: int, span: int, texts: int) -> None:
        """Allocate storage and compile layers, before a step of this kind is captured."""
        packed = texts if texts > 1 else 0
        self._make_storage()
        if self._compile and bool(packed) not in self._prepared:
            self._prepare(size, span, (0, self.model.layers), packed)

    def readings(self, texts: int, longest: int) -> list[Callable[[], None]]:
        """Functions that each make a prefill graph; otherwise it is made at first use.

        They are for prompts up to `longest`, of one sequence and of up to `texts` together.
        """
        counts = [0, *(count for count in TEXTS if count < 4 * texts)] if self.most_texts > 1 and texts > 1 else [0]
        sizes = [*dict.fromkeys(self._reading_sizes())]
        spans = self.spans(min(self.pool.capacity, longest))
        kinds = [(size, span, count) for span in spans for size in sizes for count in counts]
        return [partial(self._make_reading, *kind) for kind in kinds]

    def spans(self, longest: int) -> list[int]:
        """The context lengths of graphs, for sequences up to this length."""
        return [FIRST_SPAN << number for number in range((_span(longest) // FIRST_SPAN).bit_length())]

    def _make_reading(self, size: int, span: int, texts: int) -> None:
        self._make_storage()
        try:
            if size in self._reading_sizes():  # not dropped for lack of memory
                self._graph(size, span, texts=texts, reads=True)
        except _NoGraph as error:
            warnings.warn(str(error), OutpaceWarning, stacklevel=2)
        self._read = True

    def beside(self, model: Model) -> GraphEngine:
        """An engine of a second model that uses the same slot numbers: all slots of its own pool are taken."""
        self._make_storage()  # before the other takes memory
        other = GraphEngine(model, self._compile, capacity=self.pool.capacity)
        other._make_storage()
        other.pool.allocate(other.pool.capacity)
        return other

    def reading(self, sequence: Sequence) -> tuple[int, int]:
        return min(READING, self.most_rows), RIDERS if sequence.slots else 0

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
        """As in Engine, by a CUDA graph if there is one."""
        self._make_storage()
        whole = start == 0 and stop is None
        reads = whole and not logits
        self._update_texts([(sequence, rows)], [0], listed=self.exact and reads)
        if self.exact and not reads:
            return self._compute_exactly(rows, logits, (start, stop), hidden, question)
        graph = None
        if self._read or self.exact or not reads:  # the first prefill does not wait for a graph
            graph = self._launch([rows], [0], (start, stop), hidden, question, reads)
        self._read = True
        if graph is None:
            return answered(self.model.forward(self.pool, rows, logits, start, stop, hidden), question)
        return graph.share(len(rows), logits)

    def run(self, works: Items[Work]) -> list[Output | InvalidLogits]:
        if len(works) == 1:
            return [works[0].do()]
        if self.exact and any(work.logits for work in works) and any(_reach(work.rows) > OWN for work in works):
            return [_copy(work.do()) for work in works]  # prompts too, which are deep among rows that need logits
        outputs = self._run_packed(works)
        if outputs is None:  # without a graph: a dense mask
            return super().run(works)
        return [*outputs]  # with slot lists, a NaN cannot spread to other sequences

    def _run_packed(self, works: Items[Work]) -> list[Output] | None:
        """Batched, by a graph; None if there is none."""
        start, stop, parts = works[0].start, works[0].stop, [work.rows for work in works]
        self._make_storage()
        lines = self._lines_for([work.sequence for work in works])
        reads = start == 0 and stop is None and not any(work.logits for work in works)
        self._update_texts([(work.sequence, work.rows) for work in works], lines, listed=self.exact and reads)
        graph = None
        if self._read or self.exact or not reads:
            graph = self._launch(parts, lines, (start, stop), joined(works), None, reads)
        self._read = True
        if graph is None:
            return None
        found = None if reads else graph.found.cpu()  # one transfer for all
        outputs, first = [], 0
        for work in works:
            share = graph.share(len(work.rows), work.logits, first, found)
            outputs.append(answered(share, work.question))
            first += len(work.rows)
        return outputs

    def _compute_exactly(
        self,
        rows: Rows,
        logits: int,
        layers: tuple[int, int | None],
        hidden: torch.Tensor | None,
        question: Question | None,
    ) -> Output:
        """Compute rows, in parts if there are more than a graph takes or if they are deeper than OWN.

        A row's ancestors are never in a later part. Those above the last multiple of OWN count as part of the sequence.
        """
        tails, past, count = rows.tails(), len(rows.text), len(rows)
        parts = list[tuple[Numbers, Output]]()
        for before, chosen in _parts(tails, rows.numbers[1] - past, self.sizes[-1]):
            parts = [*parts[:-1], *((some, _copy(output)) for some, output in parts[-1:])]
            if before:
                put(tails[chosen[0], :before].tolist(), self._texts[0, past:])
            size = next(size for size in self.sizes if size >= len(chosen))
            last = chosen[-1] == count - 1  # the question is about the very last row
            graph = self._graph(size, past + before, layers, question if last else None)
            if hidden is not None:
                graph.hidden[: len(chosen)] = hidden[torch.from_numpy(chosen).to(hidden.device)]
            graph.launch(rows.numbers[:, chosen], tails[chosen, before : before + OWN], past + before)
            parts.append((chosen, graph.share(len(chosen), int((chosen >= count - logits).sum()))))
        return parts[0][1] if len(parts) == 1 else _join(parts, count - logits)

    def is_exact(self) -> bool:
        """Whether rows have the same bits in a draft tree, one by one, and with other prefill chunks.

        If bits differ only in batches, sequences take turns from then on. The test uses row counts of every case that
        kernels distinguish. It cannot find everything: without compiled layers, the order of summation in torch's norms
        depends on the number of rows, which rarely changes a bit. So then all steps must have one size.
        """
        text = [token % self.model.vocabulary for token in range(7, 7 + 3 * 41, 3)]
        answer = [token % self.model.vocabulary for token in (11, 5, 29, 17)]
        alone: list[torch.Tensor] = []
        with self.pool.sequence(text) as sequence:
            for token in answer:
                draft = chain(sequence.tokens[-1], (), "")
                alone.append(self.score(sequence, draft).logits[0].clone())
                self.pool.keep(sequence, draft, Verdict((0,), (token,)))
        expected = torch.stack(alone)
        if not torch.equal(in_pieces(self, [text + answer], len(text))[: len(alone)], expected):
            return False
        for rows in self._tried():
            tokens, parents, path = [text[-1]], [-1], [0]
            for row in range(1, rows):  # every second row continues the answer, while it lasts
                on_path = row % 2 == 0 and len(path) < len(answer)
                tokens.append(answer[len(path) - 1] if on_path else row % self.model.vocabulary)
                parents.append(path[-1])
                path += [row] if on_path else []
            tree = Draft(tuple(tokens), tuple(parents), rows, ("",) * rows)
            with self.pool.sequence(text) as sequence:
                together = self.score(sequence, tree).logits[path]
            if not torch.equal(together, expected[: len(path)]):
                return False
        if self.most_texts > 1:
            beside = in_pieces(self, [text[::-1] + answer, text + answer], len(text))
            self.takes_turns = not torch.equal(beside[: len(alone)], expected)
            self.name += ", one text at a time" if self.takes_turns else ""
        return self._compile or len(self.sizes) == 1

    def _tried(self) -> set[int]:
        """Row counts of every case that kernels distinguish."""
        return {*self.sizes[::2], self.sizes[-1]}

    def use_one_size(self) -> None:
        """From now on every step in exact mode has the same number of rows."""
        self.sizes = self.sizes[-1:]
        self.name = f"exact, always {self.sizes[0]} rows"

    def _launch(
        self,
        parts: list[Rows],
        lines: list[int],
        layers: tuple[int, int | None],
        hidden: torch.Tensor | None,
        question: Question | None,
        reads: bool,
    ) -> _Graph | None:
        """A graph that has computed the rows; None if there is none for that many. Prefill graphs have no logits."""
        count = sum(map(len, parts))
        longest = max(len(rows.text) + len(rows) * (reads and self.exact) for rows in parts)
        texts = 0 if len(parts) == 1 else next(texts for texts in TEXTS if texts >= len(parts))
        sizes = self._reading_sizes() if reads else [*self.sizes]
        while size := next((size for size in sizes if size >= count), 0):
            try:
                graph = self._graph(size, longest, layers, question, texts, reads)
                if hidden is not None:
                    graph.hidden[:count] = hidden
                if texts:
                    graph.launch_packed(parts, lines, listed=self.exact and reads)
                elif self.exact:  # prefill: the slot list includes these rows' own
                    (rows,) = parts
                    graph.launch(rows.numbers, np.zeros((count, 1), dtype=np.int64), len(rows.text) + count)
                else:
                    (rows,) = parts
                    graph.launch(rows.numbers, rows.bits(), len(rows.text))
                return graph
            except _NoGraph as error:  # noqa: PERF203 (at most once for each size)
                sizes = [*self.sizes]
                warnings.warn(str(error), OutpaceWarning, stacklevel=2)
        return None

    def _reading_sizes(self) -> list[int]:
        """Row counts of prefill graphs."""
        return [*self.sizes, *(size for size in (SIZES[-1], *LARGE) if self.sizes and not self.one_size)]

    def _make_storage(self) -> None:
        """Allocate the pool's storage with a first, uncompiled forward pass."""
        if self.pool.stored(0) is None:
            with self.pool.sequence([0, 0]) as text:
                self.model.forward(self.pool, self.pool.place(text, chain(0, (), "")), logits=0)

    def _update_texts(self, texts: list[tuple[Sequence, Rows]], lines: list[int], listed: bool) -> None:
        """Update the sequences' slot lists on the device. `listed`: including these rows' slots."""
        width = self._texts.shape[1]
        places, slots = list[int](), list[int]()
        for (sequence, rows), line in zip(texts, lines, strict=True):
            start = sequence.stable if self._readers[line] is sequence else 0
            if self._readers[line] is not sequence:  # it may have another line, which is now stale
                # In place: `auto` copies engines, and copies share the lists.
                self._readers[:] = [None if reader is sequence else reader for reader in self._readers]
                self._readers[line] = sequence
            more = [int(slot) for slot in rows.numbers[2]] if listed else []
            places += range(line * width + start, line * width + len(rows.text) + len(more))
            slots += [*rows.text[start:], *more]
            sequence.stable = max(start, len(rows.text))
        if len(slots) == 1:  # without waiting for the device
            self._texts.view(-1)[places[0]].fill_(slots[0])
        elif slots and lines == [0]:
            put(slots, self._texts[0, places[0] :])
        elif slots:
            self._texts.view(-1).index_copy_(0, send(places, self.pool.device), send(slots, self.pool.device))

    def _lines_for(self, sequences: list[Sequence]) -> list[int]:
        """A line for each of several sequences: its own, or one that none of them has; unused ones first."""
        lines = {id(reader): line for line, reader in enumerate(self._readers) if line and reader is not None}
        used = {line for line, reader in enumerate(self._readers) if reader is not None and reader.slots}
        mine = {lines[id(sequence)] for sequence in sequences if id(sequence) in lines}
        free = iter(sorted({*range(1, LINES - 1)} - mine, key=lambda line: line in used))
        return [lines[id(sequence)] if id(sequence) in lines else next(free) for sequence in sequences]

    def _graph(
        self,
        size: int,
        length: int,
        layers: tuple[int, int | None] = (0, None),
        question: Question | None = None,
        texts: int = 0,
        reads: bool = False,
    ) -> _Graph:
        span, through = _span(length), (layers[0], self.model.layers if layers[1] is None else layers[1])
        key = (size, span, through, question.owner if question else None, texts, reads, self.model.kept)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(size, span, through, question, texts, reads)
        return graph

    def _prepare(self, size: int, span: int, layers: tuple[int, int], texts: int) -> None:
        """Compile the layers, and our own kernels at the same time."""
        places = (self.model, self.pool, self._texts)
        kinds = {layers[1] - 1, *(layer for layer in self.model.kinds if layers[0] <= layer < layers[1])}
        sizes = {(rows, texts) for rows in (PRIME, size)}
        if self.exact and not texts:  # `is_exact` needs all of these
            sizes |= {(rows, 0) for rows in self._tried()}
            if self.most_texts > 1:
                sizes |= {(rows, TEXTS[0]) for rows in (2, 2 * PIECE)}
        ahead = Ahead()
        try:
            with ahead:
                for (rows, count), layer in product(sorted(sizes), kinds):
                    _Graph(*places, rows, span, (layer, layer + 1), False, self.exact, None, count).compute()
            self._compile_layers()
            # If first compiled for a row count that equals no other size of the model, layers work for all row counts.
            _Graph(*places, PRIME, span, layers, True, self.exact, None, texts).warm_up()
        finally:
            ahead.wait()  # nothing else may run while a graph is captured
        self._prepared.add(bool(texts))

    def _do_without_compiler(self, reason: str) -> None:
        self._compile = False
        warnings.warn(
            f"{self.model.name}: layers cannot be compiled ({reason}). They run uncompiled, and slower.",
            OutpaceWarning,
            stacklevel=3,
        )

    def _capture(
        self, size: int, span: int, layers: tuple[int, int], question: Question | None, texts: int, reads: bool
    ) -> _Graph:
        places = (self.model, self.pool, self._texts)
        try:
            if self._compile and bool(texts) not in self._prepared:
                self._prepare(size, span, layers, texts)
            graph = _Graph(*places, size, span, layers, self._compile, self.exact, question, texts, reads)
            self._memory = graph.capture(self._memory)
            return graph
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.pool.device)
            need = f"a graph of {size} rows over {span} tokens; {free >> 20} of {total >> 20} MiB are free"
            if self.exact or size == SIZES[0]:
                remedy = "exact=False, a smaller model," if self.exact else "a smaller model,"
                raise InputError(f"no memory for {need}. Use {remedy} or runtime='plain'.") from error
            self.sizes = [smaller for smaller in self.sizes if smaller < size]
            raise _NoGraph(f"No memory for {need}: larger steps run without a graph.") from error
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            if self._compile:
                self._do_without_compiler(reason)
                return self._capture(size, span, layers, question, texts, reads)
            if self.exact:
                raise InputError(
                    f"exact mode needs steps that a CUDA graph can capture: {reason}. Use exact=False."
                ) from error
            self.sizes = []
            raise _NoGraph(
                f"{self.model.name}: steps cannot be captured in a CUDA graph ({reason}). They run without, and slower."
            ) from error


def affordable(model: Model, share: float) -> int:
    """How many slots fit in a share of the device's free memory; at most as many as all lanes can use."""
    trial = Pool(model.device, capacity=16)
    with trial.sequence([0, 0]) as sequence:
        model.forward(trial, trial.place(sequence, chain(0, (), "")), logits=0)
    most = LANES * min(model.context, LONGEST)
    keys, _ = trial.stored(0) or (torch.zeros(1, 1, 1, 1), None)
    most = min(most, (2**31 - 1) // (keys.shape[1] * keys.shape[3]) - 1)  # kernels index a layer with 32 bits
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(model.device)
        most = min(most, int(share * free / (trial.bytes / 17)))
    return max(most, 1)


class _NoGraph(Exception):
    """There is no graph for this; the message is the reason. `sizes` has the remaining ones."""


class _Graph(FixedStep):
    """A forward pass of the model, or of some of its layers."""

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
        texts: int = 0,
        reads: bool = False,
    ) -> None:
        super().__init__(model, pool, text, size, span, exact, texts, 2 if reads else OWN)
        self.question = question
        self.reads = reads
        self.model = model
        self.start, self.stop = layers
        self.compiled = compiled

    def _step(self) -> None:
        whole = self.stop == self.model.layers and not self.reads
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

    def share(self, count: int, logits: int, first: int = 0, found: torch.Tensor | None = None) -> Output:
        """The output of the last launch for `count` rows from `first` on, with the logits of their last ones.

        `found` has the best tokens of all rows, if they were already copied from the device.
        """
        rows = slice(first, first + count)
        if not logits:
            return Output(self.output.logits[:0], self.output.hidden[rows], answer=self.answer)
        last = slice(first + count - logits, first + count)
        best = (self.found if found is None else found)[:, last]
        return Output(self.output.logits[last], self.output.hidden[rows], best, self.answer)


def _span(length: int) -> int:
    """The context length of the graph for a sequence of this length."""
    span = FIRST_SPAN
    while span < length:
        span *= 2
    return span


def _copy(output: Output) -> Output:
    """An output that outlives the next replay."""
    answer = None if output.answer is None else output.answer.clone()
    return Output(output.logits.clone(), output.hidden.clone(), answer=answer)


def _reach(rows: Rows) -> int:
    """The most tokens beyond the computed sequence that a row attends to, itself included."""
    return int(rows.numbers[1].max()) + 1 - len(rows.text)


def _parts(tails: Numbers, depths: Numbers, most: int) -> Iterator[tuple[int, Numbers]]:
    """Rows that exact attention can compute together, up to `most`, and how many of their ancestors count as text."""
    steps = depths // OWN * OWN
    for before in sorted({*steps.tolist()}):
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in np.flatnonzero(steps == before).tolist():
            groups.setdefault(tuple(tails[row, :before].tolist()), []).append(row)
        for group in groups.values():
            for start in range(0, len(group), most):
                yield before, np.array(group[start : start + most])


def _join(parts: list[tuple[Numbers, Output]], asked: int) -> Output:
    """Outputs of parts, concatenated. Logits are of the rows from `asked` on."""
    device = parts[0][1].hidden.device
    rows = np.concatenate([chosen for chosen, _ in parts])

    def ordered(part: list[torch.Tensor], rows: Numbers) -> torch.Tensor:
        return torch.cat(part)[torch.from_numpy(rows.argsort()).to(device)]

    logits = ordered([output.logits for _, output in parts], rows[rows >= asked])
    answer = next((output.answer for _, output in parts if output.answer is not None), None)
    return Output(logits, ordered([output.hidden for _, output in parts], rows), answer=answer)
