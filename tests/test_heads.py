"""Heads that draft: lossless whatever they guess, the same in training and at work, whole on disk."""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from outpace import (
    AdaDecode,
    Amphista,
    Autoregressive,
    CostCurve,
    Decoder,
    InputError,
    ModelError,
    OutpaceWarning,
    Sampling,
)
from outpace.draft import Tree, chain
from outpace.heads import (
    KINDS,
    TRAINABLE,
    AmphistaSettings,
    BlockSettings,
    ExitHeads,
    ExitSettings,
    Heads,
    MedusaSettings,
)
from outpace.heads.block import _attend_to_few
from outpace.heads.blocks import BlockShape
from outpace.heads.storing import Stored, fingerprint, load, save
from outpace.heads.trees import best_tree
from outpace.methods import METHODS
from outpace.methods.headed import Headed, _Drafter, along, likeliest_paths
from outpace.methods.ngrams import Expected, History
from outpace.models.hf import HFModel
from outpace.models.packed import PackedLinear
from outpace.models.whole import layer_sizes
from outpace.picking import Foreseen, Picker, likeliest
from outpace.reproduce import amphista as reproduce_amphista
from outpace.runtime.costs import Prices
from outpace.runtime.graphs import GraphEngine
from outpace.sources.heads import quick, quick_head
from outpace.training.trainer import Plan, Trainer

from .models import VOCABULARY, mostly_slow, tiny

EIGHT = ("Llama", "Qwen3", "Gemma2", "Phi3", "GPTNeoX", "GPT2", "Mistral", "Mixtral")
SETTINGS: dict[str, list[Any]] = {
    "medusa": [
        MedusaSettings(count=3, layers=2),
        MedusaSettings(own_output=True, vocabulary=VOCABULARY),
    ],
    "hydra": [KINDS["hydra"].settings_type(count=3)],
    "amphista": [
        AmphistaSettings(),
        AmphistaSettings(count=3, auto_embedding=False),
        AmphistaSettings(stages=1, positions=False),
        AmphistaSettings(count=5, stages=0),
    ],
    "block": [
        BlockSettings(count=3, depth=2, layers="1,3", rank=8),
        BlockSettings(count=5, depth=1, layers="2", rank=4),
    ],
}


def random_heads(kind: str, model: Any, settings: Any = None, seed: int = 0) -> Heads:
    torch.manual_seed(seed)
    heads = KINDS[kind](settings or SETTINGS[kind][0], BlockShape(**layer_sizes(model)))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    return heads.eval()


@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista", "block"])
def test_native_heads_have_8_bits_and_predict_nearly_the_same(kind: str) -> None:
    model = tiny("Llama", hidden_size=64, intermediate_size=96, head_dim=16)
    heads, ends = random_heads(kind, model), HFModel(model).ends()
    before = {name: weight.clone() for name, weight in heads.state_dict().items()}
    twin, head = quick(heads, native=True), quick_head(ends.head, native=True)
    assert any(isinstance(module, PackedLinear) for module in twin.modules())
    assert isinstance(head, PackedLinear)
    assert not any(isinstance(module, PackedLinear) for module in heads.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in heads.state_dict().items())
    states = torch.randn(5, ends.head.in_features)
    expected, found = ends.head(states), head(states)
    assert (found - expected).norm() < 0.02 * expected.norm()
    hidden, embedded = torch.randn(2, 1, 12, 64)
    if kind == "block":
        rows, hidden = torch.arange(4), torch.randn(len(heads.reads), 1, 12, 64)
        expected, found = (part.states_at(hidden, embedded, rows, None)[0] for part in (heads, twin))
    else:
        expected, found = (part.states(hidden, embedded, ends) for part in (heads, twin))
    assert (found - expected).norm() < 0.05 * expected.norm()


def method_for(kind: str, heads: Heads, **settings: Any) -> Headed:
    method = METHODS[kind](heads=heads, **settings)
    assert isinstance(method, Headed)
    return method


