"""Decoder layers of the common forms on a CPU: a whole step in one call of `layers.cpp`.

Thirty small layers are hundreds of torch calls per step, which take longer than the products. What a layer computes is
inferred from the names of its parts, and what names do not tell is tried: `Stack.agrees` compares every layer with the
model's own, on a short text. Where the weights at hand do not tell forms of layers apart, torch computes. Weights in
float32 are read where they are, packed ones in their blocks.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, addressof, byref, c_double, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import ModelError
from ..pool import Placed, Pool
from . import threads
from .adapter import Output, asked_rows
from .exact import seen_by
from .fusing import is_plain
from .mirror import Call, Outside
from .packed import BLOCK, FORMATS, LANES, NUMBERS, PackedLinear, Weights, library

NORMS = (  # of a layer: before and after attention, before and after the MLP
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("input_layernorm", "", "input_layernorm", ""),
    ("self_attn_layer_norm", "", "final_layer_norm", ""),
    ("ln_attn", "", "ln_mlp", ""),
    ("ln_1", "", "ln_2", ""),
    ("input_layernorm", "", "pre_feedforward_layernorm", ""),
)
NORMED = ("q_norm", "k_norm")
ATTENTION = ("self_attn", "attention", "self_attention", "attn")
QUERIES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("c_attn",), ("query_key_value",))  # the last by key heads
OUT = ("o_proj", "dense", "out_proj", "c_proj")
MLPS = (  # with gates, and without
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
FUNCTION = ("act_fn", "activation_fn", "act")  # names of an activation
ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.silu,
    lambda states: F.gelu(states, approximate="tanh"),
    F.gelu,
    F.relu,
    lambda states: F.relu(states).square(),
)
LIFTS = (0.0, 1.0)  # what norms add to their weights
MANY = 64  # rows from which on a call computes one layer: between calls, Python obeys Ctrl-C
POSITIONS = 1024  # initial size of the rotary tables
ROUNDING = 1e-4  # tolerance for a row of a layer
ROUGH = 0.1  # the same with quantized states: rounding may change an 8-bit code here and there
EMBEDDED, FINEST = 1e-6, 0.01  # tolerance for embeddings, and share of a state that counts when layers add little
APART = 5  # how many times the error of the right form any other one must have

FORMS = tuple((parallel, *turns) for parallel in (0, 1) for turns in ((1, 0), (1, 1), (1, 2), (0, 0)))
"""What is tried of a layer: `parallel`, whether there is rotary embedding, and `paired`."""

Angles = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""For each type of layer, cosines and sines [positions, rotated]."""


class _Norm(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("centred", c_int64),
        ("lift", c_double),
        ("epsilon", c_double),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, _Norm) for name in ("query_norm", "key_norm")),
        *((name, Weights) for name in ("query", "key", "value", "out", "gate", "up", "down")),
        *((name, c_int64) for name in ("heads", "key_heads", "size", "window", "joined", "together")),
        *((name, c_int64) for name in ("rotary", "paired", "parallel", "activation")),
        *((name, c_double) for name in ("scaling", "softcap", "share")),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("count", c_int64),
        ("width", c_int64),
        ("norm", _Norm),
        ("head", Weights),
        *((name, c_double) for name in ("softcap", "scale")),
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


class Part(NamedTuple):
    """A decoder layer."""

    layer: nn.Module
    kind: str  # its type, by which rotary angles differ
    window: int  # 0: none
    call: Call | None  # of attention, if it is known


class Form(NamedTuple):
    """The parts of a decoder layer that layers.cpp computes."""

    norms: list[Any]  # before and after attention, before and after the MLP; None: there is none
    attention: Any
    queries: list[Any]  # the projections of queries, keys and values, or one of all three
    by_heads: bool  # whether that one has the outputs of each key head together
    out: Any
    gates: list[Any]  # gate and up, or one of both; or up alone
    gated: bool
    down: Any
    activation: Any
    normed: list[Any]  # the norms of queries and keys, if there are any


