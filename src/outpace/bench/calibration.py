"""A whole calibration: the engine's cost curve, what each method's own work costs, and how fast each is by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from ..decoder import Decoder
from ..draft import Step
from ..errors import OutpaceError
from ..methods import METHODS, Autoregressive, Method, SelfSpeculative
from ..picking import Sampling
from ..runtime.calibrate import measure
from ..runtime.costs import CostCurve
from .prompts import PROMPTS

TOKENS = 24  # that every method writes after the first prompt of each task
STEPS = 12  # to see what a guess of the first layers costs


class Tried(NamedTuple):
    """What a method took on some prompts, reading them left out."""

    own: float  # seconds a step, drafting and learning
    pace: float  # tokens a second


def calibrate(decoder: Decoder, done: Callable[[float], None] = lambda share: None) -> CostCurve:
    """Measure, and let the decoder's methods go by it from now on. `done` is told which share is finished."""
    engine = decoder.engine
    engine.costs = curve = measure(engine, done=lambda share: done(0.5 * share))
    prompts = [[1, 2, 3, 1, 2]]
    if decoder.tokenizer:
        longest = max(1, engine.model.context - TOKENS)
        prompts = [decoder.encode(of_task[0])[-longest:] for of_task in PROMPTS.values()]
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
