"""A step's Triton kernels against the functions of torch that they stand in for. On a GPU, or in the interpreter."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace import AdaDecode, Auto, Autoregressive, Decoder, Jacobi, Lookahead, Method, PromptLookup, Sampling
from outpace.draft import find_best
from outpace.models.hf import HFModel
from outpace.picking import likeliest
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.sizes import Sizes
from outpace.sources.history import BETWEEN, History
from outpace.sources.recycle import Recycle
from outpace.step import fused
from outpace.step.choosing import Choices
from outpace.step.nodes import NEVER, Nodes, Rows, plant
from outpace.step.texts import Texts
from outpace.step.walking import Walk

from .models import tiny
from .test_adadecode import random_exits
from .test_attention import DEVICE, attention
from .test_heads import method_for, random_heads
from .test_lossless import prompt_of
from .test_step import random_rows

pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not attention.INTERPRET, reason="no GPU, and not interpreted"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's in the interpreter, of infinities
]

METHODS: dict[str, Method] = {
    "plain": Autoregressive(),
    "prompt-lookup": PromptLookup(rows=12),
    "prompt-lookup gated": PromptLookup(rows=20, gate=0.3),
    "jacobi": Jacobi(window=5),
    "lookahead": Lookahead(window=4, ngram=4, guesses=4),
    "lookahead as published": Lookahead(window=4, ngram=4, guesses=4, published=True),
    "lookahead pairs": Lookahead(window=3, ngram=2, guesses=3),
    "lookahead one column": Lookahead(window=1, ngram=2, guesses=5),
    "lookahead one guess": Lookahead(window=2, ngram=3, guesses=1, prompt_pool=False),
    "auto": Auto(heads=False, rows=16),
    "auto with a store": Auto(heads=False, rows=16, store=100),
    "lookahead deep": Lookahead(window=3, ngram=5, guesses=6, longest_key=2, reach=4),
}


HEADED = ("medusa", "amphista", "block", "auto with amphista", "auto with block")


def steps_of(
    method: Method,
    texts: int,
    monkeypatch: pytest.MonkeyPatch,
    kernels: bool,
    samplings: Sequence[Sampling] = (Sampling(),) * 3,
    tokens: int = 16,
    turns: int = 1,
    exact_rows: int = 0,
) -> list[list[Any]]:
    """Everything that the steps of some texts did."""
    with monkeypatch.context() as patch:
        patch.setattr(fused, "usable", lambda device: kernels)
        # Whatever steps cost here.
        patch.setattr(Sizes, "choose", lambda self, texts, arms: max(arms, key=lambda arm: (arm.rows, arm.costly)))
        patch.setattr(attention, "INTERPRET", False)  # it has tests of its own, and takes minutes
        model = tiny("Llama").to(DEVICE)
        decoder = Decoder(model)
        decoder.engine = GraphEngine(HFModel(model), compiled=False, exact_rows=exact_rows, capacity=2048)
        batch = decoder.batch()
        ready = decoder.prepare(method)
        found: list[list[Any]] = [[] for _ in range(texts * turns)]
        for turn in range(turns):
            for number in range(texts):
                batch.add(prompt_of(number), method=ready, max_new_tokens=tokens + turn, sampling=samplings[number])
            for number, step in batch:
                assert not isinstance(step, Exception), step
                found[number].append(
                    (step.tokens, step.rows, step.draft.tokens, step.draft.parents, step.draft.sources)
                )
        assert decoder.engine.pool.held == 0
        known = [entry[-1].sizes.begin() for entry in decoder.engine._programs]  # what trees have brought
        found += [[round(gains.tokens(16, costly), 3) for costly in (True, False)] for gains in known]
    model.to("cpu")
    return found


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("name", [*METHODS, *HEADED, "exits"])
def test_kernels_draft_and_keep_what_torch_does(name: str, texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS.get(name)
    if name == "exits":
        method = AdaDecode(random_exits(tiny("Llama")), control="tree", exits="2", rows=24)
    elif method is None and name.startswith("auto with"):
        method = Auto(heads=random_heads(name.split()[-1], tiny("Llama")), rows=16)
    elif method is None:
        method = method_for(name, random_heads(name, tiny("Llama")), rows=16, recycled=5)
    turns = 1 + ("store" in name)
    expected = steps_of(method, texts, monkeypatch, kernels=False, turns=turns)
    assert steps_of(method, texts, monkeypatch, kernels=True, turns=turns) == expected


def test_kernels_plant_for_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = steps_of(METHODS["lookahead"], 3, monkeypatch, kernels=False)
    assert steps_of(METHODS["lookahead"], 3, monkeypatch, kernels=True, exact_rows=128) == expected


ALL = Sampling(temperature=1.2, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.3, logit_bias={1: 3.0}, seed=3)


@pytest.mark.parametrize(
    ("method", "samplings"),
    [
        (Autoregressive(), [Sampling(temperature=0.9, top_p=0.9), Sampling(frequency_penalty=0.7)]),
        (PromptLookup(rows=3), [Sampling(temperature=0.5, min_p=0.05, repetition_penalty=1.2, seed=-4)]),
    ],
    ids=["plain", "prompt-lookup"],
)
def test_kernels_choose_and_count_as_torch_does(
    method: Method, samplings: list[Sampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps_of(method, len(samplings), monkeypatch, False, samplings, 4)
    assert steps_of(method, len(samplings), monkeypatch, True, samplings, 4) == expected


def both_choose(samplings: list[Sampling], logits: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, lanes, rows] tokens by the kernels and by torch, -1 where there are none."""
    lanes, words = len(samplings), logits.shape[1]
    rows = Rows(*(part if part is None else part.to(DEVICE) for part in rows))
    texts, choices = Texts(lanes, 64, DEVICE), Choices(lanes + 1, words, DEVICE)
    for lane, sampling in enumerate(samplings):
        prompt = [(lane * 7 + place) % words for place in range(3 + lane)]
        texts.open(lane, prompt, sampling.seed)
        choices.open(lane, sampling, prompt)
    answers = torch.tensor([[1, 2, 2, 5, 0]] * lanes, device=DEVICE)
    counts = torch.full((lanes,), 4, device=DEVICE)
    texts.append(answers, counts)
    choices.learn(answers, counts, choices.needs)
    logits = logits.to(DEVICE)
    found = find_best(logits)
    chosen = fused.choose(choices, logits, found, texts, rows, choices.needs)
    picks, there = choices.choose(logits, found, texts, rows, choices.needs)
    tokens = chosen[0].long().view_as(picks)
    assert ((tokens >= 0) & (tokens < words)).all()
    return torch.where((chosen[1] > -math.inf).view_as(there), tokens, -1), torch.where(there, picks, -1)


