"""Valid ranges of sampling settings. Without torch, so that commands can check them before importing it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import InputError

WHOLE = ("top_k", "seed")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


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
