"""Token Recycling: the model's top tokens after each token, from the last row with that token.

Most rows of a step are rejected, but the model has computed what follows each of them. Its top tokens are stored under
the row's token, whatever came before it, and drafted wherever that token comes again.

Each lane has its own table. It starts empty, or with the table of the last sequence of the same salt: that one knows
more tokens, but a sequence's steps then depend on earlier sequences. Prefill could fill it too, but computes no logits;
by estimate, they would cost about as much time as they save.

The runners-up are the tokens that the model ranked second, third, … when it chose the sequence's last token. Often one
of them is the next token (LogitSpec).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..picking import likeliest
from ..step import fused
from ..step.nodes import NEVER, Nodes, Rows, mix
from ..step.texts import Texts
from ..step.walking import Walk
from .base import Source
from .heads import Ranks, likely_paths

SIZE = 2**13  # entries per lane; tokens equal modulo this replace each other
SALTS = 16  # how many tables of ended sequences are kept
DEEPEST = 6  # the longest path
BEHIND: Sequence[Ranks] = ((), (0,))  # the ranks that follow each runner-up
NONE = -1  # no token
NAMES = ("recycled", "runner-up")
# How often the runner-up of rank 2, 3, … is the next token. Counted in 31 answers of the embedded model to Spec-Bench
# prompts (3,100 tokens); its probability at that time predicts little more than its rank.
RUNNERS = (0.05, 0.03, 0.03, 0.02, 0.02, 0.015, 0.015)


class Recycle(Source):
    """Paths of ranks below the sequence's last token: at each depth one of the stored successors.

    A stored token's probability is the model's from then. On 12 answers of a small model that was about right: of
    tokens with a probability above 0.37, 56 % were right; of 0.14 to 0.37, 22 %; of 0.05 to 0.14, 8 %; of 0.02 to
    0.05, 3 %.

    ranks: how many successors are stored for each token.
    paths: how many paths are offered.
    carried: whether a sequence starts with the table of the last one of its salt.
    runners: how many runners-up are offered (fewer than ranks), each alone and with its best stored successor.
    """

    names = NAMES

    def __init__(
        self,
        ranks: int,
        paths: int,
        lanes: int,
        device: torch.device,
        size: int = SIZE,
        runners: int = 0,
        carried: bool = False,
    ) -> None:
        assert runners < ranks
        own = likely_paths(DEEPEST, ranks, paths)
        ways: Sequence[Ranks] = [*own, *((rank, *more) for rank in range(1, 1 + runners) for more in BEHIND)]
        self._own, self.nodes = len(own), len(ways)
        self.deepest = max(map(len, ways))
        self.size, self.runners = size, runners
        # Per entry: its token, the successors, their log probabilities. The last entry but one takes what is not to be
        # stored, the last one the runners-up.
        self._known = torch.full((lanes, size + 2), NONE, dtype=torch.int32, device=device)
        self._next = torch.zeros(lanes, size + 2, ranks, dtype=torch.int32, device=device)
        self._chances = torch.full((lanes, size + 2, ranks), NEVER, device=device)
        self.state = (self._known, self._next, self._chances)
        self._carried = carried
        self._left: dict[str, list[torch.Tensor]] = {}  # of the last sequence of each salt, newest last
        trust = [0.0, *RUNNERS, *[RUNNERS[-1]] * ranks][:ranks]
        self._trust = torch.tensor(trust).log().to(device) if runners else None  # [ranks]
        self._depths = torch.tensor([len(way) for way in ways], device=device)
        beyond = (0,) * self.deepest
        self._ranks = torch.tensor([(*way, *beyond)[: self.deepest] for way in ways], device=device)

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        self._known[lane].fill_(NONE)
        self._chances[lane, -1].fill_(NEVER)

    def recall(self, lane: int, salt: str) -> None:
        for part, left in zip(self.state, self._left.get(salt, ()), strict=False):
            part[lane].copy_(left)
        self._chances[lane, -1].fill_(NEVER)  # the runners-up were the other sequence's

    def leave(self, lane: int, salt: str) -> None:
        if self._carried:
            self._left.pop(salt, None)
            self._left[salt] = [part[lane].clone() for part in self.state]
            if len(self._left) > SALTS:
                del self._left[next(iter(self._left))]

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        if fused.usable(texts.device):
            memory = (self._known, self._next, self._chances)
            return self._parts(fused.recycled(texts, self._ranks, self._depths, *memory, self._own, self.first))
        lanes, ranks = texts.lanes, self._next.shape[2]
        token = newest = texts.roots()[:, None].expand(-1, self.nodes)
        chances = torch.zeros(lanes, self.nodes, device=texts.device)
        hashes = [torch.zeros_like(token)]
        runner = torch.arange(self.nodes, device=texts.device) >= self._own
        for depth in range(self.deepest):
            place = torch.where(runner, self.size + 1, token % self.size)
            known = runner | (self._known[:lanes].gather(1, place) == token)
            entry = place * ranks + self._ranks[:, depth]
            believed = torch.where(known, self._chances[:lanes].flatten(1).gather(1, entry), NEVER)
            token = self._next[:lanes].flatten(1).gather(1, entry).long()
            within = depth < self._depths
            chances = torch.where(within, chances + believed, chances)
            newest = torch.where(within, token, newest)
            hashes.append(hashes[-1] + mix(token, depth + 1))
            runner = torch.zeros_like(runner)
        nodes = Nodes(newest, self._depths.expand(lanes, -1), torch.stack(hashes, 2), chances, self.first)
        return self._parts(nodes)

    def _parts(self, nodes: Nodes) -> list[Nodes]:
        """Splits all nodes into recycled ones and runners-up."""
        if not self.runners:
            return [nodes]
        tokens, depths, paths, chances = nodes[:4]
        return [
            Nodes(tokens[:, some], depths[:, some], paths[:, some], chances[:, some], self.first + kind)
            for kind, some in enumerate((slice(self._own), slice(self._own, None)))
        ]

    def learn(self, texts: Texts, rows: Rows, best: torch.Tensor, walk: Walk, logits: torch.Tensor) -> None:
        """Of rows with the same entry, the first and most likely one is stored; that works best."""
        tokens, (lanes, count) = rows.tokens, rows.tokens.shape
        ranks = min(self._next.shape[2], logits.shape[1])
        quick = fused.usable(logits.device)
        found = (fused.likeliest if quick else likeliest)(logits, ranks)  # [2, all rows, ranks]
        if quick:
            fused.remember(tokens, rows.valid, found, self._known, self._next, self._chances, walk, self._trust)
            return
        known, following, chances = self._known[:lanes], self._next[:lanes], self._chances[:lanes]
        place = torch.where(rows.valid, tokens % self.size, self.size)
        row = torch.arange(count, device=tokens.device)
        again = ((place[:, :, None] == place[:, None, :]) & (row < row[:, None])).any(2)
        place = place.masked_fill(again, self.size)
        known.scatter_(1, place, tokens.int())
        known[:, self.size] = NONE
        entries = place[..., None].expand(-1, -1, ranks)
        ranked, believed = found[0].int().view(lanes, count, -1), found[1].float().view(lanes, count, -1)
        believed = torch.where(believed > NEVER, believed, NEVER)  # NaN counts as none
        following.scatter_(1, entries, ranked)
        chances.scatter_(1, entries, believed)
        if self._trust is not None:
            last = walk.rows.gather(1, (walk.counts - 1).clamp(min=0)[:, None])[..., None].expand(-1, -1, ranks)
            following[:, -1:, :ranks] = ranked.gather(1, last)
            trusted = torch.where(believed.gather(1, last) > NEVER, self._trust[:ranks], NEVER)
            chances[:, -1:, :ranks] = trusted
