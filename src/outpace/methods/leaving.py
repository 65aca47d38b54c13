"""When a token leaves at an exit: by a fixed threshold, or by what it is measured to bring and to cost.

A guess that leaves early costs the layers below its exit once more, for the token after it. It brings a token if it is
right, and all guesses before it were. So it pays while the product of those chances is worth more than the layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import TypeAlias

from ..heads.exits import BINS, BORDERS, bin_of
from ..runtime.plain import Engine

Counts: TypeAlias = "tuple[tuple[tuple[int, int], ...], ...]"
"""[exit][bin of confidence] how many guesses there were, and how many were right."""

LONGEST = 15  # guesses that wait, where a threshold does not say how many may
BELIEF = 64  # a bin's stored counts weigh as much as so many of this text
SEEN = 256  # the same for how often its exit lands in each bin
DOUBT = 2.0  # guesses that a bin is thought to have had before any was counted, right as often as their confidence
MEMORY = 8  # tokens at plain decoding's cost that a text is thought to have begun with
CPU_ROW = 0.14  # of a step: what a further row costs on a CPU, where it was not measured
GPU_ROW, GPU_BEGIN = 0.002, 2.0  # the same on a GPU, and how many layers the pause between two climbs takes there
PLAIN, TRIED = 4, 24  # steps that are written plainly at first, and tokens after which exits are compared with them
WEIGHTS = 12  # a layer has about so many times the weights of a T
STEPS = 400  # that a prediction plays through
ENOUGH = 0.005  # of speed: what a further exit must bring at least
_CENTRES = [(low + high) / 2 for low, high in zip((0.0, *BORDERS), (*BORDERS, 1.0), strict=True)]


class Control:
    """Decides, row by row, which exits are asked and whether a guess leaves there."""

    most: int  # guesses that may wait

    def begin(self) -> None:
        """A new chain begins."""

    def next(self, after: int) -> int | None:
        """The next exit to ask, beyond `after` (-1: from the bottom); None: go to the top."""
        raise NotImplementedError

    def leaves(self, exit_: int, confidence: float) -> bool:
        """Whether the newest row's guess leaves at this exit, where it was asked."""
        raise NotImplementedError

    def learn(self, exit_: int, confidence: float, right: bool) -> None:
        """What became of a guess that an exit made."""

    def end(self, tokens: int) -> None:
        """The chain is verified: it brought so many tokens."""


class Fixed(Control):
    """The paper's: a guess leaves where its confidence is above `gamma`, while fewer than `most` wait."""

    def __init__(self, exits: int, gamma: float, most: int) -> None:
        self.exits = exits
        self.gamma = gamma
        self.most = most

    def next(self, after: int) -> int | None:
        return after + 1 if after + 1 < self.exits else None

    def leaves(self, exit_: int, confidence: float) -> bool:
        return confidence > self.gamma


@dataclass(frozen=True)
class Costs:
    """What things cost, in layers for one row."""

    climbs: tuple[float, ...]  # from the bottom to each exit
    whole: float  # all layers and the output head
    probe: float  # stopping at an exit and asking it
    prices: tuple[float, ...]  # [rows - 1] of so many rows, where one row costs 1
    begin: float = 0.0  # starting a climb; part of the whole, and of asking

    def leaving(self, exit_: int, rows: int) -> float:
        """What leaving costs, with so many rows in the chain: a second climb up to here, and a further row above."""
        further = (self.prices[rows] - self.prices[rows - 1]) * (self.whole - self.climbs[exit_])
        return self.begin + self.climbs[exit_] + further

    def of(self, exits: Sequence[int]) -> Costs:
        """With these exits alone."""
        return replace(self, climbs=tuple(self.climbs[exit_] for exit_ in exits))


def costs_of(engine: Engine, layers: Sequence[int], frequent: int) -> Costs:
    """The costs with exits after these layers, from what was measured, else from the sizes of things."""
    model, curve = engine.model, engine.costs
    slope, begin = (CPU_ROW, 0.0) if model.device.type == "cpu" else (GPU_ROW, GPU_BEGIN)
    head, asking, prices = model.vocabulary / (WEIGHTS * model.width), 0.0, None
    if curve is not None and curve.parts is not None:
        begin, head, asking = (cost / curve.parts.layer for cost in (curve.parts.begin, curve.parts.head, curve.asking))
        prices = tuple(accumulate((curve.price(rows) for rows in range(1, LONGEST + 2)), max))  # no row has a bonus
    if prices is None:
        prices = tuple(1 + slope * rows for rows in range(LONGEST + 1))
    spared = head * (1 - frequent / model.vocabulary) if frequent else 0.0
    probe = max(asking or begin + head, spared) - spared + 1 / WEIGHTS
    return Costs(tuple(map(float, layers)), begin + model.layers + head, probe, prices, begin)


