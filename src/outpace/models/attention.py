"""Attention of rows over lists of slots: what the dense mask computes, at a cost that follows what rows see.

All rows of a text see its computed part, so those keys are read once for a tile of rows (`_part`), in splits that run side
by side. What rows see of each other is one split more, with a mask of bits; `_merge` puts the splits together.

In exact mode a row's result must have the same bits whatever tree it is in. Then keys are walked in the order of
positions, in blocks with borders at fixed positions, whatever slots they lie in: `_part` does the text's whole blocks, and
`_finish` goes on from there, row by row, down the row's own ancestors.
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
    slots: torch.Tensor  # [rows]
    tree: torch.Tensor  # [rows, rows / 64] a bit for each other row that the row sees; exact: see `exact`
    span: int  # the text may grow to this length: as many programs are started
    exact: bool = False  # a row's bits are the same in any tree; `tree` [rows, depth] then lists slots from `length` on
    window: int = 0  # how many positions back a row sees; 0: all


class Shape(NamedTuple):
    """How `_part` divides its work."""

    tile: int  # rows × query heads
    warps: int
    split: int  # positions that one program walks


BLOCK = 64  # keys at a time
HEADS = 16  # the most query heads of one key head in a tile
CHUNK = 16  # splits that are merged at a time


def shape_for(rows: int, span: int, exact: bool) -> Shape:
    """A division of work that is quick for so many rows and a text up to `span`: about twenty splits of it.

    In exact mode bits depend on it, so it depends on nothing but the number of rows, which is constant there.
    """
    if exact:
        return Shape(64 if rows >= 16 else 16, 4, 256)
    if rows <= 4:
        return Shape(16, 4, max(64, span // 16))
    return Shape(64 if rows > 8 else 32, 4, max(128 if rows <= 64 else 256, span // 16))


@torch.library.custom_op("outpace::slot_attention", mutates_args=())
def slot_attention(
    query: torch.Tensor,  # [1, heads, rows, size]
    keys: torch.Tensor,  # [1, key heads, slots, size]
    values: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tree: torch.Tensor,
    span: int,
    exact: bool,
    window: int,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """[1, rows, heads, size]: see SlotLists for what rows see. `softcap` 0: none."""
    lists = SlotLists(text, length, positions, slots, tree, span, exact, window)
    if query.device.type != "cuda" and not _interpreted():
        return _dense(query, keys, values, lists, scaling, softcap)
    return _launch(query, keys, values, lists, scaling, softcap)


@slot_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _interpreted() -> bool:
    return triton is not None and bool(triton.knobs.runtime.interpret)


def _dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lists: SlotLists, scaling: float, softcap: float
) -> torch.Tensor:
    """The same with a dense mask over all slots: the oracle."""
    sees = torch.zeros(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
    past, at = int(lists.length), lists.positions[:, None]
    place = torch.arange(past, device=query.device)
    sees[:, lists.text[:past]] = at - place < lists.window if lists.window else True
    if lists.exact:
        place = torch.arange(past, past + lists.tree.shape[1], device=query.device)
        seen, other = place <= at, lists.tree
    else:
        row = torch.arange(query.shape[2], device=query.device)
        seen = (lists.tree[:, row // 64] >> (row % 64) & 1).bool()
        place, other = lists.positions, lists.slots.expand_as(seen)
    if lists.window:
        seen = seen & (at - place < lists.window)
    row, column = seen.nonzero(as_tuple=True)
    sees[row, other[row, column]] = True
    groups = query.shape[1] // keys.shape[1]
    exactly = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exactly) @ keys.repeat_interleave(groups, 1).to(exactly).transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    mixed = weights @ values.repeat_interleave(groups, 1).to(exactly)
    return mixed.to(query.dtype).transpose(1, 2).contiguous()


def _launch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lists: SlotLists, scaling: float, softcap: float
) -> torch.Tensor:
    _, heads, rows, size = query.shape
    groups = heads // keys.shape[1]
    group = min(groups, HEADS)  # query heads in a tile
    units = keys.shape[1] * triton.cdiv(groups, group)  # groups of query heads that share keys
    shape = shape_for(rows, lists.span, lists.exact)
    text_splits = triton.cdiv(lists.span, shape.split)
    splits = text_splits + (0 if lists.exact else triton.cdiv(rows, shape.split))
    sums = query.new_empty(splits, rows, heads, size, dtype=torch.float32)
    peaks = query.new_empty(2, splits, rows, heads, dtype=torch.float32)
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
        "WINDOW": lists.window,
        "SOFTCAP": softcap,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    strides = (query.stride(1), query.stride(2), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2))
    factor = scaling * LOG2_E  # scores in powers of two
    _part[(triton.cdiv(rows, shape.tile // group), units, splits)](
        *(query, keys, values, lists.text, lists.length, lists.positions, lists.slots, lists.tree),
        *(lists.tree.stride(0), sums, peaks, *strides, rows, heads, splits, text_splits, factor),
        TILE=shape.tile,
        EXACT=lists.exact,
        **common,
        num_warps=shape.warps,
    )
    if lists.exact:
        _finish[(rows, units)](
            *(query, keys, values, lists.text, lists.length, lists.positions, lists.tree, lists.tree.stride(0)),
            *(sums, peaks, mixed, *strides, rows, heads, splits, factor),
            TILE=HEADS,
            CHUNK=4,
            **common,
            num_warps=shape.warps,
        )
    else:
        _merge[(rows, heads)](
            *(lists.length, sums, peaks, mixed, rows, heads, splits, text_splits),
            SIZE=size,
            PADDED=padded,
            SPLIT=shape.split,
            CHUNK=CHUNK,
            num_warps=4,
        )
    return mixed


LOG2_E = 1.4426950408889634


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
    def _both(peak, weight, total, other_peak, other_weight, other_total):  # type: ignore[no-untyped-def]
        """Two softmaxes over different keys as one."""
        higher = tl.maximum(peak, other_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mine, other = tl.exp2(peak - base), tl.exp2(other_peak - base)
        return higher, weight * mine + other_weight * other, total * mine[:, None] + other_total * other[:, None]

    @triton.jit
    def _part(  # type: ignore[no-untyped-def]
        query, keys, values, text, length, positions, slots, tree, tree_row, sums, peaks,
        query_head, query_row, key_head, key_slot, value_head, value_slot,
        rows, heads, splits, text_splits, factor,
        TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
        UNITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
        PRECISION: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """A tile of rows over one split: of the text, or (from `text_splits` on) of the rows themselves."""
        unit, split = tl.program_id(1), tl.program_id(2)
        past = tl.load(length)
        among = split >= text_splits
        if among:
            start = ((split - text_splits) * SPLIT).to(tl.int64)
            stop = tl.minimum(rows, start + SPLIT)
        else:
            start = (split * SPLIT).to(tl.int64)
            if EXACT:
                past = past // BLOCK * BLOCK
            stop = tl.minimum(past, start + SPLIT)
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
            if not among:
                first = tl.min(tl.where(real, at, 1 << 30)) - WINDOW + 1
                start = tl.maximum(start, first // BLOCK * BLOCK)
        peak = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, PADDED], tl.float32)
        key_base = keys + unit // UNITS * key_head
        value_base = values + unit // UNITS * value_head
        for block in range(start, stop, BLOCK):
            index = block + tl.arange(0, BLOCK)
            there = index < stop
            slot = tl.load((slots if among else text) + index, mask=there, other=0)
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
            position = index
            if among:
                word = tl.load(tree + row * tree_row + block // 64, mask=real, other=0)
                sees = sees & (((word[:, None] >> (index % 64)[None, :]) & 1) != 0)
                if WINDOW > 0:
                    position = tl.load(positions + index, mask=there, other=0)
            if WINDOW > 0:
                sees = sees & (at[:, None] - position[None, :] < WINDOW)
            peak, weight, total = _add(scores, value, sees, peak, weight, total, PRECISION)
        stored = (split * rows + row) * heads + head
        tl.store(peaks + stored, peak, mask=real)
        tl.store(peaks + splits * rows * heads + stored, weight, mask=real)
        tl.store(sums + stored[:, None] * SIZE + part[None, :], total, mask=real[:, None] & (part < SIZE)[None, :])

    @triton.jit
    def _merge(  # type: ignore[no-untyped-def]
        length, sums, peaks, mixed, rows, heads, splits, text_splits,
        SIZE: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
    ):  # fmt: skip
        """One row and head: all its splits as one softmax."""
        row, head = tl.program_id(0), tl.program_id(1)
        used = (tl.load(length) + SPLIT - 1) // SPLIT
        part = tl.arange(0, PADDED)
        peak = float("-inf")
        weight = 0.0
        total = tl.zeros([PADDED], tl.float32)
        for chunk in range(0, used + splits - text_splits, CHUNK):
            index = chunk + tl.arange(0, CHUNK)
            there = index < used + splits - text_splits
            split = tl.where(index < used, index, index - used + text_splits)
            stored = (split * rows + row) * heads + head
            peaks_here = tl.load(peaks + stored, mask=there, other=float("-inf"))
            weights = tl.load(peaks + splits * rows * heads + stored, mask=there, other=0.0)
            totals = tl.load(
                sums + stored[:, None] * SIZE + part[None, :], mask=there[:, None] & (part < SIZE)[None, :], other=0.0
            )
            higher = tl.maximum(peak, tl.max(peaks_here))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, shares = tl.exp2(peak - base), tl.exp2(peaks_here - base)
            weight = weight * fade + tl.sum(weights * shares)
            total = total * fade + tl.sum(totals * shares[:, None], 0)
            peak = higher
        tl.store(mixed + (row * heads + head) * SIZE + part, total / weight, mask=part < SIZE)

    @triton.jit
    def _finish(  # type: ignore[no-untyped-def]
        query, keys, values, text, length, positions, tree, tree_row, sums, peaks, mixed,
        query_head, query_row, key_head, key_slot, value_head, value_slot,
        rows, heads, splits, factor,
        TILE: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
        GROUP: tl.constexpr, UNITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Exact: one row, the splits before it, then the blocks from the text's last border to the row itself."""
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
        last = border // SPLIT  # the split that the border is in
        peak = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, PADDED], tl.float32)
        for chunk in range(0, last, CHUNK):
            split = chunk + tl.arange(0, CHUNK)
            stored = (split[:, None] * rows + row) * heads + head[None, :]
            there = (split < last)[:, None] & real[None, :]
            peaks_here = tl.load(peaks + stored, mask=there, other=float("-inf"))
            weights = tl.load(peaks + splits * rows * heads + stored, mask=there, other=0.0)
            totals = tl.load(
                sums + stored[:, :, None] * SIZE + part[None, None, :],
                mask=there[:, :, None] & (part < SIZE)[None, None, :],
                other=0.0,
            )
            higher = tl.maximum(peak, tl.max(peaks_here, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, shares = tl.exp2(peak - base), tl.exp2(peaks_here - base[None, :])
            weight = weight * fade + tl.sum(weights * shares, 0)
            total = total * fade[:, None] + tl.sum(totals * shares[:, :, None], 0)
            peak = higher
        # The open split: what `_part` left of it, then block by block.
        stored = (last * rows + row) * heads + head
        begun = real & (last * SPLIT < border)
        open_peak = tl.load(peaks + stored, mask=begun, other=float("-inf"))
        open_weight = tl.load(peaks + splits * rows * heads + stored, mask=begun, other=0.0)
        open_total = tl.load(
            sums + stored[:, None] * SIZE + part[None, :], mask=begun[:, None] & (part < SIZE)[None, :], other=0.0
        )
        key_base = keys + unit // UNITS * key_head
        value_base = values + unit // UNITS * value_head
        for block in range(border, at + 1, BLOCK):
            if (block % SPLIT == 0) & (block > border):
                peak, weight, total = _both(peak, weight, total, open_peak, open_weight, open_total)
                open_peak = tl.full([TILE], float("-inf"), tl.float32)
                open_weight = tl.zeros([TILE], tl.float32)
                open_total = tl.zeros([TILE, PADDED], tl.float32)
            position = block + tl.arange(0, BLOCK)
            there = position <= at
            slot = tl.load(text + position, mask=position < past, other=0)
            slot += tl.load(tree + row * tree_row + position - past, mask=there & (position >= past), other=0)
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
        peak, weight, total = _both(peak, weight, total, open_peak, open_weight, open_total)
        total = total / tl.where(real, weight, 1.0)[:, None]
        tl.store(mixed + (row * heads + head[:, None]) * SIZE + part[None, :], total, mask=inside)
