"""A race: several methods decode one prompt, one after another, and their outputs are compared.

Nothing is drawn here: callers that draw pass a callback to `run`. Its time is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .decoder import Decoder
from .draft import Step
from .methods import Method
from .picking import Sampling
from .prompt import Prompt
from .result import Result

WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class Race:
    """The finished runs, compared with the first."""

    runs: list[Result]

    @property
    def identical(self) -> bool:
        """Whether all methods generated the same tokens."""
        return all(self.differs_at(run) is None for run in self.runs)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        first = self.runs[0]
        if self.identical:
            return f"identical: {count(self.runs, 'method')} generated the same {count(first.token_ids, 'token')}"
        others = [f"{run.method} at token {place}" for run in self.runs if (place := self.differs_at(run)) is not None]
        return f"different from {first.method}: {', '.join(others)}"

    def differs_at(self, run: Result) -> int | None:
        """The first new token, counted from 1, where a run differs from the first run; None if there is none."""
        return first_difference(self.runs[0].token_ids, run.token_ids)

    def speed(self, run: Result) -> float:
        """A run's tokens per second over the first run's."""
        return run.tokens_per_second / self.runs[0].tokens_per_second


OnStep: TypeAlias = Callable[[int, Result, Step], None]
"""Called with the index of the method, its run so far, and the new step."""


def run(
    decoder: Decoder,
    methods: Sequence[Method],
    prompt: Prompt,
    sampling: Sampling,
    max_new_tokens: int,
    raw: bool = False,
    on_step: OnStep | None = None,
) -> Race:
    """Decode `prompt` with each method, one after another."""
    prepared = [decoder.prepare(method) for method in methods]
    # The first calls allocate memory and load kernels. That should count for no method.
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
