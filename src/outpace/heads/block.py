"""Block: several tokens drafted in one pass, by layers that attend to the target's hidden states of several layers.

c      at each position: the target's hidden states after some layers, scaled to unit size and mixed
x_k    for place k (a position to draft): the last state at t, the embedded token at t + 1, an embedding of the place
layers each place attends to c of all positions up to t and to all other places, in both directions; then feed-forward
pairs  condition a draft token on the one before it, which the place itself does not know

A place's own logits come from norm(x_k). After token u at the place before they come from norm(x_k) + pair(u, x_k): the
output head is linear, so for a few candidates each pair costs one dot product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import InputError
from ..models.adapter import Ends, FixedRows
from ..models.attention import attend_by_mask, without_cudnn
from ..pool import Pool, Sequence
from ..sending import send
from .base import Follower, Heads, HeadSettings, begin_norm
from .blocks import Angles, BlockShape, FeedForward, rotary, turn
from .exits import read_layers

FEELINGS = 3  # inputs of the confidence, besides the state: see `feelings`
FORGOTTEN = 0.25  # share of places trained without the token before, so that their own logits are good too
Look: TypeAlias = "Callable[[int, torch.Tensor], torch.Tensor]"
"""The attention of a layer's queries [..., count, heads, size], rotary applied, to the sequence."""


