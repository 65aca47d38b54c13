"""Every exception that Outpace raises on purpose, as one tree.

OutpaceError
├── InputError            what was asked for cannot be done; the message names the value and the remedy
│   ├── UnknownNameError  a name that is not in a known list; suggests the nearest
│   └── NoRoom            there are not as many KV slots as a text needs
├── ModelError            the model, its files or its tokenizer cannot be used
│   └── UnsupportedModel  the architecture cannot do what a method needs
├── FetchError            the embedded model could not be fetched or is broken on disk
├── InvalidLogits         the model returned NaN, or a processor left no token to choose
├── RankError             another process of a run on several devices is gone, too slow, or does something else
└── BatchError            some texts of a batch failed; it has the results of all

OutpaceWarning is the one warning: what was asked for works, but not as fast as it could, or not all of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class OutpaceError(Exception):
    """Base of all errors of this library: `except OutpaceError` catches what a user can mend."""


class InputError(OutpaceError, ValueError):
    """A value that was given cannot be used."""


class UnknownNameError(InputError):
    """A method, setting or model that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")


class NoRoom(InputError):
    """The KV cache is full."""


class ModelError(OutpaceError):
    """A model folder, its weights or its tokenizer cannot be used."""


class UnsupportedModel(ModelError):
    """The model's architecture does not allow what was asked."""


class FetchError(OutpaceError):
    """The embedded model could not be fetched, checked or converted."""


class OutpaceWarning(UserWarning):
    """Something works, but not as fast as it was asked to, or not all that was asked for is done."""


class InvalidLogits(OutpaceError):
    """The model's logits leave no token to choose."""


class RankError(OutpaceError):
    """Another rank is missing or differs. The message names it."""


class BatchError(OutpaceError):
    """Some texts of a batch failed. `results` has what was written of each; one that failed has its `error`."""

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(f"{message} This error's `results` has all {len(results)} texts.")
        self.results = results
