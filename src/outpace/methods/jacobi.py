"""Jacobi decoding: draft a block of tokens, let the model correct all of them at once, repeat."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..draft import Draft, Scores, Verdict, chain
from ..picking import Picker
from ..pool import Sequence
from ..runtime.plain import Engine
from ..sources.base import Plan
from ..sources.jacobi import Jacobi as Source
from .autoregressive import Autoregressive
from .base import Drafter, Method, Size


@dataclass(frozen=True)
class Jacobi(Method):
    """Fixed-point iteration on the next `window` tokens (arXiv 2402.02057, Algorithm 1).

    Attributes:
        window: how many future tokens are refined in parallel; 0 is plain decoding.
    """

    name = "jacobi"
    about = "refines a block of draft tokens in parallel until it no longer changes"
    sizes = (Size({"window": 16}, rows=17, tokens=1.05), Size({"window": 0}, rows=1, tokens=1.0))

    window: int = 16

    def __post_init__(self) -> None:
        self.check(window=(0, 512))

    @property
    def branches(self) -> bool:
        return False

    def plan(self, engine: Engine) -> Plan:
        if not self.window:
            return Autoregressive().plan(engine)
        return Plan(lambda lanes, device: [Source(self.window, lanes, device)], self.window + 1, extends=False)

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        if not self.window:
            return Autoregressive().start(engine, sequence, picker)
        return _Drafter(self, engine, sequence, picker)


class _Drafter(Drafter):
    extends = False

    def __init__(self, method: Jacobi, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.window = method.window
        self.random = random.Random(picker.sampling.seed)
        self.guesses = self.random.choices(sequence.tokens, k=self.window)

    def draft(self, room: int) -> Draft:
        return chain(self.sequence.tokens[-1], self.guesses[:room], "jacobi")

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """The model's output after the accepted rows is the next draft."""
        better = scores.best[len(verdict.rows) :]
        fresh = self.random.choices(self.sequence.tokens, k=self.window - len(better))
        self.guesses = [*better, *fresh]
