"""Draft heads: small trained modules that predict the next tokens from the target's hidden states.

Position t is the last that the target has computed, so the token at t + 1 is known. Head k (from 0) predicts the token
at t + 2 + k. Training uses every position of a sequence as t at once. Exits predict the token at t + 1, before the
target's last layers have computed position t.
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

CALM = 1.5  # the most standard deviation of a random state's logits before training
RANDOM = 64  # random states that it is measured on


@dataclass(frozen=True)
class HeadSettings:
    """Settings of every kind of heads. Kinds add their own."""

    count: int = 4  # how many tokens they predict

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
        """The same, with defaults that depend on the target's sizes filled in."""
        return self


class Example(NamedTuple):
    """Some positions that the target has computed."""

    tokens: torch.Tensor  # [positions]
    read: torch.Tensor  # [layers, positions, width] hidden states after the layers that the heads read
    final: torch.Tensor  # [positions, width] hidden states after the last layer


class Heads(nn.Module):
    """Heads for one target. Their shape is the target's; the modules that they share with it are passed as `Ends`."""

    kind: ClassVar[str]
    settings_type: ClassVar[type[HeadSettings]] = HeadSettings
    reads_text: ClassVar[bool] = False  # whether they need the whole sequence, not only its end
    sequential: ClassVar[bool] = False  # whether a head reads the draft tokens before it
    paired: ClassVar[bool] = False  # whether they condition each draft token on the one before: `pairs`
    settings: HeadSettings

    def __init__(self, settings: HeadSettings, shape: BlockShape) -> None:
        super().__init__()
        self.settings = settings
        self.shape = shape

    @property
    def count(self) -> int:
        """The number of heads."""
        return self.settings.count

    def copied(self, device: torch.device, dtype: torch.dtype) -> Heads:
        """A copy to draft with. The originals stay unchanged, for training."""
        copy = type(self)(self.settings, self.shape).to(device, dtype)
        copy.load_state_dict(self.state_dict())
        return copy.eval()

    @property
    def reads(self) -> tuple[int, ...]:
        """The layers after which they read the target's hidden states. Empty: only the last."""
        return ()

    @property
    def ahead(self) -> tuple[int, ...]:
        """[count] how many positions each head predicts beyond the target's own next token."""
        return tuple(range(1, self.count + 1))

    def begin_from(self, ends: Ends, layers: list[nn.Module]) -> None:
        """Before training: initialize from the target's ends and last layers."""

    def fit(self, examples: Iterable[Example], ends: Ends) -> None:
        """Before training, on the training device: compute what has a closed-form solution from examples."""

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, ends: Ends) -> torch.Tensor:
        """For training: [count, texts, length, width], the output head's inputs at each position of whole sequences.

        `hidden` [texts, length, width] are the target's hidden states after its last layer, or [layers, texts, length,
        width] those after the layers of `reads`; `embedded` are the sequences' embedded tokens. Values that would need
        tokens beyond a sequence's end are meaningless.
        """
        raise NotImplementedError

    def logits(self, states: torch.Tensor, ends: Ends, first: int = 0) -> torch.Tensor:
        """From states [heads, ..., width] of the heads from `first` on to logits, by default with the target's head."""
        logits: torch.Tensor = ends.head(states)
        return logits

    def fixed(
        self, ends: Ends, pool: Pool, layer: int, rows: FixedRows, hidden: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """What a Follower does with new rows, in static buffers, so that a CUDA graph can be captured.

        Returns logits [count, len(last), vocabulary] after the rows `last`. `rows.tokens` are the tokens after each
        row. Not for sequential heads.
        """
        raise NotImplementedError

    def follow(self, ends: Ends, pool: Pool, layer: int) -> Follower:
        """Start a sequence. The heads' own keys and values are stored in `pool`, as its layers from `layer` on."""
        raise NotImplementedError


class Follower:
    """The heads' state for one sequence."""

    def __init__(self, heads: Heads, ends: Ends) -> None:
        self.heads = heads
        self.ends = ends

    def feed(self, hidden: torch.Tensor, tokens: torch.Tensor, sequence: Sequence) -> None:
        """Feed the target's hidden states at new positions, and the token after each.

        They are the last of the sequence's computed positions.
        """
        raise NotImplementedError

    def guesses(self) -> torch.Tensor:
        """[count, vocabulary] the logits of all heads, unless they are sequential."""
        raise NotImplementedError

    def guess(self, paths: torch.Tensor) -> torch.Tensor:
        """[paths, vocabulary] the logits after draft tokens [paths, depth], if they are sequential."""
        raise NotImplementedError


def following(embedded: torch.Tensor, places: int) -> torch.Tensor:
    """For each position of sequences [texts, length, width], the entry `places` later. Beyond the end, arbitrary."""
    return embedded.roll(-places, 1)


@torch.no_grad()
def begin_norm(norm: nn.RMSNorm, ends: Ends) -> None:
    """Before training: initialize a last norm like the target's, but such that random states have calm logits.

    Some targets scale their final states so much (Gemma 3 by 54) that every wrong state is a very certain one, and most
    of a short training would go into unlearning that.
    """
    like = next(ends.norm.parameters(), ends.head.weight)
    signs = torch.ones(len(norm.weight), dtype=like.dtype, device=like.device)
    signs[1::2] = -1  # without a mean, for norms that subtract it; without their bias:
    scale = (ends.norm(signs) - ends.norm(-signs)).float() / 2 * signs.float()
    chance = torch.Generator().manual_seed(0)
    states = torch.randn(RANDOM, len(scale), generator=chance).to(scale.device) * scale
    spread = ends.head(states.to(like.dtype)).float().std(-1).mean()
    norm.weight.copy_(scale * (CALM / spread.clamp(min=1e-9)).clamp(max=1.0))
