"""Early exits: lossless wherever tokens leave, the pool clean whatever happens, exits whole on disk."""

from __future__ import annotations

import copy
import math
import random
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from outpace import (
    AdaDecode,
    Autoregressive,
    Decoder,
    InputError,
    ModelError,
    OutpaceWarning,
    Sampling,
    SelfSpeculative,
    UnsupportedModel,
    UnverifiedAdaDecode,
)
from outpace.draft import MODEL, chain
from outpace.heads import TRAINABLE, ExitHeads, ExitSettings
from outpace.heads.blocks import BlockShape
from outpace.heads.exits import BINS, BORDERS, spread
from outpace.heads.storing import Stored, fingerprint, load, save
from outpace.methods import adadecode
from outpace.methods.headed import Ready
from outpace.methods.leaving import Calibrated, Costs, Guard, Trust, choose, costs_of, predict
from outpace.methods.staircase import Heights, Staircase
from outpace.models.hf import HFModel
from outpace.models.toy import Bigram
from outpace.models.whole import layer_sizes
from outpace.picture import LAYER, climbs_of, staircase
from outpace.runtime import program
from outpace.runtime.costs import CostCurve
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.plain import alone

from .models import CHAINS_ONLY, CONTEXT, VOCABULARY, examples, mostly_slow, tiny, tiny_chain
from .statistics import chi_square_fits

EIGHT = ("Llama", "Qwen3", "Gemma2", "Phi3", "GPTNeoX", "GPT2", "Mistral", "Mixtral")


def random_exits(model: Any, layers: Any = (1, 2, 3), seed: int = 0, **given: Any) -> ExitHeads:
    """Exits near the identity: some guesses are right, some wrong."""
    torch.manual_seed(seed)
    heads = ExitHeads(ExitSettings(layers=layers, vocabulary=VOCABULARY, **given), BlockShape(**layer_sizes(model)))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return heads.eval()


def write(decoder: Decoder, method: Any, prompt: list[int], sampling: Sampling, length: int = 30) -> Any:
    found = decoder.generate(prompt, method=decoder.prepare(method), sampling=sampling, max_new_tokens=length)
    assert decoder.engine.pool.held == 0
    return found


def on_graphs(model: Any, capacity: int = 512, **options: Any) -> Decoder:
    decoder = Decoder(model)
    decoder.engine = GraphEngine(HFModel(model), compiled=False, capacity=capacity, **options)
    return decoder


@pytest.mark.parametrize("name", mostly_slow(EIGHT, quick=["Llama"]))
def test_random_exits_change_nothing(name: str) -> None:
    model = tiny(name)
    decoder = Decoder(model)
    rng = random.Random(name)
    prompt = rng.choices(range(VOCABULARY), k=9)
    methods = [
        AdaDecode(random_exits(model), control="fixed", gamma=0.03, pending=4),
        AdaDecode(random_exits(model, norm="last"), control="fixed", gamma=0.01, pending=1, exits=(2,)),
        AdaDecode(random_exits(model, (1, 3), output="full")),
        AdaDecode("original", exits="1, 3", control="fixed", gamma=0.2),
        AdaDecode("original", control="tree", rows=10),
        AdaDecode(random_exits(model, norm="last"), control="tree", exits=(2,), widths="3,2,1", beam=2, lookup=0.0),
        SelfSpeculative(exit=3, length=3),
        SelfSpeculative(),
        SelfSpeculative(length=0),
    ]
    early = 0
    for sampling in [Sampling(), *(Sampling(temperature=0.8, top_p=0.95, seed=seed) for seed in range(2))]:
        expected = write(decoder, Autoregressive(), prompt, sampling, 12).token_ids
        for method in methods:
            found = write(decoder, method, prompt, sampling, 12)
            assert found.token_ids == expected, method
            early += sum(source.startswith("exit ") for source in found.sources)
    assert early > 0


@examples(25)
@given(st.data())
def test_any_exits_any_threshold_any_number_waiting(data: Any) -> None:
    name = data.draw(st.sampled_from(EIGHT))
    model = tiny(name)
    decoder = data.draw(st.sampled_from([_plain(name), _graphs(name)]))
    layers = sorted(data.draw(st.sets(st.integers(1, 3), min_size=1)))
    heads = random_exits(
        model,
        layers,
        seed=data.draw(st.integers(0, 3)),
        norm=data.draw(st.sampled_from(["first", "last"])),
        output=data.draw(st.sampled_from(["trained", "full"])),
        frequent=data.draw(st.sampled_from([0, 5, 60])),
    )
    control = data.draw(st.sampled_from(["fixed", "calibrated", "tree"]))
    method = AdaDecode(
        heads,
        exits=layers[-1:] if control == "tree" else (),
        control=control,
        rows=data.draw(st.integers(2, 20)),
        widths=data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
        beam=data.draw(st.integers(1, 9)),
        lookup=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        gamma=data.draw(st.sampled_from([0.001, 0.025, 0.03, 0.1, 0.3, 0.92, 1.0])),
        pending=data.draw(st.integers(1, 9)),
    )
    sampling = data.draw(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
            top_k=st.sampled_from([0, 5]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            logit_bias=st.sampled_from([{}, {5: 2.0, 7: -3.0}]),
            seed=st.integers(0, 2**40),
        )
    )
    prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
    length = data.draw(st.integers(1, 15))
    expected = write(_plain(name), Autoregressive(), prompt, sampling, length)
    assert write(decoder, method, prompt, sampling, length).token_ids == expected.token_ids