def random_tree(rng: random.Random, depth: int) -> tuple[tuple[int, ...], ...]:
    paths: set[tuple[int, ...]] = {()}
    for _ in range(12):
        path = rng.choice(sorted(paths))
        if len(path) < depth:
            paths.add((*path, rng.randrange(4)))
    return tuple(sorted(paths - {()}))


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_slow(
        itertools.product(EIGHT, KINDS),
        [*itertools.product(["Llama"], KINDS), ("Gemma2", "block"), ("GPT2", "hydra"), ("Mistral", "amphista")],
    ),
)
def test_random_heads_change_nothing(name: str, kind: str) -> None:
    model = tiny(name)
    decoder = Decoder(model)
    rng = random.Random(name + kind)
    heads = random_heads(kind, model)
    prompt = rng.choices(range(VOCABULARY), k=9)
    methods = [method_for(kind, heads, rows=11), method_for(kind, heads, tree=random_tree(rng, heads.count))]
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=rng.randrange(99))):
        options = {"sampling": sampling, "max_new_tokens": 12}
        plain = decoder.generate(prompt, method=Autoregressive(), **options)
        for method in methods:
            found = decoder.generate(prompt, method=decoder.prepare(method), **options)
            assert found.token_ids == plain.token_ids
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize(("kind", "settings"), [(kind, each) for kind, every in SETTINGS.items() for each in every])
def test_heads_compute_at_work_what_they_were_trained_to(kind: str, settings: Any) -> None:
    model = tiny("Llama")
    adapted = HFModel(model)
    ends = adapted.ends()
    heads = random_heads(kind, model, settings)
    text = torch.tensor(random.Random(0).choices(range(VOCABULARY), k=14))
    decoder = Decoder(model)
    engine = decoder.engine
    for one in (adapted, engine.model):
        one.keep(heads.reads)
    with torch.no_grad(), engine.pool.sequence(text.tolist()) as sequence:
        seen: list[torch.Tensor] = []
        rows = engine.score(sequence, chain(int(text[-1]), (), ""), seen.append).hidden
        hidden = torch.cat([*seen, rows])
        read = adapted.part(hidden, heads.reads)
        whole = heads.logits(heads.states(read.unsqueeze(-3), ends.embed(text[None]), ends), ends)[:, 0]
        with torch.inference_mode():
            follower = heads.follow(ends, engine.pool, adapted.layers)
            start = 0
            for stop in (5, 6, 9):  # as if the text had been accepted in three steps
                sequence.slots = list(range(stop))
                follower.feed(read[..., start:stop, :].clone(), text[start + 1 : stop + 1], sequence)
                start = stop
                for head in range(heads.count):
                    if heads.sequential or heads.paired:
                        guess = follower.guess(text[stop + 1 : stop + 1 + head][None])[0]
                    else:
                        guess = follower.guesses()[head]
                    torch.testing.assert_close(guess, whole[head, stop - 1], rtol=1e-4, atol=1e-4)
        sequence.slots = []


