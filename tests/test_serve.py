"""The server: what it answers, whom it refuses, and that nobody is hurt by others' faults."""

from __future__ import annotations

import http.client
import json
import logging
import re
import resource
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

import outpace.serve
from outpace import InputError, PromptLookup, Sampling
from outpace.runtime.graphs import GraphEngine
from outpace.serve import fields as request_fields
from outpace.serve import streams, worker
from outpace.serve.fields import NO_SUCH, ChatRequest, CompletionRequest, Fields, ResponsesRequest
from outpace.serve.responses import as_chat
from outpace.serve.running import is_loopback, listen, read_keys
from outpace.serve.settings import Settings
from outpace.serve.tools import Calls, Found, forced
from outpace.serve.warming import SAMPLINGS, warm

from .ranks import own_port
from .serving import LONG, Running, bytewise, new_decoder, running, wait_until
from .test_batch import graph_decoder

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "tell", "description": "x", "parameters": PERSON}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(new_decoder(), max_texts=8, max_queue=8) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        found: Running = request.getfixturevalue("server")
        found.settle()
        assert not found.service._worker._jobs  # type: ignore[union-attr]


def texts_of(server: Running, **fields: Any) -> list[str]:
    """The text of each event that has some."""
    deltas = [choice["delta"] for chunk in events(server.chat(**fields)) for choice in chunk["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


def events(answer: httpx.Response) -> list[Any]:
    """The data of a stream's events; the last one says that it is done."""
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    found = [block.removeprefix("data: ") for block in blocks]
    assert found.pop() == "[DONE]"
    return [json.loads(item) for item in found]


class TestChat:
    def test_the_text_is_the_decoders(self, server: Running) -> None:
        decoder = server.service.decoder
        expected = decoder.generate([{"role": "user", "content": "hello"}], max_new_tokens=12, method="autoregressive")
        answer = server.chat().json()
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "tiny"
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected.text}
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == len("[user: hello]")
        assert answer["usage"]["completion_tokens"] == 12
        guesses = answer["metrics"]["speculative_decoding"]
        assert sum((n + 1) * count for n, count in enumerate(guesses["acceptance_histogram"])) == 12
        assert answer["timings"]["draft_n"] == guesses["num_draft_tokens"]
        assert answer["timings"]["predicted_n"] == 12

    @pytest.mark.parametrize("fields", [{"method": "lookahead"}, {"speculative": False}, {"method": "jacobi"}])
    def test_any_method_writes_the_same(self, server: Running, fields: dict[str, Any]) -> None:
        assert server.text(**fields) == server.text()
        assert server.chat(**fields).json()["outpace"]["method"] == fields.get("method", "autoregressive")

    def test_a_stream_is_the_same_text(self, server: Running) -> None:
        answer = server.chat(stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(answer)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == server.text()
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        assert "usage" not in events(server.chat(stream=True))[-1]

    def test_steps_are_collected_while_many_are_running(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first and the last come at once; the text is the same."""
        monkeypatch.setattr(worker, "EACH", 0.0)
        fields: dict[str, Any] = {"stream": True, "max_tokens": 40, "method": "autoregressive"}
        one_by_one = texts_of(server, **fields)
        monkeypatch.setattr(worker, "EACH", 1e9)
        together = texts_of(server, **fields)
        assert 1 <= len(together) <= 2  # the first step may end within a character
        assert "".join(together) == "".join(one_by_one)
        whole = server.chat(max_tokens=40, method="autoregressive").json()
        assert whole["choices"][0]["message"]["content"] == "".join(one_by_one)
        assert whole["usage"]["completion_tokens"] == 40

    def test_what_is_collected_comes_before_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "EACH", 1e9)
        with running(new_decoder(), max_texts=2) as server:
            logits = server.service.decoder.engine.model.forward
            steps = iter(range(100))

            def fails(*given: Any, **more: Any) -> Any:
                if next(steps) == 12:
                    raise RuntimeError("no more")
                return logits(*given, **more)

            monkeypatch.setattr(server.service.decoder.engine.model, "forward", fails)
            answer = server.chat(stream=True, max_tokens=40, method="autoregressive").text
            monkeypatch.undo()
            expected = server.text(max_tokens=40, method="autoregressive")
        found = [json.loads(block.removeprefix("data: ")) for block in answer.strip().split("\n\n")]
        written = "".join(choice["delta"].get("content", "") for chunk in found[:-1] for choice in chunk["choices"])
        assert "error" in found[-1]
        assert len(written) > 5
        assert expected.startswith(written)

    @pytest.mark.parametrize(
        "fields",
        [
            {"temperature": 0.9},
            {"temperature": 0.9, "top_p": 0.5},
            {"temperature": 0.9, "top_k": 3},
            {"temperature": 0.9, "min_p": 0.3},
            {"presence_penalty": 1.5},
            {"frequency_penalty": 1.5},
            {"repetition_penalty": 1.8},
            {"logit_bias": {"70": 50}},
        ],
        ids=lambda fields: "-".join(fields),
    )
    def test_each_field_does_what_it_does_in_python(self, server: Running, fields: dict[str, Any]) -> None:
        """The text is the decoder's with the same field, and another one without it."""
        given = {"temperature": 0.0, **fields, "seed": 4}
        found = server.text(**given, max_completion_tokens=40, max_tokens=None, user="somebody", metadata={"a": "b"})
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        asked = {"max_new_tokens": 40, "method": "autoregressive"}
        decoder, hello = server.service.decoder, [{"role": "user", "content": "hello"}]
        assert found == decoder.generate(hello, sampling=Sampling(**given), **asked).text
        without = {name: value for name, value in given.items() if name != [*fields][-1]}
        assert found != decoder.generate(hello, sampling=Sampling(**without), **asked).text

    def test_several_texts_with_seeds_apart(self, server: Running) -> None:
        fields = {"n": 3, "temperature": 0.9, "seed": 5}
        texts = [choice["message"]["content"] for choice in server.chat(**fields).json()["choices"]]
        assert len(set(texts)) == 3
        assert texts == [server.text(temperature=0.9, seed=5 + number) for number in range(3)]
        streamed = ["", "", ""]
        for chunk in events(server.chat(**fields, stream=True)):
            choice = chunk["choices"][0]
            streamed[choice["index"]] += choice["delta"].get("content", "")
        assert streamed == texts

    def test_stop_strings_end_the_text_and_are_not_in_it(self, server: Running) -> None:
        whole = server.text()
        stop = whole[4:6]
        for fields in ({"stop": stop}, {"stop": ["never there", stop]}):
            choice = server.chat(**fields).json()["choices"][0]
            assert choice["message"]["content"] == whole[: whole.index(stop)]
            assert choice["finish_reason"] == "stop"

    def test_logprobs(self, server: Running) -> None:
        answer = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
        entries = answer["logprobs"]["content"]
        assert len(entries) == 12
        for entry in entries:
            assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])  # it is greedy
            assert len(entry["top_logprobs"]) == 2
        streamed = [
            entry
            for chunk in events(server.chat(logprobs=True, top_logprobs=2, stream=True))
            if "logprobs" in chunk["choices"][0]
            for entry in chunk["choices"][0]["logprobs"]["content"]
        ]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]

    def test_json_by_schema(self, server: Running) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        answer = server.chat(response_format=form, max_tokens=90).json()
        assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"name", "age"}
        text = server.text(response_format={"type": "json_object"}, max_tokens=40, temperature=1, seed=3)
        assert text.startswith("{")

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell"}}])
    def test_a_tool_is_called(self, server: Running, choice: Any) -> None:
        fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 150}
        answer = server.chat(**fields).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "tell"
        assert set(json.loads(call["function"]["arguments"])) == {"name", "age"}
        deltas = [
            call
            for chunk in events(server.chat(**fields, stream=True))
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert deltas[0]["function"]["name"] == "tell"
        assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]

    @pytest.mark.parametrize(
        ("parameters", "words"),
        [
            ({"type": "objekt"}, "Invalid type: objekt"),
            ({"$ref": "#/$defs/Missing"}, "'/$defs/Missing' does not exist"),
            ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "Use anyOf"),
        ],
    )
    def test_the_tool_whose_parameters_cannot_be_used_is_named(
        self, server: Running, parameters: dict[str, Any], words: str
    ) -> None:
        wrong = {"type": "function", "function": {"name": "wrong", "parameters": parameters}}
        error = server.chat(tools=[TOOL, wrong], tool_choice="required").json()["error"]
        assert (error["param"], error["code"]) == ("tools", "invalid_schema")
        assert error["message"].startswith("the parameters of the tool 'wrong' cannot be used: ")
        assert words in error["message"]

    def test_a_prediction_is_counted(self, server: Running) -> None:
        said = [bytewise().decode([token]) for token in range(257)]
        bias = {str(token): -100 for token, text in enumerate(said) if not (text.isascii() and text.isalpha())}
        fields = {"logit_bias": bias, "speculative": False, "max_tokens": 40}
        text = server.text("hi", **fields)
        counts = {}
        for content in (text, text[:20] + "Zq" * 10):
            answer = server.chat("hi", **fields, prediction={"type": "content", "content": content}).json()
            assert answer["choices"][0]["message"]["content"] == text
            counts[content] = answer["usage"]["completion_tokens_details"]
        right, wrong = counts.values()
        assert right["accepted_prediction_tokens"] > 30
        assert right["rejected_prediction_tokens"] == 0
        assert 10 < wrong["accepted_prediction_tokens"] < right["accepted_prediction_tokens"]
        assert wrong["rejected_prediction_tokens"] > 0

    def test_a_prediction_is_encoded_beside_decoding(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder, where = server.service.decoder, list[str]()
        encode = decoder.encode

        def watched(prompt: Any, *more: Any, **how: Any) -> list[int]:
            if isinstance(prompt, str):
                where.append(current_thread().name)
            return encode(prompt, *more, **how)

        monkeypatch.setattr(decoder, "encode", watched)
        server.text(prediction={"type": "content", "content": "x" * 100_000})
        assert where
        assert "outpace-writes" not in where

    def test_a_trace_shows_who_guessed(self, server: Running) -> None:
        steps = server.chat(trace=True).json()["choices"][0]["trace"]
        assert sum(len(step["tokens"]) for step in steps) == 12
        for step in steps:
            assert len(step["draft"]["texts"]) == len(step["draft"]["parents"]) == len(step["draft"]["sources"])
        streamed = [
            step
            for chunk in events(server.chat(trace=True, stream=True))
            for step in chunk["choices"][0].get("trace", ())
        ]
        assert [token for step in streamed for token in step["tokens"]] == [
            token for step in steps for token in step["tokens"]
        ]

    def test_earlier_turns_and_parts(self, server: Running) -> None:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ]
        answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
        assert answer.status_code == 200
        shown = server.http.post("/tokenize", json={"messages": messages}).json()
        text = server.http.post("/detokenize", json={"tokens": shown["tokens"]}).json()["prompt"]
        assert text.startswith("[system: be brief][user: ab][assistant: <tool_call>")
        assert shown["count"] == answer.json()["usage"]["prompt_tokens"]


