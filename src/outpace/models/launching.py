"""Launch options of our Triton kernels: a GPU's resources, and programmatic dependent launch.

Recent GPUs can start a kernel while the one before still runs, if both support it. This hides most of a kernel's
prologue and keeps memory busy between kernels: a product prefetches its first weights before it waits for its input.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

RECENT = 9  # compute capability with tensor descriptors (TMA) and dependent launch: H100 and later
SPARE = 4096  # bytes of shared memory reserved for other uses
ENOUGH = 200_000  # bytes of shared memory: with less, too few tiles are in flight
LINES = 2  # cache lines of 128 bytes to prefetch of each output's weights


def early(device: torch.device) -> dict[str, int]:
    """Launch options for dependent launch, if the device supports it."""
    return {"EARLY": LINES, "launch_pdl": True} if is_recent(device) else {"EARLY": 0}


def is_recent(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= RECENT


def fetches_tiles(device: torch.device) -> bool:
    """Whether the device runs our kernels that use tensor descriptors."""
    return is_recent(device) and device_of(device)[1] >= ENOUGH


@functools.cache
def device_of(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors, and the most shared memory of one program in bytes."""
    if device.type != "cuda":
        return 132, 1 << 18  # for the interpreter: those of an H200
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
