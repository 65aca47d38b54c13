"""The adapter: rows of any shape compute what one sequence at a time would compute."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from outpace.draft import Tree, chain
from outpace.errors import UnsupportedModel
from outpace.models.hf import HFModel
from outpace.pool import Pool

from .models import ARCHITECTURES, CHAINS_ONLY, CONTEXT, VOCABULARY, build, tiny, tiny_chain


def expected_logits(model: Any, text: list[int], path: list[int]) -> torch.Tensor:
    """What transformers itself computes for one straight text."""
    with torch.no_grad():
        return model(torch.tensor([text + path])).logits[0, len(text) - 1 :]


def random_text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tree_equals_its_paths(name: str, seed: int) -> None:
    model = tiny(name)
    adapter = HFModel(model)
    text = random_text(21, seed)
    tree = Tree(text[-1])
    draw = random.Random(seed)
    paths = [draw.choices(range(4), k=draw.randint(1, 7)) for _ in range(8)]
    rows = [tree.insert(path, "test") for path in paths]
    draft = tree.draft()
    pool = Pool(capacity=8)
    with pool.sequence(random_text(9, seed + 7)) as other, pool.sequence(text) as sequence:
        adapter.forward(pool, pool.place_text(other, 4), logits=0)  # a neighbour whose slots lie between ours
        adapter.forward(pool, pool.place_text(sequence, 6), logits=0)
        adapter.forward(pool, pool.place_text(other, 4), logits=0)
        found = adapter.forward(pool, pool.place(sequence, draft), logits=len(draft)).logits
    for path, way in zip(paths, rows, strict=True):
        assert torch.allclose(found[[0, *way]], expected_logits(model, text, path), atol=2e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_in_parts_equal_layers_at_once(name: str) -> None:
    adapter = HFModel(tiny(name))
    text = random_text(12, 3)
    draft = chain(text[-1], [5, 6], "test")
    pool = Pool()
    with pool.sequence(text) as sequence:
        rows = pool.place(sequence, draft)
        whole = adapter.forward(pool, rows, logits=3)
        low = adapter.forward(pool, rows, logits=0, stop=1)
        middle = adapter.forward(pool, rows, logits=0, start=1, stop=3, hidden=low.hidden)
        high = adapter.forward(pool, rows, logits=3, start=3, hidden=middle.hidden)
        head = adapter.forward(pool, rows, logits=3, start=adapter.layers, hidden=high.hidden)
    assert low.logits.shape == (0, VOCABULARY)
    assert torch.equal(high.logits, whole.logits)
    assert torch.equal(high.hidden, whole.hidden)
    assert torch.equal(head.logits, whole.logits)


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_alibi_models_take_chains(name: str) -> None:
    model = tiny_chain(name)
    adapter = HFModel(model)
    assert not adapter.branches
    text, path = random_text(15, 1), [3, 4, 5]
    pool = Pool(capacity=4)
    with pool.sequence(text) as sequence:
        adapter.forward(pool, pool.place_text(sequence, 8), logits=0)
        found = adapter.forward(pool, pool.place(sequence, chain(text[-1], path, "test")), logits=4).logits
    assert torch.allclose(found, expected_logits(model, text, path), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mamba", {}),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
        ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 4}),
    ],
)
def test_recurrent_models_are_refused_at_load(name: str, options: dict[str, Any]) -> None:
    base = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = build(name, {**base, **heads, **options}, 0, torch.float32)
    with pytest.raises(UnsupportedModel, match="rolled back"):
        HFModel(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="AutoModelForCausalLM"):
        HFModel(transformers.AutoModel.from_config(tiny("Llama").config))


def with_changed_layer(dtype: torch.dtype, change: Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]) -> Any:
    """A model in which one layer gets other hidden states, and another mask."""
    model = copy.deepcopy(tiny("Llama")).to(dtype)
    layer = model.model.layers[2]
    forward = layer.forward

    def changed(hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        states, mask = change(hidden_states, attention_mask)
        return forward(states, attention_mask=mask, **kwargs)

    layer.forward = changed
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_the_mask_is_refused(dtype: torch.dtype) -> None:
    """The check at load finds what no attribute tells."""
    model = with_changed_layer(dtype, lambda states, mask: (states, torch.ones_like(mask)))
    with pytest.raises(UnsupportedModel, match="several tokens at once"):
        HFModel(model)


def test_what_rounding_does_is_no_reason_to_refuse_a_model() -> None:
    """Some processors round bfloat16 so that logits of a good model differ by several per cent beside other rows."""

    def rounded(states: torch.Tensor, mask: Any) -> tuple[torch.Tensor, Any]:
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(states.shape[1]))  # by rows
        return states * (1 + 0.08 * noise).to(states.dtype), mask

    HFModel(with_changed_layer(torch.bfloat16, rounded))
    with pytest.raises(UnsupportedModel, match=r"relative difference 0\.\d+; 0 by tokens"):
        HFModel(with_changed_layer(torch.float32, rounded))


def test_the_users_model_is_not_touched() -> None:
    model = copy.deepcopy(tiny("Qwen2")).train()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    config = model.config.to_dict()
    attention = model.config._attn_implementation
    modules = [id(module) for module in model.modules()]
    adapter = HFModel(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    assert [id(module) for module in model.modules()] == modules
    assert model.training
    mine = dict(adapter._mirror.named_parameters()).values()
    assert {parameter.data_ptr() for parameter in mine} == {p.data_ptr() for p in model.parameters()}


def test_room_ends_with_the_context() -> None:
    adapter = HFModel(tiny("Llama"))
    assert adapter.room(0) == CONTEXT - 1
    assert adapter.room(CONTEXT - 1) == 0


def test_longrope_keeps_drafts_below_its_threshold() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    model = tiny("Phi3", sliding_window=None)
    config = copy.deepcopy(model.config)
    config.rope_parameters = rope
    config.original_max_position_embeddings = 32
    adapter = HFModel(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert adapter.room(20) == 11
    assert adapter.room(31) == 0
    assert adapter.room(32) == CONTEXT - 33


def test_a_model_that_cannot_be_run_in_parts_is_refused() -> None:
    """A chains-only model must compute a text in pieces as it computes it whole."""
    model = copy.deepcopy(tiny_chain("Bloom"))
    attention = model.transformer.h[2].self_attention
    forward = attention.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        return (result[0] * (1 + kwargs["layer_past"].get_seq_length()), *result[1:])

    attention.forward = forgetful
    with pytest.raises(UnsupportedModel, match="several tokens at once"):
        HFModel(model)


def test_a_model_spread_by_accelerate_is_refused() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = copy.deepcopy(tiny("Llama"))
    add_hook_to_module(model, ModelHook())
    with pytest.raises(UnsupportedModel, match="device_map"):
        HFModel(model)


def test_growing_rotary_tables_stay_our_own() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("Llama", max_position_embeddings=24)
    config = copy.deepcopy(model.config)
    config.rope_parameters = rope
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model.model.rotary_emb.inv_freq.clone()
    adapter = HFModel(model)
    pool = Pool()
    with pool.sequence(random_text(40, 1)) as sequence:
        adapter.forward(pool, pool.place_text(sequence, 40), logits=0)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
