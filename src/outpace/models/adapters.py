"""LoRA and other adapters, and detection of changes to a model that a Decoder uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ModelError, UnsupportedModel

FILE = "adapter_config.json"


def read_adapter(folder: Path) -> str | None:
    """The name of an adapter folder's base model; None for any other folder."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not an adapter's JSON: {error}.") from error
    if not base or not isinstance(base, str):
        raise ModelError(f"{path} names no base model. Put its folder or hub id in base_model_name_or_path.")
    return base


def base_of(model: Any) -> Any:
    """The transformers model inside a PeftModel, with adapters in its layers; any other model as it is."""
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    for name, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModel(
                f"the adapter {name!r} ({config.peft_type}) prepends virtual tokens to the prompt, which "
                "Outpace does not support. Use an adapter inside the layers, such as LoRA."
            )
    return model.get_base_model()


def adapters_of(model: Any) -> tuple[object, ...]:
    """A model's adapters, and which of them are active, layer by layer."""
    layers = [module for module in _modules(model) if "merged_adapters" in vars(module)]
    return tuple(
        (id(layer), bool(layer.disable_adapters), *map(str, layer.active_adapters), len(layer.merged_adapters))
        for layer in layers
    )


def stamp_of(model: Any) -> int:
    """A number that changes with the weights, except for changes through `.data`, which torch does not track."""
    return hash(tuple(_versions(model)))


def _modules(model: Any) -> list[Any]:
    """All modules of a model, without their names: with them, `modules()` takes milliseconds for every sequence."""
    found = {id(model): model}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return [*found.values()]


def _versions(model: Any) -> Iterator[tuple[int, int]]:
    for module in _modules(model):
        for weight in module._parameters.values():
            if weight is not None:
                yield id(weight), 0 if weight.is_inference() else weight._version
