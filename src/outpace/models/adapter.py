"""What the loop needs of a model. `hf.py` gives it for transformers, `toy.py` for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..pool import Pool, Rows
from .attention import SlotLists


class Output(NamedTuple):
    """What a forward pass leaves behind."""

    logits: torch.Tensor  # [asked rows, vocabulary]
    hidden: torch.Tensor  # [rows, width] where the last layer that ran left them
    found: torch.Tensor | None = None  # [2, asked rows] what `find_best` says of the logits, where a runtime has asked
    answer: torch.Tensor | None = None  # what a runtime was asked about the last row


class Ends(NamedTuple):
    """Where a model begins and ends: what heads that draft share with it."""

    embed: Any  # tokens [...] -> [..., width]
    norm: Any  # hidden states after the last layer -> what the output head reads
    head: Any  # that -> logits [..., vocabulary]


@dataclass(frozen=True)
class FixedRows:
    """Rows whose tensors stay in place from step to step, so that a CUDA graph may be captured on them."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]
    lists: SlotLists  # what they see

    def __len__(self) -> int:
        return len(self.tokens)


class Model(Protocol):
    """A causal language model that computes rows."""

    name: str
    vocabulary: int
    layers: int
    width: int  # of hidden states
    dtype: torch.dtype
    context: int  # positions it was made for
    branches: bool  # False: rows must form one chain
    chunk: int  # most rows of text that one forward should take
    device: torch.device
    lists: bool  # whether it computes FixedRows

    def room(self, position: int) -> int:
        """How many positions beyond `position` a draft may reach."""
        ...

    def ends(self) -> Ends:
        """Its modules before the first layer and after the last."""
        ...

    def forward(
        self,
        pool: Pool,
        rows: Rows | FixedRows,
        logits: int,
        start: int = 0,
        stop: int | None = None,
        hidden: torch.Tensor | None = None,
        compiled: bool = False,
    ) -> Output:
        """Run layers `start` to `stop` (not included; None: to the end) on the rows, compiled where they can be.

        From the middle, `hidden` [rows, width] says where layer `start - 1` left them. `logits` asks for the
        last so many rows' logits; they mean something only when the last layer has run.
        """
        ...
