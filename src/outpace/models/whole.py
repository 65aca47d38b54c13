"""Batches of whole sequences, for training. The user's model runs as it is, without the mirror and the pool."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from ..errors import OutpaceWarning
from .mirror import attend

CHECKED = 32  # steps between two checks for finished sequences
FULL = 0.85  # finished sequences are dropped if no more than this share is unfinished
BATCHED = "outpace_batched"  # the name of `attend_in_batches` in transformers


def states_behind(
    model: PreTrainedModel, norm: str, tokens: torch.Tensor, layers: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Hidden states [texts, length, width] of whole sequences [texts, length]: after the last and some other layers.

    `norm` is the name of the module after the last layer (`HFModel.norm`). There is no padding mask: padding is on the
    right, where no position attends to it, and attention is faster without a mask.
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
    show: Callable[[float], None] = lambda share: None,
) -> list[list[int]]:
    """Answers to a batch of prompts, each at its own temperature (0: greedy), with its end token.

    The KV cache is static; finished sequences are dropped from it. `show` is called with the finished share.
    """
    longest = max(map(len, prompts))
    texts = _Texts(model, prompts, longest + new_tokens, ends, temperatures, seed)
    with batched_decoding(model):
        texts.read()
        while texts.length < longest + new_tokens:
            left = texts.left()
            if left == 0:
                break
            if left <= FULL * len(texts.whose):
                texts.select()
            texts.write(min(texts.length + CHECKED, longest + new_tokens))
            show((texts.length - longest) / new_tokens)
    return [[token for token in line if token >= 0] for line in texts.tokens[:, longest:].tolist()]


class _Texts:
    """A batch of sequences, padded on the left, each of which grows by one token per step.

    If the model takes our attention and all layers attend to the whole sequence, steps have fixed shapes and change
    tensors in place only (`fixed`): on CUDA they are captured as a graph.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        most: int,
        ends: Sequence[int],
        temperatures: Sequence[float],
        seed: int,
    ) -> None:
        device, count, longest = model.device, len(prompts), max(map(len, prompts))
        self.model = model
        self.chance = torch.Generator(device).manual_seed(seed)
        self.sampled = any(warm > 0 for warm in temperatures)
        self.warm = torch.tensor(temperatures, device=device)[:, None]
        self.over = torch.tensor([*ends], dtype=torch.long, device=device)
        padded = [[-1] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.tokens = torch.full((count, most), -1, dtype=torch.long, device=device)
        self.tokens[:, :longest] = torch.tensor(padded).to(device)
        self.mask = torch.ones(count, most, dtype=torch.bool, device=device)
        self.mask[:, :longest] = self.tokens[:, :longest] >= 0
        self.length = longest  # positions that have a token
        self.at = torch.tensor([longest - 1], device=device)  # the last of them
        self.whose = torch.arange(count, device=device)  # the index of each sequence that is left
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)
        self.newest = torch.zeros(count, 1, dtype=torch.long, device=device)
        self.positions = self.mask[:, :longest].sum(1, keepdim=True) - 1  # of the newest tokens
        self.cache = DynamicCache()
        self.cache.layers = [_Growing(most, self.at) for _ in layers_of(model)]
        self.takes = inspect.signature(model.forward).parameters
        self.fixed = "position_ids" in self.takes and _sees_all(model)
        self.captured = self.fixed and device.type == "cuda"

    def read(self) -> None:
        """Prefill, and the first token of each sequence."""
        mask = self.mask[:, : self.length].long()
        self._take(self._logits(self.tokens[:, : self.length].clamp(min=0), mask, (mask.cumsum(1) - 1).clamp(min=0)))
        self.length += 1

    def write(self, length: int) -> None:
        """Decode up to this length. Fixed steps have one shape, and one of them is captured."""
        count, self.length = length - self.length, length
        for layer in self.cache.layers:
            layer.shown = length if self.fixed else 0
        if not self.fixed:
            for shown in range(length - count, length):
                self._take(self._logits(self.newest, self.mask[:, :shown].long(), self.positions))
            return
        self._step()  # uncaptured first: nothing may be initialized during a capture
        graph = self._capture() if count > 1 and self.captured else None
        for _ in range(count - 1):
            self._step() if graph is None else graph.replay()
        if graph:
            torch.cuda.synchronize()  # before the graph is gone

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """A step as a CUDA graph; None, and no further attempts, if the model cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.chance)
        try:
            with torch.cuda.graph(graph):
                self._step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.captured = False
            reason = str(error).strip().split("\n")[0]
            warnings.warn(
                f"answers are generated without CUDA graphs, which is slower: {reason}", OutpaceWarning, stacklevel=2
            )
            return None
        return graph

    def left(self) -> int:
        """The number of unfinished sequences."""
        return int((~self.ended).sum())

    def select(self) -> None:
        """Drop the finished sequences."""
        kept = (~self.ended).nonzero().squeeze(1)
        for name in ("warm", "mask", "whose", "ended", "newest", "positions"):
            setattr(self, name, getattr(self, name)[kept])
        for layer in self.cache.layers:
            layer.select(kept, self.length)

    def _step(self) -> None:
        """The next token of each sequence, with fixed shapes: later positions are masked."""
        seen = torch.arange(self.length, device=self.at.device) <= self.at
        sees = self.mask[:, : self.length] & seen
        self._take(self._logits(self.newest, sees[:, None, None], self.positions))

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"position_ids": positions} if "position_ids" in self.takes else {}
        if "logits_to_keep" in self.takes:
            given["logits_to_keep"] = 1
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **given)
        found: torch.Tensor = output.logits[:, -1]
        return found

    def _take(self, logits: torch.Tensor) -> None:
        """Choose a token for each sequence, and append it."""
        tokens = self._draw(logits)
        self.at += 1
        self.tokens[self.whose, self.at.expand_as(self.whose)] = torch.where(self.ended, -1, tokens)
        self.ended |= (tokens[:, None] == self.over).any(1)
        self.newest.copy_(tokens[:, None])
        self.positions += 1

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """A token for each row of logits, at its own temperature."""
        if not self.sampled:
            return logits.argmax(-1)
        warm = self.warm
        scores = logits.float() / torch.where(warm > 0, warm, 1.0)
        noise = torch.empty_like(scores).exponential_(generator=self.chance).log_()
        return torch.where(warm > 0, scores - noise, scores).argmax(-1)


def _sees_all(model: PreTrainedModel) -> bool:
    """Whether a model takes our attention, and all of its layers attend to the whole sequence."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    whole = kinds == {"full_attention"} and not getattr(config, "sliding_window", None)
    return whole and bool(getattr(model, "_supports_attention_backend", False))


