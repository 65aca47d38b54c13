"""Building blocks of heads: a residual layer, and one transformer block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class ResBlock(nn.Module):
    """x + SiLU(W x + b), with W initialized to zero: it starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + F.silu(self.linear(states))


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a block: those of the target's own layers."""

    width: int
    heads: int
    key_heads: int
    head_size: int
    inner: int  # of the feed-forward part
    theta: float = 10000.0  # of the rotary embedding
    eps: float = 1e-5


class Block(nn.Module):
    """Attention and a gated feed-forward, each after a norm. Parameters have Llama's names, so layers can be copied."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.mlp = FeedForward(shape)

    def silence(self) -> None:
        """Before training: initialize the block so that it adds nothing."""
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(
        self,
        states: torch.Tensor,  # [..., length, width]
        angles: Angles | None = None,  # of [length] positions: causal, with rotary embedding; None: bidirectional
        memory: Memory | None = None,
    ) -> torch.Tensor:
        states = states + self.self_attn(self.input_layernorm(states), angles, memory)
        found: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


class Memory:
    """How new positions attend to earlier ones. In this base class there are none: all positions are new."""

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[..., new, heads, size] from queries, keys and values of new positions [..., heads, new, size]."""
        grouped = query.shape[-3] != keys.shape[-3]
        mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=grouped)
        return mixed.transpose(-2, -3)


class Attention(nn.Module):
    """Self-attention with grouped-query heads."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.size = shape.head_size
        self.grouped = shape.heads != shape.key_heads
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.key_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.key_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.width, bias=False)

    def forward(self, states: torch.Tensor, angles: Angles | None, memory: Memory | None) -> torch.Tensor:
        query, key, value = (
            part(states).unflatten(-1, (-1, self.size)).transpose(-2, -3)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if angles is None:
            mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=self.grouped).transpose(-2, -3)
        else:
            mixed = (memory or Memory()).attend(turn(query, angles), turn(key, angles), value)
        joined: torch.Tensor = self.o_proj(mixed.flatten(-2))
        return joined


class FeedForward(nn.Module):
    """down(SiLU(gate x) * up x)"""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))
        return mixed


class Angles(NamedTuple):
    """The cosines and sines of the rotary embedding, both [length, size]."""

    cos: torch.Tensor
    sin: torch.Tensor  # negated in the first half


def rotary(positions: torch.Tensor, shape: BlockShape, dtype: torch.dtype) -> Angles:
    """The angles of [length] positions, for blocks of this shape."""
    powers = torch.arange(0, shape.head_size, 2, device=positions.device, dtype=torch.float32) / shape.head_size
    angles = positions[:, None].float() * shape.theta**-powers
    cos, sin = angles.cos(), angles.sin()
    return Angles(torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype))


def turn(states: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Apply the rotary embedding to queries or keys [..., size]."""
    left, right = states.chunk(2, -1)
    return (states * angles.cos + torch.cat([right, left], -1) * angles.sin).to(states.dtype)