def form_of(layer: Any) -> Form | None:
    """The parts of a layer, by their names; None if these are others."""
    here = _names(layer)
    attention = next((layer._modules[name] for name in ATTENTION if name in here), None)
    mlp = layer._modules.get("mlp", layer)
    if attention is None or any(map(_owns_numbers, (layer, attention, mlp))):
        return None
    inside, inner = _names(attention), _names(mlp) - {*ATTENTION}
    queries = next((names for names in QUERIES if inside.issuperset(names)), ())
    out, normed = inside & {*OUT}, inside & {*NORMED}
    expand = next((names for names in MLPS if inner.issuperset(names)), ())
    function = inner & {*FUNCTION}
    norms = _norms(layer, here - {*ATTENTION, "mlp"} - ({*expand} | function if mlp is layer else set()))
    if not (queries and expand and norms and len(out) == len(function) == 1 and normed in (set(), {*NORMED})):
        return None
    if inside != {*queries} | out | normed or (mlp is not layer and inner != {*expand} | function):
        return None
    return Form(
        norms=[layer._modules[name] if name else None for name in norms],
        attention=attention,
        queries=[attention._modules[name] for name in queries],
        by_heads=queries == QUERIES[-1],
        out=attention._modules[out.pop()],
        gates=[mlp._modules[name] for name in expand[:-1]],
        gated=expand in MLPS[:2],
        down=mlp._modules[expand[-1]],
        activation=mlp._modules[function.pop()],
        normed=[attention._modules[name] for name in NORMED if normed],
    )


def _norms(layer: Any, names: set[str]) -> tuple[str, ...]:
    """These names in the order of NORMS; empty if they are others, or not norms."""
    owned = [
        {name for name, weight in layer._modules[norm]._parameters.items() if weight is not None} for norm in names
    ]
    if any(weights - {"bias"} != {"weight"} for weights in owned):
        return ()  # without any weights, or with others
    return next((norms for norms in NORMS if names == {*norms} - {""}), ())


