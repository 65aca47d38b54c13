"""A whole calibration: the engine's cost curve, and what each method's own work costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from statistics import median

from ..decoder import Decoder
from ..errors import OutpaceError
from ..methods import METHODS, AdaDecode, Autoregressive, Method, SelfSpeculative, make
from ..runtime.calibrate import measure
from ..runtime.costs import CostCurve
from .prompts import PROMPTS

STEPS = 12
OF_THE_MODEL = (Autoregressive, AdaDecode, SelfSpeculative)  # they draft with the model's layers, if at all


def calibrate(decoder: Decoder, done: Callable[[float], None] = lambda share: None) -> CostCurve:
    """Measure, and let the decoder's methods go by it from now on. `done` is told which share is finished."""
    engine = decoder.engine
    curve = measure(engine, done=lambda share: done(0.8 * share))
    engine.costs = None  # so that every method drafts in full
    prompt = decoder.encode(next(iter(PROMPTS.values()))[0]) if decoder.tokenizer else [1, 2, 3, 1, 2]
    drafting = {}
    for index, name in enumerate(METHODS):
        method = _ready(decoder, name)
        if method is not None:
            steps = islice(decoder.stream(prompt, method=method, max_new_tokens=8 * STEPS), STEPS)
            drafting[name] = median(step.seconds["draft"] + step.seconds["learn"] for step in steps)
        done(0.8 + 0.2 * (index + 1) / len(METHODS))
    engine.costs = replace(curve, drafting=drafting, asking=_asking(decoder, prompt, curve))
    return engine.costs


def _asking(decoder: Decoder, prompt: list[int], curve: CostCurve) -> float:
    """Seconds that a guess of the model's own first layers takes, beyond those layers. 0: it has no such guesses."""
    try:
        method = decoder.prepare(SelfSpeculative())
    except OutpaceError:
        return 0.0
    assert isinstance(method, SelfSpeculative)
    steps = islice(decoder.stream(prompt, method=method, max_new_tokens=8 * STEPS), STEPS)
    guesses = [step.seconds["draft"] / (len(step.draft) - 1) for step in steps if len(step.draft) > 1]
    if curve.parts is None or not guesses:
        return 0.0
    return max(0.0, median(guesses) - method.exit * curve.parts.layer)


def _ready(decoder: Decoder, name: str) -> Method | None:
    """The method, if it has work of its own to measure, and works with this model and no files beside it."""
    try:
        method = decoder.prepare(make(name))
    except OutpaceError:
        return None
    return None if isinstance(method, OF_THE_MODEL) else method
