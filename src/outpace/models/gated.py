"""Gated MLPs on GPUs with tensor descriptors (TMA; H100 and later): gate, up and SiLU in one kernel.

Most architectures compute down(silu(gate(x)) * up(x)). A separate SiLU kernel would read back what the product has just
written.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .fusing import Part
from .launching import SPARE, device_of, early, fetches_tiles

CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}
MOST_ROWS = 128  # per program; beyond, cuBLAS is faster
FEW_ROWS = 32
OUTPUTS = 64  # per program, and as many gates
BLOCK = 64  # inputs at a time; twice as many if there are few rows
STAGES = 4  # the most pipeline stages
PIECE = 1024  # values per program of the separate SiLU kernel


class GatedMLP(nn.Module):
    """Takes the place of an MLP, with its weights."""

    def __init__(self, mlp: Any, always: bool = False) -> None:
        super().__init__()
        self.mlp = mlp
        self.always = always

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.mlp
        inner = torch.ops.outpace.gated(states, mlp.gate_proj.joined.whole.weight, self.always)
        product: torch.Tensor = mlp.down_proj(inner)
        return product


def fits(mlp: Any, always: bool = False) -> bool:
    """Whether the kernel supports an MLP: its GPU, dtype and sizes, gate and up fused, and exactly this function.

    `always`: also with fewer inputs at a time than are fast for few rows.
    """
    if set(mlp._modules) != CHILDREN or mlp._forward_hooks or mlp._forward_pre_hooks:
        return False
    gate, up = mlp.gate_proj, mlp.up_proj
    if not (isinstance(gate, Part) and isinstance(up, Part) and gate.joined is up.joined):
        return False
    whole = gate.joined.whole
    return (
        fetches_tiles(whole.weight.device)
        and whole.weight.dtype in (torch.bfloat16, torch.float16)
        and whole.bias is None
        and len(whole.weight) % (2 * OUTPUTS) == 0
        and whole.weight.shape[1] % (BLOCK if always else 2 * BLOCK) == 0
        and whole.weight.numel() < 2**31
        and is_gated(mlp)
    )


@torch.inference_mode()
def is_gated(mlp: Any) -> bool:
    """Whether an MLP computes down(silu(gate(x)) * up(x)): tried, also with large values, which some MLPs clamp."""
    if len(inspect.signature(mlp.forward).parameters) != 1:
        return False
    weight = mlp.gate_proj.joined.whole.weight
    sizes = torch.tensor([[0.01], [1], [100], [10000]])
    states = (torch.linspace(-1, 1, weight.shape[1]) * sizes).to(weight)
    expected = mlp.down_proj(F.silu(mlp.gate_proj(states)) * mlp.up_proj(states))
    return torch.allclose(mlp(states), expected, rtol=0, atol=0, equal_nan=True)


@torch.library.custom_op("outpace::gated", mutates_args=())
def gated(states: torch.Tensor, weight: torch.Tensor, always: bool) -> torch.Tensor:
    """[..., outputs]: silu(gate) * up, where weight [2 × outputs, inputs] has the gate's rows first, then up's.

    A row has the same bits in any batch of up to MOST_ROWS rows; with `always`, in any batch.
    """
    count = states.numel() // states.shape[-1]
    ours = count > 0 and (always or count <= MOST_ROWS)
    return launch(states, weight) if ours else gate(F.linear(states, weight))


@gated.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, always: bool) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], len(weight) // 2)


def launch(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with one kernel, in tiles of up to MOST_ROWS rows."""
    from triton import cdiv, next_power_of_2
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import kernels

    outputs, inputs = len(weight) // 2, weight.shape[1]
    rows = states.reshape(-1, inputs).contiguous()
    tile = min(MOST_ROWS, max(16, next_power_of_2(len(rows))))
    few = tile <= FEW_ROWS
    processors, memory = device_of(states.device)
    # Large programs if there is about one per multiprocessor; otherwise two small ones share it.
    large = few and outputs % (2 * OUTPUTS) == 0 and 2 / 3 * processors < outputs // (2 * OUTPUTS) <= processors
    each, block = (2 if large else 1) * OUTPUTS, (2 if few and inputs % (2 * BLOCK) == 0 else 1) * BLOCK
    fitting = (memory // (1 if large else 2) - SPARE) // ((2 * each + tile) * block * states.element_size())
    product = states.new_empty(*states.shape[:-1], outputs)
    kernels.gated[(cdiv(len(rows), tile), outputs // each)](
        TensorDescriptor.from_tensor(rows, [tile, block]),
        TensorDescriptor.from_tensor(weight, [each, block]),
        *(product, weight, len(rows), inputs, outputs),
        TILE=tile,
        OUTPUTS=each,
        BLOCK=block,
        num_warps=4,
        num_stages=max(1, min(fitting, STAGES)),
        enable_fp_fusion=False,  # the compiler must not contract multiply-adds differently in different variants
        **early(states.device),
    )
    return product


def gate(products: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, from products [..., 2 × outputs]."""
    from triton import cdiv

    from . import kernels

    rows, outputs = products.numel() // products.shape[-1], products.shape[-1] // 2
    gated = products.new_empty(*products.shape[:-1], outputs)
    if rows:
        kernels.gate[(rows, cdiv(outputs, PIECE))](products.contiguous(), gated, outputs, PIECE=PIECE)
    return gated
