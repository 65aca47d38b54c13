"""What a source is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..draft import MODEL, Draft
from ..step.chances import SOURCES
from ..step.nodes import Nodes, Rows
from ..step.texts import Texts
from ..step.walking import Walk


class Source:
    """Guesses for the texts of some lanes. Its tensors stay in place, so that a CUDA graph can be captured of it."""

    names: Sequence[str]  # of its sources: `Nodes.sources` counts from `first` on
    first: int = 0
    deepest: int  # how far ahead its guesses reach
    nodes: int  # how many it offers at most, probes included
    probes: int = 0  # how many of them must be computed
    costly: bool = False  # whether its own work takes time: it asks a model for something, or heads
    asks_room: bool = False  # whether it needs to know how deep guesses may be
    state: Sequence[torch.Tensor] = ()  # [lanes, ...] all that it remembers of texts

    @property
    def families(self) -> Sequence[str]:
        """For each name what its guesses are counted under. A guess and those below it are counted under one."""
        return self.names

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        """A text begins in a lane."""

    def recall(self, lane: int, salt: str) -> None:
        """Let a text that has just begun know what those of the same salt have left."""

    def leave(self, lane: int, salt: str) -> None:
        """It has ended."""

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        """Guesses below the ends of the texts. Those deeper than `room` [lanes] will be left out."""
        raise NotImplementedError

    def learn(self, texts: Texts, rows: Rows, best: torch.Tensor, walk: Walk, logits: torch.Tensor) -> None:
        """What the model said after each row, `best` [lanes, rows] of `logits` [all rows, words], where the walk went.

        The walk's tokens are part of the texts by now.
        """


class Reading(Source):
    """A source that reads the hidden states of rows that were kept, too."""

    costly = True
    reads_text: bool  # all of them; otherwise the last of each text are enough
    heads: Any  # whose states lie in the slots of texts, if it reads all

    def feed(self, rows: Any, hidden: torch.Tensor, last: torch.Tensor) -> Any:
        """New rows of texts, in fixed places: `rows` with the token after each, their states [rows, width].

        Says what the guesses behind the rows `last`, one of each text, come from.
        """
        raise NotImplementedError

    def expect(self, first: int, fed: Any, texts: Texts, choices: Any, needs: frozenset[str]) -> None:
        """What `feed` said of `texts`, which have the lanes from `first` on, is what guesses come from now.

        `choices` and `needs` say how their next tokens will be chosen.
        """
        raise NotImplementedError


class Climbing(Source):
    """A source that has the target's first layers compute rows of its own while it guesses, in place of `guess`."""

    asks_room = costly = True
    layer: int  # so many layers
    asks: Sequence[int]  # how many rows of each lane it asks for, time after time

    def climbing(
        self, texts: Texts, room: torch.Tensor, choices: Any, needs: frozenset[str]
    ) -> Generator[Rows, torch.Tensor, Nodes]:
        """Guesses. It asks for trees below the ends of the texts, and is sent where the layers left their rows.

        That is [lanes, rows, width]. `choices` and `needs` say how the texts' next tokens will be chosen.
        """
        raise NotImplementedError


class Writing(Source):
    """A source with a model of its own that writes ahead, in place of `guess`."""

    costly = True
    engine: Any  # what runs the model. Its pool has the slots of the target's

    def begin(self, sequence: Any) -> None:
        """A text begins: the model reads it but for its last token, into the slots that the text has."""
        raise NotImplementedError

    def writing(
        self, texts: Texts, back: int, choices: Any, needs: frozenset[str]
    ) -> Generator[tuple[int, torch.Tensor], torch.Tensor, Nodes]:
        """Guesses. It asks for rows of its model, and is sent the logits [lanes, words] behind the last of each lane.

        They are the tokens [lanes, rows] of the positions from so many behind the ends of the texts on: first the last
        `back` of the texts, of which the model has computed all before, then one guess after the other.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Plan:
    """How a method drafts: from which sources, and how much."""

    sources: Callable[[int, torch.device], list[Source]]  # for so many lanes
    rows: int  # of a tree, the root included
    gate: float = 0.0  # see `plant`
    prices: torch.Tensor | None = None
    sizes: Sequence[int] = ()  # numbers of rows to choose from at every step; without, all steps have `rows`
    learned: Callable[[Sequence[str]], Any] | None = None  # what was learnt about sources of these names: `Chances`


def named(sources: Sequence[Source]) -> list[str]:
    """The names that nodes of some sources have by number. The sources are told where theirs begin."""
    names = [MODEL]
    for source in sources:
        source.first = len(names)
        names += source.names
    return names


def families(sources: Sequence[Source]) -> list[str]:
    """For each of these names what its guesses are counted under."""
    return [MODEL, *(name for source in sources for name in source.families)]


def drafted(
    names: Sequence[str], tokens: Sequence[int], parents: Sequence[int], sources: Sequence[int], marks: Sequence[int]
) -> Draft:
    """A tree of `Rows` as a draft. Marks: 0 for rows that only fill up, 2 for those that may be accepted."""
    real = sum(mark > 0 for mark in marks)
    return Draft(
        tuple(tokens[:real]),
        (-1, *parents[1:real]),
        sum(mark > 1 for mark in marks),
        tuple(names[source % SOURCES] for source in sources[:real]),
    )


def pick_from(texts: Texts, count: int) -> torch.Tensor:
    """[lanes, count] tokens of the texts, drawn by chance: by the seed and the length of the text."""
    place = torch.arange(count, device=texts.device)
    state = texts.seeds[:, None] + texts.lengths[:, None] * 0x1E3779B97F4A7C15 + place * 0x1B873593
    state = (state ^ (state >> 33)) * 0x2545F4914F6CDD1D
    state = (state ^ (state >> 29)) * 0x1E3779B97F4A7C15
    return texts.tokens.gather(1, (state >> 20) % texts.lengths[:, None].clamp(min=1))
