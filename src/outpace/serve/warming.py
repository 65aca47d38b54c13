"""Warm-up: compile and capture, before the first request, everything that it would wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic

from ..batch import Request, Writing
from ..decoder import Decoder
from ..methods.base import Method
from ..picking import Sampling
from ..text import Ending

log = logging.getLogger("outpace.serve")
SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))
TOKENS = 2  # tokens to generate
OFTEN = 5.0  # seconds between lines about progress


class Stopped(Exception):
    """The warm-up is of no use any more."""


class Progress:
    """Logs the warm-up's progress, and ends it if the server stops."""

    def __init__(self, stops: Callable[[], bool]) -> None:
        self._last, self._stops = monotonic(), stops

    def __call__(self, done: int, of: int) -> None:
        """`done` of `of` step sizes are prepared."""
        if self._stops():
            raise Stopped
        if done == of or monotonic() > self._last + OFTEN:
            self._last = monotonic()
            log.info("warm-up: %d of %d step sizes", done, of)


def warm(
    decoder: Decoder,
    methods: Sequence[Method],
    most: int,
    longest: int,
    tell: Callable[[int, int], None] = lambda done, of: None,
    samplings: Sequence[Sampling] = SAMPLINGS,
) -> None:
    """Prepare every step size of these methods, for up to `most` sequences of up to `longest` tokens.

    Then generate a few tokens. The model's generation_config is applied to the `samplings`.
    """
    engine = decoder.engine
    samplings = [decoder.sampling_for(how, [0], TOKENS) for how in samplings]
    programs = [engine.program_for(method, samplings[0]) for method in methods]
    makings: list[Callable[[], object]] = []
    for program in programs:
        if program is not None:
            makings += [] if makings else engine.readings(most, longest)  # type: ignore[attr-defined]
            makings += program.makings(samplings, most, longest)
    for done, make in enumerate(makings, 1):
        with engine.turns:
            make()
        tell(done, len(makings))
    for method in methods:
        _write(decoder, method, samplings[0])


def _write(decoder: Decoder, method: Method, sampling: Sampling) -> None:
    prompt = [number % decoder.model.vocabulary for number in range(min(16, decoder.model.context - TOKENS))]
    with Writing(1) as writing:
        writing.add(Request(decoder.engine, method, prompt, sampling, Ending(TOKENS, ()), TOKENS))
        while writing:
            with decoder.engine.turns:
                events = writing.step()
            for _, item in events:
                if isinstance(item, Exception):
                    raise item
