"""A whole step as one program, without the host: draft, score, verify, keep and learn.

The sequences are in lanes on the device. A program is a function of their state, captured as one CUDA graph. The host
launches it one step ahead, and reads the results of the step before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..draft import Draft
from ..errors import InputError
from ..models.adapter import FixedRows
from ..models.attention import OWN
from ..models.best import find_best
from ..picking import Sampling
from ..pool import Numbers, Sequence
from ..sending import put
from ..sources.base import Climbing, Plan, Reading, Source, Writing, drafted, families, named
from ..sources.heads import alone
from ..sources.prediction import Predicted, Prediction
from ..step import fused
from ..step.chances import EXPECTED, FREE, KNOTS
from ..step.choosing import Choices, needs_of
from ..step.lanes import Lanes, pack
from ..step.nodes import Nodes, Rows, plant
from ..step.walking import Walk, walk
from .fixed import Clock, FixedStep, bits
from .sizes import TRIED, Arm, Expected, Gains, Sizes

if TYPE_CHECKING:
    from .graphs import GraphEngine

LANES = 64  # the most sequences of a program
GROUPS = (1, 4, 16, 64)  # batch sizes of graphs
ROWS = 64  # rows that several lanes share: this many cost little more than one
PROMPTS = (8, 32, 64, 128, 256, 512, 1024)  # prefill chunk of heads
PACE = 0.1  # smoothing of tokens per step
RARE = 3
PREDICTED = frozenset(["prediction"])  # what steps for a sequence with a prediction need too


class Stepped(NamedTuple):
    """The results of a step for one sequence."""

    rows: tuple[int, ...]  # accepted, row 0 first
    tokens: tuple[int, ...]  # the target's choice after each
    draft: Draft
    fault: bool  # after these tokens the target had no token to choose
    free: int  # how many first rows a free source has drafted too, row 0 included
    cost: tuple[float, float] | None  # milliseconds of this step, and of a one-row step, if known


class Place:
    """A sequence in a program."""

    def __init__(self, limit: int, gains: Gains, prediction: Prediction | None = None) -> None:
        self.limit = limit  # the length at which it becomes idle
        self.prediction = prediction
        self.lane = -1  # its lane now; below 0 during prefill
        self.length = 0  # as far as results were read
        self.slots: list[int] = []  # in the order of positions, as on the device, as far as results were read
        self.pace = 1.0  # mean tokens per step
        self.gains = gains
        self.taken = 0  # steps whose results were read
        self.frugal = False  # whether a step left out costly sources: their state has a gap
        self.reading: Clock | None = None  # of the costly sources' prefill, until it is read
        self.steps: deque[Stepped] = deque()  # read, but not requested yet
        self.ended = False

    @property
    def goes_on(self) -> bool:
        """Whether it will hardly end with the step that is in flight, so that the next one can be launched ahead.

        A step in vain costs a whole one, and one that is not launched ahead only the host's few instructions. Few steps
        bring RARE times as many tokens beyond the first as the mean.
        """
        return self.length + 1 + RARE * (self.pace - 1) < self.limit

    def add(self, stepped: Stepped, size: int, arm: Arm, expected: Expected | None) -> None:
        """Add the results of a step of `size` rows, with the expected tokens if acceptance is learnt."""
        tokens = len(stepped.tokens)
        if any(row != depth for depth, row in enumerate(stepped.rows)):
            self._keep(stepped.rows, size)
        self.length += tokens
        self.taken += 1
        self.pace += PACE * (tokens - self.pace)
        if expected is not None and arm.rows > 1:
            self.gains.learn(expected, arm, tokens, stepped.free)
        self.steps.append(stepped)

    def _keep(self, path: tuple[int, ...], size: int) -> None:
        """Move the slots of accepted rows to the front of the step's, as `Lanes.keep` does."""
        rows = slice(self.length - 1, self.length - 1 + size)
        slots, kept = self.slots[rows], {*path}
        self.slots[rows] = [slots[row] for row in (*path, *(row for row in range(size) if row not in kept))]