WARM = Sampling(temperature=0.8)
SAMPLINGS = {
    "noise": [WARM, Sampling(temperature=3.0, seed=2**70), Sampling(), Sampling(temperature=1e-4, seed=-1)],
    "top-k": [Sampling(temperature=2.0, top_k=k, seed=k) for k in (1, 40, 10**6)],
    "top-p": [Sampling(temperature=2.0, top_p=p, seed=5) for p in (1e-300, 0.3, 0.95, 1 - 2**-53)],
    "min-p": [Sampling(temperature=2.0, min_p=p, seed=6) for p in (0.01, 0.5, 0.999)],
    "cuts": [
        Sampling(temperature=1.5, top_k=30, top_p=0.7, min_p=0.02, seed=7),
        Sampling(temperature=1.5, top_k=2, top_p=0.99, seed=8),
        WARM,
    ],
    "penalties": [
        Sampling(repetition_penalty=1.3, logit_bias={3: 4.0, 7: -math.inf}),
        Sampling(presence_penalty=1.5, frequency_penalty=0.3),
        Sampling(repetition_penalty=0.8, frequency_penalty=-0.4),
    ],
    "all": [ALL, Sampling(temperature=0.9, top_p=0.6, frequency_penalty=0.5, seed=9), Sampling(logit_bias={1: 3.0})],
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_choices(name: str) -> None:
    """Of words in two parts. In bfloat16 many logits are the same."""
    samplings = SAMPLINGS[name]
    dtype = torch.float32 if name in ("noise", "all") else torch.bfloat16
    rows, _ = random_rows(random.Random(name), len(samplings), 1)
    torch.manual_seed(1)
    logits = torch.randn(rows.tokens.numel(), fused.WORDS + 700).mul(3).to(dtype)
    found, expected = both_choose(samplings, logits, rows)
    assert torch.equal(found, expected)
    assert (found >= 0).all()


@pytest.mark.parametrize("sampling", [WARM, ALL, Sampling(presence_penalty=1.5)], ids=["noise", "all", "penalties"])
def test_choices_among_odd_logits(sampling: Sampling) -> None:
    rows, _ = random_rows(random.Random(1), 1, 5)
    torch.manual_seed(1)
    logits = torch.randn(7, fused.WORDS + 700)
    logits[0, 2100] = math.nan
    logits[1] = -math.inf
    logits[2] = -math.inf
    logits[2, 2500] = -3.0  # all but one are ruled out
    logits[3] = torch.tensor([0.0, -0.0])[torch.arange(logits.shape[1]) % 2]
    logits[4, :2700:2] = -math.inf
    logits[5, 2300] = math.inf
    logits[6] = 5.0
    found, expected = both_choose([sampling], logits, rows)
    assert torch.equal(found, expected)
    assert (found[0] >= 0).tolist() == [False, False, True, True, True, True, True]


@pytest.mark.parametrize("kept", [1, 3])
def test_of_equal_words_at_the_border_the_first_are_kept(kept: int) -> None:
    """Each of four has a quarter of the chance."""
    rows, _ = random_rows(random.Random(1), 1, 4)
    places = torch.tensor([70, 90, fused.WORDS + 5, fused.WORDS + 9])
    logits = torch.full((6, fused.WORDS + 10), -math.inf)
    logits[:, places] = 1.0
    found, expected = both_choose([Sampling(temperature=1.0, top_p=kept / 4, seed=4)], logits, rows)
    assert torch.equal(found, expected)
    assert set(found[0].tolist()) <= set(places[:kept].tolist())


def hashes_of(nodes: Nodes) -> torch.Tensor:
    return nodes.paths.gather(2, nodes.depths[..., None])[..., 0]


@pytest.mark.parametrize(("lanes", "rows", "ranks"), [(1, 1, 3), (2, 7, 8)])
def test_recycling(lanes: int, rows: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few places and words, so that rows go to the same ones, and with NaN."""
    torch.manual_seed(rows)
    device = torch.device(DEVICE)
    words, size, memory = 9, 7, ("_known", "_next", "_chances")
    texts = Texts(lanes + 1, 9, device).view(lanes, 9)
    both = [Recycle(ranks, 40, lanes + 1, device, size, runners=2) for _ in range(2)]
    guessed = 0
    for _ in range(6):
        texts.tokens.random_(words)
        texts.lengths.random_(10)
        draft = plant(texts.roots(), [], 1, texts.lengths, rows=rows)
        draft.tokens.random_(words)
        draft = draft._replace(valid=torch.rand(lanes, rows, device=device) < 0.7)
        logits = torch.randn(lanes * rows, words, device=device)
        logits[::5, 3] = torch.nan
        kept = Walk(draft.tokens % rows, draft.tokens, torch.randint(rows + 1, (lanes,), device=device))
        for kernels, source in enumerate(both):
            monkeypatch.setattr(fused, "usable", lambda device, kernels=kernels: bool(kernels))
            source.learn(texts, draft, draft.tokens, kept, logits)
        places = [*range(size), size + 1]  # without that for what is not remembered
        known, following, chances = ([getattr(source, name)[:, places] for source in both] for name in memory)
        assert torch.equal(*known)
        torch.testing.assert_close(*chances, rtol=0, atol=1e-5)
        assert torch.equal(*(tokens * (chances[0] > NEVER) for tokens in following))
        found = []
        for kernels, source in enumerate(both):
            monkeypatch.setattr(fused, "usable", lambda device, kernels=kernels: bool(kernels))
            found.append(source.guess(texts, texts.lengths))
        for pair in zip(*found, strict=True):
            guessed += assert_same_nodes(*pair)
    assert guessed or rows == 1


def assert_same_nodes(first: Nodes, second: Nodes) -> int:
    """Says how many there are."""
    torch.testing.assert_close(first.chances, second.chances, rtol=0, atol=1e-4)
    there = first.chances > NEVER
    assert torch.equal(first.tokens[there], second.tokens[there])
    assert torch.equal(hashes_of(first)[there], hashes_of(second)[there])
    assert first.sources == second.sources
    return int(there.sum())


@pytest.mark.parametrize(
    ("longest", "depth", "places"), [(1, 1, 1), (4, 16, 8), (6, 5, 3), (16, 16, 8), (32, 20, 8), (9, 40, 2)]
)
def test_history(longest: int, depth: int, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one token, without a match, that repeat themselves, and longer than a block."""
    torch.manual_seed(depth)
    device, span = torch.device(DEVICE), 1200
    texts = Texts(5, span, device)
    texts.tokens.random_(3)
    texts.tokens[1] = torch.arange(span)
    texts.tokens[2] = torch.arange(span) % 7
    texts.tokens[3, 600:] = texts.tokens[3, :600]
    texts.lengths.copy_(torch.tensor([1, 50, 40, 700, 1190]))
    floor = 0.001 if depth == 5 else 0.0
    assert guessed_by_both(History(longest, depth, places, "history", device, floor), texts, monkeypatch)
    guessed = 0
    for size in (1, 700, 2100):  # earlier texts, of up to three blocks
        store = torch.randint(BETWEEN, 3, (size,), device=device)
        store[size // 2 : size // 2 + 50] = texts.tokens[3, 660:710][:size]
        store[-1] = BETWEEN
        source = History(longest, depth, places, "store", device, floor, store)
        guessed += guessed_by_both(source, texts, monkeypatch)
    assert guessed or places == 1  # where that is the end of a text


def guessed_by_both(source: History, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many guesses kernels and torch have in common: all."""
    device, depth, found = texts.device, source.deepest, list[Nodes]()
    for kernels in (False, True):
        monkeypatch.setattr(fused, "usable", lambda device, kernels=kernels: kernels)
        found += source.guess(texts, texts.lengths)
    if found[0].tokens.shape != found[1].tokens.shape:  # where there are fewer places, kernels have some in vain
        assert (found[1].chances[:, found[0].tokens.shape[1] :] == NEVER).all()
        found[1] = Nodes(*(part[:, : found[0].tokens.shape[1]] for part in found[1][:4]), found[1].sources)
    assert torch.equal(found[0].depths, found[1].depths)
    paths = [nodes.paths * (torch.arange(depth + 1, device=device) <= nodes.depths[..., None]) for nodes in found]
    there = found[0].chances > NEVER
    assert torch.equal(paths[0][there], paths[1][there])
    return assert_same_nodes(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [50, 4096, 9000])
def test_the_likeliest(words: int, dtype: torch.dtype) -> None:
    torch.manual_seed(words)
    logits = torch.randn(6, words, device=DEVICE).to(dtype) - 1
    found, expected = fused.likeliest(logits, 10), likeliest(logits.float(), 10)
    if dtype == torch.float32:
        assert torch.equal(found[0], expected[0])
    else:  # there are equal logits: of those the first come first
        order = logits.float().argsort(dim=1, descending=True, stable=True)[:, :10]
        assert torch.equal(found[0], order.double())
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
