"""What followed what: the memories that guess by repetition.

`History` remembers the text itself, `NgramPool` short runs of tokens from anywhere. Both are asked with the end of
the text and answer with continuations, the best first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence


class History:
    """An index of a growing text by the tokens before each place.

    >>> history = History(longest=2)
    >>> history.extend([1, 2, 3, 1, 2, 4, 1, 2])
    >>> list(history.continuations(length=3))
    [[4, 1, 2], [3, 1, 2]]
    """

    def __init__(self, longest: int, shortest: int = 1) -> None:
        self.text: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)  # key -> where its continuations begin

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in new text."""
        for token in tokens:
            # The keys that end before this token have a continuation only now that it is here.
            for length in self._lengths:
                if length <= len(self.text):
                    self._places[tuple(self.text[-length:])].append(len(self.text))
            self.text.append(token)

    def continuations(self, length: int) -> Iterator[list[int]]:
        """What followed the text's end elsewhere: longest match first, then newest first; no place twice."""
        seen = set()
        for key in self._lengths:
            if key > len(self.text):
                continue
            for place in reversed(self._places.get(tuple(self.text[-key:]), ())):
                if place not in seen:
                    seen.add(place)
                    yield self.text[place : place + length]


class NgramPool:
    """For each key of one or more tokens, the runs that followed it lately: `capacity` at most, newest first.

    >>> pool = NgramPool(longest=1, capacity=2)
    >>> for run in ([7, 1, 1], [7, 2, 2], [7, 3, 3], [7, 2, 2]): pool.add(run)
    >>> list(pool.continuations([5, 7]))
    [(2, 2), (3, 3)]
    """

    def __init__(self, longest: int, capacity: int) -> None:
        self._longest = longest
        self._capacity = capacity
        self._runs: dict[tuple[int, ...], OrderedDict[tuple[int, ...], None]] = defaultdict(OrderedDict)

    def add(self, ngram: Sequence[int]) -> None:
        """Remember an n-gram under each of its beginnings that a key may have."""
        for key in range(1, min(self._longest, len(ngram) - 1) + 1):
            runs = self._runs[tuple(ngram[:key])]
            run = tuple(ngram[key:])
            runs[run] = None
            runs.move_to_end(run)
            if len(runs) > self._capacity:
                runs.popitem(last=False)

    def continuations(self, text: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Runs that followed the end of `text`: longest key first, then newest first."""
        for key in range(min(self._longest, len(text)), 0, -1):
            yield from reversed(self._runs.get(tuple(text[-key:]), ()))
