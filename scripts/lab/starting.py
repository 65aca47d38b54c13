"""What the first token waits for: compilers, captures, imports."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .models import set_up

CONSOLE = Console(width=150)
PERIOD = 0.01  # seconds between two samples
LIBRARIES = ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "triton", "torch", "transformers", "outpace")


class Samples(threading.Thread):
    """Counts what the main thread does: the innermost function of ours, and the library that it is in."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[tuple[str, str]] = Counter()
        self._watched = threading.main_thread().ident
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.counts[_place(sys._current_frames()[self._watched])] += 1  # type: ignore[index]

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _place(frame: Any) -> tuple[str, str]:
    library, ours = "", ""
    while frame is not None and not ours:
        file = frame.f_code.co_filename
        library = library or next((name for name in LIBRARIES if f"/{name}/" in file), "")
        if "/outpace/" in file:
            ours = f"{Path(file).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ours, library or "other"


def start(arguments: argparse.Namespace) -> None:
    """Seconds of the main thread until the first token, by function of ours and library; and what Triton compiled.

    With the compilers' caches empty it is what a user waits for once: name new folders as TRITON_CACHE_DIR and
    TORCHINDUCTOR_CACHE_DIR.
    """
    from triton import knobs

    made: list[tuple[str, str, str]] = []
    begun = time.perf_counter()

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        found = "found" if cache_hit else f"{times.total / 1e6:.2f}"
        made.append((f"{time.perf_counter() - begun:.1f}", f"{src.name} {found}", _thread()))

    knobs.compilation.listener = note
    samples = Samples()
    samples.start()
    try:
        set_up(arguments, arguments.exact or None)
    finally:
        samples.stop()
        knobs.compilation.listener = None
    kernels = Table("at, s", "kernel, s", "thread", title="kernels that this process compiled or found")
    for line in made:
        kernels.add_row(*line)
    where = Table("in", "library", "seconds", title=f"{time.perf_counter() - begun:.1f} s, loading included")
    for (ours, library), count in samples.counts.most_common(40):
        where.add_row(ours, library, f"{count * PERIOD:.2f}")
    CONSOLE.print(kernels, where)


def _thread() -> str:
    return "main" if threading.current_thread() is threading.main_thread() else threading.current_thread().name
