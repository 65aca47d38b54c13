"""SWIFT: which layers are skipped, and that drafts and verification share slots. Losslessness: test_lossless.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import Decoder, InputError, Sampling, Swift, UnsupportedModel
from outpace.methods.swift import MODELLED, Search, kept
from outpace.models.toy import Bigram

from .models import build, tiny
from .test_lossless import prompt_of

IDLE = (2, 3, 5)  # layers that change nothing


def with_idle_layers() -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = build("Llama", {**sizes, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}, 0, torch.float32)
    with torch.no_grad():
        for layer in IDLE:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize(
    "sampling", [pytest.param(Sampling(), marks=pytest.mark.slow), Sampling(temperature=0.9, seed=2)]
)
def test_it_finds_the_layers_that_do_nothing(sampling: Sampling) -> None:
    decoder = Decoder(with_idle_layers(), method="autoregressive")
    method = Swift(skip=3 / 8, confidence=0.0, length=4)
    prompt = prompt_of(0)
    plain = decoder.generate(prompt, max_new_tokens=100, sampling=sampling)
    first = decoder.generate(prompt, max_new_tokens=100, sampling=sampling, method=method)
    (search, _) = decoder.engine.notes[Swift, 3 / 8, 100]
    assert search.over
    assert search.best == {*IDLE} or not sampling.temperature  # greedy texts repeat themselves: other sets do as well
    again = decoder.generate(prompt, max_new_tokens=100, sampling=sampling, method=method)
    assert first.token_ids == again.token_ids == plain.token_ids
    assert again.steps <= first.steps
    if sampling.temperature:
        assert again.steps == 21  # the prompt's, and then five tokens in each
    assert decoder.engine.pool.held == 0


def test_a_draft_ends_behind_what_is_improbable() -> None:
    decoder = Decoder(tiny("Llama"))
    for confidence, rows in ((0.0, 6), (1.0, 2)):
        method = Swift(confidence=confidence, length=5, search=0)
        steps = [*decoder.stream(prompt_of(1), max_new_tokens=30, method=method)]
        assert [len(step.draft) for step in steps] == [1, *[rows] * (len(steps) - 1)]


def test_plain_decoding_where_nothing_is_drafted() -> None:
    decoder = Decoder(tiny("Llama"))
    assert decoder.generate(prompt_of(1), max_new_tokens=9, method=Swift(length=0)).steps == 9


def test_the_search_asks_its_model_now_and_then() -> None:
    """Layers 1 and 2 are the ones to skip. The model of what was judged finds them in fewer sets than chance."""
    search = Search(layers=22, skip=2 / 22, most=100)
    assert search.count == 2
    assert search.propose() == search.best == {1, 20}
    near = 0
    for _ in range(99):
        asked = (len(search.judged) + 1) % MODELLED == 0
        skipped = search.propose()
        assert len(skipped) == 2
        assert not skipped & {0, 21}
        near += asked and bool(skipped & {1, 2})
        search.learn(skipped, 0.4 * len(skipped & {1, 2}))
    assert near >= 2
    assert not search.over
    search.learn(frozenset([1, 2]), 0.95)
    assert search.over
    assert search.best == {1, 2}


@pytest.mark.parametrize("layers", [3, 8, 30])
@pytest.mark.parametrize("skip", [0.0, 0.45, 1.0])
def test_the_first_set(layers: int, skip: float) -> None:
    search = Search(layers, skip, 1)
    assert len(search.best) == search.count
    assert 1 <= search.count <= layers - 2
    runs = kept(search.best, layers)
    assert (runs[0][0], runs[-1][1]) == (0, layers)
    assert sum(stop - start for start, stop in runs) == layers - search.count


def test_what_it_refuses() -> None:
    with pytest.raises(InputError, match="skip=2"):
        Swift(skip=2.0)
    with pytest.raises(UnsupportedModel, match="needs 3 or more"):
        Decoder(Bigram(torch.eye(3))).prepare("swift")
