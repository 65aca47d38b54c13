"""Attention by slot lists against the dense mask. The kernels run on a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

import math
import random
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from outpace.draft import Draft, Tree, chain
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


SCRATCH, FAR = 600, 16  # a slot that nobody has; how far rows may reach behind the text


class Written:
    """Keys, values and queries of some texts, by position; the slots are scattered."""

    def __init__(self, texts: int, window: int = 0, heads: int = 2, key_heads: int = 1, size: int = 16) -> None:
        torch.manual_seed(texts)
        self.window, self.dtype = window, torch.bfloat16 if DEVICE == "cuda" else torch.float32
        length = SCRATCH // texts
        self.keys, self.values = self._numbers(2, 1, key_heads, SCRATCH + 1, size).unbind()
        self.query = 2 * self._numbers(texts, heads, length, size)
        self.slots = torch.randperm(SCRATCH, device=DEVICE)[: texts * length].view(texts, length)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(self.dtype)

    def attend(self, rows: list[tuple[int, int]], pasts: list[int], fill: int = 0, packed: int = 0) -> torch.Tensor:
        """[rows, heads, size] of rows (text, position). Those of a text come one after the other.

        Behind `pasts` they are on one path; the text has what is before. Rows that fill up are of no text.
        """
        texts, count = [*(text for text, _ in rows), *[0] * fill], len(rows) + fill
        empty = len(pasts)
        whose = torch.tensor([text for text, _ in rows] + [empty if packed else 0] * fill, device=DEVICE)
        at = [*(position for _, position in rows), *[0 if packed else pasts[0]] * fill]
        tree = torch.full((count, FAR), SCRATCH, device=DEVICE)
        slots = torch.full((count,), SCRATCH, device=DEVICE)
        tiles = list[tuple[int, int, int]]()
        for text, past in enumerate(pasts):
            mine = [row for row in range(len(rows)) if rows[row][0] == text]
            for row in mine:
                slots[row] = self.slots[text, at[row]]
                tree[row, : max(0, at[row] + 1 - past)] = self.slots[text, past : at[row] + 1]
            tiles += [(start, min(start + packed, mine[-1] + 1), 0) for start in mine[:: packed or count]]
        tiles += [(start, start + 1, 0) for start in range(len(rows), count)]
        listed = torch.zeros(empty + 1, self.slots.shape[1], dtype=torch.long, device=DEVICE)
        listed[:empty] = self.slots[:empty]
        seen = attention.SlotLists(
            text=listed,
            length=torch.tensor([*pasts, 0], device=DEVICE),
            whose=whose,
            tiles=torch.tensor(tiles, device=DEVICE).T.flatten(),
            positions=torch.tensor(at, device=DEVICE),
            slots=slots,
            tree=tree,
            span=1024,
            packed=packed,
            exact=True,
            window=self.window,
        )
        query = self.query[texts, :, at].transpose(0, 1)[None]
        found = torch.ops.outpace.slot_attention(query, self.keys, self.values, *seen, 0.25, 0.0)
        return found[0, : len(rows)]


@pytest.fixture
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them in a group. In memory that nothing was written to lies the worst there is."""
    empty = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *shape: int, **options: Any) -> torch.Tensor:
        made = empty(self, *shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    for name, value in {"SHORT": 128, "TOGETHER": 2}.items():
        monkeypatch.setattr(attention, name, value)


by_kernel = pytest.mark.skipif(DEVICE == "cpu" and not attention.INTERPRET, reason="no GPU, and not interpreted")


def join(patch: pytest.MonkeyPatch, joined: bool, paired: bool = False) -> None:
    """Programs walk a group of splits, or one split; with `paired`, one walks the first two groups."""
    patch.setattr(attention, "_joined", lambda *_: (joined, paired))


@by_kernel
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize("window", [0, 20, 100])
@pytest.mark.parametrize(("past", "count"), [(0, 2), (55, 13), (127, 3), (250, 8), (383, 4)])
def test_exact_rows_have_the_same_bits_wherever_the_text_ends(
    past: int, count: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path against rows alone, over borders of blocks, splits and groups, by programs that walk one split or more."""
    written = Written(1, window)
    join(monkeypatch, True)
    together = written.attend([(0, past + row) for row in range(count)], [past], fill=2)
    join(monkeypatch, False)
    for row in {0, 1, count - 1, 64 - past % 64, 63 - past % 64} & {*range(count)}:
        alone = written.attend([(0, past + row)], [past + row])
        assert torch.equal(alone[0], together[row]), row


@by_kernel
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("past", [40, 100, 200, 270, 350, 420, 500])
def test_exact_rows_have_the_same_bits_whatever_a_program_walks(
    past: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four splits in a group: by a program each, by one, and by one that has the first two groups."""
    written, rows = Written(1, window), [(0, past + row) for row in range(3)]
    empty, stored = torch.Tensor.new_empty, list[int]()
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **how: [stored.append(args[1]), empty(*args, **how)][1]
    )
    found = []
    for name, value in {"TOGETHER": 4, "BLOCK": 32}.items():
        monkeypatch.setattr(attention, name, value)
    for together, paired in ((4, False), (1, False), (1, True)):
        join(monkeypatch, together == 1, paired)
        found.append(written.attend(rows, [past]))
        assert together * attention._groups(1024) in stored, "sums of another number of parts"
        stored.clear()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("tiles", "span", "walks"),
    [
        (64, 1024, (True, False)),  # 128 programs for 132 processors
        (16, 8192, (True, True)),  # 144, or 128 if one has the first two groups
        (24, 8192, (False, False)),  # 216
        (32, 8192, (True, False)),  # 288
        (100, 512, (False, False)),
        (120, 512, (True, False)),  # a single group
        (1, 1024, (False, False)),
    ],
)
def test_programs_walk_groups_of_splits_if_that_leaves_work_for_all_processors(
    tiles: int, span: int, walks: tuple[bool, bool]
) -> None:
    assert attention._joined(tiles, span, 132) == walks