class TestOthers:
    def test_completions(self, server: Running) -> None:
        ask = {"prompt": "abc", "temperature": 0, "max_tokens": 8}
        answer = server.http.post("/v1/completions", json=ask).json()
        expected = server.service.decoder.generate("abc", raw=True, max_new_tokens=8, method="autoregressive")
        assert answer["choices"][0]["text"] == expected.text
        chunks = events(server.http.post("/v1/completions", json={**ask, "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text
        many = {**ask, "prompt": ["abc", "x"], "n": 2, "logprobs": 1}
        choices = server.http.post("/v1/completions", json=many).json()["choices"]
        assert [choice["text"] for choice in choices][:2] == [expected.text] * 2
        assert len(choices[3]["logprobs"]["tokens"]) == 8
        tokens = server.http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
        by_ids = server.http.post("/v1/completions", json={**ask, "prompt": tokens}).json()
        assert by_ids["choices"] == answer["choices"]

    def test_responses(self, server: Running) -> None:
        ask = {"input": "hello", "temperature": 0, "max_output_tokens": 12}
        answer = server.http.post("/v1/responses", json=ask).json()
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["content"][0]["text"] == server.text()
        blocks = server.http.post("/v1/responses", json={**ask, "stream": True}).text.strip().split("\n\n")
        found = [json.loads(block.partition("data: ")[2]) for block in blocks]
        assert [item["sequence_number"] for item in found] == [*range(len(found))]
        assert found[0]["type"] == "response.created"
        assert found[-1]["type"] == "response.incomplete"
        deltas = [item["delta"] for item in found if item["type"] == "response.output_text.delta"]
        assert "".join(deltas) == server.text()

    def test_models(self, server: Running) -> None:
        (card,) = server.http.get("/v1/models").json()["data"]
        assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "tiny", 2048)
        assert server.http.get("/v1/models/tiny").json()["id"] == "tiny"
        assert server.http.get("/v1/models/a/b").status_code == 404

    def test_metrics_have_vllms_names_and_count_what_happened(self, server: Running) -> None:
        def figures() -> dict[str, float]:
            server.settle()
            lines = server.http.get("/metrics").text.splitlines()
            pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("vllm:")]
            found = {re.sub(r'engine="0",|,?model_name="tiny"|\{\}', "", name): float(value) for name, value in pairs}
            return {name.replace("{}", "").removeprefix("vllm:"): value for name, value in found.items()}

        before = figures()
        answer = server.chat("one two one two one two", method="prompt-lookup", max_tokens=40).json()
        after = figures()
        told = {name: after[name] - before.get(name, 0) for name in after}
        usage, drafted = answer["usage"], answer["metrics"]["speculative_decoding"]
        assert told["prompt_tokens_total"] == told["prefix_cache_queries_total"] == usage["prompt_tokens"]
        assert told["prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert told["generation_tokens_total"] == told["request_generation_tokens_sum"] == 40
        assert told["iteration_tokens_total_sum"] == 40
        assert told['request_success_total{finished_reason="length"}'] == 1
        assert told["spec_decode_num_draft_tokens_total"] == drafted["num_draft_tokens"] > 0
        right = told["spec_decode_num_accepted_tokens_total"]
        assert right == drafted["num_accepted_draft_tokens"]
        by_place = [
            value for name, value in told.items() if name.startswith("spec_decode_num_accepted_tokens_per_pos_t")
        ]
        assert sum(by_place) == right
        assert told["spec_decode_num_drafts_total"] <= drafted["num_spec_steps"]
        for name in (
            *("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_inference_time"),
            *("request_prefill_time", "request_decode_time", "request_time_per_output_token"),
        ):
            assert told[f"{name}_seconds_count"] == 1, name
        assert 0 < told["inter_token_latency_seconds_count"] < 40
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert after[name] == 0, name

    def test_gauges_show_what_runs_and_waits(self) -> None:
        with running(new_decoder(), max_texts=1) as server, ThreadPoolExecutor(2) as threads:
            with server.paused():
                texts = [threads.submit(server.text, "x") for _ in range(2)]
                wait_until(lambda: server.service.open == 2)
                wait_until(lambda: 'num_requests_waiting{engine="0",model_name="tiny"} 1.0' in self.told(server))
                assert 'num_requests_running{engine="0",model_name="tiny"} 1.0' in self.told(server)
            assert texts[0].result() == texts[1].result()

    def told(self, server: Running) -> str:
        return server.http.get("/metrics").text

    def test_the_page_is_on_its_own(self, server: Running) -> None:
        answer = server.http.get("/")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "<title>" in answer.text


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, 400, "temperature", "valid number"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"top_k": -2}, 400, "top_k", "greater than"),
        ({"min_p": 1}, 400, "min_p", "less than 1"),
        ({"n": 0}, 400, "n", "greater than"),
        ({"n": 17, "temperature": 1}, 400, "n", "16 choices"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens=0: Input should be greater than"),
        ({"messages": "x"}, 400, "messages", "messages='x': Input should be"),
        ({"stop": ["a"] * 20}, 400, "stop", "stop=['a', "),
        ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
        ({"stop": ""}, 400, "stop", "at least 1"),
        ({"logit_bias": {"999": 1}}, 400, "logit_bias", "below 257"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias", "token id"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "20"),
        ({"model": "other"}, 404, "model", "'tiny' is"),
        ({"method": "magic"}, 400, "method", "unknown method"),
        ({"method": "adadecode-unverified"}, 400, "method", "is lossy"),
        ({"method": "medusa"}, 400, "method", "medusa cannot be used with this model."),
        ({"method": "draft-model"}, 400, "method", "cannot be used"),
        ({"functions": [{}]}, 400, "functions", "not supported"),
        ({"echo": True}, 400, "echo", "not supported"),
        ({"suffix": "x"}, 400, "suffix", "not supported"),
        ({"prompt_embeds": "x"}, 400, "prompt_embeds", "not supported"),
        ({"guided_json": {}}, 400, "guided_json", "not supported"),
        ({"structured_outputs": {}}, 400, "structured_outputs", "not supported"),
        ({"ignore_eos": True}, 400, "ignore_eos", "not supported"),
        ({"min_tokens": 5}, 400, "min_tokens", "not supported"),
        ({"stop_token_ids": [7]}, 400, "stop_token_ids", "not supported"),
        ({"add_generation_prompt": False}, 400, "add_generation_prompt", "not supported"),
        ({"chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs", "not permitted"),
        ({"messages": [{"role": "user"}]}, 400, "messages", "no content"),
        ({"messages": [{"role": "user", "tool_calls": []}]}, 400, "messages", "no content"),
        ({"messages": [{"role": "assistant", "content": None}]}, 400, "messages", "no content"),
        ({"audio": {}}, 400, "audio", "not supported"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages", "Shorten"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "only text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, "lone surrogate"),
        ({"tool_choice": "required"}, 400, "tool_choice", "needs tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            400,
            "tool_choice",
            "no tool",
        ),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            400,
            "response_format",
            "objekt",
        ),
    ],
)
def test_what_is_refused_is_named(
    server: Running, fields: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, **fields}
    for stream in (False, True):
        text = json.dumps({**body, "stream": stream})
        answer = server.http.post("/v1/chat/completions", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ("completions", {"max_completion_tokens": 5}, "max_completion_tokens"),
        ("completions", {"tools": [TOOL]}, "tools"),
        ("completions", {"prompt": ["x"] * 17}, "prompt"),
        ("completions", {"prompt": ["x"] * 9, "n": 2, "temperature": 1}, "n"),
        ("responses", {"stop": ["x"]}, "stop"),
        ("responses", {"trace": True}, "trace"),
        ("responses", {"top_logprobs": 2}, "top_logprobs"),
        ("responses", {"include": ["reasoning.encrypted_content"]}, "include"),
        ("responses", {"max_tokens": 5}, "max_tokens"),
        ("responses", {"input": [{"role": "user", "content": "x"}] * 4096, "instructions": "y"}, "input"),
    ],
)
def test_what_one_endpoint_has_is_refused_by_another(
    server: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt" if path == "completions" else "input": "x", "temperature": 0, **fields}
    answer = server.http.post(f"/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_fields_without_effect_are_taken(server: Running) -> None:
    idle = {"ignore_eos": False, "min_tokens": 0, "guided_json": None, "best_of": 1, "reasoning_effort": "low"}
    assert server.text(**idle, add_generation_prompt=True, store=False, metadata={}) == server.text()
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0, "response_format": {"type": "text"}, "tools": []}
    assert server.http.post("/v1/completions", json=body).status_code == 200


NOTHING = [
    ("chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ("completions", CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    ("responses", ResponsesRequest, {"input": "x", "max_output_tokens": 2}),
]


@pytest.mark.parametrize(("path", "kind", "body"), NOTHING)
def test_null_is_as_if_left_out(server: Running, path: str, kind: Any, body: dict[str, Any]) -> None:
    nothing = {name: None for name in kind.model_fields if name not in body}
    answer = server.http.post(f"/v1/{path}", json={**nothing, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"


def test_null_within_other_fields_is_too(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": None}}
    messages = [
        {"role": "user", "content": "x", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": None},
    ]
    fields = {"stream": True, "stream_options": {"include_usage": None}, "tools": [tool], "messages": messages}
    assert all("usage" not in chunk for chunk in events(server.chat(**fields)))


@pytest.mark.parametrize("user", [5, None, {"a": [1]}, "x" * 5000])
def test_whoever_the_user_is(server: Running, user: Any) -> None:
    assert server.chat(user=user).status_code == 200


def test_whole_numbers_may_have_a_point(server: Running) -> None:
    assert server.text(max_tokens=8.0, seed=3.0, n=1.0, top_k=40.0) == server.text(max_tokens=8)
    for wrong in (8.5, "8", True, 1e300):
        assert server.chat(max_tokens=wrong).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": "yes", "refusal": None, "tool_calls": []}, "yes"),
    ],
)
def test_earlier_answers_are_as_openai_gives_them(server: Running, said: dict[str, Any], shown: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **said}, {"role": "user", "content": "y"}]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == f"[user: x][assistant: {shown}][user: y]"


def test_what_is_nested_too_deeply_is_refused(server: Running) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    answer = server.chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_schema"
    deep = "[" * 960 + "]" * 960
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, "metadata": {deep}}}'
    answer = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text


def test_what_a_newcomer_gets_wrong_is_answered_with_the_remedy(server: Running) -> None:
    kind = {"content-type": "application/json"}
    posts = {
        "{messages: 1}": "the body is not JSON: Expecting property name enclosed in double quotes, at character 1.",
        "{}": "messages is missing.",
    }
    for body, message in posts.items():
        answer = server.http.post("/v1/chat/completions", content=body, headers=kind)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    for path, status, words in (("/v1", 404, "/v1/chat/completions"), ("/v1/completions", 405, "Use POST")):
        answer = server.http.get(path)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]


