"""Early-exit heads: heads at middle layers that predict the token that the last layer will choose.

Easy tokens are decided long before the last layer. An exit after layer l predicts the final logits from the hidden
state there, with a trained square matrix T and the target's own, frozen output head.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import InputError
from ..models.adapter import Ends
from .base import Example, Heads, HeadSettings
from .blocks import BlockShape

NORMS = ("first", "last")
ORIGINAL = "original"
OUTPUTS = ("trained", "full", ORIGINAL)
# Bin edges of confidence. Most predictions have a confidence near 1, where small differences matter.
BORDERS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
BINS = len(BORDERS) + 1
EARLY = (1, 2, 3)  # layers that have an exit by default too: their draft tokens cost little
RIDGE = 1e-3  # relative to the inputs' mean square: how strongly a fitted T is regularized towards the identity


def bin_of(confidence: float) -> int:
    """The bin of a confidence.

    >>> bin_of(0.05), bin_of(0.1), bin_of(1.0)
    (0, 1, 14)
    """
    return bisect_right(BORDERS, confidence)


@dataclass(frozen=True)
class ExitSettings(HeadSettings):
    """Positions and form of exits.

    layers: the layers that have an exit, like "8,16,24". By default the first three, and `count` at equal distances.
    norm: "first" is head(T norm(h)), "last" is head(norm(T h)).
    output: "trained" is T and the target's output head; "full" a trained output matrix instead of both; "original" the
        target's norm and output head, untrained.
    frequent: an exit computes logits of only the most frequent tokens, this many; 0: all. Cheaper with a large
        vocabulary.
    """

    count: int = 7
    layers: Any = ()
    norm: str = "first"
    output: str = "trained"
    frequent: int = 0
    vocabulary: int = 0  # with "full": rows of that matrix

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", read_layers(self.layers))
        if self.layers:
            object.__setattr__(self, "count", len(self.layers))
        for name, known in (("norm", NORMS), ("output", OUTPUTS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)!r} must be {' or '.join(map(repr, known))}.")
        if self.frequent < 0 or 0 < self.vocabulary < self.frequent:
            raise InputError(f"frequent={self.frequent} must be 0 (all) to the size of the vocabulary.")

    def for_model(self, layers: int, vocabulary: int) -> ExitSettings:
        found = self.layers or tuple(sorted({*EARLY[: layers - 1], *spread(self.count, layers)}))
        check_layers(found, layers)
        if self.output == ORIGINAL:
            raise InputError("output='original' has nothing to train. Use it untrained, as heads='original'.")
        return replace(self, layers=found, vocabulary=vocabulary)


def read_layers(layers: Any) -> tuple[int, ...]:
    """Layers from a list, or from a string like "8,16,24". They must be increasing."""
    try:
        found = json.loads(f"[{layers.strip('[]() ')}]") if isinstance(layers, str) else list(layers)
    except (TypeError, ValueError):
        found = [None]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in found):
        raise InputError(f"exits at {layers!r}: give layer numbers, like 8,16,24.")
    if found != sorted(set(found)) or any(layer < 1 for layer in found):
        raise InputError(f"exits at {layers!r}: layers must be 1 or more, in increasing order, without repeats.")
    return tuple(found)


def check_layers(layers: Iterable[int], depth: int) -> None:
    """Raise InputError for exits that a model of this depth cannot have."""
    for layer in layers:
        if layer >= depth:
            raise InputError(f"an exit after layer {layer}: the model has {depth}, so the last exit is at {depth - 1}.")


def spread(count: int, depth: int) -> tuple[int, ...]:
    """`count` layers at equal distances, as far as the depth allows.

    >>> spread(3, 32), spread(7, 4)
    ((8, 16, 24), (1, 2, 3))
    """
    return tuple(sorted({max(1, depth * place // (count + 1)) for place in range(1, count + 1)} - {depth}))


class ExitHeads(Heads):
    """maps: the T of each exit. outputs: the output matrix of each, if it has one. ids: the frequent tokens."""

    kind = "exits"
    settings_type = ExitSettings
    settings: ExitSettings

    def __init__(self, settings: ExitSettings, shape: BlockShape) -> None:
        super().__init__(settings, shape)
        width, count = shape.width, settings.count
        maps = count if settings.output == "trained" else 0
        outputs = count if settings.output == "full" else 0
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(maps))
        self.outputs = nn.ModuleList(nn.Linear(width, settings.vocabulary, bias=False) for _ in range(outputs))
        for weight in self.maps.parameters():
            nn.init.eye_(weight)
        self.ids: torch.Tensor
        if settings.frequent:
            self.register_buffer("ids", torch.arange(settings.frequent))
        self._few: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have an exit."""
        found: tuple[int, ...] = self.settings.layers
        return found

    def owner(self, layer: int) -> Hashable:
        """Identifies the exit after a layer. All untrained exits there are the same one."""
        return (ORIGINAL if self.settings.output == ORIGINAL else self, layer)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.layers

    @property
    def ahead(self) -> tuple[int, ...]:
        return (0,) * self.count

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, ends: Ends) -> torch.Tensor:
        return torch.stack([self.read(place, each, ends) for place, each in enumerate(hidden)])

    def read(self, place: int, hidden: torch.Tensor, ends: Ends) -> torch.Tensor:
        """The output head's inputs at one exit, from the hidden states there [..., width]."""
        if not self.maps:
            found: torch.Tensor = ends.norm(hidden)
        elif self.settings.norm == "first":
            found = self.maps[place](ends.norm(hidden))
        else:
            found = ends.norm(self.maps[place](hidden))
        return found

    def logits(self, states: torch.Tensor, ends: Ends, first: int = 0) -> torch.Tensor:
        if not self.outputs:
            return super().logits(states, ends, first)
        outputs = list(self.outputs)[first : first + len(states)]
        return torch.stack([output(state) for output, state in zip(outputs, states, strict=True)])

    def probe(self, place: int, hidden: torch.Tensor, ends: Ends) -> torch.Tensor:
        """[rows, vocabulary] the logits of one exit for rows [rows, width]; -inf for tokens that it leaves out."""
        states = self.read(place, hidden, ends)
        if not self.settings.frequent:
            return self.logits(states[None], ends, place)[0]
        compared = F.linear(states, *self._few_of(place, ends))
        every = compared.new_full((len(states), self.settings.vocabulary or ends.head.weight.shape[0]), -torch.inf)
        every[:, self.ids] = compared
        return every

    def _few_of(self, place: int, ends: Ends) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of an exit's output matrix and bias for the frequent tokens. They are copied once."""
        whole: Any = self.outputs[place] if self.outputs else ends.head
        owner = place if self.outputs else 0
        if owner not in self._few or self.training:
            bias = getattr(whole, "bias", None)
            self._few[owner] = whole.weight.detach()[self.ids], None if bias is None else bias.detach()[self.ids]
        return self._few[owner]

    @torch.no_grad()
    def fit(self, examples: Iterable[Example], ends: Ends) -> None:
        """Ridge regression: the T that best maps hidden states at an exit to final ones.

        Both are scaled first: by the target's norm or, if that comes last, by the size of the final state.
        """
        width = self.shape.width
        device = ends.head.weight.device
        squares, products = (
            torch.zeros(self.count, width, width, dtype=torch.float64, device=device) for _ in range(2)
        )
        often = torch.zeros(ends.head.weight.shape[0], dtype=torch.long, device=device)
        for tokens, read, final in examples:
            often += torch.bincount(tokens.flatten(), minlength=len(often))
            for place, hidden in enumerate(read):
                given, wanted = self._pair(hidden, final, ends)
                squares[place] += given.T @ given
                products[place] += given.T @ wanted
        if self.settings.frequent:
            self.ids = often.argsort(descending=True, stable=True)[: self.settings.frequent]
            self._few.clear()
        hold = RIDGE * squares.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(width).to(squares)
        hold += torch.eye(width).to(squares) * (hold == 0).all()  # without examples T stays the identity
        fitted = torch.linalg.solve(squares + hold, products + hold).transpose(1, 2).float()
        for weight, matrix in zip(self.parameters(), fitted, strict=True):  # one matrix per exit
            weight.copy_(matrix if self.maps else ends.head.weight.float() @ matrix)

    def _pair(self, hidden: torch.Tensor, final: torch.Tensor, ends: Ends) -> tuple[torch.Tensor, torch.Tensor]:
        if self.settings.norm == "first" or not self.maps:
            return ends.norm(hidden).float(), ends.norm(final).float()
        size = final.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        return hidden.float() / size, final.float() / size


def original_exits(layers: tuple[int, ...], width: int) -> ExitHeads:
    """Untrained exits."""
    shape = BlockShape(width, heads=1, key_heads=1, head_size=width, inner=width)
    return ExitHeads(ExitSettings(layers=layers, output=ORIGINAL), shape)
