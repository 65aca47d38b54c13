"""When a token exits early: above a fixed confidence, or where its measured acceptance is worth its cost.

An early exit costs one more run of the layers below it, for the next token. It gains a token if its draft token is
right and all before it were. So it pays while the product of these probabilities is worth more than the layers.
"""

from __future__ import annotations

import math
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
"""[exit][bin of confidence] how many draft tokens there were, and how many were right."""

LONGEST = 15  # the most waiting draft tokens, if no threshold limits them
BELIEF = 64  # the weight of a bin's stored counts, in draft tokens of this sequence
SEEN = 256  # the same for how often an exit's confidence is in each bin
DOUBT = 2.0  # prior of a bin, in draft tokens that are right as often as their confidence says
MEMORY = 8  # prior of the cost per token, in tokens of plain decoding
CPU_ROW = 0.14  # the cost of another row on a CPU, relative to a step, if it was not measured
GPU_ROW, GPU_BEGIN = 0.002, 2.0  # the same on a GPU, and the pause between two climbs there, in layers
PLAIN, TRIED = 4, 24  # plain steps at the start, and tokens after which steps with exits are compared with them
FEW_TRIED, HOPELESS = 8, 1.2  # the same if steps with exits take this many times as long per token
MOST_SKIPPED = 7  # sequences without exits, if those before had no use for them
WEIGHTS = 12  # weights of a layer, relative to an exit's matrix T
STEPS = 400  # simulated steps of a prediction
ENOUGH = 0.005  # the least gain in speed of another exit
_CENTRES = [(low + high) / 2 for low, high in zip((0.0, *BORDERS), (*BORDERS, 1.0), strict=True)]


class Control:
    """Decides, row by row, which exits are evaluated and whether a token exits there."""

    most: int  # draft tokens that may wait

    def begin(self) -> None:
        """A new chain starts."""

    def next(self, after: int) -> int | None:
        """The next exit to evaluate, beyond `after` (-1: from the bottom); None: run to the top."""
        raise NotImplementedError

    def leaves(self, exit_: int, confidence: float) -> bool:
        """Whether the newest row's token exits here, where the exit was evaluated."""
        raise NotImplementedError

    def learn(self, exit_: int, confidence: float, right: bool) -> None:
        """Whether an exit's draft token was right."""

    def end(self, tokens: int) -> None:
        """The chain is verified, and yielded this many tokens."""


class Fixed(Control):
    """The paper's rule: a token exits if its confidence is above `gamma`, while fewer than `most` wait."""

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
    """Costs, in units of one layer for one row."""

    climbs: tuple[float, ...]  # from the bottom to each exit
    whole: float  # all layers and the output head
    probe: float  # stopping at an exit and evaluating it
    prices: tuple[float, ...]  # [rows - 1] relative to one row
    begin: float = 0.0  # starting a climb; part of `whole` and of `probe`

    def leaving(self, exit_: int, rows: int) -> float:
        """The cost of exiting with this many rows in the chain: a second climb up to here, and another row above."""
        further = (self.prices[rows] - self.prices[rows - 1]) * (self.whole - self.climbs[exit_])
        return self.begin + self.climbs[exit_] + further

    def of(self, exits: Sequence[int]) -> Costs:
        """With these exits only."""
        return replace(self, climbs=tuple(self.climbs[exit_] for exit_ in exits))


def costs_of(engine: Engine, layers: Sequence[int], frequent: int) -> Costs:
    """The costs with exits after these layers, as measured, or else estimated from sizes."""
    model, curve = engine.model, engine.costs
    slope, begin = (CPU_ROW, 0.0) if model.device.type == "cpu" else (GPU_ROW, GPU_BEGIN)
    head, asking, prices = model.vocabulary / (WEIGHTS * model.width), 0.0, None
    if curve is not None and curve.parts is not None:
        begin, head, asking = (cost / curve.parts.layer for cost in (curve.parts.begin, curve.parts.head, curve.asking))
        prices = tuple(accumulate((curve.price(rows) for rows in range(1, LONGEST + 2)), max))  # never falling
    if prices is None:
        prices = tuple(1 + slope * rows for rows in range(LONGEST + 1))
    spared = head * (1 - frequent / model.vocabulary) if frequent else 0.0
    probe = max(asking or begin + head, spared) - spared + 1 / WEIGHTS
    return Costs(tuple(map(float, layers)), begin + model.layers + head, probe, prices, begin)


