"""Every exception that Outpace raises on purpose, as one tree.

OutpaceError
├── InputError            a bad argument; the message names the value and the remedy
│   ├── UnknownNameError  a name that is not in a known list; suggests the nearest
│   └── NoRoom            not enough free KV slots for a sequence
├── ModelError            the model, its files or its tokenizer cannot be used
│   └── UnsupportedModel  the architecture lacks what a method needs
├── FetchError            the embedded model could not be downloaded, or is corrupt on disk
├── InvalidLogits         the model returned NaN, or the logits processors ruled out every token
├── RankError             another process of a run on several devices is gone, too slow, or out of step
└── BatchError            some sequences of a batch failed; it has all results

OutpaceWarning is the only warning: the call works, but more slowly than it could, or only in part.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class OutpaceError(Exception):
    """Base of all errors of this library: `except OutpaceError` catches what a user can fix."""


class InputError(OutpaceError, ValueError):
    """An argument that cannot be used."""


class UnknownNameError(InputError):
    """A method, setting or model that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str], why: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}{why}.{hint} Known: {', '.join(names) or 'none'}.")


class NoRoom(InputError):
    """The KV cache is full."""


class ModelError(OutpaceError):
    """A model folder, its weights or its tokenizer cannot be used."""


class UnsupportedModel(ModelError):
    """The model's architecture does not allow what was asked."""


class FetchError(OutpaceError):
    """The embedded model could not be downloaded, checked or converted."""


class OutpaceWarning(UserWarning):
    """The call works, but more slowly than it could, or only in part."""


class InvalidLogits(OutpaceError):
    """The model's logits leave no token to choose."""


class RankError(OutpaceError):
    """Another rank is missing or differs. The message names it."""


class BatchError(OutpaceError):
    """Some sequences of a batch failed. `results` has the output of each; a failed one has its `error`."""

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(f"{message} This error's `results` has all {len(results)} results.")
        self.results = results
