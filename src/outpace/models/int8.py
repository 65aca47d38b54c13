"""Linear layers of draft heads with int8 weights, for few rows on GPUs: half as many bytes to read.

Drafts need no exactness, but every rounding costs acceptance. Weights have a scale per output. States are int8 too, so
that tensor cores multiply them with the weights as they are; but in two parts, which together have as many bits as a
16-bit state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import gated
from .fusing import is_plain
from .launching import SPARE, device_of, early, is_recent
from .narrow import FEW_ROWS, OUTPUTS, STAGES, NarrowLinear, narrow

LEAST = 2048  # inputs; with fewer, reading the weights is not what takes the time
BLOCK = 256  # inputs at a time
SHARING_STAGES = 3  # pipeline stages, if programs share a multiprocessor
LEVELS = 127  # the largest number of a part, and of a weight
LARGE = 8192  # values of a row that are split by more warps


class Int8Linear(nn.Module):
    """Takes the place of a Linear. Its weights remain, for many rows."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        numbers, scales = rounded(self.weight.detach())
        self.register_buffer("numbers", numbers, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, states: torch.Tensor, is_gated: bool = False) -> torch.Tensor:
        """With `is_gated`, the input is silu(gate) * up, and states [..., 2 × inputs] have the gates first."""
        product: torch.Tensor = torch.ops.outpace.int8_linear(
            states, self.numbers, self.scales, self.weight, self.bias, is_gated
        )
        return product


class Int8MLP(nn.Module):
    """Takes the place of an MLP, with its modules: down(silu(gate(x)) * up(x))."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.mlp
        product: torch.Tensor = mlp.down_proj(mlp.gate_proj.joined.whole(states), True)
        return product


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as int8, and a scale for each of its rows."""
    numbers = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), 4096):  # not all of it in float32 at once
        some = slice(start, start + 4096)
        values = weight[some].float()
        scales[some] = values.abs().amax(1).clamp(min=1e-30) / LEVELS
        numbers[some] = (values / scales[some, None]).round()
    return numbers, scales


def fits(linear: Any) -> bool:
    """Whether int8 is faster for a linear layer, or one that has our kernels already, and the kernels support it."""
    if type(linear) not in (nn.Linear, NarrowLinear) or linear._forward_hooks or linear._forward_pre_hooks:
        return False
    weight = linear.weight
    outputs, inputs = weight.shape
    return (
        is_plain(*linear.parameters())
        and is_recent(weight.device)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.numel() < 2**31
        and inputs >= LEAST
        and inputs % BLOCK == 0
        and outputs % OUTPUTS == 0
    )


def fits_mlp(mlp: Any) -> bool:
    """Whether the kernels support an MLP, with gate and up fused."""
    return gated.fits(mlp) and fits(mlp.gate_proj.joined.whole) and fits(mlp.down_proj)


@torch.library.custom_op("outpace::int8_linear", mutates_args=())
def int8_linear(
    states: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    """[..., outputs]: states [..., inputs] times weight [outputs, inputs], plus bias; for few rows in int8."""
    if 0 < states.numel() // states.shape[-1] <= FEW_ROWS:
        return launch(states, numbers, scales, bias, is_gated)
    product: torch.Tensor = narrow(gated.gate(states) if is_gated else states, weight, bias, False)
    return product


@int8_linear.register_fake
def _(
    states: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], len(numbers))


def launch(
    states: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, is_gated: bool = False
) -> torch.Tensor:
    """The same with two kernels, for up to FEW_ROWS rows: one splits the states, the other multiplies."""
    from triton import next_power_of_2

    from . import kernels

    outputs, inputs = numbers.shape
    count, device = states.numel() // states.shape[-1], states.device
    parts = torch.empty(2, count, inputs, dtype=torch.int8, device=device)
    sizes = torch.empty(count, dtype=torch.float32, device=device)
    kernels.split_states[(count,)](
        *(states.contiguous(), parts, sizes, count, inputs),
        WIDTH=next_power_of_2(inputs),
        GATED=is_gated,
        LEVELS=LEVELS,
        num_warps=8 if inputs <= LARGE else 16,
        **early(device),
    )
    tile = 16 if count <= 16 else FEW_ROWS
    processors, memory = device_of(device)
    programs = outputs // OUTPUTS
    product = states.new_empty(*states.shape[:-1], outputs)
    kernels.int8_product[(programs,)](
        *(parts, sizes, numbers, scales, bias, product, count, inputs, outputs),
        TILE=tile,
        OUTPUTS=OUTPUTS,
        BLOCK=BLOCK,
        LEVELS=LEVELS,
        num_warps=4,
        num_stages=min(
            (memory - SPARE) // ((OUTPUTS + 2 * tile) * BLOCK), STAGES if programs <= processors else SHARING_STAGES
        ),
        **early(device),
    )
    return product
