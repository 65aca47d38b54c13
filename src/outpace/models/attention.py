"""Attention of rows over lists of KV slots: equal to attention with a dense mask, without its cost.

All rows of a sequence attend to its cached tokens, so those keys are read once for a tile of rows (`kernels.part`), in
splits that run in parallel. Attention among the rows is one more split, with a bit mask; `kernels.merge` combines them.

Rows may belong to several sequences. Then each sequence has a list of slots, and a tile has rows of one sequence only:
tables map tiles to rows, and rows to sequences.

In exact mode a row's result must have the same bits in any draft tree. Its last OWN keys, gathered along its own path,
are processed for this row alone (`kernels.merge_exactly`), so no draft may be deeper. All keys before them belong to
the sequence, and are processed for a tile of rows (`kernels.part_exactly`), in splits with boundaries at fixed
positions. The order of summation then depends only on a row's position: a masked key adds zero, which changes no bit.

`attend_by_mask` is torch's attention with a dense mask, for forward passes outside CUDA graphs and for heads' prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from .launching import SPARE, device_of, early


class SlotLists(NamedTuple):
    """What each row attends to, as lists of slots in the order of positions. Takes the place of a mask."""

    text: torch.Tensor  # [texts, slots] the slots of each sequence's cached tokens, padded
    length: torch.Tensor  # [texts] how many there are
    whose: torch.Tensor  # [rows] the sequence of each row
    tiles: torch.Tensor  # [3 × tiles] of each tile the first row, its end (equal: empty), its sequence's first row
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]
    tree: torch.Tensor  # [rows, rows / 64] a bit for each row that the row attends to; exact: see `exact`
    span: int  # the longest sequence that this launch supports
    packed: int  # the most rows of a tile of `tiles`; 0: all rows are of sequence 0, `whose` and `tiles` are not read
    exact: bool = False  # a row's bits are the same in any tree; `tree` [rows, depth] then lists slots from `length` on
    window: int = 0  # the sliding window, in positions; 0: none


INTERPRET = False  # for tests without a GPU: run the kernels in Triton's interpreter
LOG2_E = 1.4426950408889634
BLOCK = 64  # keys at a time
HEADS = 16  # the most query heads of one key head in a tile
CHUNK = 32  # the most splits that are merged at a time
MERGED = 1024  # values that one program merges at a time, of several heads if there are few splits
WARPS = 4
STAGES = 3  # pipeline stages: blocks of keys and values in flight, if shared memory allows
# Exact mode. The bits depend on the first three.
OWN = 32  # the last keys of a row, its own included, that are processed for this row alone
SHORT = 512  # positions of the first two groups of splits; later ones have twice as many
TOGETHER = 4  # splits per group, whose results are merged first
JOIN = 1.8  # from this many programs per multiprocessor, one program walks a group of splits
JOIN_ALONE = 0.9  # and if there are this many to 1
COLUMNS = (16, 32)  # features per program of the last kernel, if there are few rows


def attend_by_mask(
    query: torch.Tensor,  # [1, heads, rows, size]
    keys: torch.Tensor,  # [1, key heads, slots, size]
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """[1, heads, rows, size] by torch."""
    groups = query.shape[1] // keys.shape[1]
    if groups > 1 and query.is_cuda:  # torch's other kernels there take a mask or grouped heads, not both
        keys, values, groups = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=groups > 1)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Disables cuDNN attention, which builds a plan for each number of keys; that takes longer than a step."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def split_for(tiles: int, span: int, processors: int) -> int:
    """The positions per split with which the programs of all tiles run at the same time.

    Two programs fit on a multiprocessor. One split of each tile is for attention among the rows.
    """
    splits = max(1, 2 * processors // tiles - 1)
    return -(-span // (splits * BLOCK)) * BLOCK


@torch.library.custom_op("outpace::slot_attention", mutates_args=())
def slot_attention(
    query: torch.Tensor,  # [1, heads, rows, size]
    keys: torch.Tensor,  # [1, key heads, slots, size]
    values: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    whose: torch.Tensor,
    tiles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tree: torch.Tensor,
    span: int,
    packed: int,
    exact: bool,
    window: int,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """[1, rows, heads, size]: see SlotLists for what rows attend to. `softcap` 0: none."""
    lists = SlotLists(text, length, whose, tiles, positions, slots, tree, span, packed, exact, window)
    if query.device.type != "cuda" and not INTERPRET:
        return _dense(query, keys, values, lists, scaling, softcap)
    return _launch(query, keys, values, lists, scaling, softcap)


@slot_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lists: SlotLists, scaling: float, softcap: float
) -> torch.Tensor:
    """The same with a dense mask over the slots that any row attends to: the reference."""
    sees = torch.zeros(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
    at = lists.positions[:, None]
    whose = lists.whose if lists.packed else torch.zeros_like(lists.positions)
    past = lists.length[whose, None]
    place = torch.arange(int(past.max()), device=query.device)
    seen = (place < past) & (place <= at)
    if lists.window:
        seen &= at - place < lists.window
    row, column = seen.nonzero(as_tuple=True)
    sees[row, lists.text[whose[row], column]] = True
    if lists.exact:
        place = past + torch.arange(lists.tree.shape[1], device=query.device)
        seen, other = place <= at, lists.tree
    else:
        row = torch.arange(query.shape[2], device=query.device)
        seen = (lists.tree[:, row // 64] >> (row % 64) & 1).bool()
        place, other = lists.positions, lists.slots.expand_as(seen)
    if lists.window:
        seen = seen & (at - place < lists.window)
    row, column = seen.nonzero(as_tuple=True)
    sees[row, other[row, column]] = True
    used = sees.any(0).nonzero()[:, 0]
    sees, keys, values = sees[:, used], keys[:, :, used], values[:, :, used]
    groups = query.shape[1] // keys.shape[1]
    # Sums depend on how many keys there are, masked ones included. Rounded from float64 they hardly ever do.
    exactly = torch.promote_types(query.dtype, torch.float64 if lists.exact else torch.float32)
    scores = query.to(exactly) @ keys.repeat_interleave(groups, 1).to(exactly).transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    held = values.repeat_interleave(groups, 1).to(exactly)
    finite = held.isfinite()
    if finite.all():
        mixed = weights @ held
    else:  # masked values must not contribute, even if they are NaN
        whole = finite.all(-1)[:, :, None]  # [1, heads, 1, slots]
        mixed = weights @ held.masked_fill(~finite, 0.0)
        mixed = mixed.masked_fill((sees & ~whole).any(-1, keepdim=True), float("nan"))
    return mixed.to(query.dtype).transpose(1, 2).contiguous()


def _launch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lists: SlotLists, scaling: float, softcap: float
) -> torch.Tensor:
    from triton import cdiv, language, next_power_of_2

    _, heads, rows, size = query.shape
    groups = heads // keys.shape[1]
    group = min(groups, HEADS)  # query heads in a tile
    units = keys.shape[1] * cdiv(groups, group)  # groups of query heads that share keys
    parts = 1  # of a tile of `tiles`, if it has too many heads for one program
    if lists.packed:
        tile = min(64, max(16, next_power_of_2(lists.packed * group)))
        parts = cdiv(lists.packed, tile // group)
        programs = len(lists.tiles) // 3 * parts
    else:
        tile = 64 if rows * group >= 64 else 32 if lists.exact and rows * group > 16 else 16
        programs = cdiv(rows, tile // group)
    padded = max(16, next_power_of_2(size))  # the least size of a matrix product
    memory = device_of(query.device)[1]
    stages = ((memory - SPARE) // (padded * query.element_size()) - tile) // (2 * BLOCK)
    furthest = keys.shape[2] * max(keys.stride(2), values.stride(2))
    options = {
        "SIZE": size,
        "PADDED": padded,
        "GROUPS": groups,
        "GROUP": group,
        "UNITS": cdiv(groups, group),
        "WINDOW": lists.window,
        "SOFTCAP": softcap,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "INDEX": language.int32 if furthest < 2**31 else language.int64,
        "PACKED": lists.packed > 0,
        "num_warps": WARPS,
        **early(query.device),
    }
    tiling = {"TILE": tile, "BLOCK": BLOCK, "num_stages": max(1, min(stages, STAGES))}
    strides = (query.stride(1), query.stride(2), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2))
    start = _start_exactly if lists.exact else _start
    factor = scaling * LOG2_E  # scores in powers of two
    return start((query, keys, values), lists, strides, factor, programs, units, parts, tiling, options)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _start(
    given: Tensors,
    lists: SlotLists,
    strides: tuple[int, ...],
    factor: float,
    programs: int,
    units: int,
    parts: int,
    tiling: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """Launch with a split length that suits the device."""
    from triton import cdiv, next_power_of_2

    from . import kernels

    query = given[0]
    _, heads, rows, size = query.shape
    split = split_for(programs * units, lists.span, device_of(query.device)[0])
    text_splits = cdiv(lists.span, split)
    splits = text_splits + cdiv(rows, split)
    mixed = query.new_empty(1, rows, heads, size)
    sums = query.new_empty(splits, rows, heads, size, dtype=torch.float32)
    peaks = query.new_empty(2, splits, rows, heads, dtype=torch.float32)
    kernels.part[(programs, units, splits)](
        *(*given, lists.text, lists.length, lists.positions, lists.slots, lists.tree, lists.tree.stride(0)),
        *(sums, peaks, *strides, rows, heads, splits, text_splits, split, factor),
        *(lists.whose, lists.tiles, lists.text.stride(0), len(lists.tiles) // 3),
        PARTS=parts,
        **tiling,
        **options,
    )
    padded = options["PADDED"]
    chunk = min(CHUNK, next_power_of_2(splits))
    several = max(1, MERGED // (chunk * padded))
    kernels.merge[(rows, cdiv(heads, several))](
        *(sums, peaks, mixed, rows, heads, splits),
        SIZE=size,
        PADDED=padded,
        HEADS=several,
        CHUNK=chunk,
        num_warps=2 if several > 1 or chunk == CHUNK else 1,
        **early(query.device),
    )
    return mixed


def _groups(span: int) -> int:
    """How many groups of splits there are in exact mode: see `kernels._begins`."""
    return min(-(-span // SHORT), 1 + -(-span // (2 * SHORT)))


def _joined(tiles: int, span: int, processors: int) -> tuple[bool, bool]:
    """Whether a program walks a group of splits, and whether one walks the first two groups, which are half as long.

    Then fewer sums are stored. So it should leave work for all processors: several programs for each, or a single one
    for nearly all, since two on a processor take longer than one.
    """
    groups = _groups(span)
    for paired in (False, True)[: 1 + (groups > 2)]:
        if JOIN_ALONE * processors <= tiles * (groups - paired) <= processors:
            return True, paired
    return tiles * groups >= JOIN * processors, False


def _columns(programs: int, padded: int, processors: int) -> int:
    """The features per program that merges splits: with few programs, more of them read at a time."""
    fewest, few = COLUMNS
    if programs * padded <= processors * fewest:
        return fewest
    return few if programs <= processors and padded > 2 * few else padded


def _unroll(columns: int, padded: int, joined: bool, groups: int) -> int:
    """How many groups are loaded at a time: as far as registers allow, and not more than there are.

    Triton's time to compile grows with its square: 1 s for two, 7 s for eight of four splits each.
    """
    most = 8 if columns == COLUMNS[0] else 4 if joined or columns < padded else 2
    return min(most, 1 << groups.bit_length() - 1)


def _start_exactly(
    given: Tensors,
    lists: SlotLists,
    strides: tuple[int, ...],
    factor: float,
    programs: int,
    units: int,
    parts: int,
    tiling: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """Launch with splits at fixed positions. A program walks one of them or a group, with the same bits."""
    from triton import next_power_of_2

    from . import kernels

    query, line = given[0], lists.text.stride(0)
    _, heads, rows, size = query.shape
    processors = device_of(query.device)[0]
    groups = _groups(lists.span)
    tiles = programs // 2 if lists.packed else programs  # about half of the entries of `tiles` are spare
    joined, paired = _joined(tiles * units, lists.span, processors)
    splits = groups if joined else groups * TOGETHER  # sums that are stored
    mixed = query.new_empty(1, rows, heads, size)
    sums = query.new_empty(splits, rows, heads, size, dtype=torch.float32)
    peaks = query.new_empty(2, splits, rows, heads, dtype=torch.float32)
    kernels.part_exactly[(programs, units, splits)](
        *(*given, lists.text, lists.positions, sums, peaks, *strides, rows, heads, splits, factor),
        *(lists.whose, lists.tiles, line, len(lists.tiles) // 3, parts),
        OWN=OWN,
        SHORT=SHORT,
        TOGETHER=TOGETHER,
        JOINED=joined,
        PAIRED=paired,
        **tiling,
        **options,
    )
    padded = options["PADDED"]
    columns = _columns(rows * units, padded, processors)
    kernels.merge_exactly[(rows, units, padded // columns)](
        *(*given, lists.text, lists.length, lists.positions, lists.tree, lists.tree.stride(0), sums, peaks, mixed),
        *(*strides, rows, heads, splits, factor, lists.whose, line),
        HEADS=next_power_of_2(options["GROUP"]),
        OWN=OWN,
        SHORT=SHORT,
        TOGETHER=TOGETHER,
        JOINED=joined,
        COLUMNS=columns,
        UNROLL=_unroll(columns, padded, joined, groups),
        **{**options, "num_warps": 2 if columns == padded and rows * units <= 2 * processors else 1},
    )
    return mixed