class Calibrated(Control):
    """Our rule, without a threshold: acceptance by exit and bin of confidence, updated while decoding."""

    most = LONGEST

    def __init__(self, counts: Counts, costs: Costs) -> None:
        self.costs = costs
        self.seen: list[list[float]] = []  # [exit][bin] draft tokens
        self.asked: list[list[float]] = []  # [exit][bin] those whose outcome is known
        self.right: list[list[float]] = []  # [exit][bin] those that were right
        for line in counts:
            every = sum(asked for asked, _ in line)
            self.seen.append([0.1 + asked * min(1.0, SEEN / max(every, 1)) for asked, _ in line])
            weights = [min(1.0, BELIEF / max(asked, 1)) for asked, _ in line]
            self.asked.append([DOUBT + asked * weight for (asked, _), weight in zip(line, weights, strict=True)])
            rights = zip(line, weights, _CENTRES, strict=True)
            self.right.append([DOUBT * centre + right * weight for (_, right), weight, centre in rights])
        self.spent, self.tokens = MEMORY * costs.whole, float(MEMORY)
        self.chance, self.rows = 1.0, 1  # of the chain: the probability that all of it is right, and its rows
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
        """[exits + 1] the expected gain of the newest row from each exit on, in layers; the last is the top: 0."""
        worth = self._worth()
        gains = [0.0]
        for exit_ in reversed(range(len(self.seen))):
            later, cost = gains[0], self.costs.leaving(exit_, self.rows)
            lines = zip(self.seen[exit_], self.right[exit_], self.asked[exit_], strict=True)
            won = sum(seen * max(worth * right / asked - cost, later) for seen, right, asked in lines)
            gains.insert(0, max(later, won / sum(self.seen[exit_]) - self._asking(exit_)))
        return gains

    def _asking(self, exit_: int) -> float:
        """The cost of evaluating an exit. Where a row waits, every climb stops anyway, so stopping costs nothing."""
        return self.costs.probe - (min(self.costs.begin, self.costs.probe) if exit_ in self._waiting else 0.0)

    def _worth(self) -> float:
        """What a right draft token after this chain saves: a token at its current cost."""
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


class Trust:
    """Whether exits are tried in a new sequence: after one where they did not pay, more and more are skipped."""

    def __init__(self) -> None:
        self._skip, self._left = 0, 0

    def tries(self) -> bool:
        """A sequence starts."""
        if self._left:
            self._left -= 1
            return False
        return True

    def learn(self, pays: bool) -> None:
        """Whether they paid in a sequence."""
        self._skip = 0 if pays else min(2 * self._skip + 1, MOST_SKIPPED)
        self._left = self._skip


class Guard:
    """Whether the exits pay by the clock in this sequence: seconds per token, against plain decoding's."""

    def __init__(
        self, trust: Trust | None = None, rival: float = math.inf, clock: Callable[[], float] = perf_counter
    ) -> None:
        """`rival`: seconds per token of plain decoding's program. If unknown, the first steps are plain."""
        self.clock, self.rival = clock, rival
        self.trust = trust or Trust()
        self.pays = self.trust.tries()
        self._plain: list[float] = []
        self._began, self._uses = 0.0, False
        self._seconds, self._tokens = 0.0, 0  # of steps with exits since they were last compared

    def begin(self) -> bool:
        """A step starts: returns whether exits may be used in it."""
        known = len(self._plain) == PLAIN or self.rival < math.inf
        self._began, self._uses = self.clock(), self.pays and known
        return self._uses

    def end(self, tokens: int) -> None:
        """The step has yielded this many tokens."""
        seconds = self.clock() - self._began
        if not self._uses:
            self._plain = [*self._plain, seconds][:PLAIN]
            return
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        plain = min(median(self._plain) if self._plain else math.inf, self.rival)
        slower = self._seconds / (self._tokens * plain)
        if self._tokens >= TRIED or (self._tokens >= FEW_TRIED and slower > HOPELESS):
            self.pays = slower < 1
            self.trust.learn(self.pays)
            self._seconds, self._tokens = 0.0, 0


@lru_cache(maxsize=64)
def predict(counts: Counts, costs: Costs) -> float:
    """The speedup over plain decoding with these exits, from simulated steps.

    A token that is easy for one exit is easy for all: one random draw decides its bin at each.
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
    """The best set of exits and the speedup with it: greedily, one more at a time while it helps.

    A token that did not exit early is a hard one, so evaluating more exits for it seldom pays.
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
