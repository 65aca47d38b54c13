"""Lanes: the state of a batch of sequences in static buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sending import put


class Texts:
    """The sequences of some lanes, as sources read them. A sequence's last token is not computed yet: it is row 0."""

    def __init__(self, lanes: int, length: int, device: torch.device | str) -> None:
        """Sequences of up to `length` tokens each."""
        self.tokens = torch.zeros(lanes, length, dtype=torch.long, device=device)
        self.lengths = torch.zeros(lanes, dtype=torch.long, device=device)
        self.seeds = torch.zeros(lanes, dtype=torch.long, device=device)  # of the sampling

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self.lengths.device

    @property
    def state(self) -> list[torch.Tensor]:
        """All state, by lane."""
        return [self.tokens, self.lengths, self.seeds]

    def view(self, lanes: int, span: int) -> Texts:
        """A view of the first lanes and of their first `span` tokens; it shares all memory."""
        view = object.__new__(Texts)
        view.tokens, view.lengths, view.seeds = self.tokens[:lanes, :span], self.lengths[:lanes], self.seeds[:lanes]
        return view

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        """Start a sequence."""
        put(tokens, self.tokens[lane])
        self.lengths[lane].fill_(len(tokens))
        self.seeds[lane].fill_(signed(seed))

    def roots(self) -> torch.Tensor:
        """[lanes] the last token of each sequence."""
        return self.tokens.gather(1, (self.lengths - 1).clamp(min=0)[:, None])[:, 0]

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Append the first `counts` [lanes] of `tokens` [lanes, most] to the sequences."""
        place = torch.arange(tokens.shape[1], device=self.device)
        # What is not appended goes to the last index, which no sequence reaches.
        there = torch.where(place < counts[:, None], self.lengths[:, None] + place, self.tokens.shape[1] - 1)
        self.tokens.scatter_(1, there, tokens)
        self.lengths += counts


def signed(number: int) -> int:
    """The 64 lowest bits of a number, as a signed integer."""
    low = number & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
