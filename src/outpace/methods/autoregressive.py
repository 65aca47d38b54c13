"""Plain decoding: one row a step. What every other method must equal."""

from __future__ import annotations

from dataclasses import dataclass

from ..draft import Draft, chain
from ..picking import Picker
from ..pool import Sequence
from ..runtime.plain import Engine
from ..sources.base import Plan
from .base import Drafter, Method


@dataclass(frozen=True)
class Autoregressive(Method):
    """Plain decoding: nothing is drafted."""

    name = "autoregressive"
    about = "plain decoding, one token per step"

    @property
    def branches(self) -> bool:
        return False

    @property
    def dealt(self) -> bool:
        return True  # every rank computes the one row

    def plan(self, engine: Engine) -> Plan:
        return Plan(lambda lanes, device: [], rows=1)

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return _Drafter(engine, sequence, picker)


class _Drafter(Drafter):
    @property
    def rests(self) -> bool:
        return True

    def draft(self, room: int) -> Draft:
        return chain(self.sequence.tokens[-1], (), "")
