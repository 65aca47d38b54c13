"""The promise: every method writes plain decoding's text. No tolerance anywhere in this file."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import outpace
from outpace import (
    AdaDecode,
    Amphista,
    Auto,
    Autoregressive,
    Decoder,
    DraftModel,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    Method,
    PromptLookup,
    Sampling,
    SelfSpeculative,
    Swift,
)
from outpace.models.toy import Bigram

from .models import CHAINS_ONLY, CONTEXT, VOCABULARY, examples, mostly_slow, tiny, tiny_chain
from .statistics import chi_square_fits
from .test_heads import random_heads

PLAIN = Autoregressive()
METHODS: dict[str, Method] = {
    "jacobi": Jacobi(window=5),
    "prompt-lookup": PromptLookup(),
    "prompt-lookup chain": PromptLookup(tree=False),
    "lookahead": Lookahead(),
    "lookahead small": Lookahead(window=2, ngram=2, guesses=1, longest_key=1),
    "lookahead as published": Lookahead(window=4, ngram=4, guesses=4, published=True),
    "lookahead without the text": Lookahead(window=6, ngram=3, prompt_pool=False),
}


def methods_for(name: str, **changes: Any) -> dict[str, Method]:
    """All of them for one model: with random heads, which guess wrong, and with exits by its own output head."""
    model = tiny(name, **changes)
    return {
        **METHODS,
        "draft": DraftModel(model=tiny(name, seed=5, **changes), length=3),
        "medusa": Medusa(heads=random_heads("medusa", model), rows=8),
        "hydra": Hydra(heads=random_heads("hydra", model), rows=8),
        "amphista": Amphista(heads=random_heads("amphista", model), rows=8),
        "auto": Auto(heads=random_heads("amphista", model), rows=8),
        "exits": AdaDecode("original", exits="1, 3", control="fixed", gamma=0.2),
        "exits in a tree": AdaDecode("original", exits="2", control="tree", rows=8),
        "self-speculative": SelfSpeculative(exit=2, length=3),
        "swift": Swift(length=3, confidence=0.01),
    }


NAMES = ["Llama", "Qwen3", "Mistral", "Gemma2", "GPTNeoX", "GPT2", "OPT", "Mixtral"]


def prompt_of(seed: int, length: int = 24) -> list[int]:
    """Tokens with repetitions, so that there is something to guess."""
    draw = random.Random(seed)
    piece = draw.choices(range(VOCABULARY), k=6)
    return [token for _ in range(length // 8) for token in [*piece, *draw.choices(range(VOCABULARY), k=2)]]


def write(decoder: Decoder, method: Method, prompt: list[int], sampling: Sampling, length: int = 40) -> list[int]:
    tokens = decoder.generate(
        prompt, method=decoder.prepare(method), sampling=sampling, max_new_tokens=length
    ).token_ids
    assert decoder.engine.pool.held == 0
    return tokens


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", mostly_slow(NAMES, quick=["Llama", "Mistral", "Gemma2", "GPT2", "Mixtral"]))
def test_greedy_equals_plain_and_transformers(name: str, seed: int) -> None:
    model = tiny(name)
    decoder = Decoder(model)
    prompt = prompt_of(seed)
    ids = torch.tensor([prompt])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    expected = theirs[0, len(prompt) :].tolist()
    assert write(decoder, PLAIN, prompt, Sampling(), 16) == expected
    for label, method in methods_for(name).items():
        assert write(decoder, method, prompt, Sampling(), 16) == expected, label


@pytest.mark.parametrize("name", mostly_slow(NAMES, quick=["Llama"]))
def test_the_same_seed_gives_the_same_text(name: str) -> None:
    decoder = Decoder(tiny(name))
    prompt = prompt_of(9)
    for seed in range(2):
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=seed)
        expected = write(decoder, PLAIN, prompt, sampling, 14)
        for label, method in methods_for(name).items():
            assert write(decoder, method, prompt, sampling, 14) == expected, label
    assert write(decoder, PLAIN, prompt, Sampling(temperature=0.8, top_p=0.95, seed=77), 14) != expected


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_chains_only_models(name: str) -> None:
    model = tiny_chain(name)
    decoder = Decoder(model, method="jacobi")
    ids = torch.tensor([prompt_of(1)])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    expected = theirs[0, ids.shape[1] :].tolist()
    assert write(decoder, PLAIN, prompt_of(1), Sampling()) == expected
    for method in (Jacobi(window=5), PromptLookup(tree=False), DraftModel(model=tiny_chain(name), length=4)):
        assert write(decoder, method, prompt_of(1), Sampling()) == expected
    for method in (Lookahead(), PromptLookup()):
        with pytest.raises(outpace.UnsupportedModel, match="tree=false"):
            decoder.prepare(method)


@examples(40)
@given(st.data())
def test_any_settings_of_any_method(data: Any) -> None:
    decoder = _decoder()
    small = st.integers(1, 6)
    method = data.draw(
        st.one_of(
            st.builds(Jacobi, window=small),
            st.builds(PromptLookup, longest=small, rows=st.integers(1, 30), depth=small, tree=st.booleans()),
            st.builds(
                Lookahead,
                window=small,
                ngram=st.integers(2, 6),
                guesses=st.integers(0, 6),
                prompt_pool=st.booleans(),
                longest_key=st.integers(1, 4),
                reach=small,
                recycle=st.booleans(),
            ),
            st.builds(Lookahead, window=small, ngram=st.integers(2, 6), published=st.just(True)),
            st.builds(DraftModel, model=st.just(tiny("Llama", seed=1)), length=small),
        )
    )
    sampling = data.draw(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
            top_k=st.sampled_from([0, 1, 5]),
            top_p=st.sampled_from([1.0, 0.9, 0.5]),
            min_p=st.sampled_from([0.0, 0.1]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            presence_penalty=st.sampled_from([0.0, 0.5]),
            frequency_penalty=st.sampled_from([0.0, 0.5]),
            logit_bias=st.sampled_from([{}, {5: 2.0, 7: -3.0}]),
            seed=st.integers(0, 2**40),
        )
    )
    prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
    length = data.draw(st.integers(1, 20))
    assert write(decoder, method, prompt, sampling, length) == write(decoder, PLAIN, prompt, sampling, length)


_known: list[Decoder] = []


def _decoder() -> Decoder:
    if not _known:
        _known.append(Decoder(tiny("Llama")))
    return _known[0]


@pytest.mark.parametrize("name", mostly_slow(["GPT2", "OPT", "Llama"], quick=["GPT2"]))
def test_the_end_of_the_context_changes_nothing(name: str) -> None:
    """Drafts that would reach beyond the last position are cut, also for tables of learned positions."""
    decoder = Decoder(tiny(name))
    prompt = prompt_of(2, 144)
    expected = write(decoder, PLAIN, prompt, Sampling(), length=1000)
    assert len(expected) == CONTEXT - len(prompt)
    for label, method in methods_for(name).items():
        assert write(decoder, method, prompt, Sampling(), length=1000) == expected, label


def test_a_long_prompt_is_taken_in_chunks() -> None:
    model = tiny("Llama", max_position_embeddings=2048)
    decoder = Decoder(model)
    decoder.engine.model.chunk = 64
    prompt = prompt_of(4, 640)
    ids = torch.tensor([prompt])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    for method in (PLAIN, Lookahead(), PromptLookup()):
        assert write(decoder, method, prompt, Sampling(), 20) == theirs[0, len(prompt) :].tolist()


def test_a_users_processor_is_called_once_for_each_token_in_order() -> None:
    lengths = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return scores

    prompt = prompt_of(3)
    tokens = write(_decoder(), Lookahead(), prompt, Sampling(processors=[watch]), 30)
    assert lengths == list(range(len(prompt), len(prompt) + len(tokens)))


# The distribution. A text of a bigram model is a Markov chain, so each pair of neighbours is a draw whose
# distribution is known exactly. Draft and target differ, or the rejection rule would have nothing to do.

WORDS = 6
TARGET = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)) * 1.5
SMALL = TARGET + torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1))
DRAWN: dict[str, Method] = {
    "autoregressive": PLAIN,
    "jacobi": Jacobi(window=4),
    "prompt-lookup": PromptLookup(rows=12, depth=4),
    "lookahead": Lookahead(window=3, ngram=3, guesses=3),
    "draft-model": DraftModel(model=Bigram(SMALL), length=3),
}


def check_distribution(method: Method, rule: str, texts: int, length: int = 50) -> None:
    decoder = Decoder(Bigram(TARGET))
    counts = torch.zeros(WORDS, WORDS)
    for seed in range(texts):
        sampling = Sampling(temperature=1.3, top_k=5, seed=seed, rule=rule)  # type: ignore[arg-type]
        text = [seed % WORDS, *write(decoder, method, [seed % WORDS], sampling, length)]
        for before, after in itertools.pairwise(text):
            counts[before, after] += 1
    assert counts.sum() == texts * length
    scores = TARGET / 1.3
    worst = scores.topk(5).values[:, -1:]
    assert chi_square_fits(counts, scores.masked_fill(scores < worst, -torch.inf).softmax(-1))


def test_distribution() -> None:
    """With keyed noise all methods write one text (below), so plain decoding stands for them."""
    check_distribution(PLAIN, "keyed", texts=40)


@pytest.mark.parametrize("name", mostly_slow(DRAWN, quick=["lookahead"]))
def test_distribution_by_the_papers_rule(name: str) -> None:
    check_distribution(DRAWN[name], "rejection", texts=40)


def test_with_keyed_noise_the_texts_are_one() -> None:
    decoder = Decoder(Bigram(TARGET))
    for seed in range(5):
        sampling = Sampling(temperature=1.3, top_k=5, seed=seed)
        expected = write(decoder, PLAIN, [seed], sampling)
        for name, method in DRAWN.items():
            assert write(decoder, method, [seed], sampling) == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["keyed", "rejection"])
@pytest.mark.parametrize("name", DRAWN)
def test_distribution_with_a_hundred_thousand_draws(name: str, rule: str) -> None:
    check_distribution(DRAWN[name], rule, texts=2000)
