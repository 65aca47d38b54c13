"""The methods, one file each, and their names."""

from __future__ import annotations

from ..errors import UnknownNameError
from ..runtime.costs import CostCurve
from .autoregressive import Autoregressive
from .base import Drafter, Method, build
from .draft_model import DraftModel
from .jacobi import Jacobi
from .lookahead import Lookahead
from .prompt_lookup import PromptLookup

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Autoregressive, Jacobi, PromptLookup, Lookahead, DraftModel)
}


# The methods' own settings are for GPUs, where rows are nearly free. On a CPU rows cost time: a 135M model in float32
# on two cores takes up to eight rows in about twice the time of one, and then ever longer.
ON_CPU: dict[str, dict[str, object]] = {
    "jacobi": {"window": 7},
    "prompt-lookup": {"rows": 8, "gate": 0.2},
    "lookahead": {"window": 2, "ngram": 3, "guesses": 2},
}


def default_method(*, cpu: bool) -> str:
    """The method that is quickest on most prompts: on a CPU the one that drafts only where it expects to win."""
    return "prompt-lookup" if cpu else "lookahead"


def make(name: str, *, cpu: bool = False, costs: CostCurve | None = None, **settings: object) -> Method:
    """A method by name, with settings. Those not given suit the measured costs; without, a GPU, or with `cpu` a CPU.

    >>> make("lookahead", window=7).window
    7
    >>> make("prompt-lookup").rows, make("prompt-lookup", cpu=True).rows
    (64, 8)
    """
    if name not in METHODS:
        raise UnknownNameError("method", name, METHODS)
    method = METHODS[name]
    if costs is not None:
        sizes = sorted(method.sizes, key=lambda size: size.tokens / costs.price(size.rows))
        suited = sizes[-1].settings if sizes else {}
    else:
        suited = ON_CPU.get(name, {}) if cpu else {}
    return build(method, {**suited, **settings})


__all__ = [
    "METHODS",
    "ON_CPU",
    "Autoregressive",
    "DraftModel",
    "Drafter",
    "Jacobi",
    "Lookahead",
    "Method",
    "PromptLookup",
    "default_method",
    "make",
]