_known: dict[tuple[str, str], Decoder] = {}


def _plain(name: str) -> Decoder:
    return _known.get(("plain", name)) or _known.setdefault(("plain", name), Decoder(tiny(name)))


def _graphs(name: str) -> Decoder:
    return _known.get(("graphs", name)) or _known.setdefault(("graphs", name), on_graphs(tiny(name)))


@pytest.mark.parametrize(
    ("name", "exact_rows"),
    mostly_slow(product(["Llama", "Gemma2", "GPT2"], [0, 8]), [("Llama", 8), ("Gemma2", 0), ("GPT2", 0)]),
)
def test_fixed_rows_climb_the_same_stairs(name: str, exact_rows: int) -> None:
    """The runtime of CUDA graphs: the device's list of slots must not go stale when guesses are rejected."""
    model = tiny(name)
    plain, fixed = Decoder(model), on_graphs(model, exact_rows=exact_rows)
    method = AdaDecode(random_exits(model), control="fixed", gamma=0.92 if name == "Gemma2" else 0.026, pending=5)
    steps = [
        [(step.tokens, step.draft.tokens, step.sources) for step in decoder.stream([5, 9, 5, 9, 7], **options)]
        for decoder in (plain, fixed)
        for options in [{"method": decoder.prepare(method), "max_new_tokens": 20}]
    ]
    assert steps[0] == steps[1]
    assert max(len(drafted) for _, drafted, _ in steps[0]) > 2
    assert fixed.engine.pool.held == 0
    counts = []
    for _ in range(2):  # a second text finds its graphs ready
        fixed.generate([5, 9, 5, 9, 7], method=fixed.prepare(SelfSpeculative()), max_new_tokens=9)
        counts.append(len(fixed.engine._graphs))  # type: ignore[attr-defined]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "method", [SelfSpeculative(exit=2, length=20), AdaDecode("original", control="fixed", gamma=1e-6, pending=20)]
)
def test_more_rows_wait_than_an_exact_graph_takes(method: Any) -> None:
    """They climb in parts, with the bits that they have one by one, and the last of them is asked."""
    model, prompt = tiny("Llama"), [5, 9, 5, 9, 7]
    decoder = on_graphs(model, exact_rows=8)
    decoder.engine.use_one_size()  # type: ignore[attr-defined]  # layers are not compiled
    rows: list[list[torch.Tensor]] = [[], []]
    texts = []
    for seen, each in zip(rows, (Autoregressive(), method), strict=True):

        def note(_: Any, scores: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(scores.clone())
            return scores

        texts.append(write(decoder, each, prompt, Sampling(processors=[note]), 8))
    assert texts[0].token_ids == texts[1].token_ids
    assert all(map(torch.equal, *rows))
    plain = list(Decoder(model).stream(prompt, method=method.prepare(HFModel(model)), max_new_tokens=8))
    found = list(decoder.stream(prompt, method=decoder.prepare(method), max_new_tokens=8))
    assert [step.draft.tokens for step in found] == [step.draft.tokens for step in plain]
    assert max(len(step.draft) for step in found) == 21


def test_texts_take_turns_on_one_engine() -> None:
    model = tiny("Llama")
    decoder = on_graphs(model)
    method = decoder.prepare(AdaDecode(random_exits(model), control="fixed", gamma=0.026))
    prompts = [[5, 9, 5, 9, 7], [3, 1, 4, 1, 5, 9]]
    alone = [
        Decoder(model).generate(prompt, method=Autoregressive(), max_new_tokens=20).token_ids for prompt in prompts
    ]
    streams = [decoder.stream(prompt, method=method, max_new_tokens=20) for prompt in prompts]
    texts: list[list[int]] = [[], []]
    for _ in range(20):
        for text, stream in zip(texts, streams, strict=True):
            text += getattr(next(stream, None), "tokens", ())
    assert texts == alone


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_models_of_chains_can_defer_layers(name: str) -> None:
    decoder = Decoder(tiny_chain(name), method="autoregressive")
    for prompt in ([5, 9, 5, 9, 7], [3]):
        expected = write(decoder, Autoregressive(), prompt, Sampling(), 12).token_ids
        for method in (AdaDecode("original", control="fixed", gamma=0.026), SelfSpeculative(length=3)):
            assert write(decoder, method, prompt, Sampling(), 12).token_ids == expected


def test_the_end_of_the_context_changes_nothing() -> None:
    for name in ("GPT2", "Llama"):
        decoder = Decoder(tiny(name))
        prompt = [token % VOCABULARY for token in range(CONTEXT - 12)]
        expected = write(decoder, Autoregressive(), prompt, Sampling(), 1000).token_ids
        assert len(expected) == 12
        method = AdaDecode(random_exits(tiny(name)), control="fixed", gamma=0.001, pending=9)
        assert write(decoder, method, prompt, Sampling(), 1000).token_ids == expected


def test_a_tree_where_all_angles_change() -> None:
    """LongRoPE: a prompt that ends at the turn is read whole, whoever would guess behind it."""
    model = tiny("Phi3", sliding_window=None)
    config = copy.deepcopy(model.config)
    config.original_max_position_embeddings = 20
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 20,
    }
    long = transformers.AutoModelForCausalLM.from_config(config).eval()
    long.load_state_dict(model.state_dict(), strict=False)
    decoder = Decoder(long)
    method = decoder.prepare(AdaDecode("original", exits="2", control="tree", rows=8))
    for length in range(18, 23):
        prompt = [token * 7 % VOCABULARY for token in range(length)]
        expected = write(decoder, Autoregressive(), prompt, Sampling(), 6)
        assert write(decoder, method, prompt, Sampling(), 6).token_ids == expected.token_ids, length


