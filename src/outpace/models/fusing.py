"""Fused projections: linear layers with the same input (q, k and v; gate and up) are computed as one product.

One large product reads memory faster than three small ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Fusion:
    """The fused projections of one mirror."""

    def __init__(self) -> None:
        self._done: list[tuple[nn.Module, str, nn.Linear]] = []  # owner, name, what was there

    def fuse(self, mirror: nn.Module) -> int:
        """Fuse in every module that has all of a group; returns how many products that saves."""
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
            part.weight.data = joined.whole.weight[start:stop]  # the user's weight: same values, as a view
            if part.bias is not None:
                part.bias.data = joined.whole.bias[start:stop]
            owner._modules[name] = Part(joined, start, stop, last=name == names[-1])
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
    """One product for several projections. It keeps the last result, because projections are computed one by one."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        outputs = sum(part.out_features for part in parts)
        self.whole = nn.Linear(parts[0].in_features, outputs, bias=parts[0].bias is not None, device="meta")
        for name in list(self.whole._parameters):
            if getattr(self.whole, name) is not None:
                joined = torch.cat([getattr(part, name).data for part in parts])
                setattr(self.whole, name, nn.Parameter(joined, requires_grad=False))
        self.memory = _Memory()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        memory = self.memory
        product = memory.product
        if memory.states is not states or product is None:
            product = self.whole(states)
            memory.states, memory.product = states, product
        return product


class _Memory:
    states: torch.Tensor | None = None
    product: torch.Tensor | None = None


class Part(nn.Module):
    """Takes the place of a Linear, and returns its slice of the fused product."""

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
    """Whether these are plain linear layers with the same input size, dtype and device."""
    return all(type(part) is nn.Linear and is_plain(*part.parameters()) for part in parts) and (
        len({(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in parts}) == 1
    )


def is_plain(*weights: torch.Tensor) -> bool:
    """Whether weights are plain tensors. Those of quantization libraries are not: they have types of their own."""
    return all(type(weight) in (nn.Parameter, torch.Tensor) for weight in weights)
