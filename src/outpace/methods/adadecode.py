"""AdaDecode: easy tokens exit at middle layers, and their remaining layers run later, for several of them together."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from ..draft import MODEL, Draft, Scores, Verdict, chain
from ..errors import InputError, InvalidLogits, ModelError, OutpaceWarning, UnsupportedModel
from ..heads import ExitHeads
from ..heads.exits import BINS, ORIGINAL, check_layers, original_exits, read_layers, spread
from ..heads.shipped import hint
from ..heads.storing import Stored, load
from ..models.adapter import Ends, Model, Output
from ..models.best import find_best
from ..picking import Picker
from ..pool import Pool, Sequence
from ..runtime.plain import Asking, Engine, Question, Work, alone
from ..sources.base import Climbing, Plan, Source
from ..sources.exits import ExitGuesses
from ..sources.heads import alone as alone_in_a_lane
from ..sources.heads import on_host, quick, quick_head
from ..sources.history import History
from ..sources.recycle import Recycle
from ..step.chances import Chances
from ..step.nodes import Nodes, Rows, plant
from ..step.texts import Texts
from .autoregressive import Autoregressive
from .base import SIZES, Drafter, Method, Size
from .headed import FLOOR, LONGEST, PLACES, REACH, RECYCLED, Ready, shipped
from .leaving import Calibrated, Control, Counts, Fixed, Guard, Trust, choose, costs_of
from .staircase import Staircase

TREE = "tree"
WIDEST, DEEPEST = 64, 4  # with "tree": the most draft tokens after one, and the most levels
WORTHWHILE = 1.05  # the least predicted speedup at which exits are used
_checked: WeakKeyDictionary[Model, set[tuple[int, ...]]] = WeakKeyDictionary()  # cuts that passed the check


@dataclass(frozen=True)
class AdaDecode(Method):
    """A draft chain from early-exit heads at middle layers.

    Attributes:
        heads: a folder of trained exits; by default, installed ones for this model. "original": the model's own output
            head at the exits, untrained.
        exits: use only the exits after these layers, like "8,16,24"; by default, all that were trained.
        control: "calibrated" selects exits by their predicted speedup, and a token exits where its measured acceptance
            is worth the cost; "fixed" uses all exits, and a token exits where its confidence is above `gamma`, as in
            the paper; "tree" uses one exit (the one in `exits`, or the one with the best expected speedup) for several
            draft tokens at each position, and verifies a tree of the most likely. By default "tree" on a GPU, where
            more rows cost little, and "calibrated" on a CPU or with several `exits`.
        gamma: with "fixed", the confidence above which a token exits.
        pending: with "fixed", how many draft tokens may wait for their remaining layers.
        rows: with "tree", the most rows of a draft.
        widths: with "tree", how many draft tokens follow the last token, then each expanded draft token, like "8,3".
        beam: with "tree", how many draft tokens of each depth are expanded.
        lookup: with "tree", prompt lookup drafts too, paths as long as this share of the rows.
        recycled: with "tree" on a GPU, also draft the model's top-ranked next tokens from when it last computed the
            same token, accepted or not: how many per token.
        priced: with "tree" on a GPU, each step has as many of these rows as pay, with the exit or without.
    """

    name = "adadecode"
    about = "easy tokens exit at middle layers; the remaining layers run later for many together"
    controls: ClassVar[tuple[str, ...]] = ("calibrated", "fixed", TREE)

    heads: Any = None
    exits: Any = ()
    control: str | None = None
    gamma: float = 0.75
    pending: int = 5
    rows: int = 64
    widths: Any = (16,)
    beam: int = 8
    lookup: float = 0.5
    recycled: int = 8
    priced: bool = True

    def __post_init__(self) -> None:
        self.check(gamma=(0.0, 1.0), pending=(1, 64), rows=(2, 1024), beam=(1, 64))
        self.check(lookup=(0.0, 1.0), recycled=(0, 32))
        if self.gamma == 0:
            raise InputError(f"{self.name}: gamma=0 is out of range: it must be above 0 and at most 1.")
        if self.control not in (None, *self.controls):
            raise InputError(f"{self.name}: control={self.control!r} must be {' or '.join(map(repr, self.controls))}.")
        object.__setattr__(self, "exits", read_layers(self.exits))
        object.__setattr__(self, "widths", _read_widths(self.name, self.widths))
        if self.control == TREE and len(self.exits) > 1:
            raise InputError(
                f"{self.name}: exits={self.exits}: control='tree' uses a single exit. Give one, like exits='4'."
            )

    @property
    def branches(self) -> bool:
        return self.control == TREE

    def prepare(self, model: Model) -> Method:
        super().prepare(model)
        if self.control is None:
            trees = model.device.type == "cuda" and model.branches and TREE in self.controls and len(self.exits) < 2
            return replace(self, control=TREE if trees else "calibrated").prepare(model)
        ready = self.heads if isinstance(self.heads, Ready) else self._load(model)
        assert isinstance(ready.heads, ExitHeads)
        _check_fit(self.name, ready.heads, model)
        for layer in self.exits:
            if layer not in ready.heads.layers:
                there = ", ".join(map(str, ready.heads.layers))
                raise InputError(f"{self.name}: there is no exit after layer {layer}. There are exits after {there}.")
        exits = self.exits or ready.heads.layers
        if self.control == TREE and not self.exits:
            exits = (_best_exit(ready, self.widths[0], model.layers),)
        check_cuts(model, exits)
        return replace(self, heads=ready, exits=exits)

    def _load(self, model: Model) -> Ready:
        if isinstance(self.heads, ExitHeads):
            return Ready(self.heads.copied(model.device, model.dtype), Stored({}))
        if self.heads == ORIGINAL:
            layers = self.exits or spread(3, model.layers)
            check_layers(layers, model.layers)
            return Ready(original_exits(layers, model.width), Stored({}), ORIGINAL)
        if self.heads is not None:
            folder = Path(self.heads).expanduser()
            if not folder.is_dir():
                raise ModelError(
                    f"{self.name}: {folder} is not a folder of exits. Create one with `outpace train exits`."
                )
            return Ready(*load(folder, model, {ExitHeads.kind: ExitHeads}), str(folder))
        if (own := shipped(ExitHeads.kind, model)) is not None:
            return own
        raise ModelError(
            f"{self.name}: there are no trained exits for {model.name}. Train some with `outpace train exits --model "
            "MODEL --prompts FILE --out FOLDER`, and give them: heads='FOLDER/exits', in a terminal --set "
            f"heads=FOLDER/exits. Or use the model's own output head: heads='original'.{hint()}"
        )

    def plan(self, engine: Engine) -> Plan | None:
        if self.control != TREE:
            return None  # the host decides whether a token exits

        def sources(lanes: int, device: torch.device) -> list[Source]:
            found = self.sources(engine.model, device, quickly=engine.compiling and device.type == "cuda")
            if self.recycled:
                found.append(Recycle(self.recycled, max(1, int(RECYCLED * self.rows)), lanes, device))
            return found

        if not self.priced:
            return Plan(sources, self.rows)
        return Plan(sources, self.rows, sizes=SIZES, learned=Chances)

    def sources(self, model: Model, device: torch.device, coupled: bool = True, quickly: bool = False) -> list[Source]:
        """The sources of "tree" on the host too; `quickly`: the exit is computed in 8 bits, if that is faster."""
        (layer,) = self.exits
        heads, ends = self.heads.heads, model.ends()
        if quickly and not heads.settings.frequent:
            heads, ends = quick(heads), ends._replace(head=quick_head(ends.head))
        exits = ExitGuesses(heads, layer, ends, self.widths, self.beam, device, coupled)
        repeated = int(self.lookup * (self.rows - 1))
        if not repeated:
            return [exits]
        return [exits, History(LONGEST, min(REACH, repeated), min(PLACES, repeated), "lookup", device, FLOOR)]

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        if self.control == TREE:
            return _TreeDrafter(self, engine, sequence, picker)
        return _start(_Drafter, self.heads.heads, *self._control(engine), engine, sequence, picker)

    def _control(self, engine: Engine) -> tuple[tuple[int, ...], Control | None]:
        """The exits to evaluate, and the control of when tokens exit; None if they should not at all."""
        if self.control == "fixed":
            return self.exits, Fixed(len(self.exits), self.gamma, self.pending)
        heads, about = self.heads[:2]
        costs = costs_of(engine, self.exits, heads.settings.frequent)
        counts = _counts(heads, about, self.exits)
        if not about.calibration:
            return self.exits, Calibrated(counts, costs)
        chosen, predicted = choose(counts, costs)
        measured = predicted
        if engine.costs and self.heads.shipped and self.exits == heads.layers:
            measured = engine.costs.paces.get(self.name, predicted)
        if min(predicted, measured) < WORTHWHILE:
            speed = f"predicted to make {engine.model.name} {predicted:.2f}"
            better = "" if engine.costs else ", or measure costs with `outpace calibrate`"
            if measured < predicted:
                speed = f"measured to make {engine.model.name} {measured:.2f}"
            warnings.warn(
                f"{self.name}: these exits are {speed} times as fast here. That is less than {WORTHWHILE}, so this is "
                f"plain decoding. Train better exits{better}; control='fixed' (--set control=fixed) uses them all the "
                "same.",
                OutpaceWarning,
                stacklevel=2,
            )
            return (), None
        used = tuple(self.exits[exit_] for exit_ in chosen)
        return used, Calibrated(tuple(counts[exit_] for exit_ in chosen), costs.of(chosen))


@dataclass(frozen=True)
class UnverifiedAdaDecode(AdaDecode):
    """AdaDecode without verification: early-exit tokens are accepted unchecked. The output is NOT the model's own.

    For comparison only. For the settings see AdaDecode.
    """

    name = "adadecode-unverified"
    about = "the same without verification: LOSSY, for comparison"
    lossless = False
    controls = ("calibrated", "fixed")

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return _start(_Believer, self.heads.heads, *self._control(engine), engine, sequence, picker)


@dataclass(frozen=True)
class SelfSpeculative(Method):
    """The model's own first layers and output head are the draft model. Nothing is trained.

    Attributes:
        exit: the number of layers; 0 is half of the model.
        length: how many tokens they draft; 0 is plain decoding.
    """

    name = "self-speculative"
    about = "the model's own first layers draft"
    sizes = (Size({"length": 5}, rows=6, tokens=1.09), Size({"length": 0}, rows=1, tokens=1.0))

    exit: int = 0
    length: int = 5

    def __post_init__(self) -> None:
        self.check(exit=(0, 4096), length=(0, 64))

    @property
    def branches(self) -> bool:
        return False

    def prepare(self, model: Model) -> Method:
        layer = self.exit or max(1, model.layers // 2)
        check_layers([layer], model.layers)
        check_cuts(model, (layer,))
        return replace(self, exit=layer)

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        exits = (self.exit,)
        heads = original_exits(exits, engine.model.width)
        control = Fixed(1, 0.0, self.length) if self.length else None
        return _start(_Drafter, heads, exits, control, engine, sequence, picker)


class Asked(NamedTuple):
    """A draft token that verification will judge."""

    row: int
    exit: int
    confidence: float
    token: int


class _Drafter(Drafter):
    extends = False
    verifies = True
    asks = True

    def __init__(
        self,
        heads: ExitHeads,
        exits: tuple[int, ...],
        control: Control,
        engine: Engine,
        sequence: Sequence,
        picker: Picker,
    ) -> None:
        super().__init__(engine, sequence, picker)
        self.exits = exits
        # Those of the frequent tokens only read some of the output head's weights as they are.
        ends, asked = (engine.model.ends(), heads) if heads.settings.frequent else on_host(heads, engine.model)
        self.questions = [
            Question(heads.owner(layer), partial(_ask, asked, heads.layers.index(layer), ends)) for layer in exits
        ]
        self.control = control
        self.guesser = picker.for_drafts()
        # If the output depends on the drafts, the drafts must not depend on the clock.
        timed = isinstance(control, Calibrated) and (picker.greedy or picker.sampling.rule == "keyed")
        self.guard: Guard | None = None
        if timed and self.verifies:
            trust = engine.notes.setdefault((Trust, heads), Trust())
            self.guard = Guard(trust, _rival(engine, picker))
        self.timed: Guard | None = None  # of this step
        self.stairs: Staircase | None = None
        self.asked: list[Asked] = []

    @property
    def rests(self) -> bool:
        return self.guard is not None and not self.guard.pays

    def drafting(self, room: int) -> Asking[Draft]:
        text = self.sequence.tokens
        self.stairs = None
        self.asked = []
        # The first step prefills through all layers, and drafts nothing.
        reads = len(self.sequence.slots) < self.sequence.position
        self.timed = self.guard if not reads else None
        if reads or (self.timed and not self.timed.begin()):
            return chain(text[-1], (), "")
        most = min(self.control.most, room)
        stairs = self.stairs = Staircase(self.engine, self.sequence, most + 1)
        stairs.push(text[-1])
        sources: list[str] = [MODEL]
        proposals: list[torch.Tensor | None] = [None]
        self.control.begin()
        while len(stairs.tokens) <= most:
            left = yield from self._leave(stairs, self.control)
            if left is None:
                break
            token, proposal, layer = left
            stairs.push(token)
            sources.append(f"exit {layer}")
            proposals.append(proposal)
        tokens = tuple(stairs.tokens)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)), len(tokens), tuple(sources), tuple(proposals))

    def _leave(self, stairs: Staircase, control: Control) -> Asking[tuple[int, torch.Tensor | None, int] | None]:
        """Run the newest row up until its token exits: the token, its distribution, the layer. None if it does not."""
        prefix = [*self.sequence.tokens, *stairs.tokens[1:]]
        exit_ = control.next(-1)
        while exit_ is not None:
            layer = self.exits[exit_]
            output = yield from stairs.climb(layer, self.questions[exit_])
            scores, confidence = _answer(output)
            leaves = control.leaves(exit_, confidence)
            if leaves or self.guesser.greedy:  # a greedy token costs nothing, and shows how good the exit is
                try:
                    token, proposal = self._choose(scores, prefix)
                except InvalidLogits:
                    return None  # the exit's logits are invalid; the last layer's may not be
                self.asked.append(Asked(len(stairs.tokens) - 1, exit_, confidence, token))
                if leaves:
                    return token, proposal, layer
            exit_ = control.next(exit_)
        return None

    def _choose(self, scores: Scores, prefix: list[int]) -> tuple[int, torch.Tensor | None]:
        """A draft token from an exit's logits for one row, and the distribution that it was sampled from."""
        if self.guesser.greedy:
            return self.guesser.choose_after(0, scores, prefix), None
        return self.guesser.guess(scores.logits[0], prefix)

    def score(self, draft: Draft) -> Asking[Scores]:
        return super().score(draft) if self.stairs is None else self.stairs.finish()

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        if self.timed:
            self.timed.end(len(verdict.tokens))
        if self.stairs is None:
            return
        for row, exit_, confidence, token in self.asked:
            if row < len(verdict.tokens):  # nothing is known about what follows a wrong token
                self.control.learn(exit_, confidence, token == verdict.tokens[row])
        self.control.end(len(verdict.tokens))


