"""Under load: whatever is asked for beside it, each text is the one that the same request gets alone. No tolerance."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .serving import Running, new_decoder, running

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "string", "maxLength": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TALKS = ["hello", "hello there", "count to ten: one two one two one two", "a much longer question " * 8, "x"]


def a_request(draw: random.Random) -> dict[str, Any]:
    """A chat with some of all fields."""
    turns = [{"role": "user", "content": draw.choice(TALKS)}]
    if draw.random() < 0.3:
        turns += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": draw.choice(TALKS)}]
    body: dict[str, Any] = {"messages": turns, "max_tokens": draw.randrange(1, 24), "seed": draw.randrange(9)}
    body["temperature"] = draw.choice([0, 0, 0.7, 1.0])
    optional: dict[str, list[Any]] = {
        "method": ["autoregressive", "lookahead", "prompt-lookup", "jacobi", "self-speculative", "auto"],
        "top_p": [0.9],
        "top_k": [20],
        "min_p": [0.05],
        "presence_penalty": [0.5],
        "frequency_penalty": [0.5],
        "repetition_penalty": [1.2],
        "logit_bias": [{"70": 3, "71": -100}],
        "stop": ["e", ["ab", "\u0012"]],
        "n": [2],
        "logprobs": [True],
        "speculative": [False],
        "prediction": [{"type": "content", "content": "one two one two"}],
        "response_format": [{"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}],
    }
    for name, values in optional.items():
        if draw.random() < 0.2:
            body[name] = draw.choice(values)
    body["stream"] = draw.random() < 0.5
    body["trace"] = draw.random() < 0.5
    return body


Text = tuple[str, list[int], "str | None"]  # with its tokens, if the request has a trace, and how it ended


def answer(server: Running, body: dict[str, Any], leave_after: int | None = None) -> list[Text]:
    """The texts and how they ended; of a stream that is left after some events, as far as it went."""
    if not body["stream"]:
        found = server.http.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        return [
            (choice["message"]["content"], tokens_of(choice), choice["finish_reason"])
            for choice in found.json()["choices"]
        ]
    texts: list[list[Any]] = [["", [], None] for _ in range(body.get("n", 1))]
    with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        for number, line in enumerate(line for line in stream.iter_lines() if line):
            if line == "data: [DONE]" or number == leave_after:
                break
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            place = texts[choice["index"]]
            place[0] += choice["delta"].get("content", "")
            place[1] += tokens_of(choice)
            place[2] = choice["finish_reason"] or place[2]
    return [(text, tokens, finish) for text, tokens, finish in texts]


def tokens_of(choice: dict[str, Any]) -> list[int]:
    """Different tokens of a tiny model may have the same text: bytes that are no character."""
    return [token for step in choice.get("trace", ()) for token in step["tokens"]]


def check(count: int, seconds: float, slots: int) -> None:
    draw = random.Random(5)
    requests = [a_request(draw) for _ in range(count)]
    leaves = [draw.randrange(1, 6) if body["stream"] and draw.random() < 0.3 else None for body in requests]
    starts = sorted(draw.random() * seconds for _ in requests)

    with running(new_decoder(context=512), max_texts=16, max_queue=count * 2, slots=slots) as busy:
        begin = time.monotonic()

        def at_its_time(number: int) -> list[Text]:
            time.sleep(max(0.0, starts[number] - (time.monotonic() - begin)))
            return answer(busy, requests[number], leaves[number])

        with ThreadPoolExecutor(32) as threads:
            found = [*threads.map(at_its_time, range(count))]
        busy.settle()
        assert busy.held == 0
        busy.service.decoder.engine.pool.forget_all()
        assert busy.service.decoder.engine.pool.used == 0

    with running(new_decoder(context=512), keep=0) as quiet:
        for body, texts, left in zip(requests, found, leaves, strict=True):
            alone = answer(quiet, body)
            if left is None:
                assert texts == alone, body
            else:
                for (text, tokens, _), (whole, all_tokens, _) in zip(texts, alone, strict=True):
                    assert whole.startswith(text), body
                    assert all_tokens[: len(tokens)] == tokens, body


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_mixed_requests_at_random_times_are_what_they_are_alone(count: int) -> None:
    check(count, seconds=0.02 * count, slots=1024)


@pytest.mark.slow
def test_memory_is_flat_and_no_slot_is_lost() -> None:
    """Eight clients, one request after the other, for some minutes."""
    import resource

    sizes = []
    with running(new_decoder(context=512), slots=2048) as server, ThreadPoolExecutor(8) as threads:
        draw = random.Random(1)
        end = time.monotonic() + 600

        def one(_: int) -> None:
            while time.monotonic() < end:
                answer(server, a_request(draw))

        done = [threads.submit(one, number) for number in range(8)]
        while not all(item.done() for item in done):
            time.sleep(10)
            with open("/proc/self/statm") as file:
                sizes.append(int(file.read().split()[1]) * resource.getpagesize())
        for item in done:
            item.result()
        server.settle()
        assert server.held == 0
    later = sizes[len(sizes) // 3 :]
    assert max(later) <= 1.04 * min(later)  # 2 % above and below
