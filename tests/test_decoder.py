"""Text in, text out: ends, stop strings, streams, bad input."""

from __future__ import annotations

import copy
import gc
import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import outpace
from outpace import (
    Autoregressive,
    Decoder,
    DraftModel,
    InputError,
    InvalidLogits,
    Jacobi,
    Lookahead,
    PromptLookup,
    Sampling,
)
from outpace.loop import decode
from outpace.models.hf import HFModel
from outpace.models.toy import Bigram
from outpace.runtime.graphs import GraphEngine

from .models import build, tiny, tiny_chain
from .serving import SIZES, bytewise

METHODS = [Autoregressive(), Jacobi(window=4), PromptLookup(rows=12), Lookahead(window=4, ngram=3, guesses=4)]


def cycle(words: int = 5, **options: Any) -> Decoder:
    """A decoder that writes 0, 1, 2, … over and over: every guess from the text is right."""
    return Decoder(Bigram(torch.eye(words).roll(1, 1), **options), LetterTokenizer())


class LetterTokenizer:
    """Token i is the i-th letter; é is written with two tokens, each of which is not text alone."""

    chat_template = None
    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        text = bytes(token if token >= 128 else ord("a") + token for token in tokens)
        return text.decode(errors="replace")

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}


@pytest.mark.parametrize("method", METHODS)
def test_an_end_token_inside_a_block_ends_the_text(method: outpace.Method) -> None:
    decoder = cycle()
    decoder.ends = [3]
    result = decoder.generate([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0], method=method, max_new_tokens=50)
    assert result.token_ids == [1, 2, 3]
    assert result.finish_reason == "stop"
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_greatest_length_is_kept_inside_a_block(method: outpace.Method, limit: int) -> None:
    result = cycle().generate([0, 1, 2, 3, 4] * 3, method=method, max_new_tokens=limit)
    assert result.token_ids == [0, 1, 2, 3, 4, 0, 1][:limit]
    assert result.finish_reason == "length"
    assert sum(result.accepted_per_step) == limit == len(result.sources)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("d", "abc", 4), (["cd"], "ab", 4), (["eab", "zz"], "abcd", 7), (["x", "bc", "d"], "a", 3)],
)
def test_stop_strings_cut_where_plain_decoding_stops(
    method: outpace.Method, stop: str | list[str], text: str, tokens: int
) -> None:
    decoder = cycle()
    steps = list(decoder.stream([0, 1, 2, 3, 4] * 3, method=method, stop=stop))
    assert "".join(step.text for step in steps) == text
    assert sum(len(step.tokens) for step in steps) == tokens
    assert steps[-1].finish == "stop"


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    shown = [step.text for step in cycle().stream([0], method=Autoregressive(), stop=["bcx"], max_new_tokens=5)]
    assert shown == ["", "", "bcd", "e", "a"]


def test_a_character_of_two_tokens_comes_whole() -> None:
    table = torch.full((256, 256), -math.inf)
    table[:, 0xC3] = 0
    table[0xC3] = -math.inf
    table[0xC3, 0xA9] = 0
    decoder = Decoder(Bigram(table), LetterTokenizer())
    shown = [step.text for step in decoder.stream([1], method=Autoregressive(), max_new_tokens=5)]
    assert shown == ["", "é", "", "é", "\ufffd"]


@pytest.mark.parametrize("method", METHODS)
def test_streams_and_results_agree(method: outpace.Method) -> None:
    decoder = Decoder(tiny("Llama"))
    options: dict[str, Any] = {"method": method, "max_new_tokens": 30}
    steps = list(decoder.stream([5, 6, 7, 5, 6], **options))
    result = decoder.generate([5, 6, 7, 5, 6], **options)
    assert [token for step in steps for token in step.tokens] == result.token_ids
    assert [source for step in steps for source in step.sources] == result.sources
    assert result.steps == len(steps)
    for step in steps:
        assert set(step.seconds) == {"draft", "score", "verify", "learn"}
        assert len(step.rows) == len(step.tokens)
        drafted = [step.draft.tokens[row] for row in step.rows[1:]]
        assert drafted == list(step.tokens[:-1])


def test_sources_name_the_guess() -> None:
    result = cycle().generate([0, 1, 2, 3, 4] * 4, method=PromptLookup(rows=8), max_new_tokens=9)
    assert result.sources == ["lookup"] * 7 + ["model", "lookup"]
    assert result.lossless


