"""Attention by slot lists against the dense mask. The kernels run on a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

import math
import random
from contextlib import ExitStack
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from outpace.draft import Draft, Tree
from outpace.models import attention
from outpace.pool import Packed, Pool, Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if find_spec("triton") and not torch.cuda.is_available():
    import triton

    attention.INTERPRET = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1 python -m pytest …


def random_tree(rows: int, rng: random.Random) -> Draft:
    parents = [-1, *(rng.randrange(max(0, row - 6), row) for row in range(1, rows))]
    return Draft(tuple(range(rows)), tuple(parents), rows, ("",) * rows)


def placed(length: int, draft: Draft, rng: random.Random) -> tuple[Pool, Rows]:
    """Rows behind a text of `length` tokens in scattered slots."""
    pool = Pool(DEVICE, capacity=2 * (length + len(draft)))
    taken = pool.allocate(pool.capacity)
    rng.shuffle(taken)
    pool.free(taken[: length + len(draft)])
    with pool.sequence(range(length + 1)) as sequence:
        sequence.slots = taken[length + len(draft) : 2 * length + len(draft)]
        pool._positions[sequence.slots] = range(length)
        rows = pool.place(sequence, draft)
        assert len(rows.slot_positions) == rows.sees.shape[1]  # kept before the slots are free again
        sequence.slots = []
    return pool, rows


def lists(pool: Pool, rows: Rows, window: int, exact: bool) -> attention.SlotLists:
    text = torch.full((1, pool.capacity), pool.scratch, device=DEVICE)  # what is behind the text is not read
    text[0, : len(rows.text)] = torch.tensor(rows.text, dtype=torch.long)
    nothing = torch.zeros(2, dtype=torch.long, device=DEVICE)
    return attention.SlotLists(
        text=text,
        length=torch.tensor([len(rows.text)], device=DEVICE),
        whose=nothing,
        tiles=nothing,
        positions=rows.positions,
        slots=rows.slots,
        tree=torch.from_numpy(rows.tails() if exact else rows.bits()).to(DEVICE),
        span=pool.capacity,
        packed=0,
        exact=exact,
        window=window,
    )


@pytest.mark.parametrize("length", [0, 1, 63, 64, 200, 300])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 16), (6, 2, 24), (20, 1, 16)])
def test_lists_see_what_the_mask_shows(length: int, heads: int, key_heads: int, size: int) -> None:
    rng = random.Random(length)
    rows_count = rng.choice([1, 5, 11, 70])
    pool, rows = placed(length, random_tree(rows_count, rng), rng)
    window = rng.choice([0, 7, 130])
    softcap = rng.choice([0.0, 5.0])
    query = torch.randn(1, heads, rows_count, size, device=DEVICE)
    keys, values = torch.randn(2, 1, key_heads, pool.capacity + 1, size, device=DEVICE)
    sees = rows.sees
    if window:
        sees = sees & (rows.positions[:, None] - rows.slot_positions < window)
    groups = heads // key_heads
    used = len(rows.slot_positions)
    scores = query @ keys[:, :, :used].repeat_interleave(groups, 1).transpose(2, 3) / math.sqrt(size)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    expected = scores.masked_fill(~sees, -math.inf).softmax(-1) @ values[:, :, :used].repeat_interleave(groups, 1)
    unused = [*{*range(pool.capacity + 1)} - {*rows.text} - {*rows.slots.tolist()}]
    keys[:, :, unused] = values[:, :, unused] = math.nan if attention.INTERPRET or DEVICE == "cuda" else 0.0
    for exact in (False, True):
        given = lists(pool, rows, window, exact)
        found = torch.ops.outpace.slot_attention(query, keys, values, *given, 1 / math.sqrt(size), softcap)
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def packed_lists(pool: Pool, parts: list[Rows], fill: int, most: int, window: int) -> attention.SlotLists:
    """Rows of several texts, then rows that fill up: they are of an empty text, and see themselves."""
    text = torch.zeros(len(parts) + 1, pool.capacity, dtype=torch.long, device=DEVICE)
    whose, tiles, first = list[int](), list[tuple[int, int, int]](), 0
    rows = sum(map(len, parts)) + fill
    among = np.eye(rows, -(-rows // 64) * 64, dtype=np.bool_)
    for number, part in enumerate(parts):
        text[number, : len(part.text)] = torch.tensor(part.text, dtype=torch.long)
        stop = first + len(part)
        whose += [number] * len(part)
        tiles += [(start, min(start + most, stop), first) for start in range(first, stop, most)]
        among[first:stop, first:stop] = part.among
        first = stop
    whose += [len(parts)] * fill
    tiles += [(start, min(start + most, rows), start) for start in range(first, rows, most)]
    tiles += [(0, 0, 0)] * 3
    scratch = [pool.scratch] * fill
    return attention.SlotLists(
        text=text,
        length=torch.tensor([*(len(part.text) for part in parts), 0], device=DEVICE),
        whose=torch.tensor(whose, device=DEVICE),
        tiles=torch.tensor(tiles, device=DEVICE).T.flatten(),
        positions=torch.cat([*(part.positions for part in parts), torch.zeros(fill, dtype=torch.long, device=DEVICE)]),
        slots=torch.cat([*(part.slots for part in parts), torch.tensor(scratch, dtype=torch.long, device=DEVICE)]),
        tree=torch.from_numpy(np.packbits(among, axis=1, bitorder="little").view(np.int64)).to(DEVICE),
        span=pool.capacity,
        packed=most,
        window=window,
    )


@pytest.mark.parametrize(
    ("lengths", "counts", "most"),
    [([70, 0, 200], [1, 1, 1], 2), ([5, 130], [20, 9], 4), ([64, 63, 300, 1], [33, 1, 40, 17], 16), ([9], [3], 16)],
)
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(6, 2, 24), (20, 1, 16)])
def test_rows_of_several_texts(
    lengths: list[int], counts: list[int], most: int, heads: int, key_heads: int, size: int
) -> None:
    rng = random.Random(sum(lengths))
    pool = Pool(DEVICE, capacity=2 * (sum(lengths) + sum(counts)))
    taken = pool.allocate(pool.capacity)
    rng.shuffle(taken)
    pool.free(taken[: pool.capacity // 2])
    with ExitStack() as stack:
        parts = []
        for length, count in zip(lengths, counts, strict=True):
            text = stack.enter_context(pool.sequence(range(length + 1)))
            pool.place_text(text, length) if length else None
            parts.append(pool.place(text, random_tree(count, rng)))
        packed = Packed(parts)
        window = rng.choice([0, 50])
        sees = packed.sees
        if window:
            sees = sees & (packed.positions[:, None] - packed.slot_positions < window)
        fill = 5
        query = torch.randn(1, heads, len(packed) + fill, size, device=DEVICE)
        keys, values = torch.randn(2, 1, key_heads, pool.capacity + 1, size, device=DEVICE)
        groups, used = heads // key_heads, pool.used
        scores = query[:, :, :-fill] @ keys[:, :, :used].repeat_interleave(groups, 1).transpose(2, 3) / math.sqrt(size)
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
        expected = (weights @ values[:, :, :used].repeat_interleave(groups, 1)).transpose(1, 2)
        given = packed_lists(pool, parts, fill, most, window)
        found = torch.ops.outpace.slot_attention(query, keys, values, *given, 1 / math.sqrt(size), 0.0)
        torch.testing.assert_close(found[:, :-fill], expected, rtol=1e-5, atol=1e-5)
        assert found.isfinite().all()
        if attention.INTERPRET or DEVICE == "cuda":  # one text's NaN is nobody else's
            keys[:, :, parts[0].slots] = values[:, :, parts[0].slots] = math.nan
            found = torch.ops.outpace.slot_attention(query, keys, values, *given, 1 / math.sqrt(size), 0.0)
            torch.testing.assert_close(
                found[:, len(parts[0]) : -fill], expected[:, len(parts[0]) :], rtol=1e-5, atol=1e-5
            )


def test_a_tree_of_one_path_is_a_chain() -> None:
    tree = Tree(1)
    tree.insert([2, 3], "")
    _, rows = placed(3, tree.draft(), random.Random(0))
    assert [row.tolist() for row in rows.tails()] == [
        [rows.slots[0], 0, 0],
        [rows.slots[0], rows.slots[1], 0],
        rows.slots.tolist(),
    ]


@pytest.mark.skipif(DEVICE == "cpu" and not attention.INTERPRET, reason="no GPU, and not interpreted")
@pytest.mark.parametrize("window", [0, 100])
def test_exact_rows_have_the_same_bits_wherever_the_text_ends(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of rows against one row at a time, over borders of blocks and of splits, fine and coarse."""
    monkeypatch.setattr(attention, "TURN", 256)
    torch.manual_seed(0)
    rows, ahead, scratch = 16, 13, 600
    keys, values = torch.randn(2, 1, 1, scratch + 1, 16, device=DEVICE)
    query = torch.randn(1, 2, 600, 16, device=DEVICE)
    slots = torch.randperm(600, device=DEVICE)

    def attend(past: int, count: int) -> torch.Tensor:
        positions = torch.full((rows,), past, device=DEVICE)
        positions[:count] += torch.arange(count, device=DEVICE)
        tree = torch.full((rows, 16), scratch, device=DEVICE)
        tree[:count, :count] = slots[past : past + count]
        nothing = torch.zeros(2, dtype=torch.long, device=DEVICE)
        seen = attention.SlotLists(
            text=slots[None],
            length=torch.tensor([past], device=DEVICE),
            whose=nothing,
            tiles=nothing,
            positions=positions,
            slots=tree[:, 0],
            tree=tree,
            span=64 if past <= 64 else 1024,
            packed=0,
            exact=True,
            window=window,
        )
        return torch.ops.outpace.slot_attention(query[:, :, positions], keys, values, *seen, 0.25, 0.0)[0, :count]

    for past in (0, 55, 127, 250, 505):
        together = attend(past, ahead)
        for row in {0, 1, ahead - 1, 64 - past % 64, 63 - past % 64} & {*range(ahead)}:
            assert torch.equal(attend(past + row, 1)[0], together[row]), (past, row)
