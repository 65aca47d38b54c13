"""Predicted outputs: an expected answer that came with the request, drafted from where the answer agrees with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sending import put
from ..step.nodes import NEVER, Nodes, chains
from ..step.texts import Texts
from .base import Source
from .history import BETWEEN, matches

LONGEST = 8  # how many of the answer's last tokens are compared with the prediction
AHEAD = 16  # draft tokens per step
# The probability of the first one by match length (1, 2, 3, 4 or more tokens), and of each further one.
FIRST = (0.5, 0.7, 0.8, 0.9)
NEXT = 0.95


class Prediction:
    """A predicted answer, for drafting on the host.

    >>> hint = Prediction([5, 6, 7, 8, 9], prompt_length=2)
    >>> hint.after([1, 2], 3), hint.after([1, 2, 5, 0, 7], 3), hint.after([1, 2, 0], 3)
    ([5, 6, 7], [8, 9], [])
    """

    name = "prediction"

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self.tokens = list(tokens)
        self.prompt_length = prompt_length
        self._places: dict[tuple[int, ...], list[int]] = {}  # the ends of n-grams of up to LONGEST tokens

    def after(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The prediction's continuation of the answer, from the longest match; of several, from the nearest one."""
        answer = list(tokens[self.prompt_length :])
        if not answer:
            return self.tokens[: min(most, AHEAD)]
        if not self._places:
            self._index()
        for length in range(min(LONGEST, len(answer)), 0, -1):
            ends = self._places.get(tuple(answer[-length:]))
            if ends:
                end = min(ends, key=lambda end: abs(end - len(answer)))
                return self.tokens[end : end + min(most, AHEAD)]
        return []

    def _index(self) -> None:
        for end in range(1, len(self.tokens) + 1):
            for start in range(max(0, end - LONGEST), end):
                self._places.setdefault(tuple(self.tokens[start:end]), []).append(end)


class Predicted(Source):
    """The same as a source, for lanes that have a prediction. Predictions are truncated to the lanes' length."""

    names = (Prediction.name,)

    def __init__(self, lanes: int, length: int, deepest: int, device: torch.device) -> None:
        self.deepest = self.nodes = min(AHEAD, deepest)
        self._shape, self._device = (lanes, length), device
        # Allocated at first use: the predictions, BETWEEN after each, and where the answers start.
        self._tokens = self._starts = torch.zeros(0, dtype=torch.long, device=device)
        first = torch.tensor((1.0, *FIRST)).log()
        further = torch.arange(self.deepest) * torch.tensor(NEXT).log()
        self._chances = (first[:, None] + further).to(device)  # [matching tokens, depth]

    def make(self) -> None:
        """Allocate what is missing."""
        if not len(self._tokens):
            self._tokens = torch.full(self._shape, BETWEEN, device=self._device)
            self._starts = torch.zeros(self._shape[0], dtype=torch.long, device=self._device)
            self.state = (self._tokens, self._starts)

    def tell(self, lane: int, prediction: Prediction | None) -> None:
        """The sequence that starts in a lane has this prediction, or none."""
        if prediction is not None:
            self.make()
        if len(self._tokens):
            self._tokens[lane].fill_(BETWEEN)
        if prediction is not None:
            put(prediction.tokens[: self._shape[1]], self._tokens[lane])
            self._starts[lane].fill_(prediction.prompt_length)

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        span = texts.tokens.shape[1]
        told = self._tokens[: texts.lanes, :span]
        answered = (texts.lengths - self._starts[: texts.lanes])[:, None]  # [lanes, 1]
        lengths = torch.minimum(matches(texts, LONGEST, told), answered)  # [lanes, span]
        ends = torch.arange(1, span + 1, device=texts.device)
        best = (lengths * 2 * span - (ends - answered).abs()).argmax(1, keepdim=True)
        begins = answered == 0
        length = torch.where(begins, len(FIRST), lengths.gather(1, best))  # [lanes, 1]
        start = torch.where(begins, 0, best + 1)
        following = start + torch.arange(self.deepest, device=texts.device)
        tokens = told.gather(1, following.clamp(max=span - 1))  # [lanes, depth]
        there = ((tokens > BETWEEN) & (following < span)).cumprod(1).bool() & (length > 0)
        chances = torch.where(there, self._chances[length[:, 0].clamp(0, len(FIRST))], NEVER)
        return [chains(tokens[:, None], chances[:, None], self.first)]