class Program:
    """Steps of one method, for the sequences in its lanes."""

    def __init__(self, engine: GraphEngine, plan: Plan) -> None:
        model, device = engine.model, engine.pool.device
        self.engine, self.plan = engine, plan
        self.sources = plan.sources(LANES, device)
        self.costly = any(source.costly for source in self.sources)
        self.rows = min(plan.rows, 1 + sum(source.nodes for source in self.sources))
        self.probes = sum(source.probes for source in self.sources)
        assert self.rows > self.probes
        # The deepest path: limited by the sources' depth and by the rows.
        self.deepest = min(max((source.deepest for source in self.sources), default=0), self.rows - 1)
        longest = min(model.context, engine.pool.capacity) + self.margin
        self.lanes = Lanes(engine.lines, longest, device)
        # It is in the steps only while a sequence has a prediction.
        self.predicted = Predicted(LANES, longest, self.deepest, device)
        self.names = named([*self.sources, self.predicted])
        self.choices = Choices(LANES, model.vocabulary, device)
        self.sizes = Sizes()
        self.chances = plan.learned(families([*self.sources, self.predicted])) if plan.learned else None
        self.table: torch.Tensor | None = None  # corrected probabilities, if acceptance is learnt
        if self.chances is not None:
            self.table = torch.zeros(len(self.names), KNOTS, device=device)
            self._believe()
        # If sequences cannot be batched, as in some exact modes, one is here, and the host decodes the others.
        self._most = LANES if engine.most_texts > 1 else 1
        self._places: list[Place] = []  # of all sequences, including those in prefill
        self._graphs: dict[tuple[int, int, bool, int, frozenset[str]], _Whole | None] = {}
        self._prompts: dict[tuple[Reading, int, int], _Prompt] = {}  # by source, rows and context length
        self._prompt = torch.zeros(1, longest, dtype=torch.long, device=device)  # slots of the prompt in heads' prefill
        self._flying: list[_Flight] = []  # launched, results not read yet

    @property
    def margin(self) -> int:
        """Slots that a sequence needs beyond its maximum length, for rows that are not accepted."""
        climbing = [_room(max(source.asks), LANES) for source in self.sources if isinstance(source, Climbing)]
        sizes = [self.size(group, rows) for group in GROUPS for rows in self.rows_of(group)]
        return max(*sizes, *climbing) + self.deepest + 2

    def rows_of(self, lanes: int) -> Items[int]:
        """Possible rows per lane, root included, for a step of this many lanes; the most last.

        Several lanes share the cheap rows.
        """
        most = min(self.rows, max(self.probes + 1, ROWS // lanes, 2)) if lanes > 1 else self.rows
        if not self.plan.sizes:
            return [most]
        fewer = self.plan.sizes if lanes == 1 else self.plan.sizes[:1]
        return [*(rows for rows in fewer if self.probes < rows < most), most]

    def size(self, lanes: int, rows: int) -> int:
        """The rows of a lane, padding included."""
        if self.engine.one_size:
            (most,) = self.engine.sizes
            return -(-rows // most) * most
        if lanes == 1:
            return max(2, -(-rows // 8) * 8 if rows > 2 else 2)  # a single row would be compiled separately
        size = 1
        while size < rows:
            size *= 2
        return size

    @property
    def fits(self) -> bool:
        """Whether its drafts are not too deep for one forward pass, which matters in exact mode."""
        return not self.engine.exact or self.deepest < OWN

    @property
    def idle(self) -> bool:
        """Whether its lanes are empty."""
        return not self._places

    def _limit(self, prompt: int, more: int | None) -> int:
        """The maximum length of a sequence."""
        context = self.engine.model.context
        return context if more is None else min(prompt + more, context)

    def _span(self, limit: int) -> int:
        """The context length of the graph for sequences up to this length."""
        return self.engine.span(min(limit, self.engine.pool.capacity) + self.deepest + 1)

    @property
    def predicts(self) -> bool:
        """Whether predictions can be drafted; otherwise the host must."""
        return self.deepest > 0 and self.engine.model.branches

    def _needs(self, *places: Place) -> frozenset[str]:
        """What the open lanes need of a step, and these places."""
        predicted = any(place.prediction is not None for place in (*self._open(), *places))
        return self.choices.needs | (PREDICTED if predicted and self.plan.extends else frozenset())

    def sees(self, place: Place, seen: list[torch.Tensor]) -> Any:
        """What receives the hidden states of prefill; None if no source reads them."""
        reads = not place.frugal and any(isinstance(source, Reading) for source in self.sources)
        return (lambda hidden: seen.append(hidden.clone())) if reads else None

    def reserve(
        self, sequence: Sequence, sampling: Sampling, more: int | None, prediction: Prediction | None = None
    ) -> Place | None:
        """A place for a new sequence, with slots for its maximum length.

        It may grow by `more` tokens, or to the end of the context. Its slots are freed with the sequence. None if no
        lane is free, there is no graph for that many, or the context is larger than the pool.
        """
        self.choices.check(sampling)
        if len(self._places) == self._most:
            return None
        limit = self._limit(len(sequence.tokens), more)
        behind = len(sequence.tokens) - 1 - len(sequence.slots)
        grown = max(limit - len(sequence.tokens), 0)
        pool, needed = self.engine.pool, behind + grown + self.margin
        if more is None and pool.held + needed > pool.capacity:
            return None  # no explicit limit: let the host allocate slots as needed
        sequence.reserved = pool.allocate(needed)
        place = Place(limit, self.sizes.begin(), prediction)
        kind = (_group(len(self._places) + 1), self._span(limit), self._needs(place) | needs_of(sampling))
        arms = [graph.arm for graph in self._steps(*kind)]  # made now, not in the middle of decoding
        if not arms:
            pool.free(sequence.reserved)
            sequence.reserved = []
            return None
        self._places.append(place)
        if self.costly and self.plan.sizes:
            gains = [place.gains for place in self._places]
            place.frugal = self.sizes.spares(gains, arms, max(grown, 1))
        return place

    def open(self, place: Place, sequence: Sequence, sampling: Sampling, seen: list[torch.Tensor]) -> None:
        """Start a prefilled sequence (all but its last token) in its reserved place.

        `seen` has its hidden states, if a source reads them.
        """
        lane = place.lane = self._free_lanes()[0]
        place.length = len(sequence.tokens)
        with torch.inference_mode():
            Lanes.open(self.lanes, lane, sequence.tokens, sampling.seed)
            place.slots = [*sequence.slots, *sequence.reserved]
            self.lanes.place(lane, place.slots, place.limit)
            self.choices.open(lane, sampling, sequence.tokens, sequence.written)
            self.predicted.tell(lane, place.prediction)
            reading, made = Clock(self.lanes.device), len(self._prompts)
            for source in self.sources:
                source.open(lane, sequence.tokens, sampling.seed)
                source.recall(lane, sequence.salt)
                if isinstance(source, Reading) and seen:
                    fed = self._feed(source, seen if source.reads_text else seen[-1:], sequence)
                    source.expect(lane, fed, *alone(sequence, sampling, self.lanes.device))
                    if source.reads_text:
                        sequence.reader, sequence.read = self.reader, len(sequence.slots)
                if isinstance(source, Writing):
                    source.begin(sequence)
            if seen and len(self._prompts) == made:  # otherwise most of the time went into making graphs
                reading.stop()
                place.reading = reading

    def _feed(self, source: Reading, seen: list[torch.Tensor], sequence: Sequence) -> Any:
        """Feed a source the hidden states of the prefill, or of its end, as far as `seen` has them."""
        start = len(sequence.slots) - sum(map(len, seen))
        put(sequence.slots, self._prompt[0])
        for states in seen:
            size = next(size for size in PROMPTS if size >= len(states))
            prompt = self._prompt_step(source, size, self.engine.span(len(sequence.slots)))
            prompt.feed(states, start, sequence)
            start += len(states)
        return prompt.fed

    def _prompt_step(self, source: Reading, size: int, span: int) -> _Prompt:
        """The step that feeds a source this many rows of prompts up to this length."""
        key = (source, size, span)
        if key not in self._prompts:
            made = self.engine.captured(lambda: _Prompt(self, *key), size, span, 1)
            self._prompts[key] = made or _Prompt(self, *key)
        return self._prompts[key]

    @property
    def reader(self) -> object:
        """Heads whose state must be in reused slots."""
        return next((s.heads for s in self.sources if isinstance(s, Reading) and s.reads_text), None)

    def close(self, place: Place, sequence: Sequence, written: Items[int]) -> None:
        """The sequence has ended, with these new tokens. Steps still in flight for it have no effect."""
        if place.ended:
            return
        if place.lane >= 0 and (self.engine.pool.keeps or sequence.grows):
            self._hand_back(place, sequence, written)
        self._places.remove(place)
        place.ended = True
        self.sizes.end(place.gains, place.taken, len(written))
        if self.chances is not None:
            self.chances.pause()
        if place.lane >= 0:
            self.choices.close(place.lane)
            with torch.inference_mode():
                self.lanes.limits[place.lane].fill_(0)
                for source in self.sources:
                    source.leave(place.lane, sequence.salt)

    def _hand_back(self, place: Place, sequence: Sequence, written: Items[int]) -> None:
        """Update the sequence's slots. A step in flight only reorders the spare ones, and is not waited for."""
        sequence.tokens += written
        count = len(sequence.tokens) - 1
        sequence.slots, sequence.reserved = place.slots[:count], place.slots[count:]
        if self.reader is not None and not place.frugal:  # otherwise they have read the prompt only
            sequence.read = count

    def turn(self, places: Items[Place]) -> list[Stepped | None]:
        """The next step of each sequence; None if it is not ready yet: ask again. Launches the one after it.

        None for all, if one of them is not open.
        """
        if any(place.lane < 0 for place in places):
            return [None] * len(places)
        while not any(place.steps for place in places):
            self._read()
        return [place.steps.popleft() if place.steps else None for place in places]

    def _read(self) -> None:
        """Read the results of the oldest step, for all lanes; they are stored until requested."""
        flight = self._flying.pop(0) if self._flying else self._launch()
        if not self._flying and any(place.goes_on for place in self._open()):
            self._flying.append(self._launch())
        numbers = flight.read()
        kind = flight.arm.kind
        self.sizes.timed(kind, flight.ms())
        cost = self.sizes.costs(kind, (kind[0], 1, False, *kind[3:]))
        for place in flight.places.values():
            if place.reading:
                self.sizes.read(place.reading.ms())
                place.reading = None
        lanes = [lane for lane, place in flight.places.items() if not place.ended]
        expected: Items[Expected | None] = [None] * len(lanes)
        if self.chances is not None:
            expected = numbers[lanes][:, -EXPECTED:].copy().view(np.float32).tolist()
        for lane, line, hoped in zip(lanes, numbers[lanes].tolist(), expected, strict=True):
            stepped = self._unpack(line, flight.size, cost)
            if stepped.tokens or stepped.fault:  # otherwise it is idle
                flight.places[lane].add(stepped, flight.size, flight.arm, hoped)
        if self.chances is not None:
            # With a gap in their state, costly sources draft badly; do not count that.
            lanes = [lane for lane in lanes if not (flight.arm.costly and flight.places[lane].frugal)]
            self._learn(numbers[lanes], flight.size)

    def _launch(self) -> _Flight:
        places = self._open()
        group = _group(len(places))
        self._move_below(group)
        span = self._span(max(place.limit for place in places))
        graphs = {graph.arm: graph for graph in self._steps(group, span, self._needs())}
        if not graphs:
            raise InputError(
                "there is no memory left for steps of this batch. Use a smaller batch, or runtime='plain'."
            )
        arm = self.sizes.choose([place.gains for place in places], self._allowed(places, [*graphs]))
        for place in places:
            place.frugal |= self.costly and not arm.costly
        return _Flight({place.lane: place for place in places}, graphs[arm])

    def _allowed(self, places: Items[Place], arms: Items[Arm]) -> Items[Arm]:
        """The possible next steps of these sequences. Once costly sources are left out, they stay out."""
        if all(place.frugal for place in places):
            return [arm for arm in arms if not arm.costly] or arms
        if all(place.frugal or place.taken >= TRIED for place in places):
            return arms
        return [arm for arm in arms if arm.costly] or arms

    def _open(self) -> list[Place]:
        """The open places."""
        return [place for place in self._places if place.lane >= 0]

    def _free_lanes(self) -> list[int]:
        return sorted({*range(self._most)} - {place.lane for place in self._open()})

    def _move_below(self, group: int) -> None:
        """Move all sequences to the first lanes, so that a graph of fewer lanes is enough."""
        free = iter(self._free_lanes())
        for place in self._open():
            if place.lane >= group:
                lane = next(free)
                with torch.inference_mode():
                    for part in [*self.lanes.state, *self.choices.state, *self.state]:
                        part[lane].copy_(part[place.lane])
                    self.lanes.limits[place.lane].fill_(0)
                self.choices.move(place.lane, lane)
                place.lane = lane

    @property
    def state(self) -> list[torch.Tensor]:
        """The sources' state, by lane."""
        return [part for source in (*self.sources, self.predicted) for part in source.state]

    def _steps(self, group: int, span: int, needs: frozenset[str]) -> list[_Whole]:
        """The steps for this many lanes, fewest rows first; none if they cannot be captured."""
        found = []
        for rows, costly in self._kinds(group):
            key = (group, rows, costly, span, needs)
            if key not in self._graphs:
                self.choices.make(needs)
                if needs & PREDICTED:
                    self.predicted.make()
                size = self.size(group, rows) * group
                made = self.engine.captured(lambda key=key: _Whole(self, *key), size, span, group)  # type: ignore[misc]
                self._graphs[key] = made
                if made is not None and self.plan.sizes:
                    self.sizes.rested(key, made.ms)
            graph = self._graphs[key]
            if graph is not None:
                found.append(graph)
        return found

    def _kinds(self, group: int) -> list[tuple[int, bool]]:
        """Rows per lane, and use of costly sources, of the possible steps of this many lanes.

        If costly sources can be left out, one-row steps do so.
        """
        sizes = self.rows_of(group)
        if not (self.costly and self.plan.sizes):
            return [(rows, self.costly) for rows in sizes]
        return [(rows, costly) for costly in (False, True) for rows in sizes if rows > 1 or not costly]

    def makings(self, samplings: Items[Sampling], texts: int, longest: int) -> list[Callable[[], object]]:
        """Functions that make the steps for up to this many sequences of up to this length, one by one.

        Otherwise a size is made at first use, and all sequences wait.
        """
        kinds = dict.fromkeys(needs_of(sampling) for sampling in samplings)
        groups = [group for group in GROUPS if group <= _group(min(texts, self._most))]
        reading = [source for source in self.sources if isinstance(source, Reading)]
        made: list[Callable[[], object]] = []
        for span in self.engine.spans(self._span(longest)):
            made += [partial(self._steps, group, span, needs) for group in groups for needs in kinds]
            made += [partial(self._prompt_step, source, size, span) for source in reading for size in PROMPTS]
        return made

    def _believe(self) -> None:
        """Copy the current table of acceptance to the device."""
        assert self.chances is not None
        assert self.table is not None
        with torch.inference_mode():
            put(self.chances.table().tolist(), self.table)

    def _unpack(self, line: list[int], size: int, cost: tuple[float, float] | None) -> Stepped:
        """Unpack the report of one lane: see `_Whole._report`."""
        deep = self.deepest + 1
        count, fault = line[:2]
        count = min(count, fault) if fault >= 0 else count
        rows = 2 + 2 * deep
        path, tokens = line[2 : 2 + count], line[2 + deep : 2 + deep + count]
        row_tokens, parents, said, marks = (line[rows + part * size : rows + (part + 1) * size] for part in range(4))
        draft = drafted(self.names, row_tokens, parents, said, marks)
        free = 1
        while free < count and said[path[free]] >= FREE:
            free += 1
        return Stepped(tuple(path), tuple(tokens), draft, fault >= 0, free, cost)

    def _learn(self, numbers: Numbers, size: int) -> None:
        """Count the draft tokens of some lanes, from packed reports."""
        assert self.chances is not None
        deep = self.deepest + 1
        counts, faults = numbers[:, :1], numbers[:, 1:2]
        counts = np.where(faults >= 0, np.minimum(counts, faults), counts)
        kept = np.arange(deep) < counts  # [lanes, depth]
        right = np.zeros((len(numbers), size), dtype=np.bool_)
        right[np.nonzero(kept)[0], numbers[:, 2 : 2 + deep][kept]] = True
        start = 2 + 2 * deep + 2 * size
        said, marks = numbers[:, start : start + 2 * size].reshape(-1, 2, size).swapaxes(0, 1)
        guessed = (marks > 0) & (counts > 0)
        guessed[:, 0] = False
        if self.chances.learn(said[guessed], right[guessed]):
            self._believe()


class _Flight:
    """A launched step."""

    def __init__(self, places: dict[int, Place], graph: _Whole) -> None:
        self.places = places  # by their lanes at launch
        self.size, self.arm = graph.each, graph.arm
        self._clock = Clock(graph.pool.device)
        graph.run()
        self._report = graph.bring()
        self._clock.stop()

    def read(self) -> Numbers:
        """[lanes, numbers] the report; waits for it."""
        self._clock.wait()
        numbers: Numbers = self._report.numpy()
        return numbers

    def ms(self) -> float:
        """Its duration, once read."""
        return self._clock.ms()


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


class _Whole(_Trees):
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
        """In parts, if all forward passes have one size; a row's ancestors are never in a later part."""
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
        """Capture with all lanes idle; their state is restored afterwards."""
        program = self.program
        state = [*program.lanes.state, *program.choices.state, *program.state]
        saved = [part.clone() for part in state]
        with torch.inference_mode():
            program.lanes.limits.zero_()
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
        super().__init__(program, group, _room(rows, group), span, deepest)
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
        self.model, self.compiled, self.group, self.each = engine.model, engine.compiling, group, _room(rows, group)
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
        """Rows [lanes, deepest + 1] that were accepted after `before` tokens."""
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


class _Prompt(FixedStep):
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


def _room(rows: int, group: int) -> int:
    """Rows allocated per lane: with several lanes none may start inside another's mask word."""
    return max(2, rows) if group == 1 else 1 << (rows - 1).bit_length()  # a single row would be compiled separately


def _group(texts: int) -> int:
    """The number of lanes of the graph for this many sequences."""
    return next(group for group in GROUPS if group >= texts)