def test_a_closed_stream_leaves_the_pool_clean() -> None:
    decoder = Decoder(tiny("Llama"))
    for method in (Lookahead(), DraftModel(model=tiny("Llama", seed=3))):
        stream = decoder.stream([1, 2, 3], method=decoder.prepare(method))
        next(stream)
        assert decoder.engine.pool.held > 0
        stream.close()  # type: ignore[attr-defined]
        assert decoder.engine.pool.held == 0


def test_an_interrupt_in_a_forward_leaves_the_pool_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny("Llama"))
    forward = decoder.engine.model.forward
    calls = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(decoder.engine.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([1, 2, 3])
    assert decoder.engine.pool.held == 0
    monkeypatch.undo()
    assert decoder.generate([1, 2, 3], max_new_tokens=5).new_tokens == 5


@pytest.mark.parametrize("name", ["Mistral", "Bloom"])
def test_two_streams_may_take_turns(name: str) -> None:
    decoder = Decoder(tiny("Mistral")) if name == "Mistral" else Decoder(tiny_chain(name), method="jacobi")
    prompts = [[1, 2, 3, 4, 1, 2], [9, 8, 7]]
    expected = [decoder.generate(prompt, max_new_tokens=25).token_ids for prompt in prompts]
    streams = [decoder.stream(prompt, max_new_tokens=25) for prompt in prompts]
    found: list[list[int]] = [[], []]
    for _ in range(25):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += next(stream).tokens if len(tokens) < 25 else ()
    assert found == expected


def test_nan_logits_name_the_place() -> None:
    table = torch.eye(5).roll(1, 1)
    table[3] = math.nan
    for method in METHODS:
        with pytest.raises(InvalidLogits, match="new token 4: the model's logits contain NaN"):
            Decoder(Bigram(table)).generate([0], method=method)


def test_the_place_is_right_inside_a_block() -> None:
    def forbid_the_sixth(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(-math.inf) if ids.shape[1] == 20 else scores

    sampling = outpace.Sampling(processors=[forbid_the_sixth])
    with pytest.raises(InvalidLogits, match="new token 6: every token is ruled out"):
        cycle().generate([0, 1, 2, 3, 4] * 3, method=PromptLookup(), sampling=sampling)


def test_guesses_of_a_draft_model_do_without_the_users_processors() -> None:
    calls = []

    def count(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        return scores.fill_(-math.inf) if ids.shape[1] > 22 else scores

    decoder = Decoder(tiny("Llama"))
    sampling = outpace.Sampling(processors=[count])
    result = decoder.generate([1, 2, 3], method=DraftModel(model=tiny("Llama")), sampling=sampling, max_new_tokens=20)
    assert result.new_tokens == 20
    assert calls == list(range(3, 23))


def test_memory_is_flat_over_a_long_text() -> None:
    """1,200 tokens: the pool doubles a few times, holds what the text needs, and then stays as it is."""
    model = tiny("Llama", max_position_embeddings=4096, num_hidden_layers=1)
    decoder = Decoder(model)
    sizes, overhang = [], []
    for step in decoder.stream([1, 2, 3], method=Lookahead(window=4, ngram=3, guesses=4), max_new_tokens=1200):
        pool = decoder.engine.pool
        sizes.append(pool.bytes)
        overhang.append(pool.used - pool.held)
        assert step.tokens
    assert len(set(sizes)) <= 3  # 512, 1024, 2048 slots
    assert sizes[-1] == sizes[0] // 513 * 2049  # the slots, and one for scratch
    assert max(overhang) < 32  # holes that rejected rows leave are filled by the next ones
    again = [decoder.engine.pool.bytes for _ in decoder.stream([1, 2, 3], max_new_tokens=1200)]
    assert set(again) == {sizes[-1]}


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "prompt is empty"),
        ("", {"raw": True}, "prompt is empty"),
        ("  \n", {}, "prompt is empty"),
        (None, {}, "must be a string"),
        (["abc", 3], {}, "must be a string"),
        ([True], {}, "must be a string"),
        (b"abc", {}, "must be a string"),
        ([0, 7], {}, "token id 7"),
        ([0, -1], {}, "token id -1"),
        ([0] * 40, {}, "40 tokens"),
        ([0], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([0], {"max_new_tokens": -3}, "max_new_tokens=-3"),
        ([0], {"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ([0], {"max_new_tokens": True}, "max_new_tokens=True"),
        ([0], {"stop": [5]}, "must be strings"),
        ([0], {"stop": 3}, "stop=3 must be a string"),
        ([0], {"sampling": outpace.Sampling(seed=1), "temperature": 0.5}, "sampling was given, and temperature"),
        ([0], {"sampling": {"seed": 1}}, "must be an outpace.Sampling"),
        ([0], {"method": Lookahead}, "must be a name or a method"),
        ([0], {"stop": [""]}, "not empty"),
        ([0], {"stop": ""}, "not empty"),
    ],
)
def test_bad_input_is_named_before_anything_runs(prompt: Any, options: dict[str, Any], words: str) -> None:
    decoder = cycle(context=32)
    with pytest.raises(InputError, match=words):
        decoder.stream(prompt, **options)


def test_a_tokenizer_without_a_chat_template() -> None:
    with pytest.raises(outpace.ModelError, match="raw"):
        cycle().generate("abc")
    assert cycle().generate("abc", raw=True, max_new_tokens=2).text == "de"


def test_roles_and_parts_of_a_chat() -> None:
    tokenizer = bytewise()
    model = tiny("Llama", vocab_size=257)
    decoder = Decoder(model, tokenizer, method="autoregressive")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert decoder.encode([{"role": "user", "content": parts}]) == decoder.encode("hello")
    with pytest.raises(InputError, match=r"role 'usr'\. Did you mean 'user'"):
        decoder.encode([{"role": "usr", "content": "hello"}])


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match="tokenizer"):
        Decoder(Bigram(torch.eye(3))).generate("abc")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Lookahead(window=0), "window=0"),
        (lambda: Lookahead(ngram=1), "ngram=1"),
        (lambda: Lookahead(window=2.5), "whole number"),  # type: ignore[arg-type]
        (lambda: Lookahead(prompt_pool="yes"), "prompt_pool='yes'"),  # type: ignore[arg-type]
        (lambda: Lookahead(published=True, reach=3), "reach=3 is not in the paper"),
        (lambda: Jacobi(window=True), "whole number"),
        (lambda: PromptLookup(gate=2.0), "gate=2.0"),
        (lambda: DraftModel(), "no model given"),
        (lambda: outpace.methods.make("lookahed"), "Did you mean 'lookahead'"),
        (lambda: outpace.methods.make("lookahead", windw=3), "Did you mean 'window'"),
        (lambda: outpace.load("smollm2-135m", dtyp="float32"), "Did you mean 'dtype'"),
    ],
)
def test_bad_settings_are_named(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_a_draft_model_with_another_vocabulary() -> None:
    other = tiny("Llama", vocab_size=50)
    with pytest.raises(outpace.ModelError, match="50"):
        Decoder(tiny("Llama")).prepare(DraftModel(model=other))


def test_a_prompt_may_be_a_tensor() -> None:
    decoder = cycle()
    assert decoder.generate(torch.tensor([0, 1]), max_new_tokens=2).token_ids == [2, 3]
    assert decoder.generate(list(torch.tensor([0, 1]).numpy()), max_new_tokens=2).token_ids == [2, 3]


def test_a_method_may_be_named_for_one_text() -> None:
    assert cycle().generate([0], method="jacobi", max_new_tokens=2).method == "jacobi"
    assert (
        Decoder(tiny("Llama")).generate([1], method=DraftModel(model=tiny("Llama")), max_new_tokens=2).new_tokens == 2
    )


def test_what_is_no_model() -> None:
    with pytest.raises(InputError, match="is not a model"):
        Decoder(object())
    with pytest.raises(InputError, match="is not a model"):
        Decoder(tiny("Llama")).prepare(DraftModel(model=5))


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each returns, all running at once; switched between as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(works)) as threads:
            return [future.result() for future in [threads.submit(work) for work in works]]
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("fixed", [False, True])
def test_threads_may_share_a_decoder(fixed: bool) -> None:
    decoder = Decoder(tiny("Mistral"))
    if fixed:
        decoder.engine = GraphEngine(HFModel(tiny("Mistral")), compiled=False, capacity=640)
    prompts = [[1, 2, 3, 4, 1, 2], [9, 8, 7], [5] * 20, [6, 7, 6, 7, 6]]
    options: dict[str, Any] = {"max_new_tokens": 3}
    expected = [
        [decoder.generate(prompt, method=method, **options).token_ids for method in METHODS] for prompt in prompts
    ]

    def alone(prompt: list[int]) -> list[list[int]]:
        return [decoder.generate(prompt, method=method, **options).token_ids for method in METHODS]

    def streamed(prompt: list[int]) -> list[list[int]]:
        streams = [decoder.stream(prompt, method=method, **options) for method in METHODS]
        return [[token for step in stream for token in step.tokens] for stream in streams]

    def together(prompt: list[int]) -> list[list[int]]:
        return [result.token_ids for result in decoder.generate([prompt] * len(METHODS), method=METHODS, **options)]

    for work in (alone, streamed, together):
        assert in_threads(*(partial(work, prompt) for prompt in prompts)) == expected
    mixed = in_threads(*(partial(*pair) for pair in zip((alone, streamed, together, alone), prompts, strict=True)))
    assert mixed == expected
    assert decoder.engine.pool.held == 0


