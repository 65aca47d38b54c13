"""Auto: every source of guesses that there is for the model, in one tree, as large as pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..errors import InputError
from ..models.adapter import Model
from ..runtime.calibrate import remembered
from ..runtime.plain import Engine
from ..sources.base import Plan, Source
from ..sources.heads import likely_paths
from ..sources.history import PLACES, History
from ..sources.recycle import Recycle
from .base import Method
from .headed import REACH, Ready, check_width, guesses_of, load_heads, shipped
from .prompt_lookup import PromptLookup

LONGEST = 16  # tokens of the text's end that are looked for in it
FLOOR = 0.02  # the least chance of a guess that the text repeats itself
RANKS = 8  # next tokens that are remembered after each token
RUNNERS = 7  # of what the model ranked behind the text's last token
SIZES = (1, 16)  # rows of a step, besides the most
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
            return replace(self, heads=shipped("amphista", model) or False)
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
