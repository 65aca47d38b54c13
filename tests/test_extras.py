"""Logprobs, grammars and predictions: exact with every method. No tolerance but for float32's rounding of logprobs."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from outpace import (
    Autoregressive,
    Decoder,
    Grammar,
    InputError,
    Jacobi,
    Lookahead,
    Method,
    PromptLookup,
    Sampling,
    SelfSpeculative,
)
from outpace.draft import chain, extended

from .conftest import build
from .test_batch import graph_decoder

pytest.importorskip("llguidance")
END = "<end>"
METHODS: list[Method] = [
    Autoregressive(),
    Lookahead(window=3, ngram=3, guesses=3),
    PromptLookup(rows=8),
    Jacobi(window=3),
    SelfSpeculative(length=2),
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = Sampling(temperature=0.9, seed=3)


@functools.cache
def bytewise() -> Any:
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    found = Tokenizer(token_models.BPE({word: number for number, word in enumerate(words)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END)
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    return tokenizer


@functools.cache
def decoder() -> Decoder:
    options = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = build("Llama", {**options, **more, "bos_token_id": None, "eos_token_id": 256}, 0, torch.float32)
    model.generation_config.eos_token_id = 256
    return Decoder(model, bytewise())


@pytest.mark.parametrize("sampling", [None, SAMPLED])
@pytest.mark.parametrize("grammar", [Grammar.json_schema(PERSON), Grammar.regex("a{3}(b|c){2,9}d"), None])
def test_every_method_writes_the_same(grammar: Grammar | None, sampling: Sampling | None) -> None:
    options = {"grammar": grammar, "sampling": sampling, "max_new_tokens": 60, "logprobs": 2}
    results = [decoder().generate("hello", method=method, **options) for method in METHODS]
    for result in results:
        assert result.token_ids == results[0].token_ids, result.method
        chances = [entry.chance for entry in results[0].logprobs]
        assert [entry.chance for entry in result.logprobs] == pytest.approx(chances, abs=1e-4)
    batch = decoder().generate(["hello"] * 5, method=METHODS, **options)
    assert [result.token_ids for result in batch] == [results[0].token_ids] * 5
    assert decoder().engine.pool.held == 0


def test_json_fits_its_schema_and_what_is_forced_comes_for_nothing() -> None:
    result = decoder().generate("x", grammar=Grammar.json_schema(PERSON), max_new_tokens=60, method="autoregressive")
    assert result.finish_reason == "stop"
    found = json.loads(result.text)
    assert set(found) == {"name", "age"}
    assert result.steps < result.new_tokens  # plain decoding guesses nothing of its own
    assert set(result.sources) == {"model", "grammar"}


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties and temperature, and of every token."""
    one = decoder()
    sampling = Sampling(temperature=0.7, seed=2, logit_bias={65: 3.0}, presence_penalty=0.4)
    result = one.generate([72, 73], method=PromptLookup(rows=8), sampling=sampling, logprobs=3, max_new_tokens=12)
    assert len(result.logprobs) == result.new_tokens
    for place, entry in enumerate(result.logprobs):
        text = [72, 73, *result.token_ids[:place]]
        with one.engine.pool.sequence(text) as sequence:
            logits = one.engine.score(sequence, chain(text[-1], (), "")).logits[0]
        expected = logits.log_softmax(-1)
        assert entry.chance == pytest.approx(float(expected[result.token_ids[place]]), abs=1e-4)
        best = expected.topk(3)
        assert [token for token, _ in entry.best] == best.indices.tolist()
        assert [chance for _, chance in entry.best] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_prediction_changes_the_steps_alone() -> None:
    plain = decoder().generate("hello", max_new_tokens=40, method="autoregressive")
    for method in METHODS[:3]:
        told = decoder().generate("hello", max_new_tokens=40, method=method, prediction=plain.token_ids)
        wrong = decoder().generate("hello", max_new_tokens=40, method=method, prediction="something else")
        assert told.token_ids == wrong.token_ids == plain.token_ids
        assert told.steps <= 6
    assert "prediction" in decoder().generate("hello", method="autoregressive", prediction=plain.token_ids).sources


def test_where_programs_write_the_host_takes_part() -> None:
    other = graph_decoder()
    plain = other.generate([5, 6, 7], method=PromptLookup(rows=8), max_new_tokens=20)
    result = other.generate([5, 6, 7], method=PromptLookup(rows=8), max_new_tokens=20, logprobs=0)
    assert result.token_ids == plain.token_ids
    assert len(result.logprobs) == 20
    assert result.logprobs[0].best == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grammar": Grammar("json_schema", '{"type": "objekt"}')}, "json schema cannot be used"),
        ({"grammar": Grammar.regex("(")}, "regex cannot be used"),
        ({"grammar": Grammar.lark("start: ?")}, "lark cannot be used"),
        ({"grammar": Grammar.regex("a" * 70_000)}, "at most 65536"),
        ({"logprobs": -1}, "logprobs=-1 must be 0 or more"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        decoder().generate("x", **options)
    assert decoder().engine.pool.held == 0


def test_a_schema_must_be_an_object() -> None:
    with pytest.raises(InputError, match="is no JSON"):
        Grammar.json_schema("{")
    with pytest.raises(InputError, match="must be an object"):
        Grammar.json_schema("[]")


def test_drafts_that_must_stay_as_they_are() -> None:
    draft = chain(7, [1, 2], "a")
    assert extended(draft, [1, 2, 3], "b", branches=False).tokens == (7, 1, 2, 3)
    assert extended(draft, [1, 3], "b", branches=False) is draft