def test_the_context_is_named_as_clients_know_it(server: Running) -> None:
    error = server.chat("x" * 3000).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


LONG_STREAM = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 1500, "stream": True}


class TestMounted:
    """Below another application's path."""

    def test_it_starts_with_the_first_request(self) -> None:
        whole = FastAPI()
        whole.mount("/llm", outpace.serve.app(new_decoder(), name="tiny", api_keys=("key",), hosts=()))
        with TestClient(whole) as client:
            wait_until(lambda: client.get("/llm/health").status_code == 200)
            assert "HERE" in client.get("/llm/").text
            assert client.get("/llm/v1/models").status_code == 401
            key = {"authorization": "Bearer key"}
            body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}
            answer = client.post("/llm/v1/chat/completions", json=body, headers=key).json()
        assert answer["choices"][0]["message"]["content"] == new_decoder().generate("hello", max_new_tokens=12).text

    def test_its_lifespan_may_be_part_of_another(self) -> None:
        served = outpace.serve.app(new_decoder(), hosts=())
        whole = FastAPI(lifespan=lambda _: served.router.lifespan_context(served))
        whole.mount("/llm", served)
        with TestClient(whole) as client:
            wait_until(lambda: served.state.service.state == "ready")
            assert client.get("/llm/health").status_code == 200
        assert served.state.service.state == "stopped"


