"""The plain runtime: ordinary forward passes, on any device."""

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
"""Receives hidden states [rows, width], which are valid until it returns."""


class Question(NamedTuple):
    """A function of the last row's hidden state after some layers, computed in the same run."""

    owner: Hashable  # identifies the function: one owner, one function
    function: Callable[[torch.Tensor], torch.Tensor]  # of its hidden state [1, width]


class Work(NamedTuple):
    """Rows of one sequence to compute: an engine, and the arguments of its `climb`."""

    engine: Engine
    sequence: Sequence
    rows: Rows
    logits: int
    start: int = 0
    stop: int | None = None
    hidden: torch.Tensor | None = None
    question: Question | None = None

    def do(self) -> Output:
        """Compute it, unbatched."""
        return self.engine.climb(*self[1:])

    def goes_with(self, other: Work | Turn) -> bool:
        """Whether the two can share a forward pass: rows of one pool, by the same layers."""
        if not isinstance(other, Work):
            return False
        return self.engine is other.engine and (self.start, self.stop) == (other.start, other.stop)


class Turn(NamedTuple):
    """The next step of a sequence that has a lane in a program."""

    program: Any
    place: Any

    def do(self) -> Any:
        """Take it, unbatched."""
        return self.program.turn([self.place])[0]

    def goes_with(self, other: Work | Turn) -> bool:
        """Whether both are of one program, whose sequences step together."""
        return isinstance(other, Turn) and self.program is other.program


Asking: TypeAlias = "Generator[Work, Output, T]"
"""A coroutine that returns a T. It yields the work it needs and is sent the output; a batch joins the work of many."""


class Engine:
    """A model and its KV pool."""

    name = "plain"
    exact = False  # whether a row has the same bits in every batch
    why_fast = ""  # why it is not, if that is the default here
    sizes: Items[int] = ()  # row counts of steps, which are padded to the next; empty: any

    def __init__(self, model: Model, compiled: bool = False) -> None:
        self.model = model
        self.compiled = compiled  # whether layers are compiled, by `model.compile_layers()`
        if compiled:
            self.name = "compiled"
        self.costs: CostCurve | None = None  # the cost curve, if measured
        self.pool = Pool(model.device)
        self.turns = Turns()  # held for each step
        self.notes: dict[Any, Any] = {}  # what methods have learnt about this engine, by owner

    @property
    def mode(self) -> str:
        """Exact or fast, and why fast if exact is the default here."""
        return "exact" if self.exact else f"fast: {self.why_fast}" if self.why_fast else "fast"

    def for_one_text(self, picker: Picker | None = None) -> Engine:
        """The engine for a sequence: this one, or a separate one for models that attend to the whole pool.

        `picker` will choose its tokens.
        """
        if self.model.branches:
            return self
        apart = Engine(self.model, self.compiled)
        apart.costs = self.costs
        return apart

    @property
    def most_rows(self) -> int:
        """The most rows of a batched forward pass."""
        return self.model.chunk

    @property
    def most_drafted(self) -> int:
        """The same with draft rows among them, which need logits."""
        return self.most_rows

    @property
    def most_texts(self) -> int:
        """The most sequences of a forward pass."""
        return self.most_rows if self.model.packs else 1

    def reading(self, sequence: Sequence) -> tuple[int, int]:
        """Prefill tokens per forward pass, and how many of them may share a pass with a draft."""
        return self.model.chunk, self.model.chunk

    @property
    def compiling(self) -> bool:
        """Whether layers are compiled."""
        return self.compiled

    def program_for(self, method: Any, sampling: Sampling) -> Any:
        """The program that takes whole steps without the host; None if the host must take part."""
        return None

    def keep_programs(self, count: int) -> None:
        """From now on keep the programs of this many methods, so that none is captured again."""

    def read(self, sequence: Sequence, see: See | None = None, left: int = 0) -> Asking[None]:
        """Prefill: compute the sequence except its last token, and up to `left` before it, by yielding the work."""
        most, _ = self.reading(sequence)
        while (behind := len(sequence.tokens) - 1 - len(sequence.slots)) > left:
            rows = self.pool.place_text(sequence, min(behind, most))
            sequence.asked = len(rows)
            output = yield Work(self, sequence, rows, 0)
            sequence.asked = 0
            if see:
                see(output.hidden)

    def score(self, sequence: Sequence, draft: Draft, see: See | None = None) -> Scores:
        """Compute the draft's rows, and before them all tokens of the sequence that are not computed yet.

        The scores are valid until the next call. `see` gets the hidden states of those tokens, in order.
        """
        return alone(self.scoring(sequence, draft, see))

    def scoring(self, sequence: Sequence, draft: Draft, see: See | None = None) -> Asking[Scores]:
        """`score`, by yielding the work."""
        if not (draft.is_chain or self.model.branches):
            raise AssertionError("a branching draft reached a model that takes chains only")
        _, left = self.reading(sequence)
        yield from self.read(sequence, see, left)
        output = yield Work(self, sequence, self.pool.place(sequence, draft), len(draft))
        if see and len(output.hidden) > len(draft):
            see(output.hidden[: -len(draft)])
        return Scores(output.logits, output.hidden[-len(draft) :], output.found)

    def run(self, works: Items[Work]) -> list[Output | InvalidLogits]:
        """Compute work of several sequences by the same layers, batched. The outputs are valid until the next call.

        With a dense mask, masked values are multiplied by zero, so a NaN in one sequence would spread to all. If there
        is a NaN, sequences are computed one by one; the one that has it gets an error, and its slots are zeroed.
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

        A `question` is answered too. The output is valid until the next call.
        """
        output = self.model.forward(self.pool, rows, logits, start, stop, hidden, self.compiled)
        return answered(output, question)


def together(works: Items[Work | Turn]) -> Items[Any]:
    """Do work that can be batched, and return the replies."""
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
    """The result of `asking`, with its work done at once."""
    try:
        work = next(asking)
        while True:
            work = asking.send(work.do())
    except StopIteration as end:
        found: T = end.value
        return found


def joined(works: Items[Work]) -> torch.Tensor | None:
    """The hidden states that all rows start from; None for rows that start at the first layer."""
    left = [work.hidden for work in works if work.hidden is not None]
    return torch.cat(left) if left else None


def deal(works: Items[Work], output: Output) -> list[Output]:
    """Each one's share of a batched output. Questions are answered too."""
    asked = [work.logits for work in works]
    hidden = torch.split(output.hidden, [len(work.rows) for work in works])
    logits = torch.split(output.logits, asked)
    found = [None] * len(works) if output.found is None else torch.split(output.found, asked, 1)
    shares = [Output(*share) for share in zip(logits, hidden, found, strict=True)]
    return [answered(share, work.question) for share, work in zip(shares, works, strict=True)]


def _is_nan(output: Output | InvalidLogits) -> bool:
    return isinstance(output, Output) and bool(output.hidden.isnan().any())
