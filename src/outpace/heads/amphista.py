"""Amphista: heads that attend to each other, fed by layers that adapt the target's states in two stages.

h      the target's hidden state at t, after its last layer, scaled to unit size
e      the token at t + 1, embedded
h¹ = A₁(h, e), h² = A₂(h¹, e)     adaptation: a causal block each, over all positions of the sequence
heads                             the first half reads h¹, the second half h²
auto-embedding                    one bidirectional block over the heads' outputs, with learned positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import InputError
from ..models.adapter import Ends, FixedRows
from ..models.attention import attend_by_mask, without_cudnn
from ..pool import Pool, Sequence
from ..sending import send
from .base import Follower, Heads, HeadSettings, begin_norm, following
from .blocks import Angles, Block, BlockShape, Memory, rotary


@dataclass(frozen=True)
class AmphistaSettings(HeadSettings):
    """The ablations: stages of adaptation (2, 1, or 0: none), the auto-embedding block, its positions."""

    stages: int = 2
    auto_embedding: bool = True
    positions: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.stages <= 2:
            raise InputError(f"stages={self.stages} is out of range: it must be 0, 1 or 2.")


class AmphistaHeads(Heads):
    """Adaptation, heads, auto-embedding, a norm, then the target's output head."""

    kind = "amphista"
    reads_text = True
    settings_type = AmphistaSettings
    settings: AmphistaSettings

    def __init__(self, settings: AmphistaSettings, shape: BlockShape) -> None:
        super().__init__(settings, shape)
        self.stages = nn.ModuleList(_Stage(shape) for _ in range(settings.stages))
        self.heads = nn.ModuleList(_Head(shape) for _ in range(settings.count))
        self.positions = nn.Parameter(torch.zeros(settings.count, shape.width)) if settings.positions else None
        self.encoder = Block(shape) if settings.auto_embedding else None
        self.norm = nn.RMSNorm(shape.width, eps=shape.eps)

    def begin_from(self, ends: Ends, layers: list[nn.Module]) -> None:
        begin_norm(self.norm, ends)
        for stage, layer in zip(self.stages, layers[-len(self.stages) or len(layers) :], strict=False):
            _take_over(stage.block, layer)  # type: ignore[arg-type]
        for block in (*(stage.block for stage in self.stages), self.encoder):
            if isinstance(block, Block):
                block.silence()

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, ends: Ends) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        adapted = self.adapt(hidden, following(embedded, 1), positions)
        return self.read(adapted)

    def adapt(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        memories: list[Memory] | None = None,
    ) -> list[torch.Tensor]:
        """The target's hidden states and those after each stage, all [..., length, width].

        A target's states may be so large that adding anything of ordinary size has no effect. The final norm removes
        their scale anyway, so it is removed first.
        """
        adapted = [F.rms_norm(hidden, hidden.shape[-1:], eps=self.shape.eps)]
        angles = rotary(positions, self.shape, hidden.dtype)
        for number, stage in enumerate(self.stages):
            adapted.append(stage(adapted[-1], tokens, angles, memories[number] if memories else None))
        return adapted

    def read(self, adapted: list[torch.Tensor]) -> torch.Tensor:
        """[count, ..., width] the inputs of the output head."""
        last = len(adapted) - 1
        half = (self.count + 1) // 2
        early = min(1, last)
        outputs = torch.stack(
            [head(adapted[early if number < half else last]) for number, head in enumerate(self.heads)], -2
        )
        if self.encoder is not None:
            if self.positions is not None:
                outputs = outputs + self.positions
            outputs = self.encoder(outputs)
        states: torch.Tensor = self.norm(outputs)
        return states.movedim(-2, 0)

    def fixed(
        self, ends: Ends, pool: Pool, layer: int, rows: FixedRows, hidden: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        memories = [_Listed(pool, layer + number, rows) for number in range(self.settings.stages)]
        tokens = ends.embed(rows.tokens)
        adapted = self.adapt(hidden[None], tokens[None], rows.positions, [*memories])
        return self.logits(self.read([states[0].index_select(0, last) for states in adapted]), ends)

    def follow(self, ends: Ends, pool: Pool, layer: int) -> Follower:
        return _Follower(self, ends, pool, layer)


class _Stage(nn.Module):
    """One stage of adaptation. Before training it is a block on the states alone, without the token."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.from_state = nn.Linear(shape.width, shape.width, bias=False)
        self.from_token = nn.Linear(shape.width, shape.width, bias=False)
        self.block = Block(shape)
        nn.init.eye_(self.from_state.weight)
        nn.init.zeros_(self.from_token.weight)

    def forward(
        self, states: torch.Tensor, tokens: torch.Tensor, angles: Angles, memory: Memory | None
    ) -> torch.Tensor:
        mixed = self.from_state(states) + self.from_token(self.token_norm(tokens))
        adapted: torch.Tensor = self.block(mixed, angles, memory)
        return adapted


class _Head(nn.Module):
    """x + SiLU(W norm(x) + b), with W initialized to zero."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.linear = nn.Linear(shape.width, shape.width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + F.silu(self.linear(self.norm(states)))


class _Follower(Follower):
    heads: AmphistaHeads

    def __init__(self, heads: AmphistaHeads, ends: Ends, pool: Pool, layer: int) -> None:
        super().__init__(heads, ends)
        self.device = pool.device
        self.memories = [_Slots(pool, layer + number) for number in range(heads.settings.stages)]

    def feed(self, hidden: torch.Tensor, tokens: torch.Tensor, sequence: Sequence) -> None:
        slots = send(sequence.slots, self.device)
        positions = torch.arange(len(slots) - len(hidden), len(slots), device=self.device)
        for memory in self.memories:
            memory.slots = slots
        self.adapted = self.heads.adapt(hidden[None], self.ends.embed(tokens)[None], positions, [*self.memories])

    def guesses(self) -> torch.Tensor:
        states = self.heads.read([states[:, -1] for states in self.adapted])
        return self.heads.logits(states, self.ends)[:, 0]


class _Slots(Memory):
    """Keys and values of one stage, in the sequence's slots of the pool."""

    def __init__(self, pool: Pool, layer: int) -> None:
        self.pool = pool
        self.layer = layer
        self.slots: torch.Tensor

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        stored = self.pool.stored(self.layer) or self.pool.store(self.layer, keys, values)
        new, seen = keys.shape[2], len(self.slots)
        for place, states in zip(stored, (keys, values), strict=True):
            place.index_copy_(2, self.slots[-new:], states)
        sees = torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
        keys, values = (part[:, :, self.slots] for part in stored)
        with without_cudnn():  # the number of keys changes every time
            return attend_by_mask(query, keys, values, sees).transpose(1, 2)


class _Listed(Memory):
    """The same for rows in static buffers, by slot lists."""

    def __init__(self, pool: Pool, layer: int, rows: FixedRows) -> None:
        self.pool, self.layer, self.rows = pool, layer, rows

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        stored = self.pool.stored(self.layer) or self.pool.store(self.layer, keys, values)
        for place, states in zip(stored, (keys, values), strict=True):
            place.index_copy_(2, self.rows.slots, states)
        mixed: torch.Tensor = torch.ops.outpace.slot_attention(
            query, *stored, *self.rows.lists, query.shape[-1] ** -0.5, 0.0
        )
        return mixed


def _take_over(mine: nn.Module, theirs: nn.Module) -> None:
    """Copy all weights if their names and shapes are the same; otherwise leave `mine` as it is."""
    weights = theirs.state_dict()
    if {name: weight.shape for name, weight in weights.items()} == {
        name: weight.shape for name, weight in mine.state_dict().items()
    }:
        mine.load_state_dict(weights)
