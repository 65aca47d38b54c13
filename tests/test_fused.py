"""A step's Triton kernels against the functions of torch that they stand in for. On a GPU, or in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import Autoregressive, Decoder, Jacobi, Lookahead, Method, PromptLookup, Sampling
from outpace.models.hf import HFModel
from outpace.picking import likeliest
from outpace.runtime.graphs import GraphEngine
from outpace.sources.recycle import Recycle
from outpace.step import fused
from outpace.step.nodes import NEVER, Nodes, plant
from outpace.step.texts import Texts
from outpace.step.walking import Walk

from .conftest import tiny
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
@pytest.mark.parametrize("name", [*METHODS, "medusa", "amphista"])
def test_kernels_draft_and_keep_what_torch_does(name: str, texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS.get(name)
    if method is None:
        method = method_for(name, random_heads(name, tiny("Llama")), rows=16, recycled=5)
    expected = steps_of(method, texts, monkeypatch, kernels=False)
    assert steps_of(method, texts, monkeypatch, kernels=True) == expected


def hashes_of(nodes: Nodes) -> torch.Tensor:
    return nodes.paths.gather(2, nodes.depths[..., None])[..., 0]


@pytest.mark.parametrize(("lanes", "rows", "ranks"), [(1, 1, 3), (2, 7, 8)])
def test_recycling(lanes: int, rows: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few places and words, so that rows go to the same ones, and with NaN."""
    torch.manual_seed(rows)
    device = torch.device(DEVICE)
    words, size, memory = 9, 7, ("_known", "_next", "_chances")
    texts = Texts(lanes + 1, 9, device).view(lanes, 9)
    both = [Recycle(ranks, 40, lanes + 1, device, size) for _ in range(2)]
    for _ in range(2):
        texts.tokens.random_(words)
        texts.lengths.random_(10)
        draft = plant(texts.roots(), [], 1, texts.lengths, rows=rows)
        draft.tokens.random_(words)
        draft = draft._replace(valid=torch.rand(lanes, rows, device=device) < 0.7)
        logits = torch.randn(lanes * rows, words, device=device)
        logits[::5, 3] = torch.nan
        for kernels, source in enumerate(both):
            monkeypatch.setattr(fused, "usable", lambda device, kernels=kernels: bool(kernels))
            source.learn(texts, draft, draft.tokens, Walk(*draft[:3]), logits)
        known, following, chances = ([getattr(source, name)[:, :size] for source in both] for name in memory)
        assert torch.equal(*known)
        torch.testing.assert_close(*chances, rtol=0, atol=1e-5)
        assert torch.equal(*(tokens * (chances[0] > NEVER) for tokens in following))
        found = []
        for kernels, source in enumerate(both):
            monkeypatch.setattr(fused, "usable", lambda device, kernels=kernels: bool(kernels))
            found += source.guess(texts, texts.lengths)
        torch.testing.assert_close(found[0].chances, found[1].chances, rtol=0, atol=1e-4)
        there = found[0].chances > NEVER
        for ends in ([nodes.tokens[there] for nodes in found], [hashes_of(nodes)[there] for nodes in found]):
            assert torch.equal(*ends)
    assert there.any() or rows == 1


@pytest.mark.parametrize("words", [50, 4096, 9000])
def test_the_likeliest(words: int) -> None:
    torch.manual_seed(words)
    logits = torch.randn(6, words, device=DEVICE)
    found, expected = fused.likeliest(logits, 10), likeliest(logits, 10)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
