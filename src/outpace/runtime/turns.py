"""Who may use an engine: one thread at a time, for one step."""

from __future__ import annotations

from collections import deque
from threading import Lock, get_ident
from types import TracebackType
from typing import Protocol, TypeVar

from ..errors import InputError


class Closable(Protocol):
    """A text as it is written. Closing it gives back all that it holds."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Turns:
    """A lock that is held for a step, and the texts that live between steps.

    Between two steps of a text nothing of an engine is in use but the slots that the text owns, so other texts may
    take a step then, of this thread or of others. A text that nobody reads any more may be closed at any moment: the
    garbage collector does it in whatever thread it runs, also in the midst of a step. So texts are owned here, not by
    who reads them, and whoever has the turn closes those that were ended.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: int | None = None  # that has the turn
        self._living: set[Closable] = set()
        self._ended: deque[Closable] = deque()  # to be closed

    def __enter__(self) -> None:
        if self._thread == get_ident():
            raise InputError(
                "a step asks for another text of the same Decoder, from a logits processor perhaps. Give that code a "
                "Decoder of its own."
            )
        self._lock.acquire()
        try:
            self._thread = get_ident()
            self._close_ended()
        except BaseException:
            self._thread = None
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close_ended()
        finally:
            self._thread = None
            self._lock.release()
        self._settle()  # what was ended since

    def begin(self, text: C) -> C:
        """Own a text until it is ended."""
        self._living.add(text)
        return text

    def end(self, text: Closable) -> None:
        """Close a text: now, or when the step that runs is over. Never waits, for the garbage collector may call."""
        self._ended.append(text)
        self._settle()

    def _settle(self) -> None:
        # Either this finds the lock free, or whoever holds it comes here after it.
        while self._ended and self._thread != get_ident() and self._lock.acquire(blocking=False):
            self._thread = get_ident()
            try:
                self._close_ended()
            finally:
                self._thread = None
                self._lock.release()

    def _close_ended(self) -> None:
        while self._ended:
            text = self._ended.popleft()
            self._living.discard(text)
            text.close()
