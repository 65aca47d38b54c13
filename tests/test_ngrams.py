from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from outpace.draft import Tree
from outpace.methods.ngrams import History, NgramPool

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(texts, st.integers(1, 5))
def test_chances_are_shares_of_belief(text: list[int], longest: int) -> None:
    history = History(longest)
    history.extend(text)
    chances = history.chances(text)
    assert all(chance > 0 for chance in chances.values())
    assert sum(chances.values()) < 1
    seen_after_last = {after for before, after in pairwise(text) if before == text[-1]}
    assert set(chances) == seen_after_last


@given(texts, st.integers(1, 12), st.integers(0, 6), st.floats(0, 0.2), st.booleans())
def test_grown_trees_keep_to_their_limits(
    text: list[int], rows: int, depth: int, floor: float, branching: bool
) -> None:
    history = History(3)
    history.extend(text)
    tree = Tree(text[-1])
    history.grow(tree, rows, depth, "test", floor=floor, branching=branching)
    draft = tree.draft()
    assert len(draft) <= max(rows, 1)
    assert max(draft.depths) <= depth
    assert branching or draft.is_chain
    pairs = set(pairwise(text))
    for row in range(1, len(draft)):
        assert (draft.tokens[draft.parents[row]], draft.tokens[row]) in pairs


@given(texts, texts)
def test_text_may_come_in_pieces(first: list[int], second: list[int]) -> None:
    whole, pieces = History(3), History(3)
    whole.extend(first + second)
    pieces.extend(first)
    pieces.extend(second)
    assert whole.chances(second) == pieces.chances(second)


def test_likelier_guesses_come_first() -> None:
    history = History(1)
    history.extend([0, 1, 0, 1, 0, 2, 0])
    tree = Tree(0)
    history.grow(tree, rows=2, depth=1, source="test")
    assert tree.tokens == [0, 1]


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=5), max_size=30), st.integers(1, 3), st.integers(0, 4))
def test_the_pool_keeps_the_newest(ngrams: list[list[int]], longest: int, capacity: int) -> None:
    pool = NgramPool(longest, capacity)
    for ngram in ngrams:
        pool.add(ngram)
    for token in range(4):
        newest = dict.fromkeys(tuple(ngram[1:]) for ngram in reversed(ngrams) if ngram[0] == token)
        assert list(pool.continuations([token])) == list(newest)[:capacity]


def test_a_gate_keeps_weak_guesses_out() -> None:
    history = History(2)
    history.extend([0, 1, 5, 0, 1])
    for gate, rows in ((0.5, 3), (0.52, 1)):  # after (0, 1) came 5: 0.3 + 0.7 * 0.3
        tree = Tree(1)
        history.grow(tree, rows=3, depth=5, source="test", gate=gate)
        assert len(tree) == rows
