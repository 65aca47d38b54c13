"""Gated MLPs, on large GPUs that fetch tiles by descriptors (H100 and later): gate, up and SiLU by one kernel.

down(silu(gate(x)) * up(x)) is what most architectures compute there. By itself SiLU is a kernel that reads what the one
before has just written.
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
MOST_ROWS = 128  # beyond, cuBLAS is quicker; and the most of one program
FEW_ROWS = 32
OUTPUTS = 64  # of one program, and as many gates
BLOCK = 64  # inputs at a time; twice as many where rows are few
STAGES = 4  # the most blocks that are on their way or at work
PIECE = 1024  # of a row, where SiLU is by itself


class GatedMLP(nn.Module):
    """Stands where an MLP was, with its weights."""

    def __init__(self, mlp: Any, always: bool = False) -> None:
        super().__init__()
        self.mlp = mlp
        self.always = always

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.mlp
        inner = torch.ops.outpace.gated(states, mlp.gate_proj.joined.whole.weight, self.always)
        product: torch.Tensor = mlp.down_proj(inner)
        return product


def fits(mlp: Any) -> bool:
    """Whether the kernel takes it: what `narrow` takes, on such a GPU, gate and up joined, and this very function."""
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
        and whole.weight.shape[1] % (2 * BLOCK) == 0
        and whole.weight.numel() < 2**31
        and is_gated(mlp)
    )


@torch.inference_mode()
def is_gated(mlp: Any) -> bool:
    """Whether an MLP computes down(silu(gate(x)) * up(x)), by trying: large numbers too, which some cut off."""
    if len(inspect.signature(mlp.forward).parameters) != 1:
        return False
    weight = mlp.gate_proj.joined.whole.weight
    sizes = torch.tensor([[0.01], [1], [100], [10000]])
    states = (torch.linspace(-1, 1, weight.shape[1]) * sizes).to(weight)
    expected = mlp.down_proj(F.silu(mlp.gate_proj(states)) * mlp.up_proj(states))
    return torch.allclose(mlp(states), expected, rtol=0, atol=0, equal_nan=True)


@torch.library.custom_op("outpace::gated", mutates_args=())
def gated(states: torch.Tensor, weight: torch.Tensor, always: bool) -> torch.Tensor:
    """[..., outputs]: silu(gates) * rest, where weight [2 × outputs, inputs] has first the gates', then the rest's.

    A row has the same bits beside any rows up to MOST_ROWS, and `always` beside any.
    """
    count = states.numel() // states.shape[-1]
    ours = count > 0 and (always or count <= MOST_ROWS)
    return launch(states, weight) if ours else gate(F.linear(states, weight))


@gated.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, always: bool) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], len(weight) // 2)


def launch(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same by one kernel, by tiles of up to MOST_ROWS rows."""
    from triton import cdiv, next_power_of_2
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import kernels

    outputs, inputs = len(weight) // 2, weight.shape[1]
    rows = states.reshape(-1, inputs).contiguous()
    tile = min(MOST_ROWS, max(16, next_power_of_2(len(rows))))
    few = tile <= FEW_ROWS
    processors, memory = device_of(states.device)
    # Large programs where there is about one for each multiprocessor; otherwise two small ones share it.
    large = few and outputs % (2 * OUTPUTS) == 0 and 2 / 3 * processors < outputs // (2 * OUTPUTS) <= processors
    each, block = (2 if large else 1) * OUTPUTS, (2 if few else 1) * BLOCK
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
        enable_fp_fusion=False,  # or the compiler might join products and sums in one way here, in another there
        **early(states.device),
    )
    return product


def gate(products: torch.Tensor) -> torch.Tensor:
    """silu(gates) * rest, of products [..., 2 × outputs]."""
    from triton import cdiv

    from . import kernels

    rows, outputs = products.numel() // products.shape[-1], products.shape[-1] // 2
    gated = products.new_empty(*products.shape[:-1], outputs)
    if rows:
        kernels.gate[(rows, cdiv(outputs, PIECE))](products.contiguous(), gated, outputs, PIECE=PIECE)
    return gated
