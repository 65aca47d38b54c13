"""The steps that a program captures: a whole one, and those that feed heads the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..models.adapter import FixedRows
from ..models.best import find_best
from ..pool import Sequence
from ..sources.base import Climbing, Reading, Source, Writing
from ..step import fused
from ..step.lanes import pack
from ..step.nodes import Nodes, Rows, plant
from ..step.walking import Walk, walk
from .fixed import Clock, FixedStep, bits
from .sizes import Arm

if TYPE_CHECKING:
    from .program import Program

PREDICTED = frozenset(["prediction"])  # what steps for a sequence with a prediction need too


class _Trees(FixedStep):
    """Trees of some lanes, `each` rows per lane, at most `deepest` deep."""

    def __init__(self, program: Program, group: int, each: int, span: int, deepest: int) -> None:
        engine = program.engine
        self.program, self.model = program, engine.model
        self.group, self.each, self.deepest = group, each, deepest
        self.compiled = engine.compiling
        places = (engine.model, engine.pool, program.lanes.slots)
        super().__init__(*places, group * each, span, engine.exact, group if group > 1 else 0, deepest + 1)
        self.lanes = program.lanes.view(group, program.lanes.tokens.shape[1])
        if group > 1:
            self._place_lanes(each)

    def _place(self, rows: Rows) -> None:
        """Write the rows to the model's static buffers."""
        lanes, fixed = self.lanes, self.rows
        start = (lanes.lengths - 1).clamp(min=0) * lanes.active()  # an idle lane has no context
        slots = lanes.slots_for(rows, self.pool.scratch)
        fixed.tokens.copy_(rows.tokens.flatten())
        fixed.positions.copy_((start[:, None] + rows.depths).flatten())
        fixed.slots.copy_(slots.flatten())
        fixed.lists.length[: self.group].copy_(start)
        tree = fixed.lists.tree
        if self.exact:  # the slots of a row's ancestors, and its own, by depth
            depth = torch.arange(self.deepest + 1, device=slots.device)
            at = rows.sees[:, :, None] & (rows.depths[:, None, None] == depth[:, None])  # [lanes, rows, depth, rows]
            above = slots.gather(1, at.int().argmax(3).flatten(1)).view(self.size, -1)
            above[:, 0] = torch.where(rows.valid, slots[:, :1], self.pool.scratch).flatten()
            tree[:, : above.shape[1]].copy_(above)
        else:
            _show(tree, rows.sees)


