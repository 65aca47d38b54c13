"""What heads are: small trained modules that guess the tokens after the newest one from the target's hidden states.

Position t is the last that the target has computed; the token at t + 1 is picked by then. Head k (from 0) guesses
the token at t + 2 + k. In training all positions of a text are such a t at once. Exits guess the token at t + 1, before
the target has computed position t through its last layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from ..errors import InputError
from ..models.adapter import Ends, FixedRows
from ..pool import Pool, Sequence
from .blocks import BlockShape


@dataclass(frozen=True)
class HeadSettings:
    """What every kind of heads can be told. Kinds add their own."""

    count: int = 4  # how many tokens they guess ahead

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "bool" and not isinstance(value, bool):
                raise InputError(f"{item.name}={value!r} must be true or false.")
            if item.type == "int" and (not isinstance(value, int) or isinstance(value, bool)):
                raise InputError(f"{item.name}={value!r} must be a whole number.")
        if not 1 <= self.count <= 16:
            raise InputError(f"count={self.count} is out of range: it must be 1 to 16.")

    def for_model(self, layers: int, vocabulary: int) -> HeadSettings:
        """The same, with what depends on the target's sizes filled in."""
        return self


class Example(NamedTuple):
    """Some positions of text that the target has computed."""

    tokens: torch.Tensor  # [positions]
    read: torch.Tensor  # [layers, positions, width] its states after the layers that the heads read
    final: torch.Tensor  # [positions, width] its states after the last layer


class Heads(nn.Module):
    """Some heads for one target. Their shape is the target's; what they share with it comes by `Ends`."""

    kind: ClassVar[str]
    settings_type: ClassVar[type[HeadSettings]] = HeadSettings
    reads_text: ClassVar[bool] = False  # whether all of the text must be fed, not its end alone
    sequential: ClassVar[bool] = False  # whether a head must know what those before it guessed
    paired: ClassVar[bool] = False  # whether they say what a guess means for the next: `pairs`
    settings: HeadSettings

    def __init__(self, settings: HeadSettings, shape: BlockShape) -> None:
        super().__init__()
        self.settings = settings
        self.shape = shape

    @property
    def count(self) -> int:
        """How many heads there are."""
        return self.settings.count

    def copied(self, device: torch.device, dtype: torch.dtype) -> Heads:
        """A copy to draft with. These stay as they are: in float32 and in training, if that goes on."""
        copy = type(self)(self.settings, self.shape).to(device, dtype)
        copy.load_state_dict(self.state_dict())
        return copy.eval()

    @property
    def reads(self) -> tuple[int, ...]:
        """The layers behind which they read the target's states. Empty: the last alone."""
        return ()

    @property
    def ahead(self) -> tuple[int, ...]:
        """[count] how many places beyond the token that the target itself says at a position each head guesses."""
        return tuple(range(1, self.count + 1))

    def begin_from(self, norm: nn.Module, layers: list[nn.Module]) -> None:
        """Before training: take over what helps from the target's last norm and its last layers."""

    def fit(self, examples: Iterable[Example], ends: Ends) -> None:
        """Before training, with the heads at their place: compute what needs no training from some text."""

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, ends: Ends) -> torch.Tensor:
        """For training: [count, texts, length, width], what the output head reads, after each position of whole texts.

        `hidden` [texts, length, width] are the target's states after its last layer, or [layers, texts, length, width]
        those behind the layers of `reads`; `embedded` are the texts' tokens. What would need tokens beyond the end of a
        text means nothing.
        """
        raise NotImplementedError

    def logits(self, states: torch.Tensor, ends: Ends, first: int = 0) -> torch.Tensor:
        """States [heads, ..., width] of the heads from `first` on, to logits. By default through the target's head."""
        logits: torch.Tensor = ends.head(states)
        return logits

    def fixed(
        self, ends: Ends, pool: Pool, layer: int, rows: FixedRows, hidden: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """What a Follower does with new rows, unless they are sequential: feed them, and guess behind some.

        [count, len(last), vocabulary] behind the rows `last`. All tensors stay in place, so that a CUDA graph may be
        captured of it. `rows.tokens` are those after each row.
        """
        raise NotImplementedError

    def follow(self, ends: Ends, pool: Pool, layer: int) -> Follower:
        """Begin a text. Keys and values of the heads' own go into `pool`, as its layers from `layer` on."""
        raise NotImplementedError


class Follower:
    """Heads at work on one text."""

    def __init__(self, heads: Heads, ends: Ends) -> None:
        self.heads = heads
        self.ends = ends

    def feed(self, hidden: torch.Tensor, tokens: torch.Tensor, sequence: Sequence) -> None:
        """The target has computed positions that are new: its states there, and the token after each.

        They are the last of the sequence's computed positions.
        """
        raise NotImplementedError

    def guesses(self) -> torch.Tensor:
        """[count, vocabulary] the logits of all heads, unless they are sequential."""
        raise NotImplementedError

    def guess(self, paths: torch.Tensor) -> torch.Tensor:
        """[paths, vocabulary] the logits after guesses [paths, depth], if they are sequential."""
        raise NotImplementedError


def following(embedded: torch.Tensor, places: int) -> torch.Tensor:
    """For each position of texts [texts, length, width], what stands `places` later. Beyond the end, anything."""
    return embedded.roll(-places, 1)
