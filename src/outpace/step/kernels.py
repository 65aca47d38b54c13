"""The functions of this package as Triton kernels: one program per lane, one launch where torch needs fifty.

They compute what `plant`, `walk`, `Lanes.keep` and the sources compute, and tests compare them with those. Names in
capitals are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..models.kernels import _wait

LANES_VARY = ["text_line", "searched_line", "nodes", "most", "count", "span", "at", "total", "source"]
ROWS_VARY = ["rows", "count", "number"]
DIGITS = tl.constexpr(16)  # values of a four-bit digit
# Bits of `compare`: a node's marks (the first says that it is a probe), and whether a node with the same path is ahead.
ACCEPTED_MARK, FREE_MARK = tl.constexpr(2), tl.constexpr(4)
TWICE, FREE_TWICE = tl.constexpr(8), tl.constexpr(16)


@triton.jit
def mix(tokens, depths):
    """As `nodes.mix`."""
    mixed = tokens * 0x1E3779B97F4A7C15 + (tokens * 0 + depths) * 0x1B873593  # in 64 bits
    mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
    return mixed ^ (mixed >> 29)


@triton.jit(do_not_specialize=LANES_VARY)
def join(
    tokens, depths, paths, chances, sources, token_line, depth_line, path_line, path_node, chance_line, source_line,
    all_tokens, all_depths, all_paths, all_chances, all_sources, source, nodes, at, total,
    NODES: tl.constexpr, FROM: tl.constexpr, DEEP: tl.constexpr, GIVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: copy one offer's nodes, whose paths have FROM hashes, into the array of all nodes, starting at `at`."""
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    there = node < nodes
    place = lane * total + at + node
    tl.store(all_tokens + place, tl.load(tokens + lane * token_line + node, mask=there), mask=there)
    tl.store(all_depths + place, tl.load(depths + lane * depth_line + node, mask=there), mask=there)
    tl.store(all_chances + place, tl.load(chances + lane * chance_line + node, mask=there), mask=there)
    number = tl.zeros([NODES], tl.int64) + source
    if GIVEN:
        number = tl.load(sources + lane * source_line + node, mask=there)
    tl.store(all_sources + place, number, mask=there)
    for depth in tl.static_range(FROM):  # beyond, no node of this offer is read
        way = tl.load(paths + lane * path_line + node * path_node + depth, mask=there, other=0)
        tl.store(all_paths + place * DEEP + depth, way, mask=there)


@triton.jit
def _either(left, right):
    return left | right


