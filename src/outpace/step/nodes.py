"""Nodes offered by sources, merged into one draft tree.

A node is a path of tokens below a sequence's last token, identified by a hash of the path, so two sources that propose
the same path propose the same node. Sources offer nodes with probabilities; the most likely become the rows of a step.

Everything works on a batch of lanes, has fixed shapes, and needs nothing from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .chances import CUTS, EXPECTED, FREE, HALVING, KNOTS, LOWEST, SOURCES

NEVER = -torch.inf
MUST = 1e4  # larger than any log probability in size
DEEPER = 2.0**-12  # subtracted per depth, so that a child ranks below its parent
LATER = 2.0**-8  # the same for probes, by their order


class Nodes(NamedTuple):
    """The nodes of one source, for each lane. The parent of a node is a node too, or the root."""

    tokens: torch.Tensor  # [lanes, nodes]
    depths: torch.Tensor  # [lanes, nodes] from 1
    paths: torch.Tensor  # [lanes, nodes, deepest + 1] hash of the path down to each depth; arbitrary beyond the node
    chances: torch.Tensor  # [lanes, nodes] log probability that the whole path is accepted; NEVER: no such node
    sources: int | torch.Tensor  # the source: one for all, or [lanes, nodes]
    probe: bool = False  # whether the nodes must be computed, however unlikely
    accepted: bool = True  # whether they may be accepted
    costly: bool = False  # whether the source itself takes time


class Rows(NamedTuple):
    """A draft tree for each lane. Row 0 is the sequence's last token; parents come before their children."""

    tokens: torch.Tensor  # [lanes, rows]
    parents: torch.Tensor  # [lanes, rows] 0 for row 0 and for padding rows too
    depths: torch.Tensor  # [lanes, rows]
    sees: torch.Tensor  # [lanes, rows, rows] whether the other row is the row itself or an ancestor
    valid: torch.Tensor  # [lanes, rows] False: padding
    accepted: torch.Tensor  # [lanes, rows] whether the row may be accepted
    sources: torch.Tensor  # [lanes, rows]
    hashes: torch.Tensor  # [lanes, rows] of the paths
    words: torch.Tensor | None = None  # [lanes, rows, words] `sees` as bits, if made by a kernel
    expected: torch.Tensor | None = None  # [lanes, EXPECTED] if acceptance is learnt: see `plant`


def mix(tokens: torch.Tensor, depths: torch.Tensor | int) -> torch.Tensor:
    """The contribution of a token at this depth to its path's hash. Products wrap around."""
    mixed = tokens * 0x1E3779B97F4A7C15 + depths * 0x1B873593
    mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
    return mixed ^ (mixed >> 29)


def chains(tokens: torch.Tensor, chances: torch.Tensor, source: int) -> Nodes:
    """Nodes from paths [lanes, paths, depth] below the root, each with the log probability of the path so far."""
    lanes, paths, deepest = tokens.shape
    depths = torch.arange(1, deepest + 1, device=tokens.device)
    hashes = F.pad(mix(tokens, depths).cumsum(-1), (1, 0))
    return Nodes(
        tokens.flatten(1),
        depths.repeat(paths).expand(lanes, -1),
        hashes[:, :, None].expand(-1, -1, deepest, -1).flatten(1, 2),
        chances.flatten(1),
        source,
    )


