"""A store of finished sequences, for lookups beyond the current sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ..models.adapter import Model
from ..sending import send
from ..sources.history import BETWEEN
from .ngrams import History

if TYPE_CHECKING:
    from .auto import Auto
    from .prompt_lookup import PromptLookup

MOST = 2**20  # tokens
LONGEST = 4  # tokens of a match, where the host drafts


class Earlier:
    """The newest tokens of finished sequences, oldest first, with BETWEEN after each sequence."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tokens = torch.full((size,), BETWEEN, device=device)  # a static buffer: graphs read it

    def add(self, text: Sequence[int]) -> None:
        """Append a finished sequence, and drop the oldest tokens."""
        new = [*text, BETWEEN][-len(self.tokens) :]
        if "runs" in vars(self):
            self.runs.forget(self.tokens[: len(new) + LONGEST].tolist(), len(new))
            self.runs.extend(new)
        with torch.inference_mode():
            self.tokens.copy_(torch.cat([self.tokens[len(new) :], send(new, self.tokens.device)]))

    @cached_property
    def runs(self) -> History:
        """The store as a table of n-grams, for drafting on the host. Keys of a single token are too weak."""
        runs = History(LONGEST, shortest=2)
        runs.extend(self.tokens.tolist())
        return runs


class Store:
    """The newest `size` tokens of finished sequences, prompts and answers, in memory only.

    It belongs to one method object, like `Auto(store=65536)`, and has only sequences decoded with it, by model.
    If users of a server must not share text, each needs a method object of their own.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._earlier: WeakKeyDictionary[Model, Earlier] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return str(self.size)

    @property
    def name(self) -> str:
        """How traces show it."""
        return f"{self.size} tokens"

    def of(self, model: Model) -> Earlier:
        """The tokens of sequences decoded with one model."""
        if model not in self._earlier:
            self._earlier[model] = Earlier(self.size, model.device)
        return self._earlier[model]


def make_store(method: Auto | PromptLookup) -> None:
    """Replace a method's setting, the number of tokens, by a store; 0 stays."""
    if not isinstance(method.store, Store):
        method.check(store=(0, MOST))
        if method.store:
            object.__setattr__(method, "store", Store(method.store))


def earlier(store: Store | int, model: Model) -> Earlier | None:
    """The tokens in a method's store for a model, if it has one."""
    return store.of(model) if isinstance(store, Store) else None