@triton.jit(do_not_specialize=LANES_VARY)
def compare(
    depths, paths, chances, sources, marks, lengths, context, turn, table,
    keys, found, unique, hashes, likely_sources, nodes, least,
    NODES: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr, MUST: tl.constexpr,
    DEEPER: tl.constexpr, LATER: tl.constexpr, LEARNED: tl.constexpr, KNOTS: tl.constexpr, HALVING: tl.constexpr,
    LOWEST: tl.constexpr, SOURCES: tl.constexpr, COSTLY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """PART nodes of a lane: their keys, by which they are ranked, and which other nodes have the same path.

    Of nodes with the same path one remains: the one with the highest key, the first of equals. `unique` [lanes, 3,
    NODES] has the keys of those nodes, of those that would remain without costly sources, and the highest key of each
    path. `found` has the marks of all nodes with the same path (see `fused._marks`; the first is inverted), TWICE if
    one of them is ahead, and FREE_TWICE if one from a source that is not costly is. All programs of a lane write the
    same `keys`, `hashes` and `likely_sources`: their threads communicate through memory.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + lane)
    node = tl.arange(0, NODES)
    there = node < nodes
    base = lane * nodes
    keys += lane * NODES
    hashes += lane * NODES
    room = tl.maximum(context - 1 - (length - 1), 0)
    if turn > 0:
        room = tl.where(length - 1 < turn, tl.minimum(room, tl.maximum(turn - length, 0)), room)
    depth = tl.load(depths + base + node, mask=there, other=0)
    chance = tl.load(chances + base + node, mask=there, other=float("-inf"))
    probe = (tl.load(marks + node, mask=there, other=0) & 1) != 0
    chance = tl.where(depth > room, float("-inf"), chance)
    source = tl.load(sources + base + node, mask=there, other=0)
    if LEARNED:
        at = tl.minimum(tl.maximum(chance * (-HALVING / 0.6931471805599453), 0.0), KNOTS - 1.0)
        left = tl.minimum(at.to(tl.int32), KNOTS - 2)
        low = tl.load(table + source * KNOTS + left)
        high = tl.load(table + source * KNOTS + left + 1)
        believed = low + (high - low) * (at - left) + tl.minimum(chance - LOWEST, 0.0)
        chance = tl.where(probe | (chance == float("-inf")), chance, believed)
        source += SOURCES * (at + 0.5).to(tl.int64)
    likeliest = tl.max(tl.where(probe, float("-inf"), chance), 0)
    if likeliest < least:
        chance = tl.where(probe, chance, float("-inf"))
    key = chance + tl.where(probe, MUST - node * LATER, -depth.to(tl.float32) * DEEPER)
    tl.store(keys + node, key)
    tl.store(likely_sources + lane * NODES + node, source)
    tl.store(hashes + node, tl.load(paths + (base + node) * DEEP + depth, mask=there, other=0))
    tl.debug_barrier()
    mine = tl.program_id(1) * PART + tl.arange(0, PART)
    my_key = tl.load(keys + mine)
    my_hash = tl.load(hashes + mine)
    bits = tl.zeros([BLOCK, PART], tl.int32)
    top = tl.full([BLOCK, PART], float("-inf"), tl.float32)
    for begin in range(0, nodes, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        its_key = tl.load(keys + other, mask=other < nodes, other=float("-inf"))
        its_bits = tl.load(marks + other, mask=other < nodes, other=0) ^ 1
        its_hash = tl.load(hashes + other, mask=other < nodes, other=-1)
        same = (its_hash[:, None] == my_hash[None, :]) & (its_key > float("-inf"))[:, None]
        ahead = its_key[:, None] > my_key[None, :]
        ahead = ahead | ((its_key[:, None] == my_key[None, :]) & (other[:, None] < mine[None, :]))
        its_twice = its_bits | TWICE | ((its_bits & FREE_MARK) * (FREE_TWICE // FREE_MARK))
        bits |= tl.where(same, tl.where(ahead, its_twice[:, None], its_bits[:, None]), 0)
        if COSTLY:
            top = tl.maximum(top, tl.where(same, its_key[:, None], float("-inf")))
    together = tl.reduce(bits, 0, _either)
    tl.store(found + lane * NODES + mine, together)
    unique += lane * 3 * NODES + mine
    tl.store(unique, tl.where((together & TWICE) != 0, float("-inf"), my_key))
    if COSTLY:
        free = (tl.load(marks + mine, mask=mine < nodes, other=0) & FREE_MARK) != 0
        tl.store(unique + NODES, tl.where(free & ((together & FREE_TWICE) == 0), my_key, float("-inf")))
        tl.store(unique + 2 * NODES, tl.max(top, 0))


@triton.jit(do_not_specialize=LANES_VARY)
def rank(unique, ranks, nodes, NODES: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The ranks of PART nodes of a lane, by key (descending), then index. A key of -inf is no node.

    The last dimension of the grid is that of `unique` [lanes, 3, NODES] and `ranks` [lanes, 2, NODES].
    """
    _wait(EARLY)
    lane, kind = tl.program_id(0).to(tl.int64), tl.program_id(2)
    unique += (lane * 3 + kind) * NODES
    mine = tl.program_id(1) * PART + tl.arange(0, PART)
    key = tl.load(unique + mine)
    before = tl.zeros([BLOCK, PART], tl.int32)
    for begin in range(0, nodes, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        its_key = tl.load(unique + other, mask=other < nodes, other=float("-inf"))[:, None]
        tied = (its_key == key[None, :]) & (other[:, None] < mine[None, :]) & (its_key > float("-inf"))
        before += ((its_key > key[None, :]) | tied).to(tl.int32)
    tl.store(ranks + (lane * 2 + kind) * NODES + mine, tl.sum(before, 0))


@triton.jit
def _ranks(keys, flags, key, flag, node, nodes, NODES: tl.constexpr, BLOCK: tl.constexpr):
    """The rank of each node, by flag, then key (both descending), then index. A key of -inf is no node.

    A thread compares its own nodes with all others, which lie along the first dimension: threads exchange nothing.
    """
    rank = tl.zeros([NODES], tl.int32)
    for begin in range(0, nodes, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        its_key = tl.load(keys + other, mask=other < nodes, other=float("-inf"))[:, None]
        its_flag = tl.load(flags + other, mask=other < nodes, other=0)[:, None]
        tied = (its_key == key[None, :]) & (other[:, None] < node[None, :])
        before = (its_flag == flag[None, :]) & ((its_key > key[None, :]) | tied)
        before = (before | (its_flag > flag[None, :])) & (its_key > float("-inf"))
        rank += tl.sum(before.to(tl.int32), 0)
    return rank


@triton.jit
def _expect(expected, key, rank, MUST: tl.constexpr, CUTS: tl.constexpr, WIDE: tl.constexpr):
    """The expected tokens of trees of 1, 2, 4, … rows, from nodes with these keys and ranks."""
    likely = tl.where(key < MUST / 2, tl.exp(tl.minimum(key, 0.0)), 0.0)
    cut = tl.arange(0, WIDE)
    taken = rank[None, :] < (1 << cut)[:, None] - 1
    tl.store(expected + cut, 1.0 + tl.sum(tl.where(taken, likely[None, :], 0.0), 1), mask=cut < CUTS)


@triton.jit(do_not_specialize=LANES_VARY)
def plant(
    tokens, depths, paths, likely_sources, hashes, unique, ranks, found,
    text, lengths, limits, slots, text_line,
    row_tokens, row_parents, row_depths, row_sees, row_words, row_valid, row_accepted, row_sources, row_hashes,
    fixed_tokens, fixed_positions, fixed_slots, fixed_tree, tree_line, fixed_lengths, scratch,
    keys, flags, numbers, prices, expected, nodes, most, count,
    NODES: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    PROBES: tl.constexpr, PRICED: tl.constexpr, MUST: tl.constexpr, LEARNED: tl.constexpr, FREE: tl.constexpr,
    COSTLY: tl.constexpr, CUTS: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: write its most likely nodes to static buffers, as `count` rows; at most `most` are not padding.

    NODES, ROWS and WIDE are `nodes`, `count` and CUTS rounded up to powers of two. Paths have DEEP hashes. `keys` and
    `flags` [lanes, NODES] and `numbers` [lanes, 2 × ROWS] are scratch memory through which threads communicate; what is
    known of the nodes comes from `compare` and `rank`. EXACT: what rows attend to is written as slots by depth, not as
    bits.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + lane)
    start = tl.maximum(length - 1, 0)
    active = length < tl.load(limits + lane)
    row = tl.arange(0, ROWS)
    real = row < count
    first = lane * count
    root = tl.load(text + lane * text_line + start)
    tl.store(row_tokens + first + row, tl.where(row == 0, root, 0), mask=real)
    tl.store(row_depths + first + row, tl.zeros([ROWS], tl.int64), mask=real)
    tl.store(row_sources + first + row, tl.zeros([ROWS], tl.int64), mask=real)
    tl.store(row_hashes + first + row, tl.zeros([ROWS], tl.int64), mask=real)
    tl.store(row_accepted + first + row, (row == 0).to(tl.int8), mask=real)
    mine = numbers + lane * 2 * ROWS
    if NODES > 0:
        node = tl.arange(0, NODES)
        there = node < nodes
        base = lane * nodes
        at = lane * NODES + node
        keys += lane * NODES
        flags += lane * NODES
        depth = tl.load(depths + base + node, mask=there, other=0)
        source = tl.load(likely_sources + at)
        hashed = tl.load(hashes + at)
        marks = tl.load(found + at)  # of all nodes with the same path
        guess = marks & 1
        accepted = marks & ACCEPTED_MARK
        unique += lane * 3 * NODES + node
        key = tl.load(unique)
        rank = tl.load(ranks + lane * 2 * NODES + node)
        if LEARNED:
            source += tl.where((marks & FREE_MARK) != 0, FREE, 0)
            expected += lane * (2 * CUTS + 1)
            _expect(expected, key, rank, MUST, CUTS, WIDE)
            free_key, top, free_rank = key, key, rank
            if COSTLY:
                free_key = tl.load(unique + NODES)
                top = tl.load(unique + 2 * NODES)
                free_rank = tl.load(ranks + (lane * 2 + 1) * NODES + node)
            _expect(expected + CUTS, free_key, free_rank, MUST, CUTS, WIDE)
        taken = (rank < most - 1) & (key > float("-inf"))
        if LEARNED:
            planted = top >= tl.min(tl.where(taken, key, float("inf")), 0)
            hoped = tl.where(planted & (free_key < MUST / 2), tl.exp(tl.minimum(free_key, 0.0)), 0.0)
            tl.store(expected + 2 * CUTS, tl.sum(hoped, 0))
        if PROBES:  # candidates first, including those that are also probes
            tl.debug_barrier()
            tl.store(keys + node, tl.where(taken, key, float("-inf")))
            tl.store(flags + node, guess)
            tl.debug_barrier()
            rank = _ranks(keys, flags, key, guess, node, nodes, NODES, BLOCK)
        place = rank + 1
        if PRICED:
            tl.store(mine + row, tl.zeros([ROWS], tl.int64))
            tl.debug_barrier()
            likely = tl.where(key < MUST / 2, tl.exp(tl.minimum(key, 0.0)), 0.0)
            tl.store(mine + place, likely.to(tl.float64).to(tl.int64, bitcast=True), mask=taken)
            tl.debug_barrier()
            likely_row = tl.load(mine + row).to(tl.float64, bitcast=True).to(tl.float32)
            price = tl.load(prices + row, mask=row < most, other=float("inf"))
            worth = (1.0 + tl.cumsum(likely_row, 0)) / price
            best = tl.min(tl.where(worth == tl.max(worth, 0), row, ROWS), 0)
            taken = taken & ((place <= best) | (key >= MUST / 2))
            if PROBES:  # they move up where candidates were dropped
                tl.debug_barrier()
                tl.store(keys + node, tl.where(taken, key, float("-inf")))
                tl.debug_barrier()
                place = _ranks(keys, flags, key, guess, node, nodes, NODES, BLOCK) + 1
        tl.debug_barrier()
        tl.store(mine + row, tl.full([ROWS], -1, tl.int64))
        tl.debug_barrier()
        tl.store(mine + place, node.to(tl.int64), mask=taken)  # the node of each row
        tl.store(row_tokens + first + place, tl.load(tokens + base + node, mask=taken, other=0), mask=taken)
        tl.store(row_sources + first + place, source, mask=taken)
        tl.store(row_depths + first + place, depth, mask=taken)
        tl.store(row_hashes + first + place, hashed, mask=taken)
        tl.store(row_accepted + first + place, (accepted != 0).to(tl.int8), mask=taken)
        tl.debug_barrier()
        of = tl.load(mine + row)
        valid = (of >= 0) | (row == 0)
        of = tl.maximum(of, 0)
        row_depth = tl.load(row_depths + first + row, mask=real, other=0)
        guessed = valid & (row > 0)
        way = paths + (base + of) * DEEP
        above = tl.load(way + tl.maximum(row_depth - 1, 0), mask=guessed, other=-1)
    else:
        tl.debug_barrier()
        valid = row == 0
        guessed = row < 0
        row_depth = tl.zeros([ROWS], tl.int64)
        way = paths + row.to(tl.int64)
        above = tl.full([ROWS], -1, tl.int64)
    tl.store(row_valid + first + row, valid.to(tl.int8), mask=real)
    tl.store(mine + ROWS + row, valid.to(tl.int64))
    tl.debug_barrier()
    parent = tl.zeros([ROWS], tl.int64)
    each = tl.arange(0, 32)
    bit_lane = lane * count
    for word in range(WORDS):
        bits = tl.zeros([ROWS], tl.int64)
        for half in range(2):
            other = word * 64 + half * 32 + each
            inside = other < count
            its_valid = (tl.load(mine + ROWS + other, mask=inside, other=0) > 0) & inside
            its_depth = tl.load(row_depths + first + other, mask=inside, other=0)
            its_hash = tl.load(row_hashes + first + other, mask=inside, other=1)
            is_parent = (above[:, None] == its_hash[None, :]) & (its_valid[None, :] & guessed[:, None])
            parent = tl.maximum(parent, tl.max(tl.where(is_parent, other[None, :].to(tl.int64), 0), 1))
            can = its_valid[None, :] & guessed[:, None] & (its_depth[None, :] <= row_depth[:, None])
            passed = tl.load(way[:, None] + its_depth[None, :], mask=can, other=0)
            sees = (can & (passed == its_hash[None, :])) | (other[None, :] == row[:, None])
            tl.store(
                row_sees + (first + row[:, None]) * count + other[None, :],
                sees.to(tl.int8),
                mask=real[:, None] & inside[None, :],
            )
            one = tl.full([32], 1, tl.int64) << (half * 32 + each).to(tl.int64)
            bits += tl.sum(tl.where(sees & inside[None, :], one[None, :], 0), 1)
            if EXACT:
                its_slot = tl.load(slots + lane * text_line + start + other, mask=inside, other=0)
                its_slot = tl.where(its_valid & active, its_slot, scratch)
                by_depth = fixed_tree + (first + row)[:, None] * tree_line + its_depth[None, :]
                tl.store(by_depth, its_slot[None, :] + 0 * bits[:, None], mask=sees & inside[None, :] & real[:, None])
        tl.store(row_words + (first + row) * WORDS + word, bits, mask=real)
        if not EXACT:
            # Among the rows of all lanes, this lane's start at bit `lane × count`.
            shifted = bits << (bit_lane % 64)
            tl.store(fixed_tree + (first + row) * tree_line + bit_lane // 64 + word, shifted, mask=real)
    tl.store(row_parents + first + row, parent, mask=real)
    tl.store(fixed_tokens + first + row, tl.load(row_tokens + first + row, mask=real, other=0), mask=real)
    # An idle lane has length 0.
    tl.store(fixed_positions + first + row, tl.where(active, start, 0) + row_depth, mask=real)
    slot = tl.load(slots + lane * text_line + start + row, mask=real, other=0)
    tl.store(fixed_slots + first + row, tl.where(valid & active, slot, scratch), mask=real)
    tl.store(fixed_lengths + lane, tl.where(active, start, 0))


@triton.jit(do_not_specialize=LANES_VARY)
def settle(
    chosen, found, all_rows, row_tokens, row_parents, row_depths, row_words, row_valid, row_accepted, row_sources,
    text, lengths, limits, slots, text_line, times_seen, times_answered, vocabulary,
    best, kept_rows, kept_tokens, kept_counts, before, report, report_line, count, said, more,
    ROWS: tl.constexpr, WORDS: tl.constexpr, DEEP: tl.constexpr, DEPTHS: tl.constexpr, COUNTED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: verify its draft tree, keep the accepted path, and report it to the host.

    A path has at most DEEP rows; DEPTHS is that rounded up to a power of two. COUNTED: kept tokens are counted [lanes,
    vocabulary]. `said`, `more` values per lane (at most 16), is copied into the report.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = row < count
    first = lane * count
    length = tl.load(lengths + lane)
    start = tl.maximum(length - 1, 0)
    limit = tl.load(limits + lane)
    highest = tl.load(found + first + row, mask=real, other=0).to(tl.int64)
    tl.store(best + first + row, highest, mask=real)
    parent = tl.load(row_parents + first + row, mask=real, other=0)
    pick = tl.load(chosen + first + row, mask=real, other=0).to(tl.int64)
    there = tl.load(chosen + all_rows + first + row, mask=real, other=0) > float("-inf")
    choice = tl.load(chosen + first + parent, mask=real, other=-1).to(tl.int64)
    valid = (tl.load(row_valid + first + row, mask=real, other=0) > 0) & real
    accepted = tl.load(row_accepted + first + row, mask=real, other=0) > 0
    token = tl.load(row_tokens + first + row, mask=real, other=0)
    depth = tl.load(row_depths + first + row, mask=real, other=0)
    wrong = ((token != choice) | (accepted == 0) | (valid == 0)) & (row > 0)
    one = tl.full([ROWS], 1, tl.int64) << (row % 64).to(tl.int64)
    holds = valid
    for word in range(WORDS):
        wrongs = tl.sum(tl.where(wrong & (row // 64 == word), one, 0), 0)
        seen = tl.load(row_words + (first + row) * WORDS + word, mask=real, other=0)
        holds = holds & ((seen & wrongs) == 0)
    deepest = tl.max(tl.where(holds, depth, 0), 0)
    last = tl.min(tl.where(holds & (depth == deepest), row, ROWS), 0)
    path = tl.load(row_words + (first + last) * WORDS + row // 64, mask=real, other=0)
    on_path = ((path & one) != 0) & real
    kept_count = tl.maximum(tl.minimum(deepest + 1, limit - length), 0)
    kept = on_path & (depth < kept_count)
    behind = kept_count + tl.cumsum(tl.where(kept, 0, 1), 0) - 1
    place = tl.where(kept, depth, behind)
    window = slots + lane * text_line + start
    slot = tl.load(window + row, mask=real, other=0)
    deep = tl.arange(0, DEPTHS)
    tl.store(kept_rows + lane * DEEP + deep, tl.zeros([DEPTHS], tl.int64), mask=deep < DEEP)
    tl.store(kept_tokens + lane * DEEP + deep, tl.zeros([DEPTHS], tl.int64), mask=deep < DEEP)
    report += lane * report_line
    tl.store(report + 2 + deep, tl.zeros([DEPTHS], tl.int32), mask=deep < DEEP)
    tl.store(report + 2 + DEEP + deep, tl.zeros([DEPTHS], tl.int32), mask=deep < DEEP)
    tl.debug_barrier()
    tl.store(window + place, slot, mask=real)
    tl.store(text + lane * text_line + length + depth, pick, mask=kept)
    tl.store(lengths + lane, length + kept_count)
    tl.store(before + lane, length)
    tl.store(kept_counts + lane, kept_count)
    tl.store(kept_rows + lane * DEEP + depth, row.to(tl.int64), mask=kept)
    tl.store(kept_tokens + lane * DEEP + depth, pick, mask=on_path)
    if COUNTED:
        tl.atomic_add(times_seen + lane * vocabulary + pick, 1.0, mask=kept, sem="relaxed")
        tl.atomic_add(times_answered + lane * vocabulary + pick, 1.0, mask=kept, sem="relaxed")
    lost = tl.min(tl.where(kept & (there == 0), depth, DEPTHS), 0)
    tl.store(report, kept_count.to(tl.int32))
    tl.store(report + 1, tl.where(lost < DEPTHS, lost, -1).to(tl.int32))
    tl.store(report + 2 + depth, row, mask=kept)
    tl.store(report + 2 + DEEP + depth, pick.to(tl.int32), mask=on_path)
    rest = report + 2 + 2 * DEEP
    place = tl.arange(0, 16)
    heard = tl.load(said + lane * more + place, mask=place < more, other=0)
    tl.store(rest + 4 * count + place, heard.to(tl.int32), mask=place < more)
    tl.store(rest + row, token.to(tl.int32), mask=real)
    tl.store(rest + count + row, parent.to(tl.int32), mask=real)
    source = tl.load(row_sources + first + row, mask=real, other=0)
    tl.store(rest + 2 * count + row, source.to(tl.int32), mask=real)
    mark = valid.to(tl.int32) + (valid & accepted).to(tl.int32)
    tl.store(rest + 3 * count + row, mark, mask=real)


@triton.jit(do_not_specialize=[*LANES_VARY, "scratch"])
def follow(
    kept_rows, kept_tokens, kept_counts, before, slots, text_line, scratch, count,
    tokens, positions, taken, lengths, states, last,
    DEEP: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: write the kept tokens as EACH rows to static buffers, where heads read them.

    WIDTH is EACH rounded up to a power of two. `states` gets the index of each one's hidden state among all rows.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    real = place < EACH
    known = real & (place < DEEP)
    kept = tl.load(kept_counts + lane)
    start = tl.maximum(tl.load(before + lane) - 1, 0)
    mine = lane * EACH + place
    tl.store(tokens + mine, tl.load(kept_tokens + lane * DEEP + place, mask=known, other=0), mask=real)
    tl.store(positions + mine, start + place, mask=real)
    slot = tl.load(slots + lane * text_line + start + place, mask=real & (place < kept), other=0)
    tl.store(taken + mine, tl.where(place < kept, slot, scratch), mask=real)
    row = tl.load(kept_rows + lane * DEEP + place, mask=known, other=0)
    tl.store(states + mine, lane * count + row, mask=real)
    tl.store(lengths + lane, tl.where(kept > 0, start, 0))
    tl.store(last + lane, lane * EACH + tl.maximum(kept - 1, 0))


@triton.jit(do_not_specialize=LANES_VARY)
def matches(
    text, lengths, text_line, searched, searched_line, span, scores,
    LONGEST: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane, BLOCK of the `span` positions that are searched: the PLACES best matches with the sequence's end.

    Their scores [lanes, blocks, PLACES] are match length × `span` + position; -1 where there are no more. OWN: the
    sequence itself is searched, up to its end.
    """
    _wait(EARLY)
    lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text += lane * text_line
    searched += lane * searched_line
    scores += (lane * tl.num_programs(1) + block) * PLACES
    length = tl.load(lengths + lane).to(tl.int32)
    at = block * BLOCK + tl.arange(0, BLOCK)
    going = at < (tl.minimum(length - 1, span) if OWN else span)
    match = tl.zeros([BLOCK], tl.int32)
    compared = tl.full([], 0, tl.int32)
    longest = tl.full([], 0, tl.int32)
    while (longest == compared) & (compared < LONGEST):  # four more tokens, while some position still matches
        for more in tl.static_range(4):
            back = compared + more
            end = tl.load(text + tl.maximum(length - 1 - back, 0))
            here = tl.load(searched + tl.maximum(at - back, 0), mask=going, other=-1)
            going = going & (here == end) & (at >= back) & (length > back) & (back < LONGEST)
            match += going.to(tl.int32)
        compared += 4
        longest = tl.max(match, 0)
    score = tl.where(match > 0, match * span + at, -1)
    for number in tl.static_range(PLACES):
        best = tl.max(score, 0)
        score = tl.where(score == best, -1, score)
        tl.store(scores + number, best)


@triton.jit(do_not_specialize=LANES_VARY)
def history(
    searched, searched_line, span, lengths, scores, found, leasts, floor, tokens, chances, paths, nodes,
    CLASSES: tl.constexpr, DOUBT: tl.constexpr, AGAIN: tl.constexpr, OTHER: tl.constexpr, MOST: tl.constexpr,
    FOUND: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, DEPTHS: tl.constexpr,
    OWN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: continue the PLACES best of the `found` matches of `matches` by DEPTH tokens, with probabilities.

    There are up to eight CLASSES of matches. DOUBT, AGAIN, OTHER and MOST are logarithms to base 2. FOUND and WIDTH
    are `found` and PLACES (at most 255) rounded up to powers of two. DEPTHS (a power of two) depths are computed at a
    time. Nodes are in the order of matches; paths have DEPTH + 1 hashes.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    searched += lane * searched_line
    each, place = tl.arange(0, FOUND), tl.arange(0, WIDTH)
    some = tl.load(scores + lane * found + each, mask=each < found, other=-1)
    score = tl.full([WIDTH], -1, tl.int32)
    for number in tl.static_range(PLACES):
        best = tl.max(some, 0)
        some = tl.where(some == best, -1, some)
        score = tl.where(place == number, best, score)
    matched = tl.where(score >= 0, score // span, 0)
    where = tl.where(score >= 0, score % span, 0)
    period = tl.full([WIDTH], DEPTH, tl.int32)
    if OWN:  # a match that overlaps the sequence's end repeats itself
        period = tl.maximum(tl.load(lengths + lane).to(tl.int32) - 1 - where, 1)
    there = place < PLACES
    node = lane * nodes + place * DEPTH
    column = tl.arange(0, DEPTHS)
    parted = tl.full([WIDTH, WIDTH], DEPTH, tl.int32)  # the depth at which two continuations first differ
    above = tl.zeros([WIDTH], tl.float32)  # log probability of the path so far
    hashed_above = tl.zeros([WIDTH], tl.int64)
    for begin in range(0, DEPTH, DEPTHS):
        depth = begin + column
        token = tl.load(searched + tl.minimum(where[:, None] + 1 + depth[None, :] % period[:, None], span - 1))
        differ = token[:, None, :] != token[None, :, :]
        parted = tl.minimum(parted, tl.min(tl.where(differ, depth[None, None, :], DEPTH), 2))
        # How many continuations share the path, with this token and without it: one byte per class.
        grown = matched[:, None] + depth[None, :]
        heard = ((matched > 0) & there)[:, None]
        votes = tl.zeros([WIDTH, DEPTHS], tl.int64)
        for kind in tl.static_range(CLASSES):
            one = tl.full([WIDTH, DEPTHS], 1, tl.int64) << (8 * kind)
            votes += tl.where(heard & (grown >= tl.load(leasts + kind)), one, 0)
        agree = depth[None, None, :] < parted[:, :, None]
        before = depth[None, None, :] <= parted[:, :, None]
        mine = tl.sum(tl.where(agree, votes[None, :, :], 0), 1)
        total = tl.sum(tl.where(before, votes[None, :, :], 0), 1)
        # How many tokens follow: of those with the same path, the first is counted.
        known = tl.max((agree & (place[None, :] < place[:, None])[:, :, None]).to(tl.int32), 1)
        ways = tl.sum(tl.where(before, tl.where(known == 0, votes, 0)[None, :, :], 0), 1)
        chance = tl.zeros([WIDTH, DEPTHS], tl.float32)
        belief = tl.full([WIDTH, DEPTHS], 1.0, tl.float32)
        for shorter in tl.static_range(CLASSES):
            byte = 8 * (CLASSES - 1 - shorter)
            all_votes = ((total >> byte) & 255).to(tl.float32)
            my_votes = ((mine >> byte) & 255).to(tl.float32)
            followed = ((ways >> byte) & 255).to(tl.float32)
            doubt = DOUBT + AGAIN * (all_votes - followed) + OTHER * (followed - 1)
            doubt = tl.exp2(tl.minimum(doubt, MOST))
            doubt = tl.where(all_votes > 0, doubt, 1.0)
            chance += belief * (1 - doubt) * my_votes / tl.maximum(all_votes, 1.0)
            belief *= doubt
        logs = tl.log(tl.where(heard & (token >= 0), chance, 0.0))  # a negative token ends a stored sequence
        path = above[:, None] + tl.cumsum(logs, 1)
        added = mix(token, (depth + 1)[None, :])
        hashed = hashed_above[:, None] + tl.cumsum(added, 1)
        above += tl.sum(logs, 1)
        hashed_above += tl.sum(added, 1)
        out = node[:, None] + depth[None, :]
        real = there[:, None] & (depth < DEPTH)[None, :]
        tl.store(tokens + out, token, mask=real)
        tl.store(chances + out, tl.where(path < floor, float("-inf"), path), mask=real)
        tl.store(paths + out * (DEPTH + 1), tl.zeros([WIDTH, DEPTHS], tl.int64), mask=real)
        for deeper in range(begin, DEPTH, DEPTHS):  # all nodes from here on share these hashes
            below = deeper + column
            line = paths + (node[:, None] + below[None, :]) * (DEPTH + 1) + 1
            wanted = real[:, None, :] & (below < DEPTH)[None, :, None]
            every = hashed[:, None, :] + tl.zeros([WIDTH, DEPTHS, DEPTHS], tl.int64)
            tl.store(line[:, :, None] + depth[None, None, :], every, mask=wanted)


@triton.jit(do_not_specialize=LANES_VARY)
def ranks(
    places, depths, guesses, chances, worths, line, node_tokens, node_chances, paths, nodes,
    NODES: tl.constexpr, HEADS: tl.constexpr, GIVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: nodes from paths of ranks among the top tokens of HEADS heads. GIVEN: probabilities are given."""
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    there = node < nodes
    depth = tl.load(depths + node, mask=there, other=0)
    total = tl.zeros([NODES], tl.float32)
    hashed = tl.zeros([NODES], tl.int64)
    newest = tl.zeros([NODES], tl.int64)
    way = paths + (lane * nodes + node) * (HEADS + 1)
    tl.store(way, hashed, mask=there)
    for head in tl.static_range(HEADS):
        within = there & (head < depth)
        guess = lane * line + tl.load(places + node * HEADS + head, mask=there, other=0)
        token = tl.load(guesses + guess, mask=there, other=0)
        newest = tl.where(within, token, newest)
        total += tl.load(chances + guess, mask=within, other=0.0)
        hashed += mix(token, head + 1)
        tl.store(way + head + 1, hashed, mask=there)
    if GIVEN:
        total = tl.where(total > float("-inf"), tl.load(worths + node, mask=there, other=0.0), float("-inf"))
    tl.store(node_tokens + lane * nodes + node, newest, mask=there)
    tl.store(node_chances + lane * nodes + node, total, mask=there)


@triton.jit(do_not_specialize=LANES_VARY)
def pairs(
    ranks, depths, guesses, order, chances, worths, node_tokens, node_chances, paths, nodes,
    NODES: tl.constexpr, HEADS: tl.constexpr, TOP: tl.constexpr, GIVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: nodes from paths of ranks among the TOP tokens of HEADS places, each conditioned on the one before.

    `order`, `chances` [places, token before, rank]: which token, and its log probability. GIVEN: those of whole paths
    are given.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    there = node < nodes
    depth = tl.load(depths + node, mask=there, other=0)
    total = tl.zeros([NODES], tl.float32)
    hashed = tl.zeros([NODES], tl.int64)
    newest = tl.zeros([NODES], tl.int64)
    at = tl.zeros([NODES], tl.int64)
    way = paths + (lane * nodes + node) * (HEADS + 1)
    tl.store(way, hashed, mask=there)
    for head in tl.static_range(HEADS):
        within = there & (head < depth)
        place = lane * HEADS + head
        line = (place * TOP + at) * TOP + tl.load(ranks + node * HEADS + head, mask=there, other=0)
        total += tl.load(chances + line, mask=within, other=0.0)
        at = tl.load(order + line, mask=there, other=0)
        token = tl.load(guesses + place * TOP + at, mask=there, other=0)
        newest = tl.where(within, token, newest)
        hashed += mix(token, head + 1)
        tl.store(way + head + 1, hashed, mask=there)
    if GIVEN:
        total = tl.where(total > float("-inf"), tl.load(worths + node, mask=there, other=0.0), float("-inf"))
    tl.store(node_tokens + lane * nodes + node, newest, mask=there)
    tl.store(node_chances + lane * nodes + node, total, mask=there)


@triton.jit
def comb(
    window, filled, drafted, room, tokens, depths, chances, paths,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, NODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: the entries of Lookahead's window as nodes, first the spine, then column by column."""
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    window += lane * LEVELS * COLUMNS
    fits = tl.load(room + lane) >= COLUMNS - 1  # no window near the end of the context
    tl.store(drafted + lane, fits.to(tl.int8))
    full = tl.load(filled + lane)
    node = tl.arange(0, NODES)
    count: tl.constexpr = COLUMNS * LEVELS
    there = node < count
    column = node
    level = node * 0
    if LEVELS > 1:
        tooth = tl.maximum(node - COLUMNS, 0)
        column = tl.where(node < COLUMNS, node, tooth // (LEVELS - 1))
        level = tl.where(node < COLUMNS, 0, 1 + tooth % (LEVELS - 1))
    first = lane * count
    tl.store(tokens + first + node, tl.load(window + level * COLUMNS + column, mask=there, other=0), mask=there)
    tl.store(depths + first + node, tl.minimum(level + column, COLUMNS - 1).to(tl.int64), mask=there)
    real = (level < full) & (column <= COLUMNS - full) & fits & (node > 0)
    tl.store(chances + first + node, tl.where(real, 0.0, float("-inf")), mask=there)
    hashed = tl.zeros([NODES], tl.int64)
    for depth in range(COLUMNS):
        # A path follows the spine to its column, then the column.
        below = tl.maximum(depth - column, 0)
        at = tl.where(below > 0, below * COLUMNS + column, depth)
        token = tl.load(window + at, mask=there & (below < LEVELS) & (depth > 0), other=0)
        hashed += tl.where((below < LEVELS) & (depth > 0), mix(token, depth), 0)
        tl.store(paths + (first + node) * COLUMNS + depth, hashed, mask=there)


@triton.jit
def _matches(runs, entry, ends, key, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Whether n-grams start with the `key` tokens before `ends`, and are longer than that."""
    same = tl.load(runs + entry * WIDTH + key) != -1
    for place in range(key):
        end = tl.load(ends - key + place)
        same = same & (tl.load(runs + entry * WIDTH + place) == end)
    return same


@triton.jit(do_not_specialize=LANES_VARY)
def ngrams(
    text, lengths, text_line, runs, counts, found, keys, ends,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, LONGEST: tl.constexpr, GUESSES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: up to GUESSES distinct n-grams that continue the sequence, longest key first, then newest first.

    They go to `found` [lanes, GUESSES, WIDTH - 1], padded with -1, and their key lengths to `keys` [lanes, GUESSES],
    padded with 0. TAIL is WIDTH rounded up to a power of two. `ends` [lanes, LONGEST] gets the last tokens, -2 where
    there are none.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    runs += lane * (SIZE + 1) * WIDTH
    found += lane * GUESSES * (WIDTH - 1)
    keys += lane * GUESSES
    ends += lane * LONGEST
    length = tl.load(lengths + lane)
    for back in tl.static_range(LONGEST):
        end = tl.load(text + lane * text_line + tl.maximum(length - 1 - back, 0))
        tl.store(ends + LONGEST - 1 - back, tl.where(length - 1 - back >= 0, end, -2))
    tail = tl.arange(0, TAIL)
    for guess in range(GUESSES):
        tl.store(found + guess * (WIDTH - 1) + tail, tl.full([TAIL], -1, tl.int64), mask=tail < WIDTH - 1)
        tl.store(keys + guess, 0)
    count = tl.load(counts + lane)
    entry = tl.arange(0, SIZE)
    tl.debug_barrier()
    key = tl.zeros([SIZE], tl.int32)
    for longer in tl.static_range(1, (LONGEST if LONGEST < WIDTH - 1 else WIDTH - 1) + 1):
        key = tl.where(_matches(runs, entry, ends + LONGEST, longer, SIZE, WIDTH), longer, key)
    newness = (SIZE - 1 - (count - 1 - entry + SIZE) % SIZE).to(tl.int32)
    score = tl.where(key > 0, key * SIZE + newness, -1)
    for kept in range(GUESSES):
        top = tl.max(score, 0)
        if top >= 0:
            its_key = top // SIZE
            its_entry = (count - 1 - (SIZE - 1 - top % SIZE) + SIZE) % SIZE
            tl.store(keys + kept, its_key)
            # Skip all others with the same continuation.
            same = score >= 0
            for place in tl.static_range(WIDTH - 1):
                token = tl.load(runs + its_entry * WIDTH + its_key + place, mask=its_key + place < WIDTH, other=-1)
                tl.store(found + kept * (WIDTH - 1) + place, token)
                shift = key + place
                same = same & (tl.load(runs + entry * WIDTH + shift, mask=shift < WIDTH, other=-1) == token)
            score = tl.where(same, -1, score)


@triton.jit
def prolonged(
    runs, counts, found, keys, ends, paths_so_far, trusts, filled, tokens, chances, paths, older, deeper,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr, LONGEST: tl.constexpr, GUESSES: tl.constexpr,
    RECYCLE: tl.constexpr, LEVELS: tl.constexpr, UNFILLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One n-gram of one lane as nodes. RECYCLE: where it ends too early, other n-grams continue it.

    UNFILLED: also before the window is filled. `paths_so_far` [lanes, GUESSES, LONGEST + LENGTH] has the sequence's
    last tokens, then the n-gram's.
    """
    _wait(EARLY)
    lane, guess = tl.program_id(0).to(tl.int64), tl.program_id(1)
    runs += lane * (SIZE + 1) * WIDTH
    way = paths_so_far + (lane * GUESSES + guess) * (LONGEST + LENGTH)
    run = found + (lane * GUESSES + guess) * (WIDTH - 1)
    key = tl.load(keys + lane * GUESSES + guess)
    for place in tl.static_range(LONGEST):
        tl.store(way + place, tl.load(ends + lane * LONGEST + place))
    count = tl.load(counts + lane)
    entry = tl.arange(0, SIZE)
    newness = (SIZE - 1 - (count - 1 - entry + SIZE) % SIZE).to(tl.int32)
    there = key > 0
    if not UNFILLED:
        there = there & (tl.load(filled + lane) == LEVELS)
    chance = tl.load(trusts + key) + guess * older
    first = (lane * GUESSES + guess) * LENGTH
    hashed = tl.zeros([1], tl.int64)
    one = tl.arange(0, 1)
    for below in range(LENGTH):
        tl.store(paths + (first + below) * (LENGTH + 1) + one, hashed)
    for place in tl.static_range(LENGTH):
        token = tl.load(run + place)
        if RECYCLE and place > 0:  # noqa: SIM102 (known when compiled)
            if (token == -1) & there:
                tl.debug_barrier()
                longest = tl.zeros([SIZE], tl.int32)
                for longer in tl.static_range(1, (LONGEST if LONGEST < WIDTH - 1 else WIDTH - 1) + 1):
                    same = _matches(runs, entry, way + LONGEST + place, longer, SIZE, WIDTH)
                    longest = tl.where(same, longer, longest)
                top = tl.max(tl.where(longest > 0, longest * SIZE + newness, -1), 0)
                if top >= 0:
                    at = (count - 1 - (SIZE - 1 - top % SIZE) + SIZE) % SIZE
                    token = tl.load(runs + at * WIDTH + top // SIZE)
        there = there & (token != -1)
        tl.store(way + LONGEST + place, token)
        tl.store(tokens + first + place, tl.maximum(token, 0))
        tl.store(chances + first + place, tl.where(there, chance + place * deeper, float("-inf")))
        hashed += mix(tl.maximum(token, 0) + one.to(tl.int64) * 0, place + 1)
        for below in range(place, LENGTH):
            tl.store(paths + (first + below) * (LENGTH + 1) + place + 1 + one, hashed)


@triton.jit(do_not_specialize=LANES_VARY)
def look(
    window, filled, drafted, runs, names, counts, row_tokens, row_parents, row_valid, row_hashes, best, answers, count,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, RECYCLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: update Lookahead's window and n-gram pool after a step.

    WIDE and HIGH are COLUMNS and LEVELS rounded up to powers of two. `answers` [lanes, WIDE] is scratch memory through
    which threads communicate. Duplicate n-grams are stored again; `ngrams` skips them. New ones have no hash.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    window += lane * LEVELS * COLUMNS
    runs += lane * (SIZE + 1) * WIDTH
    names += lane * (SIZE + 1)
    answers += lane * WIDE
    first = lane * count
    row = tl.arange(0, ROWS)
    real = row < count
    total = tl.load(counts + lane)
    if RECYCLE:  # the model's output after every row, rejected ones too; the first rows last
        valid = (tl.load(row_valid + first + row, mask=real, other=0) > 0) & (row > 0) & real
        token = tl.load(row_tokens + first + row, mask=real, other=0)
        parent = tl.load(row_parents + first + row, mask=real, other=0)
        before = tl.load(row_tokens + first + parent, mask=real, other=0)
        said = tl.load(best + first + row, mask=real, other=0)
        many = tl.sum(valid.to(tl.int32), 0)
        at = (total + many - tl.cumsum(valid.to(tl.int32), 0)) % SIZE
        place = runs + at * WIDTH
        tl.store(names + at, tl.zeros([ROWS], tl.int64), mask=valid)
        tl.store(place, before, mask=valid)
        tl.store(place + 1, token, mask=valid)
        tl.store(place + 2, said, mask=valid)
        for more in tl.static_range(3, WIDTH):
            tl.store(place + more, tl.full([ROWS], -1, tl.int64), mask=valid)
        total += many
    levels = tl.load(filled + lane)
    used = tl.load(drafted + lane) > 0
    full = levels == LEVELS
    column = tl.arange(0, WIDE)
    inside = column < COLUMNS
    tip = tl.zeros([WIDE], tl.int64)
    for along in range(1, COLUMNS):
        tip += tl.where(column >= along, mix(tl.load(window + along), along), 0)
    for below in range(1, LEVELS):
        tooth = tl.load(window + below * COLUMNS + column, mask=inside, other=0)
        tip += tl.where(below < levels, mix(tooth, column + below), 0)
    hashed = tl.load(row_hashes + first + row, mask=real, other=0)
    same = (tip[:, None] == hashed[None, :]) & real[None, :]
    where = tl.min(tl.where(same, row[None, :], ROWS), 1)
    answer = tl.load(best + first + tl.where(where < ROWS, where, 0), mask=inside, other=0)
    tl.store(answers + column, answer, mask=inside)
    tl.debug_barrier()
    level = tl.arange(0, HIGH)
    fits = (level < LEVELS)[:, None] & inside[None, :]
    if used & full:
        collected = inside & (column < WINDOW)
        entry = runs + (total + column) % SIZE * WIDTH
        tl.store(names + (total + column) % SIZE, tl.zeros([WIDE], tl.int64), mask=collected)
        current = tl.load(row_tokens + first)
        spine = tl.load(window + column, mask=inside, other=0)
        tl.store(entry, tl.where(column == 0, current, spine), mask=collected)
        for deep in range(1, LEVELS):
            tl.store(entry + deep, tl.load(window + deep * COLUMNS + column, mask=inside, other=0), mask=collected)
        tl.store(entry + LEVELS, answer, mask=collected)
        for more in tl.static_range(LEVELS + 1, WIDTH):
            tl.store(entry + more, tl.full([WIDE], -1, tl.int64), mask=collected)
        total += WINDOW
    tl.store(counts + lane, total)
    # With all levels filled the oldest is dropped. Until then a level is added, and the first column is dropped.
    source = tl.where(full, level + 1, level)[:, None]
    shifted = tl.where(full, column, (column + 1) % COLUMNS)[None, :]
    newest = tl.where(full, source == LEVELS, source == levels)
    old = tl.load(window + source * COLUMNS + shifted, mask=fits & (newest == 0), other=0)
    new = tl.load(answers + shifted + source * 0, mask=fits & newest, other=0)
    tl.debug_barrier()
    if used:
        tl.store(window + level[:, None] * COLUMNS + column[None, :], tl.where(newest, new, old), mask=fits)
        tl.store(filled + lane, tl.where(full, levels, levels + 1))


@triton.jit(do_not_specialize=LANES_VARY)
def recycled(
    text, lengths, text_line, ranks, depths, known, following, chances, node_tokens, node_chances, paths, nodes, own,
    NODES: tl.constexpr, DEEP: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One lane: nodes from paths of ranks among the RANKS successors stored for each token.

    The first `own` paths start at the sequence's last token, the others at its runners-up, stored at index SIZE + 1.
    """
    _wait(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    there = node < nodes
    depth = tl.load(depths + node, mask=there, other=0)
    root = tl.load(text + lane * text_line + tl.maximum(tl.load(lengths + lane) - 1, 0))
    token = tl.zeros([NODES], tl.int64) + root
    newest = token
    total = tl.zeros([NODES], tl.float32)
    hashed = tl.zeros([NODES], tl.int64)
    way = paths + (lane * nodes + node) * (DEEP + 1)
    tl.store(way, hashed, mask=there)
    for above in tl.static_range(DEEP):
        within = there & (above < depth)
        runner = (above == 0) & (node >= own)
        place = lane * (SIZE + 2) + tl.where(runner, SIZE + 1, token % SIZE)
        same = (tl.load(known + place, mask=there, other=-1) == token) | runner
        entry = place * RANKS + tl.load(ranks + node * DEEP + above, mask=there, other=0)
        believed = tl.load(chances + entry, mask=within & same, other=float("-inf"))
        token = tl.load(following + entry, mask=there, other=0).to(tl.int64)
        total = tl.where(within, total + believed, total)
        newest = tl.where(within, token, newest)
        hashed += mix(token, above + 1)
        tl.store(way + above + 1, hashed, mask=there)
    tl.store(node_tokens + lane * nodes + node, newest, mask=there)
    tl.store(node_chances + lane * nodes + node, total, mask=there)


@triton.jit(do_not_specialize=LANES_VARY)
def remember(
    row_tokens, row_valid, found, known, following, chances, kept_rows, kept_counts, kept_line, trusts, count,
    ROWS: tl.constexpr, TOP: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr,
    RUNNERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row of one lane: store the model's TOP tokens after it, unless an earlier row has the same index.

    WIDE is TOP rounded up to a power of two. RUNNERS: those of the last kept row are stored as runners-up too, with
    probabilities by rank.
    """
    _wait(EARLY)
    lane, mine = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = lane * count
    row = tl.arange(0, ROWS)
    real = row < count
    token = tl.load(row_tokens + first + row, mask=real, other=0)
    valid = tl.load(row_valid + first + row, mask=real, other=0) > 0
    own = tl.load(row_tokens + first + mine)
    before = valid & (row < mine) & (token % SIZE == own % SIZE)
    remembered = (tl.load(row_valid + first + mine) > 0) & (tl.sum(before.to(tl.int32), 0) == 0)
    lane_place = lane * (SIZE + 2)
    place = lane_place + own % SIZE
    rank = tl.arange(0, WIDE)
    here = rank < TOP
    line = found + (first + mine) * TOP + rank
    ranked = tl.load(line, mask=here, other=0.0).to(tl.int32)
    chance = tl.load(line + tl.num_programs(0).to(tl.int64) * count * TOP, mask=here, other=0.0).to(tl.float32)
    chance = tl.where(chance > float("-inf"), chance, float("-inf"))  # NaN counts as none
    tl.store(known + place, own.to(tl.int32), mask=remembered)
    tl.store(following + place * RANKS + rank, ranked, mask=here & remembered)
    tl.store(chances + place * RANKS + rank, chance, mask=here & remembered)
    if RUNNERS:
        last = tl.load(kept_rows + lane * kept_line + tl.maximum(tl.load(kept_counts + lane) - 1, 0))
        place = lane_place + SIZE + 1
        newest = here & (last == mine)
        trust = tl.where(chance > float("-inf"), tl.load(trusts + rank, mask=here, other=0.0), float("-inf"))
        tl.store(following + place * RANKS + rank, ranked, mask=newest)
        tl.store(chances + place * RANKS + rank, trust, mask=newest)


@triton.jit
def likely_parts(
    logits, tops, sums, width, parts, PART: tl.constexpr, TOP: tl.constexpr, HELD: tl.constexpr, SHORT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Part of a row of logits: its TOP highest, with their indices, as sortable integers; its maximum and its sum.

    SHORT: the logits are bfloat16.
    """
    _wait(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = part * PART + tl.arange(0, PART)
    logit = tl.load(logits + row * width + place, mask=place < width, other=float("-inf")).to(tl.float32)
    peak = tl.max(logit, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(logit - base), 0)
    tl.store(sums + (row * parts + part) * 2, peak)
    tl.store(sums + (row * parts + part) * 2 + 1, total)
    bits = logit.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    if SHORT:  # bfloat16 leaves the lower half empty: an index within the part fits there, and 32 bits are faster
        none: tl.constexpr = -(1 << 31)
        number = tl.where(place < width, order & -65536 | (PART - 1 - tl.arange(0, PART)), none)
    else:
        none: tl.constexpr = -(1 << 62) * 2
        number = tl.where(place < width, (order.to(tl.int64) << 32) | (0x7FFFFFFF - place), none)
    for rank in tl.static_range(TOP):
        best = tl.max(number, 0)
        number = tl.where(number == best, none, number)
        if SHORT:
            its_place = part * PART + PART - 1 - (best & 65535)
            high = tl.where(best < 0, best | 65535, best & -65536)
            best = (high.to(tl.int64) << 32) | (0x7FFFFFFF - its_place)
        tl.store(tops + (row * parts + part) * HELD + rank, best)


@triton.jit
def likely(
    tops, sums, found, rows, parts, TOP: tl.constexpr, HELD: tl.constexpr, ALL: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The TOP highest logits of a row from those of its parts, and their log probabilities."""
    _wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peak = tl.load(sums + (row * parts + part) * 2, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + (row * parts + part) * 2 + 1, mask=part < parts, other=0.0)
    highest = tl.max(peak, 0)
    whole = highest + tl.log(tl.sum(total * tl.exp(peak - highest), 0))
    entry = tl.arange(0, ALL)
    here = (entry < parts * HELD) & (entry % HELD < TOP)
    number = tl.load(tops + row * parts * HELD + entry, mask=here, other=-(1 << 62) * 2)
    for rank in tl.static_range(TOP):
        best = tl.max(number, 0)
        number = tl.where(number == best, -(1 << 62) * 2, number)
        order = (best >> 32).to(tl.int32)
        logit = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(found + row * TOP + rank, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.float64))
        tl.store(found + rows * TOP + row * TOP + rank, (logit - whole).to(tl.float64))


@triton.jit(do_not_specialize=ROWS_VARY)
def penalise(
    logits, scores, bias, seen, answered, repetitions, presences, frequencies, row_tokens, row_parents, width, count,
    PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Part of a row: its logits with bias and penalties, as `Choices` has them, without fused multiply-adds."""
    _wait(EARLY)
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    there = place < width
    lane = row // count
    guessed = tl.zeros([PART], tl.float32)
    above = row % count
    while above > 0:  # for a row, its ancestors count as part of the sequence; row 0 does already
        guessed += (place == tl.load(row_tokens + lane * count + above)).to(tl.float32)
        above = tl.load(row_parents + lane * count + above)
    of = lane * width + place
    shaped = tl.load(logits + row * width + place, mask=there, other=0.0).to(tl.float32)
    shaped += tl.load(bias + of, mask=there, other=0.0)
    before = tl.load(seen + of, mask=there, other=0.0) + guessed
    often = tl.load(answered + of, mask=there, other=0.0) + guessed
    repetition = tl.load(repetitions + lane)
    repeated = tl.where(shaped < 0, shaped * repetition, tl.div_rn(shaped, repetition))
    shaped = tl.where(before > 0, repeated, shaped)
    less = tl.load(presences + lane) + tl.load(frequencies + lane) * often
    shaped = tl.where(often > 0, shaped - less, shaped)
    tl.store(scores + row * width + place, shaped, mask=there)


@triton.jit
def _scored(logits, found, temperatures, row, place, rows, count, width):
    """Scores of some tokens of a row, and the row's highest, as `Choices` has them before top-k and top-p."""
    best = tl.load(found + rows + row).to(tl.float32)
    base = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    temperature = tl.load(temperatures + row // count)
    warm = tl.where(temperature > 0, temperature, 1.0)
    logit = tl.load(logits + row * width + place, mask=place < width, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logit - base, warm), tl.div_rn(best - base, warm)


@triton.jit
def _ordered(score):
    """32-bit integers in the order of the floats."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 counts as 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + (1 << 31)


@triton.jit
def _mass(score, whole):
    """A token's share of `whole`, the sum of all exponentials, as a fixed-point integer; 0 if one is infinite."""
    share = tl.exp(score.to(tl.float64)) / whole * 4503599627370496.0  # 2**52
    return tl.where(share == share, share, 0.0).to(tl.int64)


@triton.jit
def _border(sums, states, row, parts, PARTS: tl.constexpr):
    """The result of one pass of `sift` for a row.

    Returns the threshold's digits so far, how much of the limit is left below them, and for each part the sum over
    scores with these digits.
    """
    part, digit = tl.arange(0, PARTS), tl.arange(0, DIGITS)
    of = (row * parts + part[:, None]) * DIGITS + digit[None, :]
    each = tl.load(sums + of, mask=(part < parts)[:, None], other=0)
    total = tl.sum(each, 0)
    above = tl.sum(total, 0) - tl.cumsum(total, 0)
    wanted = tl.load(states + 2 * row + 1)
    lowest = tl.min(tl.where(above < wanted, digit, DIGITS), 0)
    wanted -= tl.sum(tl.where(digit == lowest, above, 0), 0)
    return tl.load(states + 2 * row) * DIGITS + lowest, wanted, tl.sum(tl.where(digit[None, :] == lowest, each, 0), 1)


@triton.jit(do_not_specialize=ROWS_VARY)
def sift(
    logits, found, temperatures, limits, weights, wholes, sums, states, rows, count, width, parts, number,
    PART: tl.constexpr, PARTS: tl.constexpr, MASS: tl.constexpr, FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Part of a row, in one pass of a radix select for the threshold of top-k or top-p: the last kept token's score.

    It is the lowest 32-bit score such that the tokens above it are below the lane's limit: by count or, with MASS, by
    probability. Each pass finds one digit, the FIRST pass the highest, from the totals of each digit's tokens, `sums`
    [passes, rows, parts, DIGITS], which the next pass reads. `states` [passes, rows, 2] are the digits so far and what
    is still wanted. `weights` [rows, parts] are the parts' sums of exponentials, `wholes` [rows] those of rows.
    """
    _wait(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = part * PART + tl.arange(0, PART)
    score, _ = _scored(logits, found, temperatures, row, place, rows, count, width)
    line = rows * parts * DIGITS
    if FIRST:
        border = tl.full([], 0, tl.int64)
        if MASS:
            share = tl.load(limits + row // count)
            wanted = tl.where(share < 1, tl.ceil(share * 4503599627370496.0).to(tl.int64), 1 << 62)
        else:
            wanted = tl.load(limits + row // count)
    else:
        before = number - 1
        border, wanted, _ = _border(sums + before * line, states + before * 2 * rows, row, parts, PARTS)
    if MASS:
        if FIRST:
            other = tl.arange(0, PARTS)
            whole = tl.sum(tl.load(weights + row * parts + other, mask=other < parts, other=0.0), 0)
            tl.store(wholes + row, whole, mask=part == 0)
        else:
            whole = tl.load(wholes + row)
        weight = _mass(score, whole)
    else:
        weight = tl.full([PART], 1, tl.int64)
    states += number * 2 * rows + 2 * row
    tl.store(states, border, mask=part == 0)
    tl.store(states + 1, wanted, mask=part == 0)
    digit = tl.arange(0, DIGITS)
    begun = _ordered(score) >> (28 - 4 * number)
    mine = (begun >> 4 == border) & (place < width)
    of_digit = mine[None, :] & ((begun & (DIGITS - 1))[None, :] == digit[:, None])
    total = tl.sum(tl.where(of_digit, weight[None, :], 0), 1)
    tl.store(sums + number * line + (row * parts + part) * DIGITS + digit, total)


@triton.jit(do_not_specialize=ROWS_VARY)
def weigh(
    logits, found, temperatures, counts, states, weights, rows, count, width, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Part of a row: the sum of the exponentials of its scores. TOP_K: of those in the top k."""
    _wait(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = part * PART + tl.arange(0, PART)
    score, _ = _scored(logits, found, temperatures, row, place, rows, count, width)
    kept = place < width
    if TOP_K:
        least, _, _ = _border(counts, states, row, parts, PARTS)
        kept = kept & (_ordered(score) >= least)
    tl.store(weights + row * parts + part, tl.sum(tl.where(kept, tl.exp(score.to(tl.float64)), 0.0), 0))


@triton.jit
def _splitmix(x):
    """As `picking._splitmix`, of an unsigned integer."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mixed(x):
    """As `picking.mixed`, of unsigned 32-bit integers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, word):
    """The noise of tokens, as `choosing.gumbel` has it for the target's choices."""
    first = seed.to(tl.uint64)
    first = _splitmix(first ^ _splitmix(position.to(tl.uint64)))
    for stream in tl.static_range(2):
        first = _splitmix(first ^ _splitmix(tl.full([], stream, tl.uint64)))
    second = _splitmix(first)
    word = word.to(tl.uint32)
    high = _mixed(_mixed(word ^ first.to(tl.uint32)) ^ (first >> 32).to(tl.uint32)).to(tl.int64)
    low = _mixed(_mixed(word ^ second.to(tl.uint32)) ^ (second >> 32).to(tl.uint32)).to(tl.int64)
    bits = (high << 20) | (low >> 12)
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))  # 2**-52


@triton.jit(do_not_specialize=ROWS_VARY)
def draw(
    logits, found, temperatures, min_ps, lengths, seeds, row_depths,
    counts, count_states, masses, mass_states, wholes, tops, places, rows, count, width, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Part of a row: the highest score with noise among the tokens left by top-k, top-p and min-p, and its index."""
    _wait(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = part * PART + tl.arange(0, PART)
    score, top = _scored(logits, found, temperatures, row, place, rows, count, width)
    lane = row // count
    kept = (place < width) & ((score < top + tl.load(min_ps + lane)) == 0)
    if TOP_K:
        least, _, _ = _border(counts, count_states, row, parts, PARTS)
        kept = kept & (_ordered(score) >= least)
    if TOP_P:  # of equal scores at the threshold the first are kept
        border, wanted, at_border = _border(masses, mass_states, row, parts, PARTS)
        order = _ordered(score)
        mass = tl.where(order == border, _mass(score, tl.load(wholes + row)), 0)
        before = tl.sum(tl.where(tl.arange(0, PARTS) < part, at_border, 0), 0) + tl.cumsum(mass, 0) - mass
        kept = kept & ((order > border) | ((order == border) & (before < wanted)))
    position = tl.load(lengths + lane) + tl.load(row_depths + row)
    noised = score.to(tl.float64) + _gumbel(tl.load(seeds + lane), position, place)
    noised = tl.where(kept, tl.where(noised == noised, noised, float("inf")), float("-inf"))
    highest = tl.max(noised, 0)
    tl.store(tops + row * parts + part, highest)
    tl.store(places + row * parts + part, tl.min(tl.where(noised == highest, place, width), 0))


@triton.jit(do_not_specialize=ROWS_VARY)
def drawn(tops, places, found, temperatures, chosen, rows, count, parts, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """The best of a row's parts, or the argmax if the lane does not sample, and the highest score."""
    _wait(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    of = row * parts + part
    top = tl.load(tops + of, mask=part < parts, other=float("-inf"))
    place = tl.load(places + of, mask=part < parts, other=0x7FFFFFFF)
    best = tl.min(tl.where(top == tl.max(top, 0), place, 0x7FFFFFFF), 0).to(tl.float64)
    warm = tl.load(temperatures + row // count) > 0
    tl.store(chosen + row, tl.where(warm, best, tl.load(found + row)))
    tl.store(chosen + rows + row, tl.load(found + rows + row))