class Whole(_Trees):
    """The whole step of some lanes as one graph, with up to `most` rows each, with or without costly sources."""

    ms = 0.0  # its duration with all lanes idle

    def __init__(self, program: Program, group: int, most: int, costly: bool, span: int, needs: frozenset[str]) -> None:
        super().__init__(program, group, program.size(group, most), span, program.deepest)
        self.most, self.needs = most, needs - PREDICTED
        self.arm = Arm(most, costly, (group, most, costly, span, needs))
        self.sources = [source for source in program.sources if costly or not source.costly]
        if needs & PREDICTED:
            self.sources.append(program.predicted)
        self.fused = fused.usable(self.pool.device)
        self.texts = program.lanes.view(group, min(span, program.lanes.tokens.shape[1]))
        self.climbs = {
            source: [_Climb(program, source.layer, group, rows, span, level) for level, rows in enumerate(source.asks)]
            for source in self.sources
            if isinstance(source, Climbing)
        }
        self.writers = {
            source: [_Writer(program, source, group, rows, span) for rows in (program.deepest + 1, 1)]
            for source in self.sources
            if isinstance(source, Writing)
        }
        self.heads = [
            _Heads(program, source, group, most, span, self.needs, self.fused)
            for source in self.sources
            if isinstance(source, Reading)
        ]
        self.report = torch.zeros(0)
        if self.fused:
            self.rows.lists.tree.zero_()  # only each lane's own mask words are written

    def _step(self) -> None:
        program, lanes = self.program, self.lanes
        rows = self._draft()
        output = self._score()
        found = find_best(output.logits)
        if self.fused:
            chosen = fused.choose(program.choices, output.logits, found, lanes, rows, self.needs)
            counted = program.choices if "penalties" in self.needs else None
            report, kept, best, before = fused.settle(rows, chosen, found, lanes, program.deepest, counted)
        else:
            before = lanes.lengths.clone()
            picks, there = program.choices.choose(output.logits, found, lanes, rows, self.needs)
            kept = lanes.keep(rows, walk(rows, picks, program.deepest))
            report, best = self._report(rows, kept, there), found[0].long().view_as(picks)
            program.choices.learn(kept.tokens, kept.counts, self.needs)
        for source in self.sources:
            source.learn(self.texts, rows, best, kept, output.logits)
        for heads in self.heads:
            heads.read(before, kept, output.hidden.view(self.group, self.each, -1))
        self.report = report

    def _draft(self) -> Rows:
        """The draft of all sources, as rows in the model's static buffers."""
        program, lanes, plan, model = self.program, self.lanes, self.program.plan, self.model
        sources = self.sources if self.most > 1 else []
        asked = any(source.asks_room for source in sources) or (sources and not self.fused)
        room = model.rooms(lanes.lengths - 1) if asked else lanes.lengths
        offers = [nodes._replace(costly=source.costly) for source in sources for nodes in self._guesses(source, room)]
        how = (plan.gate, plan.prices)
        if self.fused:
            size = (self.most, self.each, model.context, model.turn or 0)
            return fused.plant(offers, lanes, self.rows, self.pool.scratch, *size, *how, program.table)
        rows = plant(lanes.roots(), offers, self.most, room, *how, self.each, program.table)
        self._place(rows)
        return rows

    def _guesses(self, source: Source, room: torch.Tensor) -> list[Nodes]:
        """A source's nodes. Some need forward passes for them."""
        how = (self.program.choices, self.needs)
        try:
            if isinstance(source, Climbing):
                climbing = source.climbing(self.texts, room, *how)
                rows = next(climbing)
                for climb in self.climbs[source]:
                    rows = climbing.send(climb.states(rows))
            if isinstance(source, Writing):
                writing = source.writing(self.texts, self.program.deepest + 1, *how)
                wide, narrow = self.writers[source]
                asked = writing.send(wide.logits(*next(writing)))
                while True:
                    asked = writing.send(narrow.logits(*asked))
        except StopIteration as end:
            return [end.value]
        return source.guess(self.texts, room)

    def _score(self) -> Any:
        """Run the target, in parts if all forward passes have one size; a row's ancestors are never in a later part."""
        engine = self.program.engine
        most = engine.sizes[0] if engine.one_size else self.size
        if self.size <= most:
            return self.model.forward(self.pool, self.rows, self.size, compiled=self.compiled)
        parts = []
        for start in range(0, self.size, most):
            some = slice(start, start + most)
            lists = self.rows.lists._replace(
                positions=self.rows.positions[some], slots=self.rows.slots[some], tree=self.rows.lists.tree[some]
            )
            rows = FixedRows(self.rows.tokens[some], self.rows.positions[some], self.rows.slots[some], lists)
            parts.append(self.model.forward(self.pool, rows, len(rows), compiled=self.compiled))
        return parts[0]._replace(
            logits=torch.cat([part.logits for part in parts]), hidden=torch.cat([part.hidden for part in parts])
        )

    def _report(self, rows: Rows, kept: Walk, there: torch.Tensor) -> torch.Tensor:
        """[lanes, numbers] for the host: see `Program._unpack`."""
        depth = torch.arange(kept.rows.shape[1], device=there.device)
        lost = ~there.gather(1, kept.rows) & (depth < kept.counts[:, None])
        fault = torch.where(lost.any(1), lost.int().argmax(1), -1)
        marks = rows.valid.int() + (rows.valid & rows.accepted)
        numbers = [kept.counts[:, None], fault[:, None], kept.rows, kept.tokens, rows.tokens, rows.parents]
        said = [] if rows.expected is None else [rows.expected.view(torch.int32)]
        return torch.cat([part.int() for part in (*numbers, rows.sources, marks, *said)], 1)

    def capture(self, memory: Any) -> Any:
        """Capture with all its lanes idle; their state is restored afterwards. It reaches no others."""
        program = self.program
        state = [part[: self.group] for part in (*program.lanes.state, *program.choices.state, *program.state)]
        saved = [part.clone() for part in state]
        with torch.inference_mode():
            self.lanes.limits.zero_()
        try:
            memory = super().capture(memory)
            if program.plan.sizes:
                self.ms = min(self._timed() for _ in range(3))
            return memory
        finally:
            with torch.inference_mode():
                for part, before in zip(state, saved, strict=True):
                    part.copy_(before)

    def _timed(self) -> float:
        clock = Clock(self.pool.device)
        self.run()
        clock.stop()
        clock.wait()
        return clock.ms()

    def bring(self) -> torch.Tensor:
        """Start copying the report to the host."""
        if not self.on_gpu:
            return self.report.clone()
        here = torch.empty(self.report.shape, dtype=self.report.dtype, pin_memory=True)
        here.copy_(self.report, non_blocking=True)
        return here


