"""The plain runtime: rows are executed by ordinary forward passes, on any device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from typing import NamedTuple, TypeAlias

import torch

from ..draft import Draft, Scores
from ..models.adapter import FixedRows, Model, Output
from ..picking import Picker
from ..pool import Pool, Rows, Sequence
from .costs import CostCurve

See: TypeAlias = "Callable[[torch.Tensor], None]"
"""Shown hidden states [rows, width]; they are good until it returns."""

HeadFunction: TypeAlias = "Callable[[FixedRows, torch.Tensor], torch.Tensor]"
"""Of accepted rows, with the token after each, and their hidden states: what heads expect."""


class Question(NamedTuple):
    """What to ask about the last row where a climb has left it, in the same run."""

    owner: Hashable  # names the function: one of the same owner does the same
    function: Callable[[torch.Tensor], torch.Tensor]  # of its hidden state [1, width]


class Engine:
    """A model and the pool its rows live in."""

    name = "plain"

    def __init__(self, model: Model, compiled: bool = False) -> None:
        self.model = model
        self.compiled = compiled  # whether layers are run compiled, by `model.compile_layers()`
        if compiled:
            self.name = "compiled"
        self.costs: CostCurve | None = None  # what steps cost, where it was measured
        self.pool = Pool(model.device)

    def for_one_text(self, picker: Picker | None = None) -> Engine:
        """The engine to write a text with: this one, or one apart for models that see whatever the pool holds.

        `picker` will choose its tokens.
        """
        return self if self.model.branches else Engine(self.model, self.compiled)

    def score(self, sequence: Sequence, draft: Draft, see: See | None = None) -> Scores:
        """Compute the draft's rows, and before them whatever text of the sequence is not computed yet.

        The scores are good until the next call. `see` is shown the hidden states of that text, in order.
        """
        if not (draft.is_chain or self.model.branches):
            raise AssertionError("a branching draft reached a model that takes chains only")
        self._read(sequence, self.model.chunk, see)
        output = self.climb(sequence, self.pool.place(sequence, draft), logits=len(draft))
        if see and len(output.hidden) > len(draft):
            see(output.hidden[: -len(draft)])
        return Scores(output.logits, output.hidden[-len(draft) :])

    def guess_with(
        self,
        function: HeadFunction,
        owner: Hashable,
        sequence: Sequence,
        tokens: Items[int],
        hidden: torch.Tensor,
    ) -> torch.Tensor | None:
        """Run heads on the sequence's newest rows, in places that stay the same from step to step.

        `tokens` are those after each row, `hidden` [rows, width] the target's states. None where the runtime has
        nothing quicker than ordinary calls. `owner` names the function: one of the same owner does the same. The
        result is good until the next call.
        """
        return None

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

    def _read(self, sequence: Sequence, leave: int, see: See | None = None) -> None:
        """Compute text before the last token, in chunks, until at most `leave` tokens of it are not computed."""
        while (behind := len(sequence.tokens) - 1 - len(sequence.slots)) > leave:
            rows = self.pool.place_text(sequence, min(behind, self.model.chunk))
            output = self.model.forward(self.pool, rows, logits=0, compiled=self.compiled)
            if see:
                see(output.hidden)


@torch.inference_mode()
def answered(output: Output, question: Question | None) -> Output:
    """The output with the answer to a question, if there is one."""
    return output if question is None else output._replace(answer=question.function(output.hidden[-1:]))