def test_by_the_papers_rule_a_tree_knows_nothing_of_the_targets_noise() -> None:
    """Or a guess and the choice after it would not be two draws."""
    decoder = Decoder(tiny("Llama"))
    method = decoder.prepare(AdaDecode("original", exits="2", control="tree", rows=8))
    for rule in ("keyed", "rejection"):
        samplings = [Sampling(temperature=1.0, seed=seed, rule=rule) for seed in range(3)]  # type: ignore[arg-type]
        first = [next(iter(decoder.stream([5, 9, 5], method=method, sampling=each))).draft for each in samplings]
        assert (len({draft.tokens for draft in first}) == 1) == (rule == "rejection")


def test_by_the_papers_rule_exits_keep_the_distribution() -> None:
    """The second token's law, whatever the first was: guessed by an exit, and accepted or drawn again."""
    model = tiny("Llama", vocab_size=8)
    decoder, temperature = Decoder(model), 0.7
    exits = decoder.prepare(AdaDecode(random_exits(model, layers=(1,)), control="fixed", gamma=0.01, pending=1))
    with torch.inference_mode():
        first = (model(torch.tensor([[3, 5]])).logits[0, -1] / temperature).softmax(-1)
        texts = torch.tensor([[3, 5, token] for token in range(8)])
        second = (model(texts).logits[:, -1] / temperature).softmax(-1)
    draws, guessed, right = torch.zeros(8), 0, 0
    for seed in range(240):
        sampling = Sampling(temperature=temperature, rule="rejection", seed=seed)
        steps = list(decoder.stream([3, 5], method=exits, sampling=sampling, max_new_tokens=2))
        draws[steps[1].tokens[0]] += 1
        guessed += len(steps[1].draft) - 1
        right += steps[1].sources[0] != MODEL
    assert guessed == 240
    assert 20 < right < 235  # both branches of the rule
    assert chi_square_fits(draws, first @ second)


def test_a_guessed_end_of_text_ends_nothing() -> None:
    decoder = Decoder(tiny("Llama"))
    method = decoder.prepare(AdaDecode(random_exits(tiny("Llama"), seed=2), control="fixed", gamma=0.001))
    steps = list(decoder.stream([5, 9, 5], method=method, max_new_tokens=12))
    guessed = {token for step in steps for token in step.draft.tokens[1:]}
    written = [token for step in steps for token in step.tokens]
    never, sometimes = sorted(guessed.difference(written)), sorted(guessed.intersection(written[:-1]))
    assert never
    assert sometimes
    for end in (*never[:4], *sometimes[:2]):
        decoder.ends = [end]
        found = write(decoder, method, [5, 9, 5], Sampling(), 12).token_ids
        assert found == (written[: written.index(end) + 1] if end in written else written)


