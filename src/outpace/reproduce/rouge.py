"""ROUGE: the overlap of two texts in words (1), in pairs of words (2), in their longest common subsequence (L).

F1 of each, in lower case, without stemming.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Rouge(NamedTuple):
    """ROUGE-1, 2 and L, each from 0 to 1."""

    one: float
    two: float
    longest: float


def rouge(found: str, reference: str) -> Rouge:
    """The overlap of a text with a reference.

    >>> rouge("the cat sat", "The cat sat.")
    Rouge(one=1.0, two=1.0, longest=1.0)
    >>> rouge("sat the cat", "the cat sat").two
    0.5
    """
    mine, wanted = (re.findall(r"\w+", text.lower()) for text in (found, reference))
    pairs = _shared(list(pairwise(mine)), list(pairwise(wanted)))
    return Rouge(_shared(mine, wanted), pairs, in_order(mine, wanted))


def mean(scores: Sequence[Rouge]) -> Rouge | None:
    """The mean of several; None without any."""
    return Rouge(*(sum(values) / len(scores) for values in zip(*scores, strict=True))) if scores else None


def in_order(found: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """The longest common subsequence of two lists, as a share: 1 if they are equal.

    >>> in_order([1, 2, 3, 4], [1, 3, 4, 5])
    0.75
    """
    lengths = [0] * (len(reference) + 1)  # of the longest common subsequence with each prefix of the reference
    for item in found:
        before = 0
        for place, other in enumerate(reference):
            here = lengths[place + 1]
            lengths[place + 1] = before + 1 if item == other else max(here, lengths[place])
            before = here
    return _f1(lengths[-1], len(found), len(reference))


def _shared(found: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    return _f1((Counter(found) & Counter(reference)).total(), len(found), len(reference))


def _f1(common: int, found: int, reference: int) -> float:
    return 2 * common / (found + reference) if found + reference else 1.0
