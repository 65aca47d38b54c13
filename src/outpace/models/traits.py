"""How a transformers model computes, from its configuration and signatures alone: nothing is run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ELSEWHERE = "Use transformers' own generate for it."


@dataclass(frozen=True)
class Traits:
    vocabulary: int
    layers: int
    width: int
    context: int
    turn: int | None  # the position at which all rotary angles change, if there is one
    layer_types: tuple[str, ...]
    windows: dict[str, int | None]  # by type of layer
    softcap: float  # of the logits; 0: none
    scales: tuple[float, float]  # factors of embedded tokens and of logits that the configuration has; 1: none
    takes_positions: bool
    takes_logits_to_keep: bool
    branches: bool  # whether rows may form a tree
    own_attention: bool  # whether attention can be replaced by ours; otherwise the model's own gets additive masks
    dense_attention: str  # transformers' implementation that takes a mask [rows, slots]
    common: bool  # whether its attention depends on positions and windows alone
    lists: bool  # whether attention over slot lists can replace its layers' attention

    @classmethod
    def of(cls, model: PreTrainedModel) -> Traits:
        """The traits of a model. Raises UnsupportedModel for one that cannot work."""
        _refuse_what_cannot_work(model)
        config = model.config.get_text_config()
        layer_types = _layer_types(config)
        takes_positions = _takes_positions(model)
        branches = takes_positions and not _counts_slots(config)
        own_attention = branches and bool(getattr(model, "_supports_attention_backend", False))
        common = branches and _is_common(model, layer_types)
        return cls(
            vocabulary=config.vocab_size,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            context=getattr(config, "max_position_embeddings", None) or 2**31,
            turn=_longrope_threshold(config),
            layer_types=layer_types,
            windows={
                SLIDING: getattr(config, "sliding_window", None),
                CHUNKED: getattr(config, "attention_chunk_size", None),
            },
            softcap=float(getattr(config, "final_logit_softcapping", None) or 0),
            scales=(
                float(getattr(config, "embedding_multiplier", None) or 1),
                float(getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)),
            ),
            takes_positions=takes_positions,
            takes_logits_to_keep="logits_to_keep" in inspect.signature(model.forward).parameters,
            branches=branches,
            own_attention=own_attention,
            dense_attention=_dense_attention(model),
            common=common,
            lists=common and own_attention,
        )

    def inside(self, kind: str, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Whether layers of this type let rows at `positions` attend to earlier positions `seen`."""
        size = self.windows.get(kind)
        if kind == SLIDING and size:
            return positions - seen < size
        if kind == CHUNKED and size:
            return positions // size == seen // size
        return torch.ones_like(seen, dtype=torch.bool)


def _refuse_what_cannot_work(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} has an encoder; Outpace decodes causal (decoder-only) models.")
    missing = [name for name in ("vocab_size", "num_hidden_layers", "hidden_size") if not hasattr(config, name)]
    if missing:
        raise UnsupportedModel(
            f"{kind} is not one stack of layers: its configuration has no {', '.join(missing)}. {ELSEWHERE}"
        )
    foreign = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING, CHUNKED}
    if getattr(model, "_is_stateful", False) or foreign:
        what = f"layers of type {', '.join(sorted(foreign))}" if foreign else "recurrent layers"
        raise UnsupportedModel(
            f"{kind} has {what}. Outpace needs a model whose layers keep keys and values of every token, and nothing "
            f"else: other states cannot be rolled back when a draft token is rejected. {ELSEWHERE}"
        )
    if any("_hf_hook" in vars(module) for module in model.modules()):
        raise UnsupportedModel(
            f"{kind} was split over devices by accelerate, whose hooks Outpace does not support. "
            "Load it without device_map and move it to one device with model.to(...)."
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{kind} has no output head; load the model with AutoModelForCausalLM.")


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether `position_ids` reach the decoder, perhaps as a keyword that a wrapper passes on."""
    accepted = inspect.signature(model.forward).parameters
    passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    inner = inspect.signature(model.get_decoder().forward).parameters
    return "position_ids" in accepted or (passes_on and "position_ids" in inner)


def _is_common(model: PreTrainedModel, kinds: Sequence[str]) -> bool:
    """Whether there are neither attention sinks nor chunks, and numbers are of a common type."""
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    known = model.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return known and not sinks and CHUNKED not in kinds


def _counts_slots(config: Any) -> bool:
    """Whether a model derives distances from the keys' indices in the cache (ALiBi, GPT-Neo's local layers).

    Then slots must be in the order of positions, as in a chain, but not in a tree.
    """
    return bool(getattr(config, "alibi", False) or getattr(config, "attention_layers", None))


def _dense_attention(model: PreTrainedModel) -> str:
    """transformers' implementation in use, if it takes a mask [rows, slots]; otherwise eager, which always does."""
    used = str(model.config._attn_implementation)
    return used if used in ("eager", "sdpa") else "eager"


def _layer_types(config: Any) -> tuple[str, ...]:
    types = getattr(config, "layer_types", None)
    if types:
        return tuple(types)
    kind = SLIDING if getattr(config, "sliding_window", None) else FULL
    return (kind,) * int(config.num_hidden_layers)


def _longrope_threshold(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    threshold = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return None if threshold is None else int(threshold)