@pytest.mark.parametrize("runtime", ["plain", "graphs"])
def test_a_closed_stream_leaves_the_pool_clean(runtime: str) -> None:
    model = tiny("Llama")
    decoder = Decoder(model) if runtime == "plain" else on_graphs(model)
    method = decoder.prepare(AdaDecode(random_exits(model), control="fixed", gamma=0.01))
    stream: Any = decoder.stream([1, 2, 3], method=method, max_new_tokens=50)
    next(stream)
    next(stream)
    assert decoder.engine.pool.held > 0
    stream.close()
    assert decoder.engine.pool.held == 0


def test_an_interrupt_in_the_middle_of_a_climb_leaves_the_pool_clean() -> None:
    model = tiny("Llama")
    decoder = Decoder(model)
    method = decoder.prepare(AdaDecode(random_exits(model), control="fixed", gamma=0.01))
    climb, calls = decoder.engine.climb, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return climb(*args, **kwargs)

    decoder.engine.climb = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([1, 2, 3], method=method, max_new_tokens=50)
    assert decoder.engine.pool.held == 0
    found = decoder.generate([1, 2, 3], method=method, max_new_tokens=20)
    assert found.token_ids == decoder.generate([1, 2, 3], method=Autoregressive(), max_new_tokens=20).token_ids


@given(st.lists(st.integers(1, 11), max_size=8), st.integers(12, 14))
def test_every_row_climbs_every_layer_once_and_in_order(exits: list[int], top: int) -> None:
    heights = Heights()
    ran: dict[int, list[int]] = {}
    for stop in [*exits, top]:
        heights.push()
        ran[len(heights.rows) - 1] = []
        for first, start, reached in heights.climb(stop):
            for row in range(first, len(heights.rows)):
                ran[row] += range(start, reached)
            for row in range(first):  # what a row sees is written in each layer that it runs
                assert ran[row] == list(range(len(ran[row])))
                assert len(ran[row]) >= reached
    assert all(layers == list(range(top)) for layers in ran.values())


