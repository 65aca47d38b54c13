"""Medusa: every head reads only the last hidden state, independently of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..errors import InputError
from ..models.adapter import Ends, FixedRows
from ..pool import Pool, Sequence
from .base import Follower, Heads, HeadSettings
from .blocks import BlockShape, ResBlock


@dataclass(frozen=True)
class MedusaSettings(HeadSettings):
    """layers: residual layers per head. own_output: each head has an output matrix of its own."""

    layers: int = 1
    own_output: bool = False
    vocabulary: int = 0  # with own_output: rows of that matrix

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.layers <= 8:
            raise InputError(f"layers={self.layers} is out of range: it must be 0 to 8.")
        if self.own_output and self.vocabulary < 1:
            raise InputError(f"vocabulary={self.vocabulary}: heads with an output of their own need its size.")


class MedusaHeads(Heads):
    """heads: the residual layers of each. outputs: the output matrix of each, if it has one."""

    kind = "medusa"
    settings_type = MedusaSettings
    settings: MedusaSettings

    def __init__(self, settings: MedusaSettings, shape: BlockShape) -> None:
        super().__init__(settings, shape)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(shape.width) for _ in range(settings.layers))) for _ in range(settings.count)
        )
        outputs = settings.count if settings.own_output else 0
        self.outputs = nn.ModuleList(nn.Linear(shape.width, settings.vocabulary, bias=False) for _ in range(outputs))

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, ends: Ends) -> torch.Tensor:
        return self.read(ends.norm(hidden))

    def read(self, final: torch.Tensor) -> torch.Tensor:
        """[count, ..., width] from the input of the target's output head [..., width]."""
        return torch.stack([head(final) for head in self.heads])

    def logits(self, states: torch.Tensor, ends: Ends, first: int = 0) -> torch.Tensor:
        if not self.settings.own_output:
            return super().logits(states, ends, first)
        outputs = list(self.outputs)[first : first + len(states)]
        return torch.stack([output(state) for output, state in zip(outputs, states, strict=True)])

    def fixed(
        self, ends: Ends, pool: Pool, layer: int, rows: FixedRows, hidden: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        return self.logits(self.read(ends.norm(hidden.index_select(0, last))), ends)

    def follow(self, ends: Ends, pool: Pool, layer: int) -> Follower:
        return _Follower(self, ends)


class _Follower(Follower):
    heads: MedusaHeads

    def feed(self, hidden: torch.Tensor, tokens: torch.Tensor, sequence: Sequence) -> None:
        self.last = hidden[-1:]

    def guesses(self) -> torch.Tensor:
        return self.heads.logits(self.heads.read(self.ends.norm(self.last)), self.ends)[:, 0]
