"""Auto: lookups, recycled tokens and trained heads, in one draft tree of the size that pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..draft import Draft, Scores, Verdict
from ..errors import InputError, UnsupportedModel
from ..models.adapter import Model
from ..picking import Picker
from ..pool import Sequence as Text
from ..runtime.calibrate import glance, remembered
from ..runtime.costs import CostCurve, Running
from ..runtime.plain import Asking, Engine
from ..sources.base import Plan, Source
from ..sources.history import STORED, History
from ..sources.recycle import SALTS, Recycle
from .amphista import Amphista
from .base import SIZES, Drafter, Method
from .beliefs import Beliefs
from .block import Block
from .headed import PLACES, REACH, Headed, Ready, check_width, guesses_of, load_heads, paths_of, shipped
from .hydra import Hydra
from .medusa import Medusa
from .ngrams import MEMORY, RECYCLED, RUNNER_UP, Recycled
from .ngrams import History as Runs
from .prompt_lookup import NAME, Looking, PromptLookup
from .store import Store, earlier, make_store

LONGEST = 16  # how many of the sequence's last tokens lookup compares
FLOOR = 0.005  # the least probability of a draft token from lookup
RANKS = 8  # successors stored for each token
RUNNERS = 4  # runners-up at the root, each also with a successor; half of them beside heads
# Where the host drafts:
TRIAL = 16  # steps after which it is checked whether a method pays
SOON = 4  # steps after which a method that is at most LOST times as fast as plain decoding is dropped
LOST = 0.7
HOPE, LATER = 3.0, 0.5  # assumed speed of the first method to be tried, and how much less for each later one
FEW, DEAR = 8, 2.0  # on a CPU heads are not tried if this many rows cost that much: they gain about as many tokens
AGAIN = (8, 64)  # sequences until the boldest method is tried again, at first and later
PACE = 0.3  # smoothing of a method's speed
HEADED: dict[str, type[Headed]] = {method.kind: method for method in (Medusa, Hydra, Amphista, Block)}
BELIEVED = (NAME, STORED, RECYCLED, RUNNER_UP)  # sources whose acceptance the host learns
NODES = 256  # draft tokens considered: up to this many, building the tree is fast


@dataclass(frozen=True)
class Auto(Method):
    """Drafts from matches in the text, the model's earlier top-ranked tokens, and trained heads, in one tree.

    The acceptance rate of each source is learnt while decoding, and stored per model. Each step has as many rows as
    give the most tokens per second on this machine; a single one where drafting does not pay.

    Attributes:
        heads: a folder of trained heads; by default, installed ones for this model; False for none.
        rows: the most rows of a draft tree.
        carried: whether top-ranked next tokens are remembered from one sequence to the next.
        store: also search the newest tokens of earlier sequences, this many; 0 for none. Only sequences decoded with
            this very object and the same model are searched; they stay in memory. If one user's text must not be used
            to draft another's, give each user an object of their own.
    """

    name = "auto"
    about = "lookups, recycled tokens and heads in one draft tree, sized by what pays"

    heads: Any = None
    rows: int = 64
    carried: bool = True
    store: Store | int = 0

    def __post_init__(self) -> None:
        self.check(rows=(1, 1024))
        make_store(self)
        if self.heads == "false":  # as `--set auto.heads=false` has it
            object.__setattr__(self, "heads", False)
        if self.heads is True:
            raise InputError(
                f"{self.name}: heads=True is not valid: give a folder of trained heads, or False for none."
            )

    def prepare(self, model: Model) -> Method:
        if not model.branches:  # it computes chains only
            return PromptLookup(tree=False, rows=self.rows, store=self.store).prepare(model)
        if isinstance(self.heads, Ready) or self.heads is False:
            return self
        if self.heads is None:
            return replace(self, heads=_found(model) or False)
        ready = load_heads(self.name, self.heads, model)
        check_width(self.name, ready.heads, model)
        return replace(self, heads=ready)

    def plan(self, engine: Engine) -> Plan:
        heads = self.heads.heads if self.heads else None
        runners = RUNNERS if heads is None else RUNNERS // 2
        left = NODES - PLACES * REACH - 2 * runners
        known = earlier(self.store, engine.model)

        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = []
            if heads is not None:
                top = min(HEADED[heads.kind].top, engine.model.vocabulary)
                paths = paths_of(self.heads, top, left * 4 // 5)
                found.append(guesses_of(heads, engine, paths, lanes, top))
            recycled = left - sum(source.nodes for source in found)
            places = PLACES // 2 if known else PLACES  # half for the sequence, half for the store
            found.append(History(LONGEST, REACH, places, NAME, device, FLOOR))
            if known:
                found.append(History(LONGEST, REACH, places, STORED, device, FLOOR, known.tokens))
            found.append(Recycle(RANKS, recycled, lanes, device, MEMORY, runners, self.carried))
            return found

        return Plan(sources, self.rows, sizes=SIZES, learned=partial(remembered, engine))

    def start(self, engine: Engine, sequence: Text, picker: Picker) -> Drafter:
        """Where the host drafts: with the single method that has proved fastest here."""
        known: Known | None = engine.notes.get(Auto)
        if known is None:
            known = engine.notes[Auto] = Known(engine)
        methods, stored = self._methods(), earlier(self.store, engine.model)
        if self.heads and (known.dear or (sequence.slots and not _have_read(methods[0], sequence))):
            methods = methods[1:]
        runs = stored.runs if stored else None
        if known.engine.costs is not None:
            return _Drafter(methods, known, sequence, picker, runs, self.carried)
        drafter = methods[0].start(engine, sequence, picker)
        drafter.history.earlier = runs
        return drafter

    def remember(self, model: Model, text: Sequence[int]) -> None:
        if known := earlier(self.store, model):
            known.add(text)

    def _methods(self) -> list[Method]:
        """The methods to choose from where the host drafts, the boldest first."""
        free: list[Method] = [PromptLookup(rows=self.rows, recycled=RANKS), PromptLookup(rows=self.rows)]
        if not self.heads:
            return free
        return [HEADED[self.heads.heads.kind](heads=self.heads, rows=self.rows), *free]


def _have_read(method: Method, sequence: Text) -> bool:
    """Whether a method's heads have read the reused part of a sequence, if they need to."""
    return method.reader is None or (sequence.reader is method.reader and sequence.read == len(sequence.slots))


