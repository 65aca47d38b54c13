"""What a step costs: measured, kept, and asked by methods for how much to draft.

The cost of a step by its number of rows decides everything in speculation, and it differs from machine to machine: on
a large GPU thirty rows cost as much as one, on a small CPU two rows may cost twice one.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError

VERSION = 6  # raised whenever a runtime computes steps by other code: older curves are not believed


class Parts(NamedTuple):
    """What a step of one row is made of, in seconds."""

    layer: float
    head: float  # the output head
    begin: float  # beginning a climb, beyond its layers


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step by rows and length of text, for one model on one machine."""

    about: dict[str, str]  # model, device, dtype, runtime, versions: the curve is good for nothing else
    rows: tuple[int, ...]  # increasing, from 1
    contexts: tuple[int, ...]  # increasing
    seconds: tuple[tuple[float, ...], ...]  # [contexts][rows]
    segments: dict[str, float] = field(default_factory=dict)  # layers "0-15" alone: seconds for one row
    drafting: dict[str, float] = field(default_factory=dict)  # method -> seconds of its own a step
    asking: float = 0.0  # seconds to ask an exit, beyond the layers below it; 0: not measured
    paces: dict[str, float] = field(default_factory=dict)  # method -> speed on some prompts, plain being 1

    def step(self, rows: int, context: int = 0) -> float:
        """Seconds of a step, between and beyond the measured points along straight lines."""
        by_rows = [_between(self.rows, costs, rows) for costs in self.seconds]
        return _between(self.contexts, by_rows, min(max(context, self.contexts[0]), self.contexts[-1]))

    @cached_property
    def _prices(self) -> list[float]:
        return [self.step(rows) / self.step(1) for rows in range(1, self.rows[-1] + 1)]

    def price(self, rows: int) -> float:
        """The cost of a step of so many rows, in steps of one row."""
        return self._prices[rows - 1] if rows <= len(self._prices) else self.step(rows) / self.step(1)

    def price_with(self, method: str) -> Callable[[int], float]:
        """`price` and the method's own work, where it was measured."""
        own = self.drafting.get(method, 0.0) / self.step(1)
        return lambda rows: self.price(rows) + own

    def least_slope(self, rows: int) -> float:
        """What a further row costs at least, up to so many rows, in steps of one row."""
        return min((self.price(count + 1) - self.price(count) for count in range(1, rows)), default=0.0)

    @cached_property
    def parts(self) -> Parts | None:
        """From the segments; None where they were not measured."""
        if len(self.segments) < 2:
            return None
        borders = [name.split("-") for name in self.segments]
        sizes = [int(stop) + 1 - int(start) for start, stop in borders]
        seconds = list(self.segments.values())
        begin = max(0.0, (sum(seconds) - self.step(1)) / (len(seconds) - 1))
        begin = min(begin, 0.9 * min(seconds))
        layer = sum(spent - begin for spent in seconds[:-1]) / sum(sizes[:-1])
        return Parts(layer, max(0.0, seconds[-1] - begin - sizes[-1] * layer), begin)

    def save(self, folder: Path) -> Path:
        """Keep the curve where `load` finds it, whole or not at all."""
        path = _path(folder, self.about)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            half = path.with_suffix(".part")
            half.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1))
            half.replace(path)
        except OSError as error:
            raise InputError(f"the cost curve could not be written to {folder}: {error.strerror}.") from error
        return path


def load(folder: Path, about: dict[str, str]) -> CostCurve | None:
    """The curve that was kept for this model, machine and version; None if there is none, or none that can be read."""
    try:
        stored = json.loads(_path(folder, about).read_text())
        if stored.pop("version") != VERSION or stored["about"] != about:
            return None
        return CostCurve(
            about,
            tuple(stored["rows"]),
            tuple(stored["contexts"]),
            tuple(map(tuple, stored["seconds"])),
            stored["segments"],
            stored["drafting"],
            stored["asking"],
            stored["paces"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(folder: Path, about: dict[str, str]) -> Path:
    digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:16]}.json"


def _between(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """Linear between neighbours, and beyond the ends as between the last two."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, place), 1), len(places) - 1)
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
