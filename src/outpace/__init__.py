"""Outpace: the same text from a Hugging Face causal language model, in fewer steps."""

from __future__ import annotations

from .decoder import Decoder, Result, load
from .draft import Draft, Scores, Step, Tree, Verdict
from .errors import (
    FetchError,
    InputError,
    InvalidLogits,
    ModelError,
    OutpaceError,
    UnknownNameError,
    UnsupportedModel,
)
from .methods import Autoregressive, DraftModel, Jacobi, Lookahead, Method, PromptLookup
from .picking import Sampling

__version__ = "0.1.0"

__all__ = [
    "Autoregressive",
    "Decoder",
    "Draft",
    "DraftModel",
    "FetchError",
    "InputError",
    "InvalidLogits",
    "Jacobi",
    "Lookahead",
    "Method",
    "ModelError",
    "OutpaceError",
    "PromptLookup",
    "Result",
    "Sampling",
    "Scores",
    "Step",
    "Tree",
    "UnknownNameError",
    "UnsupportedModel",
    "Verdict",
    "load",
]
