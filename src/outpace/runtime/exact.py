"""Exact mode on a CPU: forward passes in which a row has the same bits in every batch."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ..draft import Tree, chain
from ..models.adapter import Model, Output
from ..models.threads import torch_alone
from .plain import Engine, Work
from .turns import Turns

TEXT = 67  # tokens to test the engine with
PIECE = 13  # prefill chunk of the test


class ExactEngine(Engine):
    """An engine for a model that computes exactly."""

    exact = True

    def __init__(self, model: Model, name: str, compiled: bool = False) -> None:
        super().__init__(model, compiled)
        if getattr(model, "native", False):
            self.turns = Turns(torch_alone)
        self.name = f"{name}, compiled" if compiled else name

    def is_exact(self) -> bool:
        """Whether rows have the same bits in a draft tree, one by one, and in a batch, tested on this model."""
        size = self.model.vocabulary
        text = [token % size for token in range(7, 7 + 3 * TEXT, 3)]
        answer = [token % size for token in (11, 5, 29, 17)]
        tree = Tree(text[-1])
        tree.insert([token % size for token in (11, 8, 3)], "check")
        path = [0, *tree.insert(answer, "check")]
        tree.insert([token % size for token in (2, 47, 31)], "check")
        with self.pool.sequence(text[:1]) as sequence:
            self.score(sequence, chain(text[0], (), ""))  # allocates storage, uncompiled
        with self.pool.sequence(text) as sequence:  # all in one forward pass
            together = self.score(sequence, tree.draft()).logits[path].clone()
        whole, beside = text + answer, [text[::-1] + answer] if self.most_texts > 1 else []
        return all(torch.equal(in_pieces(self, texts, TEXT), together) for texts in ([whole], [*beside, whole]))


def in_pieces(engine: Engine, texts: list[list[int]], read: int) -> torch.Tensor:
    """The logits after the last tokens of the last text. All texts are computed in one batch.

    The first `read` tokens are prefilled in chunks of PIECE, the rest one by one.
    """
    found: list[torch.Tensor] = []
    with ExitStack() as stack:
        sequences = [stack.enter_context(engine.pool.sequence(text)) for text in texts]
        done = 0
        while done < len(texts[0]):
            single = done >= read - 1
            count = 1 if single else min(PIECE, read - 1 - done)
            works = [Work(engine, each, engine.pool.place_text(each, count), int(single)) for each in sequences]
            output = engine.run(works)[-1]
            if single and isinstance(output, Output):
                found.append(output.logits.clone())
            done += count
    return torch.cat(found)
