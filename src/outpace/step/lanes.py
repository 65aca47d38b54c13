"""Lanes with their KV slots: a step keeps the accepted ones without the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ..sending import put
from .nodes import Rows
from .texts import Texts
from .walking import Walk


class Lanes(Texts):
    """A lane's slots are in the order of positions: first those of computed tokens, then spare ones.

    A step's rows take the first spare slots. Keeping a path moves its slots to the front of those, so the lane has the
    same slots as before, in another order.
    """

    def __init__(self, lanes: int, length: int, device: torch.device | str) -> None:
        super().__init__(lanes, length, device)
        self.slots = torch.zeros(lanes, length, dtype=torch.long, device=device)
        self.limits = torch.zeros(lanes, dtype=torch.long, device=device)  # the length at which a lane becomes idle

    @property
    def state(self) -> list[torch.Tensor]:
        return [*super().state, self.slots, self.limits]

    def view(self, lanes: int, span: int) -> Lanes:
        view = object.__new__(Lanes)
        view.__dict__.update(super().view(lanes, span).__dict__)
        view.slots, view.limits = self.slots[:lanes], self.limits[:lanes]
        return view

    def place(self, lane: int, slots: Sequence[int], limit: int) -> None:
        """Give a lane its slots, and let its sequence grow to `limit` tokens."""
        put(slots, self.slots[lane])
        self.limits[lane].fill_(limit)

    def active(self) -> torch.Tensor:
        """[lanes] whether the lane's sequence may still grow."""
        return self.lengths < self.limits

    def slots_for(self, rows: Rows, scratch: int) -> torch.Tensor:
        """[lanes, rows] the slots that rows write; padding rows and idle lanes write to `scratch`."""
        place = (self.lengths - 1).clamp(min=0)[:, None] + torch.arange(rows.tokens.shape[1], device=self.device)
        there = rows.valid & self.active()[:, None]
        return torch.where(there, self.slots.gather(1, place), scratch)

    def keep(self, rows: Rows, walk: Walk) -> Walk:
        """Append the accepted tokens and their slots to the sequences. Returns what was kept.

        That is less than was accepted where a sequence reaches its limit.
        """
        counts = torch.minimum(walk.counts, (self.limits - self.lengths).clamp(min=0))
        count = rows.tokens.shape[1]
        row = torch.arange(count, device=self.device)
        depth = torch.arange(walk.rows.shape[1], device=self.device)
        on_path = (walk.rows[:, None, :] == row[:, None]) & (depth < counts[:, None])[:, None, :]
        kept = on_path.any(2)  # [lanes, rows]
        behind = counts[:, None] + (~kept).cumsum(1) - 1  # where the others go
        place = torch.where(kept, rows.depths, behind)
        start = (self.lengths - 1).clamp(min=0)[:, None]
        window = self.slots.gather(1, start + row)
        self.slots.scatter_(1, start + place, window)
        self.append(walk.tokens, counts)
        return Walk(walk.rows, walk.tokens, counts)


def pack(sees: torch.Tensor) -> torch.Tensor:
    """[..., rows, words] of 64 bits from [..., rows, rows]."""
    count = sees.shape[-1]
    padded = F.pad(sees, (0, -count % 64)).view(*sees.shape[:-1], -1, 64).long()
    return (padded << torch.arange(64, device=sees.device)).sum(-1)
