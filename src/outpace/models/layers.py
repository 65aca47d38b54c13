"""Decoder layers of the common form with packed weights: a whole forward pass in one call of `layers.cpp`.

Thirty small layers are hundreds of torch calls per step, which take longer than the products. What a layer computes is
inferred from the names of its parts and verified: `Stack.agrees` compares every layer with the model's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, addressof, byref, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..pool import Placed, Pool
from .adapter import Output, asked_rows
from .exact import seen_by
from .packed import BLOCK, LANES, PackedEmbedding, PackedLinear, Weights, library

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
AROUND = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # norms before and after both parts
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMED = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.silu,
    lambda states: F.gelu(states, approximate="tanh"),
)
POSITIONS = 1024  # initial size of the rotary tables
ROUNDING = 0.02  # tolerance for a layer: rounding may change an 8-bit code here and there

Angles = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""For each type of layer, cosines and sines [positions, rotated]."""


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        *((name, Weights) for name in ("query", "key", "value", "out", "gate", "up", "down")),
        *((name, c_int64) for name in ("heads", "key_heads", "size", "window", "rotary", "activation")),
        *((name, c_double) for name in ("scaling", "softcap", "epsilon")),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("count", c_int64),
        ("width", c_int64),
        ("norm", c_void_p),
        ("head", Weights),
        ("epsilon", c_double),
        ("softcap", c_double),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "start", "stop")),
        *((name, c_void_p) for name in ("hidden", "positions", "slots", "text", "first", "past", "tails")),
        ("depth", c_int64),
        *((name, c_void_p) for name in ("keys", "values")),
        ("capacity", c_int64),
        *((name, c_void_p) for name in ("cosines", "sines")),
        ("rotated", c_int64),
        ("asked", c_void_p),
        ("count", c_int64),
        ("logits", c_void_p),
        ("threads", c_int64),
    )


class Unusual(Exception):
    """layers.cpp does not support this."""