def test_heads_that_read_a_text_wait_for_no_plan_of_attention() -> None:
    """cuDNN would make one for each number of keys."""
    planned: list[bool] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.scaled_dot_product_attention:
                planned.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
            return function(*args, **(kwargs or {}))

    decoder, heads = Decoder(tiny("Llama")), random_heads("amphista", tiny("Llama"))
    follower = heads.follow(decoder.model.ends(), decoder.engine.pool, decoder.model.layers)
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with decoder.engine.pool.sequence([3, 1, 4, 1, 5]) as sequence, torch.inference_mode(), Watch():
            sequence.slots = decoder.engine.pool.allocate(4)
            follower.feed(torch.randn(4, decoder.model.width), torch.tensor([1, 4, 1, 5]), sequence)
        assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert planned == [False] * heads.settings.stages  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "whole_steps"),
    mostly_slow(
        itertools.product(KINDS, [True, False]),
        [("medusa", True), ("hydra", False), ("amphista", True), ("block", True), ("block", False)],
    ),
)
def test_heads_in_fixed_places_guess_the_same(kind: str, whole_steps: bool) -> None:
    """The runtime of CUDA graphs, which on a CPU runs the same code without a capture, against the plain one."""
    model = tiny("Llama")
    plain, fixed = Decoder(model), Decoder(model)
    engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    engine.whole_steps = whole_steps
    fixed.engine = engine
    everything = tuple((rank,) for rank in range(VOCABULARY))  # so that two rows are accepted at every step, and more
    tree = (*everything, *((rank, 0) for rank in range(VOCABULARY)))
    method = method_for(kind, random_heads(kind, model, SETTINGS[kind][0]), tree=tree)
    for prompt in ([5], [7, 3, 9, 9, 2, 7, 3]):
        steps = _steps(plain, method, prompt, 16)
        if whole_steps and kind != "hydra":  # these guess from the first step on
            tokens, *_ = steps.pop(0)
            prompt = [*prompt, *tokens]
        assert _steps(fixed, method, prompt, sum(len(tokens) for tokens, *_ in steps)) == steps
        assert max(len(tokens) for tokens, *_ in steps) >= 2
    assert bool(engine._programs) == (kind != "hydra" and whole_steps)


def _steps(decoder: Decoder, method: Headed, prompt: list[int], length: int) -> list[Any]:
    steps = decoder.stream(prompt, method=decoder.prepare(method), max_new_tokens=length)
    return [(step.tokens, step.draft.tokens, step.draft.parents) for step in steps]


