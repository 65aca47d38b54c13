"""Exact mode on a CPU, in float32: a row has the same bits whatever other rows are in the batch.

In torch the bits of a row depend on the batch for matrix products, attention, functions like SiLU (other code computes
the remainder after the last full vector) and, in compiled layers, norms. `products.cpp` and `exact.cpp` compute all of
these row by row. Everything else in a decoder is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedModel
from ..pool import Placed
from .fusing import is_plain


class Seen(NamedTuple):
    """What each row attends to, as slots in the order of positions. Takes the place of a mask."""

    text: torch.Tensor  # [slots] the cached tokens of each sequence, one sequence after the other
    first: torch.Tensor  # [rows] where those of the row's sequence start
    past: torch.Tensor  # [rows] how many they are
    positions: torch.Tensor  # [rows]
    tails: torch.Tensor  # [rows, deepest] the slots of the row's path in the draft
    window: int = 0  # the sliding window, in positions; 0: none


_LEAST = (13, 17)  # slots and depth: 1, or a size of the model, would be compiled separately


def seen_by(rows: Placed) -> Seen:
    """What the rows attend to."""
    parts = rows.parts
    ends = [part.tails() for part in parts]
    text = np.zeros(max(_LEAST[0], sum(len(part.text) for part in parts)), dtype=np.int64)
    first, past = np.zeros((2, len(rows)), dtype=np.int64)
    tails = np.zeros((len(rows), max(_LEAST[1], *(end.shape[1] for end in ends))), dtype=np.int64)
    row = place = 0
    for part, end in zip(parts, ends, strict=True):
        mine, length = slice(row, row + len(part)), len(part.text)
        text[place : place + length] = part.text
        first[mine], past[mine] = place, length
        tails[mine, : end.shape[1]] = end
        row, place = row + len(part), place + length
    return Seen(
        torch.from_numpy(text),
        torch.from_numpy(first),
        torch.from_numpy(past),
        rows.positions,
        torch.from_numpy(tails),
    )


def attend_exactly(
    query: torch.Tensor,  # [1, heads, rows, size]
    keys: torch.Tensor,  # [1, key heads, slots, size]
    values: torch.Tensor,
    seen: Seen,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """[1, rows, heads, size]. `softcap` 0: none."""
    *lists, window = seen
    query = query if query.stride(3) == 1 else query.contiguous()
    mixed: torch.Tensor = torch.ops.outpace.exact_attention(query, keys, values, *lists, window, scaling, softcap)
    return mixed


class ExactFunctions(TorchFunctionMode):
    """A context in which functions whose bits depend on the batch run as our own code, or raise UnsupportedModel."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name  # of the model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OURS and args[0].dtype == torch.float32:
            return _OURS[func](*args, **kwargs)
        if func in _PRODUCTS or (func in _MATMULS and args[0].shape[-1] != 1):  # an inner size of 1 has no sum
            raise UnsupportedModel(
                f"{self._name} calls {func.__name__}, whose result may depend on the other rows of a batch. "
                "Use exact=False."
            )
        return func(*args, **kwargs)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not is_plain(weight):
        kind = type(weight).__name__
        raise UnsupportedModel(f"exact mode cannot compute products with weights of type {kind}. Use exact=False.")
    product: torch.Tensor = torch.ops.outpace.linear(input, weight.contiguous(), bias, True)
    return product


def _function(name: str) -> Callable[..., torch.Tensor]:
    def compute(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        found: torch.Tensor = getattr(torch.ops.outpace, f"exact_{name}")(input)
        return input.copy_(found) if inplace else found

    return compute


def _gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return _function("gelu" if approximate == "none" else "gelu_tanh")(input)


def _mean(
    input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if dim not in (-1, input.ndim - 1, (-1,), [-1]) or dtype not in (None, torch.float32):
        return torch.mean(input, dim, keepdim, dtype=dtype)
    found: torch.Tensor = torch.ops.outpace.exact_mean(input)
    return found if keepdim else found.squeeze(-1)


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    return _normed(input - _mean(input, -1, True), normalized_shape, weight, bias, eps)


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return _normed(input, normalized_shape, weight, None, torch.finfo(torch.float32).eps if eps is None else eps)


def _normed(
    states: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if len(shape) != 1:
        raise UnsupportedModel(f"exact mode cannot compute a norm over {len(shape)} dimensions. Use exact=False.")
    states = states * torch.rsqrt(_mean(states * states, -1, True) + eps)
    states = states if weight is None else states * weight
    return states if bias is None else states + bias


def _homes(*names: str) -> Iterator[tuple[str, Any]]:
    """All functions of torch with one of these names."""
    for name, home in product(names, (torch, torch.Tensor, F)):
        if hasattr(home, name):
            yield name, getattr(home, name)


_OURS: dict[Any, Callable[..., torch.Tensor]] = {
    F.linear: _linear,
    F.gelu: _gelu,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    **{func: _mean for _, func in _homes("mean")},
    **{func: _function(name) for name, func in _homes("cos", "exp", "sigmoid", "silu", "sin", "tanh")},
}
_MATMULS = {func for _, func in _homes("matmul", "__matmul__", "mm", "bmm")}
_PRODUCTS = {
    func
    for _, func in _homes(
        *("__rmatmul__", "addmm", "addbmm", "baddbmm", "bilinear", "conv1d", "einsum", "grouped_mm", "_grouped_mm"),
        *("linear", "scaled_dot_product_attention", "tensordot"),
    )
}
