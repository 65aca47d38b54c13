"""Logprobs, grammars and predictions: exact with every method. No tolerance but for float32's rounding of logprobs."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from outpace import (
    Autoregressive,
    Decoder,
    Grammar,
    InputError,
    InvalidLogits,
    Jacobi,
    Lookahead,
    Method,
    PromptLookup,
    Sampling,
    SelfSpeculative,
    Swift,
)
from outpace.draft import chain, extended

from .serving import bytewise, new_decoder
from .test_batch import graph_decoder

METHODS: list[Method] = [
    Autoregressive(),
    Lookahead(window=3, ngram=3, guesses=3),
    PromptLookup(rows=8),
    Jacobi(window=3),
    SelfSpeculative(length=2),
    Swift(length=2),
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = Sampling(temperature=0.9, seed=3)


@functools.cache
def decoder() -> Decoder:
    return new_decoder(context=512)


FITS, SHORT = Grammar.json_schema(PERSON), Grammar.regex("a{3}(b|c){2,9}d")


@pytest.mark.parametrize(
    ("grammar", "sampling"),
    [
        (FITS, SAMPLED),
        (SHORT, None),
        (None, None),
        pytest.param(FITS, None, marks=pytest.mark.slow),
        pytest.param(SHORT, SAMPLED, marks=pytest.mark.slow),
        pytest.param(None, SAMPLED, marks=pytest.mark.slow),
    ],
)
def test_every_method_writes_the_same(grammar: Grammar | None, sampling: Sampling | None) -> None:
    options = {"grammar": grammar, "sampling": sampling, "max_new_tokens": 24, "logprobs": 2}
    results = [decoder().generate("hello", method=method, **options) for method in METHODS]
    for result in results:
        assert result.token_ids == results[0].token_ids, result.method
        chances = [entry.chance for entry in results[0].logprobs]
        assert [entry.chance for entry in result.logprobs] == pytest.approx(chances, abs=1e-4)
    batch = decoder().generate(["hello"] * len(METHODS), method=METHODS, **options)
    assert [result.token_ids for result in batch] == [results[0].token_ids] * len(METHODS)
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
        ({"grammar": Grammar.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]})}, "Use anyOf instead"),
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


def test_an_invalid_regex_is_named() -> None:
    with pytest.raises(InputError, match="the regex cannot be used: unclosed group"):
        decoder().constraint(Grammar.regex("a("), 1)


def test_a_schema_must_be_an_object() -> None:
    with pytest.raises(InputError, match="is not JSON"):
        Grammar.json_schema("{")
    with pytest.raises(InputError, match="must be an object"):
        Grammar.json_schema("[]")


def test_alternatives_that_exclude_each_other_may_be_oneof() -> None:
    kinds = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]
    for kind in kinds:
        kind["additionalProperties"] = False
    grammar = Grammar.json_schema({"oneOf": [*kinds, {"type": "null"}]})
    text = decoder().generate("x", grammar=grammar, max_new_tokens=60, method="autoregressive").text
    assert text in ('{"kind": "a"}', '{"kind": "b"}', "null")


def test_a_schema_that_is_found_too_large_within_the_text_is_named_so() -> None:
    lists = [{"type": "array", "items": {"type": "string", "minLength": size}, "minItems": 1} for size in range(700)]
    with pytest.raises(InvalidLogits, match="schema is too large") as caught:
        decoder().generate(
            "x", grammar=Grammar.json_schema({"anyOf": lists}), max_new_tokens=9, method="autoregressive"
        )
    assert "no longer matches" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert decoder().engine.pool.held == 0


def test_drafts_that_must_stay_as_they_are() -> None:
    draft = chain(7, [1, 2], "a")
    assert extended(draft, [1, 2, 3], "b", branches=False).tokens == (7, 1, 2, 3)
    assert extended(draft, [1, 3], "b", branches=False) is draft


def test_a_constraint_serves_one_sequence() -> None:
    decoder = new_decoder()
    constraint = decoder.constraint(Grammar.regex("[0-9]{12}"), 1)
    assert len(decoder.generate([1], grammar=constraint, max_new_tokens=40).text) == 12
    with pytest.raises(InputError, match="made for another sequence"):
        decoder.generate([1], grammar=constraint)
    with pytest.raises(InputError, match="made for another sequence"):
        decoder.generate([[1], [1]], grammar=decoder.constraint(Grammar.regex("[0-9]{12}"), 1))


def test_a_prediction_has_no_token_that_begins_a_text() -> None:
    decoder, seen = new_decoder(), list[bool]()

    class Beginning:
        """Puts a token before every text, unless told otherwise."""

        def __getattr__(self, name: str) -> Any:
            return getattr(bytewise(), name)

        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            seen.append(add_special_tokens)
            return {"input_ids": [255] * add_special_tokens + bytewise()(text)["input_ids"]}

    decoder.tokenizer = Beginning()
    decoder.generate([1, 2], prediction="abc", max_new_tokens=4)
    assert seen == [False]
