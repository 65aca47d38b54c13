"""A store of earlier texts, in which guesses are looked for as they are in the text itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ..models.adapter import Model
from ..sending import send
from ..sources.history import BETWEEN, TRUST
from .ngrams import History

if TYPE_CHECKING:
    from .auto import Auto
    from .prompt_lookup import PromptLookup

MOST = 2**20  # tokens


class Earlier:
    """The newest tokens of the texts that a model has written, the oldest first, with BETWEEN behind each text."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tokens = torch.full((size,), BETWEEN, device=device)  # stays in place: graphs read it

    def add(self, text: Sequence[int]) -> None:
        """A text has ended. The oldest tokens make room for it."""
        new = [*text, BETWEEN][-len(self.tokens) :]
        if "runs" in vars(self):
            self.runs.forget(self.tokens[: len(new) + len(TRUST)].tolist(), len(new))
            self.runs.extend(new)
        with torch.inference_mode():
            self.tokens.copy_(torch.cat([self.tokens[len(new) :], send(new, self.tokens.device)]))

    @cached_property
    def runs(self) -> History:
        """What came next after each run of some tokens, where the host drafts. One token alone says too little."""
        runs = History(len(TRUST), shortest=2)
        runs.extend(self.tokens.tolist())
        return runs


class Store:
    """The newest `size` tokens of earlier texts, prompts and answers, in memory alone.

    It belongs to one method, `Auto(store=65536)`, and knows only texts that were written with it; each model's apart.
    Whose texts must not be guessed from each other's (users of a server) have a method each.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._earlier: WeakKeyDictionary[Model, Earlier] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return str(self.size)

    @property
    def name(self) -> str:
        """As traces have it."""
        return f"{self.size} tokens"

    def of(self, model: Model) -> Earlier:
        """What it holds of a model's texts."""
        if model not in self._earlier:
            self._earlier[model] = Earlier(self.size, model.device)
        return self._earlier[model]


def make_store(method: Auto | PromptLookup) -> None:
    """Put a store where a method's setting has the number of its tokens; 0 stays."""
    if not isinstance(method.store, Store):
        method.check(store=(0, MOST))
        if method.store:
            object.__setattr__(method, "store", Store(method.store))


def earlier(store: Store | int, model: Model) -> Earlier | None:
    """What a method's store holds of a model's texts, if it has one."""
    return store.of(model) if isinstance(store, Store) else None
