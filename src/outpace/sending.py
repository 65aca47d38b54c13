"""Asynchronous copies of numbers from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def send(
    numbers: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """The numbers as a tensor on the device."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to the device."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def put(numbers: Any, place: torch.Tensor) -> None:
    """Write numbers to the start of a tensor on the device."""
    here = torch.tensor(numbers, dtype=place.dtype, pin_memory=place.is_cuda)
    place[: len(here)].copy_(here, non_blocking=True)