@by_kernel
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize("joined", [True, False])
def test_exact_rows_have_the_same_bits_in_full_tiles(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows × heads than a tile has, against rows alone, whose features are split among programs."""
    written = Written(1, heads=8, size=72)
    past, count = 250, 16
    join(monkeypatch, joined)
    tiles, start = list[int](), attention._start_exactly
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_start_exactly", lambda *given: tiles.append(given[7]["TILE"]) or start(*given))
        together = written.attend([(0, past + row) for row in range(count)], [past], fill=2)
    assert tiles == [64]
    for row in (0, 5, 6, count - 1):
        alone = written.attend([(0, past + row)], [past + row])
        assert torch.equal(alone[0], together[row]), row


@by_kernel
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize("joined", [True, False])
def test_exact_rows_have_the_same_bits_beside_other_texts(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of three texts: a path that passes a border, a text that is read, and one row."""
    written = Written(3)
    join(monkeypatch, joined, paired=joined)
    rows = [*((0, 125 + row) for row in range(5)), *((1, row) for row in (60, 61, 62, 63, 64)), (2, 7)]
    together = written.attend(rows, [125, 65, 7], fill=1, packed=4)
    join(monkeypatch, False)
    for row in (0, 2, 3, 4, 5, 8, 9, 10):
        text, position = rows[row]
        alone = written.attend([(text, position)], [*[0] * text, position], packed=1)
        assert torch.equal(alone[0], together[row]), row


@by_kernel
@pytest.mark.usefixtures("_short_splits")
def test_exact_branches_have_the_bits_of_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree whose branches pass the border of a block, against each path alone, in other slots."""
    rng, past, size = random.Random(1), 126, 16
    draft = Draft(tuple(range(9)), (-1, 0, 0, 1, 2, 3, 4, 4, 0), 9, ("",) * 9)
    pool, rows = placed(past, draft, rng)
    query, (keys, values) = torch.randn(1, 2, 9, size), torch.randn(2, 1, 1, pool.capacity + 1, size)
    query, keys, values = (part.to(DEVICE) for part in (query, keys, values))
    options = (1 / math.sqrt(size), 0.0)
    found = torch.ops.outpace.slot_attention(query, keys, values, *lists(pool, rows, 0, True), *options)
    for row in range(9):
        path = [other for other in range(9) if rows.among[row, other]]
        alone = chain(0, range(1, len(path)), "")
        moved, single = placed(past, alone, rng)
        near, far = torch.randn(2, 1, 1, moved.capacity + 1, size).to(DEVICE)
        here, there = [*rows.text, *rows.slots[path].tolist()], [*single.text, *single.slots.tolist()]
        near[:, :, there], far[:, :, there] = keys[:, :, here], values[:, :, here]
        mine = torch.ops.outpace.slot_attention(query[:, :, path], near, far, *lists(moved, single, 0, True), *options)
        assert torch.equal(mine[0, -1], found[0, row]), row
