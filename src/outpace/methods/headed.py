"""Drafting with trained heads: what Medusa, Hydra, Amphista and block share."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch

from ..draft import Draft, Scores, Tree, Verdict
from ..errors import InputError, ModelError, OutpaceWarning
from ..heads import KINDS, TRAINABLE, BlockHeads, Heads
from ..heads.exporting import is_reference, load_reference
from ..heads.shipped import hint, of_kind
from ..heads.storing import Stored, is_for, load
from ..models.adapter import Model
from ..picking import Foreseen, Picker, likeliest
from ..pool import Numbers
from ..pool import Sequence as Text
from ..runtime.plain import Asking, Engine
from ..sources.base import Plan, Source
from ..sources.heads import (
    CANDIDATES,
    HeadGuesses,
    PairedGuesses,
    SequentialGuesses,
    likely_paths,
    make_places,
    on_host,
)
from ..sources.history import History as Repeated
from ..sources.recycle import Recycle
from .base import Drafter, Method, prices_of
from .ngrams import Expected, History, Recycled

LONGEST, FLOOR = 4, 0.02  # of lookup: longest match, the least probability of a draft token
PLACES, REACH = 4, 31  # how many matches lookup continues, and how far: exact mode's drafts are at most 31 deep
BEAM = 8  # beam in a program, for heads that depend on each other
NODES = 4  # draft tokens considered per row: with the 256 of 64 rows, building the tree is fast
CONSIDERED = 1.5  # at least this many of them from heads
RECYCLED = 0.5  # and this many recycled ones
DEEPER = 1.5  # see `likely_paths`; for heads conditioned on the token before
Ranks: TypeAlias = "tuple[int, ...]"
Expect: TypeAlias = "Callable[[int, Numbers], Foreseen]"
"""From a depth and the paths [paths, depth] to it: the top tokens after each path, or one line for all."""


class Ready(NamedTuple):
    """Loaded heads."""

    heads: Heads
    about: Stored
    name: str = "given"  # where they come from
    shipped: bool = False  # installed, not given by the user: calibration measured these


def shipped(kind: str, model: Model) -> Ready | None:
    """Installed heads of this kind for the model."""
    for folder in of_kind(kind):
        if is_for(folder, model):
            return Ready(*load(folder, model, TRAINABLE), f"{folder.parent.name}/{kind}", shipped=True)
    return None


def load_heads(name: str, heads: Any, model: Model) -> Ready:
    """Heads for the method `name`: given ones, or those of a folder."""
    if isinstance(heads, Heads):
        return Ready(heads.copied(model.device, model.dtype), Stored({}))
    folder = Path(heads).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{name}: {folder} is not a folder of heads. Create one with `outpace train`.")
    if is_reference(folder):
        return Ready(load_reference(folder, model), Stored({}), str(folder))
    return Ready(*load(folder, model, KINDS), str(folder))


def check_width(name: str, heads: Heads, model: Model) -> None:
    """Raise ModelError for heads that do not fit the model."""
    if heads.shape.width != model.width:
        raise ModelError(
            f"{name}: these heads read hidden states of width {heads.shape.width}; those of {model.name} have "
            f"{model.width}. Heads work only with the model they were trained for."
        )


@dataclass(frozen=True)
class Headed(Method):
    """Settings of all methods that draft with heads.

    Attributes:
        heads: a folder of trained heads; by default, installed ones for this model.
        rows: the most rows of a draft.
        lookup: prompt lookup drafts too, paths as long as this share of the rows; none with a tree of your own.
        recycled: also draft the model's top-ranked next tokens from when it last computed the same token, accepted or
            not: how many per token; none with a tree of your own. More tokens per step: a few per cent faster on a GPU,
            slower on a CPU.
        tree: "confidence" builds a tree in each step from the heads' probabilities; "measured" uses one fixed tree,
            stored with the heads, the most likely by their measured accuracies; or paths of ranks, like
            [[0], [0, 0], [1]].
        top: how many top tokens of a head are considered.
        beam: how many paths are followed from one depth to the next.
        coupled: when sampling, rank a head's tokens with the noise that the target will sample with.
        priced: draft as many of these rows as pay, if step costs were measured (`outpace calibrate`). If the method
            proved slower than plain decoding there, heads are not used, unless you give heads or a tree.
    """

    kind: ClassVar[str]

    heads: Any = None
    rows: int = 64
    lookup: float = 0.5
    recycled: int = 0
    tree: Any = "confidence"
    top: int = 10
    beam: int = 64
    coupled: bool = True
    priced: bool = True

    def __post_init__(self) -> None:
        self.check(rows=(1, 1024), lookup=(0.0, 1.0), recycled=(0, 32), top=(1, 256), beam=(1, 1024))
        if self.tree not in ("confidence", "measured"):
            object.__setattr__(self, "tree", read_tree(self.name, self.tree))

    def prepare(self, model: Model) -> Method:
        method = super().prepare(model)
        assert isinstance(method, Headed)
        ready = method.heads if isinstance(method.heads, Ready) else self._load(model)
        check_width(self.name, ready.heads, model)
        if not isinstance(method.tree, str):
            deepest, widest = max(map(len, method.tree), default=0), max(map(max, method.tree), default=0)
            if deepest > ready.heads.count:
                raise InputError(
                    f"{self.name}: the tree is {deepest} tokens deep, and there are {ready.heads.count} heads. "
                    f"Leave out paths of more than {ready.heads.count} ranks."
                )
            if widest >= model.vocabulary:
                raise InputError(
                    f"{self.name}: the tree has rank {widest}; the vocabulary has {model.vocabulary} tokens."
                )
        if method.tree == "measured" and not ready.about.tree:
            raise InputError(f"{self.name}: these heads have no measured accuracies. Use tree='confidence'.")
        return replace(method, heads=ready)

    def _load(self, model: Model) -> Ready:
        if self.heads is not None:
            found = load_heads(self.name, self.heads, model)
            if found.heads.kind != self.kind:
                raise ModelError(
                    f"{found.name} holds {found.heads.kind} heads, not {self.kind}. Use the method {found.heads.kind}."
                )
            return found
        if (own := shipped(self.kind, model)) is not None:
            return own
        raise ModelError(
            f"{self.name}: there are no trained heads for {model.name}. Train some with `outpace train {self.kind} "
            f"--model MODEL --prompts FILE --out FOLDER`, and give them: heads='FOLDER/{self.kind}', in a terminal "
            f"--set heads=FOLDER/{self.kind}.{hint()}"
        )

    @property
    def reader(self) -> object:
        return self.heads.heads if self.heads.heads.reads_text else None

    def plan(self, engine: Engine) -> Plan | None:
        heads, about = self.heads.heads, self.heads.about
        if heads.sequential and self.tree != "confidence":
            return None  # the host builds the trees
        costs = engine.costs if self.priced else None
        grown = isinstance(self.tree, str)
        idle = bool(costs and grown and self.heads.shipped and costs.paces.get(self.name, 1.0) < 1.0)
        repeated = int((1.0 if idle else self.lookup) * (self.rows - 1)) if grown else 0
        recycled = max(1, int(RECYCLED * self.rows)) if self.recycled and grown else 0
        worths: list[float] | None = None
        if self.tree == "confidence":
            others = min(REACH, repeated) * min(PLACES, repeated) + recycled
            most = max(int(CONSIDERED * self.rows), NODES * self.rows - others)
            paths = paths_of(self.heads, min(self.top, engine.model.vocabulary), most)
        elif self.tree == "measured":
            paths = [tuple(path) for path in about.tree[: self.rows - 1]]
            worths = [sum(map(math.log, chances_along(path, about.accuracies))) for path in paths]
        else:
            paths = sorted(self.tree, key=len)
            worths = [-0.001 * place for place in range(len(paths))]

        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = []
            if paths and not idle:
                how = (self.top, self.beam, self.coupled)
                found.append(guesses_of(heads, engine, paths, lanes, *how, worths))
            if repeated:
                found.append(Repeated(LONGEST, min(REACH, repeated), min(PLACES, repeated), "lookup", device, FLOOR))
            if recycled:
                found.append(Recycle(self.recycled, recycled, lanes, device))
            return found

        rows = self.rows if grown else 1 + len(paths)
        price = costs.price_with("" if idle else self.name) if costs else None
        return Plan(sources, rows, prices=prices_of(price, rows, engine.model.device))

    def start(self, engine: Engine, sequence: Text, picker: Picker) -> Drafter:
        return _Drafter(self, engine, sequence, picker)


class _Drafter(Drafter):
    def __init__(self, method: Headed, engine: Engine, sequence: Text, picker: Picker) -> None:
        super().__init__(engine, sequence, picker)
        self.method = method
        self.heads, about = method.heads[:2]
        self.ends = engine.model.ends()
        ends, self.quick = on_host(self.heads, engine.model)
        engine.model.keep(self.heads.reads)
        self.follower = self.quick.follow(ends, engine.pool, engine.model.layers)
        costs = engine.costs if method.priced else None
        grown = isinstance(method.tree, str)
        pace = costs.paces.get(method.name, 1.0) if costs and grown and method.heads.shipped else 1.0
        self.idle = pace < 1.0  # heads are not used
        if self.idle:
            warnings.warn(
                f"{method.name}: with these heads {engine.model.name} was measured to be {pace:.2f} times as fast as "
                "plain decoding here, so they are not used; drafts come from prompt lookup only. "
                "priced=False (--set priced=false) uses them all the same.",
                OutpaceWarning,
                stacklevel=2,
            )
        self.price = costs.price_with("" if self.idle else method.name) if costs and grown else None
        self.new: list[torch.Tensor] = []  # hidden states that the heads have not read
        share = 1.0 if self.idle else method.lookup
        self.reach = min(REACH, int(share * (method.rows - 1))) if grown else 0
        self.history = History(LONGEST)
        if self.reach:
            self.history.extend(sequence.tokens)
        self.recycled = Recycled(method.recycled) if method.recycled and grown else None
        self.rows = method.rows
        self.paths: dict[Ranks, float] | None = None  # of a fixed tree, with the probabilities of their last tokens
        if not isinstance(method.tree, str):
            self.paths, self.rows = dict.fromkeys(method.tree, 1.0), 1 + len(method.tree)
        elif method.tree == "measured":
            paths = map(tuple, about.tree[: method.rows - 1])
            self.paths = {path: chances_along(path, about.accuracies)[-1] for path in paths}
        self.top = method.top if self.paths is None else 1 + max((max(path) for path in self.paths), default=0)
        self.named = picker.candidates(self.top)  # tokens of each head that are copied from the device

    def score(self, draft: Draft) -> Asking[Scores]:
        see = self._see if self.heads.reads_text and not self.idle else None
        return self.engine.scoring(self.sequence, draft, see)

    def _see(self, hidden: torch.Tensor) -> None:
        self.new.append(hidden.clone())

    def learn(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        if not self.idle:
            self.new.append(scores.hidden[list(verdict.rows)])
        if self.reach:
            self.history.extend(verdict.tokens)
        if self.recycled:
            self.recycled.learn(draft.tokens, scores.logits, verdict.rows[-1])

    @torch.inference_mode()
    def draft(self, room: int) -> Draft:
        tree = Tree(self.sequence.tokens[-1])
        depth = min(self.heads.count, room)
        self.history.grow(
            tree,
            self.rows,
            min(max(self.heads.count, self.reach), room),
            "lookup",
            price=self.price,
            recycled=self.recycled,
            heads=self._expected(self._begin(), depth) if self.new and depth else None,
        )
        return tree.draft()

    def _expected(self, expect: Expect, depth: int) -> dict[int, Expected]:
        """What the heads expect, up to this depth."""
        if self.paths is not None:
            return along(expect, {path: chance for path, chance in self.paths.items() if len(path) <= depth})
        # A row that gains less than a row costs on the flattest part of the curve never pays.
        least = math.log(self.price.least / self.price(1)) if self.price and self.price.least > 0 else -math.inf
        return likeliest_paths(expect, depth, self.rows - 1, self.method.beam, least)

    def _begin(self) -> Expect:
        """Feed the heads new rows. Their predictions are fetched when asked for."""
        hidden = self.new[0] if len(self.new) == 1 else torch.cat(self.new)
        self.new = []
        tokens, first = self.sequence.tokens[-len(hidden) :], len(self.sequence.tokens)
        read = self.engine.model.part(hidden, self.heads.reads)
        self.follower.feed(read, torch.tensor(tokens, device=hidden.device), self.sequence)
        if self.heads.reads_text:
            self.sequence.reader, self.sequence.read = self.heads, len(self.sequence.slots)
        if self.heads.sequential:

            def expect(place: int, paths: Numbers) -> Foreseen:
                guesses = self.follower.guess(torch.from_numpy(paths).to(hidden.device))
                return self._foresee(likeliest(guesses, self.named), [first + place] * len(paths))

            return expect
        if isinstance(self.quick, BlockHeads):
            return self._paired(self.quick, first)
        found = likeliest(self.follower.guesses(), self.named)
        together = lru_cache(lambda: self._foresee(found, range(first, first + self.heads.count)))
        return lambda place, _: Foreseen(together().tokens[[place]], together().chances[[place]])

    def _paired(self, heads: BlockHeads, first: int) -> Expect:
        """Predictions that depend on the token before, among a few candidates at each depth."""
        logits, states = self.follower.think()
        count = heads.count
        found = likeliest(logits[:, 0], max(CANDIDATES, self.top))
        tokens, most = found[0].long(), found.shape[2]
        told = heads.pairs(states, tokens[:, None], self.ends).float()
        chances = heads.judge(found[1, :, None].float(), told)[:, 0]  # [count, before, guess]
        lines = tokens[:, None].expand_as(chances)
        if self.picker.greedy:
            chances, order = chances.sort(dim=-1, descending=True)
            chances, lines = heads.confide(chances[:, None], states)[:, 0], lines.gather(-1, order)
        both = torch.stack([lines.double(), chances.double()]).flatten(1, 2)
        positions = [first + place for place in range(count) for _ in range(most)]

        @lru_cache
        def foreseen() -> tuple[Foreseen, Numbers]:
            return self.picker.foresee(both, positions, self.top, self.method.coupled), tokens.cpu().numpy()

        def expect(place: int, paths: Numbers) -> Foreseen:
            every, known = foreseen()
            before = np.zeros(len(paths), dtype=np.int64)
            if place:
                before = (known[place - 1] == paths[:, -1:]).argmax(1)
            return Foreseen(every.tokens[place * most + before], every.chances[place * most + before])

        return expect

    def _foresee(self, found: torch.Tensor, positions: Sequence[int]) -> Foreseen:
        return self.picker.foresee(found, positions, self.top, self.method.coupled)


def guesses_of(
    heads: Heads,
    engine: Engine,
    paths: Sequence[Ranks],
    lanes: int,
    top: int,
    beam: int = BEAM,
    coupled: bool = True,
    worths: Sequence[float] | None = None,
) -> Source:
    """The source for heads in a program: along `paths` of ranks, or by beam search if heads depend on each other."""
    device = engine.model.device
    engine.model.keep(heads.reads)
    pick = partial(engine.model.part, layers=heads.reads)
    shared = (engine.model.ends(), engine.pool, engine.model.layers)
    if heads.sequential:
        return SequentialGuesses(heads, shared, pick, top, min(beam, BEAM), lanes, device, coupled)
    make_places(heads, shared, device)
    compiled = engine.compiling and device.type == "cuda"
    kind = PairedGuesses if heads.paired else HeadGuesses
    return kind(heads, shared, pick, paths, lanes, device, coupled, worths, compiled)


def paths_of(ready: Ready, top: int, most: int) -> list[Ranks]:
    """The paths of ranks that a program considers: short ones of low ranks."""
    return likely_paths(ready.heads.count, top, most, DEEPER if ready.heads.paired else 1)


def likeliest_paths(expect: Expect, depth: int, most: int, beam: int, least: float = -math.inf) -> dict[int, Expected]:
    """What heads expect: the `most` likeliest tokens, with their paths.

    The `beam` most likely paths of each depth are expanded, unless their log probability is below `least` or the tree
    can already be filled with more likely tokens: no token is more likely than its parent.
    """
    worth, paths, nodes = np.zeros(1), np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64)
    count = 1  # nodes; `nodes` has the last node of each path to expand
    levels: list[tuple[Any, Numbers, Numbers, Any]] = []  # worth, parent, token and log probability of new nodes
    for place in range(min(depth, most)):
        if not len(paths):
            break
        found = expect(place, paths)
        worths = worth[:, None] + found.chances
        best = np.argsort(-worths, axis=None, kind="stable")[: min(beam, most - place)]
        path, rank = np.divmod(best, worths.shape[1])
        line = path if len(found.tokens) > 1 else 0
        token = found.tokens[line, rank]
        worth, paths = worths[path, rank], np.concatenate([paths[path], token[:, None]], 1)
        levels.append((worth, nodes[path], token, found.chances[line, rank]))
        nodes = np.arange(count, count + len(best))
        count += len(best)
        known = np.concatenate([level[0] for level in levels])
        limit = max(least, np.partition(known, -most)[-most]) if len(known) >= most else least
        worth, paths, nodes = worth[worth >= limit], paths[worth >= limit], nodes[worth >= limit]
    if not levels:
        return {}
    worths, parents, tokens, chances = map(np.concatenate, zip(*levels, strict=True))
    # No token is more likely than its parent, which comes first in the list, so no child is taken without its parent.
    order = np.argsort(-worths, kind="stable")[:most]
    after: dict[int, dict[int, Expected]] = {0: {}}  # by node
    lines = (part[order].tolist() for part in (parents, tokens, np.exp(chances)))
    for node, parent, token, chance in zip((order + 1).tolist(), *lines, strict=True):
        after[node] = {}
        after[parent][token] = Expected(chance, after[node])
    return after[0]


def along(expect: Expect, paths: Mapping[Ranks, float]) -> dict[int, Expected]:
    """What heads expect along paths of ranks, with the probabilities of their last tokens. Prefixes come first."""
    after: dict[Ranks, dict[int, Expected]] = {(): {}}
    words: dict[Ranks, tuple[int, ...]] = {(): ()}
    for depth in range(1, max(map(len, paths), default=0) + 1):
        level = [path for path in paths if len(path) == depth]
        parents = sorted({path[:-1] for path in level})
        found = expect(depth - 1, np.array([words[parent] for parent in parents], dtype=np.int64))
        for path in level:
            line = parents.index(path[:-1]) if len(found.tokens) > 1 else 0
            token = int(found.tokens[line, path[-1]])
            words[path], after[path] = (*words[path[:-1]], token), {}
            after[path[:-1]].setdefault(token, Expected(paths[path], after[path]))
    return after[()]


def read_tree(name: str, tree: Any) -> tuple[Ranks, ...]:
    """A tree from a list of paths of ranks, or from its JSON. The list must have every prefix of its paths."""
    try:
        paths = [tuple(path) for path in (json.loads(tree) if isinstance(tree, str) else tree)]
        whole = all(path and all(isinstance(rank, int) and rank >= 0 for rank in path) for path in paths)
    except (TypeError, ValueError):
        whole, paths = False, []
    if not whole:
        raise InputError(
            f"{name}: tree={tree!r} must be 'confidence', 'measured' or paths of ranks like [[0], [0, 0], [1]]."
        )
    for path in sorted(paths):
        if len(path) > 1 and path[:-1] not in paths:
            raise InputError(f"{name}: the tree has the path {path} but not its parent {path[:-1]}.")
    return tuple(dict.fromkeys(paths))


def chances_along(path: Ranks, accuracies: Sequence[Sequence[float]]) -> list[float]:
    """The measured probability of each rank of a path."""
    return [max(accuracies[head][rank], 1e-9) for head, rank in enumerate(path)]
