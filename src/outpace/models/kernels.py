"""The Triton kernels of `attention`, `narrow`, `gated` and `best`, for GPUs and Triton's interpreter.

Names in capitals are known when a kernel is compiled. Scores are in powers of two, so that exp2 serves.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that differ from step to step: without this a kernel is compiled anew where one is 1 or divisible by 16.
VARYING = ["rows", "splits", "text_splits", "walk", "text_line", "tile_count", "width"]
# Places in one box, one behind the other: the same, where one is not aligned to 16 bytes.
BOXED = ["length", "positions", "slots", "tree", "whose", "tiles"]


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Until the kernel before is done, which still runs where this one was started EARLY. Then the next may start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _fetch(weights, row, start, width, EARLY: tl.constexpr):
    """Have EARLY lines (of 64 numbers) of these rows of weights, from `start` on, brought to the cache."""
    if EARLY:
        place = row[:, None] * width + tl.minimum(start + tl.arange(0, EARLY) * 64, width - 1)[None, :]
        address = (weights + place).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _scores(query, key, factor, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    scores = tl.dot(query, key, input_precision=PRECISION) * factor
    if SOFTCAP > 0:
        cap: tl.constexpr = SOFTCAP * 1.4426950408889634
        ratio = tl.exp2(-2 * 1.4426950408889634 * tl.abs(scores / cap))
        tanh = (1 - ratio) / (1 + ratio)
        scores = tl.where(scores < 0, -tanh, tanh) * cap
    return scores


@triton.jit
def _add(scores, value, peak, weight, total, PRECISION: tl.constexpr):
    """One block of keys more, in a running softmax. Scores of keys that a row does not see are minus infinity."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    weight = weight * fade + tl.sum(shares, 1)
    total = total * fade[:, None]
    total = tl.dot(shares.to(value.dtype), value, total, input_precision=PRECISION)
    return higher, weight, total


