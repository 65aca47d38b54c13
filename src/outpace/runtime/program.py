"""Whole steps without the host: draft, score, verify, keep and learn, for the sequences in a program's lanes.

A step is a function of the lanes' state on the device, captured as one CUDA graph (`steps.py`). The host launches it
one step ahead, and reads the results of the step before.
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
from ..models.attention import OWN
from ..picking import Sampling
from ..pool import Numbers, Sequence
from ..sending import put
from ..sources.base import Climbing, Plan, Reading, Writing, drafted, families, named
from ..sources.heads import alone
from ..sources.prediction import Predicted, Prediction
from ..step.chances import EXPECTED, FREE, KNOTS
from ..step.choosing import Choices, needs_of
from ..step.lanes import Lanes
from .fixed import Clock
from .sizes import TRIED, Arm, Expected, Gains, Sizes
from .steps import PREDICTED, Prompt, Whole, room_for

if TYPE_CHECKING:
    from .graphs import GraphEngine

LANES = 64  # the most sequences of a program
GROUPS = (1, 4, 16, 64)  # batch sizes of graphs
ROWS = 64  # rows that several lanes share: this many cost little more than one
PROMPTS = (8, 32, 64, 128, 256, 512, 1024)  # prefill chunk of heads
PACE = 0.1  # smoothing of tokens per step
RARE = 3  # a step hardly ever gives this many times the mean number of tokens


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
        """Whether it is unlikely to end with the step in flight, so that the next one may be launched ahead.

        A wasted step takes as long as any other; one that is not launched ahead only waits for the host.
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
        self._graphs: dict[tuple[int, int, bool, int, frozenset[str]], Whole | None] = {}
        self._prompts: dict[tuple[Reading, int, int], Prompt] = {}  # by source, rows and context length
        self._prompt = torch.zeros(1, longest, dtype=torch.long, device=device)  # slots of the prompt in heads' prefill
        self._flying: list[_Flight] = []  # launched, results not read yet

    @property
    def margin(self) -> int:
        """Slots that a sequence needs beyond its maximum length, for rows that are not accepted."""
        climbing = [room_for(max(source.asks), LANES) for source in self.sources if isinstance(source, Climbing)]
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
            return None  # no explicit limit: the host decodes it, and allocates slots as needed
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

    def _prompt_step(self, source: Reading, size: int, span: int) -> Prompt:
        """The step that feeds a source this many rows of prompts up to this length."""
        key = (source, size, span)
        if key not in self._prompts:
            made = self.engine.captured(lambda: Prompt(self, *key), size, span, 1)
            self._prompts[key] = made or Prompt(self, *key)
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

    def _steps(self, group: int, span: int, needs: frozenset[str]) -> list[Whole]:
        """The steps for this many lanes, fewest rows first; none if they cannot be captured."""
        found = []
        for rows, costly in self._kinds(group):
            key = (group, rows, costly, span, needs)
            if key not in self._graphs:
                self.choices.make(needs)
                if needs & PREDICTED:
                    self.predicted.make()
                size = self.size(group, rows) * group
                made = self.engine.captured(lambda key=key: Whole(self, *key), size, span, group)  # type: ignore[misc]
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
        """Unpack the report of one lane: see `Whole._report`."""
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

    def __init__(self, places: dict[int, Place], graph: Whole) -> None:
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


def _group(texts: int) -> int:
    """The number of lanes of the graph for this many sequences."""
    return next(group for group in GROUPS if group >= texts)
