"""The plain runtime: rows are executed by ordinary forward passes, on any device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from ..draft import Draft, Scores
from ..errors import InvalidLogits
from ..models.adapter import Model, Output
from ..picking import Picker, Sampling
from ..pool import Packed, Pool, Rows, Sequence
from .costs import CostCurve
from .turns import Turns

T = TypeVar("T")

See: TypeAlias = "Callable[[torch.Tensor], None]"
"""Shown hidden states [rows, width]; they are good until it returns."""


class Question(NamedTuple):
    """What to ask about the last row where a climb has left it, in the same run."""

    owner: Hashable  # names the function: one of the same owner does the same
    function: Callable[[torch.Tensor], torch.Tensor]  # of its hidden state [1, width]


class Work(NamedTuple):
    """Rows of one text that are to be computed: what to ask `Engine.climb` of whose engine."""

    engine: Engine
    sequence: Sequence
    rows: Rows
    logits: int
    start: int = 0
    stop: int | None = None
    hidden: torch.Tensor | None = None
    question: Question | None = None

    def do(self) -> Output:
        """Compute it alone."""
        return self.engine.climb(*self[1:])

    def goes_with(self, other: Work | Turn) -> bool:
        """Whether the two may share a forward: rows of one pool by the same layers."""
        if not isinstance(other, Work):
            return False
        return self.engine is other.engine and (self.start, self.stop) == (other.start, other.stop)


class Turn(NamedTuple):
    """The next step of a text that has a place in a program."""

    program: Any
    place: Any

    def do(self) -> Any:
        """Take it alone."""
        return self.program.turn([self.place])[0]

    def goes_with(self, other: Work | Turn) -> bool:
        """Whether the two are taken together: texts of one program are."""
        return isinstance(other, Turn) and self.program is other.program


Asking: TypeAlias = "Generator[Work, Output, T]"
"""A coroutine that returns a T. It yields the work it needs and is sent the output; a batch joins the work of many."""


class Engine:
    """A model and the pool its rows live in."""

    name = "plain"
    exact = False  # whether a row has the same bits whatever is computed beside it
    sizes: Items[int] = ()  # a step computes as many rows as the next of these; without them, as many as it is given

    def __init__(self, model: Model, compiled: bool = False) -> None:
        self.model = model
        self.compiled = compiled  # whether layers are run compiled, by `model.compile_layers()`
        if compiled:
            self.name = "compiled"
        self.costs: CostCurve | None = None  # what steps cost, where it was measured
        self.pool = Pool(model.device)
        self.turns = Turns()  # taken for each step, whatever it runs
        self.notes: dict[Any, Any] = {}  # what a method has found out about this engine, by whose it is

    def for_one_text(self, picker: Picker | None = None) -> Engine:
        """The engine to write a text with: this one, or one apart for models that see whatever the pool holds.

        `picker` will choose its tokens.
        """
        if self.model.branches:
            return self
        apart = Engine(self.model, self.compiled)
        apart.costs = self.costs
        return apart

    @property
    def most_rows(self) -> int:
        """How many rows of several texts one forward takes."""
        return self.model.chunk

    @property
    def most_drafted(self) -> int:
        """The same where rows of drafts are among them, whose logits are asked for."""
        return self.most_rows

    @property
    def most_texts(self) -> int:
        """Of how many texts one forward takes rows."""
        return self.most_rows if self.model.packs else 1

    def reading(self, sequence: Sequence) -> tuple[int, int]:
        """How many tokens of text one forward takes, and how many the forward of a draft takes besides."""
        return self.model.chunk, self.model.chunk

    @property
    def compiling(self) -> bool:
        """Whether layers are compiled."""
        return self.compiled

    def program_for(self, method: Any, sampling: Sampling) -> Any:
        """What takes whole steps of a text without the host; None where the host must stand between."""
        return None

    def read(self, sequence: Sequence, see: See | None = None, left: int = 0) -> Asking[None]:
        """Compute the sequence's text but its last token, and up to `left` before it, by asking for the work."""
        most, _ = self.reading(sequence)
        while (behind := len(sequence.tokens) - 1 - len(sequence.slots)) > left:
            rows = self.pool.place_text(sequence, min(behind, most))
            sequence.asked = len(rows)
            output = yield Work(self, sequence, rows, 0)
            sequence.asked = 0
            if see:
                see(output.hidden)

    def score(self, sequence: Sequence, draft: Draft, see: See | None = None) -> Scores:
        """Compute the draft's rows, and before them whatever text of the sequence is not computed yet.

        The scores are good until the next call. `see` is shown the hidden states of that text, in order.
        """
        return alone(self.scoring(sequence, draft, see))

    def scoring(self, sequence: Sequence, draft: Draft, see: See | None = None) -> Asking[Scores]:
        """`score`, by asking for the work."""
        if not (draft.is_chain or self.model.branches):
            raise AssertionError("a branching draft reached a model that takes chains only")
        _, left = self.reading(sequence)
        yield from self.read(sequence, see, left)
        output = yield Work(self, sequence, self.pool.place(sequence, draft), len(draft))
        if see and len(output.hidden) > len(draft):
            see(output.hidden[: -len(draft)])
        return Scores(output.logits, output.hidden[-len(draft) :], output.found)

    def run(self, works: Items[Work]) -> list[Output | InvalidLogits]:
        """Compute the works of several texts by the same layers, together. The outputs are good until the next call.

        A dense mask makes a row multiply by zero what it may not see, so one text's NaN would be every text's. Where
        there is one, texts are computed apart, and whose it is gets an error and is wiped out of the pool.
        """
        outputs: list[Output | InvalidLogits] = [*self._run(works)]
        if not any(_is_nan(output) for output in outputs):
            return outputs
        self.pool.wipe([slot for work in works for slot in work.rows.numbers[2]], works[0].start)
        for place, work in enumerate(works):
            outputs[place] = output = work.do()
            if _is_nan(output):
                self.pool.wipe([*work.rows.numbers[2]], work.start)
                outputs[place] = InvalidLogits("the model's hidden states contain NaN")
        return outputs

    def _run(self, works: Items[Work]) -> list[Output]:
        if len(works) == 1:
            return [works[0].do()]
        asked, first = list[int](), 0
        for work in works:
            first += len(work.rows)
            asked += range(first - work.logits, first)
        rows = Packed([work.rows for work in works])
        start, stop = works[0].start, works[0].stop
        return deal(works, self.model.forward(self.pool, rows, asked, start, stop, joined(works), self.compiled))

    def climb(
        self,
        sequence: Sequence,
        rows: Rows,
        logits: int,
        start: int = 0,
        stop: int | None = None,
        hidden: torch.Tensor | None = None,
        question: Question | None = None,
    ) -> Output:
        """Run layers `start` to `stop` on rows of the sequence: `Model.forward`, at this runtime's speed.

        A `question` is answered too. The output is good until the next call.
        """
        output = self.model.forward(self.pool, rows, logits, start, stop, hidden, self.compiled)
        return answered(output, question)


