"""A mirror of a transformers model: the same weights, run on any rows and any range of layers.

A mirror's modules are shallow copies that share every weight, so that the user's modules stay unchanged. Each decoder
layer is wrapped in a Gate, which can skip it and passes it its mask, and attention goes through `attend`. One ordinary
forward pass then runs the architecture's own embeddings, rotary tables, norms and scalings.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from ..errors import UnsupportedModel
from ..pool import Placed, Pool
from .adapter import FixedRows
from .attention import SlotLists, attend_by_mask
from .exact import Seen, attend_exactly
from .gated import GatedMLP
from .traits import ELSEWHERE

ATTENTION = "outpace"  # the name under which `attend` is registered with transformers
STEADY = 256  # rows at a time outside of layers, in exact mode on a GPU


class Call(NamedTuple):
    """What a layer passes to attention."""

    keys: int  # their size
    values: int
    softcap: float  # 0: none


class Probe(NamedTuple):
    """A mask in the form of lists, to test at load whether layers pass it to attention unchanged."""

    mask: torch.Tensor
    calls: list[Call]  # by layer


Mask: TypeAlias = "torch.Tensor | SlotLists | Seen | Probe"
"""What rows attend to: [1, 1, rows, slots], as bool or to be added to the scores, or as lists."""


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, rows, size]
    key: torch.Tensor,  # [1, kv heads, slots, size]
    value: torch.Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [heads] attention sinks
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of rows over the slots that each may attend to: the reference for every faster kernel."""
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a bias by position to attention, which is not supported.")
    if isinstance(attention_mask, Probe):
        attention_mask.calls.append(Call(key.shape[-1], value.shape[-1], softcap or 0.0))
        attention_mask = attention_mask.mask
    if isinstance(attention_mask, SlotLists | Seen):
        if s_aux is not None:
            raise UnsupportedModel(f"{type(module).__name__} has attention sinks, which slot lists do not support.")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(attention_mask, Seen):
            return attend_exactly(query, key, value, attention_mask, scale, softcap or 0.0), None
        mixed = torch.ops.outpace.slot_attention(query, key, value, *attention_mask, scale, softcap or 0.0)
        return mixed, None
    if softcap is None and s_aux is None:
        return attend_by_mask(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~attention_mask, -math.inf)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)


class Mirror:
    """Copies modules, sharing every parameter."""

    def __init__(self, attention: str) -> None:
        self._attention = attention
        self._configs: dict[int, Any] = {}  # deepcopy's memo: shared configs stay shared
        self._copies: dict[int, nn.Module] = {}

    def of(self, module: Any) -> Any:
        known = self._copies.get(id(module))
        if known is not None:
            return known
        twin = self._copies[id(module)] = copy.copy(module)
        twin._modules = {name: child and self.of(child) for name, child in module._modules.items()}
        twin._buffers = dict(module._buffers)  # rotary tables may be replaced as they grow, but not the user's
        twin.training = False
        config = module.__dict__.get("config")
        if config is not None:
            twin.config = copy.deepcopy(config, self._configs)
            twin.config._attn_implementation = self._attention
        return twin


class Control:
    """What the gates of one mirror read during a forward pass, and the hidden states that they keep."""

    def __init__(self, layers: int) -> None:
        self.last = layers - 1
        self.kept: tuple[int, ...] = ()  # hidden states after these layers are kept too
        self.seen: dict[int, Any] | None = None  # the decoder's own masks, by layer
        self.calls: list[Call] | None = None  # of attention, where wanted
        self.ahead = 0  # added to the positions that layers get, but not to their rotary angles
        self.clear()

    def clear(self) -> None:
        self.start = self.stop = 0
        self.hidden: torch.Tensor | None = None
        self.behind: dict[int, torch.Tensor] = {}
        self.masks: dict[str, Mask] = {}
        self.cache: PoolCache | FixedCache | None = None
        self.compiled = False
        self.steady = False
        self.angles: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None  # if wanted, by type of layer


