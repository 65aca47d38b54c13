"""GGUF files of tiny random models, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from .models import VOCABULARY

SIZES = {"width": 64, "inner": 96, "heads": 4, "key_heads": 2, "layers": 3}


def random_rows(kind: Kind, rows: int, inputs: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows of a block format, with any codes and sensible scales."""
    random = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    places = {Kind.Q6_K: (208,), Kind.Q4_0: (0,), Kind.Q5_0: (0,), Kind.Q8_0: (0,), Kind.IQ4_NL: (0,)}.get(kind, (0, 2))
    for place in places:
        scales = random.normal(0, 0.01, (rows, inputs // block, 1)).astype(np.float16)
        raw[:, :, place : place + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def write(
    path: Path,
    architecture: str = "llama",
    kind: Kind = Kind.Q4_1,
    tied: bool = True,
    mixed: Kind | None = None,
    bos: bool = False,
) -> Path:
    """A file with random weights. `mixed`: the output head's type, if it has weights of its own."""
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, architecture)
    width, inner, layers = SIZES["width"], SIZES["inner"], SIZES["layers"]
    size = 128 if architecture == "qwen3" else 16  # transformers reads no other for it
    writer.add_block_count(layers)
    writer.add_context_length(160)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["key_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_key_length(size)
    writer.add_value_length(size)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{number}" for number in range(VOCABULARY)])
    writer.add_token_scores([-float(number) for number in range(VOCABULARY)])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(bos)
    writer.add_eos_token_id(2)

    def matrix(name: str, outputs: int, inputs: int, how: Kind = kind) -> None:
        values = random.normal(0, 0.3, (outputs, inputs)).astype(np.float32)
        rows = random_rows(how, outputs, inputs) if how == Kind.IQ4_NL else quants.quantize(values, how)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=how)

    def vector(name: str, size: int, middle: float) -> None:
        writer.add_tensor(name, (middle + random.normal(0, 0.1, size)).astype(np.float32))

    ends = kind if kind in (Kind.F32, Kind.F16, Kind.BF16) else Kind.Q8_0
    matrix("token_embd", VOCABULARY, width, ends)
    if not tied:
        matrix("output", VOCABULARY, width, ends if mixed is None else mixed)
    vector("output_norm.weight", width, 1)
    for layer in range(layers):
        block = f"blk.{layer}."
        heads = {"q": SIZES["heads"], "k": SIZES["key_heads"], "v": SIZES["key_heads"]}
        for name, count in heads.items():
            matrix(f"{block}attn_{name}", count * size, width)
            if architecture == "qwen2":
                vector(f"{block}attn_{name}.bias", count * size, 0)
        matrix(f"{block}attn_output", width, SIZES["heads"] * size)
        matrix(f"{block}ffn_gate", inner, width)
        matrix(f"{block}ffn_up", inner, width)
        matrix(f"{block}ffn_down", width, inner)
        norms = ["attn_norm", "ffn_norm"]
        if architecture.startswith("gemma"):
            norms += ["post_attention_norm", "post_ffw_norm"]
        for name in norms:
            vector(f"{block}{name}.weight", width, 1)
        if architecture in ("qwen3", "gemma3"):
            for name in ("attn_q_norm", "attn_k_norm"):
                vector(f"{block}{name}.weight", size, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
