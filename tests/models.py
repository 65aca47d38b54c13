"""Tiny random models of many architectures. Weights are drawn wide, so that a wrong mask shows at once."""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings

torch.set_num_threads(1)  # a second thread is waited for, where other processes have the cores: for minutes
if platform.machine() == "aarch64":  # there oneDNN takes 0.5 ms for a product of tiny matrices, and BLAS 0.01 ms
    torch.backends.mkldnn.enabled = False


def examples(most: int) -> settings:
    """So many random cases, of which `make test` tries some."""
    return settings(max_examples=max(2, most * settings.default.max_examples // 100))


VOCABULARY = 97
CONTEXT = 160
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 5}
_HEADS = {"head_dim": 8}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": _HEADS,
    "Mistral": _WINDOW,
    "Gemma2": {**_WINDOW, **_HEADS},
    "Gemma3Text": {**_WINDOW, **_HEADS},
    "Phi3": _WINDOW,
    "GPTNeoX": {},
    "GPT2": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2": {},
    "Granite": {},
    "Cohere": {},
    "Cohere2": _WINDOW,
    "Starcoder2": _WINDOW,
    "SmolLM3": {},
    "Falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "Mixtral": {},
    "Phi": {},
    "StableLm": {},
    "GPTJ": {"n_embd": 32, "n_head": 4, "n_layer": 4, "rotary_dim": 4},
    "Olmo3": _WINDOW,
    "GptOss": {**_WINDOW, **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
CHAINS_ONLY: dict[str, dict[str, Any]] = {
    "Bloom": {"n_head": 4, "n_layer": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": CONTEXT},
    "Falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "GPTNeo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
}


@functools.cache
def tiny(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random causal language model."""
    return build(name, {**_COMMON, **ARCHITECTURES[name], **changes}, seed, dtype)


def mostly_slow(values: Iterable[Any], quick: Iterable[Any] = ("Llama", "Gemma2", "GPT2")) -> list[Any]:
    """Parameters of a test that takes long for each architecture: all but some are left to `make test-all`.

    A value is the test's only parameter, or a tuple of several.
    """
    every = {value: value if isinstance(value, tuple) else (value,) for value in values}
    return [pytest.param(*given, marks=() if value in quick else pytest.mark.slow) for value, given in every.items()]


@functools.cache
def tiny_chain(name: str) -> Any:
    """A tiny model that takes chains only."""
    return build(name, {**_COMMON, **CHAINS_ONLY[name]}, 0, torch.float32)


_drawing = threading.Lock()


def build(name: str, options: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
    config = getattr(transformers, f"{name}Config")(**options)
    with _drawing, torch.no_grad():  # two threads may ask for the same model
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return model
