"""Threads on a CPU: torch's, and those of our own C++ code.

torch's threads spin for milliseconds after each operation that they shared, and take the cores from ours. So while our
code computes the model, torch has one thread: what is left for it is small.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_here = threading.local()
_lock = threading.Lock()
_inside = 0  # threads in `torch_alone`
_usual = 1  # how many threads torch has outside


def ours() -> int:
    """How many threads our code uses: as many as torch, where that is not limited to one."""
    found: int = getattr(_here, "count", 0) or torch.get_num_threads()
    return found


@contextmanager
def torch_alone() -> Iterator[None]:
    """A context in which torch has one thread; in this thread our code still has as many as torch had before."""
    global _inside, _usual
    if getattr(_here, "count", 0):  # an engine within another one's step
        yield
        return
    with _lock:
        before = torch.get_num_threads()
        if _inside and before == 1:  # a thread that has begun to use torch meanwhile
            before = _usual
        _inside += 1
        _usual = before
    _here.count = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _here.count = 0
        with _lock:
            _inside -= 1


@contextmanager
def torch_too() -> Iterator[None]:
    """Within `torch_alone`: torch has its threads again."""
    before: int = getattr(_here, "count", 0)
    if before:
        torch.set_num_threads(before)
    try:
        yield
    finally:
        if before:
            torch.set_num_threads(1)
