"""Lookahead Decoding (arXiv 2402.02057): n-grams from the model's own Jacobi trajectory, verified as they are made.

`sources/window.py` shows the window, and does on a GPU what the drafter here does in plain Python.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..draft import Draft, Scores, Tree, Verdict
from ..errors import InputError
from ..picking import Picker
from ..pool import Sequence
from ..runtime.costs import Prices
from ..runtime.plain import Engine
from ..sources.base import Plan, Source
from ..sources.history import PLACES
from ..sources.history import History as Repeated
from ..sources.window import TRUST, Settings, Window
from .base import Drafter, Method, Size, prices_of
from .ngrams import History, NgramPool

HISTORY_FLOOR = 0.002  # below this probability, lookups in the sequence leave their rows to the pool
DOUBT = 4.0  # prior of the pool's acceptance, in lookups that are right as often as TRUST says
PUBLISHED: dict[str, Any] = {"longest_key": 1, "reach": 0, "recycle": False}  # the paper's values


@dataclass(frozen=True)
class Lookahead(Method):
    """Lookahead Decoding.

    If step costs were measured (`outpace calibrate`), they determine window, ngram and guesses unless these are given.
    With a window of one column, only as much is drafted as pays.

    Attributes:
        window: W, how many future positions the window covers.
        ngram: N, the length of the collected n-grams.
        guesses: G, the most n-grams verified per step; also how many the pool keeps per first token.
        prompt_pool: also draft from the prompt and the answer so far.
        longest_key: the most last tokens to look up by; 1 is the paper's pool.
        reach: the longest continuation drafted from prompt and answer. 0: they are cut into n-grams for the pool, as
            in the paper.
        recycle: collect n-grams from the model's output at every row, rejected ones too, not just in the window.
        published: the paper's algorithm only: `longest_key`, `reach` and `recycle` are 1, 0 and False; `prompt_pool` is
            the paper's "prompt as reference". Otherwise rows of the window may be accepted too, not just the
            pool's n-grams, and drafting starts before all levels of the window are filled.
    """

    name = "lookahead"
    about = "n-grams of the model's own Jacobi trajectory"
    sizes = (
        Size({"window": 15, "ngram": 5, "guesses": 15}, rows=108, tokens=2.49),
        Size({"window": 7, "ngram": 4, "guesses": 7}, rows=42, tokens=2.27),
        Size({"window": 4, "ngram": 3, "guesses": 4}, rows=16, tokens=1.95),
        Size({"window": 1, "ngram": 2, "guesses": 16}, rows=1, tokens=1.0),
    )

    window: int = 15
    ngram: int = 5
    guesses: int = 15
    prompt_pool: bool = True
    longest_key: int = 4
    reach: int = 16
    recycle: bool = True
    published: bool = False

    def __post_init__(self) -> None:
        self.check(window=(1, 256), ngram=(2, 32), guesses=(0, 256), longest_key=(1, 16), reach=(0, 64))
        if self.published:
            for item in fields(self):
                if item.name in PUBLISHED and getattr(self, item.name) not in (item.default, PUBLISHED[item.name]):
                    raise InputError(
                        f"lookahead: {item.name}={getattr(self, item.name)} is not in the paper. Leave out this "
                        "setting, or published."
                    )
                object.__setattr__(self, item.name, PUBLISHED.get(item.name, getattr(self, item.name)))

    @property
    def dealt(self) -> bool:
        return True

    def plan(self, engine: Engine) -> Plan:
        reads = self.prompt_pool and not self.reach
        shape = (self.window, self.ngram, self.guesses, self.longest_key)
        settings = Settings(*shape, self.recycle, self.published, reads)
        costs = engine.costs if self.window == 1 else None

        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = [Window(settings, lanes, device)]
            if self.prompt_pool and self.reach and self.guesses:
                found.append(Repeated(self.longest_key, self.reach, PLACES, "history", device, HISTORY_FLOOR))
            return found

        rows = 1 + self.guesses * (self.ngram - 1) + Window.probes_of(self.window, self.ngram)
        return Plan(sources, rows, prices=prices_of(costs.price if costs else None, rows, engine.model.device))

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        return _Drafter(self, engine, sequence, picker)


class _Drafter(Drafter):
    def __init__(self, method: Lookahead, engine: Engine, sequence: Sequence, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.method = method
        self.random = random.Random(picker.sampling.seed)
        self.pool = NgramPool(method.longest_key, method.guesses)
        self.history = History(method.longest_key)
        for length in range(1, len(sequence.tokens) + 1):
            self._read(sequence.tokens[max(0, length - method.ngram) : length])
        # Levels as at the top of this file, but level 0 is without the current token. It starts longer: each step until
        # all levels are filled drops one token of every level.
        spine = method.window - 1 + method.ngram - 2
        self.levels: list[list[int]] = [self.random.choices(sequence.tokens, k=spine)]
        self.tips: list[int] = []  # for each column, the row that ends it
        costs = engine.costs if method.window == 1 else None
        self.price = costs.price if costs else None
        # By key length: how often the pool had the next token, and how often it had anything.
        self.right, self.asked = [DOUBT * trust for trust in TRUST], [DOUBT for _ in TRUST]

    @property
    def full(self) -> bool:
        return len(self.levels) == self.method.ngram - 1

    def draft(self, room: int) -> Draft:
        method = self.method
        tree = Tree(self.sequence.tokens[-1])
        if self.full or not method.published:
            self._add_guesses(tree, room)
        candidates = len(tree)
        self._add_window(tree, room)
        return tree.draft(candidates if method.published else None)

    def _add_guesses(self, tree: Tree, room: int) -> None:
        """Add lookups in the sequence, then n-grams of the pool, up to as many rows as G whole n-grams have."""
        ngram = self.method.ngram - 1
        most, deepest, length = 1 + self.method.guesses * ngram, min(self.method.reach, room), min(ngram, room)
        expected = self.history.grow(tree, most, deepest, "history", floor=HISTORY_FLOOR, price=self.price)
        if self.price:
            self._add_what_pays(tree, most, length, expected, self.price)
            return
        for run in self.pool.continuations(self.sequence.tokens):
            if len(tree) >= most:
                return
            tree.insert(self._prolonged(run, length), "n-gram")

    def _add_what_pays(self, tree: Tree, most: int, length: int, expected: float, price: Prices) -> None:
        """Add n-grams of the pool as far as they pay, in a step with `expected` tokens without them."""
        best, rows = expected / price(len(tree)), len(tree)
        chances = self._chances(length)
        for path in sorted(chances, key=lambda path: -chances[path]):  # stable: parents come first
            # All further ones are less likely, so none of them can pay.
            if len(tree) >= most or chances[path] <= best * price.slope(len(tree)):
                break
            before = len(tree)
            tree.insert(path, "n-gram")
            expected += chances[path] * (len(tree) - before)  # 0 if a lookup has added it already
            if expected / price(len(tree)) > best:
                best, rows = expected / price(len(tree)), len(tree)
        tree.cut(rows)

    def _chances(self, length: int) -> dict[tuple[int, ...], float]:
        """The probability of each path of up to `length` tokens from the pool. None is more likely than its parent.

        Lookups in the sequence come first, then the pool's n-grams, longer keys first. The n-grams of a key share its
        acceptance rate in this sequence equally. Within an n-gram each token makes the match longer: TRUST.
        """
        text = self.sequence.tokens
        chances: dict[tuple[int, ...], float] = defaultdict(float)
        belief = 1 - sum(self.history.chances(text[-self.method.longest_key :]).values())
        for key, runs in self.pool.by_key(text):
            trust = self.right[_place(key)] / self.asked[_place(key)]
            for run in runs:
                chance, path = belief * trust / len(runs), self._prolonged(run, length)
                for depth in range(1, len(path) + 1):
                    chances[tuple(path[:depth])] += chance
                    chance *= TRUST[_place(key + depth)]
            belief *= 1 - trust
        return chances

    def _prolonged(self, run: Items[int], length: int) -> list[int]:
        path = list(run[:length])
        while self.method.recycle and len(path) < length:
            more = next(self.pool.continuations(path), None)
            if more is None:
                break
            path += more[: length - len(path)]
        return path

    def _add_window(self, tree: Tree, room: int) -> None:
        self.tips = []
        deepest = len(self.levels[0]) + len(self.levels) - 1
        if deepest > room:
            return  # no window near the end of the context
        spine = [0, *tree.insert(self.levels[0], "window")]
        for column, row in enumerate(spine):
            tooth = [level[column] for level in self.levels[1:]]
            self.tips.append(tree.insert(tooth, "window", below=row)[-1] if tooth else row)

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        text, ngram = self.sequence.tokens, self.method.ngram
        if self.price:
            new = len(verdict.tokens)
            self._judge(text[-new - self.method.longest_key : -new], verdict.tokens[0])
        for length in range(len(text) - len(verdict.tokens) + 1, len(text) + 1):
            self._read(text[max(0, length - ngram) : length])
        if self.method.recycle:
            tokens, parents, best = draft.tokens, draft.parents, scores.best
            self.pool.add(*((tokens[parents[row]], tokens[row], best[row]) for row in range(len(draft) - 1, 0, -1)))
        if not self.tips:
            return
        found = [scores.best[tip] for tip in self.tips]
        if self.full:
            self._collect(draft.tokens[0], found)
            _, first, *others = [*self.levels, found]
            self.levels = [first[1:], *others]
        else:
            self.levels = [level[1:] for level in [*self.levels, found]]

    def _judge(self, end: list[int], token: int) -> None:
        """Count whether the pool has `token`, which followed this end, drafted or not."""
        for key, runs in self.pool.by_key(end):
            self.asked[_place(key)] += 1
            self.right[_place(key)] += any(run[0] == token for run in runs)

    def _read(self, end: list[int]) -> None:
        """Append one token of the sequence, the last of `end`."""
        if self.method.prompt_pool and self.method.reach:
            self.history.extend(end[-1:])
        elif self.method.prompt_pool and len(end) == self.method.ngram:
            self.pool.add(end)

    def _collect(self, current: int, found: list[int]) -> None:
        columns = zip([current, *self.levels[0]], *self.levels[1:], found, strict=True)
        self.pool.add(*columns)


def _place(match: int) -> int:
    """The index in TRUST for this match length."""
    return min(match, len(TRUST)) - 1
