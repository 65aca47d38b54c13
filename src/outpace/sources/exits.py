"""Early-exit heads as a source: the tokens that a head at a middle layer expects next, as a tree of a few levels."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F

from ..step.choosing import Choices
from ..step.nodes import NEVER, Nodes, Rows, mix
from ..step.texts import Texts
from .base import Climbing
from .heads import expected


class ExitGuesses(Climbing):
    """The top tokens after the sequence's last token, then the top tokens after the most likely of those, and so on.

    To draft after a row, the target's first layers compute it, in slots that the step's rows overwrite later.

    heads, layer: the exits, and the layer whose exit is used.
    widths: how many draft tokens follow the last token, then each draft token that is expanded.
    beam: how many draft tokens of a level are expanded.
    coupled: when sampling, rank draft tokens with the noise that the target will sample with.
    """

    def __init__(
        self,
        heads: Any,
        layer: int,
        ends: Any,
        widths: Sequence[int],
        beam: int,
        device: torch.device,
        coupled: bool = True,
    ) -> None:
        self.heads, self.layer, self.ends = heads, layer, ends
        self.widths, self.coupled = widths, coupled
        self.deepest = len(widths)
        self.names = tuple(f"exit {layer}, {depth} ahead" for depth in range(1, self.deepest + 1))
        self.followed = [1]  # rows of each level that are expanded
        for width in widths[:-1]:
            self.followed.append(min(beam, self.followed[-1] * width))
        self.asks = [*accumulate(self.followed)]
        levels = [count * width for count, width in zip(self.followed, widths, strict=True)]
        self.nodes = sum(levels)
        depths = [depth for depth, count in enumerate(levels, 1) for _ in range(count)]
        self._depths = torch.tensor(depths, device=device)

    @torch.inference_mode()
    def climbing(
        self, texts: Texts, room: torch.Tensor, choices: Choices, needs: frozenset[str]
    ) -> Generator[Rows, torch.Tensor, Nodes]:
        lanes, device = texts.lanes, texts.device
        none = torch.zeros(lanes, 1, dtype=torch.long, device=device)
        there = torch.ones(lanes, 1, dtype=torch.bool, device=device)
        rows = Rows(texts.roots()[:, None], none, none, there[..., None], there, there, none, none)
        worth, paths = torch.zeros(lanes, 1, device=device), none[..., None]  # of the newest rows
        levels: list[tuple[torch.Tensor, ...]] = []
        for depth, (count, width) in enumerate(zip(self.followed, self.widths, strict=True), 1):
            hidden = yield rows
            states = hidden[:, -count:].flatten(0, 1)
            logits = self.heads.probe(self.heads.layers.index(self.layer), states, self.ends).view(lanes, count, -1)
            ahead = (texts.lengths[:, None] + depth - 1).expand(-1, count)
            tokens, chances = expected(logits, width, self.coupled, ahead, texts, choices, needs)
            chances = worth[..., None] + chances
            chances = torch.where(chances > NEVER, chances, NEVER).flatten(1)  # an exit's output may be NaN
            hashes = paths[..., -1:] + mix(tokens, depth)
            paths = torch.cat([paths[:, :, None].expand(-1, -1, width, -1), hashes[..., None]], 3).flatten(1, 2)
            tokens = tokens.flatten(1)
            levels.append((tokens, F.pad(paths, (0, self.deepest - depth)), chances))
            if depth < self.deepest:
                worth, best = chances.topk(self.followed[depth], 1)
                paths = paths.gather(1, best[..., None].expand(-1, -1, depth + 1))
                parents = rows.tokens.shape[1] - count + best // width
                rows = _grown(rows, tokens.gather(1, best), parents, paths[..., -1], room >= depth, depth)
        found, ways, worths = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        depths = self._depths.expand(lanes, -1)
        return Nodes(found, depths, ways, worths, self.first + depths - 1)


def _grown(
    rows: Rows, tokens: torch.Tensor, parents: torch.Tensor, hashes: torch.Tensor, there: torch.Tensor, depth: int
) -> Rows:
    """The rows with one more level. In lanes that are not `there`, the level is padding."""
    new = tokens.shape[1]
    valid = there[:, None].expand(-1, new)
    above = rows.sees.gather(1, parents[..., None].expand(-1, -1, rows.sees.shape[2])) & valid[..., None]
    itself = torch.eye(new, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    valid = torch.cat([rows.valid, valid], 1)
    return Rows(
        torch.cat([rows.tokens, tokens], 1),
        torch.cat([rows.parents, parents], 1),
        F.pad(rows.depths, (0, new), value=depth) * valid,
        torch.cat([F.pad(rows.sees, (0, new)), torch.cat([above, itself], 2)], 1),
        valid,
        valid,
        F.pad(rows.sources, (0, new)),
        torch.cat([rows.hashes, hashes], 1),
    )
