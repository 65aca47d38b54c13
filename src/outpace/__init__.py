"""Outpace: lossless speculative decoding for Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder import Batch, Decoder, load
    from .draft import Draft, Scores, Step, Tree, Verdict
    from .errors import (
        BatchError,
        FetchError,
        InputError,
        InvalidLogits,
        ModelError,
        OutpaceError,
        OutpaceWarning,
        RankError,
        UnknownNameError,
        UnsupportedModel,
    )
    from .grammar import Grammar
    from .methods import (
        AdaDecode,
        Amphista,
        Auto,
        Autoregressive,
        Block,
        DraftModel,
        Hydra,
        Jacobi,
        Lookahead,
        Medusa,
        Method,
        PromptLookup,
        SelfSpeculative,
        Swift,
        UnverifiedAdaDecode,
    )
    from .options import BatchOptions, Options
    from .picking import Sampling
    from .result import Result
    from .runtime.costs import CostCurve

__version__ = "0.1.0"

# torch and transformers take seconds to import, so a name is fetched from its home when it is first used.
_HOMES = {
    "decoder": ("Batch", "Decoder", "load"),
    "draft": ("Draft", "Scores", "Step", "Tree", "Verdict"),
    "errors": (
        "BatchError",
        "FetchError",
        "InputError",
        "InvalidLogits",
        "ModelError",
        "OutpaceError",
        "OutpaceWarning",
        "RankError",
        "UnknownNameError",
        "UnsupportedModel",
    ),
    "grammar": ("Grammar",),
    "methods": (
        "AdaDecode",
        "Amphista",
        "Auto",
        "Autoregressive",
        "Block",
        "DraftModel",
        "Hydra",
        "Jacobi",
        "Lookahead",
        "Medusa",
        "Method",
        "PromptLookup",
        "SelfSpeculative",
        "Swift",
        "UnverifiedAdaDecode",
    ),
    "options": ("BatchOptions", "Options"),
    "picking": ("Sampling",),
    "result": ("Result",),
    "runtime.costs": ("CostCurve",),
}

__all__ = [
    "AdaDecode",
    "Amphista",
    "Auto",
    "Autoregressive",
    "Batch",
    "BatchError",
    "BatchOptions",
    "Block",
    "CostCurve",
    "Decoder",
    "Draft",
    "DraftModel",
    "FetchError",
    "Grammar",
    "Hydra",
    "InputError",
    "InvalidLogits",
    "Jacobi",
    "Lookahead",
    "Medusa",
    "Method",
    "ModelError",
    "Options",
    "OutpaceError",
    "OutpaceWarning",
    "PromptLookup",
    "RankError",
    "Result",
    "Sampling",
    "Scores",
    "SelfSpeculative",
    "Step",
    "Swift",
    "Tree",
    "UnknownNameError",
    "UnsupportedModel",
    "UnverifiedAdaDecode",
    "Verdict",
    "load",
]

_PACKAGES = ("parallel", "serve")  # documented as `outpace.serve.app` and so on


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
