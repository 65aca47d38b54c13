"""The methods, one file each, and their names."""

from __future__ import annotations

from ..errors import UnknownNameError
from .autoregressive import Autoregressive
from .base import Drafter, Method, build
from .draft_model import DraftModel
from .jacobi import Jacobi
from .lookahead import Lookahead
from .prompt_lookup import PromptLookup

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Autoregressive, Jacobi, PromptLookup, Lookahead, DraftModel)
}


def make(name: str, **settings: object) -> Method:
    """A method by name, with settings.

    >>> make("lookahead", window=7).window
    7
    """
    if name not in METHODS:
        raise UnknownNameError("method", name, METHODS)
    return build(METHODS[name], settings)


__all__ = [
    "METHODS",
    "Autoregressive",
    "DraftModel",
    "Drafter",
    "Jacobi",
    "Lookahead",
    "Method",
    "PromptLookup",
    "make",
]