@pytest.mark.parametrize("whole_steps", [True, False])
def test_a_graph_of_heads_keeps_no_text_alive(whole_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = _Drafter.__init__, list[Any]()
    monkeypatch.setattr(_Drafter, "__init__", lambda self, *given: begun.append(ref(self)) or begin(self, *given))
    model = tiny("Llama")
    decoder = Decoder(model)
    decoder.engine = engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    engine.whole_steps = whole_steps
    method = decoder.prepare(method_for("medusa", random_heads("medusa", model)))
    decoder.generate([7, 3, 9], method=method, max_new_tokens=6)
    assert bool(engine._programs) == whole_steps
    gc.collect()
    assert bool(begun) != whole_steps
    assert not any(text() for text in begun)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_the_callers_heads_stay_as_they_are(kind: str) -> None:
    """They are float32 and in training; the target is not, and drafts with a copy in its own dtype."""
    model = tiny("Llama", dtype=torch.bfloat16)
    decoder, prompt = Decoder(model), [7, 3, 9, 9, 2, 7, 3]
    if kind == "exits":
        shape = BlockShape(**layer_sizes(model))
        heads: Heads = ExitHeads(ExitSettings(layers=(1, 2), frequent=9, vocabulary=VOCABULARY), shape).train()
        method: Any = AdaDecode(heads, control="fixed", gamma=1e-6)
    else:
        heads = random_heads(kind, model).train()
        method = method_for(kind, heads)
    before = {name: weight.clone() for name, weight in heads.state_dict().items()}
    ready: Any = decoder.prepare(method)
    Trainer(model, "norm", decoder.model.ends(), {kind: heads}, Plan(updates=1))  # takes them in float32, in place
    steps = list(decoder.stream(prompt, method=ready, max_new_tokens=8))
    assert any(len(step.draft) > 1 for step in steps)
    assert heads.training
    assert not ready.heads.heads.training
    assert all(torch.equal(weight, before[name]) for name, weight in heads.state_dict().items())
    assert {weight.dtype for weight in heads.parameters()} == {torch.float32}
    assert {weight.dtype for weight in ready.heads.heads.parameters()} == {torch.bfloat16}


def test_judged_heads_draft_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer measures what they guess, in float32; then their methods write with the target in bfloat16."""
    model = tiny("Llama", dtype=torch.bfloat16)
    decoder = Decoder(model)
    methods: Any = {
        kind: decoder.prepare(method_for(kind, random_heads(kind, model))) for kind in ("medusa", "amphista")
    }
    monkeypatch.setattr(reproduce_amphista, "read_answers", lambda folder: [])
    found = dict.fromkeys(methods, torch.ones(3, 10))
    monkeypatch.setattr(Trainer, "accuracies", lambda trainer, texts: found)
    reproduce_amphista._judged(SimpleNamespace(model=model, decoder=decoder), methods, Path())  # type: ignore[arg-type]
    for method in methods.values():
        assert decoder.generate([7, 3, 9], method=method, max_new_tokens=4).token_ids


ACCURACIES = st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), min_size=1, max_size=3)


@given(ACCURACIES, st.integers(1, 30))
def test_the_best_tree_is_the_best(accuracies: list[list[float]], size: int) -> None:
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for head in accuracies:
        deepest = max(map(len, paths))
        for path in [path for path in paths if len(path) == deepest]:
            paths.update({(*path, rank): paths[path] * chance for rank, chance in enumerate(head)})
    del paths[()]
    found = best_tree(accuracies, size)
    assert len(found) == len(set(found)) == min(size, len(paths))
    assert all(path[:-1] in found for path in found if len(path) > 1)
    worth = [paths[path] for path in found]
    assert worth == pytest.approx(sorted(paths.values(), reverse=True)[:size])


def fixed(accuracies: list[list[float]]) -> Any:
    """Heads whose guess of rank r at depth d is the token 10 d + r."""
    chances = [np.sort(np.log(np.array(head)))[::-1] for head in accuracies]
    return lambda depth, _: Foreseen(10 * depth + np.arange(len(chances[depth]))[None], chances[depth][None])


def paths_in(expected: dict[int, Expected]) -> dict[tuple[int, ...], float]:
    """Every path of tokens, and its probability."""
    found = {}
    for token, (chance, after) in expected.items():
        found[token,] = chance
        found.update({(token, *path): chance * more for path, more in paths_in(after).items()})
    return found


@given(ACCURACIES, st.integers(2, 30))
def test_the_likeliest_paths_are_those_of_the_best_tree(accuracies: list[list[float]], rows: int) -> None:
    accuracies = [sorted(head, reverse=True) for head in accuracies]
    likeliest = paths_in(likeliest_paths(fixed(accuracies), len(accuracies), rows - 1, beam=100))
    best = {path: accuracies[len(path) - 1][path[-1]] for path in best_tree(accuracies, rows - 1)}
    planted = paths_in(along(fixed(accuracies), best))
    assert len(likeliest) == len(planted)
    assert sum(likeliest.values()) == pytest.approx(sum(planted.values()))


@given(ACCURACIES, st.integers(1, 12), st.sampled_from([0.0, 0.01, 0.1, 0.3]))
def test_no_path_is_followed_in_vain(accuracies: list[list[float]], rows: int, slope: float) -> None:
    """What is not followed would not have been taken: the tree is that of all paths."""

    def expect(depth: int, paths: Any) -> Foreseen:
        followed.append(len(paths))
        return fixed(accuracies)(depth, paths)

    def grown(expected: dict[int, Expected]) -> list[float]:
        tree, chances = Tree(99), paths_in(expected)
        History(longest=1).grow(tree, rows, len(accuracies), "", price=price, heads=expected)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return [chances[path] for path in paths[1:]]

    followed: list[int] = []
    price = Prices([1 + slope * row for row in range(max(2, rows))])
    least = math.log(slope) if slope else -math.inf
    found = likeliest_paths(expect, len(accuracies), rows - 1, 100, least)
    everything = likeliest_paths(fixed(accuracies), len(accuracies), 1000, 1000)
    assert grown(found) == pytest.approx(grown(everything))
    assert all(paths <= max(1, rows - depth) for depth, paths in enumerate(followed))


def test_lookup_continues_what_heads_expect() -> None:
    history = History(longest=2)
    history.extend([5, 6, 7, 8, 1])
    tree = Tree(1)
    history.grow(tree, 8, 4, "lookup", heads={6: Expected(0.5, {9: Expected(0.25, {})}), 3: Expected(0.2, {})})
    assert tree.tokens == [1, 6, 3, 7, 9, 8, 1]
    assert tree.parents == [-1, 0, 0, 1, 1, 3, 5]
    assert tree.sources == ["model", "head 1", "head 1", "lookup", "head 2", "lookup", "lookup"]


@pytest.mark.parametrize("tree", ["confidence", "measured"])
def test_heads_that_make_it_slower_are_not_asked(tree: str, kept: Path) -> None:
    decoder = Decoder(tiny("Llama"))
    prompt = [5, 9, 7, 3, 8, 2] * 3
    plain = decoder.generate(prompt, max_new_tokens=12, method="autoregressive").token_ids
    decoder.engine.costs = CostCurve({}, (1, 128), (100,), ((1.0, 1.04),), paces={"amphista": 0.9, "medusa": 1.1})
    ready: Any = decoder.prepare(Amphista(heads=kept, tree=tree))
    method = replace(ready, heads=ready.heads._replace(shipped=True))
    with pytest.warns(OutpaceWarning, match=r"0\.90 times as fast as plain decoding .* priced=False"):
        steps = list(decoder.stream(prompt, method=method, max_new_tokens=12))
    assert {source for step in steps for source in step.draft.sources[1:]} == {"lookup"}
    assert [token for step in steps for token in step.tokens] == plain
    for used in (ready, replace(method, priced=False)):  # heads that were not measured, and those asked for
        steps = list(decoder.stream(prompt, method=used, max_new_tokens=12))
        assert "head 1" in {source for step in steps for source in step.draft.sources}


@pytest.mark.parametrize("tree", ["confidence", "measured"])
def test_some_rows_go_to_repetition(tree: str, kept: Path) -> None:
    """A text that has come by here before is guessed as far as it goes, within the rows there are."""
    decoder = Decoder(tiny("Llama"))
    prompt = [5, 9, 7, 3, 8, 2] * 3
    for lookup in (0.0, 0.5):
        method = decoder.prepare(Amphista(heads=kept, rows=11, tree=tree, lookup=lookup))
        drafts = [step.draft for step in decoder.stream(prompt, method=method, max_new_tokens=12)]
        found = {source for draft in drafts for source in draft.sources[1:]}
        assert "head 1" in found
        assert ("lookup" in found) == (lookup > 0)
        assert max(map(len, drafts)) <= 11


def test_what_the_model_said_is_recycled(kept: Path) -> None:
    """By the host and by a program, whether or not the text is looked through too."""
    model = tiny("Llama")
    host, program = Decoder(model), Decoder(model)
    program.engine = GraphEngine(HFModel(model), compiled=False, capacity=512)
    prompt = [5, 9, 7, 3, 8, 2]
    plain = host.generate(prompt, max_new_tokens=24, method="autoregressive").token_ids
    for decoder, lookup, recycled in itertools.product((host, program), (0.0, 0.5), (0, 3)):
        method = decoder.prepare(Amphista(heads=kept, rows=11, lookup=lookup, recycled=recycled))
        steps = list(decoder.stream(prompt, method=method, max_new_tokens=24))
        assert [token for step in steps for token in step.tokens] == plain
        found = {source for step in steps for source in step.draft.sources[1:]}
        assert ("recycled" in found) == (recycled > 0)
        assert max(len(step.draft) for step in steps) <= 11


@pytest.mark.parametrize("seed", range(20))
def test_foreseen_with_the_targets_own_logits_is_its_choice(seed: int) -> None:
    torch.manual_seed(seed)
    logits = 3 * torch.randn(2, 250)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=seed)):
        picker = Picker(sampling, 3)
        prefix = list(range(7))
        found = picker.foresee(likeliest(logits, picker.candidates(5)), [7, 8], 5)
        assert found.tokens[0, 0] == picker.choose(logits[0], prefix)
        assert found.tokens[1, 0] == picker.choose(logits[1], [*prefix, 1])
        assert found.tokens.shape == found.chances.shape == (2, 5)
        assert (np.diff(found.chances) <= 0).all()
        assert (found.chances <= 0).all()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    model = tiny("Llama")
    stored = Stored(fingerprint(HFModel(model)), [[0.5, 0.2], [0.4, 0.1], [0.3, 0.1], [0.2, 0.1]], [[0], [0, 0]])
    save(random_heads("amphista", model), stored, tmp_path / "heads")
    return tmp_path / "heads"


def test_heads_come_back_from_disk(kept: Path) -> None:
    model = HFModel(tiny("Llama"))
    heads, stored = load(kept, model, KINDS)
    expected = random_heads("amphista", tiny("Llama")).state_dict()
    for name, weight in heads.state_dict().items():
        assert torch.equal(weight, expected[name].bfloat16().float()), name
    assert stored.tree == [[0], [0, 0]]
    decoder = Decoder(tiny("Llama"))
    for tree in ("confidence", "measured"):
        method = decoder.prepare("amphista", heads=str(kept), tree=tree)
        found = decoder.generate([1, 2, 3], method=method, max_new_tokens=12)
        assert found.token_ids == decoder.generate([1, 2, 3], method="autoregressive", max_new_tokens=12).token_ids


def test_heads_in_eight_bits_are_nearly_the_same_and_half_as_large(tmp_path: Path) -> None:
    model = HFModel(tiny("Llama"))
    heads = random_heads("block", tiny("Llama"))
    for bits in (16, 8):
        save(heads, Stored(fingerprint(model)), tmp_path / str(bits), bits)
    sizes = {bits: sum(file.stat().st_size for file in (tmp_path / bits).glob("*.safetensors")) for bits in ("8", "16")}
    assert sizes["8"] < 0.75 * sizes["16"]  # small matrices have small groups, and names of their own
    again, _ = load(tmp_path / "8", model, KINDS)
    for name, weight in heads.state_dict().items():
        found = again.state_dict()[name]
        assert (found - weight).norm() <= 0.01 * weight.norm(), name
    with pytest.raises(InputError, match="bits=4"):
        save(heads, Stored(fingerprint(model)), tmp_path / "4", 4)


def test_a_text_is_read_by_all_kinds_at_once(tmp_path: Path) -> None:
    """The target leaves more states where block heads are at work; other heads read the last one, as before."""
    model, prompt = tiny("Llama"), [7, 3, 9, 9, 2, 7, 3]
    decoder = Decoder(model)
    heads = {kind: random_heads(kind, model) for kind in KINDS}
    alone = {kind: _steps(Decoder(model), method_for(kind, each), prompt, 8) for kind, each in heads.items()}
    for kind in ("amphista", "block", "medusa", "hydra", "amphista"):
        assert _steps(decoder, method_for(kind, heads[kind]), prompt, 8) == alone[kind], kind


def test_large_heads_are_kept_in_several_files(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = HFModel(tiny("Llama"))
    heads, stored = load(kept, model, KINDS)
    monkeypatch.setattr("outpace.heads.storing.SHARD", 9000)
    save(heads, stored, tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    again, _ = load(tmp_path / "shards", model, KINDS)
    assert all(map(torch.equal, heads.state_dict().values(), again.state_dict().values()))
    next((tmp_path / "shards").glob("heads-2-*")).unlink()
    with pytest.raises(ModelError, match="head files"):
        load(tmp_path / "shards", model, KINDS)


def test_heads_of_another_model_are_refused(kept: Path) -> None:
    with pytest.raises(ModelError, match="layers"):
        load(kept, HFModel(tiny("Llama", num_hidden_layers=3)), KINDS)
    with pytest.raises(ModelError, match="other weights"):
        load(kept, HFModel(tiny("Llama", seed=1)), KINDS)
    with pytest.raises(ModelError, match="holds amphista heads, not medusa"):
        Decoder(tiny("Llama")).prepare("medusa", heads=str(kept))


def test_broken_head_files_are_refused(kept: Path) -> None:
    model = HFModel(tiny("Llama"))
    file = next(kept.glob("*.safetensors"))
    whole = load_file(file)
    weight = whole.pop("norm.weight")
    save_file({**whole, "other": weight}, file)
    with pytest.raises(ModelError, match=r"lacks norm\.weight and has unknown other"):
        load(kept, model, KINDS)
    save_file({**whole, "norm.weight": weight[:5].clone()}, file)
    with pytest.raises(ModelError, match=r"norm\.weight has the shape \[5\]"):
        load(kept, model, KINDS)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ModelError, match="truncated"):
        load(kept, model, KINDS)
    config = json.loads((kept / "config.json").read_text())
    (kept / "config.json").write_text(json.dumps({**config, "kind": "meduza"}))
    with pytest.raises(InputError, match="Did you mean 'medusa'"):
        load(kept, model, KINDS)
    del config["settings"]
    (kept / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks settings"):
        load(kept, model, KINDS)
    (kept / "config.json").write_text("5")
    with pytest.raises(ModelError, match="no JSON object"):
        load(kept, model, KINDS)
    (kept / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load(kept, model, KINDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))}, "4 tokens deep, and there are 3 heads"),
        ({"tree": ((0,), (1, 0))}, r"the path \(1, 0\) but not its parent \(1,\)"),
        ({"tree": "best"}, "must be 'confidence'"),
        ({"tree": ((0, -1),)}, "paths of ranks"),
        ({"tree": 3}, "paths of ranks"),
        ({"tree": "[[0], [0, 0]"}, "paths of ranks"),
        ({"tree": [[0], [97]]}, "the tree has rank 97; the vocabulary has 97 tokens"),
        ({"tree": "measured"}, "no measured accuracies"),
        ({"rows": 0}, "out of range"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    model = tiny("Llama")
    with pytest.raises(InputError, match=message):
        Decoder(model).prepare(method_for("medusa", random_heads("medusa", model), **settings))


def test_a_tree_may_be_json() -> None:
    model = tiny("Llama")
    heads = random_heads("medusa", model)
    assert method_for("medusa", heads, tree="[[0], [0, 0]]") == method_for("medusa", heads, tree=((0,), (0, 0)))


def test_heads_of_another_width_are_refused() -> None:
    other = tiny("Llama", hidden_size=64)
    with pytest.raises(ModelError, match="width 64"):
        Decoder(tiny("Llama")).prepare(method_for("medusa", random_heads("medusa", other)))


def test_without_heads_the_error_says_how_to_get_some() -> None:
    with pytest.raises(ModelError, match="outpace train hydra"):
        Decoder(tiny("Llama")).prepare("hydra")
    with pytest.raises(ModelError, match="not a folder of heads"):
        Decoder(tiny("Llama")).prepare("hydra", heads="/nowhere")


@pytest.mark.parametrize("kind", ["medusa", "amphista"])
def test_a_quick_twin_guesses_the_same_with_the_same_weights(kind: str) -> None:
    model = HFModel(tiny("Llama"))
    heads = random_heads(kind, tiny("Llama"))
    before = {name: weight.clone() for name, weight in heads.state_dict().items()}
    states = torch.randn(1, 5, model.width)
    guessed = heads.states(states, states, model.ends())
    twin = quick(heads)
    assert quick(heads) is twin
    torch.testing.assert_close(twin.states(states, states, model.ends()), guessed)
    after = heads.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    places = {weight.untyped_storage().data_ptr() for weight in heads.parameters()}
    assert {weight.untyped_storage().data_ptr() for weight in twin.parameters()} == places


def test_attention_among_few_places_is_torchs_own() -> None:
    """It is what block heads are trained with."""
    query = torch.randn(5, 6, 8, 16, dtype=torch.float64)
    for heads in (6, 2):
        key, value = torch.randn(2, 5, heads, 8, 16, dtype=torch.float64)
        found = _attend_to_few(query, key, value, heads < 6)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, enable_gqa=heads < 6))
