"""The adapter to transformers; with `whole.py`, the only module that knows its internals.

A model's modules are mirrored: shallow copies that share every weight, so that the user's modules stay unchanged. In
the mirror each decoder layer is wrapped in a Gate, which can skip it and passes it its mask, and attention goes through
`attend`. One ordinary forward pass of the mirror then runs any range of layers on any rows, with the architecture's own
embeddings, rotary tables, norms and scalings. There is no code here for any particular architecture.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from ..draft import Draft, Tree, chain
from ..errors import UnsupportedModel
from ..pool import Placed, Pool
from .adapter import Ends, FixedRows, Output, asked_rows
from .attention import SlotLists, attend_by_mask, without_cudnn
from .compiling import compile_together
from .exact import ExactFunctions, Seen, attend_exactly, seen_by
from .fusing import Fusion
from .gated import GatedMLP
from .layers import Angles, Stack, Unusual
from .packed import is_packed
from .products import Products
from .products import load as load_operators

ATTENTION = "outpace"  # the name under which `attend` is registered with transformers
CHUNK = 512
STEADY = 256  # rows at a time outside of layers, in exact mode on a GPU
ROUNDING = 1e-3  # relative differences of logits below this count as rounding
_ELSEWHERE = "Use transformers' own generate for it."
FARTHEST = 2**16  # tokens of a text for which masks are compared
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

Mask: TypeAlias = "torch.Tensor | SlotLists | Seen"
"""What rows see: [1, 1, rows, slots], as bool or to be added to the scores, or as lists."""


class HFModel:
    """A transformers causal language model behind the interface of `Model`.

    It takes the model as it is now: move it, change its dtype or add adapters before. Only one thread may use it at a
    time, which engines ensure. `check` compares a small tree with its paths, and refuses the model if they differ.
    """

    def __init__(self, model: PreTrainedModel, check: bool = True) -> None:
        _refuse_what_cannot_work(model)
        config = model.config.get_text_config()
        self.name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self.vocabulary: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self.width: int = config.hidden_size
        self.context: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.turn = _longrope_threshold(config)  # the position at which all angles change, if there is one
        self.chunk = CHUNK if self.turn is None else self.context

        self._takes_positions = _takes_positions(model)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.branches = self._takes_positions and not _counts_slots(config)
        # Where rows form a chain, masks are the model's own, for its own attention.
        self._own_attention = self.branches and bool(getattr(model, "_supports_attention_backend", False))
        self._mirror = _Mirror(ATTENTION if self._own_attention else _dense_attention(model)).of(model)
        self._control = _Control(self.layers)
        self._fusion = Fusion()
        self._products = Products()
        self._exact = False
        self.kept: tuple[int, ...] = ()
        self.packed = is_packed(model)
        self._stack: Stack | None = None  # computes the layers instead of the mirror
        self._softcap = float(getattr(config, "final_logit_softcapping", None) or 0)
        self._layer_types = _layer_types(config)
        self._kinds = set(self._layer_types)
        self._windows = {SLIDING: getattr(config, "sliding_window", None)}
        self._windows[CHUNKED] = getattr(config, "attention_chunk_size", None)
        self._decoder, self._gates = _with_gates(self._mirror, self._layer_types, self._control)
        for child in self._decoder.children():  # mainly norms
            if not isinstance(child, nn.ModuleList | nn.Embedding) and any(True for _ in child.parameters()):
                child.forward = partial(self._control.run_steadily, child.forward)
        self.packs = self.branches and self.turn is None  # LongRoPE's angles depend on all positions of a forward pass
        self.lists = self._own_attention and _takes_lists(model, self._kinds)
        if check:
            self._check_masks(model)
            if self.packed and self.lists:  # states are rounded to 8 bits, which magnifies any other difference
                self.compute_exactly()
                try:
                    self._check()
                except UnsupportedModel:  # perhaps by exact mode alone
                    self.unfuse()
                    self._check()
            else:
                self._check()
            self._compare(model)

    def compile_layers(self) -> None:
        """From now on `forward` accepts `compiled`. Layers of one kind share compiled code."""
        if self.device.type == "cpu":
            run = compile_together([gate.layer for gate in self._gates], whole=self._exact)
            for gate in self._gates:
                gate.run_compiled = partial(run, gate.layer)
        else:
            for gate in self._gates:
                gate.compile()

    def fuse(self) -> int:
        """Fuse projections with the same input; returns how many products that saves.

        The model's own weights become views of the fused ones: same values, no second copy. `unfuse` undoes it.
        """
        return self._fusion.fuse(self._mirror)

    def replace_products(self, always: bool = False) -> int:
        """Replace linear layers and MLPs by our own kernels, if there are any; returns how many. `unfuse` undoes it.

        `always`: for any number of rows, on a GPU. Call `fuse` first: fused projections may be computed together with
        what follows them.
        """
        return self._products.replace(self._mirror, always)

    def compute_exactly(self) -> None:
        """On a CPU in float32: from now on a row has the same bits in any batch. `unfuse` undoes it.

        Call it before `compile_layers`.
        """
        self._products.undo()
        load_operators()
        self._exact = True

    def compute_packed(self) -> bool:
        """From now on compute all layers in one call of C++ code, if it supports them; returns whether it does.

        Call `compute_exactly` before, for other layers.
        """
        try:
            layers = [(gate.layer, gate.kind, self._windows.get(gate.kind) or 0) for gate in self._gates]
            stack = Stack(self.ends(), layers, self.width, self._angles, self._softcap)
            fits = self.lists and stack.agrees(self.forward, self.vocabulary, self.layers)
        except (Unusual, UnsupportedModel, AttributeError):  # a missing part
            fits = False
        self._stack = stack if fits else None
        return fits

    @torch.inference_mode()
    def _angles(self, count: int) -> Angles:
        """The rotary angles of the first `count` positions, by type of layer, as the decoder passes them."""
        pool = Pool(self.device, capacity=1)
        tokens = torch.zeros(1, count, dtype=torch.long)
        with pool.sequence([0]) as sequence:
            cache = _PoolCache(pool, pool.place_text(sequence, 1))
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._control.angles = found
        try:
            with self._functions():
                self._mirror(
                    input_ids=tokens,
                    position_ids=torch.arange(count)[None],
                    past_key_values=cache,
                    attention_mask=tokens[None],
                    logits_to_keep=1,
                )
        finally:
            self._control.clear()
        return found

    def unfuse(self) -> None:
        """Undo all of these: the model's weights get memory of their own again, and torch computes the products."""
        self._products.undo()
        self._fusion.undo()
        self._exact = False
        self._stack = None
        if self._gates[0].run_compiled is not None:
            self.compile_layers()  # compiled code was made from the fused modules

    def keep(self, layers: Sequence[int]) -> None:
        self.kept += tuple(layer for layer in layers if layer not in self.kept and layer < self.layers)
        self._control.kept = self.kept

    def part(self, hidden: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        if not layers:
            return hidden[..., : self.width]
        every = hidden.view(*hidden.shape[:-1], -1, self.width)
        order = (self.layers, *self.kept)
        return torch.stack([every[..., order.index(layer), :] for layer in layers])

    def ends(self) -> Ends:
        head = self._mirror.get_output_embeddings()
        return Ends(self._mirror.get_input_embeddings(), self._decoder.get_submodule(self.norm), head)

    @cached_property
    def norm(self) -> str:
        """The name, within the decoder, of the module between the last layer and the output head."""
        read: list[torch.Tensor] = []
        pool = Pool(self.device, capacity=16)
        stack, self._stack = self._stack, None
        with self._products.at_rest(), pool.sequence([1, 2, 3]) as sequence:
            head = self._mirror.get_output_embeddings()  # the one that `forward` uses, on a GPU and on a CPU
            hook = head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
            try:
                output = self.forward(pool, pool.place(sequence, chain(3, (), "")), logits=1)
                left = self.part(output.hidden, ())[None, -1:]
            finally:
                hook.remove()
                self._stack = stack
        with self._functions():
            for name, child in self._decoder.named_children():
                if not isinstance(child, nn.ModuleList) and _maps(child, left, read[0]):
                    return str(name)
        raise UnsupportedModel(
            f"{self.name}: no module maps the last layer to the output head, so heads cannot draft for it."
        )

    def _functions(self) -> AbstractContextManager[object]:
        """The context in which the mirror runs: exact mode replaces functions of torch."""
        return ExactFunctions(self.name) if self._exact else nullcontext()

    @contextmanager
    def _parts(self, rows: Placed | FixedRows) -> Iterator[None]:
        """What computes these rows. On a GPU, rows outside static buffers do not wait for compilation."""
        if self.device.type != "cuda" or isinstance(rows, FixedRows):
            yield
            return
        with self._products.at_rest(), without_cudnn():
            yield

    def room(self, position: int) -> int:
        room = self.context - 1 - position
        if self.turn is not None and position < self.turn:
            # These models change all angles once any row is past the threshold; plain decoding gets there later.
            room = min(room, self.turn - 1 - position)
        return max(room, 0)

    def rooms(self, positions: torch.Tensor) -> torch.Tensor:
        """`room` for each of several positions."""
        rooms = self.context - 1 - positions
        if self.turn is not None:
            rooms = torch.where(positions < self.turn, rooms.clamp(max=self.turn - 1 - positions), rooms)
        return rooms.clamp(min=0)

    @torch.inference_mode()
    def forward(
        self,
        pool: Pool,
        rows: Placed | FixedRows,
        logits: int | Sequence[int],
        start: int = 0,
        stop: int | None = None,
        hidden: torch.Tensor | None = None,
        compiled: bool = False,
    ) -> Output:
        if self._stack is not None and isinstance(rows, Placed):
            return self._by_stack(self._stack, pool, rows, logits, start, stop, hidden)
        asked = asked_rows(logits, len(rows), self.device)
        control = self._control
        control.start, control.stop = start, self.layers if stop is None else stop
        # A copy has the same layout as a layer's output, so nothing is compiled again for it.
        control.hidden = None if hidden is None else hidden[None].clone()
        control.cache = _FixedCache(pool, rows) if isinstance(rows, FixedRows) else _PoolCache(pool, rows)
        control.compiled = compiled and pool.stored(start) is not None  # the first forward pass allocates storage
        control.steady = isinstance(rows, FixedRows) and rows.lists.exact and len(asked) > 0
        arguments: dict[str, Any] = {
            "input_ids": rows.tokens[None],
            "past_key_values": control.cache,
            "use_cache": True,
        }
        if self._takes_positions:
            arguments["position_ids"] = rows.positions[None]
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = asked
        if isinstance(rows, FixedRows):
            control.masks = {kind: rows.lists._replace(window=self._windows.get(kind) or 0) for kind in self._kinds}
            arguments["attention_mask"] = rows.tokens[None, None, None]  # four dimensions: passed on as it is
        elif self._exact:
            seen = seen_by(rows)
            control.masks = {kind: seen._replace(window=self._windows.get(kind) or 0) for kind in self._kinds}
            arguments["attention_mask"] = rows.tokens[None, None, None]
        elif self.branches:
            control.masks = self._masks(rows)
            arguments["attention_mask"] = next(iter(control.masks.values()))
        else:
            arguments["attention_mask"] = torch.ones(1, pool.used, dtype=torch.long, device=self.device)
        try:
            with self._functions(), self._parts(rows):
                result = self._mirror(**arguments)
            left = cast(torch.Tensor, control.hidden)
            if self.kept and start == 0 and control.stop == self.layers:
                left = torch.cat([left, *(control.behind[layer] for layer in self.kept)], -1)
            left = _by_rows(left, len(rows))
        finally:
            control.clear()
        scores = result.logits[0]
        return Output(scores if self._takes_logits_to_keep else scores[asked], left)

    def _by_stack(
        self,
        stack: Stack,
        pool: Pool,
        rows: Placed,
        logits: int | Sequence[int],
        start: int,
        stop: int | None,
        hidden: torch.Tensor | None,
    ) -> Output:
        last = self.layers if stop is None else stop
        kept = self.kept if (start, last) == (0, self.layers) else ()
        behind: dict[int, torch.Tensor] = {}
        for layer in sorted(kept):
            hidden = behind[layer] = stack.forward(pool, rows, 0, start, layer, hidden).hidden
            start = layer
        output = stack.forward(pool, rows, logits, start, last, hidden)
        if not kept:
            return output
        return output._replace(hidden=torch.cat([output.hidden, *(behind[layer] for layer in kept)], -1))

    def _masks(self, rows: Placed) -> dict[str, Mask]:
        """The attention mask [1, 1, rows, slots] by type of layer."""
        masks: dict[str, Mask] = {}
        for kind in self._kinds:
            size = self._windows.get(kind)
            sees = rows.sees & _inside(kind, size, rows.positions[:, None], rows.slot_positions) if size else rows.sees
            if not self._own_attention:  # the model's own attention adds the mask to its scores
                sees = torch.zeros_like(sees, dtype=self.dtype).masked_fill(~sees, torch.finfo(self.dtype).min)
            masks[kind] = sees[None, None]
        return masks

    @property
    def _rough(self) -> bool:
        """Whether rounding shows in logits."""
        return self.packed or torch.finfo(self.dtype).bits == 16

    def _check(self) -> None:
        """Run a small tree, and its tokens one path at a time; refuse the model if the results differ.

        Architectures differ in ways that no attribute shows, and a wrong mask would change the output.
        """
        text, left, right, other = (
            [token % self.vocabulary for token in tokens] for tokens in ((11, 23, 5, 17), (31, 8), (2, 47), (71, 26))
        )
        together = self._together(text, left, right)
        if self.branches:
            apart = torch.stack([self._logits(text, chain(text[-1], path, "check"))[-1] for path in (left, right)])
        else:
            apart = self._logits([*text, *left], chain(left[-1], (), "check"), chunk=2)[[-1]]
        error = _disagreement(together, apart)
        if error < ROUNDING:
            return
        # In 16 bits, rounding depends on the number of rows. But tokens that a row must not see may be arbitrary.
        slight, limit, most = (0.03, 0.05, 0.15) if self._rough else (ROUNDING, ROUNDING, 0.01)
        seen = _disagreement(together[:1], self._together(text, left, other)[:1])
        if error >= limit:  # one path, token by token, shows how much rounding does
            alone = self._logits([*text, *left], chain(left[-1], (), "check"), chunk=1)[[-1]]
            limit = min(4 * _disagreement(apart[:1], alone), most)
        if not (error < limit and seen < slight):  # also if one is NaN
            raise UnsupportedModel(
                f"{type(self._mirror).__name__} gives other logits for several tokens at once than one by one "
                f"(relative difference {error:.2g}; {seen:.2g} by tokens that are masked), so Outpace cannot "
                f"keep its output unchanged. {_ELSEWHERE}"
            )

    def _check_masks(self, model: PreTrainedModel) -> None:
        """Refuse a model whose decoder has other masks than ours: no layer runs, so a text may be long.

        A window shows nowhere else before a text is as long.
        """
        masks: dict[int, Any] = {}
        probe = _Mirror("eager").of(model)
        control = _Control(self.layers)
        control.seen = masks
        _with_gates(probe, self._layer_types, control)
        last = min(self.context, FARTHEST) - 1
        ones = torch.ones(1, last + 1, dtype=torch.long, device=self.device)
        arguments: dict[str, Any] = {"input_ids": ones[:, :1], "attention_mask": ones, "past_key_values": _Far(last)}
        if self._takes_positions:
            arguments["position_ids"] = ones[:, :1] * last
        try:
            with torch.inference_mode():
                probe(**arguments, use_cache=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it needs layers that run: `_check` has the last word
            return
        places = torch.arange(last + 1, device=self.device)
        for layer, kind in enumerate(self._layer_types):
            mask, size = masks.get(layer), self._windows.get(kind)
            if not isinstance(mask, torch.Tensor) or mask.shape != (1, 1, 1, last + 1):
                continue
            sees = mask[0, 0, 0] if mask.dtype == torch.bool else mask[0, 0, 0] > torch.finfo(mask.dtype).min / 2
            ours = _inside(kind, size, torch.tensor(last, device=self.device), places)
            if not torch.equal(sees, ours):
                raise UnsupportedModel(
                    f"layer {layer} of {type(model).__name__} sees {int(sees.sum())} of {last + 1} tokens, and "
                    f"{int(ours.sum())} by what its configuration says of windows. {_ELSEWHERE}"
                )

    @torch.inference_mode()
    def _compare(self, model: PreTrainedModel) -> None:
        """Refuse a model that computes other logits than its mirror: some part is not what we take it for."""
        text = [token % self.vocabulary for token in (11, 23, 5, 17, 31, 8)]
        tokens = torch.tensor([text], device=self.device)
        twin = _Mirror(_dense_attention(model)).of(model)
        arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if self._takes_positions:  # as transformers' `generate` has it
            arguments["position_ids"] = torch.arange(len(text), device=self.device)[None]
        with self._foreign(), without_cudnn():
            expected = twin(**arguments, use_cache=False).logits[0]
        found = self._logits(text[:1], chain(text[0], text[1:], "check"))
        error = _disagreement(found, expected)
        if not error < (0.3 if self._rough else ROUNDING):
            raise UnsupportedModel(
                f"{type(model).__name__} computes other logits than Outpace with its layers (relative difference "
                f"{error:.2g}), so its output would change. {_ELSEWHERE}"
            )

    def _together(self, text: list[int], left: list[int], right: list[int]) -> torch.Tensor:
        """The logits after `left` and after `right`, as two branches; without branches, after `left` alone."""
        if not self.branches:
            return self._logits(text, chain(text[-1], [*left, *right], "check"))[[len(left)]]
        tree = Tree(text[-1])
        ends = [tree.insert(path, "check")[-1] for path in (left, right)]
        return self._logits(text, tree.draft())[ends]

    def _logits(self, text: list[int], draft: Draft, chunk: int | None = None) -> torch.Tensor:
        pool = Pool(self.device, capacity=16)
        with self._foreign(), pool.sequence(text) as sequence:
            while chunk and (behind := len(text) - 1 - len(sequence.slots)):
                count = min(chunk, behind)
                self.forward(pool, pool.place_text(sequence, count), logits=0)
            logits = self.forward(pool, pool.place(sequence, draft), logits=len(draft)).logits
            keys, values = pool.stored(0) or (logits, logits)
            self.lists = self.lists and keys.shape == values.shape
            return logits

    @contextmanager
    def _foreign(self) -> Iterator[None]:
        """Errors of a model that is run in a way it was not made for."""
        try:
            yield
        except (torch.OutOfMemoryError, UnsupportedModel):
            raise
        except Exception as error:
            kind = type(self._mirror).__name__
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise UnsupportedModel(f"{kind} cannot be run row by row ({reason}). {_ELSEWHERE}") from error


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
    """Attention of rows over the slots that each may see: the reference for every faster kernel."""
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a bias by position to attention, which is not supported.")
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


class _Mirror:
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


class _Control:
    """What the gates of one mirror read during a forward pass, and the hidden states that they keep."""

    def __init__(self, layers: int) -> None:
        self.last = layers - 1
        self.kept: tuple[int, ...] = ()  # hidden states after these layers are kept too
        self.seen: dict[int, Any] | None = None  # the decoder's own masks, by layer
        self.clear()

    def clear(self) -> None:
        self.start = self.stop = 0
        self.hidden: torch.Tensor | None = None
        self.behind: dict[int, torch.Tensor] = {}
        self.masks: dict[str, Mask] = {}
        self.cache: _PoolCache | _FixedCache | None = None
        self.compiled = False
        self.steady = False
        self.angles: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None  # wanted of each type of layer

    def run_steadily(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run what is outside of layers; in exact mode states are padded with zeros to a fixed number of rows.

        The order in which torch sums up a row depends on the number of rows.
        """
        if not (self.steady and args and torch.is_floating_point(args[0])):
            return run(*args, **kwargs)
        states, *others = args
        parts = []
        for part in torch.split(states, STEADY, -2):
            filled = F.pad(part, (0, 0, 0, STEADY - part.shape[-2]))
            parts.append(run(filled, *others, **kwargs)[..., : part.shape[-2], :])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


class _Gate(nn.Module):
    """Wraps a decoder layer: runs or skips it, and passes it the mask of its type."""

    def __init__(self, layer: nn.Module, index: int, kind: str, control: _Control) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.kind = kind
        self.control = control
        self.returns_tuple = False
        self.run_compiled: Any = None
        names = list(inspect.signature(layer.forward).parameters)
        self.mask_place = names.index("attention_mask") - 1  # among positional arguments, after hidden states

    def compile(self) -> None:
        # Dynamic, so that one compilation serves any number of rows. Independent small kernels are merged. Reductions
        # are not autotuned, so that bits are the same in every process; nor are other kernels, because that delayed the
        # first step and made no step faster.
        options: dict[str, Any] = {"combo_kernels": True, "deterministic": True, "triton.autotune_pointwise": False}
        # With our kernels' dependent launch, compiled ones use it too; not in other layers (`docs/design.md`).
        if any(isinstance(child, GatedMLP) for child in self.layer.children()):
            options["triton.enable_pdl"] = True
        self.run_compiled = torch.compile(self.layer, dynamic=True, options=options)

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


class _PoolCache:
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


class _Far:
    """A cache with so many tokens, none of which is looked at."""

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


class _FixedCache(_PoolCache):
    """The same for rows in static buffers: attention gets the whole pool, so nothing here depends on the step."""

    def __init__(self, pool: Pool, rows: FixedRows) -> None:
        super().__init__(pool, rows)
        self.seen = pool.capacity + 1
        self.before = 0


def _with_gates(mirror: Any, kinds: Sequence[str], control: _Control) -> tuple[nn.Module, list[_Gate]]:
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
            f"which takes an attention_mask and a KV cache. {_ELSEWHERE}"
        )
    decoder, name, layers = found[0]
    gates = [_Gate(layer, index, kind, control) for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True))]
    decoder._modules[name] = nn.ModuleList(gates)
    return decoder, gates


def _inside(kind: str, size: int | None, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Whether layers of this kind let rows at `positions` see those at `seen`, if they are before."""
    if kind == SLIDING and size:
        return positions - seen < size
    if kind == CHUNKED and size:
        return positions // size == seen // size
    return torch.ones_like(seen, dtype=torch.bool)


def _attends(layer: nn.Module) -> bool:
    """Whether a module takes a mask and a KV cache, by whatever name; layers for images do not."""
    names = inspect.signature(layer.forward).parameters
    return "attention_mask" in names and any("past" in name or "cache" in name for name in names)


def _by_rows(states: torch.Tensor, rows: int) -> torch.Tensor:
    """Hidden states as [rows, width]. Some models have several per row, in a dimension of their own."""
    if states.shape[:2] != (1, rows):
        states = states.movedim(-2, 0)
        return states.flatten(1)
    return states[0].flatten(1)


@torch.inference_mode()
def _maps(module: nn.Module, given: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        found = module(given)
    except Exception:  # some other module with another signature
        return False
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.equal(found, expected)


def _refuse_what_cannot_work(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} has an encoder; Outpace decodes causal (decoder-only) models.")
    missing = [name for name in ("vocab_size", "num_hidden_layers", "hidden_size") if not hasattr(config, name)]
    if missing:
        raise UnsupportedModel(
            f"{kind} is not one stack of layers: its configuration has no {', '.join(missing)}. {_ELSEWHERE}"
        )
    foreign = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING, CHUNKED}
    if getattr(model, "_is_stateful", False) or foreign:
        what = f"layers of type {', '.join(sorted(foreign))}" if foreign else "recurrent layers"
        raise UnsupportedModel(
            f"{kind} has {what}. Outpace needs a model whose layers keep keys and values of every token, and nothing "
            f"else: other states cannot be rolled back when a draft token is rejected. {_ELSEWHERE}"
        )
    if any("_hf_hook" in vars(module) for module in model.modules()):
        raise UnsupportedModel(
            f"{kind} was split over devices by accelerate, whose hooks Outpace does not support. "
            "Load it without device_map and move it to one device with model.to(...)."
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{kind} has no output head; load the model with AutoModelForCausalLM.")


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether `position_ids` reach the decoder, perhaps among the keywords that a wrapper passes on."""
    accepted = inspect.signature(model.forward).parameters
    passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    inner = inspect.signature(model.get_decoder().forward).parameters
    return "position_ids" in accepted or (passes_on and "position_ids" in inner)


def _takes_lists(model: PreTrainedModel, kinds: set[str]) -> bool:
    """Whether attention by slot lists computes what these layers compute."""
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    known = model.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return known and not sinks and CHUNKED not in kinds


def _counts_slots(config: Any) -> bool:
    """Whether a model derives distances from the keys' places in the cache (ALiBi, GPT-Neo's local layers).

    Then slots must be in the order of positions, as a chain's are, and a tree's are not.
    """
    return bool(getattr(config, "alibi", False) or getattr(config, "attention_layers", None))


def _dense_attention(model: PreTrainedModel) -> str:
    """transformers' implementation that is in use, if it takes a mask [rows, slots]; else the one that always does."""
    used = str(model.config._attn_implementation)
    return used if used in ("eager", "sdpa") else "eager"


def _layer_types(config: Any) -> list[str]:
    types = getattr(config, "layer_types", None)
    if types:
        return list(types)
    kind = SLIDING if getattr(config, "sliding_window", None) else FULL
    return [kind] * int(config.num_hidden_layers)


def _longrope_threshold(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    threshold = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return None if threshold is None else int(threshold)


def _disagreement(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance of two sets of logits, relative to their spread."""
    found, expected = found.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((found - expected).norm() / spread)
