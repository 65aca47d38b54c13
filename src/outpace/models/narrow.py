"""Products of up to 128 rows, for GPUs: kernels that stream the weights.

cuBLAS splits products with few outputs into parts, and adds these up by a second kernel. Where rows are few, one
program for every 64 outputs is quicker: there is nothing to add up. Where they are more, on large GPUs that fetch tiles
by descriptors, programs share the inputs of an output too, as far as that keeps all multiprocessors busy.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .launching import SPARE, device_of, early, fetches_tiles

FEW_ROWS = 32
MOST_ROWS = 128  # beyond, cuBLAS is as quick or quicker
OUTPUTS = 64  # of one program; of some twice as many
BLOCK = 128  # inputs at a time; of those half as many
STAGES = 6  # blocks that are on their way or at work
SHARING_STAGES = 4  # the same, where two programs share a multiprocessor
INPUTS = 2048  # for each program at least, where several share them
BUSY = 2 / 3  # of the multiprocessors
PIECE = 1024  # of a row, where parts are added up


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
    """Whether the kernels take it: 16 bits on a GPU, whole blocks, places that 32 bits can count."""
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
    if 0 < count <= FEW_ROWS:
        return launch(states, weight, bias)
    if 0 < count <= MOST_ROWS and fetches_tiles(states.device):
        each, splits = shares(len(weight), weight.shape[1], device_of(states.device)[0])
        if splits:
            return launch_split(states, weight, bias, each, splits)
    return F.linear(states, weight, bias)


@narrow.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], len(weight))


def launch(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same by one kernel, for up to FEW_ROWS rows."""
    from . import kernels

    outputs, inputs = weight.shape
    count = states.numel() // inputs
    tile = 16 if count <= 16 else FEW_ROWS
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
        **early(states.device),
    )
    return product


def shares(outputs: int, inputs: int, processors: int) -> tuple[int, int]:
    """How many outputs a program has, and how many programs share their inputs: 0 where too few would be busy."""
    choices = [
        (each, min(processors * each // outputs, inputs // INPUTS))
        for each in (OUTPUTS, 2 * OUTPUTS)
        if outputs % each == 0
    ]
    each, splits = max(choices, key=lambda choice: outputs // choice[0] * choice[1])
    return each, splits if outputs // each * splits >= BUSY * processors else 0


def launch_split(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, each: int, splits: int
) -> torch.Tensor:
    """The same in parts, for up to MOST_ROWS rows: `splits` programs for every `each` outputs."""
    from triton import cdiv, next_power_of_2
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import kernels

    outputs, inputs = weight.shape
    rows = states.reshape(-1, inputs).contiguous()
    tile, block = max(16, next_power_of_2(len(rows))), BLOCK * OUTPUTS // each
    _, memory = device_of(states.device)
    fitting = (memory - SPARE) // ((each + tile) * block * states.element_size())
    product = states.new_empty(*states.shape[:-1], outputs)
    parts = product if splits == 1 else rows.new_empty(splits, len(rows), outputs, dtype=torch.float32)
    kernels.split_product[(outputs // each, splits)](
        TensorDescriptor.from_tensor(rows, [tile, block]),
        TensorDescriptor.from_tensor(weight, [each, block]),
        *(bias if splits == 1 else None, parts, weight, len(rows), inputs, outputs),
        cdiv(inputs // block, splits) * block,
        TILE=tile,
        OUTPUTS=each,
        BLOCK=block,
        num_warps=4,
        num_stages=max(1, min(fitting, STAGES)),
        **early(states.device),
    )
    if splits > 1:
        kernels.add_up[(len(rows), cdiv(outputs, PIECE))](
            *(parts, bias, product, len(rows), splits, outputs), PIECE=PIECE, **early(states.device)
        )
    return product
