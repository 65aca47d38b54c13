from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.draft import Draft, Scores, Tree
from outpace.picking import Picker, Sampling
from outpace.verifying import verify

from .statistics import chi_square_fits

WORDS = 5


def never(token: int) -> bool:
    return False


def random_draft(data: Any) -> Draft:
    tree = Tree(0)
    for path in data.draw(st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=5), max_size=8)):
        tree.insert(path, "test")
    return tree.draft(data.draw(st.integers(1, len(tree))))


@given(st.data())
def test_the_walk_follows_the_targets_choices(data: Any) -> None:
    draft = random_draft(data)
    choices = data.draw(st.lists(st.integers(0, WORDS - 1), min_size=len(draft), max_size=len(draft)))
    scores = Scores(torch.nn.functional.one_hot(torch.tensor(choices), WORDS).float(), torch.zeros(len(draft), 1))
    verdict = verify(draft, scores, Picker(Sampling(), 1), [0], never)
    assert verdict.tokens == tuple(choices[row] for row in verdict.rows)
    assert verdict.rows[0] == 0
    for above, row, token in zip(verdict.rows, verdict.rows[1:], verdict.tokens, strict=False):
        assert draft.parents[row] == above
        assert draft.tokens[row] == token
        assert row < draft.candidates
    assert draft.child(verdict.rows[-1], verdict.tokens[-1]) is None


@given(st.data())
def test_nothing_beyond_an_end_is_looked_at(data: Any) -> None:
    draft = random_draft(data)
    end = data.draw(st.integers(0, WORDS - 1))
    choices = data.draw(st.lists(st.integers(0, WORDS - 1), min_size=len(draft), max_size=len(draft)))
    scores = Scores(torch.nn.functional.one_hot(torch.tensor(choices), WORDS).float(), torch.zeros(len(draft), 1))
    whole = verify(draft, scores, Picker(Sampling(), 1), [0], never)
    cut = verify(draft, scores, Picker(Sampling(), 1), [0], lambda token: token == end)
    length = whole.tokens.index(end) + 1 if end in whole.tokens else len(whole.tokens)
    assert cut.tokens == whole.tokens[:length]
    assert cut.rows == whole.rows[:length]


@pytest.mark.parametrize("rule", ["keyed", "rejection"])
@pytest.mark.parametrize("kind", ["certain", "drawn"])
def test_one_step_over_a_tree_has_the_targets_distribution(rule: str, kind: str) -> None:
    """Two guesses under row 0: named without chance, or drawn from q one after the other without replacement."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(WORDS, generator=generator)
    q = torch.randn(WORDS, generator=generator).softmax(-1, dtype=torch.float64)
    counts = torch.zeros(WORDS)
    for seed in range(1500):
        guesses = torch.multinomial(q, 2, generator=generator).tolist() if kind == "drawn" else [1, 3]
        tree = Tree(0)
        for guess in guesses:
            tree.insert([guess], "test")
        plain = tree.draft()
        proposal = q if kind == "drawn" and rule == "rejection" else None
        draft = Draft(plain.tokens, plain.parents, plain.candidates, plain.sources, (None, proposal, proposal))
        scores = Scores(target.expand(3, WORDS), torch.zeros(3, 1))
        picker = Picker(Sampling(temperature=1.0, seed=seed, rule=rule), 1)  # type: ignore[arg-type]
        counts[verify(draft, scores, picker, [0], never).tokens[0]] += 1
    assert chi_square_fits(counts, target.softmax(-1))


def test_a_wrong_rule_would_be_noticed() -> None:
    """Guesses scored as if drawn from q when they were not: the error that the test above must be able to see."""
    target = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]).log()
    q = torch.full((WORDS,), 0.2, dtype=torch.float64)
    draft = Draft((0, 0), (-1, 0), 2, ("model", "test"), (None, q))
    counts = torch.zeros(WORDS)
    for seed in range(1500):
        picker = Picker(Sampling(temperature=1.0, seed=seed, rule="rejection"), 1)
        scores = Scores(target.expand(2, WORDS), torch.zeros(2, 1))
        counts[verify(draft, scores, picker, [0], never).tokens[0]] += 1
    assert not chi_square_fits(counts, target.softmax(-1))