def plant(
    roots: torch.Tensor,
    offers: Sequence[Nodes],
    most: int,
    room: torch.Tensor,
    gate: float = 0.0,
    prices: torch.Tensor | None = None,
    rows: int | None = None,
    table: torch.Tensor | None = None,
) -> Rows:
    """Draft trees of the most likely nodes: `most` rows, at most `room` [lanes] deep, below `roots` [lanes].

    Candidates come first, the most likely ahead; then probes, in the order offered, which are always taken. The same
    path from two sources is one row, with the higher probability. A lane where no node reaches the probability `gate`
    gets no candidates. With `prices` [most or more] of steps by rows, as many are taken as maximize expected tokens per
    cost. The tree is padded to `rows`, if given.

    With a `table` of `Chances`, probabilities are corrected by it. `Rows.sources` then also has the knot of the
    source's own estimate (SOURCES times the knot is added), and FREE if a source that is not costly offers the same
    path. `Rows.expected` has the expected tokens of trees of CUTS rows, from all nodes, then from sources that are not
    costly; and last, how many of the latter's rows in the tree are expected to be accepted.
    """
    rows = rows or most
    device = roots.device
    count = sum(offer.tokens.shape[1] for offer in offers)
    if not count or most == 1:
        return _bare(roots, rows, table is not None)
    deepest = max(offer.paths.shape[2] for offer in offers)
    tokens = torch.cat([offer.tokens for offer in offers], 1)
    depths = torch.cat([offer.depths for offer in offers], 1)
    paths = torch.cat([F.pad(offer.paths, (0, deepest - offer.paths.shape[2])) for offer in offers], 1)
    chances = torch.cat([offer.chances for offer in offers], 1)
    sizes = [offer.tokens.shape[1] for offer in offers]
    sources = torch.cat([whole(offer.sources, offer.tokens) for offer in offers], 1)
    probes = _marks([offer.probe for offer in offers], sizes, device)
    probing = any(offer.probe for offer in offers)

    chances = chances.masked_fill(depths > room[:, None], NEVER)
    if table is not None:
        said, chances = chances, torch.where(probes, chances, believed(chances, sources, table))
        sources = sources + SOURCES * knots_of(said)
    if gate > 0:
        best = chances.masked_fill(probes, NEVER).amax(1, keepdim=True)
        chances = torch.where(probes | (best >= log(gate)), chances, NEVER)
    keys = depths * -DEEPER
    if probing:
        keys = torch.where(probes, MUST - torch.arange(count, device=device) * LATER, keys)
    keys, order = (chances + keys).sort(dim=1, descending=True, stable=True)
    # Of nodes with the same path the first remains.
    hashes = paths.gather(2, depths[..., None])[..., 0]
    ranked = hashes.gather(1, order)
    same = ranked[:, :, None] == ranked[:, None, :]
    there = keys > NEVER

    def common(marks: torch.Tensor) -> torch.Tensor:
        """[lanes, nodes] whether some node with the same path has the mark."""
        found = (same & (marks[order] & there)[:, None, :]).any(2)
        return torch.empty_like(found).scatter_(1, order, found)

    if table is not None:
        free = _marks([not offer.costly for offer in offers], sizes, device)
        sources = sources + FREE * common(free)
        hopes = [_hopes(keys, same, free[order] | costly) for costly in (True, False)]
    keys, left = keys.masked_fill(same.tril(-1).any(2), NEVER).sort(dim=1, descending=True, stable=True)
    keys, taken = keys[:, : most - 1], order.gather(1, left[:, : most - 1])
    if probing:  # candidates first, including those that are also probes
        first = common(~probes).gather(1, taken) & (keys > NEVER)
        front = first.int().argsort(dim=1, descending=True, stable=True)
        keys, taken = keys.gather(1, front), taken.gather(1, front)
    taken = F.pad(taken, (0, rows - 1 - taken.shape[1]))
    keys = F.pad(keys, (1, rows - 1 - keys.shape[1]), value=NEVER)  # row 0 is not a node
    valid = keys > NEVER
    if prices is not None:
        likely = torch.where(valid & (keys < MUST / 2), (keys.clamp(max=0)).exp(), 0.0)
        worth = (1.0 + likely.cumsum(1))[:, :most] / prices[:most]
        valid &= (torch.arange(rows, device=device) <= worth.argmax(1, keepdim=True)) | (keys >= MUST / 2)
        if probing:  # they move up where candidates were dropped
            front = valid[:, 1:].int().argsort(dim=1, descending=True, stable=True)
            taken, valid[:, 1:] = taken.gather(1, front), valid[:, 1:].gather(1, front)
    valid[:, 0] = True

    of_nodes = torch.stack([tokens, depths, hashes, sources], 1)
    of_rows = F.pad(of_nodes.gather(2, taken[:, None].expand(-1, 4, -1)), (1, 0))
    of_rows[:, 0, 0] = roots
    tokens, depths, hashes, sources = (of_rows * valid[:, None]).unbind(1)
    ways = F.pad(paths.gather(1, taken[..., None].expand(-1, -1, deepest)), (0, 0, 1, 0))  # [lanes, rows, deepest]
    above = ways.gather(2, (depths - 1).clamp(min=0)[..., None])  # the hash of the parent
    known = torch.where(valid, hashes, 1)  # padding rows have no children
    parents = (above == known[:, None, :]).int().argmax(2) * (depths > 0)
    at = depths[:, None, :].expand(-1, rows, -1)
    sees = (ways.gather(2, at) == known[:, None, :]) & (at <= depths[..., None]) & valid[..., None]
    sees |= torch.eye(rows, dtype=torch.bool, device=device)
    accepted = valid
    if not all(offer.accepted for offer in offers):
        accepted = common(_marks([offer.accepted for offer in offers], sizes, device)).gather(1, taken)
        accepted = F.pad(accepted, (1, 0), value=True) & valid
    expected = None
    if table is not None:
        inside = (ranked[:, :, None] == known[:, None, 1:]).any(2)
        expected = torch.cat([*map(_brings, hopes), (hopes[1] * inside).sum(1, keepdim=True)], 1)
    return Rows(tokens, parents, depths, sees, valid, accepted, sources, hashes, expected=expected)


