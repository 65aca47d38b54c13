"""Valid ranges of sampling settings. Without torch, so that commands can check them before importing it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from .errors import InputError, OutpaceWarning

WHOLE = ("top_k", "seed")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OF_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # without effect on greedy decoding, by the value that is off


def check_sampling(given: Mapping[str, Any]) -> None:
    """Raise InputError for an invalid value of a Sampling's field."""
    for name in WHOLE:
        if name in given and not _is_number(given[name], int):
            raise InputError(f"{name}={given[name]!r} must be a whole number.")
    for name in NUMBERS:
        value = given.get(name, 0)
        if not _is_number(value, int | float) and (name, value) != ("repetition_penalty", None):
            raise InputError(f"{name}={value!r} must be a number.")
    for name, value in given.items():
        fits, allowed = _range(name, value)
        if not fits:
            raise InputError(f"{name}={value!r} is out of range: it must be {allowed}.")


def warn_if_greedy(given: Mapping[str, Any]) -> None:
    """Warn about settings without effect: they restrict sampling, but decoding is greedy."""
    idle = [f"{name}={given[name]:g}" for name, off in OF_SAMPLING.items() if given.get(name, off) != off]
    if idle and given.get("temperature", 0) == 0:
        warnings.warn(
            f"greedy decoding ignores {' and '.join(idle)}. Set a temperature, such as 0.7, to sample.",
            OutpaceWarning,
            stacklevel=2,
        )


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _range(name: str, value: Any) -> tuple[bool, str]:
    if name == "temperature":
        return 0 <= value < math.inf, "0 (greedy) or more, and finite"
    if name == "top_k":
        return value >= 0, "0 (off) or more"
    if name == "top_p":
        return 0 < value <= 1, "above 0 and at most 1"
    if name == "min_p":
        return 0 <= value < 1, "from 0 to below 1"
    if name == "repetition_penalty":
        return value is None or 0 < value < math.inf, "above 0, and finite"
    if name in ("presence_penalty", "frequency_penalty"):
        return math.isfinite(value), "a finite number"
    if name == "rule":
        return value in ("keyed", "rejection", "typical"), "'keyed', 'rejection' or 'typical'"
    return True, ""
