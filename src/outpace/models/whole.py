"""Whole texts at once, many side by side: what training needs of a transformers model.

Here the user's model runs as it is, without the mirror and the pool.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from .hf import attend

CHECKED = 16  # tokens of each text, until it is looked who has ended
FULL = 0.85  # the others go on alone, where they are no more than this share
BATCHED = "outpace_batched"  # the name under which `attend_in_batches` is known to transformers


def final_states(model: PreTrainedModel, norm: str, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states [texts, length, width] after the last layer, of whole texts [texts, length] at once."""
    return states_behind(model, norm, tokens, ())[0]


def states_behind(
    model: PreTrainedModel, norm: str, tokens: torch.Tensor, layers: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Hidden states [texts, length, width] of whole texts [texts, length]: after the last layer, and after some others.

    `norm` is the name of what follows the last layer (`HFModel.norm`). No mask says where a text has ended: no
    position sees what fills up behind it, and attention is quicker without.
    """
    decoder = model.get_decoder()
    final: list[torch.Tensor] = []
    found: dict[int, torch.Tensor] = {}

    def note(layer: int, output: Any) -> None:
        found[layer] = output[0] if isinstance(output, tuple) else output

    hooks = [decoder.get_submodule(norm).register_forward_pre_hook(lambda _, given: final.append(given[0]))]
    for count in layers:
        module = layers_of(model)[count - 1]
        hooks.append(module.register_forward_hook(lambda _, __, output, count=count: note(count, output)))
    try:
        with torch.no_grad():
            decoder(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return final[0], found


@torch.inference_mode()
def write_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    new_tokens: int,
    temperatures: Sequence[float],
    seed: int,
) -> list[list[int]]:
    """Answers to many prompts at a time, each at a temperature of its own (0: greedy), with the token that ends it.

    Keys and values are written in place, and texts that have ended make room for the others.
    """
    device, count, longest = model.device, len(prompts), max(map(len, prompts))
    chance = torch.Generator(device).manual_seed(seed)
    warm = torch.tensor(temperatures, device=device)[:, None]
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]).to(device)
    mask = torch.ones(count, longest + new_tokens, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        mask[row, : longest - len(prompt)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    over = torch.tensor([*ends], dtype=torch.long, device=device)
    written = torch.full((count, new_tokens), -1, dtype=torch.long, device=device)
    whose = torch.arange(count, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    cache = DynamicCache()
    cache.layers = [_Growing(longest + new_tokens) for _ in layers_of(model)]
    takes = inspect.signature(model.forward).parameters
    with batched_decoding(model):
        for place in range(new_tokens):
            at = slice(0, longest) if place == 0 else slice(longest + place - 1, longest + place)
            given: dict[str, Any] = {"position_ids": positions[:, at]} if "position_ids" in takes else {}
            if "logits_to_keep" in takes:
                given["logits_to_keep"] = 1
            output = model(
                input_ids=ids, attention_mask=mask[:, : at.stop], past_key_values=cache, use_cache=True, **given
            )
            tokens = _draw(output.logits[:, -1], warm, chance)
            written[whose, place] = torch.where(ended, -1, tokens)
            ended |= torch.isin(tokens, over)
            ids = tokens[:, None]
            if (place + 1) % CHECKED == 0 and (left := int((~ended).sum())) <= FULL * len(ended):
                if not left:
                    break
                kept = (~ended).nonzero().squeeze(1)
                warm, mask, positions, ids, whose, ended = (
                    part[kept] for part in (warm, mask, positions, ids, whose, ended)
                )
                for layer in cache.layers:
                    layer.select(kept)
    return [[token for token in line if token >= 0] for line in written.tolist()]


def _draw(logits: torch.Tensor, warm: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """A token for each line, at a temperature of its own."""
    if not bool((warm > 0).any()):
        return logits.argmax(-1)
    scores = logits.float() / torch.where(warm > 0, warm, 1.0)
    noise = torch.empty_like(scores).exponential_(generator=chance).log_()
    return torch.where(warm > 0, scores - noise, scores).argmax(-1)


class _Growing(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, in a place that is large enough from the start."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._places: list[torch.Tensor] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        start, new = self.get_seq_length(), key_states.shape[2]
        both = (key_states, value_states)
        if not self._places:
            self.lazy_initialization(*both)
            self._places = [part.new_empty(*part.shape[:2], self._most, part.shape[3]) for part in both]
        for place, part in zip(self._places, both, strict=True):
            place[:, :, start : start + new].copy_(part)
        self.keys, self.values = (place[:, :, : start + new] for place in self._places)
        return self.keys, self.values

    def select(self, kept: torch.Tensor) -> None:
        """Go on with these texts alone."""
        length = self.get_seq_length()
        del self.keys, self.values
        for number, place in enumerate(self._places):
            smaller = place.new_empty(len(kept), *place.shape[1:])
            smaller[:, :, :length] = place[kept, :, :length]
            self._places[number] = smaller
        self.keys, self.values = (place[:, :, :length] for place in self._places)


@contextmanager
def batched_decoding(model: PreTrainedModel) -> Iterator[None]:
    """While it is open, the model writes many texts at a time quickly: see `attend_in_batches`."""
    before = model.config._attn_implementation
    if not getattr(model, "_supports_attention_backend", False):
        yield
        return
    model.set_attn_implementation(BATCHED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attend_in_batches(
    module: nn.Module,
    query: torch.Tensor,  # [texts, heads, new, size]
    key: torch.Tensor,  # [texts, kv heads, length, size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [texts, 1, new, length] bool
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One new token of each of many texts: query heads that share keys read them together, once.

    With a mask, torch's attention copies the keys for every query head first.
    """
    special = others.get("softcap") is not None or others.get("s_aux") is not None
    if attention_mask is None:
        new, length = query.shape[2], key.shape[2]
        attention_mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
    if query.shape[2] > 1 or special:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        sees = attention_mask | ~attention_mask.any(-1, keepdim=True)  # what only fills up sees anything: no NaN
        return attend(module, query, key, value, sees, scaling, **others)
    together = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    scores = together @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~attention_mask, -math.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).reshape(len(query), 1, -1, query.shape[3]), None


AttentionInterface.register(BATCHED, attend_in_batches)
AttentionMaskInterface.register(BATCHED, sdpa_mask)


def layer_sizes(model: PreTrainedModel) -> dict[str, Any]:
    """The sizes of one layer of a model, for blocks like it."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope if "rope_theta" in rope else next((kind for kind in rope.values() if isinstance(kind, dict)), {})
    return {
        "width": int(config.hidden_size),
        "heads": heads,
        "key_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_size": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "inner": int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        "theta": float(rope.get("rope_theta", 10000.0)),
        "eps": float(getattr(config, "rms_norm_eps", 1e-5)),
    }


def last_layers(model: PreTrainedModel, count: int) -> list[nn.Module]:
    """A model's last layers, its own."""
    return layers_of(model)[-count:]


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """A model's layers, its own; none where they are in no list."""
    layers = model.config.get_text_config().num_hidden_layers
    for child in model.get_decoder().children():
        if isinstance(child, nn.ModuleList) and len(child) == layers:
            return list(child)
    return []
