"""The measured cost of steps, from which methods decide how much to draft.

The cost of a step by rows decides whether speculation pays, and it depends on the machine: on a large GPU thirty rows
cost as much as one, on a small CPU two rows may cost twice as much as one.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from ..files import write_whole

VERSION = 9  # raised when the code of a runtime changes: older curves are ignored
# Of `Running`:
FAST, SLOW = 0.2, 0.05  # smoothing of the time of one row, and of prices
LIMIT = 0.5  # the largest error that counts, as a logarithm
FEW = 3  # one-row steps that must be known first
OFTEN = 8  # steps until the curve is drawn again
PATIENCE = (8, 64)  # larger steps before one of one row is due, at first and later


class Parts(NamedTuple):
    """The parts of a one-row step, in seconds."""

    layer: float
    head: float  # the output head
    begin: float  # overhead of running some layers


class Prices:
    """The cost of steps by rows, relative to a one-row step.

    >>> prices = Prices([1.0, 1.1, 1.6, 1.7])
    >>> prices(2), round(prices(6), 2)
    (1.1, 1.9)
    >>> round(prices.slope(1), 2), round(prices.slope(2), 2)
    (0.1, 0.1)
    """

    def __init__(self, prices: Sequence[float]) -> None:
        """The first is for one row. Beyond the last they are extrapolated."""
        self._prices = prices
        self._own = 0.0
        self._last = prices[-1] - prices[-2] if len(prices) > 1 else 0.0
        self._slopes = [
            min([(prices[more] - price) / (more - rows) for more in range(rows + 1, len(prices))] + [self._last])
            for rows, price in enumerate(prices)
        ]
        self.least = min(self._slopes)  # the least cost of another row, anywhere

    def __call__(self, rows: int) -> float:
        known = len(self._prices)
        return self._own + self._prices[min(rows, known) - 1] + max(rows - known, 0) * self._last

    def slope(self, rows: int) -> float:
        """The least cost per additional row, from this many rows to any larger number."""
        return self._slopes[min(rows, len(self._slopes)) - 1]

    def plus(self, own: float) -> Prices:
        """The same, plus a method's own work per step."""
        prices = copy(self)
        prices._own += own
        return prices


@dataclass(frozen=True)
class CostCurve:
    """Seconds per step by rows and context length, for one model on one machine."""

    about: dict[str, str]  # model, device, dtype, runtime, versions that the curve is valid for
    rows: tuple[int, ...]  # increasing, from 1
    contexts: tuple[int, ...]  # increasing
    seconds: tuple[tuple[float, ...], ...]  # [contexts][rows]
    segments: dict[str, float] = field(default_factory=dict)  # layers "0-15" alone: seconds for one row
    drafting: dict[str, float] = field(default_factory=dict)  # method -> seconds of its own work per step
    asking: float = 0.0  # seconds to evaluate an exit, without its layers; 0: not measured
    paces: dict[str, float] = field(default_factory=dict)  # method -> speedup over plain decoding on some prompts

    def step(self, rows: int, context: int = 0) -> float:
        """Seconds per step, interpolated and extrapolated linearly."""
        by_rows = [_between(self.rows, costs, rows) for costs in self.seconds]
        return _between(self.contexts, by_rows, min(max(context, self.contexts[0]), self.contexts[-1]))

    @cached_property
    def price(self) -> Prices:
        """The cost of steps by rows, relative to a one-row step."""
        return Prices([self.step(rows) / self.step(1) for rows in range(1, self.rows[-1] + 1)])

    def price_with(self, method: str) -> Prices:
        """`price` plus the method's own work, if measured."""
        return self.price.plus(self.drafting.get(method, 0.0) / self.step(1))

    @cached_property
    def parts(self) -> Parts | None:
        """From the segments; None if they were not measured."""
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
        """Store the curve for `load`, atomically."""
        path = _path(folder, self.about)
        write_whole(path, json.dumps({"version": VERSION, **asdict(self)}, indent=1))
        return path


class Running:
    """A cost curve that follows steps as they run: a short look can be wrong, and the machine may get busy.

    >>> running = Running(CostCurve({}, (1, 2, 4), (64,), ((1.0, 1.0, 1.2),)))
    >>> for _ in range(100):
    ...     running.add(1, 2.0)
    ...     running.add(2, 2.8)
    >>> [round(running.curve.price(rows), 2) for rows in (1, 2, 3, 4)]
    [1.0, 1.4, 1.4, 1.4]
    >>> round(running.curve.step(1), 2)
    2.0
    """

    def __init__(self, curve: CostCurve) -> None:
        """`curve` has one context length."""
        self.curve = self._first = curve
        self._seen = 0  # one-row steps
        self._single = 0.0  # their seconds, as a logarithm
        self._off = [0.0] * len(curve.rows)  # logarithms of what prices must be multiplied by
        self._new = 0
        self._since, self._patience = 0, PATIENCE[0]  # larger steps since the last of one row

    @property
    def due(self) -> bool:
        """Whether it is time for a step of one row, to which the others are compared."""
        return self._since >= self._patience

    def add(self, rows: int, seconds: float) -> None:
        """A step took this long."""
        taken = log(max(seconds, 1e-9))
        if rows == 1:
            if self.due:
                self._patience = min(2 * self._patience, PATIENCE[1])
            self._since = 0
            self._seen += 1
            error = taken - self._single
            self._single += error if self._seen == 1 else max(FAST, 1 / self._seen) * _clipped(error)
        else:
            self._since += 1
            if self._seen >= FEW and len(self._off) > 1:
                place = min(range(1, len(self._off)), key=lambda place: abs(log(rows / self.curve.rows[place])))
                expected = self._single + log(self._first.price(rows)) + self._off[place]
                self._off[place] += SLOW * _clipped(taken - expected)
        self._new += 1
        if self._seen >= FEW and self._new % OFTEN == 0:
            prices = [self._first.price(rows) * exp(off) for rows, off in zip(self.curve.rows, self._off, strict=True)]
            rising = (exp(self._single) * price for price in accumulate(prices, max))
            self.curve = replace(self._first, seconds=(tuple(rising),))


def _clipped(error: float) -> float:
    return max(-LIMIT, min(error, LIMIT))


def load(folder: Path, about: dict[str, str]) -> CostCurve | None:
    """The stored curve for this model, machine and version; None if there is none, or it is unreadable."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _path(folder: Path, about: dict[str, str]) -> Path:
    digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:16]}.json"


def _between(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """Linear interpolation, and extrapolation from the last two points."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, place), 1), len(places) - 1)
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
