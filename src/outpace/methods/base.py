"""What a method is: a frozen config, and a drafter with three verbs that it starts for each text."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, ClassVar

import torch

from ..draft import Draft, Scores, Verdict
from ..errors import InputError, UnknownNameError, UnsupportedModel
from ..models.adapter import Model
from ..picking import Picker
from ..pool import Sequence
from ..runtime.costs import Prices
from ..runtime.plain import Asking, Engine
from ..sources.base import Plan
from .ngrams import History


class Drafter(AbstractContextManager["Drafter"]):
    """A method at work on one text. As a context manager it gives back what it holds."""

    history: History  # of those that guess that the text repeats itself
    extends: bool = True  # whether its drafts may get further rows before they are scored
    asks: bool = False  # whether it has the target compute something while it drafts

    def __init__(self, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        self.engine = engine
        self.sequence = sequence
        self.picker = picker

    def draft(self, room: int) -> Draft:
        """Propose a tree below the last token, at most `room` deep."""
        raise NotImplementedError

    def drafting(self, room: int) -> Asking[Draft]:
        """`draft`, for methods that have the target compute something for it: they ask for work."""
        return self.draft(room)
        yield

    def score(self, draft: Draft) -> Asking[Scores]:
        """Have the model compute every row, by asking for the work."""
        return self.engine.scoring(self.sequence, draft)

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """See what happened. The verdict's tokens are part of the sequence by now."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


@dataclass(frozen=True)
class Size:
    """Settings of a method that go together, and what they came to on the embedded model (docs/log.md)."""

    settings: dict[str, object]
    rows: int  # rows a step
    tokens: float  # tokens a step


@dataclass(frozen=True)
class Method:
    """A way to draft. Its fields are its settings.

    A method can be given to transformers: `model.generate(**inputs, custom_generate=outpace.Lookahead())`.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    lossless: ClassVar[bool] = True  # whether the text is the target's own
    sizes: ClassVar[tuple[Size, ...]] = ()  # where the cost of a step decides between settings

    @property
    def branches(self) -> bool:
        """Whether drafts may be trees, which some models cannot compute."""
        return True

    @property
    def dealt(self) -> bool:
        """Whether drafts can be dealt out to several ranks: trees that come from tokens alone."""
        return False

    @property
    def shares(self) -> bool:
        """Whether a text may begin with slots that another text has computed."""
        return True

    @property
    def reader(self) -> object:
        """Heads whose states must lie in the slots that a text begins with, where the host drafts; None for none."""
        return None

    def prepare(self, model: Model) -> Method:
        """Check that the method works with `model`, and load what it needs. A prepared method stays as it is."""
        if self.branches and not model.branches:
            raise UnsupportedModel(
                f"{model.name} computes chains of tokens only (its positions are counted from the mask), and "
                f"{self.name} drafts trees. Use autoregressive, jacobi, draft-model, or prompt-lookup with tree=false."
            )
        return self

    def plan(self, engine: Engine) -> Plan | None:
        """How whole steps are drafted without the host; None where the host must draft."""
        return None

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        """Begin a text."""
        raise NotImplementedError

    def remember(self, model: Model, text: Items[int]) -> None:
        """A text of this model has ended: its tokens, the prompt's included."""

    def check(self, **limits: tuple[float, float]) -> None:
        """Raise InputError for a setting of the wrong type or outside its limits, both included.

        Float limits allow fractions.
        """
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            kinds, kind = ((int, float), "a number") if isinstance(low, float) else (int, "a whole number")
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise InputError(f"{self.name}: {name}={value!r} must be {kind}.")
            if not low <= value <= high:
                raise InputError(f"{self.name}: {name}={value} is out of range: it must be {low:g} to {high:g}.")
        for item in fields(self):
            if item.type == "bool" and not isinstance(getattr(self, item.name), bool):
                raise InputError(f"{self.name}: {item.name}={getattr(self, item.name)!r} must be True or False.")

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        stop_strings: Any = None,  # named here, so that transformers leaves them to us
        **kwargs: Any,
    ) -> Any:
        """The hook for transformers' `generate(custom_generate=...)`."""
        from ..hook import generate  # a method knows nothing of what lies above it but this door

        kwargs["stop_strings"] = stop_strings
        return generate(self, model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


def prices_of(price: Prices | None, rows: int, device: torch.device) -> torch.Tensor | None:
    """[rows] what steps cost by their rows, where it was measured."""
    if price is None:
        return None
    return torch.tensor([price(count) for count in range(1, rows + 1)], device=device)


def settings(method: type[Method]) -> list[str]:
    """The names of a method's settings."""
    return [item.name for item in fields(method)]


def build(method: type[Method], given: dict[str, object]) -> Method:
    """A method with settings by name; unknown ones are refused."""
    for name in given:
        if name not in settings(method):
            raise UnknownNameError(f"setting of {method.name}", name, settings(method))
    return method(**given)
