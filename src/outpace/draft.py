"""The values that one step passes on, and draft trees.

    Draft ──score──▶ Scores ──verify──▶ Verdict ──▶ Step

Everything here is pure: no model, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

Mask: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.bool_]]"

MODEL = "model"
"""The source of a token that was not drafted: the target's own."""

NOTHING = -1
"""Instead of a token: there was none to choose."""


@dataclass(frozen=True)
class Draft:
    """A draft tree, one row per node. Row 0, the root, is the last committed token.

    A row's position is its depth below row 0; it attends to its ancestors and the committed sequence. Rows from
    `candidates` on are probes: computed, but never accepted.
    """

    tokens: tuple[int, ...]  # [rows]
    parents: tuple[int, ...]  # [rows] row of the parent; -1 for row 0, otherwise smaller than the row
    candidates: int  # rows 0 .. candidates-1 may be accepted
    sources: tuple[str, ...]  # [rows] which source drafted it
    proposals: tuple[torch.Tensor | None, ...] = ()  # [rows] the distribution it was sampled from, if any

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Each row's distance from row 0."""
        depths = [0] * len(self.tokens)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                depths[row] = depths[parent] + 1
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each row, its children that may be accepted, in the order they were added."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for row in range(1, self.candidates):
            children[self.parents[row]].append(row)
        return tuple(tuple(rows) for rows in children)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row is the child of the row before it."""
        return all(parent == row - 1 for row, parent in enumerate(self.parents))

    def child(self, row: int, token: int) -> int | None:
        """The child of `row` with this token that may be accepted."""
        for child in self.children[row]:
            if self.tokens[child] == token:
                return child
        return None

    def proposal(self, row: int) -> torch.Tensor | None:
        """The distribution that `row` was sampled from; None if it was not sampled."""
        return self.proposals[row] if self.proposals else None

    def ancestors(self) -> Mask:
        """[rows, rows], True where the column is the row itself or one of its ancestors."""
        sees = np.eye(len(self.tokens), dtype=np.bool_)
        above = np.maximum(self.parents, 0)  # the parent, then the ancestor 2, 4, 8 … generations up; the root stays
        while True:
            sees |= sees[above]
            if not above.any():
                return sees
            above = above[above]


class Tree:
    """Builds a Draft from paths. Paths with a common prefix share its rows.

    Examples:
        >>> tree = Tree(7)
        >>> tree.insert([1, 2, 3], source="a")
        [1, 2, 3]
        >>> tree.insert([1, 2, 9], source="b")
        [1, 2, 4]
        >>> tree.draft().parents
        (-1, 0, 1, 2, 2)
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.sources = [MODEL]
        self._child: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, draft: Draft, other: Tree) -> Tree:
        """A draft and a tree on the same root as one tree, the draft's rows first.

        Examples:
            >>> first, second = Tree(7), Tree(7)
            >>> first.insert([1, 2], "a"), second.insert([1, 3], "b")
            ([1, 2], [1, 2])
            >>> Tree.of(first.draft(), second).draft().parents
            (-1, 0, 1, 1)
        """
        tree = cls(draft.tokens[0])
        tree.tokens, tree.parents, tree.sources = list(draft.tokens), list(draft.parents), list(draft.sources)
        tree._child = {key: row for row, key in enumerate(zip(draft.parents, draft.tokens, strict=True)) if row}
        rows = [0]
        for row in range(1, len(other)):
            rows += tree.insert([other.tokens[row]], other.sources[row], below=rows[other.parents[row]])
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def insert(self, path: Iterable[int], source: str, below: int = 0) -> list[int]:
        """Add the tokens of `path` one under the other, starting under row `below`; return their rows."""
        rows = []
        for token in path:
            row = self._child.get((below, token))
            if row is None:
                row = self._child[below, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(below)
                self.sources.append(source)
            rows.append(row)
            below = row
        return rows

    def cut(self, rows: int) -> None:
        """Remove the rows from `rows` on."""
        for row in range(rows, len(self.tokens)):
            del self._child[self.parents[row], self.tokens[row]]
        del self.tokens[rows:], self.parents[rows:], self.sources[rows:]

    def draft(self, candidates: int | None = None) -> Draft:
        """The tree as it stands. Rows from `candidates` on become probes."""
        return Draft(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            candidates=len(self.tokens) if candidates is None else candidates,
            sources=tuple(self.sources),
        )


def chain(root: int, guesses: Sequence[int], source: str) -> Draft:
    """A draft without branches."""
    count = len(guesses) + 1
    return Draft(
        tokens=(root, *guesses),
        parents=tuple(range(-1, count - 1)),
        candidates=count,
        sources=(MODEL, *(source,) * len(guesses)),
    )


def extended(draft: Draft, path: Sequence[int], source: str, branches: bool = True) -> Draft:
    """The draft with one more path below row 0, as far as it is new. Existing rows keep their indices.

    Without `branches` it stays a chain. A draft with probes or proposals is returned unchanged.

    >>> extended(chain(7, [1, 2], "a"), [1, 3], "b").parents
    (-1, 0, 1, 1)
    """
    grows = branches or (draft.is_chain and tuple(path[: len(draft) - 1]) == draft.tokens[1:])
    if not grows or draft.candidates < len(draft) or any(chance is not None for chance in draft.proposals):
        return draft
    more = Tree(draft.tokens[0])
    more.insert(path, source)
    return Tree.of(draft, more).draft()


def best_tokens(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """For each row of logits [rows, vocabulary] the token with the highest, and that logit. NaN counts as highest.

    >>> best_tokens(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, float("nan")]]))
    ([1, 2], [2.0, nan])
    """
    if logits.device.type != "cpu":
        return unpack_best(find_best(logits))
    # As in `find_best`, in NumPy, which is faster for small arrays, and whose one thread waits for no other.
    blocks = _blocks(logits)
    blocks = blocks if blocks.dtype in (torch.float32, torch.float64) else blocks.float()  # NumPy has no bfloat16
    values = blocks.numpy()
    highest = values.max(-1)
    block = highest.argmax(-1)
    rows = np.arange(len(block))
    places = values[rows, block].argmax(-1)
    return (block * values.shape[-1] + places).tolist(), highest[rows, block].tolist()


def find_best(logits: torch.Tensor) -> torch.Tensor:
    """The result of `best_tokens` as one tensor [2, rows], for a single transfer from the device.

    torch computes a maximum with many threads, but its index with one. So find its block first.
    """
    blocks = _blocks(logits)
    highest = blocks.amax(-1).max(-1)
    block = highest.indices
    places = blocks.gather(1, block[:, None, None].expand(-1, 1, blocks.shape[-1]))[:, 0].max(-1).indices
    return torch.stack([(block * blocks.shape[-1] + places).double(), highest.values.double()])


def unpack_best(found: torch.Tensor) -> tuple[list[int], list[float]]:
    """The result of `find_best`, as lists."""
    tokens, logits = found.tolist()
    return [int(token) for token in tokens], logits


def _blocks(logits: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, block]"""
    return logits.reshape(len(logits), -1, _block(logits.shape[-1]))


@cache
def _block(size: int) -> int:
    """The largest divisor of `size` up to 512."""
    return max(divisor for divisor in range(1, 513) if size % divisor == 0)


@dataclass(frozen=True)
class Scores:
    """What the model computed for each row of a draft."""

    logits: torch.Tensor  # [rows, vocabulary]
    hidden: torch.Tensor  # [rows, width] after the last layer, before the final norm
    found: torch.Tensor | None = None  # [2, rows] result of `find_best`, if the runtime has it
    chosen: Mapping[int, int] | None = None  # row -> token, if the target's choices are already made

    @cached_property
    def _highest(self) -> tuple[list[int], list[float]]:
        return best_tokens(self.logits) if self.found is None else unpack_best(self.found)

    @property
    def best(self) -> list[int]:
        """For each row, the token with the highest logit."""
        return self._highest[0]

    @property
    def best_logits(self) -> list[float]:
        """For each row, the highest logit."""
        return self._highest[1]


@dataclass(frozen=True)
class Verdict:
    """The result of verification: the accepted path, and the tokens that the target chose along it."""

    rows: tuple[int, ...]  # accepted path, row 0 first
    tokens: tuple[int, ...]  # one for each row of the path: the target's choice after it


class Likely(NamedTuple):
    """Log probabilities of a token by the model, before penalties, bias, temperature and top-k/p."""

    chance: float
    best: tuple[tuple[int, float], ...] = ()  # the most likely tokens, as many as requested


@dataclass(frozen=True)
class Step:
    """One decoding step."""

    tokens: tuple[int, ...]  # the new tokens
    sources: tuple[str, ...]  # [tokens] which source drafted it, or "model"
    draft: Draft
    rows: tuple[int, ...]  # the accepted path in the draft
    finish: str | None  # why the sequence ends here: "stop", "length", or None
    seconds: dict[str, float] = field(default_factory=dict)  # by part: draft, score (batched), verify, learn
    text: str = ""  # the new text, if a Decoder made the step
    cost: tuple[float, float] | None = None  # of this step, and of a one-row step, if known
    logprobs: tuple[Likely, ...] = ()  # [tokens] if requested
    reused: int = 0  # in the first step: prompt tokens found in the KV cache
    lossless: bool = True  # False if the sampling rule changes the distribution

    def saying(self, text: str) -> Step:
        """The same step with its text: `replace`, in half the time."""
        more = (text, self.cost, self.logprobs, self.reused, self.lossless)
        return Step(self.tokens, self.sources, self.draft, self.rows, self.finish, self.seconds, *more)
