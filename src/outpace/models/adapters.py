"""LoRA and other adapters, and detection of changes to a model that a Decoder uses."""

from __future__ import annotations

import json
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


class Watch:
    """Notices changes to a model that a Decoder uses.

    Asked before every sequence, while the device waits: walking 400 modules would take a millisecond. So what was found
    there is kept, and compared: all modules' own dictionaries of children and weights stay the same objects.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._walk()

    def adapters(self) -> tuple[object, ...]:
        """The model's adapters, which of them are active, and their scales, which graphs contain, layer by layer."""
        if [[*children.values()] for children in self._children] != self._known:
            self._walk()
        return tuple(
            (
                *(id(layer), bool(layer.disable_adapters), len(layer.merged_adapters)),
                *(*map(str, layer.active_adapters), *getattr(layer, "scaling", {}).values()),
            )
            for layer in self._adapted
        )

    def stamp(self) -> int:
        """A number that changes with the weights, except for changes through `.data`, which torch does not track.

        Of the modules that `adapters` has seen.
        """
        weights = [weight for own in self._weights for weight in own.values() if weight is not None]
        try:
            versions = [weight._version for weight in weights]
        except RuntimeError:  # weights made in inference mode have none. Asking each releases the interpreter lock.
            versions = [weight._version for weight in weights if not weight.is_inference()]
        return hash((*map(id, weights), *versions))

    def _walk(self) -> None:
        modules = [*self._model.modules()]
        self._children: list[dict[str, Any]] = [module._modules for module in modules]
        self._known = [[*children.values()] for children in self._children]
        self._weights: list[dict[str, Any]] = [module._parameters for module in modules]
        self._adapted: list[Any] = [module for module in modules if "merged_adapters" in vars(module)]
