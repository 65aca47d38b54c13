"""The Triton kernels of `attention`, `narrow`, `gated` and `best`, for GPUs and Triton's interpreter.

Names in capitals are known when a kernel is compiled. Scores are in powers of two, so that exp2 serves.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that differ from step to step: without this a kernel is compiled anew where one is 1 or divisible by 16.
VARYING = ["rows", "splits", "text_splits", "walk", "text_line", "tile_count"]
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
def _exact_tile(
    query, keys, values, text, positions, tree, tree_row, sums, peaks, weights,
    query_head, query_row, key_slot, value_slot, rows, heads, text_line, factor, first_row, unit, job, border,
    TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, INDEX: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """One part of the text for a tile of rows: a block of the split that `border` is in, or a whole split before it.

    Of a part that a row does not have, the peak is minus infinity. Parts behind the border are left to `_exact_row`.
    """
    SMALL: tl.constexpr = COARSE // BLOCK
    open_split = _split_at(border, FINE, COARSE, TURN)
    place = tl.arange(0, TILE)
    part = tl.arange(0, PADDED)
    row = first_row + place // GROUP
    within = unit % UNITS * GROUP + place % GROUP
    real = (row < rows) & (place // GROUP < TILE // GROUP) & (within < GROUPS)
    head = unit // UNITS * GROUPS + within
    at = tl.load(positions + row, mask=real, other=0).to(tl.int32)
    own = _split_at(at, FINE, COARSE, TURN)
    small = job < SMALL
    split = tl.where(small, open_split, job - SMALL)
    start = _start_of(split, FINE, COARSE, TURN) + tl.where(small, job * BLOCK, 0)
    stop = tl.where(small, start + BLOCK, _start_of(split + 1, FINE, COARSE, TURN))
    begin = start
    if WINDOW > 0:
        first = tl.min(tl.where(real, at, 1 << 30)) - WINDOW + 1
        begin = tl.minimum(tl.maximum(start, first // BLOCK * BLOCK), stop)
    if stop <= border:
        q = tl.load(
            query + head[:, None] * query_head + row[:, None] * query_row + part[None, :],
            mask=real[:, None] & (part < SIZE)[None, :],
            other=0.0,
        )
        index = begin + tl.arange(0, BLOCK)
        slot = tl.load(text + index, mask=index < text_line, other=0)
        spare = tl.load(text + start)
        each = job * rows * heads
        _walk(
            q, slot, spare, text, begin, stop, keys, values, key_slot, value_slot, factor,
            row, head, real & ((own == open_split) | (job >= SMALL)), at, positions, tree, tree_row, heads,
            sums + each * SIZE, peaks + each, weights + each,
            False, TILE, SIZE, PADDED, BLOCK, WINDOW, SOFTCAP, PRECISION, False, INDEX,
        )  # fmt: skip
        unused = (own != open_split) & small & (_start_of(own, FINE, COARSE, TURN) + job * BLOCK > at)
    else:
        behind = tl.where(small, _start_of(own, FINE, COARSE, TURN) + job * BLOCK, start)
        unused = tl.where(small, behind > at, own <= split)
    stored = (job * rows + row) * heads + head
    tl.store(peaks + stored, tl.full([TILE], float("-inf"), tl.float32), real & unused)


@triton.jit
def _exact_row(
    query, keys, values, text, positions, tree, tree_row, sums, peaks, weights,
    query_head, query_row, key_slot, value_slot, rows, heads, factor, row, unit, past, border,
    TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, INDEX: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """All parts of one row behind `border`: the text's end, then down the row's own ancestors."""
    SMALL: tl.constexpr = COARSE // BLOCK
    place = tl.arange(0, TILE)
    part = tl.arange(0, PADDED)
    within = unit % UNITS * GROUP + place
    real = (place < GROUP) & (within < GROUPS)
    head = unit // UNITS * GROUPS + within
    end = tl.load(positions + row).to(tl.int32)
    own_split = _split_at(end, FINE, COARSE, TURN)
    open_split = _split_at(border, FINE, COARSE, TURN)
    inside = real[:, None] & (part < SIZE)[None, :]
    q = tl.load(query + head[:, None] * query_head + row * query_row + part[None, :], mask=inside, other=0.0)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, PADDED], tl.float32)
    first = tl.where(own_split > open_split, _start_of(open_split, FINE, COARSE, TURN), border)
    for block in range(first, end + 1, BLOCK):
        position = block + tl.arange(0, BLOCK)
        there = position <= end
        slot = tl.load(text + position, mask=position < past, other=0)
        slot += tl.load(tree + row * tree_row + position - past, mask=there & (position >= past), other=0)
        seen = there[:, None] & (part < SIZE)[None, :]
        slot = slot.to(INDEX)
        key = tl.load(keys + slot[:, None] * key_slot + part[None, :], mask=seen, other=0.0)
        value = tl.load(values + slot[:, None] * value_slot + part[None, :], mask=seen, other=0.0)
        sees = there[None, :]
        if WINDOW > 0:
            sees = sees & (end - position[None, :] < WINDOW)
        scores = tl.where(sees, _scores(q, tl.trans(key), factor, SOFTCAP, PRECISION), float("-inf"))
        peak, weight, total = _add(scores, value, peak, weight, total, PRECISION)
        split = _split_at(block, FINE, COARSE, TURN)
        start = _start_of(split, FINE, COARSE, TURN)
        if (split == own_split) | (block + BLOCK == _start_of(split + 1, FINE, COARSE, TURN)):
            number = tl.where(split == own_split, (block - start) // BLOCK, SMALL + split)
            stored = (number * rows + row) * heads + head
            tl.store(peaks + stored, peak, mask=real)
            tl.store(weights + stored, weight, mask=real)
            tl.store(sums + stored[:, None] * SIZE + part[None, :], total, mask=inside)
            peak = tl.full([TILE], float("-inf"), tl.float32)
            weight = tl.zeros([TILE], tl.float32)
            total = tl.zeros([TILE, PADDED], tl.float32)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BOXED)
def exact_part(
    query, keys, values, text, length, positions, tree, tree_row, sums, peaks,
    query_head, query_row, key_head, key_slot, value_head, value_slot, rows, heads, splits, text_line, factor,
    TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, INDEX: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr, TURN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What `part` does, in parts that depend on a row's position alone.

    A row has a part for each split before the one that it is in itself, and then one for each block of that split.
    Where these are of the text alone, a program does one of them for a tile of rows: first the blocks, then the splits.
    What is left of a row is done by a program for each row.
    """
    _wait(EARLY)
    unit, job = tl.program_id(1), tl.program_id(2)
    past = tl.load(length).to(tl.int32)
    border = past // BLOCK * BLOCK  # up to here all rows see the same blocks
    keys += unit // UNITS * key_head
    values += unit // UNITS * value_head
    weights = peaks + splits * rows * heads
    first_row = tl.program_id(0) * (TILE // GROUP)
    if job < splits:
        _exact_tile(
            query, keys, values, text, positions, tree, tree_row, sums, peaks, weights, query_head, query_row,
            key_slot, value_slot, rows, heads, text_line, factor, first_row, unit, job, border,
            TILE, SIZE, PADDED, GROUPS, GROUP, UNITS, BLOCK, WINDOW, SOFTCAP, PRECISION, INDEX, FINE, COARSE, TURN,
        )  # fmt: skip
    elif first_row + job - splits < rows:
        _exact_row(
            query, keys, values, text, positions, tree, tree_row, sums, peaks, weights, query_head, query_row,
            key_slot, value_slot, rows, heads, factor, first_row + job - splits, unit, past, border,
            TILE, SIZE, PADDED, GROUPS, GROUP, UNITS, BLOCK, WINDOW, SOFTCAP, PRECISION, INDEX, FINE, COARSE, TURN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def product(
    states, weights, bias, product, count, inputs, outputs,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Up to TILE rows by the weights of OUTPUTS outputs, plus their bias if it is not None."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, TILE)
    place = tl.arange(0, BLOCK)
    real = (row < count)[None, :]
    total = tl.zeros([OUTPUTS, TILE], tl.float32)
    _fetch(weights, output, 0, inputs, EARLY)
    _wait(EARLY)
    for start in range(0, inputs, BLOCK):
        weight = tl.load(weights + output[:, None] * inputs + (start + place)[None, :])
        value = tl.load(states + row[None, :] * inputs + (start + place)[:, None], mask=real, other=0.0)
        total = tl.dot(weight, value, total)
    if bias is not None:
        total += tl.load(bias + output)[:, None]
    tl.store(product + row[None, :] * outputs + output[:, None], total, mask=real)


@triton.jit(do_not_specialize=["count"])
def split_product(
    states, weights, bias, parts, first_weight, count, inputs, outputs, walk,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same over `walk` of the inputs: one of the parts that `add_up` adds up, or all where there is one part.

    States and weights are descriptors; what is missing of TILE rows they fill with zeros.
    """
    first, part = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    row, output = tl.arange(0, TILE), first + tl.arange(0, OUTPUTS)
    total = tl.zeros([OUTPUTS, TILE], tl.float32)
    _fetch(first_weight, output, part * walk, inputs, EARLY)
    _wait(EARLY)
    for start in range(part * walk, tl.minimum((part + 1) * walk, inputs), BLOCK):
        total = tl.dot(weights.load([first, start]), states.load([0, start]).T, total)
    if bias is not None:
        total += tl.load(bias + output)[:, None]
    place = parts + (part * count + row[None, :]) * outputs + output[:, None]
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
    """Up to TILE rows by the weights of OUTPUTS gates and of OUTPUTS outputs, which SiLU of the gates multiplies.

    States and weights are descriptors; what is missing of TILE rows they fill with zeros.
    """
    first = tl.program_id(0) * OUTPUTS
    gate = tl.zeros([OUTPUTS, TILE], tl.float32)
    total = tl.zeros([OUTPUTS, TILE], tl.float32)
    _fetch(first_weight, first + tl.arange(0, OUTPUTS), 0, inputs, EARLY)
    _fetch(first_weight, outputs + first + tl.arange(0, OUTPUTS), 0, inputs, EARLY)
    _wait(EARLY)
    for start in range(0, inputs, BLOCK):
        value = states.load([0, start]).T
        gate = tl.dot(weights.load([first, start]), value, gate)
        total = tl.dot(weights.load([outputs + first, start]), value, total)
    rounded = product.dtype.element_ty  # as products are that are kept
    row, output = tl.arange(0, TILE), first + tl.arange(0, OUTPUTS)
    place = product + row[None, :] * outputs + output[:, None]
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
