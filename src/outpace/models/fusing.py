"""Joined weights: products that read the same input (q, k and v; gate and up) are computed as one.

One large product reads memory faster than three small ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Fusion:
    """What is joined in one mirror."""

    def __init__(self) -> None:
        self._done: list[tuple[nn.Module, str, nn.Linear]] = []  # owner, name, what was there

    def fuse(self, mirror: nn.Module) -> int:
        """Join wherever a module has all of a group; says how many products that saves."""
        for owner in list(mirror.modules()):
            for group in GROUPS:
                parts = [owner._modules.get(name) for name in group]
                if _alike(parts):
                    self._join(owner, group, parts)
        return len(self._done) - len({id(owner) for owner, _, _ in self._done})

    def _join(self, owner: nn.Module, names: tuple[str, ...], parts: list[Any]) -> None:
        joined = _Joined(parts)
        start = 0
        for name, part in zip(names, parts, strict=True):
            stop = start + part.out_features
            part.weight.data = joined.weight[start:stop]  # the user's weight: the same values, in another place
            if joined.bias is not None:
                part.bias.data = joined.bias[start:stop]
            owner._modules[name] = _Part(joined, start, stop, last=name == names[-1])
            self._done.append((owner, name, part))
            start = stop

    def undo(self) -> None:
        """Put every module back, with weights of its own."""
        for owner, name, part in self._done:
            for parameter in part.parameters():
                parameter.data = parameter.data.clone()
            owner._modules[name] = part
        self._done.clear()


class _Joined(nn.Module):
    """One product for several. Remembers the last, because its parts are asked for one after another."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.cat([part.weight.data for part in parts]))
        biases = [part.bias.data for part in parts if part.bias is not None]
        self.register_buffer("bias", torch.cat(biases) if biases else None)
        self.memory = _Memory()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        memory = self.memory
        product = memory.product
        if memory.states is not states or product is None:
            product = F.linear(states, self.weight, self.bias)
            memory.states, memory.product = states, product
        return product


class _Memory:
    states: torch.Tensor | None = None
    product: torch.Tensor | None = None


class _Part(nn.Module):
    """Some of the outputs of a joined product, where a Linear was."""

    def __init__(self, joined: _Joined, start: int, stop: int, last: bool) -> None:
        super().__init__()
        self.joined = joined
        self.start = start
        self.stop = stop
        self.last = last

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.joined(states)[..., self.start : self.stop]
        if self.last:
            self.joined.memory.states = self.joined.memory.product = None
        return part


def _alike(parts: list[Any]) -> bool:
    """Whether these are plain linear maps of the same input, in the same type and place."""
    return all(type(part) is nn.Linear for part in parts) and (
        len({(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in parts}) == 1
    )
