"""The Triton kernels of `attention`, `narrow`, `int8`, `gated` and `best`, for GPUs and Triton's interpreter.

Names in capitals are compile-time constants. Scores are in base 2, for exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that change from step to step: without this, a kernel is compiled again if one is 1 or divisible by 16.
VARYING = ["rows", "splits", "text_splits", "walk", "text_line", "tree_row", "tile_count", "parts"]
# Pointers into one buffer: without this, a kernel is compiled again if one is not aligned to 16 bytes.
BOXED = ["length", "positions", "slots", "tree", "whose", "tiles"]


@triton.jit
def _wait(EARLY: tl.constexpr):
    """With EARLY (programmatic dependent launch): wait for the kernel before, then let the next one start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _fetch(weights, row, start, width, EARLY: tl.constexpr):
    """Prefetch EARLY cache lines (of 64 values) of these rows of weights, from `start` on."""
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
    """Add one block of keys to a running softmax. Masked keys have a score of -inf."""
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
    """A tile of rows over the keys in `listed` slots from `start` to `stop`; `slot` has the first block of slots.

    Slots are read one block ahead, so that keys and values load while earlier ones are multiplied. Beyond the last key,
    a valid slot (`spare`, that of the first key) is read and masked.
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
            if PACKED:  # other sequences may have NaN there, and 0 × NaN is NaN
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

    No row attends to a later one. PACKED: the rows belong to several sequences, and tables give this tile's rows and
    the first row of its sequence; it processes one of PARTS of them. A split beyond the sequence's end gets a maximum
    of -inf, and no sums.
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
    """One row and HEADS heads: merge all splits into one softmax."""
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
        used = peaks_here > float("-inf")  # the sums of other splits are uninitialized
        weight = weight * fade + tl.sum(tl.where(used, weights, 0.0) * shares, 1)
        total = total * fade[:, None] + tl.sum(tl.where(used[:, :, None], totals, 0.0) * shares[:, :, None], 1)
        peak = higher
    place = mixed + (row * heads + head)[:, None] * SIZE + part[None, :]
    weight = tl.where(real, weight, 1.0)
    tl.store(place, total / weight[:, None], mask=real[:, None] & (part < SIZE)[None, :])


@triton.jit
def _add_exactly(
    query, key, value, sees, factor, peak, weight, total, ones, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add one block of keys to a running softmax, except masked ones.

    Maxima are rounded to integers: scaling by powers of two is exact, however the compiler contracts multiply-adds.
    Weights (equal in every column) are summed like values, by a product with ones, so in the same order in any tile.
    """
    if SOFTCAP > 0:
        scores = _scores(query, tl.trans(key), factor, SOFTCAP, PRECISION)
        factor = 1.0
    else:
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    scores = tl.where(sees, scores, float("-inf"))
    higher = tl.maximum(peak, tl.ceil(tl.max(scores, 1) * factor))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.zeros_like(scores) - base[:, None]))
    shares = shares.to(value.dtype)
    fade = tl.exp2(peak - base)[:, None]
    weight = tl.dot(shares, ones, weight * fade, input_precision=PRECISION)
    total = tl.dot(shares, value, total * fade, input_precision=PRECISION)
    return higher, weight, total


@triton.jit
def _column(weight):
    """[rows] from weights that are equal in every column."""
    first = tl.arange(0, weight.shape[1]) == 0
    return tl.sum(tl.where(first[None, :], weight, 0.0), 1)


@triton.jit
def _fold(peak, weight, total, peak_more, weight_more, total_more):
    """Merge another part into a softmax. A part without keys, whose maximum is -inf, changes no bit."""
    higher = tl.maximum(peak, peak_more)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade, share = tl.exp2(peak - base), tl.exp2(peak_more - base)
    if len(weight.shape) == len(peak.shape):
        weight = weight * fade + weight_more * share
    else:
        weight = weight * tl.expand_dims(fade, -1) + weight_more * tl.expand_dims(share, -1)
    total = total * tl.expand_dims(fade, -1) + total_more * tl.expand_dims(share, -1)
    return higher, weight, total


@triton.jit
def _begins(group, SHORT: tl.constexpr):
    """The first position of a group of splits. The first two have SHORT positions, all others twice as many."""
    return tl.maximum(group * SHORT, (group - 1) * 2 * SHORT)


