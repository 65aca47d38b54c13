"""Draft heads: Medusa's, Amphista's and block's, which draft several tokens at once, and Hydra's, one by one."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from ..models.fusing import Fusion
from ..models.packed import rounded_for
from ..models.products import Products, int8_for
from ..picking import NOISED, Sampling, likeliest
from ..step import fused
from ..step.choosing import Choices, gumbel, needs_of
from ..step.nodes import NEVER, Nodes, mix
from ..step.texts import Texts, signed
from .base import Reading

Ranks: TypeAlias = "tuple[int, ...]"
CANDIDATES = 32  # tokens at a depth that are paired with those at the next
Pick: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""Selects what some heads read from the states that the target kept of rows."""
OPTIONS: dict[str, Any] = {"combo_kernels": True, "triton.autotune_pointwise": False}  # as for the target's layers
_twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by heads in use: see `quick`, `quick_head`


class _Expecting(Reading):
    """Common parts of sources that draft with heads.

    coupled: when sampling, rank draft tokens with the noise that the target will sample with.
    """

    def __init__(self, heads: Any, shared: tuple[Any, Any, int], pick: Pick, top: int, coupled: bool) -> None:
        self.heads, self.shared, self.pick, self.top, self.coupled = heads, shared, pick, top, coupled
        self.reads_text = heads.reads_text
        self.deepest = heads.count
        self.names = tuple(f"head {depth}" for depth in range(1, heads.count + 1))

    @property
    def families(self) -> Sequence[str]:
        return ["heads"] * len(self.names)


