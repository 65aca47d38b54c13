"""Trained heads that guess several tokens ahead at once: Medusa's and Amphista's."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from ..picking import NOISED, Sampling, likeliest
from ..step import fused
from ..step.choosing import Choices, gumbel, needs_of
from ..step.nodes import NEVER, Nodes, mix
from ..step.texts import Texts, signed
from .base import Reading

Ranks: TypeAlias = "tuple[int, ...]"
OPTIONS: dict[str, Any] = {"combo_kernels": True, "triton.autotune_pointwise": False}  # as for the target's layers


class HeadGuesses(Reading):
    """Paths of ranks: at each depth one of the best guesses of that depth's head.

    paths: the ranks that are considered, each with its beginning among them.
    worths: logarithms of their chances, if they are not to be what the heads believe.
    compiled: whether the heads' forward is compiled.
    coupled: when sampling, rank a head's guesses with the noise that the target will draw with.
    """

    def __init__(
        self,
        heads: Any,
        shared: tuple[Any, Any, int],
        paths: Sequence[Ranks],
        lanes: int,
        device: torch.device,
        coupled: bool = True,
        worths: Sequence[float] | None = None,
        compiled: bool = False,
    ) -> None:
        self.heads, self.shared, self.coupled = heads, shared, coupled
        count = self.deepest = heads.count
        self.names = tuple(f"head {depth}" for depth in range(1, count + 1))
        self.nodes = len(paths)
        self.top = 1 + max((max(path) for path in paths), default=0)
        self._tokens = torch.zeros(lanes, count * self.top, dtype=torch.long, device=device)
        self._chances = torch.full((lanes, count * self.top), NEVER, device=device)
        self._depths = torch.tensor([len(path) for path in paths], device=device)
        # [paths, count] where the guess at each depth lies among all; beyond the path, anything.
        places = [
            [head * self.top + (path[head] if head < len(path) else 0) for head in range(count)] for path in paths
        ]
        self._places = torch.tensor(places, device=device).view(len(paths), count)
        self._within = torch.arange(count, device=device) < self._depths[:, None]
        # Compiled where a graph is captured of it: fewer and larger kernels.
        self._fixed = torch.compile(heads.fixed, dynamic=True, options=OPTIONS) if compiled else heads.fixed
        self._worths = None if worths is None else torch.tensor(worths, device=device)

    def open(self, lane: int, tokens: Sequence[int], seed: int) -> None:
        self._chances[lane] = NEVER

    def begin(self, lane: int, hidden: list[torch.Tensor], sequence: Any, sampling: Sampling) -> None:
        if not hidden:
            return
        follower = self.heads.follow(*self.shared)
        states = torch.cat(hidden)
        follower.feed(states, torch.tensor(sequence.tokens[-len(states) :], device=states.device), sequence)
        logits = follower.guesses()
        texts = Texts(1, 1, states.device)
        texts.lengths[:], texts.seeds[:] = len(sequence.tokens), signed(sampling.seed)
        choices = Choices(1, logits.shape[-1], states.device)
        choices.open(0, sampling, ())
        self._take(slice(lane, lane + 1), logits[:, None], texts, choices, needs_of(sampling))

    def read(
        self,
        rows: Any,
        hidden: torch.Tensor,
        last: torch.Tensor,
        texts: Texts,
        choices: Choices,
        needs: frozenset[str],
    ) -> None:
        logits = self._fixed(*self.shared, rows, hidden, last)
        self._take(slice(len(last)), logits, texts, choices, needs)

    def _take(self, lanes: slice, logits: torch.Tensor, texts: Texts, choices: Choices, needs: frozenset[str]) -> None:
        """What the heads expect [count, lanes, words] are the guesses of these lanes from now on."""
        noised = "noise" in needs
        lines, named = logits.flatten(0, 1), min(max(NOISED, self.top) if noised else self.top, logits.shape[-1])
        quick = fused.usable(logits.device) and named <= fused.FEW
        found = (fused.likeliest if quick else likeliest)(lines, named)
        found = found.view(2, *logits.shape[:2], -1).transpose(1, 2)  # [2, lanes, count, named]
        tokens, chances = found[0].long(), found[1].float()
        if noised:
            tokens, chances = self._foreseen(tokens, chances, texts, choices)
        missing = self.top - tokens.shape[2]  # where there are fewer words
        self._tokens[lanes] = F.pad(tokens[..., : self.top], (0, max(missing, 0))).flatten(1)
        self._chances[lanes] = F.pad(chances[..., : self.top], (0, max(missing, 0)), value=NEVER).flatten(1)

    def _foreseen(
        self, tokens: torch.Tensor, chances: torch.Tensor, texts: Texts, choices: Choices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The guesses in the order of what the target will draw, with its noise, as `Picker.foresee` has it."""
        warm = choices.temperature[: texts.lanes, None, None]
        warmed = chances / torch.where(warm > 0, warm, 1.0)
        if self.coupled:
            ahead = texts.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            warmed = warmed + gumbel(texts.seeds[:, None].expand_as(ahead), ahead, 0, tokens).float()
        warmed, order = warmed.sort(dim=-1, descending=True)
        drawn = warm > 0
        return (
            torch.where(drawn, tokens.gather(-1, order), tokens),
            torch.where(drawn, warmed.log_softmax(-1), chances),
        )

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


def make_places(heads: Any, shared: tuple[Any, Any, int], device: torch.device) -> None:
    """Give the heads' own keys and values their places in the pool, before a graph is captured."""
    _, pool, _ = shared
    with pool.sequence([0, 0]) as text, torch.inference_mode():
        text.slots = pool.allocate(1)
        state = next(heads.parameters()).new_zeros(1, heads.shape.width)
        heads.follow(*shared).feed(state, torch.zeros(1, dtype=torch.long, device=device), text)


def likely_paths(count: int, top: int, most: int) -> list[Ranks]:
    """Paths of ranks below `top`, up to `count` long: `most` of them, or all. Those with few and low ranks come first.

    >>> likely_paths(2, 3, 6)
    [(0,), (0, 0), (0, 1), (1,), (1, 0), (0, 2)]
    """
    found: list[Ranks] = []
    waiting: list[tuple[int, Ranks]] = [(1, (0,))]
    while waiting and len(found) < most:
        product, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < count:
            heapq.heappush(waiting, (product, (*path, 0)))
        rank = path[-1] + 1
        if rank < top:
            heapq.heappush(waiting, (product // rank * (rank + 1), (*path[:-1], rank)))
    return found
