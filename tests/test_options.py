"""Options by name, messages, and what a Result says of time: what a new user tries first."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import outpace
from outpace import Decoder, InputError, Options, OutpaceWarning, Sampling
from outpace.options import NAMES, settled

from .models import tiny
from .test_cli import folder

assert folder  # a fixture

PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def chatty(folder: Any) -> Decoder:
    return outpace.load(folder, device="cpu", method="lookahead")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"torch_dtype": "float16"}, "Use dtype"),
        ({"device_map": "auto"}, "Use device"),
        ({"max_new_tokens": 5}, "Give it to generate"),
        ({"method": "lookahead", "windw": 5}, "Did you mean 'window'"),
        ({"method": "lookahed"}, "Did you mean 'lookahead'"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(options: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        outpace.load("there/is-none", **options)


def test_a_method_is_no_tokenizer_and_a_number_no_processor() -> None:
    with pytest.raises(InputError, match=r"tokenizer='lookahead' is not a tokenizer.*method="):
        outpace.load("there/is-none", "lookahead")
    with pytest.raises(InputError, match=r"tokenizer='lookahead' is not a tokenizer.*method="):
        Decoder(tiny("Llama"), "lookahead")
    for wrong in ([3], lambda ids, scores: scores):
        with pytest.raises(InputError, match=r"processors=.* must be a list of functions"):
            Sampling(processors=wrong)  # type: ignore[arg-type]
    silent = Sampling(processors=[lambda ids, scores: None])  # type: ignore[arg-type, list-item, return-value]
    with pytest.raises(InputError, match="must return the scores"):
        Decoder(tiny("Llama"), method="autoregressive").generate(PROMPT, sampling=silent)


def test_a_decoder_says_what_it_is(chatty: Decoder) -> None:
    shown = repr(chatty)
    assert shown.startswith("<Decoder of ")
    assert all(word in shown for word in ("method='lookahead'", "runtime='plain'", "device='cpu'"))


def test_fields_of_sampling_may_be_given_alone() -> None:
    decoder = Decoder(tiny("Llama"), method="autoregressive")
    given: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    expected = decoder.generate(PROMPT, sampling=Sampling(**given), max_new_tokens=12)
    assert decoder.generate(PROMPT, **given, max_new_tokens=12).token_ids == expected.token_ids
    assert [result.token_ids for result in decoder.generate([PROMPT], **given, max_new_tokens=12)] == [
        expected.token_ids
    ]
    batch = decoder.batch()
    batch.add(PROMPT, **given, max_new_tokens=12)
    assert [token for _, step in batch for token in step.tokens] == expected.token_ids  # type: ignore[union-attr]
    two = decoder.generate(PROMPT, n=2, **given, max_new_tokens=12)
    assert two[0].token_ids == expected.token_ids != two[1].token_ids


def test_greedy_decoding_says_that_it_ignores_settings_of_sampling() -> None:
    decoder = Decoder(tiny("Llama"), method="autoregressive")
    with pytest.warns(OutpaceWarning, match=r"greedy decoding ignores top_k=4 and top_p=0\.9\. Set a temperature"):
        decoder.generate(PROMPT, top_p=0.9, top_k=4, min_p=0.0, max_new_tokens=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": True}, "Set temperature="),
        ({"max_tokens": 5}, "Use max_new_tokens"),
        ({"streamer": 5}, "decoder.stream"),
        ({"num_return_sequences": 2}, "Use n"),
        ({"temprature": 0.5}, "Did you mean 'temperature'"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"window": 5}, r"setting of a method.*outpace\.\w+\(window=…\)"),
        ({"method": "lookahead", "window": 5}, r"outpace\.Lookahead\(window=…\)"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5' must be"),
        ({"prediction": 5}, "prediction=5 must be a string"),
        ({"grammar": "a+"}, r"grammar='a\+' must be an outpace\.Grammar"),
        ({"temperature": 0.5, "sampling": Sampling()}, r"outpace.Sampling\(temperature=…\)"),
    ],
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_names_of_other_libraries_are_answered_with_the_remedy(call: str, options: Any, words: str) -> None:
    decoder = Decoder(tiny("Llama"), method="autoregressive")
    with pytest.raises(InputError, match=words):
        getattr(decoder, call)(PROMPT, **options)
    with pytest.raises(InputError, match=words):
        decoder.batch().add(PROMPT, **options)


def test_every_option_is_taken_and_documented() -> None:
    taken = {*inspect.signature(Decoder._request).parameters} - {"self", "prompt"}
    assert taken == {name for name in NAMES if name not in Sampling.__dataclass_fields__}
    for name in NAMES:
        assert f"        {name}: " in (Options.__doc__ or ""), name
        assert f"`{name}`" in (Decoder.stream.__doc__ or ""), name
    assert settled({"temperature": 0.0, "raw": True}) == {"sampling": Sampling(), "raw": True}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([{"role": "user"}], "message 0 .user. has the content None"),
        ([{"content": "a"}], "message 0 is .*role"),
        ([{"role": "user", "content": 7}], "content 7"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}], "message 1 .*part"),
        ([{"role": "user", "content": "caf\udce9"}], "message 0 has a lone surrogate"),
        ("caf\udce9", "the prompt has a lone surrogate, '.udce9', at character 3"),
    ],
)
def test_what_is_no_chat_is_named(chatty: Decoder, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chatty.generate(prompt)


def test_a_template_that_refuses_is_named(chatty: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(chatty.tokenizer, "chat_template", template)
    with pytest.raises(InputError, match=r"rejects these messages \(user, user\): roles must alternate"):
        chatty.generate([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


def test_parts_of_text_and_tools_reach_the_template(chatty: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for message in messages %}{{ message.tool_calls or message.content[0].text }}{% endfor %}"
    monkeypatch.setattr(chatty.tokenizer, "chat_template", template)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert chatty.encode(parts) == chatty.encode("hello", raw=True)
    calls = [{"role": "assistant", "content": None, "tool_calls": "now"}]
    assert chatty.encode(calls) == chatty.encode("now", raw=True)


def test_the_time_to_the_first_token_is_apart() -> None:
    decoder = Decoder(tiny("Llama"), method="autoregressive")
    result = decoder.generate(PROMPT, max_new_tokens=8)
    assert result.seconds_to_first_token is not None
    assert 0 < result.seconds_to_first_token < result.seconds
    expected = 7 / (result.seconds - result.seconds_to_first_token)
    assert result.decoding_tokens_per_second == pytest.approx(expected)
    short = decoder.generate(PROMPT, max_new_tokens=1)
    assert short.decoding_tokens_per_second == short.tokens_per_second
    (together,) = decoder.generate([PROMPT], max_new_tokens=8, logprobs=0)
    assert together.seconds_to_first_token is not None
    assert len(together.logprobs) == 8