def together(works: Items[Work | Turn]) -> Items[Any]:
    """What comes of works that go with each other."""
    first = works[0]
    if isinstance(first, Turn):
        replies: list[Any] = first.program.turn([work.place for work in works if isinstance(work, Turn)])
        return replies
    return first.engine.run([work for work in works if isinstance(work, Work)])


@torch.inference_mode()
def answered(output: Output, question: Question | None) -> Output:
    """The output with the answer to a question, if there is one."""
    return output if question is None else output._replace(answer=question.function(output.hidden[-1:]))


def alone(asking: Asking[T]) -> T:
    """What `asking` comes to, its work done at once."""
    try:
        work = next(asking)
        while True:
            work = asking.send(work.do())
    except StopIteration as end:
        found: T = end.value
        return found


def joined(works: Items[Work]) -> torch.Tensor | None:
    """Where the layers before have left the rows of all works; None for rows that begin at the first layer."""
    left = [work.hidden for work in works if work.hidden is not None]
    return torch.cat(left) if left else None


def deal(works: Items[Work], output: Output) -> list[Output]:
    """Each work's share of what was computed together. Questions are answered too."""
    asked = [work.logits for work in works]
    hidden = torch.split(output.hidden, [len(work.rows) for work in works])
    logits = torch.split(output.logits, asked)
    found = [None] * len(works) if output.found is None else torch.split(output.found, asked, 1)
    shares = [Output(*share) for share in zip(logits, hidden, found, strict=True)]
    return [answered(share, work.question) for share, work in zip(shares, works, strict=True)]


def _is_nan(output: Output | InvalidLogits) -> bool:
    return isinstance(output, Output) and bool(output.hidden.isnan().any())