def _found(model: Model) -> Ready | None:
    """Installed heads for the model; on a GPU preferably block's, which predict further."""
    if getattr(model, "quantized", False):  # heads in float32 would take as long as a step
        return None
    kinds = ("block", "amphista") if model.device.type == "cuda" else ("amphista", "block")
    try:
        return next((found for kind in kinds if (found := shipped(kind, model))), None)
    except UnsupportedModel:  # it has no hidden states that heads could read
        return None


class Known:
    """Statistics of an engine on which the host drafts: step costs, and the speed of single methods."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running: Running | None = None  # if costs were not measured before
        if engine.costs is None and engine.model.device.type == "cpu":
            self.engine = copy(engine)  # for drafters of `auto` alone: other methods draft as before
            self.running = Running(glance(engine))
            self.engine.costs = self.running.curve
        self.speeds: dict[str, float] = {}  # by method; plain decoding is 1
        self.begun = Counter[str]()  # sequences, by the method that they began with
        self.beliefs = Beliefs(remembered(engine, BELIEVED))
        self._left: dict[str, Recycled] = {}  # from the last sequence of each salt, newest last
        self._wait, self._next = AGAIN[0], AGAIN[0]  # sequences between trials of the boldest, and the next trial's

    @property
    def dear(self) -> bool:
        """Whether steps of few rows cost more than heads gain: then they are not even tried, which takes long."""
        costs = self.engine.costs
        return self.engine.model.device.type == "cpu" and costs is not None and costs.price(FEW) >= DEAR

    @property
    def learns(self) -> Running | None:
        """What learns prices from the next step, if its time tells them: in a batch it includes other sequences'."""
        return None if self.engine.turns.batched else self.running

    def ran(self, rows: int, seconds: float) -> None:
        """A step took this long."""
        if running := self.learns:
            running.add(rows, seconds)
            self.engine.costs = running.curve

    def recall(self, salt: str) -> Recycled:
        """The recycled tokens that a new sequence starts with: those of the last one with the same salt."""
        return Recycled(RANKS, self._left.get(salt))

    def leave(self, salt: str, recycled: Recycled) -> None:
        """A sequence has ended: keep its recycled tokens."""
        self._left.pop(salt, None)
        self._left[salt] = recycled
        if len(self._left) > SALTS:
            del self._left[next(iter(self._left))]

    def choose(self, methods: Sequence[Method]) -> int:
        """The method that a sequence starts with: the fastest, and more and more seldom the boldest again.

        Each is tried once, unless another has proved faster than the speed assumed for it. On a CPU, where rows are
        expensive, the boldest is tried last.
        """
        turns = [*range(len(methods))]
        if self.engine.model.device.type == "cpu":
            turns.reverse()
        hopes = [HOPE - LATER * turn for turn in turns]
        speeds = [self.speeds.get(_label(method), hope) for method, hope in zip(methods, hopes, strict=True)]
        chosen = speeds.index(max(speeds))
        if self.begun.total() + 1 >= self._next:
            self._wait = AGAIN[0] if chosen == 0 else min(2 * self._wait, AGAIN[1])
            self._next += self._wait
            chosen = 0
        self.begun[_label(methods[chosen])] += 1
        return chosen

    def learn(self, method: Method, speed: float) -> None:
        """Learn the speed of a method on a sequence or part of one, relative to plain decoding."""
        known = self.speeds.get(_label(method), speed)
        self.speeds[_label(method)] = known + PACE * (speed - known)


