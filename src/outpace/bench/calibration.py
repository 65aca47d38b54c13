"""A full calibration: the engine's cost curve, the cost of each method's own work, and each method's speedup.

`look` shows `auto`, which uses none of it: its estimates of acceptance here, and what it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Tried(NamedTuple):
    """A method's times on some prompts, without prefill."""

    own: float  # seconds per step for drafting and learning
    pace: float  # tokens/s


def calibrate(decoder: Decoder, done: Callable[[float], None] = lambda share: None) -> CostCurve:
    """Measure, and let the decoder's methods use the result from now on. `done` is called with the finished share."""
    engine = decoder.engine
    engine.costs = curve = measure(engine, done=lambda share: done(0.5 * share))
    prompts = _prompts(decoder, TOKENS)
    engine.costs = curve = replace(curve, asking=_asking(decoder, prompts[0], curve))
    tried: dict[str, Tried] = {}
    plain = _try(decoder, Autoregressive(), prompts).pace
    for index, (name, kind) in enumerate(METHODS.items()):
        method = _ready(decoder, name) if kind.lossless and kind is not Autoregressive else None
        if method is not None:
            tried[name] = _try(decoder, method, prompts)
        done(0.5 + 0.45 * (index + 1) / len(METHODS))
    plain = (plain + _try(decoder, Autoregressive(), prompts).pace) / 2
    engine.costs = replace(
        curve,
        drafting={name: found.own for name, found in tried.items()},
        paces={name: found.pace / plain for name, found in tried.items() if plain},
    )
    done(1.0)
    return engine.costs


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


def _try(decoder: Decoder, method: Method, prompts: Sequence[Sequence[int]]) -> Tried:
    options: dict[str, Any] = {"method": method, "max_new_tokens": TOKENS, "sampling": Sampling()}
    list(decoder.stream(prompts[0], **options))  # compiles and captures
    steps: list[Step] = []
    for prompt in prompts:
        steps += islice(decoder.stream(prompt, **options), 1, None)
    if not steps:  # all sequences ended at once
        return Tried(0.0, 0.0)
    # A step that runs as one program has no phases: drafting is part of its cost.
    own = median(step.seconds.get("draft", 0.0) + step.seconds.get("learn", 0.0) for step in steps)
    seconds = sum(sum(step.seconds.values()) for step in steps)
    return Tried(own, sum(len(step.tokens) for step in steps) / seconds)


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
