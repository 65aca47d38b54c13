"""SWIFT (arXiv 2410.06916): the model drafts with some of its layers skipped, and searches on the fly for which.

The paper skips attention and MLPs one by one; here a layer is skipped as a whole.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..draft import MODEL, NOTHING, Draft, Scores, chain
from ..errors import InvalidLogits, UnsupportedModel
from ..models.adapter import Model, Output
from ..picking import Picker
from ..pool import Rows, Sequence
from ..runtime.plain import Asking, Engine, Work
from .adadecode import check_cuts
from .base import Drafter, Method

LEAST = 8  # the fewest tokens of the answer to score a set of layers on
GOOD = 0.95  # the score that ends the search
MODELLED = 25  # every 25th set is proposed by a Gaussian process
DRAWN = 64  # random sets that it chooses from
NOISE = 0.01  # variance of a score


@dataclass(frozen=True)
class Swift(Method):
    """A draft chain by the model itself without some of its layers. Nothing is trained.

    Attributes:
        skip: the share of layers that are skipped. The first and the last never are.
        length: the most tokens that are drafted; 0 is plain decoding.
        confidence: drafting ends after a token that is less probable than this.
        window: how many of the answer's last tokens a set of layers is scored on.
        search: how many sets are scored, one per step; all sequences of a Decoder share the search.
    """

    name = "swift"
    about = "the model itself drafts, with layers skipped that it chooses on the fly"

    skip: float = 0.45
    length: int = 8
    confidence: float = 0.8
    window: int = 32
    search: int = 100

    def __post_init__(self) -> None:
        self.check(skip=(0.0, 1.0), length=(0, 64), confidence=(0.0, 1.0), window=(LEAST, 1024), search=(0, 100_000))

    @property
    def branches(self) -> bool:
        return False

    def prepare(self, model: Model) -> Method:
        if model.layers < 3:
            raise UnsupportedModel(f"{model.name} has {model.layers} layers, and {self.name} needs 3 or more.")
        check_cuts(model, (model.layers // 2,))
        return self

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return _Drafter(self, engine, sequence, picker)


class Search:
    """Finds the layers to skip. A set's score is the share of tokens that the model predicts correctly without them.

    It starts with evenly spaced layers, then draws sets at random, and keeps the best. Every 25th set is the most
    promising of many according to a Gaussian process over the scored sets; sets with common layers are close.
    """

    def __init__(self, layers: int, skip: float, most: int) -> None:
        self.layers, self.most = layers, most
        self.count = max(1, min(layers - 2, round(skip * layers)))  # of layers to skip
        self.best: frozenset[int] = frozenset(np.linspace(1, layers - 2, self.count).round().astype(int).tolist())
        self.score = -1.0
        self.judged: list[tuple[frozenset[int], float]] = []
        self._draw = random.Random(0)

    @property
    def over(self) -> bool:
        """Whether the search has ended."""
        return len(self.judged) >= self.most or self.score >= GOOD

    def propose(self) -> frozenset[int]:
        """The set to score next; the first is the evenly spaced one."""
        if not self.judged:
            return self.best
        if (len(self.judged) + 1) % MODELLED:
            return self._random()
        return self._promising([self._random() for _ in range(DRAWN)])

    def learn(self, skipped: frozenset[int], score: float) -> None:
        """Record a set's score."""
        self.judged.append((skipped, score))
        if score > self.score:
            self.best, self.score = skipped, score

    def _random(self) -> frozenset[int]:
        return frozenset(self._draw.sample(range(1, self.layers - 1), self.count))

    def _promising(self, drawn: list[frozenset[int]]) -> frozenset[int]:
        known, new = self._bits(skipped for skipped, _ in self.judged), self._bits(drawn)
        scores = np.array([score for _, score in self.judged])

        def alike(some: Any, others: Any) -> Any:
            return np.exp(-np.abs(some[:, None] - others[None]).sum(-1) / self.count)

        between = alike(new, known)
        weights = np.linalg.solve(alike(known, known) + NOISE * np.eye(len(known)), between.T).T
        spread = np.sqrt(np.maximum(0.0, 1.0 - (weights * between).sum(1)))
        hopes = weights @ (scores - scores.mean()) + scores.std() * spread
        return drawn[int(hopes.argmax())]

    def _bits(self, sets: Iterable[frozenset[int]]) -> Any:
        return np.array([[layer in skipped for layer in range(self.layers)] for skipped in sets], dtype=np.float64)