class Stack:
    """All layers of a model, and its ends."""

    def __init__(
        self,
        ends: tuple[Any, Any, Any],
        layers: Sequence[tuple[nn.Module, str, int]],
        width: int,
        angles: Callable[[int], Angles],
        softcap: float = 0.0,
    ) -> None:
        """`layers`: each with its type and window. `angles(count)` are the rotary angles of the first positions.

        `softcap` is that of logits; 0: none.
        """
        embed, norm, head = ends
        if not isinstance(embed, PackedEmbedding) or not isinstance(head, PackedLinear) or width % BLOCK:
            raise Unusual("its ends are not packed")
        self.embed, self.width, self.outputs = embed, width, head.out_features
        self._kept: list[object] = [embed, head]  # objects that C++ has pointers to
        self._kinds = list(dict.fromkeys(kind for _, kind, _ in layers))
        self._layers = (_Layer * len(layers))(*(self._layer(*layer) for layer in layers))
        weight, epsilon = self._norm(norm, width)
        self._stack = _Stack(self._layers, len(layers), width, weight, head.weights(), epsilon, softcap)
        self._angles = angles
        self._known = 0  # positions in the rotary tables
        self._pool: tuple[Any, ...] = ()  # the pool's storage, and the pointers to it

    def _layer(self, layer: Any, kind: str, window: int) -> _Layer:
        parts, attention, mlp = set(layer._modules), layer.self_attn, layer.mlp
        around = parts == LAYER | AROUND
        if not (around or parts == LAYER) or set(mlp._modules) != MLP:
            raise Unusual(f"a layer of {sorted(parts)}")
        normed = set(attention._modules) == ATTENTION | NORMED
        if not normed and set(attention._modules) != ATTENTION:
            raise Unusual(f"attention of {sorted(attention._modules)}")
        matrices = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        matrices += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(isinstance(matrix, PackedLinear) for matrix in matrices):
            raise Unusual("not all matrices are packed")
        size = int(attention.head_dim)
        if size % LANES or mlp.gate_proj.out_features % BLOCK:
            raise Unusual(f"heads of {size}")
        self._kept += matrices
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        if around:
            norms += [layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm]
        weights, epsilons = zip(*(self._norm(norm, self.width) for norm in norms), strict=True)
        found = _Layer(
            before_attention=weights[0],
            after_attention=weights[1] if around else None,
            before_mlp=weights[2 if around else 1],
            after_mlp=weights[3] if around else None,
            heads=matrices[0].out_features // size,
            key_heads=matrices[1].out_features // size,
            size=size,
            window=window,
            rotary=self._kinds.index(kind),
            activation=_activation(mlp.act_fn),
            scaling=float(attention.scaling),
            softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0),
            epsilon=epsilons[0],
        )
        if normed:
            found.query_norm, found.key_norm = (
                self._norm(part, size)[0] for part in (attention.q_norm, attention.k_norm)
            )
        for name, matrix in zip(("query", "key", "value", "out", "gate", "up", "down"), matrices, strict=True):
            setattr(found, name, matrix.weights())
        return found

    def _norm(self, norm: Any, size: int) -> tuple[int, float]:
        """The pointer to an RMS norm's factors, and its epsilon. The factors are found by trying the norm."""
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if epsilon is None:
            raise Unusual(f"a norm {type(norm).__name__}")
        with torch.inference_mode():
            factors = norm(torch.full((1, size), 1024.0))[0].float().contiguous()
        self._kept.append(factors)
        return factors.data_ptr(), float(epsilon)

    def forward(
        self, pool: Pool, rows: Placed, logits: int | Sequence[int], start: int, stop: int, hidden: torch.Tensor | None
    ) -> Output:
        """`Model.forward`."""
        states = self.embed(rows.tokens) if hidden is None else hidden.clone(memory_format=torch.contiguous_format)
        asked = asked_rows(logits, len(rows), states.device)
        scores = torch.empty(len(asked), self.outputs)
        keys, values, capacity = self._storage(pool)
        cosines, sines, rotated = self._turns(int(rows.numbers[1].max()) + 1)
        seen = seen_by(rows)
        lists = (rows.positions, rows.slots, seen.text, seen.first, seen.past, seen.tails)
        step = _Step(
            *(len(rows), start, stop, states.data_ptr()),
            *(part.data_ptr() for part in lists),
            *(seen.tails.shape[1], keys, values, capacity, cosines, sines, rotated),
            *(asked.data_ptr(), len(asked), scores.data_ptr(), torch.get_num_threads()),
        )
        library().decoder_step(byref(self._stack), byref(step))
        return Output(scores, states)

    def _storage(self, pool: Pool) -> tuple[int, int, int]:
        """Pointers to the pool's keys and values, and its slots."""
        first = pool.stored(0)
        if first is None or not self._pool or self._pool[0] is not first[0]:
            stored = []
            for number, layer in enumerate(self._layers):
                like = torch.empty(1, layer.key_heads, 1, layer.size)
                stored.append(pool.stored(number) or pool.store(number, like, like))
            pointers = [(c_void_p * len(stored))(*(pair[part].data_ptr() for pair in stored)) for part in (0, 1)]
            self._pool = (stored[0][0], pointers, *map(addressof, pointers), stored[0][0].shape[2])
        return self._pool[2:]

    def _turns(self, positions: int) -> tuple[int, int, int]:
        if positions > self._known:
            self._known = max(POSITIONS, 1 << (positions - 1).bit_length())
            found = self._angles(self._known)
            tables = [tuple(part.float().contiguous() for part in found[kind]) for kind in self._kinds]
            pointers = [(c_void_p * len(tables))(*(table[part].data_ptr() for table in tables)) for part in (0, 1)]
            cosines, sines = map(addressof, pointers)
            self._tables, self._turned = (tables, pointers), (cosines, sines, tables[0][0].shape[1])
        return self._turned

    def agrees(self, general: Callable[..., Output], vocabulary: int, layers: int) -> bool:
        """Whether every layer, and what follows the last, computes what the model's own modules compute."""
        text = [token % vocabulary for token in range(5, 5 + 3 * 24, 3)]
        pools = [Pool("cpu", capacity=32) for _ in range(2)]
        with pools[0].sequence(text) as theirs, pools[1].sequence(text) as mine:
            rows = pools[0].place_text(theirs, len(text)), pools[1].place_text(mine, len(text))
            hidden = general(pools[0], rows[0], 0, 0, 0).hidden
            if not _near(self.embed(rows[1].tokens), hidden):
                return False
            for layer in range(layers):
                asked = len(text) if layer == layers - 1 else 0
                one = general(pools[0], rows[0], asked, layer, layer + 1, hidden)
                other = self.forward(pools[1], rows[1], asked, layer, layer + 1, hidden)
                if not _near(other.hidden - hidden, one.hidden - hidden):
                    return False
                hidden = one.hidden
            return _near(other.logits, one.logits)


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= ROUNDING * expected.norm())


def _activation(function: Any) -> int:
    states = torch.linspace(-8, 8, 97)
    with torch.inference_mode():
        for number, known in enumerate(ACTIVATIONS):
            if torch.allclose(function(states), known(states), rtol=1e-4, atol=1e-5):
                return number
    raise Unusual(f"an activation {type(function).__name__}")
