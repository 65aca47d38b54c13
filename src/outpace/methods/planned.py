"""A drafter of the host that drafts by a method's plan: from the sources that a program has, for one text."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..draft import Draft, Scores, Verdict
from ..picking import Picker
from ..pool import Sequence
from ..runtime.plain import Asking, Engine
from ..sending import put, send
from ..sources.base import Plan, Reading, drafted, named
from ..sources.heads import alone
from ..step.nodes import Rows, plant
from ..step.texts import Texts
from ..step.walking import Walk
from .base import Drafter

SPAN = 256  # places that a text has at first: sources look through all of them


class PlannedDrafter(Drafter):
    """Drafts what a program would at the same text, if the sources have learned the same.

    The host reads a prompt together with the first draft, so heads guess from the second step on.
    """

    @torch.inference_mode()
    def __init__(self, plan: Plan, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        device, sampling = engine.model.device, picker.sampling
        self.plan = plan
        self.sources = plan.sources(1, device)
        self.names = named(self.sources)
        self.rows = min(plan.rows, 1 + sum(source.nodes for source in self.sources))
        self.texts = Texts(1, SPAN, device)
        self._make_room()
        self.texts.open(0, sequence.tokens, sampling.seed)
        for source in self.sources:
            source.open(0, sequence.tokens, sampling.seed)
        self.readers = {source: source.follow() for source in self.sources if isinstance(source, Reading)}
        self.reads_text = any(source.reads_text for source in self.readers)
        self.new: list[torch.Tensor] = []  # hidden states that nobody has read
        _, self.choices, self.needs = alone(sequence, sampling, device)
        if sampling.rule == "rejection":
            self.needs = frozenset()  # it wants guesses that know nothing of the noise
        self.planted: Rows

    def _make_room(self) -> None:
        """There are more places than the text has tokens."""
        while self.texts.tokens.shape[1] <= len(self.sequence.tokens):
            self.texts.tokens = F.pad(self.texts.tokens, (0, self.texts.tokens.shape[1]))

    @torch.inference_mode()
    def draft(self, room: int) -> Draft:
        if self.new:
            self._read()
        deepest = send([room], self.texts.device)
        offers = [nodes for source in self.sources for nodes in source.guess(self.texts, deepest)]
        plan = self.plan
        rows = plant(self.texts.roots(), offers, self.rows, deepest, plan.gate, plan.prices)
        marks = rows.valid.long() + (rows.valid & rows.accepted)
        draft = drafted(self.names, *torch.cat([rows.tokens, rows.parents, rows.sources, marks]).tolist())
        count = len(draft)
        some = [part[:, :count] for part in (*rows[:3], rows.sees[..., :count], *rows[4:8])]
        self.planted = Rows(*some)
        return draft

    def _read(self) -> None:
        """Let heads read new rows, and guess."""
        hidden = self.new[0] if len(self.new) == 1 else torch.cat(self.new)
        self.new = []
        tokens = send(self.sequence.tokens[-len(hidden) :], hidden.device)
        for source, follow in self.readers.items():
            source.expect(0, follow(hidden, tokens, self.sequence), self.texts, self.choices, self.needs)

    def score(self, draft: Draft) -> Asking[Scores]:
        return self.engine.scoring(self.sequence, draft, self._see if self.reads_text else None)

    def _see(self, hidden: torch.Tensor) -> None:
        self.new.append(hidden.clone())

    @torch.inference_mode()
    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        device, length = self.texts.device, len(self.sequence.tokens)
        self._make_room()
        put(verdict.tokens, self.texts.tokens[0, length - len(verdict.tokens) :])
        self.texts.lengths.fill_(length)
        if self.readers:
            self.new.append(scores.hidden[list(verdict.rows)])
        rows, tokens, best = (send(part, device)[None] for part in (verdict.rows, verdict.tokens, scores.best))
        walk = Walk(rows, tokens, send([len(verdict.rows)], device))
        for source in self.sources:
            source.learn(self.texts, self.planted, best, walk, scores.logits)
