"""How our Triton kernels are launched: what a GPU has for them, and what it starts early.

Recent GPUs start a kernel while the one before still runs, if both are made for it. Then most of what a kernel does
before its first sums costs no time of its own, and memory is not idle between two: a product has the first of its
weights brought to the cache before it waits for what it multiplies.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

RECENT = 9  # compute capability of GPUs that know descriptors of tiles and start kernels early: H100 and later
SPARE = 4096  # bytes of shared memory that are left for other things
ENOUGH = 200_000  # bytes of it: with less there are too few tiles on their way at a time
LINES = 2  # of 128 bytes, that are brought to the cache of each output's weights


def early(device: torch.device) -> dict[str, int]:
    """Options of a launch: the kernel starts early, if the device can."""
    return {"EARLY": LINES, "launch_pdl": True} if is_recent(device) else {"EARLY": 0}


def is_recent(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= RECENT


def fetches_tiles(device: torch.device) -> bool:
    """Whether kernels that fetch tiles by descriptors are for it."""
    return is_recent(device) and device_of(device)[1] >= ENOUGH


@functools.cache
def device_of(device: torch.device) -> tuple[int, int]:
    """Its multiprocessors, and the shared memory in bytes that one program may have."""
    if device.type != "cuda":
        return 132, 1 << 18  # for the interpreter: as an H200
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
