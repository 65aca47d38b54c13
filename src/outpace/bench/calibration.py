"""A whole calibration: the engine's cost curve, and what each method's own work costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..decoder import Decoder
from ..methods import METHODS, make
from ..runtime.calibrate import measure
from ..runtime.costs import CostCurve
from .prompts import PROMPTS

STEPS = 12
ALONE = ("jacobi", "prompt-lookup", "lookahead")  # methods that need nothing but the model


def calibrate(decoder: Decoder, done: Callable[[float], None] = lambda share: None) -> CostCurve:
    """Measure, and let the decoder's methods go by it from now on. `done` is told which share is finished."""
    engine = decoder.engine
    curve = measure(engine, done=lambda share: done(0.8 * share))
    engine.costs = None  # so that every method drafts in full
    prompt = decoder.encode(next(iter(PROMPTS.values()))[0]) if decoder.tokenizer else [1, 2, 3, 1, 2]
    drafting = {}
    for index, name in enumerate(ALONE):
        if METHODS[name]().branches and not engine.model.branches:
            continue
        steps = []
        for step in decoder.stream(prompt, method=make(name), max_new_tokens=8 * STEPS):
            steps.append(step.seconds["draft"] + step.seconds["learn"])
            if len(steps) == STEPS:
                break
        drafting[name] = sum(steps) / len(steps)
        done(0.8 + 0.2 * (index + 1) / len(ALONE))
    engine.costs = replace(curve, drafting=drafting)
    return engine.costs