def test_a_staircase_computes_what_a_whole_step_does() -> None:
    engine = Decoder(tiny("Gemma2")).engine
    with engine.pool.sequence([3]) as sequence:
        whole = engine.score(sequence, chain(3, [1, 4, 1, 5], "")).logits.clone()
        engine.pool.free(sequence.drafted)
        sequence.drafted = []
        stairs = Staircase(engine, sequence, 5)
        for token, layer in zip([3, 1, 4, 1, 5], [3, 1, 2, 1, 2], strict=True):
            stairs.push(token)
            alone(stairs.climb(layer))
        torch.testing.assert_close(alone(stairs.finish()).logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_verification_processors_are_obeyed(temperature: float) -> None:
    decoder, odd = Decoder(tiny("Llama")), torch.arange(VOCABULARY) % 2 == 1

    def even_alone(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(odd, -math.inf)

    method = UnverifiedAdaDecode(random_exits(tiny("Llama")), control="fixed", gamma=0.01)
    found = write(decoder, method, [1, 2, 3], Sampling(temperature=temperature, processors=[even_alone]))
    assert found.steps < 30
    assert not any(token % 2 for token in found.token_ids)


def test_without_verification_the_text_is_marked_lossy() -> None:
    decoder = Decoder(tiny("Llama"))
    exits = random_exits(tiny("Llama"))
    found = write(decoder, UnverifiedAdaDecode(exits, control="fixed", gamma=0.01), [1, 2, 3], Sampling())
    assert found.lossless is False
    assert found.to_json()["lossless"] is False
    assert "LOSSY" in UnverifiedAdaDecode.about
    careful = write(decoder, AdaDecode(exits, control="fixed", gamma=0.01), [1, 2, 3], Sampling())
    assert careful.lossless
    assert found.token_ids != careful.token_ids
    assert found.steps < careful.steps


def test_the_picture_shows_every_layer_of_every_row_once() -> None:
    model = tiny("Llama")
    decoder = Decoder(model)
    method = decoder.prepare(AdaDecode(random_exits(model), control="fixed", gamma=0.026))
    ran: list[tuple[int, int, int]] = []
    climb = decoder.engine.climb

    def watched(sequence: Any, rows: Any, logits: int, start: int = 0, stop: Any = None, *rest: Any) -> Any:
        ran.append((len(rows), start, stop))
        return climb(sequence, rows, logits, start, stop, *rest)

    decoder.engine.climb = watched  # type: ignore[method-assign]
    steps = list(decoder.stream([5, 9, 5, 9, 7], method=method, max_new_tokens=30))
    for step in steps:
        found = climbs_of(step.draft.sources, 4)
        layers: dict[int, list[int]] = {row: [] for row in range(len(step.draft))}
        there = 0
        for first, start, stop in found:
            there = max(there, first + 1)
            for row in range(first, there):
                layers[row] += range(start, stop)
        assert all(each == [0, 1, 2, 3] for each in layers.values())
    # What ran is what is drawn, but that a row also stops at exits where it does not leave.
    drawn = sum((stop - start) for step in steps[1:] for _, start, stop in climbs_of(step.draft.sources, 4))
    assert sum(stop - start for _, start, stop in ran[1:]) == drawn
    root = ElementTree.fromstring(staircase(steps, 4, lambda token: f"<{token}&"))
    rows = sum(len(step.draft) for step in steps)
    assert len(root.findall(".//{*}text[@transform]")) == rows
    heights = [int(part.get("height", 0)) + 1 for part in root.findall(".//{*}rect")[1:]]
    assert sum(heights) == rows * 4 * LAYER


# Control.


def test_exits_that_are_slow_by_the_clock_are_left_for_the_rest_of_the_text() -> None:
    now, took = [0.0], {False: 1.0, True: 2.9}  # seconds of a step; with exits it brings three tokens

    def steps(guard: Guard, count: int) -> list[bool]:
        found = []
        for _ in range(count):
            found.append(guard.begin())
            now[0] += took[found[-1]]
            guard.end(3 if found[-1] else 1)
        return found

    guard = Guard(clock=lambda: now[0])
    assert steps(guard, 20) == [False] * 4 + [True] * 16
    took[True] = 3.1
    assert steps(guard, 20) == [True] * 8 + [False] * 12  # 24 tokens later
    assert not guard.pays
    took[True] = 2.9
    assert steps(Guard(rival=0.9, clock=lambda: now[0]), 20) == [True] * 8 + [False] * 12
    took[True] = 3.7
    assert steps(Guard(rival=1.0, clock=lambda: now[0]), 20) == [True] * 3 + [False] * 17  # far too slow


def test_exits_that_did_not_pay_are_tried_in_fewer_and_fewer_texts() -> None:
    trust = Trust()
    tried = []
    for text in range(31):
        if trust.tries():
            tried.append(text)
            trust.learn(False)
    assert tried == [0, 2, 6, 14, 22, 30]
    trust.learn(True)
    assert trust.tries()
    trust.learn(False)
    assert not trust.tries()
    assert trust.tries()


def test_a_guard_that_is_not_trusted_leaves_the_whole_text_to_plain_decoding() -> None:
    trust = Trust()
    trust.learn(False)
    untrusted, trusted = Guard(trust, rival=1.0), Guard(trust, rival=1.0)
    assert not untrusted.pays
    assert not untrusted.begin()
    assert trusted.begin()


def test_a_text_goes_on_plainly_where_exits_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, method = Decoder(tiny("Llama")), AdaDecode(random_exits(tiny("Llama")))
    monkeypatch.setattr(Calibrated, "next", lambda self, after: after + 1 if after + 1 < len(self.seen) else None)
    monkeypatch.setattr(Calibrated, "leaves", lambda self, exit_, confidence: self.rows < 3)
    expected = write(decoder, Autoregressive(), [1, 2, 3], Sampling(), 40)
    clock = iter(range(10**6))
    monkeypatch.setattr(adadecode, "Guard", lambda trust, rival: Guard(trust, rival, lambda: float(next(clock))))
    found = [*decoder.stream([1, 2, 3], method=decoder.prepare(method), max_new_tokens=40)]
    assert [token for step in found for token in step.tokens] == expected.token_ids
    drafted = [len(step.draft) > 1 for step in found]
    assert drafted[:6] == [False] * 5 + [True]


HOWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.7, "top_k": 9},
]


@pytest.mark.parametrize(
    ("together", "how"),
    [  # one half is left to `make test-all`: each of these, alone or together
        pytest.param(together, how, marks=() if number % 2 == together else pytest.mark.slow)
        for together in (False, True)
        for number, how in enumerate(HOWS)
    ],
)
def test_where_exits_are_slow_plain_decodings_program_takes_over(
    together: bool, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("Llama")
    decoder, method = on_graphs(model), AdaDecode(random_exits(model))
    monkeypatch.setattr(Calibrated, "next", lambda self, after: after + 1 if after + 1 < len(self.seen) else None)
    monkeypatch.setattr(Calibrated, "leaves", lambda self, exit_, confidence: self.rows < 3)
    clock = iter(range(10**6))
    # Every step takes longer than the one before.
    monkeypatch.setattr(adadecode, "Guard", lambda trust, rival: Guard(trust, rival, lambda: float(next(clock) ** 2)))
    sampling = Sampling(**how)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 3]] if together else [[1, 2, 3]]
    expected = [write(Decoder(model), Autoregressive(), prompt, sampling, 60).token_ids for prompt in prompts]
    programs = list[str]()
    reserve = program.Program.reserve
    monkeypatch.setattr(program.Program, "reserve", lambda *given: programs.append("") or reserve(*given))
    found = decoder.generate(prompts, method=decoder.prepare(method), sampling=sampling, max_new_tokens=60)
    assert [result.token_ids for result in found] == expected
    assert 1 <= len(programs) <= len(prompts)  # a text may end before that
    assert all(result.offered for result in found)  # exits were tried before
    assert decoder.engine.pool.held == 0