class Calibrated(Control):
    """Ours: no threshold. Chances by exit and bin of confidence, which the text itself goes on counting."""

    most = LONGEST

    def __init__(self, counts: Counts, costs: Costs) -> None:
        self.costs = costs
        self.seen: list[list[float]] = []  # [exit][bin] guesses that landed there
        self.asked: list[list[float]] = []  # [exit][bin] those whose outcome is known
        self.right: list[list[float]] = []  # [exit][bin] and those of them that were right
        for line in counts:
            every = sum(asked for asked, _ in line)
            self.seen.append([0.1 + asked * min(1.0, SEEN / max(every, 1)) for asked, _ in line])
            weights = [min(1.0, BELIEF / max(asked, 1)) for asked, _ in line]
            self.asked.append([DOUBT + asked * weight for (asked, _), weight in zip(line, weights, strict=True)])
            rights = zip(line, weights, _CENTRES, strict=True)
            self.right.append([DOUBT * centre + right * weight for (_, right), weight, centre in rights])
        self.spent, self.tokens = MEMORY * costs.whole, float(MEMORY)
        self.chance, self.rows = 1.0, 1  # of the chain: that all its guesses are right, and how many rows it has
        self._gains: list[float] = []
        self._waiting: set[int] = set()  # exits where rows of the chain wait: all climbs stop there in any case

    def begin(self) -> None:
        self.chance, self.rows = 1.0, 1
        self._waiting = set()
        self.spent += self.costs.whole

    def next(self, after: int) -> int | None:
        if after < 0:
            self._gains = self._foresee()
        gains = self._gains
        for exit_ in range(after + 1, len(self.seen)):
            if gains[exit_] > gains[exit_ + 1]:
                return exit_
        return None

    def _foresee(self) -> list[float]:
        """[exits + 1] what the newest row may still win from an exit on, in layers. The last is the top: nothing."""
        worth = self._worth()
        gains = [0.0]
        for exit_ in reversed(range(len(self.seen))):
            later, cost = gains[0], self.costs.leaving(exit_, self.rows)
            lines = zip(self.seen[exit_], self.right[exit_], self.asked[exit_], strict=True)
            won = sum(seen * max(worth * right / asked - cost, later) for seen, right, asked in lines)
            gains.insert(0, max(later, won / sum(self.seen[exit_]) - self._asking(exit_)))
        return gains

    def _asking(self, exit_: int) -> float:
        """What it costs to ask an exit. Where a row waits, leaving has paid for the stop."""
        return self.costs.probe - (min(self.costs.begin, self.costs.probe) if exit_ in self._waiting else 0.0)

    def _worth(self) -> float:
        """What a right guess behind this chain saves: a token at the cost that tokens have now."""
        return self.chance * min(self.spent / self.tokens, self.costs.whole)

    def leaves(self, exit_: int, confidence: float) -> bool:
        place = bin_of(confidence)
        self.seen[exit_][place] += 1
        self.spent += self._asking(exit_)
        chance = self.right[exit_][place] / self.asked[exit_][place]
        cost = self.costs.leaving(exit_, self.rows)
        if self._worth() * chance - cost <= self._gains[exit_ + 1]:
            return False
        self.chance *= chance
        self.rows += 1
        self.spent += cost
        self._waiting = {exit_, *(other for other in self._waiting if other > exit_)}
        return True

    def learn(self, exit_: int, confidence: float, right: bool) -> None:
        place = bin_of(confidence)
        self.asked[exit_][place] += 1
        self.right[exit_][place] += right

    def end(self, tokens: int) -> None:
        self.tokens += tokens


class Guard:
    """Whether the exits pay by the clock in this text: seconds a token, beside those of its first plain steps."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.pays = True
        self._plain: list[float] = []
        self._began, self._uses = 0.0, False
        self._seconds, self._tokens = 0.0, 0  # of steps with exits since they were last compared

    def begin(self) -> bool:
        """A step begins: whether exits may be used in it."""
        self._began, self._uses = self.clock(), self.pays and len(self._plain) == PLAIN
        return self._uses

    def end(self, tokens: int) -> None:
        """The step has brought so many tokens."""
        seconds = self.clock() - self._began
        if not self._uses:
            self._plain = [*self._plain, seconds][:PLAIN]
            return
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        if self._tokens >= TRIED:
            self.pays = self._seconds / self._tokens < median(self._plain)
            self._seconds, self._tokens = 0.0, 0


@lru_cache(maxsize=64)
def predict(counts: Counts, costs: Costs) -> float:
    """The speed with these exits, plain decoding's being 1: some steps played through, on chances alone.

    A token that one exit finds easy, all find easy: one draw decides in which bin it lands at each.
    """
    rng = random.Random(0)
    control = Calibrated(counts, costs)
    chances = [
        [right / asked for right, asked in zip(*pair, strict=True)]
        for pair in zip(control.right, control.asked, strict=True)
    ]
    borders = [[sum(line[: place + 1]) / sum(line) for place in range(BINS)] for line in control.seen]
    for _ in range(STEPS):
        control.begin()
        tokens, valid = 1, True
        while control.rows <= control.most:
            ease, luck = rng.random(), rng.random()
            left = False
            exit_ = control.next(-1)
            while exit_ is not None:
                place = next((place for place, border in enumerate(borders[exit_]) if ease < border), BINS - 1)
                left = control.leaves(exit_, _CENTRES[place])
                valid = valid and (not left or luck < chances[exit_][place])
                exit_ = None if left else control.next(exit_)
            if not left:
                break
            tokens += valid
        control.end(tokens)
    return control.costs.whole * (control.tokens - MEMORY) / (control.spent - MEMORY * control.costs.whole)


@lru_cache(maxsize=64)
def choose(counts: Counts, costs: Costs) -> tuple[tuple[int, ...], float]:
    """The exits that are worth having together, and the speed with them: one more at a time, while it helps.

    A token that an early exit did not let go is a hard one, so asking it again and again seldom pays.
    """
    chosen: tuple[int, ...] = ()
    best = 1.0
    while len(chosen) < len(counts):
        more = [tuple(sorted({*chosen, exit_})) for exit_ in range(len(counts)) if exit_ not in chosen]
        speeds = {exits: predict(tuple(counts[exit_] for exit_ in exits), costs.of(exits)) for exits in more}
        leader = max(more, key=lambda exits: speeds[exits])
        if speeds[leader] < best + ENOUGH:
            break
        chosen, best = leader, speeds[leader]
    return chosen, best
