"""Guesses from outside of a text: what its reader expects it to be."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 8  # last tokens of the answer that are looked for in the prediction
AHEAD = 16  # tokens that are guessed at once


class Prediction:
    """An expected answer, followed wherever the answer agrees with it.

    >>> hint = Prediction([5, 6, 7, 8, 9], prompt_length=2)
    >>> hint.after([1, 2], 3), hint.after([1, 2, 5, 0, 7], 3), hint.after([1, 2, 0], 3)
    ([5, 6, 7], [8, 9], [])
    """

    name = "prediction"

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self._tokens = list(tokens)
        self._prompt_length = prompt_length
        self._places: dict[tuple[int, ...], list[int]] = {}  # where runs of up to LONGEST tokens end
        for end in range(1, len(self._tokens) + 1):
            for start in range(max(0, end - LONGEST), end):
                self._places.setdefault(tuple(self._tokens[start:end]), []).append(end)

    def after(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """What follows the answer's end in the prediction: of its longest match, the one nearest to where it is now."""
        answer = list(tokens[self._prompt_length :])
        if not answer:
            return self._tokens[: min(most, AHEAD)]
        for length in range(min(LONGEST, len(answer)), 0, -1):
            ends = self._places.get(tuple(answer[-length:]))
            if ends:
                end = min(ends, key=lambda end: abs(end - len(answer)))
                return self._tokens[end : end + min(most, AHEAD)]
        return []
