"""Lookahead Decoding (arXiv 2402.02057): n-grams from the model's own Jacobi trajectory, verified as they are made.

The window holds the last N−1 Jacobi iterations of W future positions. With the current token c at position p,

    level 0      c   s1  s2 … s(W−1)     at p, p+1, …: the spine
    level 1      a   b   …               at p+1, …
    …
    level N−2    x   y   …

column i hangs from spine token i, and attends to the spine up to there and to itself: a tree, shaped like a comb. The
lowest level's output is the next iteration, and each column with its output is an n-gram for the pool.

Until all levels are filled the window is wider: each step adds a level and drops the first column.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..sending import put, send
from ..step import fused
from ..step.nodes import NEVER, Nodes, Rows, chains, mix
from ..step.texts import Texts
from ..step.walking import Walk
from .base import Source
from .ngrams import NONE, Ngrams

# The probability of an n-gram whose key has 1, 2, 3, 4 or more tokens.
TRUST = (0.1, 0.2, 0.3, 0.5)
OLDER, DEEPER = 0.9, 0.7  # probability of each older n-gram, and of each deeper token, relative to the one before


class Settings(NamedTuple):
    """See `outpace.Lookahead`."""

    window: int
    ngram: int
    guesses: int
    longest_key: int
    recycle: bool
    published: bool
    read: bool  # whether the sequence's own n-grams enter the pool too


class Window(Source):
    """The window, and the pool of its n-grams."""

    names = ("window", "n-gram")
    asks_room = True

    def __init__(self, settings: Settings, lanes: int, device: torch.device) -> None:
        self.settings = settings
        self.levels = settings.ngram - 1
        self.columns = settings.window + settings.ngram - 2  # at the start
        self.deepest = max(self.columns - 1, settings.ngram - 1)
        self.probes = self.probes_of(settings.window, settings.ngram)
        self.nodes = self.probes + settings.guesses * (settings.ngram - 1)
        # [lanes, levels, columns]: the first entry of level 0 is the current token's, and is not read.
        self._window = torch.zeros(lanes, self.levels, self.columns, dtype=torch.long, device=device)
        self._filled = torch.ones(lanes, dtype=torch.long, device=device)  # levels
        self._drafted = torch.zeros(lanes, dtype=torch.bool, device=device)  # whether the window is in the draft
        self._pool = Ngrams(lanes, max(settings.ngram, 3), device)
        self.state = (self._window, self._filled, self._drafted, *self._pool.tensors)
        trust = [1.0, *(TRUST[min(key, len(TRUST)) - 1] for key in range(1, settings.longest_key + 1))]
        self._trust = torch.tensor(trust).log().to(device)  # [longest key + 1] log probability by key length
        self._column = torch.arange(self.columns, device=device)
        self._level = torch.arange(self.levels, device=device)[:, None]

    @staticmethod
    def probes_of(window: int, ngram: int) -> int:
        """The most rows that a window can have, being filled or full, without the current token."""
        return max((window + ngram - 2 - level) * (level + 1) - 1 for level in range(ngram - 1))

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        self._window[lane].zero_()
        spine = random.Random(seed).choices(tokens, k=self.columns - 1)
        put(spine, self._window[lane, 0, 1:])
        self._filled[lane].fill_(1)
        self._pool.clear(lane)
        ngram = self.settings.ngram
        if self.settings.read and len(tokens) >= ngram:
            self._pool.add(send(tokens, self._window.device).unfold(0, ngram, 1)[None], lane)

    def full(self, lanes: int) -> torch.Tensor:
        """[lanes] whether all levels are filled."""
        return self._filled[:lanes] == self.levels

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        kernels = fused.usable(texts.device)
        offers = [(self._fused_comb if kernels else self._comb)(texts.lanes, room)]
        if self.settings.guesses:
            offers.append((self._fused_guesses if kernels else self._guesses)(texts))
        return offers

    def _fused_comb(self, lanes: int, room: torch.Tensor) -> Nodes:
        about = {"sources": self.first, "probe": True, "accepted": not self.settings.published}
        return fused.comb(self._window, self._filled, self._drafted, room, **about)

    def _fused_guesses(self, texts: Texts) -> Nodes:
        settings = self.settings
        return fused.ngrams(
            texts,
            *self._pool.tensors,
            self._filled,
            self._trust,
            guesses=settings.guesses,
            longest=settings.longest_key,
            length=settings.ngram - 1,
            levels=self.levels,
            recycle=settings.recycle,
            unfilled=not settings.published,
            older=math.log(OLDER),
            deeper=math.log(DEEPER),
            source=self.first + 1,
        )

    def _comb(self, lanes: int, room: torch.Tensor) -> Nodes:
        """The window's rows, without the current token."""
        window, filled = self._window[:lanes], self._filled[:lanes, None, None]
        hashes = self._hashes(lanes)
        # A path follows the spine to its column, then the column.
        depth = torch.arange(self.columns, device=room.device)
        spine = hashes[:, :1].expand(-1, self.columns, -1)  # [lanes, columns, depth]
        level = (depth - self._column[:, None]).clamp(0, self.levels - 1)
        column = hashes.transpose(1, 2).gather(2, level.expand(lanes, -1, -1))
        paths = torch.where(depth <= self._column[:, None], spine, column)
        # No window near the end of the context.
        self._drafted[:lanes] = room >= self.columns - 1
        there = (self._level < filled) & (self._column <= self.columns - filled) & self._drafted[:lanes, None, None]
        there[:, 0, 0] = False  # the root

        def listed(values: torch.Tensor) -> torch.Tensor:
            """[lanes, nodes] from [lanes, levels, columns]: the spine, then column by column."""
            return torch.cat([values[:, 0], values[:, 1:].transpose(1, 2).flatten(1)], 1)

        depths = (self._level + self._column).clamp(max=self.columns - 1).expand(lanes, -1, -1)
        return Nodes(
            listed(window),
            listed(depths),
            torch.cat([paths, paths.repeat_interleave(self.levels - 1, 1)], 1),
            listed(torch.where(there, 0.0, NEVER)),
            self.first,
            probe=True,
            accepted=not self.settings.published,
        )

    def _hashes(self, lanes: int) -> torch.Tensor:
        """[lanes, levels, columns] hashes of the paths to all entries of the window."""
        added = mix(self._window[:lanes], self._level + self._column)
        added[:, 0, 0] = 0
        added[:, 0] = added[:, 0].cumsum(1)
        return added.cumsum(1)

    def _guesses(self, texts: Texts) -> Nodes:
        """N-grams of the pool that continue the sequence."""
        settings = self.settings
        longest, length = settings.longest_key, settings.ngram - 1
        back = torch.arange(longest - 1, -1, -1, device=texts.device)
        place = texts.lengths[:, None] - 1 - back
        ends = torch.where(place >= 0, texts.tokens.gather(1, place.clamp(min=0)), NONE - 1)[:, None]
        runs, keys = self._pool.after(ends, settings.guesses)
        runs, keys = runs[:, 0, :, :length], keys[:, 0]  # [lanes, guesses, length], [lanes, guesses]
        if settings.recycle:
            runs = self._prolonged(ends[:, 0], runs)
        first = self._trust[keys]
        rank, depth = torch.arange(keys.shape[1], device=texts.device), torch.arange(length, device=texts.device)
        chances = first[..., None] + rank[:, None] * math.log(OLDER) + depth * math.log(DEEPER)
        known = (runs != NONE).cumprod(-1).bool()
        if settings.published:
            known &= self.full(texts.lanes)[:, None, None]
        return chains(runs.clamp(min=0), chances.masked_fill(~known, NEVER), self.first + 1)

    def _prolonged(self, ends: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        """Continuations [lanes, guesses, length]; the pool prolongs those that are too short."""
        path = torch.cat([ends[:, None].expand(-1, runs.shape[1], -1), runs], 2)
        longest = ends.shape[1]
        for place in range(longest + 1, path.shape[2]):
            more, _ = self._pool.after(path[..., place - longest : place].contiguous(), 1)
            missing = (path[..., place] == NONE) & (path[..., place - 1] != NONE)
            path[..., place] = torch.where(missing, more[..., 0, 0], path[..., place])
        return path[..., longest:]

    def learn(self, texts: Texts, rows: Rows, best: torch.Tensor, walk: Walk, logits: torch.Tensor) -> None:
        settings, lanes = self.settings, texts.lanes
        if settings.read:
            self._pool.add(self._read(texts, walk))
        if fused.usable(texts.device):
            state = (self._window, self._filled, self._drafted, *self._pool.tensors)
            fused.look(*state, rows, best, settings.window, settings.recycle)
            return
        if settings.recycle:  # the model's output after every row, rejected ones too
            before = rows.tokens.gather(1, rows.parents)
            said = torch.stack([before, rows.tokens, best], 2)
            said[:, 0] = NONE
            self._pool.add(torch.where(rows.valid[..., None], said, NONE).flip(1))
        window, filled = self._window[:lanes], self._filled[:lanes]
        tips = self._hashes(lanes).gather(1, (filled - 1)[:, None, None].expand(-1, 1, self.columns))[:, 0]
        where = (rows.hashes[:, None, :] == tips[..., None]).int().argmax(2)  # [lanes, columns] their rows
        found = best.gather(1, where)
        drafted, full = self._drafted[:lanes], self.full(lanes)
        columns = window.clone()
        columns[:, 0, 0] = rows.tokens[:, 0]
        ngrams = torch.cat([columns, found[:, None]], 1).transpose(1, 2)  # [lanes, columns, ngram]
        whole = (full & drafted)[:, None] & (self._column < settings.window)
        self._pool.add(torch.where(whole[..., None], ngrams, NONE))
        # With all levels filled the oldest is dropped. Until then a level is added, and the first column is dropped.
        up = ngrams.transpose(1, 2)[:, 1:]
        more = torch.where(self._level == filled[:, None, None], found[:, None], window).roll(-1, 2)
        moved = torch.where(full[:, None, None], up, more)
        window.copy_(torch.where(drafted[:, None, None], moved, window))
        self._filled[:lanes] = torch.where(drafted & ~full, filled + 1, filled)

    def _read(self, texts: Texts, walk: Walk) -> torch.Tensor:
        """[lanes, new tokens, ngram] the sequence's n-grams that end with new tokens."""
        ngram, most = self.settings.ngram, walk.tokens.shape[1]
        new = torch.arange(most, device=texts.device)
        ends = texts.lengths[:, None] - walk.counts[:, None] + new  # positions of new tokens
        place = ends[..., None] - torch.arange(ngram - 1, -1, -1, device=texts.device)
        real = (new < walk.counts[:, None])[..., None] & (place[..., :1] >= 0)
        tokens = texts.tokens.gather(1, place.clamp(0, texts.tokens.shape[1] - 1).flatten(1)).view_as(place)
        return torch.where(real, tokens, NONE)
