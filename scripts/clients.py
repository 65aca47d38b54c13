"""Clients of a server, in a separate process, so that they take no time from it. `load.py` starts them.

Each line on standard input is a job in JSON: {"port", "key", "clients", "seconds", "bodies"}, or "count" requests
instead of "seconds". Each client has one connection, and sends its next request when the last is answered. The result
is a line on standard output: a list of [start, first byte of the response, end, prompt tokens, new tokens, error], with
"texts" also the number of the request and its answers, each with its finish reason. Times are the machine's monotonic
clock, so that they can be compared with those of other processes. A body may have "at", the earliest second of the job
at which it is sent, and "leave": the client disconnects after this many seconds. Only the standard library is used.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any


class Connection(asyncio.Protocol):
    """Sends one request after the other. A response is parsed only when it is complete."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.parts: list[bytes] = []
        self.first = 0.0
        self.tail = b""  # the last bytes received
        self.streams: bool | None = None
        self.missing = 0  # bytes to come, of a response with a known length
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result("the connection was lost")

    def data_received(self, data: bytes) -> None:
        self.first = self.first or time.monotonic()
        self.parts.append(data)
        if self.streams is None:
            self._read_head()
        elif not self.streams:
            self.missing -= len(data)
        self.tail = (self.tail + data)[-5:]
        ended = self.tail == b"0\r\n\r\n" if self.streams else self.streams is False and self.missing <= 0
        if ended and not self.done.done():
            self.done.set_result(None)

    def _read_head(self) -> None:
        head, end, body = b"".join(self.parts).partition(b"\r\n\r\n")
        if end:
            length = re.search(rb"content-length: *(\d+)", head, re.I)
            self.streams = length is None
            self.missing = int(length[1]) - len(body) if length else 0

    async def ask(self, head: bytes, body: bytes, leave: float | None) -> tuple[bytes, str | None]:
        """The response's bytes, and the error, if any."""
        self.parts, self.first, self.tail, self.streams, self.missing = [], 0.0, b"", None, 0
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        try:
            wrong = await asyncio.wait_for(self.done, leave)
        except asyncio.TimeoutError:
            self.transport.abort()
            return b"".join(self.parts), "left"
        answer = b"".join(self.parts)
        if wrong is None and not answer.startswith(b"HTTP/1.1 200"):
            wrong = refusal_of(answer)
        if wrong is None and (b'data: {"error"' in answer or (self.streams and b"data: [DONE]" not in answer)):
            wrong = "the stream broke off"
        return answer, wrong


def refusal_of(answer: bytes) -> str:
    """The status line of a response that is not 200, and its error message."""
    head, _, body = answer.partition(b"\r\n\r\n")
    said = re.search(rb'"message": ?"((?:[^"\\]|\\.)*)"', body)
    return head.split(b"\r\n")[0].decode() + (f": {said[1].decode()}" if said else "")


def count_of(answer: bytes, name: bytes) -> int:
    """A number from the response's usage."""
    found = re.findall(rb'"%s": ?(\d+)' % name, answer)
    return int(found[-1]) if found else 0


def texts_of(answer: bytes) -> list[list[str | None]]:
    """The text of each choice, and why it ended; of a stream that was left, as far as it came."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if re.search(rb"content-length:", head, re.I):
        choices = json.loads(body)["choices"]
        return [[choice["message"]["content"], choice["finish_reason"]] for choice in choices]
    found: dict[int, list[str | None]] = {}
    for event in re.findall(rb"^data: (\{.*\})\r?$", body, re.M):
        for choice in json.loads(event).get("choices", []):
            text = found.setdefault(choice["index"], ["", None])
            text[0] = (text[0] or "") + (choice["delta"].get("content") or "")
            text[1] = choice["finish_reason"] or text[1]
    return [found[index] for index in sorted(found)]


async def client(number: int, job: dict[str, Any], found: list[list[Any]]) -> None:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{job['port']}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {job['key']}\r\n"
    ).encode()
    loop, turn, begin = asyncio.get_running_loop(), number, time.monotonic()
    end = begin + job.get("seconds", 1e9)
    connection: Connection | None = None
    while time.monotonic() < end and (turn < job["count"] if "count" in job else True):
        body = {**job["bodies"][turn % len(job["bodies"])]}
        leave = body.pop("leave", None)
        await asyncio.sleep(body.pop("at", 0.0) - (time.monotonic() - begin))
        if connection is None or connection.transport.is_closing():
            _, connection = await loop.create_connection(Connection, "127.0.0.1", job["port"])
        start = time.monotonic()
        answer, wrong = await connection.ask(head, json.dumps(body).encode(), leave)
        read, written = count_of(answer, b"prompt_tokens"), count_of(answer, b"completion_tokens")
        there = wrong is None or (wrong == "left" and connection.streams)
        more = [turn, texts_of(answer) if there else []] if job.get("texts") else []
        found.append([start, connection.first, time.monotonic(), read, written, wrong, *more])
        turn += job["clients"]
    if connection is not None:
        connection.transport.close()


async def run(job: dict[str, Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    await asyncio.gather(*(client(number, job, found) for number in range(job["clients"])))
    return found


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
