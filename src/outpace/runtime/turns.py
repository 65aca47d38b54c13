"""Mutual exclusion on an engine: one thread at a time, for one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, get_ident
from types import TracebackType
from typing import Protocol, TypeVar

from ..errors import InputError


class Closable(Protocol):
    """A running sequence. Closing it frees all that it holds."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Turns:
    """A lock that is held for a step, and the sequences that live between steps.

    Between two steps a sequence uses nothing of the engine but its KV slots, so others may take a step then, in any
    thread. A stream that nobody reads any more may be closed at any moment: the garbage collector does so in whatever
    thread it runs, even within a step. So sequences are owned here, not by their readers, and the holder of the lock
    closes those that were ended.
    """

    def __init__(self, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`within()` is entered while the lock is held."""
        self._within = within
        self._entered: AbstractContextManager[None] = nullcontext()
        self._lock = Lock()
        self._thread: int | None = None  # that holds the lock
        self._living: set[Closable] = set()
        self._batched: set[Closable] = set()  # those whose steps are joined with others'
        self._ended: deque[Closable] = deque()  # to be closed

    def __enter__(self) -> None:
        if self._thread == get_ident():
            raise InputError(
                "the same Decoder was called within one of its steps, perhaps by a logits processor. Give that code a "
                "Decoder of its own."
            )
        self._lock.acquire()
        try:
            self._thread = get_ident()
            self._close_ended()
            self._entered = self._within()
            self._entered.__enter__()
        except BaseException:
            self._thread = None
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._entered.__exit__(None, None, None)
            self._close_ended()
        finally:
            self._thread = None
            self._lock.release()
        self._settle()  # what was ended meanwhile

    @property
    def batched(self) -> bool:
        """Whether steps of several sequences are joined."""
        return len(self._batched) > 1

    def begin(self, text: C, batched: bool = False) -> C:
        """Own a sequence until it is ended."""
        self._living.add(text)
        if batched:
            self._batched.add(text)
        return text

    def end(self, text: Closable) -> None:
        """Close a sequence: now, or after the current step. Never waits, since the garbage collector may call it."""
        self._ended.append(text)
        self._settle()

    def _settle(self) -> None:
        # If the lock is taken, its holder comes here when it is done.
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
            self._batched.discard(text)
            text.close()
