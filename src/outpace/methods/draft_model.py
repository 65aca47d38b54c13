"""Speculative decoding with a draft model: a smaller model drafts, the target verifies."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from ..draft import Draft, Verdict, chain
from ..errors import InputError, InvalidLogits, ModelError, OutpaceWarning
from ..models.adapter import Model
from ..picking import Picker
from ..pool import Sequence
from ..runtime.graphs import GraphEngine
from ..runtime.plain import Engine
from ..sources.base import Plan
from ..sources.model import ModelGuesses
from .base import Drafter, Method


@dataclass(frozen=True)
class DraftModel(Method):
    """A draft chain from a smaller model with the same vocabulary.

    Attributes:
        model: a hub id, a folder, the name of an embedded model, or a loaded transformers model.
        length: how many tokens it drafts.
    """

    name = "draft-model"
    about = "a smaller model drafts"

    model: Any = None
    length: int = 5

    def __post_init__(self) -> None:
        self.check(length=(1, 64))
        if self.model is None:
            raise InputError(
                "draft-model: no model given. Give a smaller model with the same vocabulary: --set model=ID_OR_FOLDER, "
                "or DraftModel(model=...) in Python."
            )

    @property
    def branches(self) -> bool:
        return False

    def prepare(self, model: Model) -> DraftModel:
        from ..models.loading import as_model  # imports transformers, which the other methods do not need

        small = as_model(self.model, like=model)
        if small.vocabulary != model.vocabulary:
            raise ModelError(
                f"draft-model: {small.name} has a vocabulary of {small.vocabulary} tokens, {model.name} one of "
                f"{model.vocabulary}. The draft model must share the target's tokenizer."
            )
        return replace(self, model=small)

    def plan(self, engine: Engine) -> Plan | None:
        small, near = self.model, self.model.device == engine.model.device
        if not (isinstance(engine, GraphEngine) and near and small.lists and small.packs):
            return None
        try:
            ahead = engine.beside(small)
        except torch.OutOfMemoryError:
            warnings.warn(
                f"draft-model: no memory for a KV cache of {small.name} in addition to {engine.model.name}'s. The host "
                "runs the two in turn, which is slower. Give the KV cache a smaller share of the "
                "memory: Decoder(..., memory=0.3).",
                OutpaceWarning,
                stacklevel=2,
            )
            return None
        return Plan(lambda lanes, device: [ModelGuesses(ahead, self.length)], self.length + 1)

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return _Drafter(self, engine, sequence, picker)


class _Drafter(Drafter):
    def __init__(self, method: DraftModel, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.length = method.length
        self.small = Engine(method.model)
        self.guesser = picker.for_drafts()
        self._open = ExitStack()
        self.ahead = self._open.enter_context(self.small.pool.sequence(sequence.tokens))

    def draft(self, room: int) -> Draft:
        self.small.pool.rewrite(self.ahead, self.sequence.tokens)
        length = min(self.length, room, self.small.model.room(self.ahead.position))
        guesses: list[int] = []
        proposals: list[torch.Tensor | None] = [None]
        for _ in range(length):
            alone = chain(self.ahead.tokens[-1], (), "")
            scores = self.small.score(self.ahead, alone)
            try:
                token, proposal = self.guesser.guess(scores.logits[0], self.ahead.tokens)
            except InvalidLogits:
                break  # the draft model's logits are invalid; the target's may not be
            self.small.pool.keep(self.ahead, alone, Verdict((0,), (token,)))
            guesses.append(token)
            proposals.append(proposal)
        return replace(chain(self.sequence.tokens[-1], guesses, "draft"), proposals=tuple(proposals))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
