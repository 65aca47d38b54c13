"""Prompt lookup: guess that the text goes on as it did the last times it came by here."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from ..draft import Draft, Scores, Tree, Verdict
from ..models.adapter import Model
from ..picking import Picker
from ..pool import Sequence
from ..runtime.plain import Engine
from ..sources.base import Plan, Source
from ..sources.history import PLACES, STORED
from ..sources.history import History as Repeated
from .base import Drafter, Method, prices_of
from .ngrams import History
from .store import Store, earlier, make_store


@dataclass(frozen=True)
class PromptLookup(Method):
    """Guesses what followed the text's end elsewhere in it, the likeliest merged in one tree.

    Attributes:
        longest: how many last tokens are compared; longer matches count more.
        rows: how many rows a draft may have.
        depth: how many tokens it may look ahead.
        gate: the least chance that the best guess must have; below it the draft is empty. Raise it where rows cost
            time.
        priced: draft as many of these rows as pay, where the cost of a step by rows was measured (`outpace calibrate`).
        tree: False for the likeliest chain alone.
        store: how many tokens of earlier texts are looked through too: those that were written with this very method.
    """

    name = "prompt-lookup"
    about = "guesses that the text repeats itself"

    longest: int = 4
    rows: int = 64
    depth: int = 16
    gate: float = 0.0
    tree: bool = True
    priced: bool = True
    store: Store | int = 0

    def __post_init__(self) -> None:
        self.check(longest=(1, 64), rows=(1, 1024), depth=(1, 512), gate=(0.0, 1.0))
        make_store(self)

    @property
    def branches(self) -> bool:
        return self.tree

    @property
    def dealt(self) -> bool:
        return self.tree and not self.store  # ranks may have written other texts before

    def plan(self, engine: Engine) -> Plan:
        places = min(PLACES, self.rows) if self.tree else 1
        depth = min(self.depth, max(self.rows - 1, 1))
        costs = engine.costs if self.priced else None
        known = earlier(self.store, engine.model)

        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = [Repeated(self.longest, depth, places, "lookup", device)]
            if known:
                found.append(Repeated(self.longest, depth, places, STORED, device, store=known.tokens))
            return found

        return Plan(
            sources,
            self.rows,
            gate=0.0 if costs else self.gate,
            prices=prices_of(costs.price if costs else None, self.rows, engine.model.device),
        )

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return _Drafter(self, engine, sequence, picker)

    def remember(self, model: Model, text: Items[int]) -> None:
        if known := earlier(self.store, model):
            known.add(text)


class _Drafter(Drafter):
    def __init__(self, method: PromptLookup, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.method = method
        self.history = History(method.longest)
        if known := earlier(method.store, engine.model):
            self.history.earlier = known.runs
        self.history.extend(sequence.tokens)

    def draft(self, room: int) -> Draft:
        method = self.method
        tree = Tree(self.sequence.tokens[-1])
        costs = self.engine.costs if method.priced else None
        self.history.grow(
            tree,
            method.rows,
            min(method.depth, room),
            "lookup",
            gate=0.0 if costs else method.gate,
            branching=method.tree,
            price=costs.price if costs else None,
        )
        return tree.draft()

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.history.extend(verdict.tokens)
