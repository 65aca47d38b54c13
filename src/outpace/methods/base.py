"""The base of methods: a frozen config, and a drafter that it creates for each sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

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

if TYPE_CHECKING:
    from typing_extensions import Self

SIZES = (1, 16)  # rows of a step, besides the most, for methods that choose in every step


class Drafter(AbstractContextManager["Drafter"]):
    """A method's state for one sequence. As a context manager it frees what it holds."""

    history: History  # of drafters with prompt lookup
    extends: bool = True  # whether rows may be added to its drafts before scoring
    asks: bool = False  # whether drafting needs forward passes of the target

    def __init__(self, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        self.engine = engine
        self.sequence = sequence
        self.picker = picker

    @property
    def rests(self) -> bool:
        """Whether it drafts nothing from now on, so that plain decoding's program may take over."""
        return False

    def draft(self, room: int) -> Draft:
        """A draft tree below the last token, at most `room` deep."""
        raise NotImplementedError

    def drafting(self, room: int) -> Asking[Draft]:
        """`draft`, for methods that need forward passes of the target: they yield the work."""
        return self.draft(room)
        yield

    def score(self, draft: Draft) -> Asking[Scores]:
        """Have the model compute every row, by yielding the work."""
        return self.engine.scoring(self.sequence, draft)

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Learn from the step. The verdict's tokens are part of the sequence by now."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


@dataclass(frozen=True)
class Size:
    """A combination of settings, and its results on the embedded model (docs/log.md)."""

    settings: dict[str, object]
    rows: int  # rows per step
    tokens: float  # tokens per step


@dataclass(frozen=True)
class Method:
    """A drafting method. Its fields are its settings.

    A method can be given to transformers: `model.generate(**inputs, custom_generate=outpace.Lookahead())`.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    lossless: ClassVar[bool] = True  # whether the output is the target's own
    sizes: ClassVar[tuple[Size, ...]] = ()  # settings to choose from by the cost of a step

    def __new__(cls, *_: Any, **given: Any) -> Self:
        if "logits_processor" in given:  # transformers calls what it was given
            raise InputError(f"custom_generate={cls.__name__} is a class. Give a method: outpace.{cls.__name__}().")
        return super().__new__(cls)

    @property
    def branches(self) -> bool:
        """Whether drafts may be trees, which some models do not support."""
        return True

    @property
    def dealt(self) -> bool:
        """Whether drafts can be split over ranks: trees that depend on tokens alone."""
        return False

    @property
    def shares(self) -> bool:
        """Whether a sequence may reuse the KV slots of another (prefix caching)."""
        return True

    @property
    def reader(self) -> object:
        """Heads whose state must be in reused KV slots, where the host drafts; None for none."""
        return None

    def prepare(self, model: Model) -> Method:
        """Check that the method works with `model`, and load what it needs. No effect on a prepared method."""
        if self.branches and not model.branches:
            raise UnsupportedModel(
                f"{model.name} supports draft chains only (it takes no positions, or counts them in its mask), and "
                f"{self.name} drafts trees. Use autoregressive, jacobi, draft-model, or prompt-lookup with tree=false."
            )
        return self

    def plan(self, engine: Engine) -> Plan | None:
        """How to draft in a captured step, without the host; None if the host must draft."""
        return None

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        """Create the drafter of a sequence."""
        raise NotImplementedError

    def remember(self, model: Model, text: Items[int]) -> None:
        """Called with the tokens of a sequence that has ended, prompt included."""

    def check(self, **limits: tuple[float, float]) -> None:
        """Raise InputError for a setting of the wrong type or outside its limits (inclusive).

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
        from ..hook import generate  # the only import of a higher layer

        kwargs["stop_strings"] = stop_strings
        return generate(self, model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


def prices_of(price: Prices | None, rows: int, device: torch.device) -> torch.Tensor | None:
    """[rows] the cost of steps by rows, if measured."""
    if price is None:
        return None
    return torch.tensor([price(count) for count in range(1, rows + 1)], device=device)


def settings(method: type[Method]) -> list[str]:
    """The names of a method's settings."""
    return [item.name for item in fields(method)]


def build(method: type[Method], given: dict[str, object]) -> Method:
    """A method with settings by name. Raises UnknownNameError for unknown ones."""
    for name in given:
        if name not in settings(method):
            raise UnknownNameError(f"setting of {method.name}", name, settings(method))
    return method(**given)
