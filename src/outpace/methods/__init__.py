"""The methods, one file each, and their names."""

from __future__ import annotations

from ..errors import UnknownNameError
from ..runtime.costs import CostCurve
from .adadecode import AdaDecode, SelfSpeculative, UnverifiedAdaDecode
from .amphista import Amphista
from .auto import Auto
from .autoregressive import Autoregressive
from .base import Drafter, Method, build
from .block import Block
from .draft_model import DraftModel
from .hydra import Hydra
from .jacobi import Jacobi
from .lookahead import Lookahead
from .medusa import Medusa
from .prompt_lookup import PromptLookup
from .swift import Swift

DEFAULT = "auto"
METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Autoregressive,
        Jacobi,
        PromptLookup,
        Lookahead,
        DraftModel,
        Medusa,
        Hydra,
        Amphista,
        Block,
        AdaDecode,
        UnverifiedAdaDecode,
        SelfSpeculative,
        Swift,
        Auto,
    )
}


# Defaults if step costs were not measured. Rows are nearly free on a large GPU, but a hundred of them cost a fifth of a
# step. On a CPU every row costs time: eight rows of a 135M model in float32 on two cores take twice as long as one.
ON_GPU: dict[str, dict[str, object]] = {"lookahead": {"window": 7, "ngram": 4, "guesses": 7}}
ON_CPU: dict[str, dict[str, object]] = {
    "jacobi": {"window": 7},
    "prompt-lookup": {"rows": 8, "gate": 0.4},
    "lookahead": {"window": 2, "ngram": 3, "guesses": 2},
    "medusa": {"rows": 8},
    "hydra": {"rows": 8, "beam": 4},
    "amphista": {"rows": 8},
    "block": {"rows": 8},
}


def make(name: str, *, cpu: bool = False, costs: CostCurve | None = None, **settings: object) -> Method:
    """A method by name, with settings. The others suit the measured `costs` or, without these, a GPU (`cpu`: a CPU).

    >>> make("lookahead", window=7).window
    7
    >>> make("prompt-lookup").rows, make("prompt-lookup", cpu=True).rows
    (64, 8)
    """
    if name not in METHODS:
        raise UnknownNameError("method", name, METHODS)
    method = METHODS[name]
    if costs is not None:
        price = costs.price_with(name)
        sizes = sorted(method.sizes, key=lambda size: size.tokens / (price(size.rows) if size.rows > 1 else 1.0))
        suited = sizes[-1].settings if sizes else {}
    else:
        suited = (ON_CPU if cpu else ON_GPU).get(name, {})
    return build(method, {**suited, **settings})


__all__ = [
    "DEFAULT",
    "METHODS",
    "ON_CPU",
    "ON_GPU",
    "AdaDecode",
    "Amphista",
    "Auto",
    "Autoregressive",
    "Block",
    "DraftModel",
    "Drafter",
    "Hydra",
    "Jacobi",
    "Lookahead",
    "Medusa",
    "Method",
    "PromptLookup",
    "SelfSpeculative",
    "Swift",
    "UnverifiedAdaDecode",
    "make",
]
