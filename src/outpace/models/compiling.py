"""Compiled layers for CPUs, with few checks before each call.

torch's compiler guards compiled code: before each call it checks every fact that the code depends on. A layer has
hundreds of guards, which take milliseconds per step for thirty layers. Most are about the layer's own modules, which
belong to a mirror and never change. So layers are compared once, when one is compiled, and guards that hold for all of
them are dropped. The others remain, as do those on attributes that a layer's code assigns, on arguments, and on torch's
state.

The compiled code belongs to these layers alone; other uses of the same classes are not affected.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

# Guards on a value's form, not on its identity.
FORMS = {
    "DICT_CONTAINS",
    "DICT_KEYS_MATCH",
    "DICT_NOT_CONTAINS",
    "EMPTY_NN_MODULE_HOOKS_DICT",
    "HASATTR",
    "NOT_PRESENT_IN_GENERIC_DICT",
    "SEQUENCE_LENGTH",
    "TENSOR_MATCH",
    "TYPE_MATCH",
}


def compile_together(layers: Sequence[nn.Module], whole: bool = False) -> Callable[..., Any]:
    """A function of a layer and its arguments that runs the layer compiled, for any of these layers.

    They must not change afterwards. Shapes are dynamic: one compilation serves all layers of a kind and any number of
    rows. `whole`: raise an error if part of a layer could not be compiled.
    """
    run = types.FunctionType(
        _run.__code__.replace(), globals(), _run.__name__
    )  # its own code object, so its own compilation cache
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: _needed(guards, layers), "cpp_wrapper": True}
    return torch.compile(run, dynamic=True, fullgraph=whole, options=options)


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


def _needed(guards: Iterable[Any], layers: Sequence[nn.Module]) -> list[bool]:
    """Whether each guard must be checked before each call."""
    same_sharing = len({_sharing(layer) for layer in layers}) == 1
    changing = {name for layer in layers for name in _assigned(layer)}

    def holds(guard: Any) -> bool:
        return guard.name.rpartition(".")[2] not in changing and _holds_for_all(guard, layers, same_sharing)

    return [not (guard.is_global or holds(guard)) for guard in guards]


def _holds_for_all(guard: Any, layers: Sequence[nn.Module], same_sharing: bool) -> bool:
    """Whether a guard is about the layer itself, and holds for all layers."""
    name = guard.name
    if "layer" not in name:
        return False
    try:
        first, *others = [eval(name, {"layer": layer, "L": {"layer": layer}}) for layer in layers]
    except (AttributeError, IndexError, KeyError, NameError, SyntaxError, TypeError):
        return False
    if guard.guard_type == "DUPLICATE_INPUT":
        return same_sharing
    alike = _same_form if guard.guard_type in FORMS else _same
    return all(alike(first, other) for other in others)


def _same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    plain = isinstance(one, bool | int | float | str | None)
    return one is other or (plain and type(one) is type(other) and bool(one == other))


def _same_form(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return all(
            getattr(one, name) == getattr(other, name) for name in ("shape", "dtype", "device", "requires_grad")
        ) and (one.stride() == other.stride())
    if isinstance(one, dict):
        return list(one) == list(other)
    if isinstance(one, list | tuple | set):
        return len(one) == len(other)
    return vars(one).keys() == vars(other).keys() if hasattr(one, "__dict__") else True


def _assigned(layer: nn.Module) -> set[str]:
    """The attributes that the layer's own code may assign later."""
    kinds = {kind for part in layer.modules() for kind in type(part).__mro__} - set(nn.Module.__mro__)
    functions = [item for kind in kinds for item in vars(kind).values() if isinstance(item, types.FunctionType)]
    return {
        str(step.argval)
        for function in functions
        if function.__name__ != "__init__"
        for step in dis.get_instructions(inspect.unwrap(function))
        if step.opname == "STORE_ATTR"
    }


def _sharing(layer: nn.Module) -> tuple[int, ...]:
    """Which of a layer's modules and weights are the same object, as indices of first occurrences."""
    parts = [part for _, part in layer.named_modules(remove_duplicate=False)]
    weights = [weight for _, weight in layer.named_parameters(remove_duplicate=False)]
    ids = [id(item) for item in (*parts, *weights)]
    return tuple(ids.index(item) for item in ids)