def test_a_stream_may_be_dropped_in_another_thread_at_any_moment() -> None:
    decoder = Decoder(tiny("Llama"))
    method = Lookahead(window=4, ngram=3)
    expected = decoder.generate([1, 2, 3], method=method, max_new_tokens=60).token_ids
    done = threading.Event()

    def write() -> list[int]:
        try:
            found = [decoder.generate([1, 2, 3], method=method, max_new_tokens=60).token_ids for _ in range(2)]
        finally:
            done.set()
        assert found == [expected] * 2
        return found[0]

    def drop() -> None:
        while not done.is_set():
            stream = decoder.stream([4, 5, 6] * 20, method=method)
            next(stream)
            circle: list[Any] = [stream]
            circle.append(circle)
            del stream, circle  # only the garbage collector closes it
            gc.collect()

    assert in_threads(write, drop)[0] == expected
    gc.collect()
    assert decoder.engine.pool.held == 0


def test_a_stream_closed_while_a_step_runs_is_closed_after_it() -> None:
    decoder = Decoder(tiny("Llama"))
    stream = decoder.stream([4, 5, 6] * 20, max_new_tokens=20)
    next(stream)
    held = decoder.engine.pool.held

    def close(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stream.close()  # type: ignore[attr-defined]
        assert decoder.engine.pool.held > held  # not in the midst of a step
        return scores

    decoder.generate([1, 2, 3], sampling=outpace.Sampling(processors=[close]), max_new_tokens=1)
    assert decoder.engine.pool.held == 0


def test_a_step_that_asks_for_a_text_is_told_so() -> None:
    decoder = Decoder(tiny("Llama"))

    def ask(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        decoder.generate([1, 2], max_new_tokens=2)
        return scores

    with pytest.raises(InputError, match="Decoder of its own"):
        decoder.generate([1, 2, 3], sampling=outpace.Sampling(processors=[ask]))
    assert decoder.generate([1, 2, 3], max_new_tokens=5).new_tokens == 5
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize("context", [1, 2, 8, 16, 17])
def test_the_default_works_for_the_shortest_contexts(context: int) -> None:
    model = build("Llama", {**SIZES, "max_position_embeddings": context}, 0, torch.float32)
    found = Decoder(model).generate([1] * max(1, context // 2), max_new_tokens=100) if context > 1 else None
    assert found is None or len(found.token_ids) == context - max(1, context // 2)
    with pytest.raises(InputError, match="Shorten the prompt"):
        Decoder(model).generate([1] * context)


def test_the_loop_ends_at_its_limit() -> None:
    decoder = Decoder(tiny("Llama"))
    text = decode(decoder.engine, outpace.Lookahead(), [1, 2, 3], Sampling(), lambda _: None, limit=5)
    steps = list(text)
    assert sum(len(step.tokens) for step in steps) == 5
    assert steps[-1].finish == "length"


def test_ends_may_be_set() -> None:
    decoder = cycle()
    decoder.ends = 3
    assert decoder.ends == [3]
    assert decoder.generate([0, 1, 2, 3, 4, 0], max_new_tokens=50).token_ids == [1, 2, 3]
    config = copy.deepcopy(tiny("Llama"))
    config.generation_config.min_new_tokens = 5
    decoder = Decoder(config)
    first = decoder.generate([1, 2, 3], max_new_tokens=4).token_ids[0]
    decoder.ends = [first]  # which may not come before the minimum
    assert first not in decoder.generate([1, 2, 3], max_new_tokens=4).token_ids