def kept(skipped: frozenset[int], layers: int) -> list[tuple[int, int]]:
    """The ranges of layers that are run.

    >>> kept(frozenset([1, 2, 5]), 7)
    [(0, 1), (3, 5), (6, 7)]
    """
    edges = [-1, *sorted(skipped), layers]
    return [(low + 1, high) for low, high in itertools.pairwise(edges) if low + 1 < high]


class _Drafter(Drafter):
    extends = False
    asks = True

    def __init__(self, method: Swift, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.method = method
        key = (Swift, method.skip, method.search)
        if key not in engine.notes:
            # Without CUDA graphs: there would be one for each range of layers.
            apart = Engine(engine.model)
            apart.pool = engine.pool
            engine.notes[key] = Search(engine.model.layers, method.skip, method.search), apart
        self.search, self.apart = engine.notes[key]
        self.guesser = picker.for_drafts()

    def drafting(self, room: int) -> Asking[Draft]:
        sequence, pool = self.sequence, self.engine.pool
        tokens = [sequence.tokens[-1]]
        most = min(self.method.length, room)
        # The first step prefills through all layers, and drafts nothing.
        if most == 0 or len(sequence.slots) < sequence.position:
            return chain(tokens[0], (), "")
        if not self.search.over:
            yield from self._judge()
        proposals: list[torch.Tensor | None] = [None]
        while len(tokens) <= most:
            pool.extend(sequence)
            rows = pool.chain_from(sequence, tokens, len(tokens) - 1)
            output = yield from self._run(rows, self.search.best)
            token, proposal = self._guess(output.logits[0], [*sequence.tokens, *tokens[1:]])
            if token == NOTHING:
                break  # the logits are invalid; the whole model's may not be
            tokens.append(token)
            proposals.append(proposal)
            if float(output.logits[0].float().softmax(-1)[token]) < self.method.confidence:
                break
        while len(sequence.drafted) < len(tokens):
            pool.extend(sequence)
        return Draft(
            tuple(tokens),
            tuple(range(-1, len(tokens) - 1)),
            len(tokens),
            (MODEL, *("skipping",) * (len(tokens) - 1)),
            tuple(proposals),
        )

    def score(self, draft: Draft) -> Asking[Scores]:
        """Run all layers; they overwrite the draft's slots."""
        if len(draft) == 1 and not self.sequence.drafted:
            return (yield from super().score(draft))
        rows = self.engine.pool.chain_from(self.sequence, draft.tokens, 0)
        output = yield Work(self.engine, self.sequence, rows, len(rows))
        return Scores(output.logits, output.hidden, output.found)

    def _judge(self) -> Asking[None]:
        """Score one set of layers: predict the answer's last tokens again without them."""
        sequence, pool = self.sequence, self.engine.pool
        answered = len(sequence.tokens) - self.picker.prompt_length
        if answered < LEAST:
            return
        count = min(self.method.window, answered)
        skipped = self.search.propose()
        rows = pool.place_again(sequence, count)
        output = yield from self._run(rows, skipped, count)
        pool.free(sequence.drafted)
        sequence.drafted = []
        first = len(sequence.tokens) - count
        said = [self._guess(output.logits[row], sequence.tokens[: first + row])[0] for row in range(count)]
        right = sum(one == other for one, other in zip(said, sequence.tokens[first:], strict=True))
        self.search.learn(skipped, right / count)

    def _guess(self, logits: torch.Tensor, text: list[int]) -> tuple[int, torch.Tensor | None]:
        """A draft token, and the distribution it was sampled from; NOTHING if the logits are invalid."""
        try:
            return self.guesser.guess(logits, text)
        except InvalidLogits:
            return NOTHING, None

    def _run(self, rows: Rows, skipped: frozenset[int], asked: int = 1) -> Asking[Output]:
        """Run rows through the layers that are not skipped."""
        hidden: torch.Tensor | None = None
        for start, stop in kept(skipped, self.engine.model.layers):
            last = stop == self.engine.model.layers
            anew = replace(rows)  # a fresh mask: the pool may have grown meanwhile
            output = yield Work(self.apart, self.sequence, anew, asked if last else 0, start, stop, hidden)
            hidden = output.hidden.clone()
        return output
