"""Prompt lookup as a tree: what followed earlier occurrences of the sequence's end, in it or in stored sequences."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from ..step import fused
from ..step.nodes import NEVER, Nodes, chains
from ..step.texts import Texts
from .base import Source

# Classes of matches, by their least length. The longest class is believed first, and leaves a doubt to the shorter
# ones: DOUBT for one occurrence, times AGAIN for each further one that agrees, times OTHER for each different token
# that followed. Fitted to 91 answers of the embedded model to Spec-Bench prompts. There, the token after a match of 1,
# 2, 3, 4 and 6 tokens was right in 30, 56, 67, 73 and 84 % of cases if the match occurred once; in 56, 77, 86, 89 and
# 97 % if it occurred twice; and where two occurrences differ, the newer one in 18 to 47 %.
LEAST = (1, 2, 3, 4, 6, 8, 12, 16)
DOUBT, AGAIN, OTHER, MOST = 0.7, 0.75, 1.25, 0.98  # MOST: the largest doubt
PLACES = 8  # default for how many earlier occurrences are continued
NONE = -(2**20)  # as a match length: no match
STORED = "store"  # the source name of draft tokens from stored sequences
BETWEEN = -1  # as a token: the boundary between two stored sequences


class History(Source):
    """Continues up to `places` earlier occurrences of the sequence's end, longest match first, then newest first.

    longest: how many last tokens are compared.
    depth: how many tokens are taken from each occurrence.
    floor: draft tokens with a lower probability are dropped.
    store: [tokens] of stored sequences, newest last, BETWEEN after each. They are searched instead of the sequence.
    """

    def __init__(
        self,
        longest: int,
        depth: int,
        places: int,
        name: str,
        device: torch.device,
        floor: float = 0.0,
        store: torch.Tensor | None = None,
    ) -> None:
        self.names = (name,)
        self.longest, self.deepest, self.places = longest, depth, places
        self.nodes = places * depth
        self.store = store
        self.floor = math.log(floor) if floor else NEVER
        self._least = torch.tensor([least for least in LEAST if least <= longest]).to(device)

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        if fused.usable(texts.device):
            size = (self.longest, self.places, self.deepest)
            doubts = (DOUBT, AGAIN, OTHER, MOST)
            return [fused.history(texts, *size, self._least, doubts, self.floor, self.first, self.store)]
        lengths = matches(texts, self.longest, self.store)
        span = lengths.shape[1]
        place = torch.arange(span, device=texts.device)
        lengths, where = (lengths * span + place).topk(min(self.places, span), 1)
        lengths = lengths // span  # [lanes, places] how many tokens match
        ahead = torch.arange(self.deepest, device=texts.device).expand(*where.shape, -1)
        if self.store is None:
            # A match that overlaps the sequence's end repeats itself: it continues with its own beginning.
            ahead = ahead % (texts.lengths[:, None] - 1 - where).clamp(min=1)[..., None]
        following = where[..., None] + 1 + ahead  # [lanes, places, depth]
        tokens = _searched(texts, self.store).gather(1, following.flatten(1).clamp(max=span - 1)).view_as(following)
        chances = _chances(tokens, lengths, self._least)
        if self.floor > NEVER:
            chances = chances.masked_fill(chances < self.floor, NEVER)
        return [chains(tokens, chances, self.first)]


def matches(texts: Texts, longest: int, store: torch.Tensor | None = None) -> torch.Tensor:
    """[lanes, span] the match length at each earlier position: how many of the last tokens, up to `longest`, end there.

    The positions are the sequence's own, or those of a store.
    """
    tokens, lengths = _searched(texts, store), texts.lengths[:, None]
    span = tokens.shape[1]
    back = torch.arange(longest, device=tokens.device)
    ends = texts.tokens.gather(1, (lengths - 1 - back).clamp(min=0))  # [lanes, longest] the last token first
    earlier = F.pad(tokens, (longest - 1, 0), value=BETWEEN).unfold(1, span, 1).flip(1)  # [lanes, longest, span]
    same = earlier == ends[..., None]
    same &= (lengths > back)[..., None]  # not before the sequence's start
    if store is None:
        same[:, 0] &= torch.arange(span, device=tokens.device) < lengths - 1  # the end itself is no earlier occurrence
    return same.cumprod(1).sum(1)


def _searched(texts: Texts, store: torch.Tensor | None) -> torch.Tensor:
    """[lanes, span] the tokens that are searched."""
    return texts.tokens if store is None else store.expand(texts.lanes, -1)


def doubt_of(occurrences: int, tokens: int) -> float:
    """The probability left to shorter matches, by how many occurrences and how many different tokens followed."""
    return min(MOST, DOUBT * AGAIN ** (occurrences - tokens) * OTHER ** (tokens - 1))


def _chances(tokens: torch.Tensor, lengths: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """[lanes, places, depth] the log probability of each path.

    All occurrences that agree with a path vote for its next token; each one's match length grows with the path. Longer
    matches count first: in each class, a token's probability is its share of the votes, less the doubt. No path goes
    beyond the end of a stored sequence.
    """
    deepest = tokens.shape[2]
    follow = tokens.transpose(1, 2)  # [lanes, depth, places]
    agree = (follow[..., None] == follow[:, :, None]).cumprod(1)  # [lanes, depth, places, places]
    new = agree.tril(-1).sum(-1) == 0  # no longer or newer match has gone this way: [lanes, depth, places]
    agree = agree.float()
    before = F.pad(agree, (0, 0, 0, 0, 1, -1), value=1.0)  # of the path without its last token
    step = torch.arange(deepest, device=tokens.device)[:, None]
    grown = torch.where(lengths > 0, lengths, NONE)[:, None] + step  # [lanes, depth, places]
    counted = (grown[..., None] >= least).float()  # [lanes, depth, places, classes]
    total, mine, ways = before @ counted, agree @ counted, before @ (counted * new[..., None])
    doubt = (DOUBT * AGAIN ** (total - ways) * OTHER ** (ways - 1)).clamp(max=MOST)
    doubt = torch.where(total > 0, doubt, 1.0)
    belief = F.pad(doubt.flip(-1).cumprod(-1).flip(-1), (-1, 1), value=1.0)  # what longer matches leave
    chance = (belief * (1 - doubt) * mine / total.clamp(min=1)).sum(-1)
    return torch.where((grown > 0) & (follow > BETWEEN), chance, 0.0).log().cumsum(1).transpose(1, 2)