def _label(method: Method) -> str:
    """A name that distinguishes these methods."""
    return f"{method.name} and recycling" if isinstance(method, PromptLookup) and method.recycled else method.name


class _Drafter(Drafter):
    """Drafts with one of several methods; if it does not pay, with the next, which is less bold."""

    def __init__(
        self,
        methods: Sequence[Method],
        known: Known,
        sequence: Text,
        picker: Picker,
        earlier: Runs | None,
        carried: bool,
    ) -> None:
        super().__init__(known.engine, sequence, picker)
        self.methods, self.known, self.earlier, self.carried = methods, known, earlier, carried
        self._begin(known.choose(methods))

    @property
    def costs(self) -> CostCurve:
        """The costs as known by now."""
        assert self.known.engine.costs is not None
        return self.known.engine.costs

    def _begin(self, place: int) -> None:
        self.place = place
        self.inner = self.methods[place].start(self.engine, self.sequence, self.picker)
        self.inner.history.earlier = self.earlier
        if isinstance(self.inner, Looking):
            self.inner.beliefs = self.known.beliefs
            if self.inner.recycled and self.carried:
                self.inner.recycled = self.known.recall(self.sequence.salt)
        self.extends = self.inner.extends
        self.steps, self.tokens, self.cost = 0, 0, 0.0

    def drafting(self, room: int) -> Asking[Draft]:
        start = perf_counter()
        if (running := self.known.learns) and running.due:
            room = 0
        draft = yield from self.inner.drafting(room)
        if self.steps:  # before their first draft, heads read the prompt: not counted
            self.cost += (perf_counter() - start) / self.costs.step(1)
        return draft

    def score(self, draft: Draft) -> Asking[Scores]:
        start = perf_counter()
        scores = yield from self.inner.score(draft)
        if self.steps:  # the first may read the prompt
            self.known.ran(len(draft), perf_counter() - start)
        return scores

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        start = perf_counter()
        self.inner.learn(draft, scores, verdict)
        self.cost += (perf_counter() - start) / self.costs.step(1)
        self.steps += 1
        self.tokens += len(verdict.tokens)
        self.cost += self.costs.price(len(draft))
        if self.place + 1 < len(self.methods) and not self._pays():
            self._end()
            self._begin(self.place + 1)

    def _pays(self) -> bool:
        """Whether to keep this method; checked now and then."""
        if self.steps % TRIAL == 0:
            return self.tokens >= self.cost
        return self.steps < SOON or self.tokens > LOST * self.cost

    def _end(self) -> None:
        if self.steps >= TRIAL or not self._pays():
            self.known.learn(self.methods[self.place], self.tokens / self.cost)
        if isinstance(self.inner, Looking) and self.inner.recycled and self.carried:
            self.known.leave(self.sequence.salt, self.inner.recycled)
        self.known.beliefs.chances.pause()

    def __exit__(self, *error: Any) -> None:
        self._end()
        self.inner.__exit__(*error)
