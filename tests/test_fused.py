"""A step's Triton kernels against the functions of torch that they stand in for. On a GPU, or in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import AdaDecode, Autoregressive, Decoder, Jacobi, Lookahead, Method, PromptLookup, Sampling
from outpace.models.hf import HFModel
from outpace.picking import likeliest
from outpace.runtime.graphs import GraphEngine
from outpace.step import fused

from .conftest import tiny
from .test_adadecode import random_exits
from .test_attention import DEVICE, attention
from .test_heads import method_for, random_heads
from .test_lossless import prompt_of

pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not attention.INTERPRET, reason="no GPU, and not interpreted")

METHODS: dict[str, Method] = {
    "plain": Autoregressive(),
    "prompt-lookup": PromptLookup(rows=12),
    "prompt-lookup gated": PromptLookup(rows=20, gate=0.3),
    "jacobi": Jacobi(window=5),
    "lookahead": Lookahead(window=4, ngram=4, guesses=4),
    "lookahead as published": Lookahead(
        window=4, ngram=4, guesses=4, verify_window=False, verify_early=False, longest_key=1, recycle=False, reach=0
    ),
    "lookahead pairs": Lookahead(window=3, ngram=2, guesses=3),
    "lookahead one column": Lookahead(window=1, ngram=2, guesses=5),
    "lookahead one guess": Lookahead(window=2, ngram=3, guesses=1, prompt_pool=False),
    "lookahead deep": Lookahead(window=3, ngram=5, guesses=6, longest_key=2, reach=4),
}


def steps_of(method: Method, texts: int, monkeypatch: pytest.MonkeyPatch, kernels: bool) -> list[list[Any]]:
    """Everything that the steps of some texts did."""
    with monkeypatch.context() as patch:
        patch.setattr(fused, "usable", lambda device: kernels)
        patch.setattr(attention, "INTERPRET", False)  # it has tests of its own, and takes minutes
        model = tiny("Llama").to(DEVICE)
        decoder = Decoder(model)
        decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=2048)
        batch = decoder.batch()
        ready = decoder.prepare(method)
        for number in range(texts):
            batch.add(prompt_of(number), method=ready, max_new_tokens=16, sampling=Sampling())
        found: list[list[Any]] = [[] for _ in range(texts)]
        for number, step in batch:
            assert not isinstance(step, Exception), step
            found[number].append((step.tokens, step.rows, step.draft.tokens, step.draft.parents, step.draft.sources))
        assert decoder.engine.pool.held == 0
    model.to("cpu")
    return found


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("name", [*METHODS, "medusa", "amphista", "exits"])
def test_kernels_draft_and_keep_what_torch_does(name: str, texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS.get(name)
    if name == "exits":
        method = AdaDecode(random_exits(tiny("Llama")), control="tree", exits="2", rows=24)
    elif method is None:
        method = method_for(name, random_heads(name, tiny("Llama")), rows=16)
    expected = steps_of(method, texts, monkeypatch, kernels=False)
    assert steps_of(method, texts, monkeypatch, kernels=True) == expected


@pytest.mark.parametrize("words", [50, 4096, 9000])
def test_the_likeliest(words: int) -> None:
    torch.manual_seed(words)
    logits = torch.randn(6, words, device=DEVICE)
    found, expected = fused.likeliest(logits, 10), likeliest(logits, 10)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
