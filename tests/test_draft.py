from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.draft import Draft, Tree, chain

paths = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=12)


def build(lists: list[list[int]]) -> tuple[Draft, list[list[int]]]:
    tree = Tree(9)
    rows = [tree.insert(path, "test") for path in lists]
    return tree.draft(), rows


@given(paths)
def test_a_row_is_its_path(lists: list[list[int]]) -> None:
    draft, rows = build(lists)
    for path, way in zip(lists, rows, strict=True):
        assert [draft.tokens[row] for row in way] == path
        assert [draft.parents[row] for row in way] == [0, *way[:-1]]
        assert [draft.depths[row] for row in way] == list(range(1, len(path) + 1))


@given(paths)
def test_common_beginnings_share_rows(lists: list[list[int]]) -> None:
    draft, _ = build(lists)
    beginnings = {tuple(path[:length]) for path in lists for length in range(1, len(path) + 1)}
    assert len(draft) == 1 + len(beginnings)


@given(paths)
def test_a_row_sees_one_token_at_each_depth(lists: list[list[int]]) -> None:
    draft, _ = build(lists)
    for row, sees in enumerate(draft.ancestors()):
        depths = [draft.depths[other] for other in sees.nonzero()[0]]
        assert sorted(depths) == list(range(draft.depths[row] + 1))
        assert sees[row]


@given(paths)
def test_children_are_found_by_token(lists: list[list[int]]) -> None:
    draft, rows = build(lists)
    for way in rows:
        for above, row in zip([0, *way], way, strict=False):
            assert draft.child(above, draft.tokens[row]) == row
    assert draft.child(0, 77) is None


def test_probes_are_no_children() -> None:
    tree = Tree(9)
    tree.insert([1], "candidate")
    candidates = len(tree)
    tree.insert([1, 2], "probe")
    tree.insert([3], "probe")
    draft = tree.draft(candidates)
    assert draft.child(0, 1) == 1
    assert draft.child(0, 3) is None
    assert draft.child(1, 2) is None


@pytest.mark.parametrize(("window", "ngram"), [(1, 2), (2, 2), (3, 3), (5, 4), (7, 5), (15, 5), (4, 7)])
def test_lookaheads_window_is_a_comb(window: int, ngram: int) -> None:
    """The paper's mask: level-0 token i sees level 0 up to i; level-l token i sees that and its own column."""
    tree = Tree(0)
    spine = [0, *tree.insert(range(1, window), "window")]
    columns = [
        tree.insert([100 * (i + 1) + j for j in range(ngram - 2)], "window", below=spine[i]) for i in range(window)
    ]
    sees = tree.draft().ancestors()
    for i, column in enumerate(columns):
        assert set(sees[spine[i]].nonzero()[0]) == set(spine[: i + 1])
        for level, row in enumerate(column):
            assert set(sees[row].nonzero()[0]) == {*spine[: i + 1], *column[: level + 1]}
    assert len(tree) == window * (ngram - 1)


def test_chain() -> None:
    draft = chain(5, [6, 7], "test")
    assert draft.is_chain
    assert draft.parents == (-1, 0, 1)
    assert draft.sources == ("model", "test", "test")
    assert not build([[1], [2]])[0].is_chain