def expected(
    logits: torch.Tensor,
    top: int,
    coupled: bool,
    ahead: torch.Tensor,
    texts: Texts,
    choices: Choices,
    needs: frozenset[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top tokens and their log probabilities [lanes, lines, top], from logits [lanes, lines, tokens].

    `ahead` [lanes, lines] are the positions that the tokens are drafted for. When sampling and `coupled`, tokens are
    ranked with the noise that the target will sample with.
    """
    noised = "noise" in needs
    lanes, lines, words = logits.shape
    named = min(max(NOISED, top) if noised else top, words)
    quick = fused.usable(logits.device) and named <= fused.FEW
    found = (fused.likeliest if quick else likeliest)(logits.flatten(0, 1), named).view(2, lanes, lines, -1)
    tokens, chances = found[0].long(), found[1].float()
    if noised:
        tokens, chances = _foreseen(tokens, chances, coupled, ahead, texts, choices)
    missing = max(top - tokens.shape[2], 0)  # if the vocabulary is smaller
    return F.pad(tokens[..., :top], (0, missing)), F.pad(chances[..., :top], (0, missing), value=NEVER)


def _foreseen(
    tokens: torch.Tensor, chances: torch.Tensor, coupled: bool, ahead: torch.Tensor, texts: Texts, choices: Choices
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens ranked with the target's own noise, as in `Picker.foresee`."""
    warm = choices.temperature[: texts.lanes, None, None]
    warmed = chances / torch.where(warm > 0, warm, 1.0)
    if coupled:
        warmed = warmed + gumbel(texts.seeds[:, None].expand_as(ahead), ahead, 0, tokens).float()
    warmed, order = warmed.sort(dim=-1, descending=True)
    drawn = warm > 0
    return (
        torch.where(drawn, tokens.gather(-1, order), tokens),
        torch.where(drawn, warmed.log_softmax(-1), chances),
    )


class _RankPaths(_Expecting):
    """Draft tokens along fixed paths of ranks among the heads' top tokens.

    paths: the paths considered; every prefix of a path is among them.
    worths: their log probabilities, if not those of the heads.
    compiled: whether the heads' forward pass is compiled, with the matrix products of the target's layers.
    coupled: when sampling, rank draft tokens with the noise that the target will sample with.
    """

    _chances: torch.Tensor  # [lanes, …] log probabilities of top tokens

    def __init__(
        self,
        heads: Any,
        shared: tuple[Any, Any, int],
        pick: Pick,
        paths: Sequence[Ranks],
        lanes: int,
        device: torch.device,
        coupled: bool = True,
        worths: Sequence[float] | None = None,
        compiled: bool = False,
    ) -> None:
        ranks = 1 + max((max(path) for path in paths), default=0)
        if compiled:
            ends, *place = shared
            shared = (ends._replace(head=quick_head(ends.head)), *place)
        super().__init__(heads, shared, pick, self._top(ranks, shared[0]), coupled)
        self.nodes = len(paths)
        self._depths = torch.tensor([len(path) for path in paths], device=device)
        padded = [[*path, *[0] * (heads.count - len(path))] for path in paths]  # beyond the path, arbitrary
        self._ranks = torch.tensor(padded, device=device).view(len(paths), heads.count)
        # Compiled if it is captured in a CUDA graph: fewer and larger kernels.
        self._fixed = torch.compile(quick(heads).fixed, dynamic=True, options=OPTIONS) if compiled else heads.fixed
        self._worths = None if worths is None else torch.tensor(worths, device=device)
        self._make(lanes, device, compiled)

    def _top(self, ranks: int, ends: Any) -> int:
        """How many top tokens of each depth are found."""
        return ranks

    def _make(self, lanes: int, device: torch.device, compiled: bool) -> None:
        """Allocate the state."""
        raise NotImplementedError

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        self._chances[lane].fill_(NEVER)

    def feed(self, rows: Any, hidden: torch.Tensor, last: torch.Tensor) -> Any:
        return self._fixed(*self.shared, rows, self.pick(hidden), last)


class HeadGuesses(_RankPaths):
    """At each depth of a path, one of the top tokens of that depth's head."""

    def _make(self, lanes: int, device: torch.device, compiled: bool) -> None:
        count = self.heads.count
        self._tokens = torch.zeros(lanes, count * self.top, dtype=torch.long, device=device)
        self._chances = torch.full((lanes, count * self.top), NEVER, device=device)
        self.state = (self._tokens, self._chances)
        head = torch.arange(count, device=device)
        self._places = head * self.top + self._ranks  # [paths, count] the token at each depth, among all
        self._within = head < self._depths[:, None]

    def expect(self, first: int, fed: Any, texts: Texts, choices: Choices, needs: frozenset[str]) -> None:
        ahead = texts.lengths[:, None] + torch.arange(len(fed), device=fed.device)
        tokens, chances = expected(fed.transpose(0, 1), self.top, self.coupled, ahead, texts, choices, needs)
        lanes = slice(first, first + texts.lanes)
        self._tokens[lanes], self._chances[lanes] = tokens.flatten(1), chances.flatten(1)

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        lanes = texts.lanes
        if fused.usable(texts.device):
            guesses = (self._tokens, self._chances, self._worths)
            return [fused.ranks(self._places, self._depths, *guesses, lanes, self.first + self._depths - 1)]
        tokens = self._tokens[:lanes, self._places]  # [lanes, paths, count]
        chances = torch.where(self._within, self._chances[:lanes, self._places], 0.0).sum(-1)
        if self._worths is not None:
            chances = torch.where(chances > NEVER, self._worths, NEVER)
        depth = torch.arange(1, self.deepest + 1, device=tokens.device)
        hashes = F.pad(mix(tokens, depth).cumsum(-1), (1, 0))
        depths = self._depths.expand(lanes, -1)
        newest = tokens.gather(2, depths[..., None] - 1)[..., 0]
        return [Nodes(newest, depths, hashes, chances, self.first + depths - 1)]


class PairedGuesses(_RankPaths):
    """Block's draft tokens, each conditioned on the one before.

    At each depth a path continues with the token of its rank among those that follow its last token.
    """

    def _top(self, ranks: int, ends: Any) -> int:
        return int(min(max(CANDIDATES, ranks), ends.head.weight.shape[0]))

    def _make(self, lanes: int, device: torch.device, compiled: bool) -> None:
        count, most = self.heads.count, self.top
        self._tokens = torch.zeros(lanes, count, most, dtype=torch.long, device=device)
        self._order = torch.zeros(lanes, count, most, most, dtype=torch.long, device=device)  # [before, rank] tokens
        self._chances = torch.full((lanes, count, most, most), NEVER, device=device)  # their log probabilities
        self.state = (self._tokens, self._order, self._chances)
        self._pair = torch.compile(self._paired, dynamic=True, options=OPTIONS) if compiled else self._paired

    def expect(self, first: int, fed: Any, texts: Texts, choices: Choices, needs: frozenset[str]) -> None:
        logits, states = fed
        count, lanes, _ = logits.shape
        quickly = fused.usable(logits.device) and self.top <= fused.FEW
        found = (fused.likeliest if quickly else likeliest)(logits.flatten(0, 1), self.top).view(2, count, lanes, -1)
        tokens = found[0].long()
        noise = None
        if "noise" in needs:
            ahead = texts.lengths + torch.arange(count, device=logits.device)[:, None]
            noise = torch.zeros_like(found[1], dtype=torch.float32)
            if self.coupled:
                noise = gumbel(texts.seeds.expand_as(ahead), ahead, 0, tokens).float()
        warm = choices.temperature[: texts.lanes] if noise is not None else None
        order, chances = self._pair(states, tokens, found[1].float(), warm, noise)
        mine = slice(first, first + lanes)
        self._tokens[mine], self._order[mine] = tokens.transpose(0, 1), order.transpose(0, 1)
        self._chances[mine] = chances.transpose(0, 1)

    def _paired(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        chances: torch.Tensor,
        warm: torch.Tensor | None,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[count, lanes, before, rank] the token of each rank after each token before, and its log probability."""
        ends, _, _ = self.shared
        judged = self.heads.judge(chances, self.heads.pairs(states, tokens, ends).float())
        best, order = judged.sort(dim=-1, descending=True)
        best = self.heads.confide(best, states)
        if warm is None or noise is None:
            return order, best
        drawn = (warm > 0)[:, None, None]
        warmed = judged / torch.where(drawn, warm[:, None, None], 1.0) + noise[..., None, :]
        warmed, other = warmed.sort(dim=-1, descending=True)
        return torch.where(drawn, other, order), torch.where(drawn, warmed.log_softmax(-1), best)

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        lanes = texts.lanes
        if fused.usable(texts.device):
            guesses = (self._tokens, self._order, self._chances, self._worths)
            return [fused.pairs(self._ranks, self._depths, *guesses, lanes, self.first + self._depths - 1)]
        at = torch.zeros(lanes, self.nodes, dtype=torch.long, device=texts.device)
        total = torch.zeros(lanes, self.nodes, device=texts.device)
        found: list[torch.Tensor] = []
        for place in range(self.deepest):
            line = at * self.top + self._ranks[:, place]
            said = self._chances[:lanes, place].flatten(1).gather(1, line)
            total = torch.where(place < self._depths, total + said, total)
            at = self._order[:lanes, place].flatten(1).gather(1, line)
            found.append(self._tokens[:lanes, place].gather(1, at))
        tokens = torch.stack(found, -1)
        if self._worths is not None:
            total = torch.where(total > NEVER, self._worths, NEVER)
        depth = torch.arange(1, self.deepest + 1, device=tokens.device)
        hashes = F.pad(mix(tokens, depth).cumsum(-1), (1, 0))
        depths = self._depths.expand(lanes, -1)
        newest = tokens.gather(2, depths[..., None] - 1)[..., 0]
        return [Nodes(newest, depths, hashes, total, self.first + depths - 1)]


class SequentialGuesses(_Expecting):
    """Hydra's heads read the draft tokens before them, so drafting goes depth by depth, in a fixed loop.

    At each depth the `beam` most likely paths are expanded.
    """

    def __init__(
        self,
        heads: Any,
        shared: tuple[Any, Any, int],
        pick: Pick,
        top: int,
        beam: int,
        lanes: int,
        device: torch.device,
        coupled: bool = True,
    ) -> None:
        super().__init__(heads, shared, pick, top, coupled)
        self.beam = beam
        widths = [top]  # nodes of each depth
        while len(widths) < heads.count:
            widths.append(min(beam, widths[-1]) * top)
        self.nodes = sum(widths)
        self._tokens = torch.zeros(lanes, self.nodes, dtype=torch.long, device=device)
        self._chances = torch.full((lanes, self.nodes), NEVER, device=device)
        self._paths = torch.zeros(lanes, self.nodes, heads.count + 1, dtype=torch.long, device=device)
        self.state = (self._tokens, self._chances, self._paths)
        depths = [depth for depth, width in enumerate(widths, 1) for _ in range(width)]
        self._depths = torch.tensor(depths, device=device)

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        self._chances[lane].fill_(NEVER)

    def feed(self, rows: Any, hidden: torch.Tensor, last: torch.Tensor) -> Any:
        return self.pick(hidden).index_select(0, last), rows.tokens.index_select(0, last)

    def expect(self, first: int, fed: Any, texts: Texts, choices: Choices, needs: frozenset[str]) -> None:
        hidden, newest = fed  # the newest tokens [lanes], and the states before them [lanes, width]
        ends, _, _ = self.shared
        final, lanes, at = ends.norm(hidden), len(newest), 0
        mine = slice(first, first + lanes)
        words = newest[:, None, None]  # [lanes, paths, 1 + depth]
        worth = torch.zeros(lanes, 1, device=hidden.device)
        ways = torch.zeros(lanes, 1, 1, dtype=torch.long, device=hidden.device)  # hashes of the paths
        for depth in range(self.deepest):
            paths = words.shape[1]
            states = final[:, None].expand(-1, paths, -1).flatten(0, 1)
            logits = self.heads.guess(ends, states, words.flatten(0, 1)).view(lanes, paths, -1)
            ahead = (texts.lengths[:, None] + depth).expand(-1, paths)
            tokens, chances = expected(logits, self.top, self.coupled, ahead, texts, choices, needs)
            grown = (worth[..., None] + chances).flatten(1)  # [lanes, paths × top]
            words = torch.cat([words[:, :, None].expand(-1, -1, self.top, -1), tokens[..., None]], 3).flatten(1, 2)
            hashed = ways[:, :, None, -1] + mix(tokens, depth + 1)
            ways = torch.cat([ways[:, :, None].expand(-1, -1, self.top, -1), hashed[..., None]], 3).flatten(1, 2)
            nodes = slice(at, at + grown.shape[1])
            self._tokens[mine, nodes], self._chances[mine, nodes] = tokens.flatten(1), grown
            self._paths[mine, nodes, : depth + 2] = ways
            at = nodes.stop
            worth, best = grown.topk(min(self.beam, grown.shape[1]), 1)
            words = words.gather(1, best[..., None].expand(-1, -1, words.shape[2]))
            ways = ways.gather(1, best[..., None].expand(-1, -1, ways.shape[2]))

    def guess(self, texts: Texts, room: torch.Tensor) -> list[Nodes]:
        lanes = texts.lanes
        depths = self._depths.expand(lanes, -1)
        return [
            Nodes(self._tokens[:lanes], depths, self._paths[:lanes], self._chances[:lanes], self.first + depths - 1)
        ]


def alone(sequence: Any, sampling: Sampling, device: torch.device) -> tuple[Texts, Choices, frozenset[str]]:
    """A sequence as a batch of one, with its sampling, for work that is done before it has a lane."""
    texts = Texts(1, 1, device)
    texts.lengths[:], texts.seeds[:] = len(sequence.tokens), signed(sampling.seed)
    choices = Choices(1, 1, device)
    choices.temperature[:] = sampling.temperature
    return texts, choices, needs_of(sampling)


def quick(heads: Any, native: bool = False) -> Any:
    """A copy that shares the weights, with fused projections and, where we have them, our own matrix products.

    `native`: on a CPU, with weights in 8 bits, by the C++ code of the native runtime.
    """
    twin = _twins.get(heads)
    if twin is None:
        twin = _twins[heads] = copy.deepcopy(heads, {id(weight): weight for weight in heads.parameters()})
        Fusion().fuse(twin)
        if native:
            for owner in list(twin.modules()):
                for name, child in owner._modules.items():
                    if child is not None and (rounded := rounded_for(child)):
                        owner._modules[name] = rounded
        else:
            Products().replace(twin, drafts=True)
    return twin


def quick_head(head: Any, native: bool = False) -> Any:
    """The target's output head for drafts: in 8 bits if that is faster; `native`: as for `quick`."""
    twin = _twins.get(head) or (rounded_for(head) if native else int8_for(head))
    if twin is None:
        return head
    _twins[head] = twin
    return twin


def on_host(heads: Any, model: Any) -> tuple[Any, Any]:
    """The target's ends, and the heads, as the host drafts with them: quick ones beside the native runtime."""
    ends = model.ends()
    if not getattr(model, "native", False):
        return ends, heads
    return ends._replace(head=quick_head(ends.head, native=True)), quick(heads, native=True)


def make_places(heads: Any, shared: tuple[Any, Any, int], device: torch.device) -> None:
    """Allocate the heads' own keys and values in the pool, before a graph is captured."""
    _, pool, _ = shared
    with pool.sequence([0, 0]) as text, torch.inference_mode():
        text.slots = pool.allocate(1)
        layers = [len(heads.reads)] if heads.reads else []
        state = next(heads.parameters()).new_zeros(*layers, 1, heads.shape.width)
        heads.follow(*shared).feed(state, torch.zeros(1, dtype=torch.long, device=device), text)


def likely_paths(count: int, top: int, most: int, deeper: float = 1.0) -> list[Ranks]:
    """Paths of up to `count` ranks below `top`: the first `most`, or all. Short paths of low ranks come first.

    One more depth counts as much as a rank, counted from 1, that is `deeper` times as high.

    >>> likely_paths(2, 3, 6)
    [(0,), (0, 0), (0, 1), (1,), (1, 0), (0, 2)]
    >>> likely_paths(2, 3, 6, deeper=2)
    [(0,), (0, 0), (1,), (2,), (0, 1), (1, 0)]
    """
    found: list[Ranks] = []
    waiting: list[tuple[float, int, Ranks]] = []

    def consider(product: int, path: Ranks) -> None:
        if len(path) <= count and path[-1] < top:
            heapq.heappush(waiting, (product * deeper ** len(path), product, path))

    consider(1, (0,))
    while waiting and len(found) < most:
        _, product, path = heapq.heappop(waiting)
        found.append(path)
        consider(product, (*path, 0))
        rank = path[-1] + 1
        consider(product // rank * (rank + 1), (*path[:-1], rank))
    return found
