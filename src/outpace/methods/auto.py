"""Auto: every source of guesses that there is for the model, in one tree, as large as pays."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..draft import Draft, Scores, Verdict
from ..errors import InputError, UnsupportedModel
from ..models.adapter import Model
from ..picking import Picker
from ..pool import Sequence as Text
from ..runtime.calibrate import glance, remembered
from ..runtime.costs import CostCurve, Prices
from ..runtime.plain import Asking, Engine
from ..sources.base import Plan, Source
from ..sources.heads import likely_paths
from ..sources.history import PLACES, History
from ..sources.recycle import Recycle
from .amphista import Amphista
from .base import Drafter, Method
from .headed import REACH, Headed, Ready, check_width, guesses_of, load_heads, shipped
from .hydra import Hydra
from .lookahead import Lookahead
from .medusa import Medusa
from .prompt_lookup import PromptLookup

LONGEST = 16  # tokens of the text's end that are looked for in it
FLOOR = 0.02  # the least chance of a guess that the text repeats itself
RANKS = 8  # next tokens that are remembered after each token
RUNNERS = 7  # of what the model ranked behind the text's last token
SIZES = (1, 16)  # rows of a step, besides the most
TRIAL = 16  # steps until bold drafts may be given up
FADING = 0.1  # how quickly what they are known to bring follows what they bring
HEADED: dict[str, type[Headed]] = {method.kind: method for method in (Medusa, Hydra, Amphista)}
NODES = 256  # guesses that are considered: so many are planted quickly


@dataclass(frozen=True)
class Auto(Method):
    """Guesses what the text repeats, what the model ranked next before, and what trained heads say, in one tree.

    What to believe of each is learnt while texts are written, for each model, and remembered. A step has as many rows
    as bring the most tokens a second here; where guesses do not pay, one.

    heads: a folder of trained heads. Without one, those that come with Outpace for the model; False for none.
    rows: the most rows of a step.
    """

    name = "auto"
    about = "all that can guess for this model in one tree, as large as pays"

    heads: Any = None
    rows: int = 64

    def __post_init__(self) -> None:
        self.check(rows=(1, 1024))
        if self.heads is True:
            raise InputError(f"{self.name}: heads=True must be a folder of trained heads, or False for none.")

    def prepare(self, model: Model) -> Method:
        if not model.branches:  # it computes chains only
            return PromptLookup(tree=False, rows=self.rows).prepare(model)
        if isinstance(self.heads, Ready) or self.heads is False:
            return self
        if self.heads is None:
            return replace(self, heads=_found(model) or False)
        ready = load_heads(self.name, self.heads, model)
        check_width(self.name, ready.heads, model)
        return replace(self, heads=ready)

    @property
    def shares(self) -> bool:
        return not self.heads or not self.heads.heads.reads_text

    def plan(self, engine: Engine) -> Plan:
        heads = self.heads.heads if self.heads else None
        left = NODES - PLACES * REACH

        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = []
            if heads is not None:
                paths = likely_paths(heads.count, 10, left * 5 // 8)
                found.append(guesses_of(heads, engine, paths, lanes, 10))
            found.append(History(LONGEST, REACH, PLACES, "lookup", device, FLOOR))
            recycled = left - 2 * RUNNERS - sum(source.nodes for source in found[:-1])
            found.append(Recycle(RANKS, max(32, recycled), lanes, device, runners=RUNNERS))
            return found

        return Plan(sources, self.rows, sizes=SIZES, learned=partial(remembered, engine))

    def start(self, engine: Engine, sequence: Text, picker: Picker) -> Drafter:
        """Where the host drafts: as the best single method does, sized by what steps cost here."""
        engine = _priced(engine)
        bold = self._alone(engine.costs).start(engine, sequence, picker)
        if engine.costs is None:
            return bold
        return _Drafter(bold, lambda: PromptLookup().start(engine, sequence, picker), engine.costs.price)

    def _alone(self, costs: CostCurve | None) -> Method:
        """The single method that is best where steps cost so much."""
        if self.heads:
            return HEADED[self.heads.heads.kind](heads=self.heads, rows=self.rows)
        if costs is None:
            return Lookahead(window=7, ngram=4, guesses=7)
        sizes = sorted(Lookahead.sizes, key=lambda size: size.tokens / costs.price(size.rows))
        return Lookahead(**sizes[-1].settings)  # type: ignore[arg-type]


def _found(model: Model) -> Ready | None:
    """The heads that come with Outpace for the model."""
    try:
        return shipped("amphista", model)
    except UnsupportedModel:  # it has no hidden states that heads could read
        return None


def _priced(engine: Engine) -> Engine:
    """The engine, with what steps cost: on a CPU that is measured before the first text."""
    if engine.costs is not None or engine.model.device.type != "cpu":
        return engine
    priced: Engine | None = engine.notes.get(Auto)
    if priced is None:
        priced = engine.notes[Auto] = copy(engine)
        priced.costs = glance(engine)
    return priced


class _Drafter(Drafter):
    """Drafts boldly, and where that brings less than it costs, only what is likely to pay."""

    def __init__(self, bold: Drafter, careful: Callable[[], Drafter], price: Prices) -> None:
        super().__init__(bold.engine, bold.sequence, bold.picker)
        self.inner, self.careful, self.price = bold, careful, price
        self.bold, self.steps, self.tokens, self.cost = True, 0, 0.0, 0.0

    def drafting(self, room: int) -> Asking[Draft]:
        return self.inner.drafting(room)

    def score(self, draft: Draft) -> Asking[Scores]:
        return self.inner.score(draft)

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.inner.learn(draft, scores, verdict)
        self.steps += 1
        self.tokens += FADING * (len(verdict.tokens) - self.tokens)
        self.cost += FADING * (self.price(len(draft)) - self.cost)
        if self.bold and self.steps >= TRIAL and self.tokens < self.cost:
            self.inner, self.bold = self.careful(), False

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