class _Growing(DynamicLayer):  # type: ignore[misc]
    """The static KV cache of one layer.

    `shown`: if not 0, this many positions are returned, and the new one is written at `at`, a tensor [1].
    """

    def __init__(self, most: int, at: torch.Tensor) -> None:
        super().__init__()
        self._most, self._at = most, at
        self._places: list[torch.Tensor] = []
        self.shown = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        both = (key_states, value_states)
        if not self._places:
            self.lazy_initialization(*both)
            self._places = [part.new_zeros(*part.shape[:2], self._most, part.shape[3]) for part in both]
        if self.shown:
            for place, part in zip(self._places, both, strict=True):
                place.index_copy_(2, self._at, part)
        else:
            start, new = self.get_seq_length(), key_states.shape[2]
            for place, part in zip(self._places, both, strict=True):
                place[:, :, start : start + new].copy_(part)
        end = self.shown or start + new
        self.keys, self.values = (place[:, :, :end] for place in self._places)
        return self.keys, self.values

    def select(self, kept: torch.Tensor, length: int) -> None:
        """Keep only these sequences, of which `length` positions are written."""
        seen = self.get_seq_length()
        del self.keys, self.values
        for number, place in enumerate(self._places):
            smaller = place.new_zeros(len(kept), *place.shape[1:])
            smaller[:, :, :length] = place[kept, :, :length]
            self._places[number] = smaller
        self.keys, self.values = (place[:, :, :seen] for place in self._places)


@contextmanager
def batched_decoding(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the model decodes large batches quickly: see `attend_in_batches`."""
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
    """Decode attention for large batches: query heads that share keys read them once.

    With a mask, torch's attention copies the keys for every query head first.
    """
    special = others.get("softcap") is not None or others.get("s_aux") is not None
    if attention_mask is None:
        new, length = query.shape[2], key.shape[2]
        attention_mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
    if query.shape[2] > 1 or special:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        sees = attention_mask | ~attention_mask.any(-1, keepdim=True)  # padding attends to everything, to avoid NaN
        return attend(module, query, key, value, sees, scaling, **others)
    together = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    scores = together @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~attention_mask, -math.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).reshape(len(query), 1, -1, query.shape[3]), None


AttentionInterface.register(BATCHED, attend_in_batches)
AttentionMaskInterface.register(BATCHED, sdpa_mask)


def layer_sizes(model: PreTrainedModel) -> dict[str, Any]:
    """The sizes of a model's layers, for blocks of the same shape."""
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
    """A model's own last layers."""
    return layers_of(model)[-count:]


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """A model's own layers; none if they are not in a ModuleList."""
    layers = model.config.get_text_config().num_hidden_layers
    for child in model.get_decoder().children():
        if isinstance(child, nn.ModuleList) and len(child) == layers:
            return list(child)
    return []
