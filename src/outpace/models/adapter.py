"""What the loop needs of a model. `hf.py` gives it for transformers, `toy.py` for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..pool import Placed, Pool
from .attention import SlotLists


class Output(NamedTuple):
    """What a forward pass leaves behind."""

    logits: torch.Tensor  # [asked rows, vocabulary]
    hidden: torch.Tensor  # [rows, width] where the last layer that ran left them; beside it what `Model.keep` asked for
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


def asked_rows(logits: int | Sequence[int], rows: int, device: torch.device) -> torch.Tensor:
    """Which of so many rows' logits are asked for.

    >>> asked_rows(2, 5, torch.device("cpu")), asked_rows([0, 4], 5, torch.device("cpu"))
    (tensor([3, 4]), tensor([0, 4]))
    """
    if isinstance(logits, int):
        return torch.arange(rows - logits, rows, device=device)  # without a copy, which a capture could not have
    return torch.tensor(logits, dtype=torch.long, device=device)


class Model(Protocol):
    """A causal language model that computes rows."""

    name: str
    vocabulary: int
    layers: int
    width: int  # of hidden states
    dtype: torch.dtype
    context: int  # positions it was made for
    turn: int | None  # the position at which it changes all angles, if it does
    branches: bool  # False: rows must form one chain
    packs: bool  # whether rows of several texts may share a forward, and texts that begin alike their slots
    chunk: int  # most rows of text that one forward should take
    device: torch.device
    lists: bool  # whether it computes FixedRows
    kept: tuple[int, ...]  # layers behind which states are left besides the last: see `keep`

    def room(self, position: int) -> int:
        """How many positions beyond `position` a draft may reach."""
        ...

    def rooms(self, positions: torch.Tensor) -> torch.Tensor:
        """`room` for each of several positions, on the device."""
        ...

    def ends(self) -> Ends:
        """Its modules before the first layer and after the last."""
        ...

    def keep(self, layers: Sequence[int]) -> None:
        """From now on forwards through all layers leave the states behind these as well, for heads that read them."""
        ...

    def part(self, hidden: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """Of what a forward through all layers has left: [layers, rows, width]; without layers the last [rows, width].

        They must have been asked for.
        """
        ...

    def forward(
        self,
        pool: Pool,
        rows: Placed | FixedRows,
        logits: int | Sequence[int],
        start: int = 0,
        stop: int | None = None,
        hidden: torch.Tensor | None = None,
        compiled: bool = False,
    ) -> Output:
        """Run layers `start` to `stop` (not included; None: to the end) on the rows, compiled where they can be.

        From the middle, `hidden` [rows, width] says where layer `start - 1` left them. `logits` asks for the
        logits of the last so many rows, or of these rows; they mean something only when the last layer has run.
        """
        ...