class Stack:
    """All layers of a model, and its ends."""

    def __init__(
        self,
        ends: tuple[Any, Any, Any],
        layers: Sequence[Part],
        width: int,
        context: int,
        angles: Callable[[int], Angles],
        softcap: float = 0.0,
    ) -> None:
        """`angles(count)` are the rotary angles of the first positions. `softcap` is that of logits; 0: none."""
        embed, norm, head = ends
        if width % BLOCK:
            raise Unusual(f"a width of {width}")
        self.embed, self.width, self.outputs = embed, width, head.weight.shape[0]
        self._live: list[tuple[nn.Module, str]] = []  # weights that C++ has pointers to
        self._kept: list[object] = []
        self._rough = False
        self._kinds = list(dict.fromkeys(part.kind for part in layers))
        self._of_kind = [self._kinds.index(part.kind) for part in layers]
        self._layers = (_Layer * len(layers))(*(self._layer(part) for part in layers))
        self._stack = _Stack(
            self._layers, len(layers), width, self._norm(norm, width), self._weights(head), softcap, scale=1.0
        )
        self._scale = 1.0  # factor of embedded tokens
        self._general: Callable[..., Output] | None = None  # embeds tokens, if that is more than looking them up
        self._places, self._forms = self._pointers(), self._layouts()
        self._angles, self._context = angles, context
        self._known = 0  # positions in the rotary tables
        self._pool: tuple[Any, ...] = ()  # the pool's storage, and the pointers to it

    def _layer(self, part: Part) -> _Layer:
        form = form_of(part.layer)
        if form is None:
            raise Unusual(f"a layer of {sorted(part.layer._modules)}")
        attention = form.attention
        size = int(getattr(attention, "head_dim", 0) or attention.head_size)
        softcap = float(getattr(attention, "attn_logit_softcapping", None) or 0)
        found = _Layer(
            size=size,
            window=part.window,
            activation=_activation(form.activation),
            scaling=float(getattr(attention, "scaling", size**-0.5)),
            softcap=softcap if part.call is None else part.call.softcap,
            share=float(getattr(part.layer, "residual_multiplier", 1.0)),
            out=self._weights(form.out),
            down=self._weights(form.down),
        )
        if size % LANES or found.out.inputs % BLOCK or found.down.inputs % BLOCK:
            raise Unusual(f"heads of {size}")
        found.heads = found.out.inputs // size
        queries = [self._weights(part) for part in form.queries]
        if len(queries) == 1:
            narrow = (queries[0].outputs - found.out.inputs) // 2
            found.key_heads, found.joined = narrow // size, form.by_heads
            if not form.by_heads:
                queries = self._parts(queries[0], found.out.inputs, narrow, narrow)
        else:
            found.key_heads = queries[1].outputs // size
        for name, matrix in zip(("query", "key", "value"), queries, strict=False):
            setattr(found, name, matrix)
        gates = [self._weights(part) for part in form.gates]
        if form.gated:
            gates = gates if len(gates) == 2 else self._parts(gates[0], *[gates[0].outputs // 2] * 2)
            found.gate = gates[0]
        found.up = gates[-1]
        if any(len({part.type in FORMATS for part in group}) > 1 for group in (queries, gates)):
            raise Unusual("products of the same states with quantized and other matrices")
        places = ("before_attention", "after_attention", "before_mlp", "after_mlp")
        for place, norm in zip(places, form.norms, strict=True):
            if norm is not None:
                setattr(found, place, self._norm(norm, self.width))
        if form.normed:
            found.together = form.normed[0].weight.numel() > size
            sizes = [found.heads * size, found.key_heads * size] if found.together else [size, size]
            found.query_norm, found.key_norm = map(self._norm, form.normed, sizes)
        self._check_shapes(found)
        return found

    def _check_shapes(self, layer: _Layer) -> None:
        """C++ relies on them."""
        width, wide, narrow = self.width, layer.heads * layer.size, layer.key_heads * layer.size
        inner = layer.down.inputs
        shapes = [(layer.out, width, wide), (layer.up, inner, width), (layer.down, width, inner)]
        if layer.joined:
            shapes.append((layer.query, wide + 2 * narrow, width))
        else:
            shapes += [(layer.query, wide, width), (layer.key, narrow, width), (layer.value, narrow, width)]
        if layer.gate.cells:
            shapes.append((layer.gate, inner, width))
        fits = all((found.outputs, found.inputs) == (outputs, inputs) for found, outputs, inputs in shapes)
        if not fits or not narrow or layer.heads % layer.key_heads:
            raise Unusual("matrices of other shapes")

    def _weights(self, linear: Any) -> Weights:
        """Pointers to a linear layer's weights, packed or where torch has them."""
        if isinstance(linear, PackedLinear):
            self._kept.append(linear)
            weights = linear.weights()
            self._rough |= weights.type in FORMATS
            return weights
        if not is_linear(type(linear)):
            raise Unusual(f"a product by {type(linear).__name__}")
        if linear.bias is None:
            self._live.append((linear, "bias"))
        bias = None if linear.bias is None else self._numbers(linear, "bias", padded=True)
        numbers = self._numbers(linear, "weight")
        return Weights(numbers, bias, NUMBERS[torch.float32], *linear.weight.shape)

    def _parts(self, whole: Weights, *outputs: int) -> list[Weights]:
        """Some outputs each, one after the other."""
        found, start = [], 0
        for count in outputs:
            if start % LANES:  # within a panel
                raise Unusual("parts of a product")
            before = library().packed_bytes(whole.type, start, whole.inputs)
            bias = whole.bias and whole.bias + start * 4
            found.append(Weights(whole.cells + before, bias, whole.type, count, whole.inputs))
            start += count
        return found

    def _numbers(self, module: nn.Module, name: str, padded: bool = False) -> int:
        """The pointer to a weight in float32. `padded`: C++ reads whole panels of it."""
        weight = module._parameters.get(name)
        if weight is None or not _is_readable(weight) or (padded and weight.numel() % LANES):
            raise Unusual(f"a weight of {type(module).__name__}")
        self._live.append((module, name))
        self._kept.append(weight.detach())
        return int(weight.data_ptr())

    def _norm(self, norm: Any, size: int) -> _Norm:
        """Pointers to a norm's weights, and what it computes with them, found by trying it."""
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight, bias = (norm._parameters.get(name) for name in ("weight", "bias"))
        if epsilon is None or weight is None or not (_is_readable(weight) and (bias is None or _is_readable(bias))):
            raise Unusual(f"a norm {type(norm).__name__}")
        twin = copy.copy(norm)  # with weights that show what is done with them
        if isinstance(vars(twin).get("forward"), Outside):
            del twin.forward  # it runs the module itself
        drawn = torch.linspace(0.5, 2.0, size, dtype=torch.float32, device="cpu")
        twin._parameters = {**norm._parameters, "weight": nn.Parameter(drawn)}
        if bias is not None:
            twin._parameters["bias"] = nn.Parameter(drawn.flip(0))
        with torch.inference_mode():
            even = torch.full((1, size), 1024.0, dtype=torch.float32, device="cpu")
            mixed = even.clone()
            mixed[:, ::2] *= -1  # so that their mean is 0
            added, same, factors = (twin(states)[0] for states in (even * 0, even, mixed))
            factors = (factors - added) * mixed[0].sign()
            centred = torch.allclose(same, added, rtol=1e-5, atol=1e-5)
            lift = next((lift for lift in LIFTS if torch.allclose(factors, drawn + lift, rtol=1e-5, atol=1e-5)), None)
        if lift is None or weight.shape != drawn.shape:
            raise Unusual(f"a norm {type(norm).__name__}")
        if bias is None and "bias" in norm._parameters:
            self._live.append((norm, "bias"))
        pointers = (self._numbers(norm, "weight"), None if bias is None else self._numbers(norm, "bias"))
        return _Norm(*pointers, centred, lift, float(epsilon))

    def _read(self) -> list[torch.Tensor | None]:
        """All weights that C++ has pointers to, and those whose absence it counts on."""
        return [module._parameters[name] for module, name in self._live]

    def _pointers(self) -> list[int]:
        return [0 if weight is None else weight.data_ptr() for weight in self._read()]

    def _layouts(self) -> list[object]:
        return [weight is not None and (weight.dtype, weight.shape, weight.stride()) for weight in self._read()]

    def is_unchanged(self) -> bool:
        """As `is_current`, and whether all weights have the layout that they had: slower, for once a sequence."""
        return self.is_current() and self._layouts() == self._forms

    def is_current(self) -> bool:
        """Whether all weights are where they were: moved ones have other storage, and perhaps another dtype."""
        try:
            return self._pointers() == self._places
        except (AttributeError, KeyError):  # a weight is gone
            return False

    def forward(
        self, pool: Pool, rows: Placed, logits: int | Sequence[int], start: int, stop: int, hidden: torch.Tensor | None
    ) -> Output:
        """`Model.forward`."""
        given = self._embedded(pool, rows) if hidden is None else hidden
        states = given.clone(memory_format=torch.contiguous_format)
        if states.dtype != torch.float32 or states.shape != (len(rows), self.width):  # C++ would write beyond them
            raise ModelError(
                f"the embeddings are {list(states.shape)} in {states.dtype}, and the layers take "
                f"{[len(rows), self.width]} in float32: make a new Decoder."
            )
        asked = asked_rows(logits, len(rows), states.device)
        scores = torch.empty(len(asked), self.outputs, dtype=torch.float32, device="cpu")
        keys, values, capacity = self._storage(pool)
        cosines, sines, rotated = self._turns(int(rows.numbers[1].max()) + 1)
        seen = seen_by(rows)
        lists = (rows.positions, rows.slots, seen.text, seen.first, seen.past, seen.tails)
        step = _Step(
            *(len(rows), start, stop, states.data_ptr()),
            *(part.data_ptr() for part in lists),
            *(seen.tails.shape[1], keys, values, capacity, cosines, sines, rotated),
            *(asked.data_ptr(), 0, scores.data_ptr(), threads.ours()),
        )
        each = 1 if len(rows) >= MANY else self._stack.count
        for first in range(start, max(stop, start + 1), each):
            step.start, step.stop = first, min(first + each, stop)
            step.count = len(asked) if step.stop == stop else 0
            library().decoder_step(byref(self._stack), byref(step))
        return Output(scores, states)

    def _embedded(self, pool: Pool, rows: Placed) -> torch.Tensor:
        if self._general is not None:
            return self._general(pool, rows, 0, 0, 0).hidden
        return self._looked_up(rows, self._scale)

    def _looked_up(self, rows: Placed, scale: float) -> torch.Tensor:
        states: torch.Tensor = self.embed(rows.tokens)
        return states if scale == 1 else states * scale

    def _storage(self, pool: Pool) -> tuple[int, int, int]:
        """Pointers to the pool's keys and values, and its slots."""
        first = pool.stored(0)
        if first is None or not self._pool or self._pool[0] is not first[0]:
            stored = []
            for number, layer in enumerate(self._layers):
                like = torch.empty(1, layer.key_heads, 1, layer.size, dtype=torch.float32, device="cpu")
                stored.append(pool.stored(number) or pool.store(number, like, like))
            pointers = [(c_void_p * len(stored))(*(pair[part].data_ptr() for pair in stored)) for part in (0, 1)]
            self._pool = (stored[0][0], pointers, *map(addressof, pointers), stored[0][0].shape[2])
        return self._pool[2:]

    def _turns(self, positions: int) -> tuple[int, int, int]:
        if positions > self._known:
            self._known = max(positions, min(self._context, max(POSITIONS, 1 << (positions - 1).bit_length())))
            found = self._angles(self._known)
            none = (torch.zeros(self._known, 0, dtype=torch.float32, device="cpu"),) * 2  # without rotary embedding
            tables = [tuple(part.float().contiguous() for part in found.get(kind, none)) for kind in self._kinds]
            self._widths = [table[0].shape[1] for table in tables]
            rotated = max(self._widths)
            if {*self._widths} - {0, rotated} or rotated > min(layer.size for layer in self._layers):
                raise Unusual("rotary embedding of several sizes")
            pointers = [(c_void_p * len(tables))(*(table[part].data_ptr() for table in tables)) for part in (0, 1)]
            cosines, sines = map(addressof, pointers)
            self._tables, self._turned = (tables, pointers), (cosines, sines, rotated)
        return self._turned

    def agrees(self, general: Callable[..., Output], vocabulary: int, scales: tuple[float, float], mixes: bool) -> bool:
        """Whether C++ computes what the model's own modules compute (`general`), on a short text.

        Here it is found out what the names of modules do not tell. `scales` are factors that embedded tokens and logits
        may have. `mixes`: something is computed between the embeddings and the layers.
        """
        text = [token % vocabulary for token in range(5, 5 + 3 * 24, 3)]
        pools = [Pool("cpu", capacity=32) for _ in range(2)]
        rounding = ROUGH if self._rough else ROUNDING
        with pools[0].sequence(text) as theirs, pools[1].sequence(text) as mine:
            rows = pools[0].place_text(theirs, len(text)), pools[1].place_text(mine, len(text))
            hidden = general(pools[0], rows[0], 0, 0, 0).hidden
            fits = [s for s in (1.0, scales[0]) if _error(self._looked_up(rows[1], s), hidden) <= EMBEDDED]
            if mixes or not fits:
                self._general = general
            self._scale = fits[0] if fits else 1.0
            self._turns(len(text))
            states = [hidden]
            for number in range(len(self._layers)):
                states.append(general(pools[0], rows[0], 0, number, number + 1, states[-1]).hidden)
            if not self._find_forms(pools[1], rows[1], states, rounding):
                return False
            for number in range(len(self._layers)):
                if len({stored[0].shape for pool in pools if (stored := pool.stored(number))}) > 1:
                    return False  # C++ and torch could not take turns within a sequence
            hidden = states[-1]
            expected, found = (
                run(pool, row, len(text), len(self._layers), len(self._layers), hidden).logits
                for run, pool, row in zip((general, self.forward), pools, rows, strict=True)
            )
            self._stack.scale = min((1.0, scales[1]), key=lambda scale: _error(found * scale, expected))
            return _error(found * self._stack.scale, expected) <= rounding

    def _find_forms(self, pool: Pool, rows: Placed, states: Sequence[torch.Tensor], rounding: float) -> bool:
        """Give layers the form with the least error; returns whether all others are far worse.

        All layers of a kind have the same form, or else each must show its own. `states` are those before the first
        layer, and after each.
        """

        def error(number: int, form: tuple[int, int, int]) -> float:
            if form[1] and not self._widths[self._of_kind[number]]:
                return math.inf  # there are no angles
            self._set(number, *form)
            before, after = states[number : number + 2]
            found = self.forward(pool, rows, 0, number, number + 1, before).hidden
            return _error(found - before, after - before, before.norm(dim=-1) * FINEST)

        def shows(best: float, second: float) -> bool:
            return best <= rounding and second > APART * best

        for kind in range(len(self._kinds)):
            first, *others = (number for number, other in enumerate(self._of_kind) if other == kind)
            errors = [error(first, form) for form in FORMS]
            best, second = sorted(errors)[:2]
            form = FORMS[errors.index(best)]
            # The largest error of another form is no smaller than here, so only this one need be tried in all layers.
            if shows(best, second) and all(shows(error(number, form), second) for number in others):
                self._set(first, *form)
                continue
            every = torch.tensor([errors, *([error(number, form) for form in FORMS] for number in others)])
            for worst in (every.amax(0, keepdim=True), every):
                if all(shows(*pair) for pair in worst.topk(2, largest=False).values.tolist()):
                    break
            else:
                return False
            for number, found in zip((first, *others), worst.expand_as(every), strict=True):
                self._set(number, *FORMS[int(found.argmin())])
        return True

    def _set(self, number: int, parallel: int, turned: int, paired: int) -> None:
        layer = self._layers[number]
        layer.parallel, layer.paired = parallel, paired
        layer.rotary = self._of_kind[number] if turned else -1


def _names(module: Any) -> set[str]:
    """The names of a module's parts but dropouts."""
    return {name for name, part in module._modules.items() if part is not None and not isinstance(part, nn.Dropout)}


def is_linear(kind: type) -> bool:
    """Whether modules of this class compute products and nothing else; most subclasses of Linear do more."""
    return kind is nn.Linear or kind.__name__ == "FalconLinear"


def _owns_numbers(module: Any) -> bool:
    """Whether a module has numbers of its own, beside those of its parts."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(part is not None and part.is_floating_point() for part in own)


def _error(found: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor | float = 0.0) -> float:
    """The largest relative error of a row; `slack` is added to what it is relative to."""
    errors = (found - expected).norm(dim=-1) / (expected.norm(dim=-1) + slack).clamp(min=1e-30)
    return float(errors.detach().nan_to_num(math.inf).amax())


def _is_readable(weight: torch.Tensor) -> bool:
    """Whether C++ can read a weight in place: plain numbers in float32, one after the other."""
    return is_plain(weight) and weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()


def _activation(function: Any) -> int:
    if _owns_numbers(function):
        raise Unusual(f"an activation {type(function).__name__} with weights")
    states = torch.linspace(-8, 8, 97, dtype=torch.float32, device="cpu")
    states = torch.cat([states, 12 * states])
    with torch.inference_mode():
        for number, known in enumerate(ACTIVATIONS):
            if torch.allclose(function(states), known(states), rtol=1e-4, atol=1e-5):
                return number
    raise Unusual(f"an activation {type(function).__name__}")
