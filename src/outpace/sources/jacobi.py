"""Jacobi decoding: a block of draft tokens that the model corrects in parallel, iteration by iteration."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ..sending import put
from ..step.nodes import Nodes, Rows, chains
from ..step.texts import Texts
from ..step.walking import Walk
from .base import Source, pick_from


class Jacobi(Source):
    """One chain of `window` draft tokens."""

    names = ("jacobi",)

    def __init__(self, window: int, lanes: int, device: torch.device) -> None:
        self.deepest = self.nodes = window
        self._guesses = torch.zeros(lanes, window, dtype=torch.long, device=device)
        self.state = (self._guesses,)

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        put(random.Random(seed).choices(tokens, k=self.deepest), self._guesses[lane])

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        tokens = self._guesses[: texts.lanes, None]
        return [chains(tokens, torch.zeros_like(tokens, dtype=torch.float32), self.first)]

    def learn(self, texts: Texts, rows: Rows, best: torch.Tensor, walk: Walk, logits: torch.Tensor) -> None:
        """The model's output after the accepted rows is the next draft, filled up with tokens of the sequence."""
        place = walk.counts[:, None] + torch.arange(self.deepest, device=best.device)  # rows are in the chain's order
        there = place < rows.valid.sum(1, keepdim=True)
        better = F.pad(best, (0, 1)).gather(1, place.clamp(max=best.shape[1]))
        self._guesses[: texts.lanes] = torch.where(there, better, pick_from(texts, self.deepest))
