"""A model of a few lines, for tests and examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UnsupportedModel
from ..pool import Placed, Pool
from .adapter import Ends, FixedRows, Output, asked_rows


class Bigram:
    """A model whose logits depend on the last token alone, by a table.

    >>> model = Bigram(torch.eye(3).roll(1, 1))  # 0, 1, 2, 0, 1, …
    >>> import outpace
    >>> outpace.Decoder(model).generate([0], max_new_tokens=4).token_ids
    [1, 2, 0, 1]
    """

    layers = 1
    width = 1
    turn: int | None = None
    dtype = torch.float32
    branches = True
    packs = True
    lists = False
    kept: tuple[int, ...] = ()
    chunk = 512
    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor, context: int = 4096) -> None:
        self.name = "bigram"
        self.table = logits  # [last token, next token]
        self.vocabulary = len(logits)
        self.context = context

    def room(self, position: int) -> int:
        return max(self.context - 1 - position, 0)

    def rooms(self, positions: torch.Tensor) -> torch.Tensor:
        return (self.context - 1 - positions).clamp(min=0)

    def keep(self, layers: Sequence[int]) -> None:
        raise UnsupportedModel("a bigram table has no hidden states for heads to read.")

    def part(self, hidden: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        return hidden

    def ends(self) -> Ends:
        raise UnsupportedModel("a bigram table has no hidden states for heads to read.")

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
        asked = asked_rows(logits, len(rows), self.device)
        return Output(self.table[rows.tokens[asked]], torch.zeros(len(rows), 1))
