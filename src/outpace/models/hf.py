"""The adapter to transformers. It, `mirror`, `traits`, `checking` and `whole` are all that knows its internals.

There is no code here for any particular architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel

from ..draft import chain
from ..errors import UnsupportedModel
from ..pool import Placed, Pool
from .adapter import Ends, FixedRows, Output, asked_rows
from .attention import SlotLists, without_cudnn
from .checking import Checks
from .compiling import compile_together
from .exact import ExactFunctions, Seen, seen_by
from .fusing import Fusion
from .layers import Angles, Part, Stack, Unusual
from .mirror import ATTENTION, Call, Control, FixedCache, Mask, Mirror, Outside, PoolCache, Probe, with_gates
from .packed import is_packed, is_quantized
from .products import Products
from .products import load as load_operators
from .threads import torch_too
from .traits import Traits

CHUNK = 512
ANGLES = 4096  # positions whose rotary angles are computed at a time, for which all are embedded


class HFModel:
    """A transformers causal language model behind the interface of `Model`.

    It takes the model as it is now: move it, change its dtype or add adapters before. Only one thread may use it at a
    time, which engines ensure. `check` compares a small tree with its paths, and refuses the model if they differ.
    """

    def __init__(self, model: PreTrainedModel, check: bool = True) -> None:
        self._traits = traits = Traits.of(model)
        self.name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self.vocabulary = traits.vocabulary
        self.layers = traits.layers
        self.width = traits.width
        self.context = traits.context
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.branches = traits.branches
        self.turn = traits.turn
        self.chunk = CHUNK if self.turn is None else self.context
        self.packs = self.branches and self.turn is None  # LongRoPE's angles depend on all positions of a forward pass
        self.lists = traits.lists
        self.kept: tuple[int, ...] = ()
        self.packed = is_packed(model)
        self.quantized = is_quantized(model)

        self._mirror = Mirror(ATTENTION if traits.own_attention else traits.dense_attention).of(model)
        self._control = Control(self.layers)
        self._fusion = Fusion()
        self._products = Products()
        modules = [*self._mirror.modules()]
        self._hooks = [_global_forward_hooks, _global_forward_pre_hooks]
        self._hooks += [hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._exact = False
        self._stack: Stack | None = None  # computes the layers instead of the mirror
        self._was_native = False
        self._calls: list[Call] = []  # of attention by layers, if they call ours
        self._kinds = set(traits.layer_types)
        self.kinds = tuple(sorted({kind: layer for layer, kind in enumerate(traits.layer_types)}.values()))
        self._decoder, self._gates = with_gates(self._mirror, traits.layer_types, self._control)
        self._outside = [
            Outside(child, self._control)
            for child in self._decoder.children()  # mainly norms
            if not isinstance(child, nn.ModuleList | nn.Embedding) and any(True for _ in child.parameters())
        ]
        if check:
            self._check(model)

    def _check(self, model: PreTrainedModel) -> None:
        """Reject the model if a comparison fails."""
        checks = Checks(self, model, self._traits)
        checks.masks()
        self.lists = self.lists and self._passes_lists()
        if self.quantized and self.lists:  # states are rounded to 8 bits, which magnifies any other difference
            self.compute_exactly()
            try:
                checks.paths()
            except UnsupportedModel:  # perhaps by exact mode alone
                self.unfuse()
                checks.paths()
        else:
            checks.paths()
        checks.logits()

    def _passes_lists(self) -> bool:
        """Whether layers pass lists on to attention as they are, and the keys there are as large as the values."""
        self._control.calls = calls = list[Call]()
        pool = Pool(self.device, capacity=1)
        try:
            with pool.sequence([0]) as sequence:
                self.forward(pool, pool.place_text(sequence, 1), logits=0)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a layer computes with its mask
            return False
        finally:
            self._control.calls = None
        self._calls = calls
        return all(call.keys == call.values for call in calls)

    def compile_layers(self) -> None:
        """From now on `forward` accepts `compiled`. Layers of one kind share compiled code."""
        if self.device.type == "cpu":
            run = compile_together([gate.layer for gate in self._gates], whole=self._exact)
            for gate in self._gates:
                gate.run_compiled = partial(run, gate.layer)
        else:
            for gate in self._gates:
                gate.compile()
            for outside in self._outside:
                outside.compile(self._gates[-1].options())

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

    def uncomputed(self) -> str:
        """The first linear layer that none of our kernels computes; empty if there is none."""
        layers = [(f"layer {number}", gate.layer) for number, gate in enumerate(self._gates)]
        for place, part in (*layers, ("the output head", self._mirror.get_output_embeddings())):
            for name, module in part.named_modules():
                if type(module) is nn.Linear:
                    shape = f"{module.in_features} inputs, {module.out_features} outputs"
                    return f"{name} of {place} ({shape})" if name else f"{place} ({shape})"
        return ""

    def compute_exactly(self) -> None:
        """On a CPU in float32: from now on a row has the same bits in any batch. `unfuse` undoes it.

        Call it before `compile_layers`.
        """
        self._products.undo()
        load_operators()
        self._exact = True

    def compute_natively(self) -> bool:
        """From now on compute all layers in one call of C++ code, if it supports them; returns whether it does.

        Weights stay where they are. `unfuse` undoes it. A model with hooks is left to torch, which calls them.
        """
        self._stack = None
        if not self._traits.common or self.turn is not None or any(self._hooks):
            return False
        try:
            calls = self._calls if len(self._calls) == self.layers else [None] * self.layers
            layers = [
                Part(gate.layer, gate.kind, self._traits.windows.get(gate.kind) or 0, call)
                for gate, call in zip(self._gates, calls, strict=True)
            ]
            stack = Stack(self.ends(), layers, self.width, self.context, self._angles, self._traits.softcap)
            general = self._by_torch
            fits = not self._counts_positions() and stack.agrees(
                general, self.vocabulary, self._traits.scales, self._mixes_embeddings()
            )
        except (Unusual, UnsupportedModel, AttributeError, KeyError, RuntimeError, TypeError):  # a part is another one
            fits = False
        self._stack = stack if fits else None
        self._was_native |= fits
        return fits

    def _mixes_embeddings(self) -> bool:
        """Whether something with weights, like learned positions, is computed between the embeddings and the layers."""
        embed, norm, _ = self.ends()
        others = (child for child in self._decoder.children() if child not in (embed, norm))
        return any(True for child in others if not isinstance(child, nn.ModuleList) for _ in child.parameters())

    def _counts_positions(self) -> bool:
        """Whether layers compute with positions in another way than by rotary angles: Ministral 3 scales queries."""
        pool, found = Pool(self.device, capacity=16), []
        with pool.sequence([5, 8, 11]) as sequence:
            rows = pool.place_text(sequence, 3)
            for ahead in (0, self.context - 4, (self.context - 4) // 3):
                self._control.ahead = ahead
                try:
                    found.append(self.forward(pool, rows, 3).logits)
                finally:
                    self._control.ahead = 0
        return not all(torch.equal(found[0], other) for other in found[1:])

    @property
    def native(self) -> bool:
        """Whether it was given to C++ code to compute."""
        return self._stack is not None

    def _is_native(self) -> bool:
        """Whether C++ code computes the layers. If weights have moved, it is made again."""
        if self._stack is None or any(self._hooks):
            return False
        return self._stack.is_current() or self.compute_natively()

    @property
    def outdated(self) -> bool:
        """Whether C++ code computed the layers, and cannot any more, as the model has been changed."""
        if not self._was_native:
            return False
        if self._stack is not None and not self._stack.is_unchanged():
            self.compute_natively()
        return not self._is_native()

    @torch.inference_mode()
    def _angles(self, count: int) -> Angles:
        """The rotary angles of the first `count` positions, by type of layer, as the decoder passes them."""
        pool = Pool(self.device, capacity=1)
        with pool.sequence([0]) as sequence:
            cache = PoolCache(pool, pool.place_text(sequence, 1))
        parts: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
        try:
            for start in range(0, count, ANGLES):
                some = torch.arange(start, min(count, start + ANGLES), device=self.device)[None]
                parts.append({})
                self._control.angles, self._control.hidden = parts[-1], None
                with self._functions():
                    self._mirror(
                        input_ids=torch.zeros_like(some),
                        position_ids=some,
                        past_key_values=cache,
                        attention_mask=torch.zeros_like(some),
                        logits_to_keep=1,
                    )
        finally:
            self._control.clear()
        tables = {kind: zip(*(part[kind] for part in parts), strict=True) for kind in parts[0]}
        return {kind: (torch.cat(next(pair)), torch.cat(next(pair))) for kind, pair in tables.items()}

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
        last = self.layers if stop is None else stop
        if isinstance(rows, Placed) and self._is_native():
            return self._by_stack(pool, rows, logits, start, last, hidden)
        with torch_too():
            return self._by_torch(pool, rows, logits, start, last, hidden, compiled)

    @torch.inference_mode()
    def _by_torch(
        self,
        pool: Pool,
        rows: Placed | FixedRows,
        logits: int | Sequence[int],
        start: int,
        stop: int,
        hidden: torch.Tensor | None = None,
        compiled: bool = False,
    ) -> Output:
        asked = asked_rows(logits, len(rows), self.device)
        control = self._control
        control.start, control.stop = start, stop
        # A copy has the same layout as a layer's output, so nothing is compiled again for it.
        control.hidden = None if hidden is None else hidden[None].clone()
        control.cache = FixedCache(pool, rows) if isinstance(rows, FixedRows) else PoolCache(pool, rows)
        control.compiled = compiled and pool.stored(start) is not None  # the first forward pass allocates storage
        control.steady = isinstance(rows, FixedRows) and rows.lists.exact and len(asked) > 0
        arguments: dict[str, Any] = {
            "input_ids": rows.tokens[None],
            "past_key_values": control.cache,
            "use_cache": True,
        }
        if self._traits.takes_positions:
            arguments["position_ids"] = rows.positions[None]
        if self._traits.takes_logits_to_keep:
            arguments["logits_to_keep"] = asked
        if isinstance(rows, FixedRows):
            control.masks = self._windowed(rows.lists)
            arguments["attention_mask"] = rows.tokens[None, None, None]  # four dimensions: passed on as it is
        elif self._exact:
            control.masks = self._windowed(seen_by(rows))
            arguments["attention_mask"] = rows.tokens[None, None, None]
        elif self.branches:
            masks = self._masks(rows)
            control.masks = {**masks}
            arguments["attention_mask"] = next(iter(masks.values()))
            if control.calls is not None:
                control.masks = {kind: Probe(mask, control.calls) for kind, mask in masks.items()}
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
        return Output(scores if self._traits.takes_logits_to_keep else scores[asked], left)

    def _by_stack(
        self,
        pool: Pool,
        rows: Placed,
        logits: int | Sequence[int],
        start: int,
        stop: int,
        hidden: torch.Tensor | None,
    ) -> Output:
        stack = self._stack
        assert stack is not None
        kept = self.kept if (start, stop) == (0, self.layers) else ()
        behind: dict[int, torch.Tensor] = {}
        for layer in sorted(kept):
            hidden = behind[layer] = stack.forward(pool, rows, 0, start, layer, hidden).hidden
            start = layer
        output = stack.forward(pool, rows, logits, start, stop, hidden)
        if not kept:
            return output
        return output._replace(hidden=torch.cat([output.hidden, *(behind[layer] for layer in kept)], -1))

    def _windowed(self, lists: SlotLists | Seen) -> dict[str, Mask]:
        """What rows see, with the window of each type of layer."""
        return {kind: lists._replace(window=self._traits.windows.get(kind) or 0) for kind in self._kinds}

    def _masks(self, rows: Placed) -> dict[str, torch.Tensor]:
        """The attention mask [1, 1, rows, slots] by type of layer."""
        masks: dict[str, torch.Tensor] = {}
        for kind in self._kinds:
            sees = rows.sees & self._traits.inside(kind, rows.positions[:, None], rows.slot_positions)
            if not self._traits.own_attention:  # the model's own attention adds the mask to its scores
                sees = torch.zeros_like(sees, dtype=self.dtype).masked_fill(~sees, torch.finfo(self.dtype).min)
            masks[kind] = sees[None, None]
        return masks


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
