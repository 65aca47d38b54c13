"""The server: requests that are made to take long or much are refused, and hold up nobody else."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, current_thread
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from outpace import PromptLookup
from outpace.serve import fields, grammars
from outpace.serve import service as service_module
from outpace.serve.connection import Connection
from outpace.serve.fields import ChatRequest
from outpace.serve.warming import Progress, Stopped, warm

from .serving import LONG, Running, new_decoder, running, wait_until
from .test_batch import graph_decoder


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(new_decoder(), max_texts=8, max_queue=8) as found:
        yield found


def connected(server: Running, path: str, body: Any) -> socket.socket:
    """The connection of a request that nobody has answered yet."""
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)))
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    found.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    return found


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


ENDLESS = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{20 + i}}}.*"} for i in range(20)]}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0}


class TestGrammars:
    """Some small schemas take llguidance forever."""

    @pytest.fixture
    def processes(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Those that try grammars. A grammar may take as long as it will."""
        found, start = [], asyncio.create_subprocess_exec

        async def started(*given: Any, **more: Any) -> Any:
            process = await start(*given, **more)
            found.append(process)
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        monkeypatch.setattr(grammars, "SECONDS", 10 * LONG)
        return found

    @pytest.mark.parametrize("stream", [False, True])
    def test_one_that_takes_too_long_is_refused(
        self, server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grammars, "SECONDS", 0.5)
        answer = server.chat(response_format=form(ENDLESS), stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "response_format", "invalid_schema")
        assert "0.5 seconds" in error["message"]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": ENDLESS}}}}
        error = server.chat(tools=[tool], tool_choice="required", stream=stream).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "invalid_schema")

    def test_its_process_ends_with_its_request_and_holds_up_nobody(self, server: Running, processes: list[Any]) -> None:
        expected, body = server.text(), {**CHAT, "response_format": form(ENDLESS)}
        with (
            connected(server, "/v1/chat/completions", body),
            connected(server, "/v1/chat/completions", {**body, "stream": True}),
        ):
            wait_until(lambda: len(processes) == 2)
            assert server.text() == expected
            assert [process.returncode for process in processes] == [None, None]
        wait_until(lambda: all(process.returncode is not None for process in processes))
        assert json.loads(server.text(response_format=form({"type": "boolean"}), max_tokens=20)) in (True, False)

    def test_one_that_takes_too_much_memory_is_refused(
        self, server: Running, processes: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grammars, "TRY", "import os; os.abort()")
        error = server.chat(response_format=form({"type": "integer"})).json()["error"]
        assert (error["code"], "too much memory" in error["message"]) == ("invalid_schema", True)
        assert len(processes) == 1

    def test_many_wait_and_more_are_refused(
        self, server: Running, processes: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grammars, "WAITING", 1)
        compiler = server.service._grammars
        body = {**CHAT, "response_format": form(ENDLESS)}
        connections = [connected(server, "/v1/chat/completions", body) for _ in range(grammars.AT_ONCE + 1)]
        wait_until(lambda: compiler._open == grammars.AT_ONCE + 1)
        answer = server.chat(response_format=form({"type": "boolean"}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"]
        assert len(processes) <= grammars.AT_ONCE
        for connection in connections:
            connection.close()
        wait_until(lambda: compiler._open == 0)

    def test_the_deadline_ends_it(self, processes: list[Any]) -> None:
        with running(new_decoder(), deadline=0.5) as server:
            answer = server.chat(response_format=form(ENDLESS))
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")

    def test_a_server_that_stops_does_not_wait_for_it(self, processes: list[Any]) -> None:
        with running(new_decoder()) as server, ThreadPoolExecutor(1) as threads:
            asked = threads.submit(server.chat, response_format=form(ENDLESS))
            wait_until(lambda: processes)
            server.server.handle_exit(15, None)
            assert asked.result().json()["error"]["code"] == "stopped"
        assert processes[0].returncode is not None

    def test_it_is_compiled_once_for_all_choices_and_tried_once(
        self, server: Running, processes: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoder, compiled = server.service.decoder, list[Any]()
        constraint = decoder.constraint
        monkeypatch.setattr(decoder, "constraint", lambda *given: compiled.append(given) or constraint(*given))
        fields = {"response_format": form({"enum": ["one", "two"]}), "temperature": 1.0, "max_tokens": 20}
        texts = [choice["message"]["content"] for choice in server.chat(**fields, n=4, seed=1).json()["choices"]]
        assert len(compiled) == 1
        assert texts == [server.text(**fields, seed=1 + number) for number in range(4)]
        assert {*texts} == {'"one"', '"two"'}
        assert len(processes) == 1


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


TEXT = {"type": "text", "text": ""}
MANY = 100_000
LARGE = [
    ("v1/chat/completions", said([{}] * MANY), "messages"),
    ("v1/chat/completions", said([TEXT] * 4097), "messages"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT] * 1000}] * 5}, "messages"),
    ("v1/chat/completions", {"messages": [{}] * MANY}, "messages"),
    ("v1/chat/completions", {**said("x"), "stop": [""] * MANY}, "stop"),
    ("v1/chat/completions", {**said("x"), "tools": [1] * MANY}, "tools"),
    ("v1/chat/completions", {**said("x"), "prediction": {"content": [{}] * MANY}}, "prediction"),
    ("v1/chat/completions", {**said("x"), "logit_bias": {str(n): "" for n in range(MANY)}}, "logit_bias"),
    (
        "v1/chat/completions",
        {**said("x"), "chat_template_kwargs": {str(n): 1 for n in range(MANY)}},
        "chat_template_kwargs",
    ),
    ("v1/completions", {"prompt": [-1] * MANY}, "prompt"),
    ("v1/completions", {"prompt": [[-1] * MANY]}, "prompt"),
    ("v1/completions", {"prompt": [{}] * MANY}, "prompt"),
    ("v1/responses", {"input": [1] * MANY}, "input"),
    ("v1/responses", {"input": [{"role": "user", "content": [TEXT] * 4097}]}, "input"),
    ("tokenize", {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages"),
    ("detokenize", {"tokens": [-1] * MANY}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), LARGE)
def test_of_a_large_body_a_few_errors_are_found(
    server: Running, path: str, body: Any, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, request_error = list[int](), RequestValidationError.__init__

    def counted(error: RequestValidationError, errors: Any, **how: Any) -> None:
        counts.append(len(errors))
        request_error(error, errors, **how)

    monkeypatch.setattr(RequestValidationError, "__init__", counted)
    answer = server.http.post(f"/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert len(error["message"]) < 300
    assert max(counts, default=0) <= 4


def test_a_body_is_looked_through_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    times, dumps = list[Any](), json.dumps
    monkeypatch.setattr(fields.json, "dumps", lambda *given, **how: times.append(given) or dumps(*given, **how))
    body = {**CHAT, "messages": [{"role": "user", "content": [TEXT] * 10}] * 10}
    ChatRequest.model_validate(body)
    assert len(times) == 1
    with pytest.raises(ValidationError, match="lone surrogate"):
        ChatRequest.model_validate(said([{"type": "text", "text": "\ud800"}]))


def test_the_largest_body_is_taken(server: Running) -> None:
    body = {**CHAT, **said([TEXT] * 4095 + [{"type": "text", "text": "x"}])}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == server.text("x", max_tokens=5)


class TestStoppingWhileLoading:
    def test_a_server_that_loads_its_model_stops_at_once(self) -> None:
        come = Event()

        def load() -> Any:
            assert come.wait(LONG)
            return new_decoder()

        with running(load, wait=False) as server:
            wait_until(lambda: server.http.get("/health").status_code == 503)
            service = server.service
        assert service.loads
        come.set()
        wait_until(lambda: not service.loads)
        assert (service.state, service._worker, service.error) == ("stopped", None, None)

    def test_warming_stops_between_two_sizes(self) -> None:
        decoder, made = graph_decoder(), list[int]()
        stops = Progress(lambda: len(made) == 2)

        def tell(done: int, of: int) -> None:
            made.append(done)
            stops(done, of)

        with pytest.raises(Stopped):
            warm(decoder, [decoder.prepare(PromptLookup(rows=4))], 4, decoder.model.context, tell)
        assert made == [1, 2]

    def test_a_server_that_stops_while_warming_serves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        warming = Event()

        def endless(decoder: Any, methods: Any, most: int, longest: int, tell: Any) -> None:
            warming.set()
            while True:
                tell(1, 2)

        monkeypatch.setattr(service_module, "warm", endless)
        with running(new_decoder(), wait=False) as server:
            assert warming.wait(LONG)
            service = server.service
        wait_until(lambda: not service.loads)
        assert (service.state, service._worker, service.error) == ("stopped", None, None)


def test_more_choices_than_there_can_ever_be_room_for_are_a_mistake() -> None:
    with running(new_decoder(), max_texts=1, max_queue=1) as server:
        assert server.chat(n=2, temperature=1).status_code == 200
        server.settle()
        for path, body, param in (
            ("chat/completions", {**CHAT, "n": 3}, "n"),
            ("completions", {"prompt": ["x", "y"], "n": 2}, "n"),
            ("completions", {"prompt": ["x", "y", "z"]}, "prompt"),
        ):
            answer = server.http.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert "at most 2 choices" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_traces_decode_each_token_once(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(new_decoder()) as server:
        tokenizer, decoded = server.service.decoder.tokenizer, list[int]()
        decode = type(tokenizer).decode

        def counted(self: Any, tokens: Any, *more: Any, **how: Any) -> Any:
            if current_thread().name != "outpace-writes":  # which writes the text
                decoded.extend(tokens)
            return decode(self, tokens, *more, **how)

        monkeypatch.setattr(type(tokenizer), "decode", counted)
        for body in (
            {**CHAT, "logprobs": True, "top_logprobs": 20, "trace": True},
            {"prompt": "x", "logprobs": 20, "trace": True},
        ):
            path = "chat/completions" if "messages" in body else "completions"
            for _ in range(2):
                answer = server.http.post(f"/v1/{path}", json={**body, "max_tokens": 60, "stream": stream})
                assert answer.status_code == 200
        assert len(decoded) == len({*decoded})
        assert 20 < len(decoded) <= 257


def test_a_complete_answers_logprobs_are_written_as_they_come(server: Running) -> None:
    """While the model waits before its last token, those of the others are texts already."""
    worker = server.service._worker
    assert worker is not None
    server.service.words.clear()

    def near() -> bool:
        return any(len(job.result.sources) >= 5 for job in worker._jobs.values())

    body = {**CHAT, "logprobs": True, "top_logprobs": 20, "max_tokens": 60, "speculative": False}
    with ThreadPoolExecutor(1) as threads, server.paused(when=near):
        answer = threads.submit(server.http.post, "/v1/chat/completions", json=body)
        wait_until(lambda: len(server.service.words) > 20)
        assert not answer.done()
    assert len(answer.result().json()["choices"][0]["logprobs"]["content"]) == 60


POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class TestArrival:
    """A request that does not arrive in time is given up."""

    @pytest.fixture(scope="class")
    def impatient(self) -> Iterator[Running]:
        with running(new_decoder(), arrival=0.3) as found:
            yield found

    def connected(self, server: Running) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        found.settimeout(LONG)
        return found

    @pytest.mark.parametrize(
        ("sent", "answered"),
        [
            (b"", False),
            (POST[:-2], False),
            (POST + b"Content-Length: 100\r\n\r\n{", False),
            (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", False),
            (POST.replace(b"json", b"text") + b"Content-Length: 100\r\n\r\n{", True),  # refused before its body
            (GET + b"G", True),  # the next one
            (GET + GET[:-2], True),
            (GET + POST + b"Content-Length: 100\r\n\r\n{", True),
        ],
    )
    def test_what_does_not_end_is_closed(self, impatient: Running, sent: bytes, answered: bool) -> None:
        with self.connected(impatient) as connection:
            connection.sendall(sent)
            found = read_all(connection)
        assert found.startswith(b"HTTP/1.1 ") == answered, found

    def test_what_comes_byte_by_byte_is_closed(self, impatient: Running) -> None:
        def trickle(connection: socket.socket) -> None:
            end = time.monotonic() + LONG
            while time.monotonic() < end:
                connection.sendall(b"y")
                time.sleep(0.01)

        with self.connected(impatient) as connection:
            connection.sendall(GET[:-4] + b"\r\nx: ")
            with pytest.raises(OSError):
                trickle(connection)

    def test_what_has_arrived_takes_its_time(self) -> None:
        """Neither an answer that is long in coming nor a pause between two requests ends the connection."""
        body = json.dumps({"prompt": "x", "max_tokens": 3, "temperature": 0}).encode()
        with running(new_decoder(), arrival=LONG) as server, self.connected(server) as connection:
            wait_until(lambda: server.server.server_state.connections)
            (other,) = server.server.server_state.connections
            assert isinstance(other, Connection)
            assert other._late is not None
            for _ in range(2):
                with server.paused():
                    connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                    wait_until(lambda: server.service.open)
                    assert other._late is None
                assert read_answer(connection).startswith(b"HTTP/1.1 200")
                server.settle()
                assert other._late is None


def read_answer(connection: socket.socket) -> bytes:
    """One answer, which may come in several pieces."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(2**16)
    length = re.search(rb"content-length: (\d+)", found)
    assert length
    whole = found.index(b"\r\n\r\n") + 4 + int(length[1])
    while len(found) < whole:
        found += connection.recv(2**16)
    return found


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    found = b""
    with suppress(ConnectionError):
        while part := connection.recv(2**16):
            found += part
    return found


def test_a_method_is_prepared_once_and_not_by_the_decoding_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(new_decoder()) as server:
        decoder, asked = server.service.decoder, list[tuple[Any, str]]()
        prepare = decoder.prepare

        def watched(method: Any, **settings: Any) -> Any:
            if isinstance(method, str):
                asked.append((method, current_thread().name))
            return prepare(method, **settings)

        monkeypatch.setattr(decoder, "prepare", watched)
        for _ in range(2):
            assert server.chat(method="jacobi").status_code == 200
            assert server.chat(method="medusa").json()["error"]["param"] == "method"
            assert server.chat(speculative=False).status_code == 200
        assert [name for name, _ in asked] == ["jacobi", "medusa"]
        assert all(thread.startswith("outpace-reads") for _, thread in asked)
