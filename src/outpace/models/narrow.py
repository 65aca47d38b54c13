"""Products of a few rows, for GPUs: one kernel that streams the weights.

cuBLAS splits products with few outputs into parts, and adds these up by a second kernel. With one program for every 64
outputs there is nothing to add up.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .attention import SPARE, device_of

MOST_ROWS = 32  # beyond, cuBLAS is as quick or quicker
OUTPUTS = 64  # of one program
BLOCK = 128  # inputs at a time
STAGES = 6  # blocks that are on their way or at work
SHARING_STAGES = 4  # the same, where two programs share a multiprocessor


class NarrowLinear(nn.Module):
    """Stands where a Linear was, with its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.outpace.narrow(states, self.weight, self.bias)
        return product


def fits(linear: nn.Linear) -> bool:
    """Whether the kernel takes it: 16 bits on a GPU, whole blocks, places that 32 bits can count."""
    weight = linear.weight
    return (
        weight.device.type == "cuda"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and linear.out_features % OUTPUTS == 0
        and linear.in_features % BLOCK == 0
        and weight.numel() < 2**31
    )


@torch.library.custom_op("outpace::narrow", mutates_args=())
def narrow(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., outputs]: states [..., inputs] times weight [outputs, inputs], plus bias."""
    count = states.numel() // states.shape[-1]
    return launch(states, weight, bias) if 0 < count <= MOST_ROWS else F.linear(states, weight, bias)


@narrow.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], len(weight))


def launch(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same by the kernel, for up to MOST_ROWS rows."""
    from . import kernels

    outputs, inputs = weight.shape
    count = states.numel() // inputs
    tile = 16 if count <= 16 else MOST_ROWS
    processors, memory = device_of(states.device)
    programs = outputs // OUTPUTS
    fitting = (memory - SPARE) // ((OUTPUTS + tile) * BLOCK * states.element_size())
    product = states.new_empty(*states.shape[:-1], outputs)
    kernels.product[(programs,)](
        *(states.contiguous(), weight, bias, product, count, inputs, outputs),
        TILE=tile,
        OUTPUTS=OUTPUTS,
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=max(1, min(fitting, STAGES if programs <= processors else SHARING_STAGES)),
    )
    return product