class _Climb(_Trees):
    """Rows that a source computes with the first layers to draft."""

    def __init__(self, program: Program, layer: int, group: int, rows: int, span: int, deepest: int) -> None:
        super().__init__(program, group, room_for(rows, group), span, deepest)
        self.layer = layer

    def states(self, rows: Rows) -> torch.Tensor:
        """[lanes, rows, width] the hidden states after these layers."""
        count = rows.tokens.shape[1]
        missing = self.each - count

        def wide(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, missing))

        sees = torch.nn.functional.pad(rows.sees, (0, missing, 0, missing))
        sees |= torch.eye(self.each, dtype=torch.bool, device=sees.device)
        more = {"tokens": wide(rows.tokens), "depths": wide(rows.depths), "valid": wide(rows.valid)}
        self._place(rows._replace(sees=sees, **more))
        output = self.model.forward(self.pool, self.rows, 0, 0, self.layer, compiled=self.compiled)
        return output.hidden.view(self.group, self.each, -1)[:, :count]


class _Writer(FixedStep):
    """Rows of a source's own model."""

    def __init__(self, program: Program, source: Writing, group: int, rows: int, span: int) -> None:
        engine = source.engine
        self.model, self.compiled, self.group, self.each = engine.model, engine.compiling, group, room_for(rows, group)
        engine.make_ready(group * self.each, span, group)
        super().__init__(
            engine.model, engine.pool, program.lanes.slots, group * self.each, span, False, group if group > 1 else 0
        )
        self.lanes = program.lanes.view(group, program.lanes.tokens.shape[1])
        if group > 1:
            self._place_lanes(self.each)

    def logits(self, offset: int, tokens: torch.Tensor) -> torch.Tensor:
        """[lanes, vocabulary] after the last of `tokens` [lanes, rows], which start at this offset from the ends."""
        lanes, rows, count = self.lanes, self.rows, tokens.shape[1]
        place = torch.arange(self.each, device=tokens.device)
        start, active = lanes.lengths + offset, lanes.active()
        position = start[:, None] + place
        real = (place < count) & (position >= 0) & (position < self.model.context) & active[:, None]
        position = torch.where(real, position, 0)
        rows.tokens.copy_(torch.nn.functional.pad(tokens, (0, self.each - count)).flatten())
        rows.positions.copy_(position.flatten())
        rows.slots.copy_(torch.where(real, lanes.slots.gather(1, position), self.pool.scratch).flatten())
        rows.lists.length[: self.group].copy_(start.clamp(min=0) * active)
        sees = (place <= place[:, None]) & real[:, None, :]
        _show(rows.lists.tree, sees | torch.eye(self.each, dtype=torch.bool, device=tokens.device))
        output = self.model.forward(self.pool, rows, self.size, compiled=self.compiled)
        logits: torch.Tensor = output.logits.view(self.group, self.each, -1)[:, count - 1]
        return logits


