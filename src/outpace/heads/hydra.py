"""Hydra: each head reads the last hidden state and the draft tokens before it, so drafting is sequential."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..models.adapter import Ends
from ..pool import Pool, Sequence
from .base import Follower, Heads, HeadSettings, following
from .blocks import BlockShape


class HydraHeads(Heads):
    """Head k reads the state at t and the tokens t + 1 … t + 1 + k."""

    kind = "hydra"
    sequential = True

    def __init__(self, settings: HeadSettings, shape: BlockShape) -> None:
        super().__init__(settings, shape)
        self.token_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.from_state = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(settings.count))
        self.from_tokens = nn.ModuleList(
            nn.Linear((head + 1) * shape.width, shape.width, bias=False) for head in range(settings.count)
        )
        for parameter in (*self.from_state.parameters(), *self.from_tokens.parameters()):
            nn.init.zeros_(parameter)

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, ends: Ends) -> torch.Tensor:
        final = ends.norm(hidden)
        tokens = self.token_norm(embedded)
        ahead = torch.cat([following(tokens, place) for place in range(1, self.count + 1)], -1)
        width = tokens.shape[-1]
        return torch.stack([self.read(head, final, ahead[..., : (head + 1) * width]) for head in range(self.count)])

    def read(self, head: int, final: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The output head's inputs after `head` draft tokens: `tokens` are the newest token and those, concatenated."""
        return final + F.silu(self.from_state[head](final) + self.from_tokens[head](tokens))

    def guess(self, ends: Ends, final: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[lines, vocabulary] logits of the next head, from normed states [lines, width] and tokens.

        `tokens` [lines, 1 + depth] are the newest token and the draft tokens after it.
        """
        depth = tokens.shape[1] - 1
        embedded = self.token_norm(ends.embed(tokens))
        return self.logits(self.read(depth, final, embedded.flatten(1))[None], ends, depth)[0]

    def follow(self, ends: Ends, pool: Pool, layer: int) -> Follower:
        return _Follower(self, ends)


class _Follower(Follower):
    heads: HydraHeads

    def feed(self, hidden: torch.Tensor, tokens: torch.Tensor, sequence: Sequence) -> None:
        self.final = self.ends.norm(hidden[-1:])
        self.newest = tokens[-1:]

    def guess(self, paths: torch.Tensor) -> torch.Tensor:
        count = len(paths)
        tokens = torch.cat([self.newest.expand(count, 1), paths], 1)
        return self.heads.guess(self.ends, self.final.expand(count, -1), tokens)
