"""What a step costs: measured, kept, and asked by methods for how much to draft.

The cost of a step by its number of rows decides everything in speculation, and it differs from machine to machine: on
a large GPU thirty rows cost as much as one, on a small CPU two rows may cost twice one.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ..files import write_whole

VERSION = 9  # raised whenever a runtime computes steps by other code: older curves are not believed


class Parts(NamedTuple):
    """What a step of one row is made of, in seconds."""

    layer: float
    head: float  # the output head
    begin: float  # beginning a climb, beyond its layers


class Prices:
    """What steps cost by their rows, in steps of one row.

    >>> prices = Prices([1.0, 1.1, 1.6, 1.7])
    >>> prices(2), round(prices(6), 2)
    (1.1, 1.9)
    >>> round(prices.slope(1), 2), round(prices.slope(2), 2)
    (0.1, 0.1)
    """

    def __init__(self, prices: Sequence[float]) -> None:
        """The first is of one row. Beyond the last they rise as they did to it."""
        self._prices = prices
        self._own = 0.0
        self._last = prices[-1] - prices[-2] if len(prices) > 1 else 0.0
        self._slopes = [
            min([(prices[more] - price) / (more - rows) for more in range(rows + 1, len(prices))] + [self._last])
            for rows, price in enumerate(prices)
        ]
        self.least = min(self._slopes)  # what a further row costs at least, anywhere

    def __call__(self, rows: int) -> float:
        known = len(self._prices)
        return self._own + self._prices[min(rows, known) - 1] + max(rows - known, 0) * self._last

    def slope(self, rows: int) -> float:
        """What a further row costs at least, on the way from so many rows to any larger number."""
        return self._slopes[min(rows, len(self._slopes)) - 1]

    def plus(self, own: float) -> Prices:
        """With a method's own work in each step."""
        prices = copy(self)
        prices._own += own
        return prices


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
    def price(self) -> Prices:
        """The cost of a step by its rows, in steps of one row."""
        return Prices([self.step(rows) / self.step(1) for rows in range(1, self.rows[-1] + 1)])

    def price_with(self, method: str) -> Prices:
        """`price` and the method's own work, where it was measured."""
        return self.price.plus(self.drafting.get(method, 0.0) / self.step(1))

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
        write_whole(path, json.dumps({"version": VERSION, **asdict(self)}, indent=1))
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
