"""Verification of a batch: down each lane's draft tree with the target's own choices."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .nodes import Rows


class Walk(NamedTuple):
    """The accepted path of each lane."""

    rows: torch.Tensor  # [lanes, deepest + 1] the accepted rows, row 0 first; beyond them, 0
    tokens: torch.Tensor  # [lanes, deepest + 1] what the target chose after each of them
    counts: torch.Tensor  # [lanes] how many


def walk(rows: Rows, picks: torch.Tensor, deepest: int) -> Walk:
    """A row is accepted if its token is the target's choice after its parent, and its parent is accepted.

    `picks` [lanes, rows] are those choices. Siblings have different tokens, so there is one accepted path.
    """
    wrong = (rows.tokens != picks.gather(1, rows.parents)) | ~rows.accepted
    wrong[:, 0] = False
    holds = ~(rows.sees & wrong[:, None, :]).any(2) & rows.valid
    last = torch.where(holds, rows.depths + 1, 0).argmax(1)  # the deepest accepted row
    seen = rows.sees.gather(1, last[:, None, None].expand(-1, 1, rows.sees.shape[2]))[:, 0]  # [lanes, rows] the path
    depth = torch.arange(deepest + 1, device=last.device)
    at = seen[:, None, :] & (rows.depths[:, None, :] == depth[:, None])  # [lanes, depth, rows]
    path = at.int().argmax(2)
    counts = rows.depths.gather(1, last[:, None])[:, 0] + 1
    return Walk(path * (depth < counts[:, None]), picks.gather(1, path), counts)
