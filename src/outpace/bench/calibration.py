"""A full calibration: the engine's cost curve, the cost of each method's own work, and each method's speedup.

`look` shows `auto`, which uses none of it: its estimates of acceptance here, and what it chose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from ..decoder import Decoder
from ..draft import MODEL, Step
from ..errors import OutpaceError
from ..methods import METHODS, Auto, Autoregressive, Method, SelfSpeculative
from ..methods.auto import Known
from ..picking import Sampling
from ..result import Result
from ..runtime.calibrate import measure
from ..runtime.costs import CostCurve
from ..step.chances import SAID, Chances
from .prompts import PROMPTS

TOKENS = 24  # tokens that every method generates for the first prompt of each task
STEPS = 12  # steps to time a self-speculative draft token
LONG = 64  # tokens that `auto` generates: if the host drafts, it judges a method after 16 steps
STEADY = 0.15  # plain decoding may differ by this share between two runs of a prompt


class Calibration(NamedTuple):
    """A calibration, and how much plain decoding's speed differed between two runs of the same prompt, as a share."""

    curve: CostCurve
    swing: float

    @property
    def steady(self) -> bool:
        """Whether the machine was idle enough for the figures to be of use."""
        return self.swing <= STEADY


def calibrate(decoder: Decoder, done: Callable[[float], None] = lambda share: None) -> Calibration:
    """Measure, and let the decoder's methods use the result from now on. `done` is called with the finished share."""
    engine = decoder.engine
    engine.costs = curve = measure(engine, done=lambda share: done(0.5 * share))
    prompts = _prompts(decoder, TOKENS)
    engine.costs = curve = replace(curve, asking=_asking(decoder, prompts[0], curve))
    methods = {name: _ready(decoder, name) for name, kind in METHODS.items() if kind.lossless}
    tried = {name: _Tried(decoder, method) for name, method in methods.items() if method is not None}
    plain = tried.pop(Autoregressive.name)
    swings = []
    for index, prompt in enumerate(prompts):
        before = plain.run(prompt)
        for number, method in enumerate(tried.values(), 1):
            method.run(prompt)
            done(0.5 + 0.45 * (index + number / len(tried)) / len(prompts))
        swings.append(abs(math.log(plain.run(prompt) / before)) if before else 0.0)
    engine.costs = replace(
        curve,
        drafting={name: median(method.own or [0.0]) for name, method in tried.items()},
        paces={name: method.pace / plain.pace for name, method in tried.items() if plain.pace},
    )
    done(1.0)
    return Calibration(engine.costs, math.expm1(median(swings)))


class _Tried:
    """A method's times on some prompts, without prefill."""

    def __init__(self, decoder: Decoder, method: Method) -> None:
        self._decoder, self._method = decoder, method
        self._warm = False
        self._tokens, self._seconds = 0, 0.0
        self.own = list[float]()  # seconds per step for drafting and learning

    def run(self, prompt: Sequence[int]) -> float:
        """Generate; seconds per token, 0 if the sequence ended at once."""
        if not self._warm:
            self._warm = True
            list(self._steps(prompt))  # compiles and captures
        steps = list(islice(self._steps(prompt), 1, None))
        # A step that runs as one program has no phases: drafting is part of its cost.
        self.own += [step.seconds.get("draft", 0.0) + step.seconds.get("learn", 0.0) for step in steps]
        seconds = sum(sum(step.seconds.values()) for step in steps)
        tokens = sum(len(step.tokens) for step in steps)
        self._seconds += seconds
        self._tokens += tokens
        return seconds / tokens if tokens else 0.0

    def _steps(self, prompt: Sequence[int]) -> Iterator[Step]:
        return self._decoder.stream(prompt, method=self._method, max_new_tokens=TOKENS, sampling=Sampling())

    @property
    def pace(self) -> float:
        """Tokens/s."""
        return self._tokens / self._seconds if self._seconds else 0.0


@dataclass(frozen=True)
class Belief:
    """The estimated acceptance of a source's draft tokens, by the source's own estimate."""

    said: list[float]
    believed: list[float]
    guesses: list[float]  # draft tokens counted, of earlier sequences too; old ones fade


@dataclass(frozen=True)
class Look:
    """What `auto` did on a few sequences, and its estimates."""

    total: Result  # of all sequences
    beliefs: dict[str, Belief]  # by source
    steps: dict[tuple[int, bool], int]  # by rows, and whether heads were used; empty if the host drafts
    texts: dict[str, int]  # if the host drafts: sequences by the method that they started with
    speeds: dict[str, float]  # speedups of these methods, as far as known

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        names = ("method", "steps", "rows", "new_tokens", "offered", "accepted", "times_plain")
        return {
            "total": {name: getattr(self.total, name) for name in names},
            "chances": {name: asdict(belief) for name, belief in self.beliefs.items()},
            "steps": [{"rows": rows, "heads": heads, "steps": steps} for (rows, heads), steps in self.steps.items()],
            "texts": self.texts,
            "speeds": self.speeds,
        }


def look(decoder: Decoder) -> Look:
    """Let `auto` generate a few sequences, and report what it chose."""
    engine, method = decoder.engine, decoder.prepare("auto")
    prompts = _prompts(decoder, LONG)
    total = decoder.begin([], method)
    for prompt in prompts:
        for _ in total.follow(decoder.stream(prompt, method=method, max_new_tokens=LONG)):
            pass
    program = engine.program_for(method, decoder.sampling_for(None, prompts[0], LONG))
    known: Known | None = engine.notes.get(Auto)
    learnt = known.beliefs.chances if program is None and known else getattr(program, "chances", None)
    return Look(
        total,
        {} if learnt is None else _beliefs(learnt),
        {} if program is None else dict(sorted(program.sizes.chosen.items())),
        {} if known is None else dict(known.begun),
        {} if known is None else dict(known.speeds),
    )


def _beliefs(chances: Chances) -> dict[str, Belief]:
    """Of all sources but the model, which drafts nothing."""
    lines = zip(chances.names, chances.believed().tolist(), chances.offered.tolist(), strict=True)
    return {name: Belief(SAID.tolist(), believed, offered) for name, believed, offered in lines if name != MODEL}


def _prompts(decoder: Decoder, tokens: int) -> list[list[int]]:
    """The first prompt of each task that leaves room for this many tokens."""
    if not decoder.tokenizer:
        return [[1, 2, 3, 1, 2]]
    longest = max(1, decoder.model.context - tokens)
    return [decoder.encode(of_task[0])[-longest:] for of_task in PROMPTS.values()]


def _asking(decoder: Decoder, prompt: list[int], curve: CostCurve) -> float:
    """Seconds that a self-speculative draft token takes beyond its layers; 0 if the model supports none."""
    try:
        method = decoder.prepare(SelfSpeculative())
    except OutpaceError:
        return 0.0
    assert isinstance(method, SelfSpeculative)
    steps = islice(decoder.stream(prompt, method=method, max_new_tokens=8 * STEPS, sampling=Sampling()), STEPS)
    guesses = [step.seconds["draft"] / (len(step.draft) - 1) for step in steps if len(step.draft) > 1]
    if curve.parts is None or not guesses:
        return 0.0
    return max(0.0, median(guesses) - method.exit * curve.parts.layer)


def _ready(decoder: Decoder, name: str) -> Method | None:
    """The method with its defaults, sized by the curve; None if it does not work with this model alone."""
    try:
        return decoder.prepare(name)
    except OutpaceError:
        return None
