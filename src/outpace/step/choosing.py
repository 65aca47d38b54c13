"""The target's choices for all rows of all lanes: `Picker`, as functions of tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ..draft import find_best
from ..errors import InputError
from ..picking import Sampling, mixed
from ..sending import send
from .nodes import Rows
from .texts import Texts, signed

CUTS = frozenset(["top_k", "top_p", "min_p"])
_TARGET = 0  # `Picker`'s stream of noise for the target's choices


class Choices:
    """How each lane chooses tokens: its `Sampling`, without user logits processors and the rejection rule.

    `needs` says what the open lanes need; programs are compiled for that, so the rest costs nothing.
    """

    def __init__(self, lanes: int, vocabulary: int, device: torch.device | str) -> None:
        def numbers(value: float) -> torch.Tensor:
            return torch.full((lanes,), value, device=device)

        self.vocabulary = vocabulary
        self.temperature, self.top_p, self.min_p = numbers(0.0), numbers(1.0).double(), numbers(-math.inf)
        self.repetition, self.presence, self.frequency = numbers(1.0), numbers(0.0), numbers(0.0)
        self.top_k = torch.full((lanes,), vocabulary, device=device)
        self._lanes = lanes
        self._device = device
        # Allocated at first use [lanes, vocabulary]: what is added to scores, and how often a token occurs in the
        # sequence and in the answer.
        self.bias = self.seen = self.answered = torch.zeros(0, device=device)
        self._needs: dict[int, frozenset[str]] = {}  # by open lane

    def check(self, sampling: Sampling) -> None:
        """Raise InputError for a logit bias outside the vocabulary."""
        for token in sampling.logit_bias:
            if not 0 <= token < self.vocabulary:
                raise InputError(f"logit_bias names token {token}; the vocabulary has ids 0 to {self.vocabulary - 1}.")

    def open(self, lane: int, sampling: Sampling, tokens: Sequence[int], written: int = 0) -> None:
        """A sequence starts in a lane, or continues: its last `written` tokens belong to the answer."""
        needs = needs_of(sampling)
        self._needs[lane] = needs
        self.temperature[lane].fill_(sampling.temperature)
        self.top_k[lane].fill_(min(sampling.top_k or self.vocabulary, self.vocabulary))
        self.top_p[lane].fill_(sampling.top_p)
        self.min_p[lane].fill_(math.log(sampling.min_p) if sampling.min_p else -math.inf)
        self.repetition[lane].fill_(1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty)
        self.presence[lane].fill_(sampling.presence_penalty)
        self.frequency[lane].fill_(sampling.frequency_penalty)
        self.make(needs)
        if len(self.bias):
            for part in (self.bias, self.seen, self.answered):
                part[lane].zero_()
            device = self.seen.device
            answer = tokens[len(tokens) - written :]
            for place, counts in ((self.seen, Counter(tokens)), (self.answered, Counter(answer))):
                if counts:
                    often = send([*counts.values()], device, torch.float32)
                    place[lane].index_copy_(0, send([*counts], device), often)
            for token, bias in sampling.logit_bias.items():
                self.bias[lane, token].fill_(bias)

    def make(self, needs: frozenset[str]) -> None:
        """Allocate what these needs require, if it is missing."""
        if "penalties" in needs and not len(self.bias):
            size = (self._lanes, self.vocabulary)
            self.bias = torch.zeros(size, device=self._device)
            self.seen, self.answered = torch.zeros_like(self.bias), torch.zeros_like(self.bias)

    def close(self, lane: int) -> None:
        """The sequence has ended."""
        self._needs.pop(lane, None)

    @property
    def state(self) -> list[torch.Tensor]:
        """All state, by lane."""
        settings = [self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency]
        return [*settings, self.top_k, *([self.bias, self.seen, self.answered] if len(self.bias) else [])]

    def move(self, lane: int, to: int) -> None:
        """A sequence moves to another lane, with all of `state`."""
        self._needs[to] = self._needs.pop(lane)

    @property
    def needs(self) -> frozenset[str]:
        """What some open lane needs, of "noise", CUTS and "penalties"."""
        return frozenset[str]().union(*self._needs.values())

    def choose(
        self, logits: torch.Tensor, found: torch.Tensor, texts: Texts, rows: Rows, needs: frozenset[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[lanes, rows] the target's token after each row, and whether there is one, from logits [all rows, tokens].

        There is none if logits are NaN, or every token is ruled out. `found` is `find_best` of the logits.
        """
        lanes, count = rows.tokens.shape
        if not needs:
            return found[0].long().view(lanes, count), (found[1] > -math.inf).view(lanes, count)
        scores = logits.float()
        if "penalties" in needs:
            scores = self._penalised(scores, rows)
        greedy = find_best(scores)
        best = greedy[1].float()
        there = greedy[1] > -math.inf
        if "noise" not in needs:
            return greedy[0].long().view(lanes, count), there.view(lanes, count)
        warm = self._per_row(self.temperature, rows)
        scores = scores - torch.where(best.isfinite(), best, 0.0)[:, None]
        scores = scores / torch.where(warm > 0, warm, 1.0)[:, None]
        if needs & CUTS:
            scores = self._cut(scores, rows)
        position = (texts.lengths[:, None] + rows.depths).flatten()
        noise = gumbel(texts.seeds[:, None].expand(-1, count).flatten(), position, scores.shape[1])
        drawn = (scores.double() + noise).argmax(1)
        picks = torch.where(warm > 0, drawn, greedy[0].long())
        return picks.view(lanes, count), there.view(lanes, count)

    def learn(self, tokens: torch.Tensor, counts: torch.Tensor, needs: frozenset[str]) -> None:
        """Count the first `counts` [lanes] of `tokens` [lanes, most], which are part of the sequences now."""
        if "penalties" in needs:
            new = (torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]).float()
            for part in (self.seen, self.answered):
                part[: len(tokens)].scatter_add_(1, tokens, new)

    def _per_row(self, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        lanes, count = rows.tokens.shape
        return values[:lanes, None].expand(-1, count).flatten()

    def _penalised(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        lanes, count = rows.tokens.shape
        # For a row, its ancestors count as part of the sequence; row 0 does already.
        above = rows.sees.clone()
        above[:, :, 0] = False
        guessed = torch.zeros_like(scores).view(lanes, count, -1)
        guessed.scatter_add_(2, rows.tokens[:, None].expand(-1, count, -1), above.float())

        def wide(values: torch.Tensor) -> torch.Tensor:
            return values[:lanes, None]

        shaped = scores.view(lanes, count, -1) + wide(self.bias)
        seen, answered = wide(self.seen) + guessed, wide(self.answered) + guessed
        repetition = wide(self.repetition)[..., None]
        repeated = torch.where(shaped < 0, shaped * repetition, shaped / repetition)
        shaped = torch.where((seen > 0) & (repetition != 1), repeated, shaped)
        less = wide(self.presence)[..., None] + wide(self.frequency)[..., None] * answered
        return torch.where(answered > 0, shaped - less, shaped).view_as(scores)

    def _cut(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Top-k, top-p, min-p, in this order."""
        best, order = scores.sort(dim=1, descending=True, stable=True)
        most = self._per_row(self.top_k, rows)[:, None]
        least = best.gather(1, most - 1)
        best = best.masked_fill(best < least, -math.inf)
        # Integer sums do not depend on the order; on a GPU, float sums differ from run to run.
        mass = (best.softmax(1, dtype=torch.float64) * 2**52).long().cumsum(1)
        top_p = self._per_row(self.top_p, rows)[:, None]
        reached = (mass < top_p * 2**52).sum(1, keepdim=True) + 1
        place = torch.arange(best.shape[1], device=best.device)
        best = torch.where((place < reached) | (top_p >= 1), best, -math.inf)
        best = best.masked_fill(best < best[:, :1] + self._per_row(self.min_p, rows)[:, None], -math.inf)
        return torch.empty_like(best).scatter_(1, order, best)


def needs_of(sampling: Sampling) -> frozenset[str]:
    """What a sampling needs, of "noise", CUTS and "penalties"."""
    noise = sampling.temperature > 0
    penalties = sampling.repetition_penalty not in (None, 1) or sampling.presence_penalty or sampling.frequency_penalty
    asked = {
        "noise": noise,
        "top_k": noise and sampling.top_k > 0,
        "top_p": noise and sampling.top_p < 1,
        "min_p": noise and sampling.min_p > 0,
        "penalties": bool(penalties or sampling.logit_bias),
    }
    return frozenset(name for name, wanted in asked.items() if wanted)


def gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, words: int, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., tokens] the noise of `picking.gumbel` for the target's choices, by seeds and positions [...].

    For all tokens, or for `tokens` [..., tokens].
    """
    index = torch.arange(words, device=seeds.device) if tokens is None else tokens
    first = seeds
    for value in (positions, _TARGET, 1):
        first = _splitmix(first ^ _splitmix(value))
    second = _splitmix(first)
    high, low = (mixed(mixed(index ^ _low(key)) ^ _high(key)) for key in (first[..., None], second[..., None]))
    bits = (high << 20) | (low >> 12)
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-52))


def _low(key: torch.Tensor) -> torch.Tensor:
    return key & 0xFFFFFFFF


def _high(key: torch.Tensor) -> torch.Tensor:
    return (key >> 32) & 0xFFFFFFFF


def _splitmix(x: Any) -> Any:
    """`picking._splitmix` for tensors, whose products wrap around. Shifts must be logical, not arithmetic."""
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & (2**34 - 1))) * signed(0xBF58476D1CE4E5B9)
    x = _wrapped(x)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * signed(0x94D049BB133111EB)
    x = _wrapped(x)
    return x ^ ((x >> 31) & (2**33 - 1))


def _wrapped(x: Any) -> Any:
    return signed(x) if isinstance(x, int) else x
