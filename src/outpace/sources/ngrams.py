"""Lookahead Decoding's n-gram pool, as a ring buffer that is searched linearly."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..step.nodes import mix

NONE = -1  # no token
SIZE = 4096  # n-grams per lane


class Ngrams:
    """The newest n-grams of each lane. A lookup compares all of them, which costs a GPU nothing and a CPU little.

    >>> memory = Ngrams(1, 3, torch.device("cpu"))
    >>> memory.add(torch.tensor([[[7, 1, 1], [7, 2, 2], [5, 3, 3], [7, 1, 1]]]))
    >>> memory.after(torch.tensor([[[4, 7]]]), 3)[0].tolist()
    [[[[1, 1], [2, 2], [-1, -1]]]]
    """

    def __init__(self, lanes: int, width: int, device: torch.device, size: int = SIZE) -> None:
        """For n-grams of up to `width` tokens."""
        self.size = size
        self._runs = torch.full((lanes, size + 1, width), NONE, device=device)  # the last takes what is not an n-gram
        self._names = torch.zeros(lanes, size + 1, dtype=torch.long, device=device)  # hashes of the n-grams
        self._count = torch.zeros(lanes, dtype=torch.long, device=device)  # n-grams ever added

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[lanes, size + 1, width] the n-grams, their hashes (0: none), and [lanes] how many were ever added."""
        return self._runs, self._names, self._count

    def clear(self, lane: int) -> None:
        """Drop the n-grams of a lane."""
        self._runs[lane].fill_(NONE)
        self._count[lane].fill_(0)

    def add(self, ngrams: torch.Tensor, lane: int | None = None) -> None:
        """Add n-grams [lanes, count, up to width], newest last. Those that start with NONE are skipped.

        One that is in the pool already becomes the newest.
        With `lane`, n-grams of this lane alone [1, count, width].
        """
        ngrams = F.pad(ngrams[:, -self.size :], (0, self._runs.shape[2] - ngrams.shape[2]), value=NONE)
        lanes = slice(len(ngrams)) if lane is None else slice(lane, lane + 1)
        runs, known, count = self._runs[lanes], self._names[lanes], self._count[lanes]
        real = ngrams[..., 0] != NONE
        names = mix(ngrams, torch.arange(ngrams.shape[2], device=ngrams.device)).sum(2)
        later = ((names[:, :, None] == names[:, None, :]) & real[:, None, :]).triu(1)
        real &= ~later.any(2)
        # No hash is 0.
        new = torch.where(real, names, 0).sort(1).values
        at = torch.searchsorted(new, known).clamp(max=new.shape[1] - 1)
        again = (new.gather(1, at) == known) & (known != 0)
        runs.masked_fill_(again[..., None], NONE)
        place = (count[:, None] + real.cumsum(1) - 1) % self.size
        place = torch.where(real, place, self.size)
        runs.scatter_(1, place[..., None].expand_as(ngrams), ngrams)
        known.scatter_(1, place, names)
        count += real.sum(1)

    def after(self, ends: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows each end [lanes, ends, longest key]: [lanes, ends, most, width - 1] tokens, padded with NONE.

        Longest key first, then newest first; without duplicates. And [lanes, ends, most] the length of the key, 0 where
        there is none.
        """
        lanes, count, longest = ends.shape
        runs = self._runs[:lanes, None, : self.size]  # [lanes, 1, size, width]
        width = runs.shape[-1]
        newness = (torch.arange(self.size, device=ends.device) - self._count[:lanes, None]) % self.size
        columns = runs.transpose(2, 3).contiguous().unbind(2)  # [lanes, 1, size] each
        score = torch.zeros(lanes, count, self.size, dtype=torch.long, device=ends.device)
        for key in range(1, min(longest, width - 1) + 1):
            same = columns[key] != NONE
            for column, token in zip(columns, ends[..., longest - key :, None].unbind(2), strict=False):
                same = same & (column == token)
            score = torch.where(same, (newness + key * self.size)[:, None], score)
        # Keys of different lengths may have found the same continuation.
        wanted = min(most * min(longest, width - 1), self.size) if most > 1 else 1
        score, where = score.topk(wanted, 2) if wanted > 1 else score.max(2, keepdim=True)
        keys = score // self.size  # [lanes, ends, wanted]
        found = (
            runs[:, 0].gather(1, where.flatten(1)[..., None].expand(-1, -1, width)).view(lanes, count, wanted, width)
        )
        # The continuation starts after the key.
        shift = torch.arange(width - 1, device=ends.device) + keys[..., None]
        found = torch.where(shift < width, found.gather(3, shift.clamp(max=width - 1)), NONE)
        found = torch.where(keys[..., None] > 0, found, NONE)
        if wanted > 1:
            order = torch.arange(wanted, device=ends.device)
            same = (found[..., :, None, :] == found[..., None, :, :]).all(-1) & (order < order[:, None])
            new = (keys > 0) & ~same.any(-1)
            best = torch.where(new, wanted - order, 0).topk(min(most, wanted), 2).indices
            found = found.gather(2, best[..., None].expand(-1, -1, -1, width - 1))
            kept = new.gather(2, best)
            keys = torch.where(kept, keys.gather(2, best), 0)
            found = torch.where(kept[..., None], found, NONE)
        return found, keys