@triton.jit
def _of_slots(stored, slot, stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    part = tl.arange(0, PADDED)
    places = stored + slot[:, None] * stride + part[None, :]
    if SIZE == PADDED:
        return tl.load(places)
    return tl.load(places, mask=(part < SIZE)[None, :], other=0.0)


@triton.jit
def _walk(
    q, slot, spare, listed, start, stop, keys, values, key_slot, value_slot, factor, row, head, real, at, positions,
    tree, tree_row, heads, sums, peaks, weights,
    AMONG: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """A tile of rows over the keys in `listed` slots from `start` to `stop`; `slot` has the first block of them.

    Slots are read a block ahead, so that keys and values can be fetched while those before are multiplied. Where there
    are no keys left, one is read again whose values are in order (`spare` is the slot of the first), and not seen.
    """
    part = tl.arange(0, PADDED)
    across = tl.arange(0, BLOCK)
    slot = tl.where(start + across < stop, slot, spare).to(INDEX)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, PADDED], tl.float32)
    for block in range(start, stop, BLOCK):
        index = block + across
        there = index < stop
        key = _of_slots(keys, slot, key_slot, SIZE, PADDED)
        value = _of_slots(values, slot, value_slot, SIZE, PADDED)
        slot = tl.load(listed + tl.minimum(index + BLOCK, stop - 1)).to(INDEX)
        sees = there[None, :]
        position = index
        if AMONG:
            word = tl.load(tree + row * tree_row + block // 64, mask=real, other=0)
            sees = sees & (((word[:, None] >> (index % 64)[None, :]) & 1) != 0)
            if PACKED:  # what other texts have there may be NaN, and zero times that, too
                value = tl.where((tl.max(sees.to(tl.int32), 0) > 0)[:, None], value, 0.0).to(value.dtype)
            if WINDOW > 0:
                position = tl.load(positions + index, mask=there, other=0)
        if WINDOW > 0:
            sees = sees & (at[:, None] - position[None, :] < WINDOW)
        scores = tl.where(sees, _scores(q, tl.trans(key), factor, SOFTCAP, PRECISION), float("-inf"))
        peak, weight, total = _add(scores, value, peak, weight, total, PRECISION)
    stored = row * heads + head
    tl.store(peaks + stored, peak, mask=real)
    tl.store(weights + stored, weight, mask=real)
    tl.store(sums + stored[:, None] * SIZE + part[None, :], total, mask=real[:, None] & (part < SIZE)[None, :])


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BOXED)
def part(
    query, keys, values, text, length, positions, slots, tree, tree_row, sums, peaks,
    query_head, query_row, key_head, key_slot, value_head, value_slot,
    rows, heads, splits, text_splits, walk, factor, whose, tiles, text_line, tile_count,
    TILE: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr, INDEX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of rows over one split of `walk` positions: of the text, or (from `text_splits` on) of the rows.

    No row sees a later one. PACKED: the rows are of several texts, and tables say which this tile has, and where the
    rows of its text begin. It does one of PARTS of them. A split that the text does not reach has a peak of minus
    infinity, and no sums.
    """
    _wait(EARLY)
    unit, split = tl.program_id(1), tl.program_id(2)
    first_row = tl.program_id(0) * (TILE // GROUP)
    row_stop = rows
    begins = 0
    if PACKED:
        entry = tl.program_id(0) // PARTS
        first_row = (tl.load(tiles + entry) + tl.program_id(0) % PARTS * (TILE // GROUP)).to(tl.int32)
        row_stop = tl.load(tiles + tile_count + entry).to(tl.int32)
        begins = tl.load(tiles + 2 * tile_count + entry).to(tl.int32) // BLOCK * BLOCK
        mine = tl.load(whose + first_row, mask=first_row < row_stop, other=0)
        length += mine
        text += mine * text_line
    past = tl.load(length).to(tl.int32)
    place = tl.arange(0, TILE)
    row = first_row + place // GROUP
    within = unit % UNITS * GROUP + place % GROUP
    real = (row < row_stop) & (place // GROUP < TILE // GROUP) & (within < GROUPS)
    head = unit // UNITS * GROUPS + within
    part = tl.arange(0, PADDED)
    q = tl.load(
        query + head[:, None] * query_head + row[:, None] * query_row + part[None, :],
        mask=real[:, None] & (part < SIZE)[None, :],
        other=0.0,
    )
    among = split >= text_splits
    start = (split - (text_splits if among else 0)) * walk
    limit = start + walk
    start = tl.maximum(start, begins if among else 0)
    at = tl.zeros([TILE], tl.int64)
    if WINDOW > 0:
        at = tl.load(positions + row, mask=real, other=0)
        first = (tl.min(tl.where(real, at, 1 << 30)) - WINDOW + 1).to(tl.int32)
        start = tl.maximum(start, 0 if among else first // BLOCK * BLOCK)
    listed = slots if among else text
    index = start + tl.arange(0, BLOCK)
    listed_until = rows if among else text_line
    slot = tl.load(listed + index, mask=index < listed_until, other=0)  # before `past` is known
    spare = tl.load(listed + start, mask=start < listed_until, other=0)
    keys += unit // UNITS * key_head
    values += unit // UNITS * value_head
    sums += split * rows * heads * SIZE
    weights = peaks + (splits + split) * rows * heads
    peaks += split * rows * heads
    if among:
        stop = tl.minimum(tl.minimum(first_row + TILE // GROUP, row_stop), limit)
        if first_row < row_stop:
            _walk(
                q, slot, spare, listed, start, stop, keys, values, key_slot, value_slot, factor,
                row, head, real, at, positions, tree, tree_row, heads, sums, peaks, weights,
                True, TILE, SIZE, PADDED, BLOCK, WINDOW, SOFTCAP, PRECISION, PACKED, INDEX,
            )  # fmt: skip
    else:
        stop = tl.minimum(past, limit)
        if (limit - walk < stop) & (first_row < row_stop):
            _walk(
                q, slot, spare, listed, start, stop, keys, values, key_slot, value_slot, factor,
                row, head, real, at, positions, tree, tree_row, heads, sums, peaks, weights,
                False, TILE, SIZE, PADDED, BLOCK, WINDOW, SOFTCAP, PRECISION, PACKED, INDEX,
            )  # fmt: skip
        else:
            tl.store(peaks + row * heads + head, tl.full([TILE], float("-inf"), tl.float32), mask=real)


@triton.jit(do_not_specialize=VARYING)
def merge(
    sums, peaks, mixed, rows, heads, splits,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row and HEADS heads: all splits of each as one softmax."""
    _wait(EARLY)
    row, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    part = tl.arange(0, PADDED)
    real = head < heads
    within = (part < SIZE)[None, None, :]
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, PADDED], tl.float32)
    for chunk in range(0, splits, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        there = real[:, None] & (split < splits)[None, :]
        stored = (split[None, :] * rows + row) * heads + head[:, None]
        peaks_here = tl.load(peaks + stored, mask=there, other=float("-inf"))
        weights = tl.load(peaks + splits * rows * heads + stored, mask=there, other=0.0)
        places = sums + stored[:, :, None] * SIZE + part[None, None, :]
        totals = tl.load(places, mask=there[:, :, None] & within, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks_here, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, shares = tl.exp2(peak - base), tl.exp2(peaks_here - base[:, None])
        used = peaks_here > float("-inf")  # the others have no sums, but whatever lay there
        weight = weight * fade + tl.sum(tl.where(used, weights, 0.0) * shares, 1)
        total = total * fade[:, None] + tl.sum(tl.where(used[:, :, None], totals, 0.0) * shares[:, :, None], 1)
        peak = higher
    place = mixed + (row * heads + head)[:, None] * SIZE + part[None, :]
    weight = tl.where(real, weight, 1.0)
    tl.store(place, total / weight[:, None], mask=real[:, None] & (part < SIZE)[None, :])


@triton.jit
def _split_at(position, FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr):
    """Exact: the split that a position is in. They are FINE long up to TURN, then COARSE."""
    return tl.where(position < TURN, position // FINE, TURN // FINE + (position - TURN) // COARSE)


@triton.jit
def _start_of(split, FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr):
    fine: tl.constexpr = TURN // FINE
    return tl.where(split < fine, split * FINE, TURN + (split - fine) * COARSE)


@triton.jit
def _fold(peak, weight, total, peak_more, weight_more, total_more):
    """One part of a softmax more. A part without keys, whose peak is minus infinity, changes no bit."""
    higher = tl.maximum(peak, peak_more)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade, share = tl.exp2(peak - base), tl.exp2(peak_more - base)
    weight = weight * fade + weight_more * share
    total = total * tl.expand_dims(fade, -1) + total_more * tl.expand_dims(share, -1)
    return higher, weight, total


@triton.jit
def _store_part(
    sums, peaks, weights, number, rows, heads, row, head, mask, peak, weight, total,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PADDED)
    stored = (number * rows + row) * heads + head
    tl.store(peaks + stored, peak, mask=mask)
    tl.store(weights + stored, weight, mask=mask)
    tl.store(
        sums + stored.to(tl.int64)[:, None] * SIZE + part[None, :], total, mask=mask[:, None] & (part < SIZE)[None, :]
    )


@triton.jit
def _exact_text(
    q, keys, values, text, sums, peaks, weights, key_slot, value_slot, rows, heads, factor, row, head, real, at, own,
    number, start, stop,
    TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
    FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """A tile of rows over whole blocks of the text, from `start` to `stop`: of one split, or (JOINED) of several.

    A row takes those before its `own` block. Slots are read a block ahead.
    """
    across = tl.arange(0, BLOCK)
    stop = tl.minimum(stop, tl.max(tl.where(real, own, 0)))
    if WINDOW > 0:
        first = tl.min(tl.where(real, at, 1 << 30)) - WINDOW + 1
        start = tl.maximum(start, first // BLOCK * BLOCK)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, PADDED], tl.float32)
    if JOINED:
        peak_all = tl.full([TILE], float("-inf"), tl.float32)
        weight_all = tl.zeros([TILE], tl.float32)
        total_all = tl.zeros([TILE, PADDED], tl.float32)
    slot = tl.load(text + start + across, mask=start + across < stop, other=0).to(INDEX)
    for block in range(start, stop, BLOCK):
        key = _of_slots(keys, slot, key_slot, SIZE, PADDED)
        value = _of_slots(values, slot, value_slot, SIZE, PADDED)
        slot = tl.load(text + tl.minimum(block + BLOCK + across, stop - 1)).to(INDEX)
        sees = (block < own)[:, None]
        if WINDOW > 0:
            sees = sees & (at[:, None] - (block + across)[None, :] < WINDOW)
        scores = tl.where(sees, _scores(q, tl.trans(key), factor, SOFTCAP, PRECISION), float("-inf"))
        peak, weight, total = _add(scores, value, peak, weight, total, PRECISION)
        if JOINED:
            behind = block + BLOCK
            if _start_of(_split_at(behind, FINE, COARSE, TURN), FINE, COARSE, TURN) == behind:
                peak_all, weight_all, total_all = _fold(peak_all, weight_all, total_all, peak, weight, total)
                peak = tl.full([TILE], float("-inf"), tl.float32)
                weight = tl.zeros([TILE], tl.float32)
                total = tl.zeros([TILE, PADDED], tl.float32)
    if JOINED:  # where the rows end amid a split
        peak, weight, total = _fold(peak_all, weight_all, total_all, peak, weight, total)
    _store_part(sums, peaks, weights, number, rows, heads, row, head, real, peak, weight, total, SIZE, PADDED)


@triton.jit
def _path_slots(text, tree, position, past, end, INDEX: tl.constexpr):
    """The slots that lie at positions up to `end`: of the text, and from `past` on of a row's ancestors and its own."""
    slot = tl.load(text + position, mask=position < tl.minimum(past, end + 1), other=0)
    slot += tl.load(tree + position - past, mask=(position >= past) & (position <= end), other=0)
    return slot.to(INDEX)


@triton.jit
def _lead_of(number, leads, rank, other, end, past, width):
    """The row in its tile that leads a path, and how far the path goes."""
    this = leads & (rank == number)
    until = tl.max(tl.where(this, end, 0))
    return tl.max(tl.where(this, other, 0)), tl.minimum(until, past + width - 1)


@triton.jit
def _exact_tail(
    q, keys, values, text, positions, slots, tree, tree_row, width, sums, peaks, weights, key_slot, value_slot,
    rows, heads, factor, first_row, row_stop, row, head, real, at, own, past, border, turn,
    TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
    FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr, TAILS: tl.constexpr,
):  # fmt: skip
    """The own block of each row of a tile; and of rows whose own block is behind `border` the splits before it too.

    Rows on one path share it: each is done with the last row of the tile that has it on its path, the lead of its
    path. Of TAILS programs each does every so many paths.
    """
    across = tl.arange(0, BLOCK)
    # Which rows are on the path of which: those that are text by now are on all.
    other = tl.arange(0, ROWS)
    there = (other < TILE // GROUP) & (first_row + other < row_stop)
    end = tl.load(positions + first_row + other, mask=there, other=-1).to(tl.int32)
    slot = tl.load(slots + row, mask=real, other=-1)
    depth = at - past
    on = there[:, None] & real[None, :] & (end[:, None] >= at[None, :])
    above = tl.load(
        tree + (first_row + other)[:, None] * tree_row + depth[None, :],
        mask=on & (depth >= 0)[None, :] & (depth < width)[None, :],
        other=-1,
    )
    self = (first_row + other)[:, None] == row[None, :]
    on = on & ((depth < 0)[None, :] | (above == slot[None, :]) | self)
    lead = tl.max(tl.where(on, other[:, None], -1), 0)  # [TILE]
    leads = (tl.max(((lead[None, :] == other[:, None]) & real[None, :]).to(tl.int32), 1) > 0) & there
    rank = tl.cumsum(leads.to(tl.int32), 0) - 1
    paths = tl.sum(leads.to(tl.int32), 0)

    last = tl.max(tl.where(real, own, 0))
    first = tl.min(tl.where(real, own, 1 << 30))
    blocks = (last - first) // BLOCK + 1
    part = tl.arange(0, PADDED)
    tree += first_row.to(tl.int64) * tree_row
    chosen, until = _lead_of(turn, leads, rank, other, end, past, width)
    listed = _path_slots(text, tree + chosen * tree_row, first + across, past, until, INDEX)
    steps = (paths - turn + TAILS - 1) // TAILS * blocks
    for step in tl.range(0, steps, num_stages=2):
        block = first + step % blocks * BLOCK
        position = block + across
        inside = (position <= until)[:, None] & (part < SIZE)[None, :]
        key = tl.load(keys + listed[:, None] * key_slot + part[None, :], mask=inside, other=0.0)
        value = tl.load(values + listed[:, None] * value_slot + part[None, :], mask=inside, other=0.0)
        here = real & (lead == chosen) & (own == block)
        sees = here[:, None] & (position[None, :] <= tl.minimum(at, until)[:, None])
        # Where the next keys are.
        after = step + 1
        chosen, until = _lead_of(turn + after // blocks * TAILS, leads, rank, other, end, past, width)
        listed = _path_slots(
            text, tree + chosen * tree_row, first + after % blocks * BLOCK + across, past, until, INDEX
        )
        if WINDOW > 0:
            sees = sees & (at[:, None] - position[None, :] < WINDOW)
        scores = tl.where(sees, _scores(q, tl.trans(key), factor, SOFTCAP, PRECISION), float("-inf"))
        peak, weight, total = _add(
            scores, value, tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32),
            tl.zeros([TILE, PADDED], tl.float32), PRECISION,
        )  # fmt: skip
        _store_part(sums, peaks, weights, 0, rows, heads, row, head, here, peak, weight, total, SIZE, PADDED)
    if last > border:
        open_split = _split_at(border, FINE, COARSE, TURN)
        for number in tl.range(turn, paths, TAILS, num_stages=1):
            chosen, until = _lead_of(number, leads, rank, other, end, past, width)
            mine = real & (lead == chosen)
            peak = tl.full([TILE], float("-inf"), tl.float32)
            weight = tl.zeros([TILE], tl.float32)
            total = tl.zeros([TILE, PADDED], tl.float32)
            for block in tl.range(_start_of(open_split, FINE, COARSE, TURN), until - BLOCK + 1, BLOCK, num_stages=1):
                position = block + across
                listed = _path_slots(text, tree + chosen * tree_row, position, past, until, INDEX)
                key = _of_slots(keys, listed, key_slot, SIZE, PADDED)
                value = _of_slots(values, listed, value_slot, SIZE, PADDED)
                sees = (mine & (block < own))[:, None]
                if WINDOW > 0:
                    sees = sees & (at[:, None] - position[None, :] < WINDOW)
                scores = tl.where(sees, _scores(q, tl.trans(key), factor, SOFTCAP, PRECISION), float("-inf"))
                peak, weight, total = _add(scores, value, peak, weight, total, PRECISION)
                split = _split_at(block, FINE, COARSE, TURN)
                behind = block + BLOCK
                ends = _start_of(split + 1, FINE, COARSE, TURN) == behind
                # A split that ends here, of rows further on; and what rows have of their own split before their block.
                done = mine & (own >= behind) & (behind > border) & (ends | (own == behind))
                _store_part(
                    sums, peaks, weights, 1 + split - open_split, rows, heads, row, head, done, peak, weight, total,
                    SIZE, PADDED,
                )  # fmt: skip
                if ends:
                    peak = tl.full([TILE], float("-inf"), tl.float32)
                    weight = tl.zeros([TILE], tl.float32)
                    total = tl.zeros([TILE, PADDED], tl.float32)
                    stored = ((2 + split - open_split) * rows + row) * heads + head
                    tl.store(peaks + stored, peak, mask=mine & (own == behind))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BOXED)
def exact_part(
    query, keys, values, text, length, positions, slots, tree, tree_row, width, sums, peaks,
    query_head, query_row, key_head, key_slot, value_head, value_slot, rows, heads, splits, factor,
    whose, tiles, text_line, tile_count,
    TILE: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, INDEX: tl.constexpr,
    FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr, TOGETHER: tl.constexpr, JOINED: tl.constexpr,
    TAILS: tl.constexpr, NEAR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What `part` does, in parts that depend on a row's position alone.

    A row has a part for each split of the text, that of its own split up to its own block, and one for its own block.
    Programs do, in this order: own blocks (TAILS), the split that the text ends in, and then a split before it each or
    (JOINED) a group of TOGETHER, folded. The parts in the order of `sums`: own blocks, NEAR splits from the one on that
    the text ends in, then the splits or groups.
    """
    _wait(EARLY)
    unit, job = tl.program_id(1), tl.program_id(2)
    first_row = tl.program_id(0) * (TILE // GROUP)
    row_stop = rows
    if PACKED:
        entry = tl.program_id(0) // PARTS
        first_row = (tl.load(tiles + entry) + tl.program_id(0) % PARTS * (TILE // GROUP)).to(tl.int32)
        row_stop = tl.load(tiles + tile_count + entry).to(tl.int32)
        mine = tl.load(whose + first_row, mask=first_row < row_stop, other=0)
        length += mine
        text += mine * text_line
    past = tl.load(length).to(tl.int32)
    border = past // BLOCK * BLOCK  # up to here all blocks are of the text
    open_split = _split_at(border, FINE, COARSE, TURN)
    keys += unit // UNITS * key_head
    values += unit // UNITS * value_head
    weights = peaks + splits * rows * heads
    number = job - TAILS - 1
    begins = number * (TOGETHER if JOINED else 1)
    if (first_row < row_stop) & (begins < open_split):
        place = tl.arange(0, TILE)
        part = tl.arange(0, PADDED)
        row = first_row + place // GROUP
        within = unit % UNITS * GROUP + place % GROUP
        real = (row < row_stop) & (place // GROUP < TILE // GROUP) & (within < GROUPS)
        head = unit // UNITS * GROUPS + within
        at = tl.load(positions + row, mask=real, other=0).to(tl.int32)
        own = at // BLOCK * BLOCK
        q = tl.load(
            query + head[:, None] * query_head + row[:, None] * query_row + part[None, :],
            mask=real[:, None] & (part < SIZE)[None, :],
            other=0.0,
        )
        if job < TAILS:
            _exact_tail(
                q, keys, values, text, positions, slots, tree, tree_row, width, sums, peaks, weights,
                key_slot, value_slot, rows, heads, factor, first_row, row_stop, row, head, real, at, own, past,
                border, job, TILE, SIZE, PADDED, GROUP, ROWS, BLOCK, WINDOW, SOFTCAP, PRECISION, INDEX,
                FINE, COARSE, TURN, TAILS,
            )  # fmt: skip
        elif job == TAILS:
            start = _start_of(open_split, FINE, COARSE, TURN)
            _exact_text(
                q, keys, values, text, sums, peaks, weights, key_slot, value_slot, rows, heads, factor,
                row, head, real & (own <= border), at, own, 1, start, border,
                TILE, SIZE, PADDED, BLOCK, WINDOW, SOFTCAP, PRECISION, INDEX, FINE, COARSE, TURN, False,
            )  # fmt: skip
        else:
            behind = tl.minimum(begins + TOGETHER, open_split) if JOINED else begins + 1
            _exact_text(
                q, keys, values, text, sums, peaks, weights, key_slot, value_slot, rows, heads, factor,
                row, head, real, at, own, 1 + NEAR + number,
                _start_of(begins, FINE, COARSE, TURN), _start_of(behind, FINE, COARSE, TURN),
                TILE, SIZE, PADDED, BLOCK, WINDOW, SOFTCAP, PRECISION, INDEX, FINE, COARSE, TURN, JOINED,
            )  # fmt: skip


@triton.jit
def _load_parts(
    sums, peaks, weights, number, rows, heads, row, head, there, SIZE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Of a part without keys only the peak was written."""
    part = tl.arange(0, PADDED)
    stored = (number * rows + row) * heads + head
    peak = tl.load(peaks + stored, mask=there, other=float("-inf"))
    there = there & (peak > float("-inf"))
    weight = tl.load(weights + stored, mask=there, other=0.0)
    within = tl.expand_dims(there, 2) & (part < SIZE)[None, None, :]
    place = sums + tl.expand_dims(stored.to(tl.int64), 2) * SIZE + part[None, None, :]
    return peak, weight, tl.load(place, mask=within, other=0.0)


@triton.jit(do_not_specialize=VARYING)
def exact_merge(
    sums, peaks, mixed, length, whose, positions, rows, heads, splits,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr,
    FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    JOINED: tl.constexpr, NEAR: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row and HEADS heads: the splits of each group one after the other, then the groups, then the own block.

    CHUNK of the GROUPS are done side by side. Each is folded in the same order, whoever did it.
    """
    _wait(EARLY)
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = (head < heads)[:, None]
    heads_here = head[:, None]
    part = tl.arange(0, PADDED)
    if PACKED:
        length += tl.load(whose + row)
    border = tl.load(length).to(tl.int32) // BLOCK * BLOCK
    open_split = _split_at(border, FINE, COARSE, TURN)
    own_split = _split_at(tl.load(positions + row).to(tl.int32), FINE, COARSE, TURN)
    weights = peaks + splits * rows * heads
    peak_all = tl.full([HEADS, 1], float("-inf"), tl.float32)
    weight_all = tl.zeros([HEADS, 1], tl.float32)
    total_all = tl.zeros([HEADS, 1, PADDED], tl.float32)
    for chunk in range(0, tl.minimum(tl.maximum(own_split, open_split) // TOGETHER + 1, GROUPS), CHUNK):
        group = chunk + tl.arange(0, CHUNK)[None, :]
        peak = tl.full([HEADS, CHUNK], float("-inf"), tl.float32)
        weight = tl.zeros([HEADS, CHUNK], tl.float32)
        total = tl.zeros([HEADS, CHUNK, PADDED], tl.float32)
        for place in tl.static_range(0, 1 if JOINED else TOGETHER):
            split = group * TOGETHER + place
            more = _load_parts(
                sums, peaks, weights, 1 + NEAR + (group if JOINED else split), rows, heads, row, heads_here,
                real & (split < open_split), SIZE, PADDED,
            )  # fmt: skip
            peak, weight, total = _fold(peak, weight, total, more[0], more[1], more[2])
        for near in tl.static_range(0, NEAR):
            split = open_split + near
            there = real & (group == split // TOGETHER) & (split <= tl.maximum(own_split, open_split))
            more = _load_parts(
                sums, peaks, weights, 1 + near + 0 * group, rows, heads, row, heads_here, there, SIZE, PADDED
            )
            peak, weight, total = _fold(peak, weight, total, more[0], more[1], more[2])
        for place in tl.static_range(0, CHUNK):
            this = tl.arange(0, CHUNK)[None, :] == place
            peak_all, weight_all, total_all = _fold(
                peak_all, weight_all, total_all,
                tl.max(tl.where(this, peak, float("-inf")), 1, keep_dims=True),
                tl.sum(tl.where(this, weight, 0.0), 1, keep_dims=True),
                tl.sum(tl.where(tl.expand_dims(this, 2), total, 0.0), 1, keep_dims=True),
            )  # fmt: skip
    mine = _load_parts(
        sums, peaks, weights, tl.zeros([1, 1], tl.int32), rows, heads, row, heads_here, real, SIZE, PADDED
    )
    peak_all, weight_all, total_all = _fold(peak_all, weight_all, total_all, mine[0], mine[1], mine[2])
    weight_all = tl.where(weight_all > 0, weight_all, 1.0)  # a row of a lane at rest may see nothing
    found = total_all / tl.expand_dims(weight_all, 2)
    place = mixed + (row * heads + tl.expand_dims(heads_here, 2)) * SIZE + part[None, None, :]
    tl.store(place, found, mask=tl.expand_dims(real, 2) & (part < SIZE)[None, None, :])


@triton.jit(do_not_specialize=["count"])
def product(
    states, weights, bias, product, count, inputs, outputs, walk,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PARTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Up to TILE rows by the weights of OUTPUTS outputs, plus their bias if it is not None.

    PARTED: the sum of parts, each over `walk` inputs.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, TILE)
    place = tl.arange(0, BLOCK)
    real = (row < count)[None, :]
    total = tl.zeros([OUTPUTS, TILE], tl.float32)
    before = tl.zeros([OUTPUTS, TILE], tl.float32)  # parts that are done
    _fetch(weights, output, 0, inputs, EARLY)
    _wait(EARLY)
    for start in range(0, inputs, BLOCK):
        weight = tl.load(weights + output[:, None] * inputs + (start + place)[None, :])
        value = tl.load(states + row[None, :] * inputs + (start + place)[:, None], mask=real, other=0.0)
        total = tl.dot(weight, value, total)
        if PARTED:  # noqa: SIM102 (this is known when the kernel is compiled)
            if (start + BLOCK) % walk == 0:
                before += total
                total = tl.zeros([OUTPUTS, TILE], tl.float32)
    if PARTED:
        total += before
    if bias is not None:
        total += tl.load(bias + output)[:, None]
    tl.store(product + row[None, :] * outputs + output[:, None], total, mask=real)


@triton.jit(do_not_specialize=["count"])
def split_product(
    states, weights, bias, sums, first_weight, count, inputs, outputs, walk,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same for one tile of rows of several: PARTS parts, all there are, or one of those that `add_up` adds up.

    States and weights are descriptors; what is missing of TILE rows they fill with zeros.
    """
    tile, first, part = tl.program_id(0) * TILE, tl.program_id(1) * OUTPUTS, tl.program_id(2)
    row, output = tile + tl.arange(0, TILE), first + tl.arange(0, OUTPUTS)
    total = tl.zeros([OUTPUTS, TILE], tl.float32)
    _fetch(first_weight, output, part * walk, inputs, EARLY)
    _wait(EARLY)
    for start in range(part * walk, tl.minimum((part + 1) * walk, inputs), BLOCK):
        total = tl.dot(weights.load([first, start]), states.load([tile, start]).T, total)
    for more in tl.static_range(1, PARTS):
        added = tl.zeros([OUTPUTS, TILE], tl.float32)
        for start in range(more * walk, tl.minimum((more + 1) * walk, inputs), BLOCK):
            added = tl.dot(weights.load([first, start]), states.load([tile, start]).T, added)
        total += added
    if bias is not None:
        total += tl.load(bias + output)[:, None]
    place = sums + (part * count + row[None, :]).to(tl.int64) * outputs + output[:, None]
    tl.store(place, total, mask=(row < count)[None, :])


@triton.jit(do_not_specialize=["count"])
def add_up(parts, bias, product, count, splits, outputs, PIECE: tl.constexpr, EARLY: tl.constexpr):
    """A piece of a row: all its parts, plus the bias if it is not None."""
    _wait(EARLY)
    row, place = tl.program_id(0), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = place < outputs
    total = tl.zeros([PIECE], tl.float32)
    for part in range(splits):
        total += tl.load(parts + (part * count + row) * outputs + place, mask=there)
    if bias is not None:
        total += tl.load(bias + place, mask=there)
    tl.store(product + row * outputs + place, total, mask=there)


@triton.jit
def _gate(gate, total):
    gate = gate.to(tl.float32)
    return gate * tl.sigmoid(gate) * total


@triton.jit(do_not_specialize=["count"])
def gated(
    states, weights, product, first_weight, count, inputs, outputs,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of rows by the weights of OUTPUTS gates and of OUTPUTS outputs, which SiLU of the gates multiplies.

    States and weights are descriptors; what is missing of TILE rows they fill with zeros.
    """
    tile, first = tl.program_id(0) * TILE, tl.program_id(1) * OUTPUTS
    gate = tl.zeros([OUTPUTS, TILE], tl.float32)
    total = tl.zeros([OUTPUTS, TILE], tl.float32)
    _fetch(first_weight, first + tl.arange(0, OUTPUTS), 0, inputs, EARLY)
    _fetch(first_weight, outputs + first + tl.arange(0, OUTPUTS), 0, inputs, EARLY)
    _wait(EARLY)
    for start in range(0, inputs, BLOCK):
        value = states.load([tile, start]).T
        gate = tl.dot(weights.load([first, start]), value, gate)
        total = tl.dot(weights.load([outputs + first, start]), value, total)
    rounded = product.dtype.element_ty  # as products are that are kept
    row, output = tile + tl.arange(0, TILE), first + tl.arange(0, OUTPUTS)
    place = product + row[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(place, _gate(gate.to(rounded), total.to(rounded)), mask=(row < count)[None, :])


@triton.jit
def gate(products, gated, outputs, PIECE: tl.constexpr):
    """A piece of a row of products, the gates first: SiLU of a gate times what it is for."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = place < outputs
    gate = tl.load(products + row * 2 * outputs + place, mask=there)
    total = tl.load(products + row * 2 * outputs + outputs + place, mask=there)
    tl.store(gated + row * outputs + place, _gate(gate, total), mask=there)


@triton.jit
def highest(logits, highest, width, PART: tl.constexpr, EARLY: tl.constexpr):
    """The highest logit of a part of a row, and its place, as one number: of two such numbers the higher is better."""
    _wait(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    place = part * PART + tl.arange(0, PART)
    logit = tl.load(logits + row.to(tl.int64) * width + place, mask=place < width, other=float("-inf")).to(tl.float32)
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # there is a zero with a sign
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as whole numbers they are in the order of the floats
    order = tl.where(logit != logit, 0x7FFFFFFF, order)
    number = (order.to(tl.int64) << 32) | (0x7FFFFFFF - place)
    tl.store(highest + row * tl.num_programs(1) + part, tl.max(number, 0))


@triton.jit(do_not_specialize=["rows"])
def best(highest, found, rows, parts, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """The best of a row's parts: its place, and the logit."""
    _wait(EARLY)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    number = tl.max(tl.load(highest + row * parts + part, mask=part < parts, other=-(1 << 63)), 0)
    order = (number >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    tl.store(found + row, (0x7FFFFFFF - (number & 0x7FFFFFFF)).to(tl.float64))
    tl.store(found + rows + row, bits.to(tl.float32, bitcast=True).to(tl.float64))