def test_exits_of_no_use_leave_the_whole_text_to_plain_decodings_program() -> None:
    model = tiny("Llama")
    decoder, method = on_graphs(model), SelfSpeculative(length=0)
    expected = write(Decoder(model), Autoregressive(), [1, 2, 3], Sampling(), 30)
    steps = [*decoder.stream([1, 2, 3], method=decoder.prepare(method), max_new_tokens=30)]
    assert [token for step in steps for token in step.tokens] == expected.token_ids
    assert all("draft" not in step.seconds for step in steps)  # by the host


COSTS = Costs(climbs=(8.0, 16.0, 24.0), whole=34.0, probe=2.5, prices=(1.0,) * 16)


def counts(*lines: tuple[float, float]) -> Any:
    """For each exit: the share of tokens in the last bin, and how many of those are right; all others are wrong."""
    return tuple(
        (
            *((round(1000 * (1 - share)) // (BINS - 1), 0),) * (BINS - 1),
            (round(1000 * share), round(1000 * share * right)),
        )
        for share, right in lines
    )


def test_good_exits_are_predicted_to_pay_and_poor_ones_not() -> None:
    assert predict(counts((0.9, 0.99), (0.95, 0.99), (0.97, 0.99)), COSTS) > 1.8
    assert predict(counts((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), COSTS) == pytest.approx(1.0, abs=0.02)
    good, fair = counts((0.8, 0.95), (0.0, 0.0), (0.0, 0.0)), counts((0.4, 0.7), (0.0, 0.0), (0.0, 0.0))
    assert predict(good, COSTS) > predict(fair, COSTS) >= 0.98


def test_exits_that_cannot_pay_are_not_asked() -> None:
    control = Calibrated(counts((0.9, 0.2), (0.9, 0.95), (0.9, 0.97)), COSTS)
    control.begin()
    assert control.next(-1) == 1
    assert control.leaves(1, 1.0)
    assert control.chance == pytest.approx(0.95, abs=0.02)


def test_a_chain_ends_when_it_is_too_unlikely() -> None:
    control = Calibrated(counts((0.99, 0.8), (0.0, 0.0), (0.0, 0.0)), COSTS)
    control.begin()
    left = 0
    while control.next(-1) == 0 and control.leaves(0, 1.0):
        left += 1
    assert 2 <= left <= 8
    assert control.chance * 34 * 0.8 < 12


def test_what_a_text_shows_is_learned() -> None:
    control = Calibrated(counts((0.9, 0.95), (0.0, 0.0), (0.0, 0.0)), COSTS)
    for _ in range(400):
        control.learn(0, 1.0, right=False)
    control.begin()
    assert control.next(-1) != 0


def test_costs_come_from_what_was_measured() -> None:
    engine = Decoder(tiny("Llama")).engine
    assumed = costs_of(engine, (1, 3), 0)
    assert assumed.climbs == (1, 3)
    assert assumed.whole == pytest.approx(4 + VOCABULARY / (12 * 32))
    assert assumed.prices[1] > 1
    # A layer takes 1 ms, the output head 2, each climb 0.5 to begin with.
    segments = {"0-0": 1.5e-3, "1-1": 1.5e-3, "2-2": 1.5e-3, "3-3": 3.5e-3}
    engine.costs = CostCurve({}, (1, 16), (128,), ((6.5e-3, 6.5e-3),), segments)
    measured = costs_of(engine, (1, 3), 0)
    assert measured.climbs == (1, 3)
    assert measured.whole == pytest.approx(6.5)
    assert measured.probe == pytest.approx(2 + 0.5 + 1 / 12)
    assert measured.prices[1] == pytest.approx(1)
    assert costs_of(engine, (1, 3), VOCABULARY // 2).probe == pytest.approx(1 + 0.5 + 1 / 12, abs=0.02)
    engine.costs = replace(engine.costs, asking=4e-3)  # with all that happens between two climbs
    assert costs_of(engine, (1, 3), 0).probe == pytest.approx(4 + 1 / 12)


def test_exits_are_chosen_that_pay_together() -> None:
    assert choose(counts((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), COSTS)[0] == ()
    exits, speed = choose(counts((0.6, 0.95), (0.6, 0.95), (0.6, 0.95)), COSTS)
    assert exits == (0,)  # the later ones are sure of the same tokens
    assert speed > 1.05
    assert 2 in choose(counts((0.0, 0.0), (0.0, 0.0), (0.97, 0.99)), COSTS)[0]


def test_where_exits_would_not_pay_the_text_is_written_plainly(kept: Path) -> None:
    decoder = Decoder(tiny("Llama"))
    with pytest.warns(OutpaceWarning, match=r"predicted to make .* times as fast here"):
        found = write(decoder, AdaDecode(str(kept)), [1, 2, 3], Sampling())
    assert found.tokens_per_step == 1
    assert found.token_ids == write(decoder, Autoregressive(), [1, 2, 3], Sampling()).token_ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write(decoder, AdaDecode(str(kept), control="fixed"), [1, 2, 3], Sampling()).token_ids == found.token_ids


def test_what_was_measured_is_believed_more_than_what_was_predicted(tmp_path: Path) -> None:
    model = tiny("Llama")
    always = [[[100, 100]] * BINS] * 3
    save(random_exits(model), Stored(fingerprint(HFModel(model)), calibration=always), tmp_path)
    decoder = Decoder(model)
    decoder.engine.costs = CostCurve({}, (1, 128), (100,), ((1.0, 1.04),), {"0-1": 0.4, "2-3": 0.5}, asking=0.01)
    ready: Any = decoder.prepare(AdaDecode(str(tmp_path)))
    method = replace(ready, heads=ready.heads._replace(shipped=True))
    prompt = [1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafts = [step.draft for step in decoder.stream(prompt, method=method, max_new_tokens=9)]
    assert any(len(draft) > 1 for draft in drafts)
    decoder.engine.costs = replace(decoder.engine.costs, paces={"adadecode": 0.9})
    with pytest.warns(OutpaceWarning, match=r"measured to make .* 0\.90 times as fast here"):
        assert write(decoder, method, prompt, Sampling()).tokens_per_step == 1
    drafts = [step.draft for step in decoder.stream(prompt, method=ready, max_new_tokens=9)]  # these were not measured
    assert any(len(draft) > 1 for draft in drafts)


# Files and bad input.


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Exits whose calibration says that they are never right."""
    model = tiny("Llama")
    never = [[[10, 0]] * BINS] * 3
    heads = random_exits(model, frequent=40)
    heads.ids = torch.randperm(VOCABULARY)[:40]
    save(heads, Stored(fingerprint(HFModel(model)), calibration=never), tmp_path / "exits")
    return tmp_path / "exits"


def test_exits_come_back_from_disk(kept: Path) -> None:
    heads, stored = load(kept, HFModel(tiny("Llama")), TRAINABLE)
    assert isinstance(heads, ExitHeads)
    assert heads.layers == (1, 2, 3)
    assert heads.settings == ExitSettings(layers=(1, 2, 3), frequent=40, vocabulary=VOCABULARY)
    assert len(set(heads.ids.tolist())) == 40
    expected = random_exits(tiny("Llama"), frequent=40)
    assert torch.equal(heads.maps[1].weight, expected.maps[1].weight.bfloat16().float())
    assert [len(line) for line in stored.calibration] == [BINS] * 3


def test_frequent_tokens_alone_are_compared() -> None:
    model = tiny("Llama")
    ends = HFModel(model).ends()
    hidden = torch.randn(2, 32)
    for output in ("trained", "full"):
        few = random_exits(model, frequent=7, output=output)
        few.ids = torch.tensor([3, 90, 5, 41, 12, 77, 1])
        every = random_exits(model, output=output).probe(1, hidden, ends)
        found = few.probe(1, hidden, ends)
        torch.testing.assert_close(found[:, few.ids], every[:, few.ids])
        assert int(found.isfinite().sum()) == 14


def test_exits_of_another_model_and_broken_files_are_refused(kept: Path) -> None:
    for other, words in (
        (tiny("Llama", num_hidden_layers=5), "layers 4, not 5"),
        (tiny("Llama", seed=1), "other weights"),
    ):
        with pytest.raises(ModelError, match=words):
            Decoder(other).prepare("adadecode", heads=str(kept))
    with pytest.raises(ModelError, match="after layers 1, 2, 3"):
        Decoder(tiny("Llama", num_hidden_layers=3)).prepare(AdaDecode(random_exits(tiny("Llama"))))
    with pytest.raises(InputError, match="'exits'"):
        Decoder(tiny("Llama")).prepare("medusa", heads=str(kept))
    file = next(kept.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ModelError, match="truncated"):
        Decoder(tiny("Llama")).prepare("adadecode", heads=str(kept))
    (kept / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        Decoder(tiny("Llama")).prepare("adadecode", heads=str(kept))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gamma": 0.0}, "gamma=0 is out of range"),
        ({"gamma": 1.5}, "gamma=1.5 is out of range"),
        ({"gamma": "high"}, "must be a number"),
        ({"pending": 0}, "pending=0 is out of range"),
        ({"control": "magic"}, "must be 'calibrated' or 'fixed' or 'tree'"),
        ({"control": "tree", "exits": "1,3"}, "uses a single exit"),
        ({"control": "tree", "rows": 1}, "rows=1 is out of range"),
        ({"control": "tree", "beam": 65}, "beam=65 is out of range"),
        ({"control": "tree", "lookup": 1.5}, "lookup=1.5 is out of range"),
        ({"control": "tree", "recycled": 33}, "recycled=33 is out of range"),
        ({"control": "tree", "widths": ""}, "widths='' must be 1 to 4 numbers"),
        ({"control": "tree", "widths": "8,0"}, "numbers of draft tokens, each 1 to 64, like 8,3"),
        ({"control": "tree", "widths": (2, 2, 2, 2, 2)}, "must be 1 to 4 numbers"),
        ({"control": "tree", "widths": 8}, "widths=8 must be"),
        ({"exits": "8,4"}, "in increasing order"),
        ({"exits": "2,2"}, "in increasing order"),
        ({"exits": "0,2"}, "in increasing order"),
        ({"exits": "two"}, "like 8,16,24"),
        ({"exits": (1.5,)}, "like 8,16,24"),
        ({"exits": (2, 4), "heads": "original"}, "an exit after layer 4: the model has 4"),
        ({"exits": (2,), "heads": random_exits(tiny("Llama"), (1, 3))}, "There are exits after 1, 3"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Decoder(tiny("Llama")).prepare(AdaDecode(**options))


def test_a_tree_is_drafted_where_rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(tiny("Llama"))
    heads = Ready(random_exits(tiny("Llama")), Stored({}))

    def controls() -> list[str | None]:
        methods: list[Any] = [AdaDecode(heads), AdaDecode(heads, exits="1,3"), UnverifiedAdaDecode(heads)]
        return [method.prepare(model).control for method in methods]

    assert controls() == ["calibrated"] * 3
    monkeypatch.setattr(model, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(adadecode, "check_cuts", lambda *_: None)
    assert controls() == ["tree", "calibrated", "calibrated"]


def test_a_tree_is_drafted_by_the_exit_that_gains_most() -> None:
    heads = random_exits(tiny("Llama"), layers=(1, 2, 3))
    decoder = Decoder(tiny("Llama"))

    def chosen(*accuracies: list[float]) -> tuple[int, ...]:
        ready = Ready(heads, Stored({}, [*accuracies]))
        return decoder.prepare(AdaDecode(ready, control="tree", widths="2")).exits  # type: ignore[attr-defined]

    assert chosen() == (1,)
    assert chosen([0.1, 0.1, 0.6], [0.4, 0.3, 0.1], [0.4, 0.35, 0.1]) == (2,)  # the third token is not drafted


def test_what_cannot_have_a_tree_is_refused() -> None:
    with pytest.raises(InputError, match="adadecode-unverified: control='tree' must be 'calibrated' or 'fixed'"):
        UnverifiedAdaDecode("original", control="tree")
    with pytest.raises(UnsupportedModel, match="adadecode drafts trees"):
        Decoder(tiny_chain("Bloom"), method="autoregressive").prepare(AdaDecode("original", control="tree"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "both"}, "'first' or 'last'"),
        ({"output": "none"}, "'trained' or 'full' or 'original'"),
        ({"frequent": -1}, "frequent=-1"),
        ({"layers": [3, 1]}, "in increasing order"),
    ],
)
def test_bad_exits_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ExitSettings(**options)


def test_exits_beyond_the_depth_are_refused() -> None:
    with pytest.raises(InputError, match="an exit after layer 9"):
        ExitSettings(layers="4,9").for_model(8, 100)
    with pytest.raises(InputError, match="an exit after layer 4"):
        Decoder(tiny("Llama")).prepare(SelfSpeculative(exit=4))
    assert ExitSettings().for_model(30, 100).layers == (1, 2, 3, 7, 11, 15, 18, 22, 26)
    assert ExitSettings().for_model(4, 100).layers == spread(7, 4) == (1, 2, 3)


def test_without_exits_the_error_says_how_to_get_some() -> None:
    with pytest.raises(ModelError, match="outpace train exits"):
        Decoder(tiny("Llama")).prepare("adadecode")
    with pytest.raises(ModelError, match="not a folder of exits"):
        Decoder(tiny("Llama")).prepare("adadecode", heads="/nowhere")
    with pytest.raises((UnsupportedModel, InputError)):
        Decoder(Bigram(torch.eye(3))).prepare("self-speculative")


def test_bins_have_borders_that_rise() -> None:
    assert list(BORDERS) == sorted(set(BORDERS))