def _hopes(keys: torch.Tensor, same: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
    """[lanes, nodes] probabilities of `some` nodes, by decreasing key; of nodes with the `same` path one counts."""
    again = (same & some[:, None, :]).tril(-1).any(2)
    guesses = some & ~again & (keys < MUST / 2)
    return torch.where(guesses, keys.clamp(max=0).exp(), 0.0)


def _brings(hopes: torch.Tensor) -> torch.Tensor:
    """[lanes, CUTS] expected tokens of trees of the most likely nodes."""
    total = F.pad(hopes.sort(dim=1, descending=True).values.cumsum(1), (1, 0))
    return 1.0 + torch.stack([total[:, min(cut - 1, hopes.shape[1])] for cut in CUTS], 1)


def _bare(roots: torch.Tensor, rows: int, learned: bool) -> Rows:
    """Trees without draft tokens."""
    lanes, device = len(roots), roots.device
    none = torch.zeros(lanes, rows, dtype=torch.long, device=device)
    first = F.pad(torch.ones(lanes, 1, dtype=torch.bool, device=device), (0, rows - 1))
    sees = torch.eye(rows, dtype=torch.bool, device=device).expand(lanes, -1, -1)
    expected = torch.ones(lanes, EXPECTED, device=device) if learned else None
    return Rows(F.pad(roots[:, None], (0, rows - 1)), none, none, sees, first, first, none, none, expected=expected)


def whole(sources: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[lanes, nodes] the source of each node."""
    return sources if isinstance(sources, torch.Tensor) else torch.full_like(like, sources)


def _marks(values: Sequence[bool], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """[nodes] a value of each offer, for its nodes."""
    return torch.cat([torch.full((size,), value, device=device) for value, size in zip(values, sizes, strict=True)])


def knots_of(chances: torch.Tensor) -> torch.Tensor:
    """The knots nearest to log probabilities."""
    return (_places(chances) + 0.5).long()


def believed(chances: torch.Tensor, sources: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Log probabilities [lanes, nodes] of these sources, corrected by a table of `Chances`."""
    place = _places(chances)
    left = place.long().clamp(max=KNOTS - 2)
    at = sources * KNOTS + left
    curve = table.flatten()
    low, high = curve[at], curve[at + 1]
    found = low + (high - low) * (place - left) + (chances - LOWEST).clamp(max=0.0)
    return torch.where(chances > NEVER, found, NEVER)


def _places(chances: torch.Tensor) -> torch.Tensor:
    """The place on the curve, from 0 to its last knot."""
    return (chances * (-HALVING / log(2.0))).clamp(0.0, KNOTS - 1.0)
