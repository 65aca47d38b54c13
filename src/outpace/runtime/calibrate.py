"""Measure an engine's cost curve."""

from __future__ import annotations

import math
import os
import platform
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from platformdirs import user_cache_path

from ..draft import Draft, chain
from ..errors import InputError, OutpaceWarning
from ..pool import Sequence as Text
from ..step.chances import Chances
from .costs import CostCurve
from .plain import Engine

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 1024)
SEGMENTS = 4
REPEATS = 7
FEW, GLANCED = (1, 2, 4, 8, 16), 64  # rows and context length, for a glance
PATIENCE = 0.5  # the longest step that a glance repeats, in seconds
FIRST, NEWS = 64, 2048  # draft tokens counted before the file is written, and before it is written again


def folder() -> Path:
    """Where cost curves and acceptance counts are stored."""
    return user_cache_path("outpace") / "costs"


def about(engine: Engine) -> dict[str, str]:
    """What a curve depends on."""
    model = engine.model
    gpu = model.device.type == "cuda"
    processor = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "model": f"{model.name}, {model.layers} layers of {model.width}, {model.vocabulary} words",
        "device": torch.cuda.get_device_name(model.device) if gpu else f"{platform.node()}: {processor}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "runtime": engine.name,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }


@cache
def _version(package: str) -> str:
    """Reading a package's metadata takes milliseconds, and every Decoder asks."""
    return version(package)


class Remembered(Chances):
    """Acceptance counts that are stored in a file between processes."""

    def __init__(self, names: Sequence[str], path: Path) -> None:
        super().__init__(names)
        self._path: Path | None = path
        self._due = FIRST  # the count at which it is written: a process may decode a single short sequence
        if path.exists() and not self.load(path):
            warnings.warn(
                f"{path} is truncated, or from another version of Outpace. It is ignored: acceptance rates "
                "are learnt anew.",
                OutpaceWarning,
                stacklevel=2,
            )

    def pause(self) -> None:
        """A sequence has ended: store the counts, if enough is new."""
        if self._path is None or self.counted < self._due:
            return
        self._due = self.counted + NEWS
        try:
            self.keep(self._path)
        except InputError as error:
            warnings.warn(
                f"learnt acceptance rates are kept only while this process runs: {error}",
                OutpaceWarning,
                stacklevel=2,
            )
            self._path = None


def remembered(engine: Engine, names: Sequence[str]) -> Remembered:
    """The stored acceptance counts of these sources for the engine's model."""
    digest = sha256(about(engine)["model"].encode()).hexdigest()
    return Remembered(names, folder() / f"chances-{digest[:16]}.json")


def measure(
    engine: Engine,
    rows: Sequence[int] = (),
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
    done: Callable[[float], None] = lambda share: None,
) -> CostCurve:
    """Time steps by rows and context length, and each quarter of the layers with one row.

    Each round goes over all row counts, so that a disturbance does not hit a single one.
    """
    rows = rows or _corners(engine)
    contexts = [length for length in contexts if length + max(rows) < engine.model.context] or [1]
    seconds = []
    segments: dict[str, float] = {}
    for index, length in enumerate(contexts):
        tokens = [token % engine.model.vocabulary for token in range(length + 1)]
        with engine.turns, engine.pool.sequence(tokens) as text:

            def done_here(part: float, index: int = index) -> None:
                done((index + part) / len(contexts))

            seconds.append(_steps(engine, text, rows, repeats, done_here))
            if index == 0:
                segments = _segments(engine, text, repeats)
    return CostCurve(about(engine), tuple(rows), tuple(contexts), tuple(seconds), segments)


def glance(engine: Engine) -> CostCurve:
    """A quick cost curve from a few short steps, in about the time of twenty tokens.

    The fastest of three rounds counts; with a large model there is one round. The caller must hold the engine's lock.
    """
    context = engine.model.context
    counts = [count for count in FEW if count < context] or [1]
    length = max(0, min(GLANCED, context - max(counts) - 1))
    tokens = [token % engine.model.vocabulary for token in range(length + 1)]
    times = dict.fromkeys(counts, math.inf)
    with engine.pool.sequence(tokens) as text:
        _step(engine, text, _comb(text.tokens[-1], 1))  # prefill, which is not part of a step's cost
        for _ in range(3):
            for count in counts:
                times[count] = min(times[count], _step(engine, text, _comb(text.tokens[-1], count)))
            if times[max(counts)] > PATIENCE and not engine.compiling:
                break
    return CostCurve(about(engine), tuple(counts), (length,), (tuple(times.values()),))


def _steps(
    engine: Engine,
    text: Text,
    rows: Sequence[int],
    repeats: int,
    done: Callable[[float], None],
) -> tuple[float, ...]:
    """Seconds per step after a context, by rows."""
    times: dict[int, list[float]] = {count: [] for count in rows}
    for turn in range(repeats + 1):
        for count in rows:
            spent = _step(engine, text, _comb(text.tokens[-1], count))
            if turn:  # the first round prefills, compiles and captures
                times[count].append(spent)
        done((turn + 1) / (repeats + 1))
    return tuple(statistics.median(times[count]) for count in rows)


def _corners(engine: Engine) -> Sequence[int]:
    """Row counts between which costs are about linear. With fixed sizes, costs jump after each."""
    if not engine.sizes:
        return ROWS
    sizes = [*engine.sizes, *range(2 * engine.sizes[-1], ROWS[-1], engine.sizes[-1])]
    return sorted({1, ROWS[-1], *(rows for size in sizes for rows in (size, size + 1) if rows < ROWS[-1])})


def _step(engine: Engine, text: Text, draft: Draft) -> float:
    start = perf_counter()
    best = engine.score(text, draft).best
    spent = perf_counter() - start
    assert len(best) == len(draft)
    _forget(engine, text, len(draft))
    return spent


def _forget(engine: Engine, text: Text, count: int) -> None:
    """Free the rows of a draft; the sequence stays computed."""
    behind = len(text.drafted) - count
    text.slots += text.drafted[:behind]
    engine.pool.free(text.drafted[behind:])
    text.drafted = []


def _segments(engine: Engine, text: Text, repeats: int) -> dict[str, float]:
    """Seconds of each segment of the layers for one row; the last includes the output head."""
    layers, model = engine.model.layers, engine.model
    if model.width <= 1:
        return {}  # a toy
    borders = sorted({layers * part // SEGMENTS for part in range(SEGMENTS + 1)})
    found = {}
    for start, stop in pairwise(borders):
        times = []
        for _ in range(repeats + 1):
            rows = engine.pool.place(text, chain(text.tokens[-1], (), ""))
            hidden = torch.zeros(1, model.width, dtype=model.dtype, device=model.device) if start else None
            begin = perf_counter()
            output = engine.climb(text, rows, 1 if stop == layers else 0, start, stop, hidden)
            output.hidden[:1, :1].tolist()  # waits for the device
            times.append(perf_counter() - begin)
            _forget(engine, text, 1)
        found[f"{start}-{stop - 1}"] = statistics.median(times[1:])
    return found


def _comb(root: int, rows: int) -> Draft:
    """Branches of four rows below the root."""
    parents = [-1, *(0 if row % 4 == 1 else row - 1 for row in range(1, rows))]
    return Draft((root,) * rows, tuple(parents), rows, ("",) * rows)
