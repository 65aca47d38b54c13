"""Base classes of sources, which propose draft tokens in captured steps."""

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
    """Drafts for a batch of lanes. Its tensors keep their addresses, so that it can be captured in a CUDA graph."""

    names: Sequence[str]  # of what it drafts from, numbered from `first` on in `Nodes.sources`
    first: int = 0
    deepest: int  # its deepest draft token
    nodes: int  # the most nodes it offers, probes included
    probes: int = 0  # how many of them are probes, which must be computed
    costly: bool = False  # whether drafting itself takes time: it runs a model, or heads
    asks_room: bool = False  # whether it needs to know how deep drafts may be
    state: Sequence[torch.Tensor] = ()  # [lanes, ...] all state of sequences

    @property
    def families(self) -> Sequence[str]:
        """For each name, the name its acceptance is counted under. A node and its descendants must share one."""
        return self.names

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        """A sequence starts in a lane."""

    def recall(self, lane: int, salt: str) -> None:
        """Start a new sequence with what the last one of the same salt left."""

    def leave(self, lane: int, salt: str) -> None:
        """The sequence in a lane has ended; keep what later ones may `recall`."""

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        """Draft nodes below the last tokens. Those deeper than `room` [lanes] will be dropped."""
        raise NotImplementedError

    def learn(self, texts: Texts, rows: Rows, best: torch.Tensor, walk: Walk, logits: torch.Tensor) -> None:
        """Learn from a step: `best` [lanes, rows] of `logits` [all rows, vocabulary], and the accepted path.

        The accepted tokens are part of the sequences by now.
        """


class Reading(Source):
    """A source that also reads the hidden states of accepted rows."""

    costly = True
    reads_text: bool  # whether it reads all of them, or only the last of each sequence
    heads: Any  # if it reads all, their state is in the sequences' slots

    def feed(self, rows: Any, hidden: torch.Tensor, last: torch.Tensor) -> Any:
        """Read new rows of sequences, in static buffers: `rows` with the token after each, hidden states [rows, width].

        Returns what `expect` drafts from, after the rows `last`, one per sequence.
        """
        raise NotImplementedError

    def expect(self, first: int, fed: Any, texts: Texts, choices: Any, needs: frozenset[str]) -> None:
        """Draft from `fed`, the result of `feed` for `texts`, the sequences in the lanes from `first` on.

        `choices` and `needs` define how their next tokens will be chosen.
        """
        raise NotImplementedError


class Climbing(Source):
    """A source that runs the target's first layers on rows of its own to draft. It replaces `guess`."""

    asks_room = costly = True
    layer: int  # how many layers it runs
    asks: Sequence[int]  # rows per lane of each request

    def climbing(
        self, texts: Texts, room: torch.Tensor, choices: Any, needs: frozenset[str]
    ) -> Generator[Rows, torch.Tensor, Nodes]:
        """Draft nodes. It yields trees below the last tokens, and is sent their hidden states [lanes, rows, width].

        `choices` and `needs` define how the next tokens will be chosen.
        """
        raise NotImplementedError


class Writing(Source):
    """A source with a draft model. It replaces `guess`."""

    costly = True
    engine: Any  # of the draft model. Its pool mirrors the target's slots

    def begin(self, sequence: Any) -> None:
        """A sequence starts: prefill all but its last token, into the sequence's slots."""
        raise NotImplementedError

    def writing(
        self, texts: Texts, back: int, choices: Any, needs: frozenset[str]
    ) -> Generator[tuple[int, torch.Tensor], torch.Tensor, Nodes]:
        """Draft nodes. It yields rows for its model, and is sent the logits [lanes, vocabulary] after each lane's last.

        A request is an offset from the ends of the sequences, and tokens [lanes, rows] from there on: first the last
        `back` tokens of the sequences (the model has computed all before), then one draft token after the other.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Plan:
    """How a method drafts: from which sources, and how much."""

    sources: Callable[[int, torch.device], list[Source]]  # for a number of lanes
    rows: int  # of a draft tree, root included
    gate: float = 0.0  # see `plant`
    prices: torch.Tensor | None = None
    sizes: Sequence[int] = ()  # row counts to choose from in each step; empty: always `rows`
    extends: bool = True  # whether predictions may be added to the trees
    learned: Callable[[Sequence[str]], Any] | None = None  # learnt acceptance of sources with these names: `Chances`


def named(sources: Sequence[Source]) -> list[str]:
    """The names of all sources, by number. Sets each source's `first`."""
    names = [MODEL]
    for source in sources:
        source.first = len(names)
        names += source.names
    return names


def families(sources: Sequence[Source]) -> list[str]:
    """For each of these names, the name its acceptance is counted under."""
    return [MODEL, *(name for source in sources for name in source.families)]


def drafted(
    names: Sequence[str], tokens: Sequence[int], parents: Sequence[int], sources: Sequence[int], marks: Sequence[int]
) -> Draft:
    """A tree of `Rows` as a Draft. Marks: 0 for padding rows, 2 for those that may be accepted."""
    real = len(marks) - marks.count(0)
    said = tuple([names[source % SOURCES] for source in sources[:real]])
    return Draft(tuple(tokens[:real]), (-1, *parents[1:real]), marks.count(2), said)


def pick_from(texts: Texts, count: int) -> torch.Tensor:
    """[lanes, count] pseudo-random tokens of the sequences, by seed and length."""
    place = torch.arange(count, device=texts.device)
    state = texts.seeds[:, None] + texts.lengths[:, None] * 0x1E3779B97F4A7C15 + place * 0x1B873593
    state = (state ^ (state >> 33)) * 0x2545F4914F6CDD1D
    state = (state ^ (state >> 29)) * 0x1E3779B97F4A7C15
    return texts.tokens.gather(1, (state >> 20) % texts.lengths[:, None].clamp(min=1))
