"""Packed weights on a CPU: matrices in GGUF's formats, and modules that compute with them.

`packed.cpp` and `numbers.cpp` have the matrix products, `packed.h` the layout of a matrix. The library does not link to
torch, and is called by ctypes; the system's C++ compiler builds it at first use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import nn

from ..errors import InputError
from . import products, threads
from .fusing import is_plain

HERE = Path(__file__).parent
SOURCES = (HERE / "packed.cpp", HERE / "numbers.cpp", HERE / "layers.cpp")
HEADERS = (HERE / "lanes.h", HERE / "packed.h", HERE / "team.h")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden")
LANES = 16  # outputs of a panel
BLOCK = 32  # inputs that share a scale
Q8, Q4 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1
FORMATS = tuple(GGMLQuantizationType[f"Q{name}"] for name in ("4_0", "4_1", "5_0", "5_1", "8_0", "4_K", "5_K", "6_K"))
NUMBERS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
"""Formats of unquantized matrices, which are rows of numbers."""


class Weights(ctypes.Structure):
    """The struct of packed.h."""

    _fields_ = (
        ("cells", c_void_p),
        ("bias", c_void_p),
        ("type", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
    )


@functools.cache
def library(flags: Sequence[str] = FLAGS) -> Any:
    """The compiled library, built at first use."""
    path = products.build(products.folder(), sources=SOURCES, headers=HEADERS, flags=flags, torch_too=False)
    found = ctypes.CDLL(str(path))
    found.packed_bytes.restype = c_int64
    found.packed_bytes.argtypes = [c_int64, c_int64, c_int64]
    found.packed_fill.argtypes = [POINTER(Weights), c_void_p, c_void_p, c_int]
    found.packed_rows.argtypes = [POINTER(Weights), c_void_p, c_int64, c_float, c_void_p]
    found.packed_linear.argtypes = [POINTER(Weights), c_void_p, c_int64, c_void_p, c_int]
    found.decoder_step.argtypes = [c_void_p, c_void_p]
    for name in ("packed_fill", "packed_rows", "packed_linear", "decoder_step"):
        getattr(found, name).restype = None
    return found


class Matrix:
    """A packed matrix [outputs, inputs]. `order` has the row of `raw` for each output."""

    def __init__(
        self, raw: np.ndarray[Any, Any], kind: GGMLQuantizationType, order: np.ndarray[Any, Any] | None = None
    ) -> None:
        block, size = GGML_QUANT_SIZES[kind]
        self.kind = kind
        self.outputs, self.inputs = len(raw), raw.view(np.uint8).shape[1] // size * block
        needed = library().packed_bytes(kind, self.outputs, self.inputs)
        if not needed:
            raise InputError(f"there are no packed products of type {kind.name} with {self.inputs} inputs.")
        self.cells = torch.zeros(needed, dtype=torch.uint8, device="cpu")
        raw = np.ascontiguousarray(raw).view(np.uint8)
        order = None if order is None else np.ascontiguousarray(order, np.int64)
        library().packed_fill(
            byref(self.weights()), raw.ctypes.data, None if order is None else order.ctypes.data, threads.ours()
        )

    @classmethod
    def over(cls, numbers: torch.Tensor) -> Matrix:
        """Unquantized weights [outputs, inputs], in their memory."""
        found = cls.__new__(cls)
        numbers = numbers.detach().contiguous()
        found.kind, (found.outputs, found.inputs) = NUMBERS[numbers.dtype], numbers.shape
        found.cells = numbers.view(torch.uint8)
        return found

    @classmethod
    def of(cls, numbers: torch.Tensor, kind: GGMLQuantizationType) -> Matrix:
        """Quantize floats to a format that `gguf` can write."""
        return cls(quants.quantize(numbers.detach().float().cpu().numpy(), kind), kind)

    def weights(self, bias: torch.Tensor | None = None) -> Weights:
        """Pointers to the matrix; valid as long as this object lives."""
        return Weights(
            self.cells.data_ptr(), None if bias is None else bias.data_ptr(), self.kind, self.outputs, self.inputs
        )

    def rows(self, outputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """[..., inputs] the weights of these outputs as floats, times `scale`."""
        if outputs.is_floating_point():  # hidden states, when a model's modules are tried out
            raise TypeError(f"row indices must be integers, not {outputs.dtype}")
        asked = outputs.reshape(-1).to(torch.int64).contiguous()
        found = torch.empty(len(asked), self.inputs, dtype=torch.float32, device="cpu")
        if len(asked):
            if not (int(asked.min()) >= 0 and int(asked.max()) < self.outputs):
                raise IndexError(f"rows {asked.tolist()} of a matrix of {self.outputs}")
            library().packed_rows(byref(self.weights()), asked.data_ptr(), len(asked), scale, found.data_ptr())
        return found.view(*outputs.shape, self.inputs)

    @property
    def numbers(self) -> torch.Tensor:
        """The whole matrix as floats."""
        return self.rows(torch.arange(self.outputs))


class PackedLinear(nn.Module):
    """Takes the place of a Linear."""

    filled: torch.Tensor | None

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.inputs, matrix.outputs
        filled = None
        if bias is not None:  # padded to whole panels
            filled = torch.zeros(-(-matrix.outputs // LANES) * LANES, dtype=torch.float32, device="cpu")
            filled[: matrix.outputs] = bias.detach().float()
        self.register_buffer("filled", filled, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weights as floats, dequantized at each access."""
        return self.matrix.numbers

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.filled is None else self.filled[: self.out_features]

    def weights(self) -> Weights:
        """Pointers to weights and bias."""
        return self.matrix.weights(self.filled)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[-1] != self.in_features:  # C++ would write beyond the output
            raise RuntimeError(f"a product with {self.in_features} inputs was given {states.shape[-1]}")
        rows = states.to(torch.float32).contiguous()
        out = torch.empty(*rows.shape[:-1], self.out_features, dtype=torch.float32, device="cpu")
        count = rows.numel() // self.in_features
        if count:
            library().packed_linear(byref(self.weights()), rows.data_ptr(), count, out.data_ptr(), threads.ours())
        return out


def rounded_for(module: nn.Module) -> PackedLinear | None:
    """What computes a Linear's products with 8-bit weights on a CPU, for drafts; None where that is not possible."""
    if type(module) is not nn.Linear or not is_plain(*module.parameters()) or module.weight.device.type != "cpu":
        return None
    return PackedLinear(Matrix.of(module.weight, Q8), module.bias) if module.in_features % BLOCK == 0 else None


class PackedEmbedding(nn.Module):
    """Takes the place of an Embedding that multiplied its weights by `scale`."""

    def __init__(self, matrix: Matrix, scale: float = 1.0) -> None:
        super().__init__()
        self.matrix = matrix
        self.scale = scale
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)  # a model without any has no dtype or device

    @property
    def weight(self) -> torch.Tensor:
        """The weights as floats, dequantized at each access."""
        return self.matrix.numbers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.matrix.rows(tokens, self.scale)


def is_packed(model: nn.Module) -> bool:
    """Whether some of a model's weights are packed."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def is_quantized(model: nn.Module) -> bool:
    """Whether some of a model's weights are packed and quantized."""
    return any(isinstance(module, PackedLinear) and module.matrix.kind in FORMATS for module in model.modules())
