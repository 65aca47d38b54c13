"""Attention of rows over lists of slots: what the dense mask computes, at a cost that follows what rows see.

All rows of a text see its computed part, so those keys are read once for a tile of rows (`_shared`). What a row sees
beyond, its own ancestors among the rows, is walked row by row, and the parts are put together (`_finish`).

Keys are walked in the order of positions, in blocks with borders at fixed positions, whatever slots they lie in and
whoever computed them. So with a constant number of rows, a row's result has the same bits in any tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU here: the operator has a dense form too
    triton = None


class SlotLists(NamedTuple):
    """What each row sees, as lists of slots in the order of positions. Stands where others have a mask."""

    text: torch.Tensor  # [slots] first come the slots of the text
    length: torch.Tensor  # [1] how many of them
    positions: torch.Tensor  # [rows]
    tails: torch.Tensor  # [rows, rows] the slots of positions `length` to the row's own
    span: int  # the text may grow to this length: as many programs are started
    window: int = 0  # how many positions back a row sees; 0: all


class Shape(NamedTuple):
    """How the kernels divide their work. Bits depend on it."""

    tile: int  # rows × query heads in a tile of `_shared`
    warps: int
    split: int  # positions that one program walks
    finish_warps: int


BLOCK = 64  # keys at a time
HEADS = 16  # query heads of one key head that `_finish` takes together


def shape_for(rows: int) -> Shape:
    """A division of work that is quick for so many rows."""
    return Shape(16, 4, 128, 4) if rows <= 2 else Shape(64, 4, 256, 4)


EXACT = Shape(32, 2, 256, 1)  # every warp works on 16 rows alone, in both kernels, so both compute a row alike


@torch.library.custom_op("outpace::slot_attention", mutates_args=())
def slot_attention(
    query: torch.Tensor,  # [1, heads, rows, size]
    keys: torch.Tensor,  # [1, key heads, slots, size]
    values: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    positions: torch.Tensor,
    tails: torch.Tensor,
    span: int,
    window: int,
    scaling: float,
    softcap: float,
    exact: bool,
) -> torch.Tensor:
    """[1, rows, heads, size]: see SlotLists for what rows see. `softcap` 0: none."""
    arguments = (query, keys, values, text, length, positions, tails, span, window, scaling, softcap)
    if query.device.type != "cuda" and not _interpreted():
        return _dense(*arguments)
    return _launch(*arguments, EXACT if exact else shape_for(query.shape[2]))


@slot_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _interpreted() -> bool:
    return triton is not None and bool(triton.knobs.runtime.interpret)


def _dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    positions: torch.Tensor,
    tails: torch.Tensor,
    span: int,
    window: int,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """The same with a dense mask over all slots: the oracle."""
    past, rows = int(length), len(positions)
    lists = torch.cat([text[:past].expand(rows, -1), tails], 1)  # [rows, past + rows] by position
    place = torch.arange(lists.shape[1], device=lists.device)
    seen = place <= positions[:, None]
    if window:
        seen &= positions[:, None] - place < window
    sees = torch.zeros(rows, keys.shape[2], dtype=torch.bool, device=lists.device)
    row, column = seen.nonzero(as_tuple=True)
    sees[row, lists[row, column]] = True
    groups = query.shape[1] // keys.shape[1]
    scores = query.float() @ keys.repeat_interleave(groups, 1).float().transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    mixed = weights @ values.repeat_interleave(groups, 1).float()
    return mixed.to(query.dtype).transpose(1, 2).contiguous()


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    positions: torch.Tensor,
    tails: torch.Tensor,
    span: int,
    window: int,
    scaling: float,
    softcap: float,
    shape: Shape,
) -> torch.Tensor:
    _, heads, rows, size = query.shape
    groups = heads // keys.shape[1]
    group = min(groups, HEADS)  # query heads in a tile
    units = keys.shape[1] * triton.cdiv(groups, group)  # groups of query heads that share keys
    row_tile = shape.tile // group
    splits = triton.cdiv(span, shape.split)
    sums = query.new_empty(splits, heads, rows, size, dtype=torch.float32)
    peaks = query.new_empty(2, splits, heads, rows, dtype=torch.float32)
    mixed = query.new_empty(1, rows, heads, size)
    padded = triton.next_power_of_2(size)
    common = {
        "SIZE": size,
        "PADDED": padded,
        "GROUPS": groups,
        "GROUP": group,
        "UNITS": triton.cdiv(groups, group),
        "SPLIT": shape.split,
        "BLOCK": BLOCK,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    strides = (query.stride(1), query.stride(2), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2))
    factor = scaling * 1.4426950408889634  # scores in powers of two
    _shared[(triton.cdiv(rows, row_tile), units, splits)](
        *(query, keys, values, text, length, positions, sums, peaks, *strides),
        *(rows, heads, splits, factor),
        TILE=shape.tile,
        **common,
        num_warps=shape.warps,
    )
    _finish[(rows, units)](
        *(query, keys, values, text, length, positions, tails, tails.stride(0), sums, peaks, mixed, *strides),
        *(rows, heads, splits, factor),
        TILE=HEADS,
        **common,
        num_warps=shape.finish_warps,
    )
    return mixed


if triton is not None:

    @triton.jit
    def _scores(query, key, factor, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
        scores = tl.dot(query, key, input_precision=PRECISION) * factor
        if SOFTCAP > 0:
            cap: tl.constexpr = SOFTCAP * 1.4426950408889634
            ratio = tl.exp2(-2 * 1.4426950408889634 * tl.abs(scores / cap))
            tanh = (1 - ratio) / (1 + ratio)
            scores = tl.where(scores < 0, -tanh, tanh) * cap
        return scores

    @triton.jit
    def _add(scores, value, sees, peak, weight, total, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
        """One block of keys more, in a running softmax."""
        scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        weight = weight * fade + tl.sum(shares, 1)
        total = total * fade[:, None]
        total = tl.dot(shares.to(value.dtype), value, total, input_precision=PRECISION)
        return higher, weight, total

    @triton.jit
    def _merge(peak, weight, total, other_peak, other_weight, other_total):  # type: ignore[no-untyped-def]
        """Two softmaxes over different keys as one."""
        higher = tl.maximum(peak, other_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mine, other = tl.exp2(peak - base), tl.exp2(other_peak - base)
        return higher, weight * mine + other_weight * other, total * mine[:, None] + other_total * other[:, None]

    @triton.jit
    def _shared(  # type: ignore[no-untyped-def]
        query, keys, values, text, length, positions, sums, peaks,
        query_head, query_row, key_head, key_slot, value_head, value_slot,
        rows, heads, splits, factor,
        TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
        UNITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """A tile of rows over one split of the text's whole blocks."""
        unit, split = tl.program_id(1), tl.program_id(2)
        start = split * SPLIT
        stop = tl.minimum(tl.load(length) // BLOCK * BLOCK, start + SPLIT)
        if start >= stop:
            return
        place = tl.arange(0, TILE)
        row = tl.program_id(0) * (TILE // GROUP) + place // GROUP
        within = unit % UNITS * GROUP + place % GROUP
        real = (row < rows) & (place // GROUP < TILE // GROUP) & (within < GROUPS)
        head = unit // UNITS * GROUPS + within
        part = tl.arange(0, PADDED)
        q = tl.load(
            query + head[:, None] * query_head + row[:, None] * query_row + part[None, :],
            mask=real[:, None] & (part < SIZE)[None, :],
            other=0.0,
        )
        at = tl.load(positions + row, mask=real, other=0)
        if WINDOW > 0:
            first = tl.min(tl.where(real, at, 1 << 30)) - WINDOW + 1
            start = tl.maximum(start, first // BLOCK * BLOCK)
        peak = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, PADDED], tl.float32)
        key_base = keys + unit // UNITS * key_head
        value_base = values + unit // UNITS * value_head
        for block in range(start, stop, BLOCK):
            position = block + tl.arange(0, BLOCK)
            slot = tl.load(text + position)
            key = tl.load(key_base + slot[None, :] * key_slot + part[:, None], mask=(part < SIZE)[:, None], other=0.0)
            value = tl.load(
                value_base + slot[:, None] * value_slot + part[None, :], mask=(part < SIZE)[None, :], other=0.0
            )
            scores = _scores(q, key, factor, SOFTCAP, PRECISION)
            sees = real[:, None] & (position[None, :] >= 0)
            if WINDOW > 0:
                sees = sees & (at[:, None] - position[None, :] < WINDOW)
            peak, weight, total = _add(scores, value, sees, peak, weight, total, PRECISION)
        place = (split * heads + head) * rows + row
        tl.store(peaks + place, peak, mask=real)
        tl.store(peaks + splits * heads * rows + place, weight, mask=real)
        tl.store(sums + place[:, None] * SIZE + part[None, :], total, mask=real[:, None] & (part < SIZE)[None, :])

    @triton.jit
    def _finish(  # type: ignore[no-untyped-def]
        query, keys, values, text, length, positions, tails, tail_row, sums, peaks, mixed,
        query_head, query_row, key_head, key_slot, value_head, value_slot,
        rows, heads, splits, factor,
        TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
        UNITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One row: the splits before, then the blocks from the text's last border to the row itself."""
        row, unit = tl.program_id(0), tl.program_id(1)
        place = tl.arange(0, TILE)
        within = unit % UNITS * GROUP + place
        real = (place < GROUP) & (within < GROUPS)
        head = unit // UNITS * GROUPS + within
        part = tl.arange(0, PADDED)
        inside = real[:, None] & (part < SIZE)[None, :]
        q = tl.load(query + head[:, None] * query_head + row * query_row + part[None, :], mask=inside, other=0.0)
        at = tl.load(positions + row)
        past = tl.load(length)
        border = past // BLOCK * BLOCK
        # What the other kernel left: whole splits, then the beginning of the one that the border is in.
        peak = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, PADDED], tl.float32)
        last = border // SPLIT
        first = 0
        if WINDOW > 0:
            first = tl.maximum(at - WINDOW + 1, 0) // SPLIT
        for split in range(first, last):
            stored = (split * heads + head) * rows + row
            other = tl.load(peaks + stored, mask=real, other=float("-inf"))
            other_weight = tl.load(peaks + splits * heads * rows + stored, mask=real, other=0.0)
            other_total = tl.load(sums + stored[:, None] * SIZE + part[None, :], mask=inside, other=0.0)
            peak, weight, total = _merge(peak, weight, total, other, other_weight, other_total)
        open_peak = tl.full([TILE], float("-inf"), tl.float32)
        open_weight = tl.zeros([TILE], tl.float32)
        open_total = tl.zeros([TILE, PADDED], tl.float32)
        if last * SPLIT < border:
            stored = (last * heads + head) * rows + row
            open_peak = tl.load(peaks + stored, mask=real, other=float("-inf"))
            open_weight = tl.load(peaks + splits * heads * rows + stored, mask=real, other=0.0)
            open_total = tl.load(sums + stored[:, None] * SIZE + part[None, :], mask=inside, other=0.0)
        key_base = keys + unit // UNITS * key_head
        value_base = values + unit // UNITS * value_head
        for block in range(border, at + 1, BLOCK):
            if (block % SPLIT == 0) & (block > border):
                peak, weight, total = _merge(peak, weight, total, open_peak, open_weight, open_total)
                open_peak = tl.full([TILE], float("-inf"), tl.float32)
                open_weight = tl.zeros([TILE], tl.float32)
                open_total = tl.zeros([TILE, PADDED], tl.float32)
            position = block + tl.arange(0, BLOCK)
            known = position < past
            there = position <= at
            slot = tl.load(text + position, mask=known, other=0)
            slot += tl.load(tails + row * tail_row + position - past, mask=there & (position >= past), other=0)
            key = tl.load(
                key_base + slot[None, :] * key_slot + part[:, None],
                mask=(part < SIZE)[:, None] & there[None, :],
                other=0.0,
            )
            value = tl.load(
                value_base + slot[:, None] * value_slot + part[None, :],
                mask=there[:, None] & (part < SIZE)[None, :],
                other=0.0,
            )
            scores = _scores(q, key, factor, SOFTCAP, PRECISION)
            sees = real[:, None] & there[None, :]
            if WINDOW > 0:
                sees = sees & (at - position[None, :] < WINDOW)
            open_peak, open_weight, open_total = _add(
                scores, value, sees, open_peak, open_weight, open_total, PRECISION
            )
        peak, weight, total = _merge(peak, weight, total, open_peak, open_weight, open_total)
        total = total / tl.where(real, weight, 1.0)[:, None]
        tl.store(mixed + (row * heads + head[:, None]) * SIZE + part[None, :], total, mask=inside)
