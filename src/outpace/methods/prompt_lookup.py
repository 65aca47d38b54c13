"""Prompt lookup: guess that the text goes on as it did the last times it came by here."""

from __future__ import annotations

from dataclasses import dataclass

from ..draft import Draft, Scores, Tree, Verdict
from ..errors import InputError
from ..picking import Picker
from ..pool import Sequence
from ..runtime.plain import Engine
from .base import Drafter, Method
from .ngrams import History


@dataclass(frozen=True)
class PromptLookup(Method):
    """Continuations of earlier occurrences of the text's end, several merged in one tree.

    longest, shortest: how many last tokens must match; longer matches come first.
    length: how many tokens a continuation has.
    continuations: how many are tried in a step.
    """

    name = "prompt-lookup"
    about = "guesses that the text repeats itself"

    longest: int = 4
    shortest: int = 1
    length: int = 10
    continuations: int = 8

    def __post_init__(self) -> None:
        self.check(longest=(1, 64), shortest=(1, 64), length=(1, 512), continuations=(1, 512))
        if self.shortest > self.longest:
            raise InputError(f"prompt-lookup: shortest={self.shortest} must not be above longest={self.longest}.")

    @property
    def branches(self) -> bool:
        return self.continuations > 1

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return _Drafter(self, engine, sequence, picker)


class _Drafter(Drafter):
    def __init__(self, method: PromptLookup, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.method = method
        self.history = History(method.longest, method.shortest)
        self.history.extend(sequence.tokens)

    def draft(self, room: int) -> Draft:
        tree = Tree(self.sequence.tokens[-1])
        left = self.method.continuations
        for continuation in self.history.continuations(min(self.method.length, room)):
            if not left:
                break
            before = len(tree)
            tree.insert(continuation, source="lookup")
            left -= len(tree) > before  # one that adds nothing costs nothing
        return tree.draft()

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.history.extend(verdict.tokens)
