"""Incremental detokenization, and stop conditions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

USUAL = "transformers.tokenization_utils"  # where methods of tokenizers are that no model has changed
_INCOMPLETE = "\ufffd"  # how tokenizers show incomplete characters


class TextStream:
    """Detokenizes incrementally, whole characters only, and finds stop strings.

    Text that may be the start of a stop string is held back until that is decided.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decode = decoding(tokenizer)
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._start = 0  # decode from here: one piece back, since tokenizers depend on the token before
        self._shown = 0  # tokens before this are in `text`
        self.text = ""
        self.stopped = False
        self._taken = 0

    def push(self, token: int) -> None:
        """Take in one token."""
        self._tokens.append(token)
        if self._stop:  # otherwise it is not needed before `take`
            self._read()

    def finish(self) -> None:
        """No more tokens will come."""
        self._show(self._piece())
        self._stop = ()

    def take(self) -> str:
        """The text that is final and was not taken before."""
        self._read()
        end = len(self.text) - self._undecided()
        taken, self._taken = self.text[self._taken : end], max(end, self._taken)
        return taken

    def _read(self) -> None:
        piece = self._piece()
        if not piece.endswith(_INCOMPLETE):
            self._show(piece)

    def _piece(self) -> str:
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _show(self, piece: str) -> None:
        if self.stopped:
            return
        if piece:
            self._start, self._shown = self._shown, len(self._tokens)
        old = len(self.text)
        self.text += piece
        places = [self.text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stop]
        found = [place for place in places if place >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _undecided(self) -> int:
        """How many last characters may be the start of a stop string."""
        if self.stopped:
            return 0
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )


def decoding(tokenizer: Any) -> Callable[[list[int]], str]:
    """What decodes tokens, without special ones.

    Where transformers only calls the library that decodes, call it directly: the checks around it take longer.
    """
    methods = [getattr(type(tokenizer), name, None) for name in ("decode", "_decode")]
    usual = all(getattr(method, "__module__", "").startswith(USUAL) for method in methods)
    if usual and hasattr(tokenizer, "backend_tokenizer") and not tokenizer.clean_up_tokenization_spaces:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True)


class Ending:
    """Where a sequence ends: at an end-of-sequence token, a stop string, or its maximum length."""

    def __init__(self, limit: int, ends: Collection[int], stream: TextStream | None = None) -> None:
        self._left = limit
        self._ends = frozenset(ends)
        self._stream = stream

    def __call__(self, token: int) -> str | None:
        self._left -= 1
        if self._stream is not None:
            self._stream.push(token)
        if token in self._ends or (self._stream is not None and self._stream.stopped):
            return "stop"
        return None if self._left > 0 else "length"
