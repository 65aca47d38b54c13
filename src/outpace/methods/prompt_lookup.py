"""Prompt lookup: draft what followed earlier occurrences of the sequence's last tokens."""

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
from ..sources.recycle import Recycle
from .base import Drafter, Method, prices_of
from .beliefs import Beliefs
from .ngrams import History, Recycled
from .store import Store, earlier, make_store

NAME = "lookup"


@dataclass(frozen=True)
class PromptLookup(Method):
    """Drafts what followed the last tokens earlier in the text; the most likely continuations form one tree.

    Attributes:
        longest: the longest match of last tokens; longer matches count more.
        rows: the most rows of a draft.
        depth: the most tokens to look ahead.
        gate: the least acceptance probability of the best draft token; below it nothing is drafted. Raise it where rows
            cost time.
        priced: draft as many of these rows as pay, if step costs were measured (`outpace calibrate`).
        tree: False for the most likely chain only.
        store: also search the newest tokens of earlier sequences, this many; 0 for none. See Auto.
        recycled: also draft the model's top-ranked next tokens from when it last computed the same token, accepted or
            not: how many per token; 0 for none.
    """

    name = "prompt-lookup"
    about = "drafts repetitions of the text so far"

    longest: int = 4
    rows: int = 64
    depth: int = 16
    gate: float = 0.0
    tree: bool = True
    priced: bool = True
    store: Store | int = 0
    recycled: int = 0

    def __post_init__(self) -> None:
        self.check(longest=(1, 64), rows=(1, 1024), depth=(1, 512), gate=(0.0, 1.0), recycled=(0, 32))
        make_store(self)

    @property
    def branches(self) -> bool:
        return self.tree

    @property
    def dealt(self) -> bool:
        return self.tree and not (self.store or self.recycled)  # each rank has its own store and recycled tokens

    def plan(self, engine: Engine) -> Plan:
        places = min(PLACES, self.rows) if self.tree else 1
        depth = min(self.depth, max(self.rows - 1, 1))
        costs = engine.costs if self.priced else None
        known = earlier(self.store, engine.model)

        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = [Repeated(self.longest, depth, places, NAME, device)]
            if known:
                found.append(Repeated(self.longest, depth, places, STORED, device, store=known.tokens))
            if self.recycled:
                found.append(Recycle(self.recycled, max(1, self.rows // 2), lanes, device, runners=self.recycled - 1))
            return found

        return Plan(
            sources,
            self.rows,
            gate=0.0 if costs else self.gate,
            prices=prices_of(costs.price if costs else None, self.rows, engine.model.device),
        )

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return Looking(self, engine, sequence, picker)

    def remember(self, model: Model, text: Items[int]) -> None:
        if known := earlier(self.store, model):
            known.add(text)


class Looking(Drafter):
    """Drafts from the sequence, stored sequences and recycled tokens."""

    beliefs: Beliefs | None = None  # corrects its probabilities, if acceptance is learnt

    def __init__(self, method: PromptLookup, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.method = method
        self.history = History(method.longest)
        if known := earlier(method.store, engine.model):
            self.history.earlier = known.runs
        self.history.extend(sequence.tokens)
        self.recycled = Recycled(method.recycled) if method.recycled else None
        self._said: list[float] = []  # the sources' estimates for the draft tokens

    def draft(self, room: int) -> Draft:
        method = self.method
        tree = Tree(self.sequence.tokens[-1])
        costs = self.engine.costs if method.priced else None
        self._said = []
        self.history.grow(
            tree,
            method.rows,
            min(method.depth, room),
            NAME,
            gate=0.0 if costs else method.gate,
            branching=method.tree,
            price=costs.price if costs else None,
            recycled=self.recycled,
            beliefs=self.beliefs,
            said=self._said,
        )
        del self._said[len(tree) - 1 :]  # what was cut off
        return tree.draft()

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.history.extend(verdict.tokens)
        if self.recycled:
            self.recycled.learn(draft.tokens, scores.logits, verdict.rows[-1])
        if self.beliefs and self._said:
            own = draft.sources[1 : 1 + len(self._said)]  # rows after them were added by others
            self.beliefs.learn(own, self._said, {row - 1 for row in verdict.rows})