class Outside:
    """Takes the place of the `forward` of a module outside of layers, such as the last norm.

    In exact mode torch's own kernels get states padded with zeros to a fixed number of rows, because the order of
    summation within a row depends on that number. Compiled ones do not need it.
    """

    def __init__(self, module: nn.Module, control: Control) -> None:
        self._run, self._control = module.forward, control
        self._run_compiled: Any = None
        self._compiles = not isinstance(module, nn.Linear) and not [*module.children()]
        module.forward = self

    def compile(self, options: dict[str, Any]) -> None:
        """If it is a module without others: a norm, not a projection."""
        if self._compiles:
            self._run_compiled = torch.compile(self._run, dynamic=True, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        control = self._control
        floats = bool(args) and torch.is_floating_point(args[0])
        if floats and control.compiled and self._run_compiled is not None:
            return self._run_compiled(*args, **kwargs)
        if not (floats and control.steady):
            return self._run(*args, **kwargs)
        states, *others = args
        parts = []
        for part in torch.split(states, STEADY, -2):
            filled = F.pad(part, (0, 0, 0, STEADY - part.shape[-2]))
            parts.append(self._run(filled, *others, **kwargs)[..., : part.shape[-2], :])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


class Gate(nn.Module):
    """Wraps a decoder layer: runs or skips it, and passes it the mask of its type."""

    def __init__(self, layer: nn.Module, index: int, kind: str, control: Control) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.kind = kind
        self.control = control
        self.returns_tuple = False
        self.run_compiled: Any = None
        names = list(inspect.signature(layer.forward).parameters)
        self.mask_place = names.index("attention_mask") - 1  # among positional arguments, after hidden states

    def options(self) -> dict[str, Any]:
        """Options of the compiler for this layer."""
        # Independent small kernels are merged. Reductions are not autotuned, so that bits are the same in every
        # process; nor are other kernels, because that delayed the first step and made no step faster.
        options: dict[str, Any] = {"combo_kernels": True, "deterministic": True, "triton.autotune_pointwise": False}
        # With our kernels' dependent launch, compiled ones use it too; not in other layers (`docs/design.md`).
        if any(isinstance(child, GatedMLP) for child in self.layer.children()):
            options["triton.enable_pdl"] = True
        return options

    def compile(self) -> None:
        # Dynamic, so that one compilation serves any number of rows.
        self.run_compiled = torch.compile(self.layer, dynamic=True, options=self.options())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["layer"], name)  # decoders read attributes of their layers

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        control = self.control
        if control.angles is not None and kwargs.get("position_embeddings") is not None:
            cosines, sines = kwargs["position_embeddings"]
            control.angles[self.kind] = cosines[0], sines[0]
        if control.ahead and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] + control.ahead
        if self.index == 0 and control.hidden is not None:
            hidden = control.hidden  # rows that continue from a middle layer need no embeddings
        if control.seen is not None:
            here = self.mask_place
            control.seen[self.index] = args[here] if len(args) > here else kwargs.get("attention_mask")
        output: Any = (hidden,) if self.returns_tuple else hidden
        if control.start <= self.index < control.stop:
            mask = control.masks.get(self.kind)
            if mask is not None and len(args) > self.mask_place:
                args = (*args[: self.mask_place], mask, *args[self.mask_place + 1 :])
            elif mask is not None:
                kwargs["attention_mask"] = mask
            if control.cache is not None:
                control.cache.enter(self.index)
            run = self.run_compiled if control.compiled else self.layer
            with _known_floats() if control.compiled and self.index == control.start else nullcontext():
                output = run(hidden, *args, **kwargs)
            self.returns_tuple = isinstance(output, tuple)
            hidden = output[0] if self.returns_tuple else output
        if self.index == control.last:
            control.hidden = hidden
        elif self.index + 1 in control.kept:
            control.behind[self.index + 1] = hidden
        return output


def _known_floats() -> AbstractContextManager[object]:
    """Compile the first layer's floats as constants: as variables they would cause a second trace.

    If later layers have other values, these become variables then.
    """
    patch: AbstractContextManager[object] = torch._dynamo.config.patch(specialize_float=True)
    return patch


class PoolCache:
    """The pool as transformers' attention layers see it (a Cache), for one forward pass."""

    is_compileable = False

    def __init__(self, pool: Pool, rows: Placed | FixedRows) -> None:
        self._pool = pool
        self.slots = rows.slots
        self.seen = pool.used  # slots from here on are empty
        self.before = pool.used - len(rows)

    def enter(self, layer: int) -> None:
        """The next `update` belongs to this layer."""
        self.layer = layer
        self.stored = self._pool.stored(layer)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self.stored
        if stored is None:
            stored = self._pool.store(self.layer, key_states, value_states)
        keys, values = stored
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return keys[:, :, : self.seen], values[:, :, : self.seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.before

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.seen, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]  # the pool keeps every position; masks implement sliding windows


class FarCache:
    """A cache that claims to have this many tokens, none of which is read."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.length + 1, 0


class FixedCache(PoolCache):
    """The same for rows in static buffers: attention gets the whole pool, so nothing here depends on the step."""

    def __init__(self, pool: Pool, rows: FixedRows) -> None:
        super().__init__(pool, rows)
        self.seen = pool.capacity + 1
        self.before = 0


def with_gates(mirror: Any, kinds: Sequence[str], control: Control) -> tuple[nn.Module, list[Gate]]:
    """Wrap the layers of a mirror; returns the module that has them, and the gates."""
    for root in (mirror.get_decoder(), mirror):  # transformers does not find every decoder
        found = [
            (module, name, child)
            for module in root.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == len(kinds) and _attends(child[0])
        ]
        if found:
            break
    else:
        raise UnsupportedModel(
            f"{type(mirror).__name__} does not keep its {len(kinds)} layers in a list that Outpace can find, each of "
            f"which takes an attention_mask and a KV cache. {ELSEWHERE}"
        )
    decoder, name, layers = found[0]
    gates = [Gate(layer, index, kind, control) for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True))]
    decoder._modules[name] = nn.ModuleList(gates)
    return decoder, gates


def _attends(layer: nn.Module) -> bool:
    """Whether a module takes a mask and a KV cache, by whatever name; layers for images do not."""
    names = inspect.signature(layer.forward).parameters
    return "attention_mask" in names and any("past" in name or "cache" in name for name in names)
