"""The interface of a model, as the loop uses it. `hf.py` implements it for transformers, `toy.py` for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from ..pool import Placed, Pool
from .attention import SlotLists


class Output(NamedTuple):
    """The result of a forward pass."""

    logits: torch.Tensor  # [asked rows, vocabulary]
    hidden: torch.Tensor  # [rows, width] after the last layer that ran; with `Model.keep`, other layers' too
    found: torch.Tensor | None = None  # [2, asked rows] `find_best` of the logits, if the runtime was asked for it
    answer: torch.Tensor | None = None  # the runtime's answer to a question about the last row


class Ends(NamedTuple):
    """The modules at both ends of a model, which draft heads share."""

    embed: Any  # tokens [...] -> [..., width]
    norm: Any  # hidden states after the last layer -> what the output head reads
    head: Any  # that -> logits [..., vocabulary]

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., width] the output head's weights of these tokens."""
        packed = getattr(self.head, "matrix", None)  # its `weight` would unpack the whole matrix
        found: torch.Tensor = packed.rows(tokens) if packed is not None else F.embedding(tokens, self.head.weight)
        return found


@dataclass(frozen=True)
class FixedRows:
    """Rows in static buffers, so that a CUDA graph can be captured on them."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]
    lists: SlotLists  # what they attend to

    def __len__(self) -> int:
        return len(self.tokens)


def asked_rows(logits: int | Sequence[int], rows: int, device: torch.device) -> torch.Tensor:
    """Which rows' logits are asked for: the last n, or these.

    >>> asked_rows(2, 5, torch.device("cpu")), asked_rows([0, 4], 5, torch.device("cpu"))
    (tensor([3, 4]), tensor([0, 4]))
    """
    if isinstance(logits, int):
        return torch.arange(rows - logits, rows, device=device)  # no copy from the host, which a capture forbids
    return torch.tensor(logits, dtype=torch.long, device=device)


class Model(Protocol):
    """A causal language model that computes rows."""

    name: str
    vocabulary: int
    layers: int
    width: int  # of hidden states
    dtype: torch.dtype
    context: int  # its context length
    turn: int | None  # the position at which it changes all rotary angles, if it does
    branches: bool  # False: rows must form one chain
    packs: bool  # whether sequences may share a forward pass, and those with a common prefix its slots
    chunk: int  # the largest prefill chunk
    device: torch.device
    lists: bool  # whether it computes FixedRows
    kinds: tuple[int, ...]  # the last layer of each kind of attention, in order
    kept: tuple[int, ...]  # layers after which hidden states are kept, besides the last: see `keep`

    def room(self, position: int) -> int:
        """How many positions beyond `position` a draft may extend."""
        ...

    def rooms(self, positions: torch.Tensor) -> torch.Tensor:
        """`room` for each of several positions, on the device."""
        ...

    def ends(self) -> Ends:
        """Its modules before the first layer and after the last."""
        ...

    def keep(self, layers: Sequence[int]) -> None:
        """From now on full forward passes also keep the hidden states after these layers, for heads that read them."""
        ...

    def part(self, hidden: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """Select from the hidden states of a full forward pass those after `layers`: [layers, rows, width].

        They must have been asked for by `keep`. Without layers: those after the last one, [rows, width].
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
        """Run layers `start` to `stop` (exclusive; None: to the end) on the rows, with compiled layers if `compiled`.

        To start from the middle, pass the hidden states after layer `start - 1` as `hidden` [rows, width]. `logits`
        asks for the logits of the last n rows, or of these rows; they are meaningful only if the last layer has run.
        """
        ...