class _Heads(FixedStep):
    """Feeds heads the rows that a step has accepted."""

    def __init__(
        self, program: Program, source: Reading, group: int, rows: int, span: int, needs: frozenset[str], fused: bool
    ) -> None:
        engine = program.engine
        self.needs, self.fused = needs, fused
        deepest = min(program.deepest, max(rows - 1, 1))
        self.each = deepest + 1
        if group > 1:
            self.each = 1 << deepest.bit_length()  # a power of two: no lane starts inside another's mask word
        super().__init__(
            engine.model, engine.pool, program.lanes.slots, group * self.each, span, False, group if group > 1 else 0
        )
        self.source, self.group, self.lanes = source, group, program.lanes.view(group, program.lanes.tokens.shape[1])
        self.choices = program.choices
        if group > 1:
            self._place_lanes(self.each)
        causal = torch.ones(group, self.each, self.each, dtype=torch.bool, device=self.pool.device).tril()
        _show(self.rows.lists.tree, causal)

    def read(self, before: torch.Tensor, kept: Walk, hidden: torch.Tensor) -> None:
        """Feed the rows [lanes, deepest + 1] that were accepted after `before` tokens."""
        if self.fused:
            index, last = fused.follow(
                kept, before, self.lanes, self.rows, self.each, hidden.shape[1], self.pool.scratch
            )
            self._show(hidden.flatten(0, 1).index_select(0, index), last)
            return
        rows, count = self.rows, kept.rows.shape[1]
        place = torch.arange(self.each, device=before.device)
        start = (before - 1).clamp(min=0)
        real = place < kept.counts[:, None]

        def wide(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, self.each - count))

        rows.tokens.copy_(wide(kept.tokens).flatten())
        rows.positions.copy_((start[:, None] + place).flatten())
        slots = self.lanes.slots.gather(1, start[:, None] + place)
        rows.slots.copy_(torch.where(real, slots, self.pool.scratch).flatten())
        rows.lists.length[: self.group].copy_(torch.where(kept.counts > 0, start, 0))
        states = hidden.gather(1, wide(kept.rows)[..., None].expand(-1, -1, hidden.shape[2]))
        last = (kept.counts - 1).clamp(min=0) + torch.arange(self.group, device=before.device) * self.each
        self._show(states.flatten(0, 1), last)

    def _show(self, states: torch.Tensor, last: torch.Tensor) -> None:
        fed = self.source.feed(self.rows, states, last)
        self.source.expect(0, fed, self.lanes, self.choices, self.needs)


class Prompt(FixedStep):
    """Feeds a source a prompt, chunk by chunk."""

    fed: Any

    def __init__(self, program: Program, source: Reading, size: int, span: int) -> None:
        engine = program.engine
        super().__init__(engine.model, engine.pool, program._prompt, size, span, False)
        self.hidden = self.hidden.repeat(1, 1 + len(engine.model.kept))
        self.source = source
        self._causal = bits(np.tril(np.ones((size, -(-size // 64) * 64), dtype=np.bool_)))

    def _step(self) -> None:
        last = (self.rows.slots != self.pool.scratch).sum(0, keepdim=True).sub(1).clamp(min=0)
        self.fed = self.source.feed(self.rows, self.hidden, last)

    def feed(self, states: torch.Tensor, start: int, sequence: Sequence) -> None:
        """Feed hidden states from `start` on."""
        count = len(states)
        stop = start + count
        self.hidden[:count].copy_(states[:, : self.hidden.shape[1]])
        numbers = [sequence.tokens[start + 1 : stop + 1], range(start, stop), sequence.slots[start:stop]]
        self.launch(np.array(numbers), self._causal[:count], start)


def _show(tree: torch.Tensor, sees: torch.Tensor) -> None:
    """Write the mask among rows [lanes, rows, rows] as bits over the rows of all lanes [all rows, words]."""
    words = pack(sees)  # [lanes, rows, words]
    lanes, each, count = words.shape
    if lanes == 1:
        tree[:, :count].copy_(words[0])
        return
    lane = torch.arange(lanes, device=tree.device)
    if each < 64:  # several lanes share a word
        words = words << (lane * each % 64)[:, None, None]
    place = (lane * each // 64)[:, None] + torch.arange(count, device=tree.device)
    tree.zero_()
    tree.view(lanes, each, -1).scatter_(2, place[:, None].expand(-1, each, -1), words)


def room_for(rows: int, group: int) -> int:
    """Rows allocated per lane: with several lanes none may start inside another's mask word."""
    return max(2, rows) if group == 1 else 1 << (rows - 1).bit_length()  # a single row would be compiled separately
