"""Every causal language model of transformers decodes transformers' own text, or is refused at load."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from outpace import Autoregressive, Decoder, Jacobi, Lookahead, PromptLookup
from outpace.errors import OutpaceWarning, UnsupportedModel
from outpace.models.packing import round_weights

from .models import mostly_slow
from .zoo import NAMES, build_any

NEW = 16
_DRAW = random.Random(3)
_PART = _DRAW.choices(range(2, 80), k=7)
PROMPTS = [[*_PART, *_PART, *_DRAW.choices(range(2, 80), k=5), *_PART[:3]], _DRAW.choices(range(2, 80), k=9), [5]]
# Layers that share keys and values, or pass on several states per row; decoders that transformers does not find; keys
# and values of different sizes; no windows where the configuration has one; recurrent states; several codebooks.
QUICK = (
    "gemma4_text",
    "gemma3n_text",
    "llama4_text",
    "modernbert-decoder",
    "deepseek_v3",
    "moshi",
    "jamba",
    "musicgen",
)
UNBUILT = ("gemma3n", "gemma4_assistant")  # one needs timm, the other's default configuration is not valid
BUILT = [name for name in NAMES if name not in UNBUILT]


def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", mostly_slow(BUILT, QUICK))
def test_the_text_is_transformers_own_or_the_model_is_refused(name: str) -> None:
    model = build_any(name)
    warnings.simplefilter("ignore", OutpaceWarning)
    refusal = ""
    try:
        decoder = Decoder(model)
    except UnsupportedModel as error:
        refusal = str(error)
    if refusal:
        assert refusal.endswith("Use transformers' own generate for it.")
        return
    expected = [generated(model, prompt) for prompt in PROMPTS]
    trees = [Lookahead(window=4, ngram=3), PromptLookup()] if decoder.model.branches else [PromptLookup(tree=False)]
    for method in (Autoregressive(), decoder.method, Jacobi(), *trees):
        assert [decoder.generate(prompt, method=method, max_new_tokens=NEW).token_ids for prompt in PROMPTS] == expected
    found = decoder.generate(PROMPTS, max_new_tokens=NEW)
    assert [result.token_ids for result in found] == expected


@pytest.mark.parametrize("name", ["bert", "electra", "xmod", "roformer"])
def test_an_encoder_is_refused(name: str) -> None:
    """With these weights attention hardly matters: the effect of later tokens is small, but no rounding."""
    with pytest.raises(UnsupportedModel, match=r"see those that follow.*is_decoder=True"):
        Decoder(build_any(name, {"is_decoder": False}))


def test_a_model_without_weights_beside_the_packed_ones() -> None:
    """Its norms have none."""
    model = round_weights(build_any("olmo", {"intermediate_size": 64}), "q8")
    decoder = Decoder(model)
    assert decoder.generate(PROMPTS[1], max_new_tokens=NEW).token_ids == generated(model, PROMPTS[1])


def test_several_codebooks_are_refused_with_packed_weights_too() -> None:
    with pytest.raises(UnsupportedModel):
        Decoder(round_weights(build_any("musicgen"), "q8"))


def test_latent_attention_with_packed_weights() -> None:
    """The KV cache has latents of equal sizes, and attention keys and values of different ones."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 64}
    model = round_weights(build_any("axk1", sizes), "q8")
    decoder = Decoder(model)
    assert not decoder.model.lists
    assert decoder.generate(PROMPTS[1], max_new_tokens=NEW).token_ids == generated(model, PROMPTS[1])
