"""A draft model as a source, for all lanes in one batch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from ..pool import Sequence
from ..step.choosing import Choices
from ..step.nodes import NEVER, Nodes, chains
from ..step.texts import Texts
from .base import Writing
from .heads import expected

READ = 256  # prefill chunk, in tokens


class ModelGuesses(Writing):
    """A chain of `length` draft tokens.

    It has a KV cache of its own, of the same size as the target's, and uses the same slots for the same positions, so
    it needs no allocation. Each step it recomputes the end of the sequence, as many tokens as a step can add, and
    drafts from there.

    engine: what runs the draft model. All slots of its pool are taken.
    """

    names = ("draft",)

    def __init__(self, engine: Any, length: int) -> None:
        self.engine = engine
        self.deepest = self.nodes = length

    def begin(self, sequence: Sequence) -> None:
        length = min(len(sequence.tokens), self.engine.model.context)
        read = Sequence(sequence.tokens[:length], reserved=sequence.slots[: length - 1])
        while behind := len(read.reserved):
            self.engine.climb(read, self.engine.pool.place_text(read, min(behind, READ)), 1)

    @torch.inference_mode()
    def writing(
        self, texts: Texts, back: int, choices: Choices, needs: frozenset[str]
    ) -> Generator[tuple[int, torch.Tensor], torch.Tensor, Nodes]:
        lengths = texts.lengths[:, None]
        place = lengths - back + torch.arange(back, device=texts.device)
        offset, newest = -back, texts.tokens.gather(1, place.clamp(min=0))
        room = self.engine.model.rooms(lengths - 1)
        tokens: list[torch.Tensor] = []
        chances: list[torch.Tensor] = []
        for depth in range(1, self.deepest + 1):
            logits = yield offset, newest
            guess, chance = expected(logits[:, None], 1, True, lengths + depth - 1, texts, choices, needs)
            offset, newest = depth - 1, guess[:, 0]
            tokens.append(newest)
            chances.append(torch.where((chance[:, 0] > NEVER) & (depth <= room), chance[:, 0], NEVER))
        worths = torch.cat(chances, 1).cumsum(1)
        return chains(torch.cat(tokens, 1)[:, None], worths[:, None], self.first)
