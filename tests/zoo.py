"""A tiny random model of every architecture that transformers registers as a causal language model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .models import CONTEXT, VOCABULARY

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = 4

# One value for each meaning, whatever a configuration calls it. Windows are shorter than the prompts.
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size n_vocab vocab_size_per_layer_input"),
    (CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length"),
    (
        32,
        "hidden_size d_model n_embd emb_dim embedding_size input_embedding_size output_embedding_size "
        "word_embed_proj_dim backbone_hidden_size pronunciation_embed_dim shape_embed_dim num_mel_bins d_kv "
        "cross_attention_hidden_size embed_dim output_proj_dims mamba_d_ssm attention_hidden_size",
    ),
    (
        48,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff ffn_hidden_size "
        "feed_forward_size moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "intermediate_size_mlp shared_intermediate_size dense_intermediate_size "
        "moe_shared_expert_intermediate_size prompt_mid_dim hc_lowrank router_hidden_size o_lora_rank",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers encoder_layers "
        "num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads attention_heads "
        "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts index_n_heads "
        "linear_num_heads mamba_num_heads linear_num_value_heads linear_num_key_heads pronunciation_vocab_size "
        "zero_expert_num laurel_rank sliding_window_pattern attention_window_size n_mamba_heads mamba_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k "
        "num_codebooks n_groups mamba_n_groups o_groups hc_mult hc_count patch_size moe_top_k_experts kv_n_heads "
        "moe_top_k indexer_compress_ratio index_topk_blocks mtp_num_layers",
    ),
    (
        8,
        "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim swa_head_dim index_head_dim dim_head "
        "attention_head_size kv_channels linear_head_dim mamba_head_dim linear_key_head_dim linear_value_head_dim "
        "global_head_dim hidden_size_per_layer_input mamba_d_state ssm_state_size state_size mamba_d_head "
        "adapter_rank gated_norm_rank d_rel num_centroids centroid_intermediate_top_k max_window_layers "
        "rel_extent mamba_headdim indexer_head_dim indexer_budget time_step_rank chunk_size",
    ),
    (4, "rotary_dim index_topk indexer_n_heads index_block_size"),
    (5, "sliding_window sliding_window_size keep_window_size local_attention window_size"),
    (16, "kv_lora_rank q_lora_rank query_pre_attn_scalar attention_chunk_size floor_scale image_size"),
    (
        1,
        "n_group topk_group num_dense_layers first_k_dense_replace moe_layer_start_index num_random_blocks "
        "n_shared_experts moe_num_shared_experts num_shared_experts num_kv_shared_layers num_nextn_predict_layers "
        "num_mtp_layers prompt_length indexer_kv_heads",
    ),
    (211, "ngram_vocab_size_base"),
)
_SMALL = {name: size for size, names in _SIZES for name in names.split()}

# What no rule for all gives.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _HYBRID,
    "kimi_linear": _HYBRID,
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["mamba", "attention"] * 2},
    "mamba2": {"head_dim": 16},
    "falcon_h1": {"mamba_d_head": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 20)},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 16, "attention_hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "gemma3n_text": _SHARED,
    "gemma4": {"text_config": _SHARED},
    "gemma4_text": _SHARED,
    "gemma4_unified": {"text_config": _SHARED},
    "gemma4_unified_text": _SHARED,
    "blt": {"encoder_hash_byte_group_vocab": 64},
}


def build_any(name: str, changes: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """A tiny model of a type in NAMES, with weights drawn wide."""
    kind = transformers.CONFIG_MAPPING[name]
    options = small(kind)
    if "kv_lora_rank" in options:  # latent attention has no groups of heads
        options["num_key_value_heads"] = options["num_attention_heads"]
    for key, value in {**_SPECIAL.get(name, {}), **(changes or {})}.items():
        options[key] = {**options.get(key, {}), **value} if isinstance(value, dict) else value
    config = kind(**options)
    torch.manual_seed(seed)
    model = _model(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return model


def _model(config: Any) -> Any:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    if config.model_type.startswith("musicgen"):  # the registered configuration is not that of the registered model
        return getattr(transformers, name)(config.decoder)
    return transformers.AutoModelForCausalLM.from_config(config)


def small(kind: Any) -> dict[str, Any]:
    """Options of a configuration class that make a tiny model; nested configurations too."""
    nested = getattr(kind, "sub_configs", None) or {}
    options: dict[str, Any] = {}
    marks = VOCABULARY
    for field in dataclasses.fields(kind):
        name, usual = field.name, field.default
        if name in nested:
            inner = nested[name]
            if inner is transformers.AutoConfig:
                inner = type(getattr(kind(), name))
                options[name] = {"model_type": inner.model_type, **small(inner)}
            else:
                options[name] = small(inner)
        elif name in _SMALL and not isinstance(usual, bool):
            options[name] = _SMALL[name]
        elif name == "eos_token_id":
            options[name] = None
        elif name == "pad_token_id":
            options[name] = 0
        elif name == "bos_token_id":
            options[name] = 1
        elif name.endswith(("_token_id", "_token_index")) and isinstance(usual, int):
            marks -= 1
            options[name] = marks
        elif name == "is_decoder":
            options[name] = True
    return options
