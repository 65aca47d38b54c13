from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.draft import Draft, Tree, Verdict, chain
from outpace.pool import Pool, Rows, Sequence


def mark(pool: Pool, rows: Rows, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Write to each slot a key and a value that tell its position and token."""
    keys = torch.stack([rows.positions, rows.tokens], -1)[None, None].float()
    stored = pool.stored(layer) or pool.store(layer, keys, -keys)
    stored[0].index_copy_(2, rows.slots, keys)
    stored[1].index_copy_(2, rows.slots, -keys)
    return stored[0][:, :, : pool.used], stored[1][:, :, : pool.used]


def random_tree(data: Any, root: int) -> Draft:
    tree = Tree(root)
    for path in data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=5)):
        tree.insert(path, "test")
    return tree.draft()


def random_verdict(data: Any, draft: Draft) -> Verdict:
    rows = [0]
    while draft.children[rows[-1]] and data.draw(st.booleans()):
        rows.append(data.draw(st.sampled_from(draft.children[rows[-1]])))
    return Verdict(tuple(rows), (*(draft.tokens[row] for row in rows[1:]), 50))


def check_sequence(pool: Pool, sequence: Sequence) -> None:
    """The slots of a sequence hold its own tokens, in order."""
    assert len(set(sequence.slots)) == len(sequence.slots)
    if sequence.slots:
        keys = pool._layers[0][0][0, 0, sequence.slots]
        assert keys.tolist() == [[i, token] for i, token in enumerate(sequence.tokens[: len(sequence.slots)])]


@given(st.data())
def test_sequences_keep_their_own_slots_through_random_steps(data: Any) -> None:
    pool = Pool(capacity=4)
    sequences = []
    with pool.sequence([7, 8, 9]) as one, pool.sequence([3]) as two:
        for _ in range(data.draw(st.integers(1, 8))):
            sequence = data.draw(st.sampled_from([one, two]))
            draft = random_tree(data, sequence.tokens[-1])
            behind = len(sequence.tokens) - 1 - len(sequence.slots)
            if behind and data.draw(st.booleans()):
                mark(pool, pool.place_text(sequence, data.draw(st.integers(1, behind))))
            rows = pool.place(sequence, draft)
            mark(pool, rows)
            check_sees(rows, sequence, draft, pool)
            pool.keep(sequence, draft, random_verdict(data, draft))
            if data.draw(st.booleans()):
                kept = data.draw(st.integers(0, len(sequence.tokens)))
                pool.rewrite(sequence, [*sequence.tokens[:kept], *data.draw(st.lists(st.integers(60, 65), min_size=1))])
            for other in (one, two):
                check_sequence(pool, other)
            assert not set(one.slots) & set(two.slots)
            assert pool.held == len(one.slots) + len(two.slots)
            assert pool.used == max([*one.slots, *two.slots], default=-1) + 1
        sequences = [one, two]
    assert pool.held == 0
    assert all(sequence.slots == [] for sequence in sequences)


def check_sees(rows: Rows, sequence: Sequence, draft: Draft, pool: Pool) -> None:
    """Every row sees exactly one slot for each position up to its own, and only slots of its own sequence."""
    own = {*sequence.slots, *sequence.drafted}
    for row, position in enumerate(rows.positions.tolist()):
        slots = rows.sees[row].nonzero().squeeze(-1).tolist()
        assert set(slots) <= own
        assert sorted(rows.slot_positions[slots].tolist()) == list(range(position + 1))
    assert rows.tokens[-len(draft) :].tolist() == list(draft.tokens)


def test_growing_keeps_what_was_written() -> None:
    pool = Pool(capacity=2)
    with pool.sequence([4, 5]) as sequence:
        mark(pool, pool.place(sequence, chain(5, [], "")))
        pool.keep(sequence, chain(5, [], ""), Verdict((0,), (6,)))
        long = chain(6, list(range(20)), "")
        rows = pool.place(sequence, long)
        assert pool.capacity == 32
        keys, values = mark(pool, rows)
        assert keys.shape[2] == pool.used == 23
        assert keys[0, 0, :2].tolist() == [[0, 4], [1, 5]]
        assert torch.equal(keys, -values)


def test_slots_come_back_when_a_step_fails() -> None:
    pool = Pool()

    def fail() -> None:
        with pool.sequence([1, 2, 3]) as sequence:
            pool.place(sequence, chain(3, [4, 5], ""))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert pool.held == 0
    assert pool.used == 0


def test_the_pool_stays_dense() -> None:
    """Freed slots are used again, lowest first, so that a long text with wide drafts needs few slots more."""
    pool = Pool()
    draft = Tree(1)
    for token in range(30):
        draft.insert([token], "test")
    with pool.sequence([1]) as sequence:
        for _ in range(200):
            pool.place(sequence, draft.draft())
            pool.keep(sequence, draft.draft(), Verdict((0, 5), (4, 1)))
        assert pool.used <= len(sequence.tokens) + 31


def test_no_memory_to_grow_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(capacity=4)
    with pool.sequence([1, 2, 3]) as sequence:
        mark(pool, pool.place_text(sequence, 2))

        def out_of_memory(*_: object) -> torch.Tensor:
            raise torch.OutOfMemoryError

        monkeypatch.setattr("outpace.pool._storage", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            pool.place(sequence, chain(3, list(range(9)), ""))
        monkeypatch.undo()
        assert pool.held == 2
        assert pool.capacity == 4
        mark(pool, pool.place(sequence, chain(3, list(range(9)), "")))
        assert pool.capacity == 16
    assert pool.held == 0
