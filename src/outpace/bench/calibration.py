"""A whole calibration: the engine's cost curve, what each method's own work costs, and how fast each is by it.

And a look at `auto`, which goes by none of it: what it believes of guesses here, and what it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from ..decoder import Decoder, Result
from ..draft import MODEL, Step
from ..errors import OutpaceError
from ..methods import METHODS, Auto, Autoregressive, Method, SelfSpeculative
from ..methods.auto import Known
from ..picking import Sampling
from ..runtime.calibrate import measure
from ..runtime.costs import CostCurve
from ..step.chances import SAID, Chances
from .prompts import PROMPTS

TOKENS = 24  # that every method writes after the first prompt of each task
STEPS = 12  # to see what a guess of the first layers costs
LONG = 64  # tokens that `auto` writes: where the host drafts it judges a method by 16 steps


class Tried(NamedTuple):
    """What a method took on some prompts, reading them left out."""

    own: float  # seconds a step, drafting and learning
    pace: float  # tokens a second


def calibrate(decoder: Decoder, done: Callable[[float], None] = lambda share: None) -> CostCurve:
    """Measure, and let the decoder's methods go by it from now on. `done` is told which share is finished."""
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
    """What is believed of a source's guesses, by how likely it says they are."""

    said: list[float]
    believed: list[float]
    guesses: list[float]  # that were counted there, earlier texts' included; old ones fade


@dataclass(frozen=True)
class Look:
    """What `auto` did on a few texts, and what it goes by."""

    total: Result  # of all texts
    beliefs: dict[str, Belief]  # by source
    steps: dict[tuple[int, bool], int]  # by rows, and whether heads were asked; none where the host drafts
    texts: dict[str, int]  # where the host drafts: by the method that they began with
    speeds: dict[str, float]  # of these methods as far as it is known, plain decoding being 1

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        names = ("method", "steps", "rows", "new_tokens", "offered", "accepted", "times_plain")
        return {
            "total": {name: getattr(self.total, name) for name in names},
            "chances": {name: asdict(belief) for name, belief in self.beliefs.items()},
            "steps": [{"rows": rows, "heads": heads, "steps": steps} for (rows, heads), steps in self.steps.items()],
            "texts": self.texts,
            "speeds": self.speeds,
        }


def look(decoder: Decoder) -> Look:
    """Let `auto` write a few texts, and see what it chose."""
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
    """Of all sources but the model, which does not guess."""
    lines = zip(chances.names, chances.believed().tolist(), chances.offered.tolist(), strict=True)
    return {name: Belief(SAID.tolist(), believed, offered) for name, believed, offered in lines if name != MODEL}


def _prompts(decoder: Decoder, tokens: int) -> list[list[int]]:
    """The first of each task, with room for so many tokens behind it."""
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
    if not steps:  # all texts ended at once
        return Tried(0.0, 0.0)
    # A whole step that runs without the host has no verbs: then drafting is part of what the step costs.
    own = median(step.seconds.get("draft", 0.0) + step.seconds.get("learn", 0.0) for step in steps)
    seconds = sum(sum(step.seconds.values()) for step in steps)
    return Tried(own, sum(len(step.tokens) for step in steps) / seconds)


def _asking(decoder: Decoder, prompt: list[int], curve: CostCurve) -> float:
    """Seconds that a guess of the model's own first layers takes, beyond those layers. 0: it has no such guesses."""
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
    """The method as it is by name, sized by the curve; None where it does not work with this model alone."""
    try:
        return decoder.prepare(name)
    except OutpaceError:
        return None