class _TreeDrafter(Drafter):
    """Drafts on the host what a program with these sources drafts."""

    asks = True

    def __init__(self, method: AdaDecode, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        sampling, device = picker.sampling, engine.model.device
        self.rows = method.rows
        # The rejection rule needs drafts that are independent of the target's noise.
        self.sources = method.sources(engine.model, device, coupled=sampling.rule == "keyed")
        self.names = [MODEL]
        for source in self.sources:
            source.first = len(self.names)
            self.names += source.names
        _, self.choices, self.needs = alone_in_a_lane(sequence, sampling, device)

    def drafting(self, room: int) -> Asking[Draft]:
        sequence, model = self.sequence, self.engine.model
        texts = Texts(1, len(sequence.tokens), model.device)
        texts.open(0, sequence.tokens, self.picker.sampling.seed)
        rooms = torch.tensor([room], device=model.device)
        # Prefill excludes the last token, unless all rotary angles change there: plain decoding then includes it.
        if len(sequence.slots) < sequence.position and model.room(sequence.position - 1):
            yield from self.engine.read(sequence)
        offers: list[Nodes] = []
        for source in self.sources:
            if not isinstance(source, Climbing):
                offers += source.guess(texts, rooms)
            elif len(sequence.slots) == sequence.position:
                offers.append((yield from self._climb(source, texts, rooms)))
        return self._drafted(plant(texts.roots(), offers, self.rows, rooms))

    def _climb(self, source: Climbing, texts: Texts, room: torch.Tensor) -> Asking[Nodes]:
        """Compute the rows that a source asks for, in temporary slots."""
        pool, sequence = self.engine.pool, self.sequence
        asking = source.climbing(texts, room, self.choices, self.needs)
        rows = next(asking)
        while True:
            placed = pool.place(sequence, self._drafted(rows))
            output = yield Work(self.engine, sequence, placed, 0, 0, source.layer)
            pool.free(sequence.drafted)
            sequence.drafted = []
            missing = rows.tokens.shape[1] - len(placed)
            try:
                rows = asking.send(F.pad(output.hidden, (0, 0, 0, missing))[None])
            except StopIteration as end:
                nodes: Nodes = end.value
                return nodes

    def _drafted(self, rows: Rows) -> Draft:
        """The tree of the only lane."""
        count = int(rows.valid.sum())
        tokens, parents, sources = (part[0, :count].tolist() for part in (rows.tokens, rows.parents, rows.sources))
        return Draft(tuple(tokens), (-1, *parents[1:]), count, tuple(self.names[source] for source in sources))


def _start(
    kind: type[_Drafter],
    heads: ExitHeads,
    exits: tuple[int, ...],
    control: Control | None,
    engine: Engine,
    sequence: Sequence,
    picker: Picker,
) -> Drafter:
    """A drafter of this kind; that of plain decoding if no token should exit early."""
    if control is None:
        return Autoregressive().start(engine, sequence, picker)
    return kind(heads, exits, control, engine, sequence, picker)


def _rival(engine: Engine, picker: Picker) -> float:
    """Seconds per token of plain decoding's program; infinite if there is none, or it has not run yet."""
    program = engine.program_for(Autoregressive(), picker.sampling)
    return math.inf if program is None else float(program.sizes.quickest())


def _ask(heads: ExitHeads, place: int, ends: Ends, hidden: torch.Tensor) -> torch.Tensor:
    """[1, vocabulary + 3] an exit's logits for one row, the argmax, its logit, and the logsumexp."""
    logits = heads.probe(place, hidden, ends).float()
    return torch.cat([logits, find_best(logits).T.float(), logits.logsumexp(-1, keepdim=True)], -1)


def _answer(output: Output) -> tuple[Scores, float]:
    """The result of `_ask`: the scores of one row, and the probability of its argmax."""
    assert output.answer is not None
    token, highest, every = output.answer[0, -3:].tolist()  # one transfer
    found = torch.tensor([[token], [highest]], dtype=torch.float64)
    return Scores(output.answer[:, :-3], output.hidden[-1:], found), math.exp(min(0.0, highest - every))


class _Believer(_Drafter):
    """Takes the draft tokens as the target's choices."""

    verifies = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.guesser = self.picker  # the only calls of the user's processors

    def score(self, draft: Draft) -> Asking[Scores]:
        scores = yield from super().score(draft)
        logits = scores.logits.clone()
        for row, token in enumerate(draft.tokens[1:]):
            logits[row] = -math.inf
            logits[row, token] = 0.0
        return Scores(logits, scores.hidden)

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.asked = []  # nothing was verified, so there is nothing to learn from
        super().learn(draft, scores, verdict)


def _counts(heads: ExitHeads, about: Stored, exits: tuple[int, ...]) -> Counts:
    """The stored calibration of the exits in use; empty counts if there is none."""
    if not about.calibration:
        return (((0, 0),) * BINS,) * len(exits)
    lines = [about.calibration[heads.layers.index(layer)] for layer in exits]
    return tuple(tuple((asked, right) for asked, right in line) for line in lines)


def _best_exit(ready: Ready, width: int, depth: int) -> int:
    """The exit whose `width` best tokens gain most for the layers that they take; without accuracies the first."""
    assert isinstance(ready.heads, ExitHeads)
    layers = ready.heads.layers
    found = [sum(line[:width]) for line in ready.about.accuracies] or [0.0] * len(layers)
    return max(zip(layers, found, strict=True), key=lambda exit_: (1 + exit_[1]) / (1 + exit_[0] / depth))[0]


def _read_widths(name: str, widths: Any) -> tuple[int, ...]:
    """Widths from a list, or from a string like "8,3"."""
    try:
        found = [*map(int, widths.strip("[]() ").split(","))] if isinstance(widths, str) else list(widths)
    except (TypeError, ValueError):
        found = []
    whole = all(isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= WIDEST for width in found)
    if not whole or not 1 <= len(found) <= DEEPEST:
        raise InputError(
            f"{name}: widths={widths!r} must be 1 to {DEEPEST} numbers of draft tokens, each 1 to {WIDEST}, like 8,3."
        )
    return tuple(found)


def _check_fit(name: str, heads: Any, model: Model) -> None:
    if heads.shape.width != model.width or heads.layers[-1] >= model.layers:
        raise ModelError(
            f"{name}: these exits are after layers {', '.join(map(str, heads.layers))} and read hidden states of width "
            f"{heads.shape.width}; {model.name} has {model.layers} layers of width {model.width}. Exits work only with "
            "the model they were trained for."
        )


def check_cuts(model: Model, exits: tuple[int, ...]) -> None:
    """Run a few tokens with deferred layers, and without; reject a model where the results differ.

    Some architectures share keys and values between layers, or pass on more than the hidden states.
    """
    if exits in _checked.setdefault(model, set()):
        return
    text = [token % model.vocabulary for token in (11, 23, 5, 17)]
    engine = Engine(model)
    engine.pool = Pool(model.device, capacity=16)
    model.ends()  # raises UnsupportedModel for one without exits
    refusal = UnsupportedModel(
        f"{model.name} cannot run only some of its layers, so they cannot be deferred. Use another method."
    )
    try:
        with engine.pool.sequence(text[:1]) as sequence:
            stairs = Staircase(engine, sequence, len(text))
            for place, token in enumerate(text):
                stairs.push(token)
                alone(stairs.climb(exits[-1 - place % len(exits)]))
            apart = alone(stairs.finish()).logits
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:  # a layer needs another
        raise refusal from error
    with engine.pool.sequence(text[:1]) as sequence:
        together = engine.score(sequence, chain(text[0], text[1:], "")).logits
    spread_ = (together.float() - together.float().mean(-1, keepdim=True)).norm()
    if not (apart.float() - together.float()).norm() < 0.05 * spread_:  # also when it is NaN
        raise refusal
    _checked[model].add(exits)