@dataclass(frozen=True)
class BlockSettings(HeadSettings):
    """Settings of block heads.

    count: how many tokens they predict. depth: how many layers they have.
    layers: the target's layers after which they read its hidden states, like "2,11,21,30"; by default four.
    rank: the rank of `pair`.
    """

    count: int = 8
    depth: int = 3
    layers: Any = ()
    rank: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", read_layers(self.layers))
        for name in ("depth", "rank"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more.")

    def for_model(self, layers: int, vocabulary: int) -> BlockSettings:
        found = self.layers or spread(layers)
        if found[-1] > layers:
            raise InputError(f"layers={','.join(map(str, found))}: the model has only {layers}.")
        return replace(self, layers=found)


def spread(depth: int) -> tuple[int, ...]:
    """Four layers of a model: an early one, the last, and two between.

    >>> spread(30), spread(2)
    ((2, 11, 21, 30), (1, 2))
    """
    first = min(2, max(1, depth - 1))
    return tuple(sorted({first + round((depth - first) * place / 3) for place in range(4)}))


def feelings(chances: torch.Tensor) -> torch.Tensor:
    """[..., FEELINGS] inputs of a place's confidence, from its log probabilities [..., 2 or more], best first.

    The best one's probability as a logit and as a logarithm, and its distance to the second.
    """
    best, second = chances[..., 0], chances[..., 1]
    logit = best - torch.log1p(-best.exp().clamp(max=1 - 1e-6))
    return torch.stack([logit, best, (best - second).clamp(max=10.0)], -1)


class Guesses(NamedTuple):
    """The output of a pass."""

    logits: torch.Tensor  # [count, texts, vocabulary] of each place by itself
    states: torch.Tensor  # [count, texts, width] that they come from


class BlockHeads(Heads):
    """context: mixes the target's states. memory: makes keys and values from them. doubt: the confidence."""

    kind = "block"
    reads_text = True
    paired = True
    settings_type = BlockSettings
    settings: BlockSettings

    def __init__(self, settings: BlockSettings, shape: BlockShape) -> None:
        super().__init__(settings, shape)
        width, read = shape.width, max(1, len(settings.layers))
        self.context = nn.Linear(read * width, width, bias=False)
        self.context_norm = nn.RMSNorm(width, eps=shape.eps)
        self.memory = nn.Linear(width, settings.depth * 2 * shape.key_heads * shape.head_size, bias=False)
        self.token_norm = nn.RMSNorm(width, eps=shape.eps)
        self.from_token = nn.Linear(width, width, bias=False)
        self.positions = nn.Parameter(0.02 * torch.randn(settings.count, width))
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(width, eps=shape.eps)
        self.pair_token = nn.Linear(width, settings.rank, bias=False)
        self.pair_state = nn.Linear(width, settings.rank, bias=False)
        self.pair_out = nn.Linear(settings.rank, width, bias=False)
        self.doubt_state = nn.Parameter(torch.zeros(width))
        self.doubt = nn.Parameter(torch.tensor([1.0, *[0.0] * FEELINGS]).repeat(settings.count, 1))
        for silent in (self.from_token, self.pair_out):
            nn.init.zeros_(silent.weight)

    @property
    def reads(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.settings.layers
        return found

    def begin_from(self, ends: Ends, layers: list[nn.Module]) -> None:
        begin_norm(self.norm, ends)

    # Parts of a pass

    def mix(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From states [layers, ..., width]: the last one scaled to unit size, and the input of keys and values."""
        units = F.rms_norm(hidden, hidden.shape[-1:], eps=self.shape.eps)
        mixed: torch.Tensor = self.context_norm(self.context(torch.cat([*units], -1)))
        return units[-1], mixed

    def remember(self, mixed: torch.Tensor, angles: Angles) -> torch.Tensor:
        """[layers, 2, ..., key heads, length, size] keys, rotary applied, and values, from [..., length, width]."""
        shape = self.shape
        both = self.memory(mixed).unflatten(-1, (self.settings.depth, 2, shape.key_heads, shape.head_size))
        both = both.movedim((-4, -3), (0, 1)).transpose(-2, -3)
        return torch.stack([turn(both[:, 0], angles), both[:, 1]], 1)

    def think(self, last: torch.Tensor, newest: torch.Tensor, at: torch.Tensor, look: Look) -> torch.Tensor:
        """[..., count, width] normed states of all places, from last states and embedded newest tokens [..., width].

        `at` [...] are the positions of those states.
        """
        start = last + self.from_token(self.token_norm(newest))
        states = start.unsqueeze(-2) + self.positions
        places = at.unsqueeze(-1) + torch.arange(2, 2 + self.count, device=at.device)
        angles = rotary(places.flatten(), self.shape, states.dtype)
        angles = Angles(*(part.view(*places.shape, 1, -1) for part in angles))
        for number, layer in enumerate(self.layers):
            states = layer(states, lambda query, number=number: look(number, turn(query, angles)))
        found: torch.Tensor = self.norm(states)
        return found

    def pair(self, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What these embedded tokens at the place before add to normed states, all [..., width]."""
        told = F.silu(self.pair_token(self.token_norm(before))) * self.pair_state(states)
        added: torch.Tensor = self.pair_out(told)
        return added

    # Training

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, ends: Ends) -> torch.Tensor:
        every = torch.arange(embedded.shape[0] * embedded.shape[1], device=embedded.device)
        found, _ = self.states_at(hidden, embedded, every)
        return found.view(self.count, *embedded.shape)

    def states_at(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        rows: torch.Tensor,
        forgotten: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For training: the output head's inputs [count, rows, width] at some flat positions of whole sequences.

        Each place knows the token before the one that it predicts, except where `forgotten` [count, rows]. Also the
        state's part of the confidence, [count, rows], through which no gradients flow into the layers.
        """
        texts, length = embedded.shape[:2]
        last, mixed = self.mix(hidden)
        angles = rotary(torch.arange(length, device=rows.device), self.shape, mixed.dtype)
        stored = self.remember(mixed, angles)  # [layers, 2, texts, key heads, length, size]
        tokens = embedded.flatten(0, 1)
        groups = self.shape.heads // self.shape.key_heads

        def after(places: int) -> torch.Tensor:
            return tokens[(rows + places).clamp(max=len(tokens) - 1)]

        def look(number: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = stored[number]
            apart = query.reshape(len(rows), self.count, self.shape.key_heads, groups, -1)
            folded = apart.movedim(1, 3).flatten(1, 3)  # [rows, query heads of all places, size]
            whole = folded.new_zeros(texts * length, *folded.shape[1:]).index_copy(0, rows, folded)
            whole = whole.view(texts, length, *folded.shape[1:]).transpose(1, 2)
            found = F.scaled_dot_product_attention(whole, keys, values, is_causal=True, enable_gqa=True)
            found = found.transpose(1, 2).flatten(0, 1)[rows]
            apart = found.reshape(len(rows), self.shape.key_heads, groups, self.count, -1)
            return apart.movedim(3, 1).flatten(2, 3)

        states = self.think(last.flatten(0, 1)[rows], after(1), rows % length, look).transpose(0, 1)
        before = torch.stack([after(1 + place) for place in range(self.count)])
        told = self.pair(states, before)
        known = torch.ones_like(states[..., :1])
        known[0] = 0.0  # the first place knows its token anyway
        if forgotten is not None:
            known = known.masked_fill(forgotten[..., None], 0.0)
        return states + known * told, states.detach().float() @ self.doubt_state

    def sure(self, head: int | slice, linear: torch.Tensor, feelings: torch.Tensor) -> torch.Tensor:
        """The logit of the confidence, from the state's part of it and the `feelings` [..., FEELINGS]."""
        weights = self.doubt[head]
        return linear + (feelings * weights[..., :-1]).sum(-1) + weights[..., -1]

    # Drafting

    def pairs(self, guesses: torch.Tensor, tokens: torch.Tensor, ends: Ends) -> torch.Tensor:
        """What each token adds to the logits of the next place's tokens: [count, texts, before, top].

        From the states [count, texts, width] and the top tokens [count, texts, top] of all places. The first place
        knows the token before it.
        """
        words = ends.embed(tokens[:-1])  # [count - 1, texts, before, width]
        told = self.pair(guesses[1:, :, None].expand_as(words), words)
        found = told @ ends.rows(tokens[1:]).transpose(-1, -2)
        return torch.cat([torch.zeros_like(found[:1]), found])

    def judge(self, chances: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        """[..., before, top] log probabilities of a place's tokens after each token of the place before.

        From their own log probabilities [..., top], and what the tokens before add to their logits [..., before, top].
        All other tokens are assumed to stay as likely.
        """
        rest = torch.log1p(-chances.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))[..., None]
        found = chances[..., None, :] + told
        return found - torch.logaddexp(found.logsumexp(-1, keepdim=True), rest)

    def confide(self, chances: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The same log probabilities [count, texts, before, top], best first, corrected by the confidence.

        The first token gets the probability that it is the target's choice, and the others share the rest.
        """
        linear = (states.float() @ self.doubt_state.float())[..., None]
        weights = self.doubt.float()[:, None, None]
        sure = linear + (feelings(chances) * weights[..., :-1]).sum(-1) + weights[..., -1]
        rest = F.logsigmoid(-sure) - torch.log1p(-chances[..., 0].exp().clamp(max=1 - 1e-6))
        others = (chances[..., 1:] + rest[..., None]).minimum(F.logsigmoid(sure)[..., None])
        return torch.cat([F.logsigmoid(sure)[..., None], others], -1)

    def fixed(
        self, ends: Ends, pool: Pool, layer: int, rows: FixedRows, hidden: torch.Tensor, last: torch.Tensor
    ) -> Any:
        """The `Guesses` of all places after the rows `last`."""
        units, mixed = self.mix(hidden)
        angles = rotary(rows.positions, self.shape, mixed.dtype)
        stored = self.remember(mixed[None], angles)
        for number in range(self.settings.depth):
            _write(pool, layer + number, rows.slots, *stored[number])
        at = rows.positions.index_select(0, last)
        lists = _lists_of(rows, at, self.count)

        def look(number: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = pool.stored(layer + number)  # type: ignore[misc]
            flat = query.flatten(0, 1).transpose(0, 1)[None]  # [1, heads, texts × count, size]
            found = torch.ops.outpace.slot_attention(flat, keys, values, *lists, query.shape[-1] ** -0.5, 0.0)
            return found[0].unflatten(0, query.shape[:2])  # type: ignore[no-any-return]

        newest = ends.embed(rows.tokens.index_select(0, last))
        states = self.think(units.index_select(0, last), newest, at, look).transpose(0, 1)
        return Guesses(self.logits(states, ends), states)

    def follow(self, ends: Ends, pool: Pool, layer: int) -> Follower:
        return _Follower(self, ends, pool, layer)


class _Layer(nn.Module):
    """Attention to the sequence and among the places, then a gated feed-forward, each after a norm.

    Before training it adds nothing.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.size = shape.head_size
        self.grouped = shape.heads != shape.key_heads
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.key_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.key_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.mlp = FeedForward(shape)
        for silent in (self.o_proj, self.mlp.down_proj):
            nn.init.zeros_(silent.weight)

    def forward(self, states: torch.Tensor, look: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        normed = self.input_layernorm(states)
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.size)).transpose(-2, -3)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = _attend_to_few if self.training else F.scaled_dot_product_attention
        among = attend(query, key, value, enable_gqa=self.grouped)
        seen = look(query.transpose(-2, -3)) + among.transpose(-2, -3)
        states = states + self.o_proj(seen.flatten(-2))
        found: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


def _attend_to_few(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    """Attention among a few places, for very many positions: torch's own takes as long as for 128 places."""
    few = key.shape[-2] * (query.shape[-3] // key.shape[-3] if enable_gqa else 1)
    folded = query.reshape(*key.shape[:-2], few, -1)  # query heads that share keys are stacked
    weights = (folded @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    found: torch.Tensor = weights.to(value.dtype) @ value
    return found.view_as(query)


class _Follower(Follower):
    heads: BlockHeads

    def __init__(self, heads: BlockHeads, ends: Ends, pool: Pool, layer: int) -> None:
        super().__init__(heads, ends)
        self.pool, self.layer = pool, layer

    def feed(self, hidden: torch.Tensor, tokens: torch.Tensor, sequence: Sequence) -> None:
        heads, new = self.heads, hidden.shape[1]
        self.slots = send(sequence.slots, self.pool.device)
        positions = torch.arange(len(self.slots) - new, len(self.slots), device=self.pool.device)
        units, mixed = heads.mix(hidden)
        stored = heads.remember(mixed[None], rotary(positions, heads.shape, mixed.dtype))
        for number in range(heads.settings.depth):
            _write(self.pool, self.layer + number, self.slots[-new:], *stored[number])
        self.last, self.newest, self.at = units[-1:], tokens[-1:], positions[-1:]
        self.found: Guesses | None = None

    def think(self) -> Guesses:
        """The `Guesses` of all places."""
        if self.found is None:
            sees = torch.ones(1, len(self.slots), dtype=torch.bool, device=self.slots.device)

            def look(number: int, query: torch.Tensor) -> torch.Tensor:
                stored = self.pool.stored(self.layer + number)
                assert stored is not None
                keys, values = (part[:, :, self.slots] for part in stored)
                with without_cudnn():  # the number of keys changes every time
                    return attend_by_mask(query.transpose(1, 2), keys, values, sees).transpose(1, 2)

            heads = self.heads
            states = heads.think(self.last, self.ends.embed(self.newest), self.at, look).transpose(0, 1)
            self.found = Guesses(heads.logits(states, self.ends), states)
        return self.found

    def guesses(self) -> torch.Tensor:
        return self.think().logits[:, 0]

    def guess(self, paths: torch.Tensor) -> torch.Tensor:
        depth = paths.shape[1]
        logits, states = (part[depth, 0].expand(len(paths), -1) for part in self.think())
        if not depth:
            return logits
        told = self.heads.pair(states, self.ends.embed(paths[:, -1]))
        return logits + self.heads.logits(told[None], self.ends, depth)[0]


def _write(pool: Pool, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write keys and values [1, key heads, length, size] to the slots of their positions."""
    stored = pool.stored(layer) or pool.store(layer, keys, values)
    for place, states in zip(stored, (keys, values), strict=True):
        place.index_copy_(2, slots, states)


def _lists_of(rows: FixedRows, at: torch.Tensor, count: int) -> Any:
    """What `count` places of each sequence attend to: its positions up to `at` [texts], and not each other."""
    lists, texts, device = rows.lists, len(at), at.device
    first = torch.arange(0, texts * count, count, device=device)
    return lists._replace(
        length=at + 1,
        whose=torch.arange(texts, device=device).repeat_interleave(count),
        tiles=torch.cat([first, first + count, first]),
        positions=(at[:, None] + torch.arange(2, 2 + count, device=device)).flatten(),
        slots=torch.full((texts * count,), 0, device=device),
        tree=torch.zeros(texts * count, 2, dtype=torch.long, device=device),
        packed=count if lists.packed else 0,
        exact=False,
        window=0,
    )