class TestGuard:
    def test_hosts_origins_and_kinds_of_body(self, server: Running) -> None:
        ask = server.http.get
        assert ask("/v1/models", headers={"host": "evil.example"}).json()["error"]["code"] == "invalid_host"
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://["):
            assert ask("/health", headers={"origin": origin}).status_code == 403
        assert ask("/health", headers={"origin": server.url}).status_code == 200
        assert "access-control-allow-origin" not in ask("/health", headers={"origin": server.url}).headers
        answer = server.http.post("/v1/completions", content="{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 415

    def test_hosts_are_names_as_in_dns(self, server: Running) -> None:
        port = server.url.rpartition(":")[2]
        for host in ("LocalHost", "localhost.", f"LOCALHOST.:{port}", "127.0.0.1.", f"[::1]:{port}"):
            assert server.http.get("/v1/models", headers={"host": host}).status_code == 200, host
        same = {"host": f"LocalHost:{port}", "origin": f"http://localhost:{port}"}
        assert server.http.get("/v1/models", headers=same).status_code == 200
        for host in ("localhost..", ".localhost", "localhost.evil.example", ""):
            assert server.http.get("/v1/models", headers={"host": host}).status_code == 403, host

    def test_head(self, server: Running) -> None:
        for path in ("/", "/health"):
            answer = server.http.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert server.http.get("/openapi.json").status_code == 200

    def test_there_are_no_websockets(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        pytest.importorskip("websockets")  # without, uvicorn answers as if it were not asked
        asks = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        key = {"sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        assert server.http.get("/v1/responses", headers={**asks, **key}).status_code == 403
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    def test_large_bodies_and_headers(self, server: Running) -> None:
        kind = {"content-type": "application/json"}
        assert server.http.post("/v1/completions", content=b"x" * 10_000_000, headers=kind).status_code == 413
        chunked = (b"x" * 100_000 for _ in range(100))
        answer = server.http.post("/v1/completions", content=chunked, headers=kind)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        answer = server.http.get("/v1/models", headers={"x": "y" * 30_000})
        assert answer.status_code == 431
        assert "larger than 16384 bytes" in answer.json()["error"]["message"]
        assert server.http.post("/v1/completions", content="{", headers=kind).json()["error"]["message"]

    def test_headers_without_end(self, server: Running) -> None:
        with suppress(httpx.TransportError):  # the connection may be closed before the client reads the answer
            assert server.http.get("/v1/models", headers={"x": "y" * 3_000_000}).status_code == 400
        assert server.http.get("/v1/models").status_code == 200

    def test_keys(self) -> None:
        with running(new_decoder(), api_keys=("one", "two")) as found:
            assert found.http.get("/health").status_code == 200
            assert found.http.get("/").status_code == 200
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
                answer = found.http.get(path)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for key in ("three", "x", "on", "é"):
                given = [(b"authorization", f"Bearer {key}".encode())]
                assert found.http.get("/v1/models", headers=given).status_code == 401
            assert found.http.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200

    def test_addresses_that_others_reach_need_a_key(self, tmp_path: Any) -> None:
        with pytest.raises(InputError, match="--api-key-file"):
            listen("0.0.0.0", 0, has_key=False)
        assert is_loopback("127.0.0.1")
        assert is_loopback("::1")
        assert not is_loopback("example.org")
        with listen("127.0.0.1", 0, False) as taken, pytest.raises(InputError, match="Try another --port"):
            listen("127.0.0.1", taken.getsockname()[1], False)
        file = tmp_path / "keys"
        file.write_text("\n")
        with pytest.raises(InputError, match="has no keys"):
            read_keys(file)
        file.write_text("a\n b \n")
        assert read_keys(file) == ("a", "b")
        with pytest.raises(InputError, match="--api-key-file"):
            read_keys(tmp_path / "none")
        with pytest.raises(InputError, match="without spaces"):
            Settings(api_keys=("a b",))
        with pytest.raises(InputError, match="max_queue=0"):
            Settings(max_queue=0)

    def test_no_prompt_is_logged(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, logger="outpace.serve")
        server.chat("a secret")
        server.chat("a secret", temperature=5)
        assert "/v1/chat/completions 200" in caplog.text
        assert "secret" not in caplog.text

    def test_the_log_tells_what_became_of_a_request(
        self, server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.INFO, logger="outpace.serve")
        server.http.get("/a%0aGET%20/b")
        wait_until(lambda: bool(caplog.records))
        assert [record.message.split(" ")[:3] for record in caplog.records] == [["GET", "/a%0AGET%20/b", "404"]]
        with server.http.stream("POST", "/v1/chat/completions", json=LONG_STREAM) as answer:
            next(answer.iter_bytes())
        server.settle()
        wait_until(lambda: "/v1/chat/completions 499" in caplog.text)
        monkeypatch.setattr(server.service, "check_model", lambda name: 1 // 0)
        assert server.chat().status_code == 500
        wait_until(lambda: "/v1/chat/completions 500" in caplog.text)

    def test_an_internal_error_leaves_the_connection_open(
        self, server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LONG)

        def ask() -> tuple[int, Any]:
            body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.load(answer)

        with monkeypatch.context() as patch:
            patch.setattr(server.service, "check_model", lambda name: 1 // 0)
            status, body = ask()
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in caplog.text
        assert ask()[0] == 200
        connection.close()


def slow(running: Running, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step take so long."""
    model = running.service.decoder.model
    forward = model.forward

    def waiting(*given: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return forward(*given, **more)

    monkeypatch.setattr(model, "forward", waiting)


class TestFaults:
    """Each leaves the others' texts as they are, and no slot taken."""

    @pytest.fixture
    def others(self, server: Running) -> Iterator[None]:
        """Two texts that are written meanwhile."""
        expected = server.text("other", max_tokens=150)
        with ThreadPoolExecutor(2) as threads:
            texts = [threads.submit(server.text, "other", max_tokens=150) for _ in range(2)]
            wait_until(lambda: server.service.open == 2 or all(text.done() for text in texts))  # none comes too late
            yield
            assert [text.result() for text in texts] == [expected] * 2
        server.settle()
        assert server.held == 0

    def ask(self, server: Running, **fields: Any) -> socket.socket:
        """The connection of a request that nobody has answered yet."""
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": 0, **fields})
        host, port = server.url.removeprefix("http://").split(":")
        found = socket.create_connection((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        found.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return found

    def open_stream(self, server: Running, **fields: Any) -> socket.socket:
        """A stream's connection; its first bytes are read."""
        found = self.ask(server, stream=True, max_tokens=1000, **fields)
        assert b"200" in found.recv(4096)
        return found

    def test_a_client_is_killed_in_mid_stream(self, server: Running, others: None) -> None:
        worker = server.service._worker
        assert worker is not None

        def begun() -> bool:
            return any(job.first and job.order.options["max_new_tokens"] == 1000 for job in worker._jobs.values())

        with server.paused(when=begun):
            connection = self.open_stream(server)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.close()

    def test_a_client_goes_before_its_first_token(self, server: Running, others: None) -> None:
        ask = {"messages": [{"role": "user", "content": "x" * 1500}], "max_tokens": 500, "temperature": 0}
        with server.paused(), pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/chat/completions", json=ask, timeout=httpx.Timeout(LONG, read=0.05))

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_goes_while_its_prompt_is_read_ends_it_within_a_step(
        self, server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, worker = server.service.decoder.model, server.service._worker
        assert worker is not None
        forward, cancel = model.forward, worker.cancel
        count, reading, gone = 0, Event(), Event()

        def counted(*given: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:  # it is in the midst of its prompt
                reading.set()
                assert gone.wait(LONG)
            return forward(*given, **more)

        monkeypatch.setattr(model, "chunk", 32)
        monkeypatch.setattr(model, "forward", counted)
        monkeypatch.setattr(worker, "cancel", lambda jobs: (cancel(jobs), gone.set()))
        messages = [{"role": "user", "content": "y" * 1900}]
        with self.ask(server, messages=messages, max_tokens=500, stream=stream):
            assert reading.wait(LONG)
        server.settle()
        assert count == 3
        assert server.held == 0

    def test_a_slow_reader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While its connection takes nothing, its steps wait. They come in few events later; the others go on."""
        taken, take = list[int](), worker.Mailbox.take

        async def watched(mailbox: worker.Mailbox) -> Any:
            items = await take(mailbox)
            taken.append(len(items))
            return items

        monkeypatch.setattr(worker.Mailbox, "take", watched)
        with running(new_decoder(), unread=4096) as server:
            expected = server.text("other", max_tokens=50)
            fields = {"logprobs": True, "top_logprobs": 20, "speculative": False, "max_tokens": 400}
            with self.ask(server, stream=True, **fields) as connection:
                connection.settimeout(LONG)
                assert server.text("other", max_tokens=50) == expected
                server.settle()  # all tokens are there, and most of them are not sent
                read = b""
                while not read.endswith(b"0\r\n\r\n"):
                    read += connection.recv(2**20)
            assert max(taken) > 100
            assert server.held == 0
        chunks = [json.loads(line[6:]) for line in read.split(b"\n") if line.startswith(b"data: {")]
        assert sum(len((chunk["choices"][0].get("logprobs") or {"content": []})["content"]) for chunk in chunks) == 400

    def test_an_error_in_one_text(self, server: Running, others: None) -> None:
        decoder = server.service.decoder
        request = decoder.request

        def broken(tokens: Any, **options: Any) -> Any:
            found, text = request(tokens, **options)
            if options["salt"] == "Bearer broken":

                def fail(token: int) -> None:
                    raise RuntimeError("broken")

                found = found._replace(stop=fail)
            return found, text

        decoder.request = broken  # type: ignore[method-assign]
        try:
            headers = {"authorization": "Bearer broken"}
            body = {"messages": [{"role": "user", "content": "x"}]}
            answer = server.http.post("/v1/chat/completions", json=body, headers=headers)
        finally:
            del decoder.request  # type: ignore[method-assign]
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "broken" not in answer.text

    def test_nan_in_one_text(self, server: Running, others: None) -> None:
        model = server.service.decoder.model
        table = model.ends().embed.weight
        token = server.http.post("/tokenize", json={"prompt": "\x07"}).json()["tokens"][0]
        with torch.no_grad():
            before = table[token].clone()
            table[token] = float("nan")
        try:
            answer = server.chat("\x07")
        finally:
            with torch.no_grad():
                table[token] = before
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (500, "server_error")
        assert "NaN" in error["message"]

    def test_more_than_there_is_room_for(self, server: Running, others: None) -> None:
        def ask(number: int) -> httpx.Response:
            answer = server.chat(f"{number}", max_tokens=20)
            if answer.status_code == 429:
                go_on.set()
            return answer

        with server.paused() as go_on, ThreadPoolExecutor(40) as threads:
            answers = [*threads.map(ask, range(40))]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert all(1 <= int(answer.headers["retry-after"]) <= 30 for answer in refused)
        assert {answer.status_code for answer in answers} == {200, 429}
        for number, answer in enumerate(answers):
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["message"]["content"] == server.text(f"{number}", max_tokens=20)


@pytest.fixture
def _many_files() -> Iterator[None]:
    """A shell's limit of open files is often 1,024, and both ends of a thousand connections are here."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(before, 4096), most), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.usefixtures("_many_files")
def test_a_thousand_queued_and_cancelled() -> None:
    with running(new_decoder(), max_texts=4, max_queue=1000) as found:
        expected = found.text()
        host, port = found.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "x", "max_tokens": 500})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        with found.paused(), ExitStack() as sockets:
            for _ in range(1000):
                connection = sockets.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: found.service.open == 1000)
        found.settle()
        assert found.held == 0
        assert found.text() == expected


def test_a_second_turn_reads_what_is_new() -> None:
    with running(new_decoder(), api_keys=("one", "two")) as found:
        found.http.headers["authorization"] = "Bearer one"
        turns = [{"role": "user", "content": "hello " * 100}]
        first = found.chat(messages=turns).json()
        text = first["choices"][0]["message"]["content"]
        turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        second = found.chat(messages=turns).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 2
        assert second["timings"]["cache_n"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert "prefix_cache_hits_total" in found.http.get("/metrics").text
        found.http.headers["authorization"] = "Bearer two"
        other = found.chat(messages=turns).json()
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert other["choices"] == second["choices"]


def test_texts_are_set_aside_where_slots_run_out() -> None:
    with running(new_decoder(context=160), slots=160, keep=0) as found:
        fields = {"temperature": 0.8, "max_tokens": 140, "logit_bias": {"256": -100}}
        together = found.chat(n=4, seed=3, **fields).json()["choices"]
        alone = [found.text(seed=3 + number, **fields) for number in range(4)]
        assert [choice["message"]["content"] for choice in together] == alone
        text = found.http.get("/metrics").text
        assert 'num_preemptions_total{engine="0",model_name="tiny"} 0.0' not in text


def test_a_deadline_ends_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(new_decoder(), deadline=0.5) as found:
        slow(found, 0.05, monkeypatch)
        answer = found.chat(max_tokens=500)
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        last = [block for block in found.chat(max_tokens=500, stream=True).text.split("\n\n") if block][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        found.settle()
        assert found.held == 0


def test_a_stream_that_says_nothing_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "ALIVE", 0.05)
    with running(new_decoder()) as found:
        expected, worker = found.text(max_tokens=4), found.service._worker
        assert worker is not None
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 4, "stream": True}
        with (
            found.paused(when=lambda: any(job.first for job in worker._jobs.values())) as go_on,
            found.http.stream("POST", "/v1/chat/completions", json={**body, "speculative": False}) as stream,
        ):
            text = ""
            for line in stream.iter_lines():
                if line == ":":
                    go_on.set()
                elif line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            assert go_on.is_set()
        assert text == expected


def test_sigterm_drains() -> None:
    with running(new_decoder(), drain=LONG) as found, ThreadPoolExecutor(1) as threads:
        expected = found.text(max_tokens=30)
        with found.paused():
            text = threads.submit(found.text, max_tokens=30)
            wait_until(lambda: found.service.open)
            found.server.handle_exit(15, None)
            answer = found.http.get("/health")
            assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
            refused = found.chat()
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        assert text.result() == expected


def test_a_server_that_is_started_again_goes_on_as_before() -> None:
    """At the same address, with the same text; a client that tries again notices nothing."""
    port = own_port()
    with running(new_decoder(), port=port) as first:
        expected = first.text(max_tokens=30)
    with httpx.Client() as http, pytest.raises(httpx.ConnectError):
        http.get(first.url)
    with running(new_decoder(), port=port) as second:
        answer = second.chat(max_tokens=30).json()
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # nothing is kept outside of memory
        assert second.text(max_tokens=30) == expected


def test_the_table_of_faults_names_its_tests() -> None:
    """docs/serving.md says of each fault which test has seen it; every test that it names is here."""
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = page.split("## Fault isolation")[1].split("\n## ")[0].splitlines()
    named = [found for row in rows if row.startswith("|") for found in re.findall(r"`(test_\w+)`", row)]
    here = Path(__file__).read_text(encoding="utf-8")
    assert len(named) == sum(row.startswith("|") for row in rows) - 2  # one in each row but the head and the line
    assert [name for name in named if f"def {name}(" not in here] == []


def test_the_page_has_every_field() -> None:
    """docs/serving.md lists what each endpoint takes and rejects."""
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page.split("## Fields")[1].split("\n## ")[0]
    taken, _, rejected = section.partition("Rejected with 400")

    def names(text: str) -> set[str]:
        return {name for code in re.findall(r"`([^`]+)`", text) for name in re.findall(r"\w+", code)}

    kinds = [kind for kind in vars(request_fields).values() if isinstance(kind, type) and issubclass(kind, Fields)]
    known = {info.alias or name for kind in kinds for name, info in kind.model_fields.items()}
    assert known - names(taken) == set()
    lists = {where: names(listed) for where, listed in re.findall(r"- \*(\w+)\*: ([^.]+)\.", rejected)}
    assert lists == {
        "Everywhere": {*NO_SUCH},
        "Chats": {*ChatRequest.refused},
        "Completions": {*CompletionRequest.refused},
        "Responses": {*ResponsesRequest.refused},
    }


def test_what_is_not_done_when_the_drain_ends_is_told() -> None:
    with running(new_decoder(), drain=0.3) as found, ThreadPoolExecutor(1) as threads:
        worker = found.service._worker
        assert worker is not None
        with found.paused(when=lambda: worker._state != "stopped"):
            answer = threads.submit(found.chat, max_tokens=500)
            wait_until(lambda: found.service.open)
            found.server.handle_exit(15, None)
            assert answer.result().status_code == 503


def test_health_is_503_until_the_model_is_there() -> None:
    looked = Event()

    def load() -> Any:
        assert looked.wait(LONG)
        return new_decoder()

    with running(load, wait=False) as found:
        answer = found.http.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        refused = found.chat()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        looked.set()
        wait_until(lambda: found.http.get("/health").status_code != 503)
        assert found.text()


def test_every_size_of_step_is_made_before_the_first_request() -> None:
    decoder = graph_decoder()
    method = decoder.prepare(PromptLookup(rows=4))
    told: list[tuple[int, int]] = []
    warm(decoder, [method], most=4, longest=decoder.model.context, tell=lambda *far: told.append(far))
    assert [done for done, _ in told] == [*range(1, told[0][1] + 1)]
    assert isinstance(decoder.engine, GraphEngine)
    ((_, _, program),) = decoder.engine._programs
    made, reading = {*program._graphs}, {*decoder.engine._graphs}
    assert {key[0] for key in made} == {1, 4}
    for texts in (1, 3):
        for sampling in SAMPLINGS:
            decoder.generate([[5, 6, 7]] * texts, method=method, sampling=sampling, max_new_tokens=4)
    assert ({*program._graphs}, {*decoder.engine._graphs}) == (made, reading)
    assert decoder.engine.pool.held == 0


def test_texts_may_be_shorter_than_the_models_context() -> None:
    with running(new_decoder(), max_length=40) as found:
        answer = found.chat("x" * 20, max_tokens=500).json()
        assert answer["usage"]["total_tokens"] == 40
        error = found.chat("x" * 40).json()["error"]
        assert (error["code"], "40 tokens here" in error["message"]) == ("context_length_exceeded", True)
        assert found.http.get("/v1/models").json()["data"][0]["max_model_len"] == 40
    with pytest.raises(InputError, match="max_length=1"):
        Settings(max_length=1)


def test_a_lossy_method_is_not_served() -> None:
    class Lossy(PromptLookup):
        lossless = False

    decoder = new_decoder()
    decoder.method = decoder.prepare(Lossy())
    with running(decoder, wait=False) as found:
        wait_until(lambda: found.service.state != "loading")
        assert "is lossy" in str(found.service.error)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Any:
        raise InputError("no such model")

    with running(load, wait=False) as found:
        wait_until(lambda: found.service.state != "loading")
        assert isinstance(found.service.error, InputError)


def test_no_store_is_shared_by_several_keys() -> None:
    decoder = new_decoder()
    decoder.method = decoder.prepare(PromptLookup(store=64))
    with running(decoder, wait=False, api_keys=("one" * 8, "two" * 8)) as found:
        wait_until(lambda: found.service.state != "loading")
        assert isinstance(found.service.error, InputError)
        assert "store=0" in str(found.service.error)


NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}},
    "required": ["value"],
    "additionalProperties": False,
}
WORD = {"type": "object", "properties": {"next": {"type": "string"}}, "required": ["next"]}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("parameters", "fits", "differs"),
    [
        ({"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}, {"value": 1, "next": {"value": 2}}, {"value": "a"}),
        ({**NODE, "$defs": {"Node": NODE}}, {"value": 1, "next": {"value": 2}}, {"next": 1}),
        (
            {**NODE, "$defs": {"Node": {"$ref": "#"}}},
            {"value": 1, "next": {"value": 2}},
            {"value": 1, "next": {"name": 1}},
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"A": WORD},
                "$ref": "#/definitions/A",
            },
            {"next": "x"},
            {"next": 1},
        ),
        ({"$id": "http://here/", "$defs": {"Node": WORD}, "$ref": "#/$defs/Node"}, {"next": "x"}, {"next": 1}),
    ],
)
@pytest.mark.parametrize("style", ["hermes", "llama", "mistral"])
def test_references_start_at_a_tools_own_parameters(parameters: Any, fits: Any, differs: Any, style: str) -> None:
    """Also where another tool has a definition of the same name."""
    others = (
        {"$id": "http://here/", "$defs": {"Node": {"type": "null"}}, "$ref": "#/$defs/Node"},
        NODE | {"$defs": {"Node": WORD}},
    )
    tools = [
        {"function": {"name": name, "parameters": schema}}
        for name, schema in zip("abc", (others[0], parameters, others[1]), strict=True)
    ]
    words, key = new_decoder().words, "parameters" if style == "llama" else "arguments"

    def accepts(tools: Any, arguments: Any) -> bool:
        matcher = forced(tools, style).compiled(words)
        call = json.dumps({"name": "b", key: arguments})
        text = {"hermes": f"<tool_call>\n{call}\n</tool_call>", "llama": call, "mistral": f"[{call}]"}[style]
        return matcher.consume_tokens(bytewise().encode(text)) and matcher.is_accepting()

    for some in (tools, tools[1:2]):
        assert accepts(some, fits)
        assert not accepts(some, differs)


def test_tools_that_are_too_large_together(server: Running) -> None:
    parameters = {"type": "object", "description": "x" * 40_000}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in "ab"]
    error = server.chat(tools=tools, tool_choice="required").json()["error"]
    assert re.search(r"of the tools together cannot be used: .* at most 65536", error["message"])
    assert error["param"] == "tools"


def parsed(answer: str, sizes: Iterable[int] = (), bare: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of f and g in an answer that comes in pieces of these sizes."""
    calls, pieces, text, found = Calls(["f", "g"], bare), list[Found](), "", list[list[str]]()
    for size in [*sizes, len(answer)]:
        pieces += calls.push(answer[:size])
        answer = answer[size:]
    for piece in [*pieces, *calls.finish()]:
        if piece.call is None:
            text += piece.text
        elif piece.name is not None:
            assert piece.call == len(found)
            found.append([piece.name, piece.arguments])
        else:
            found[piece.call][1] += piece.arguments
    return text, [(name, arguments) for name, arguments in found]


ANSWERS = [
    (
        'Hi <tool_call>\n{"name": "f", "arguments": {"a": "}\\"", "b": [1, {"c": 2}]}}\n</tool_call> and <tool_call>'
        '{"arguments": {"x": 1}, "name": "g"}</tool_call>',
        "Hi  and ",
        [("f", '{"a": "}\\"", "b": [1, {"c": 2}]}'), ("g", '{"x": 1}')],
    ),
    ("<tool_call>nothing</tool_call> <tool", "<tool_call>nothing</tool_call> <tool", []),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so', " so", [("f", '{"a": 1')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"arguments": null, "name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>', "", [("f", '{"a": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\\\"}}</tool_call>!',
        "!",
        [("f", '{"a": "</tool_call>\\\\"}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1}}</tool_call>',
        "",
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    (
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call> ok',
        " ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_c', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        [],
    ),
    ('<tool_call>{"name": ["f"], "arguments": {}}', '<tool_call>{"name": ["f"], "arguments": {}}', []),
    ('<tool_call>{"name": "f"}, {"name": "h"}</tool_call>', '{"name": "h"}</tool_call>', [("f", "{}")]),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ('<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": <</tool_call>.', ".", [("f", '{"a": <')]),
    ("<tool_call>" + '{"name": "f", "arguments": {"a": ' + "[" * 3000, "", [("f", '{"a": ' + "[" * 3000)]),
]


@pytest.mark.parametrize(("answer", "text", "calls"), ANSWERS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(answer: str, text: str, calls: Any, size: int) -> None:
    assert parsed(answer, [size] * len(answer)) == (text, calls)


BARE = [
    ('{"name": "f", "parameters": {"a": [1, {"b": "}"}]}}', "", [("f", '{"a": [1, {"b": "}"}]}')]),
    (
        ' [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; <|python_tag|>{"name": "g", "parameters": null}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ('{"name": "Ann", "age": 3} is JSON', '{"name": "Ann", "age": 3} is JSON', []),
    ("[1, 2] is a list", "[1, 2] is a list", []),
    ('I call {"name": "f"}', 'I call {"name": "f"}', []),
    ('{"name": "f"} It is called.', "It is called.", [("f", "{}")]),
    ('{"name": "f", "parameters": {"a": "</tool_call>', "", [("f", '{"a": "</tool_call>')]),
    ('{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')]),
    ("<|pyt", "<|pyt", []),
]


@pytest.mark.parametrize(("answer", "text", "calls"), BARE)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_without_marks_are_found(answer: str, text: str, calls: Any, size: int) -> None:
    """As with Llama's and Mistral's templates."""
    assert parsed(answer, [size] * len(answer), bare=True) == (text, calls)


WORDS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "so", *'}[],"\\<\n']
OBJECTS = ['{"name": "f", "arguments": {', '"a": 1', '{"name": "f"}', '{"name": "h"}', '{"arguments": {}, "name": "g"}']
PIECES = st.sampled_from([*WORDS, *OBJECTS])


@given(st.lists(PIECES, max_size=12).map("".join), st.lists(st.integers(1, 9)), st.booleans())
def test_no_cut_changes_what_is_found(answer: str, sizes: list[int], bare: bool) -> None:
    assert parsed(answer, sizes, bare) == parsed(answer, [], bare)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just("</tool_call>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(), VALUES, max_size=3)), min_size=1, max_size=4),
    st.lists(st.integers(1, 9)),
    st.booleans(),
)
def test_calls_are_found_as_they_were_written(calls: list[Any], sizes: list[int], bare: bool) -> None:
    written = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    if bare:
        assert parsed(f"[{', '.join(written)}]", sizes, bare) == ("", expected)
    else:
        assert parsed("".join(f"<tool_call>{one}</tool_call>" for one in written), sizes) == ("", expected)
        assert parsed("<tool_call>\n" + "\n".join(written) + "</tool_call>", sizes) == ("", expected)


CALL, OUTPUT = {"type": "function_call", "name": "f"}, {"type": "function_call_output", "output": "3"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([SAID, CALL | {"call_id": "1"}, CALL | {"call_id": "2"}], [("assistant", "a", ["1", "2"])]),
        ([CALL | {"call_id": "1"}, SAID, CALL | {"call_id": "2"}], [("assistant", "a", ["1", "2"])]),
        (
            [CALL | {"call_id": "1"}, OUTPUT, CALL | {"call_id": "2"}, OUTPUT],
            [("assistant", None, ["1"]), ("tool", "3", []), ("assistant", None, ["2"]), ("tool", "3", [])],
        ),
        ([SAID, SAID, {"content": "b"}], [("assistant", "a", []), ("assistant", "a", []), ("user", "b", [])]),
        ([{"content": "b"}, CALL | {"call_id": "1"}], [("user", "b", []), ("assistant", None, ["1"])]),
    ],
)
def test_a_turn_of_responses_is_one_message(items: list[Any], turns: list[Any]) -> None:
    found = as_chat(ResponsesRequest(input=items)).messages
    told = [(one.role, one.content, [call.id for call in one.tool_calls or ()]) for one in found]
    assert told == turns


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "function_call", "call_id": "1"}, "a function_call has no name"),
        ({"role": "user"}, "a message of the user has no content"),
        ({"type": "message", "role": "assistant", "content": None}, "a message of the assistant has no content"),
    ],
)
def test_items_of_responses_that_say_nothing_are_refused(server: Running, item: dict[str, Any], words: str) -> None:
    answer = server.http.post("/v1/responses", json={"input": [item]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert words in answer.json()["error"]["message"]


LLAMA = "{# <|python_tag|> #}{% if tools %}{{ tools | tojson }}{% endif %}"
MISTRAL = "{# [TOOL_CALLS] #}{% if tools %}{{ tools | tojson }}{% endif %}"
LOOP = (
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.id }} {{ call.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}]{% endfor %}"
)


@pytest.mark.parametrize("template", [LLAMA, MISTRAL])
def test_a_tool_is_called_as_the_template_has_it(server: Running, template: str) -> None:
    tokenizer = server.service.decoder.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template + LOOP
    try:
        answer = server.chat(tools=[TOOL], tool_choice="required", max_tokens=150).json()["choices"][0]
        called = {"id": "call_1", "function": {"name": "tell", "arguments": '{"age": 3}'}}
        messages = [
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        ]
        tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        shown = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    finally:
        tokenizer.chat_template = before
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "tell"
    assert set(json.loads(call["function"]["arguments"])) == {"name", "age"}
    first, second = re.findall(r"[: ](\w+) \{\"age\": 3\}.*?(\w+)\]$", shown)[0]
    assert first == second.removeprefix("3")
    assert len(first) == (9 if template is MISTRAL else 6)
