"""Linear layers on GPUs for few rows: kernels that stream the weights.

cuBLAS splits the inputs of products with few outputs, and sums the parts in a second kernel (split-K). For few rows,
one program per 64 outputs is faster, since there is nothing to sum. For more rows, on GPUs with tensor descriptors,
programs share the inputs of an output too, as far as that keeps all multiprocessors busy.

A row has the same bits in any batch that these kernels compute: an output is always the sum of the same parts of the
inputs (`parts_of`), each summed in the same order, whether a program computes all parts or only one, and whatever its
numbers of rows and outputs. Beyond 128 rows cuBLAS is as fast or faster, and is used unless `always` is set.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .launching import SPARE, device_of, early, fetches_tiles

FEW_ROWS = 32
MOST_ROWS = 128  # per program; beyond, cuBLAS is as fast or faster
OUTPUTS = 64  # per program; some have WIDE
BLOCK = 128  # inputs at a time; half as many with WIDE outputs, or if there are no whole blocks
STAGES = 6  # pipeline stages
SHARING_STAGES = 4  # the same, if two programs share a multiprocessor
INPUTS = 1536  # the least per program, if several share an output
SHARED = 2048  # with fewer, cuBLAS is as fast or faster
BUSY = 2 / 3  # the least share of busy multiprocessors
PROCESSORS = 132  # multiprocessors that the parts are chosen for: bits depend on this and on INPUTS
WIDE = 128  # outputs per program, if there are many outputs or rows
PIECE = 1024  # values per program that sums parts


class NarrowLinear(nn.Module):
    """Takes the place of a Linear, with its weights."""

    def __init__(self, linear: nn.Linear, always: bool = False) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.always = always

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.outpace.narrow(states, self.weight, self.bias, self.always)
        return product


def fits(linear: nn.Linear, always: bool = False) -> bool:
    """Whether the kernels support it: 16 bits on a GPU, sizes in whole blocks, offsets within 32 bits.

    `always`: half blocks of inputs too, where cuBLAS may be faster.
    """
    weight = linear.weight
    return (
        weight.device.type == "cuda"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and linear.out_features % OUTPUTS == 0
        and linear.in_features % (BLOCK // 2 if always else BLOCK) == 0
        and weight.numel() < 2**31
    )


@torch.library.custom_op("outpace::narrow", mutates_args=())
def narrow(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, always: bool) -> torch.Tensor:
    """[..., outputs]: states [..., inputs] times weight [outputs, inputs], plus bias."""
    count = states.numel() // states.shape[-1]
    if 0 < count <= FEW_ROWS:
        return launch(states, weight, bias)
    if count and fetches_tiles(states.device):
        parts = parts_of(len(weight), weight.shape[1], device_of(states.device)[0])[1]
        busy = parts == 1 or (parts > 1 and weight.shape[1] // parts >= SHARED)
        if always or (busy and count <= MOST_ROWS):
            return launch_tiles(states, weight, bias)
    return F.linear(states, weight, bias)


@narrow.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, always: bool) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], len(weight))


def parts_of(outputs: int, inputs: int, processors: int = PROCESSORS) -> tuple[int, int]:
    """The outputs per program of up to MOST_ROWS rows, and how many programs share their inputs.

    0 if too few multiprocessors would be busy.
    """
    choices = [
        (each, min(processors * each // outputs, inputs // INPUTS))
        for each in (OUTPUTS, 2 * OUTPUTS)
        if outputs % each == 0
    ]
    each, parts = max(choices, key=lambda choice: outputs // choice[0] * choice[1])
    return each, parts if outputs // each * parts >= BUSY * processors else 0


def walk_of(outputs: int, inputs: int) -> int:
    """The inputs of one part, for any number of rows and on any device."""
    _, parts = parts_of(outputs, inputs)
    return -(-inputs // BLOCK // max(parts, 1)) * BLOCK


def launch(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same with one kernel, for up to FEW_ROWS rows."""
    from . import kernels

    outputs, inputs = weight.shape
    count = states.numel() // inputs
    tile = 16 if count <= 16 else FEW_ROWS
    processors, memory = device_of(states.device)
    programs = outputs // OUTPUTS
    block = BLOCK if inputs % BLOCK == 0 else BLOCK // 2
    fitting = (memory - SPARE) // ((OUTPUTS + tile) * block * states.element_size())
    product = states.new_empty(*states.shape[:-1], outputs)
    walk = walk_of(outputs, inputs)
    kernels.product[(programs,)](
        *(states.contiguous(), weight, bias, product, count, inputs, outputs, walk),
        TILE=tile,
        OUTPUTS=OUTPUTS,
        BLOCK=block,
        PARTED=walk < inputs,
        num_warps=4,
        num_stages=max(1, min(fitting, STAGES if programs <= processors else SHARING_STAGES)),
        **early(states.device),
    )
    return product


def launch_tiles(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same in tiles of up to MOST_ROWS rows. With a single tile, each part of the inputs has its own programs."""
    from triton import cdiv, next_power_of_2
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import kernels

    outputs, inputs = weight.shape
    rows = states.reshape(-1, inputs).contiguous()
    walk, tile = walk_of(outputs, inputs), min(MOST_ROWS, max(16, next_power_of_2(len(rows))))
    apart = len(rows) <= MOST_ROWS and walk < inputs
    parts = cdiv(inputs, walk)
    each = parts_of(outputs, inputs)[0]
    processors, memory = device_of(states.device)
    wide = outputs % WIDE == 0 and outputs // WIDE * cdiv(len(rows), tile) >= BUSY * processors and not apart
    each = WIDE if wide else each
    block = BLOCK if each == OUTPUTS and inputs % BLOCK == 0 else BLOCK // 2
    fitting = (memory - SPARE) // ((each + tile) * block * states.element_size())
    product = states.new_empty(*states.shape[:-1], outputs)
    sums = rows.new_empty(parts, len(rows), outputs, dtype=torch.float32) if apart else product
    kernels.split_product[(cdiv(len(rows), tile), outputs // each, parts if apart else 1)](
        TensorDescriptor.from_tensor(rows, [tile, block]),
        TensorDescriptor.from_tensor(weight, [each, block]),
        *(None if apart else bias, sums, weight, len(rows), inputs, outputs, walk),
        TILE=tile,
        OUTPUTS=each,
        BLOCK=block,
        PARTS=1 if apart else parts,
        num_warps=8 if tile * each > 64 * 128 and len(rows) > MOST_ROWS else 4,
        num_stages=max(1, min(fitting, STAGES)),
        **early(states.device),
    )
    if apart:
        kernels.add_up[(len(rows), cdiv(outputs, PIECE))](
            *(sums, bias, product, len(rows), parts, outputs), PIECE=PIECE, **early(states.device)
        )
    return product
