"""Static draft trees: the most likely paths, from the accuracy of each head's n-th ranked token."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_tree(accuracies: Sequence[Sequence[float]], size: int) -> list[tuple[int, ...]]:
    """The `size` most likely nodes as paths of ranks, most likely first: (0,) is the first head's top token.

    accuracies[k][r] is the probability that head k's token of rank r (from 0) is right.

    >>> best_tree([[0.6, 0.2], [0.5, 0.1]], 4)
    [(0,), (0, 0), (1,), (1, 0)]
    """
    ranks = [sorted(range(len(head)), key=[-chance for chance in head].__getitem__) for head in accuracies]
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...], float]] = []  # -worth, path of places in `ranks`, worth of the parent

    def consider(path: tuple[int, ...], parent: float) -> None:
        head = len(path) - 1
        if head < len(ranks) and path[-1] < len(ranks[head]):
            worth = parent * accuracies[head][ranks[head][path[-1]]]
            heapq.heappush(waiting, (-worth, path, parent))

    consider((0,), 1.0)
    while waiting and len(found) < size:
        worth, path, parent = heapq.heappop(waiting)
        found.append(tuple(ranks[head][place] for head, place in enumerate(path)))
        consider((*path, 0), -worth)
        consider((*path[:-1], path[-1] + 1), parent)
    return found
