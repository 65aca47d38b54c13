"""A race: several methods write from one prompt, one after another, and their texts are compared.

Nothing is drawn here. Whoever draws gives `run` a callback; the clock stands still while it works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .decoder import Decoder, Prompt, Result
from .draft import Step
from .methods import Method
from .picking import Sampling

WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class Race:
    """The finished runs, compared with the first."""

    runs: list[Result]

    @property
    def identical(self) -> bool:
        """Whether all methods wrote the same tokens."""
        return all(self.differs_at(run) is None for run in self.runs)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        first = self.runs[0]
        if self.identical:
            return f"identical: {count(self.runs, 'method')} wrote the same {count(first.token_ids, 'token')}"
        others = [f"{run.method} at token {place}" for run in self.runs if (place := self.differs_at(run)) is not None]
        return f"different: not the text of {first.method}: {', '.join(others)}"

    def differs_at(self, run: Result) -> int | None:
        """The first new token, counted from 1, where a run leaves the first run's text; None if it never does."""
        return first_difference(self.runs[0].token_ids, run.token_ids)

    def speed(self, run: Result) -> float:
        """A run's tokens per second over the first run's."""
        return run.tokens_per_second / self.runs[0].tokens_per_second


OnStep: TypeAlias = Callable[[int, Result, Step], None]
"""Told the number of the method, its run so far, and the new step."""


def run(
    decoder: Decoder,
    methods: Sequence[Method],
    prompt: Prompt,
    sampling: Sampling,
    max_new_tokens: int,
    raw: bool = False,
    on_step: OnStep | None = None,
) -> Race:
    """Let each method write from `prompt`, one after another."""
    prepared = [decoder.prepare(method) for method in methods]
    # The first calls pay for memory and kernels that later ones find ready. Nobody's clock should show that.
    for method in prepared:
        few = min(WARM_UP_TOKENS, max_new_tokens)
        decoder.generate(prompt, method=method, max_new_tokens=few, sampling=sampling, raw=raw)
    tokens = decoder.encode(prompt, raw)
    runs = [decoder.begin(tokens, method) for method in prepared]
    for number, (method, lane) in enumerate(zip(prepared, runs, strict=True)):
        stream = decoder.stream(tokens, method=method, max_new_tokens=max_new_tokens, sampling=sampling)
        for step in lane.follow(stream):
            if on_step is not None:
                on_step(number, lane, step)
    return Race(runs)


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place, counted from 1, where two token lists differ.

    >>> first_difference([5, 6, 7], [5, 9, 7]), first_difference([5], [5, 6]), first_difference([5], [5])
    (2, 2, None)
    """
    for place, (ours, theirs) in enumerate(zip(expected, found, strict=False), start=1):
        if ours != theirs:
            return place
    return None if len(expected) == len(found) else min(len(expected), len(found)) + 1


def count(things: Sequence[object], noun: str) -> str:
    """A number with its noun.

    >>> count([1, 2], "token")
    '2 tokens'
    """
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