@triton.jit
def _groups(length, SHORT: tl.constexpr):
    """The number of groups that the first `length` positions are in."""
    return tl.minimum((length + SHORT - 1) // SHORT, 1 + (length + 2 * SHORT - 1) // (2 * SHORT))


@triton.jit
def _walk_exactly(
    q, text, start, stop, fold, own, keys, values, key_slot, value_slot, factor, row, head, real, at, rows, heads,
    sums, peaks, splits, number,
    TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """As `_walk`, over cached tokens only: a row attends to everything before its `own` keys. Stored as part `number`.

    FOLD: several splits of `fold` positions are walked; each is summed separately first.

    The weights have eight columns: with more, `ones` would take shared memory, and an H100 has just enough for two
    programs with tiles of 64 rows per multiprocessor.
    """
    part = tl.arange(0, PADDED)
    across = tl.arange(0, BLOCK)
    slot = tl.load(text + tl.minimum(start + across, stop - 1)).to(INDEX)
    ones = tl.full([BLOCK, 8], 1.0, values.dtype.element_ty)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE, 8], tl.float32)
    total = tl.zeros([TILE, PADDED], tl.float32)
    if FOLD:
        peak_all = tl.full([TILE], float("-inf"), tl.float32)
        weight_all = tl.zeros([TILE, 8], tl.float32)
        total_all = tl.zeros([TILE, PADDED], tl.float32)
    for block in range(start, stop, BLOCK):
        if FOLD:  # noqa: SIM102 (this is known when the kernel is compiled)
            if block % fold == 0:
                peak_all, weight_all, total_all = _fold(peak_all, weight_all, total_all, peak, weight, total)
                # The sums are multiplied by zero below. To set them here would serialize the tensor cores.
                peak = tl.full([TILE], float("-inf"), tl.float32)
        index = block + across
        key = _of_slots(keys, slot, key_slot, SIZE, PADDED)
        value = _of_slots(values, slot, value_slot, SIZE, PADDED)
        slot = tl.load(text + tl.minimum(index + BLOCK, stop - 1)).to(INDEX)
        sees = index[None, :] < own[:, None]
        if WINDOW > 0:
            sees = sees & (at[:, None] - index[None, :] < WINDOW)
        peak, weight, total = _add_exactly(q, key, value, sees, factor, peak, weight, total, ones, SOFTCAP, PRECISION)
    if FOLD:
        peak, weight, total = _fold(peak_all, weight_all, total_all, peak, weight, total)
    stored = (number * rows + row) * heads + head
    tl.store(peaks + stored, peak, mask=real)
    tl.store(peaks + splits * rows * heads + stored, _column(weight), mask=real)
    place = sums + stored.to(tl.int64)[:, None] * SIZE + part[None, :]
    tl.store(place, total, mask=real[:, None] & (part < SIZE)[None, :])


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BOXED)
def part_exactly(
    query, keys, values, text, positions, sums, peaks,
    query_head, query_row, key_head, key_slot, value_head, value_slot,
    rows, heads, splits, factor, whose, tiles, text_line, tile_count, parts,
    TILE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, INDEX: tl.constexpr, OWN: tl.constexpr, SHORT: tl.constexpr, TOGETHER: tl.constexpr,
    JOINED: tl.constexpr, PAIRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of rows over a split of positions, for each row up to its last OWN keys.

    JOINED: over a group of TOGETHER splits, one after the other; their sum is stored, instead of each split's. PAIRED:
    the first two groups, which are half as long as the others, are one program's.

    PACKED: see `part`; the tile processes one of `parts` of an entry. If no row has keys, nothing is written: a row's
    splits follow from its position.
    """
    _wait(EARLY)
    each: tl.constexpr = 1 if JOINED else TOGETHER  # programs per group
    unit = tl.program_id(1)
    first_row = tl.program_id(0) * (TILE // GROUP)
    row_stop = rows
    if PACKED:
        entry = tl.program_id(0) // parts
        first_row = (tl.load(tiles + entry) + tl.program_id(0) % parts * (TILE // GROUP)).to(tl.int32)
        row_stop = tl.load(tiles + tile_count + entry).to(tl.int32)
        text += tl.load(whose + first_row, mask=first_row < row_stop, other=0) * text_line
    place = tl.arange(0, TILE)
    row = first_row + place // GROUP
    within = unit % UNITS * GROUP + place % GROUP
    real = (row < row_stop) & (place // GROUP < TILE // GROUP) & (within < GROUPS)
    head = unit // UNITS * GROUPS + within
    at = tl.load(positions + row, mask=real, other=0).to(tl.int32)
    own = tl.where(real, at - OWN + 1, 0)
    # From the last group that rows attend to down to the first: the last programs to start have the least to do.
    seen = tl.max(own)
    groups = _groups(seen, SHORT)
    last = groups * each - 1 - tl.program_id(2)
    group, turn = last // each, last % each
    first = 0  # the first position that a row attends to
    if WINDOW > 0:
        first = (tl.min(tl.where(real, at, 1 << 30)) - WINDOW + 1) // BLOCK * BLOCK
    begins, ends = _begins(group, SHORT), _begins(group + 1, SHORT)
    fold = (ends - begins) // TOGETHER  # positions per split
    begins += turn * fold
    start = tl.maximum(begins, first)
    stop = tl.minimum(seen, begins + (TOGETHER // each) * fold)
    mine = (last >= 0) & (start < stop)
    if PAIRED:
        mine = mine & ((last > 0) | (groups == 1))
    if mine:
        part = tl.arange(0, PADDED)
        q = tl.load(
            query + head[:, None] * query_head + row[:, None] * query_row + part[None, :],
            mask=real[:, None] & (part < SIZE)[None, :],
            other=0.0,
        )
        keys += unit // UNITS * key_head
        values += unit // UNITS * value_head
        _walk_exactly(
            q, text, start, stop, fold, own, keys, values, key_slot, value_slot, factor, row, head, real,
            at, rows, heads, sums, peaks, splits, last,
            TILE, SIZE, PADDED, BLOCK, WINDOW, SOFTCAP, PRECISION, INDEX, JOINED,
        )  # fmt: skip
        if PAIRED:
            start, stop = tl.maximum(0, first), SHORT
            if (last == 1) & (start < stop):
                _walk_exactly(
                    q, text, start, stop, fold, own, keys, values, key_slot, value_slot, factor, row, head, real,
                    at, rows, heads, sums, peaks, splits, 0,
                    TILE, SIZE, PADDED, BLOCK, WINDOW, SOFTCAP, PRECISION, INDEX, JOINED,
                )  # fmt: skip


@triton.jit
def _load_group(
    sums, peaks, weights, group, apart, real, inside, begins, seen,
    SIZE: tl.constexpr, SHORT: tl.constexpr, TOGETHER: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """A group of splits of a row that attends to positions from `seen` to `begins`, merged in order.

    The pointers are those of the first split; the same elements of the next one are `apart`.
    """
    if JOINED:  # by `part_exactly`
        number = group * apart
        total = tl.load(sums + number.to(tl.int64) * SIZE, mask=inside, other=0.0)
        peak = tl.load(peaks + number, mask=real, other=float("-inf"))
        return peak, tl.load(weights + number, mask=real, other=0.0), total
    peak = tl.full(real.shape, float("-inf"), tl.float32)
    weight = tl.zeros(real.shape, tl.float32)
    total = tl.zeros(inside.shape, tl.float32)
    start = _begins(group, SHORT)
    walk = (_begins(group + 1, SHORT) - start) // TOGETHER
    for each in tl.static_range(TOGETHER):
        since = start + each * walk
        has = (since < begins) & (since + walk > seen)  # otherwise nothing was written
        number = (group * TOGETHER + each) * apart
        total_more = tl.load(sums + number.to(tl.int64) * SIZE, mask=inside & has, other=0.0)
        peak_more = tl.load(peaks + number, mask=real & has, other=float("-inf"))
        weight_more = tl.load(weights + number, mask=real & has, other=0.0)
        peak, weight, total = _fold(peak, weight, total, peak_more, weight_more, total_more)
    return peak, weight, total


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BOXED)
def merge_exactly(
    query, keys, values, text, length, positions, tree, tree_row, sums, peaks, mixed,
    query_head, query_row, key_head, key_slot, value_head, value_slot, rows, heads, splits, factor, whose, text_line,
    SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr,
    HEADS: tl.constexpr, OWN: tl.constexpr, SHORT: tl.constexpr, TOGETHER: tl.constexpr, JOINED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, INDEX: tl.constexpr,
    COLUMNS: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row, the heads of a key head and COLUMNS features: merge its splits and its last OWN keys into one softmax.

    The splits of a group of TOGETHER are merged in order, then the groups, then the own keys. JOINED: `part_exactly`
    has merged each group's splits already. HEADS is GROUP rounded up to a power of two.

    The own keys do not depend on the kernel before, so they are processed while it runs. Nothing read until then may
    come from the L1 cache, which could hold stale values.
    """
    row, unit = tl.program_id(0), tl.program_id(1)
    if PACKED:
        mine = tl.load(whose + row, cache_modifier=".cg")
        length += mine
        text += mine * text_line
    past = tl.load(length, cache_modifier=".cg").to(tl.int32)
    at = tl.load(positions + row, cache_modifier=".cg").to(tl.int32)
    begins = at - OWN + 1
    position = begins + tl.arange(0, OWN)
    there = position >= 0
    if WINDOW > 0:
        there = there & (at - position < WINDOW)
    slot = tl.load(text + position, mask=there & (position < past), other=0, cache_modifier=".cg")
    path = tree + row.to(tl.int64) * tree_row
    slot += tl.load(path + position - past, mask=there & (position >= past), other=0, cache_modifier=".cg")
    slot = slot.to(INDEX)
    place, part = tl.arange(0, 16), tl.arange(0, PADDED)
    first = unit // UNITS * GROUPS + unit % UNITS * GROUP
    held = tl.minimum(GROUP, GROUPS - unit % UNITS * GROUP)
    real = place < held
    inside = (part < SIZE)[None, :]
    q = tl.load(
        query + (first + place)[:, None] * query_head + row * query_row + part[None, :],
        mask=real[:, None] & inside,
        other=0.0,
        cache_modifier=".cg",
    )
    keys += unit // UNITS * key_head
    values += unit // UNITS * value_head
    inside = inside & there[:, None]
    key = tl.load(keys + slot[:, None] * key_slot + part[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    part = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (part < SIZE)[None, :] & there[:, None]
    value = tl.load(values + slot[:, None] * value_slot + part[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    peak_own, weight_own, total_own = _add_exactly(
        q, key, value, real[:, None] & there[None, :], factor,
        tl.full([16], float("-inf"), tl.float32), tl.zeros([16, 16], tl.float32), tl.zeros([16, COLUMNS], tl.float32),
        tl.full([OWN, 16], 1.0, value.dtype), SOFTCAP, PRECISION,
    )  # fmt: skip
    # Only real heads, without the tile's padding.
    peak_own = tl.max(tl.reshape(peak_own, [16 // HEADS, HEADS]), 0)
    weight_own = tl.sum(tl.reshape(_column(weight_own), [16 // HEADS, HEADS]), 0)
    total_own = tl.sum(tl.reshape(total_own, [16 // HEADS, HEADS, COLUMNS]), 0)

    _wait(EARLY)
    head = first + tl.arange(0, HEADS)
    real = tl.arange(0, HEADS) < held
    inside = real[:, None] & (part < SIZE)[None, :]
    apart = rows * heads
    number = row * heads + head
    peaks += number
    weights = peaks + splits * apart
    sums += number[:, None] * SIZE + part[None, :]
    begins = tl.maximum(begins, 0)
    seen = 0  # the first position that the row attends to
    if WINDOW > 0:
        seen = tl.maximum(at - WINDOW + 1, 0)
        if WINDOW <= OWN:
            begins = 0
    first_group = tl.minimum(seen // SHORT, 1 + seen // (2 * SHORT))
    groups = _groups(begins, SHORT)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, COLUMNS], tl.float32)
    for group in tl.range(first_group, groups, loop_unroll_factor=UNROLL):  # so that loads overlap
        more = _load_group(
            sums, peaks, weights, group, apart, real, inside, begins, seen, SIZE, SHORT, TOGETHER, JOINED
        )
        peak, weight, total = _fold(peak, weight, total, more[0], more[1], more[2])
    peak, weight, total = _fold(peak, weight, total, peak_own, weight_own, total_own)
    weight = tl.where(weight > 0, weight, 1.0)
    tl.store(mixed + number[:, None] * SIZE + part[None, :], total / weight[:, None], mask=inside)


@triton.jit(do_not_specialize=["count"])
def product(
    states, weights, bias, product, count, inputs, outputs, walk,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PARTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of up to TILE rows and the weights of OUTPUTS outputs, plus the bias if it is not None.

    PARTED: a sum of parts, each over `walk` inputs.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, TILE)
    place = tl.arange(0, BLOCK)
    real = (row < count)[None, :]
    total = tl.zeros([OUTPUTS, TILE], tl.float32)
    before = tl.zeros([OUTPUTS, TILE], tl.float32)  # the sum of finished parts
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
    """The same for one of several tiles of rows: all PARTS parts, or a single one, to be summed by `add_up`.

    States and weights are descriptors, which read zeros beyond the last row.
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
    """Part of a row: the sum of its parts, plus the bias if it is not None."""
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
def split_states(
    states, parts, sizes, count, inputs,
    WIDTH: tl.constexpr, GATED: tl.constexpr, LEVELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row as int8 in two parts: the values are (first + second / (2 × LEVELS)) times the row's size.

    GATED: of SiLU(gate) × up, from a row that has the gates first.
    """
    _wait(EARLY)
    row, place = tl.program_id(0), tl.arange(0, WIDTH)
    there = place < inputs
    if GATED:
        gate = tl.load(states + row * 2 * inputs + place, mask=there, other=0.0)
        value = _gate(gate, tl.load(states + row * 2 * inputs + inputs + place, mask=there, other=0.0).to(tl.float32))
    else:
        value = tl.load(states + row * inputs + place, mask=there, other=0.0).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(value), 0), 1e-30) / LEVELS
    value = value / size
    first = tl.floor(value + 0.5)
    second = tl.floor((value - first) * (2 * LEVELS) + 0.5)
    tl.store(parts + row * inputs + place, first.to(tl.int8), mask=there)
    tl.store(parts + (count + row) * inputs + place, second.to(tl.int8), mask=there)
    tl.store(sizes + row, size)


@triton.jit(do_not_specialize=["count"])
def int8_product(
    parts, sizes, weights, scales, bias, product, count, inputs, outputs,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `product`, from both parts of up to TILE rows and int8 weights with a scale per output."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, TILE)
    place = tl.arange(0, BLOCK)
    real = (row < count)[None, :]
    first = tl.zeros([OUTPUTS, TILE], tl.int32)
    second = tl.zeros([OUTPUTS, TILE], tl.int32)
    _fetch(weights, output, 0, inputs, EARLY)
    _wait(EARLY)
    for start in range(0, inputs, BLOCK):
        weight = tl.load(weights + output[:, None] * inputs + (start + place)[None, :])
        value = parts + row[None, :] * inputs + (start + place)[:, None]
        first = tl.dot(weight, tl.load(value, mask=real, other=0), first, out_dtype=tl.int32)
        second = tl.dot(weight, tl.load(value + count * inputs, mask=real, other=0), second, out_dtype=tl.int32)
    total = first.to(tl.float32) + second.to(tl.float32) / (2 * LEVELS)
    total = total * tl.load(scales + output)[:, None] * tl.load(sizes + row, mask=row < count, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + output)[:, None]
    tl.store(product + row[None, :] * outputs + output[:, None], total, mask=real)


@triton.jit(do_not_specialize=["count"])
def gated(
    states, weights, product, first_weight, count, inputs, outputs,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """SiLU(gate) × up for a tile of rows, with the weights of OUTPUTS gates and OUTPUTS outputs.

    States and weights are descriptors, which read zeros beyond the last row.
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
    rounded = product.dtype.element_ty  # rounded as stored products would be
    row, output = tile + tl.arange(0, TILE), first + tl.arange(0, OUTPUTS)
    place = product + row[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(place, _gate(gate.to(rounded), total.to(rounded)), mask=(row < count)[None, :])


@triton.jit
def gate(products, gated, outputs, PIECE: tl.constexpr):
    """SiLU(gate) × up for part of a row of products, which has the gates first."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = place < outputs
    gate = tl.load(products + row * 2 * outputs + place, mask=there)
    total = tl.load(products + row * 2 * outputs + outputs + place, mask=there)
    tl.store(gated + row * outputs + place, _gate(gate, total), mask=there)


@triton.jit
def highest(logits, highest, width, PART: tl.constexpr, EARLY: tl.constexpr):
    """The highest logit of part of a row and its index, as one sortable integer."""
    _wait(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    place = part * PART + tl.arange(0, PART)
    logit = tl.load(logits + row.to(tl.int64) * width + place, mask=place < width, other=float("-inf")).to(tl.float32)
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # -0.0 counts as 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    order = tl.where(logit != logit, 0x7FFFFFFF, order)
    number = (order.to(tl.int64) << 32) | (0x7FFFFFFF - place)
    tl.store(highest + row * tl.num_programs(1) + part, tl.max(number, 0))


@triton.jit(do_not_specialize=["rows"])
def best(highest, found, rows, parts, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """The best of a row's parts: its index, and the logit."""
    _wait(EARLY)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    number = tl.max(tl.load(highest + row * parts + part, mask=part < parts, other=-(1 << 63)), 0)
    order = (number >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    tl.store(found + row, (0x7FFFFFFF - (number & 0x7FFFFFFF)).to(tl.float64))
    tl.store(found + rows + row, bits.to(tl.float32, bitcast=True).to(tl.float64))
