"""Streaming responses, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .faults import fault_of

T = TypeVar("T")
Event: TypeAlias = "tuple[str | None, Any] | bytes"
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
ALIVE = 15.0  # seconds without an event until a keep-alive comment is sent


class ClientGone(Exception):
    """The client has disconnected."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events from a generator of (event name or None, data), or of encoded bytes.

    The response starts with the first event. Before it, an error is an HTTP error; later, an event.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events
        self._quiet = False  # whether nothing was sent for a while

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client disconnects."""
        with suppress(ClientGone):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        alive: asyncio.Task[None] | None = None
        try:
            async for event in self._events:
                if alive is None:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    alive = asyncio.ensure_future(self._keep_alive(send))
                self._quiet = False
                body = event if isinstance(event, bytes) else encoded(*event)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            if alive is None:
                raise
            body = encoded(None, fault_of(error).body)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            if alive is not None:
                alive.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(ALIVE)
            if self._quiet:
                await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})


def encoded(name: str | None, data: Any) -> bytes:
    """An event in wire format."""
    text = data if isinstance(data, str) else to_json(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class Form:
    """Events that differ in one string only: the rest is encoded once.

    >>> Form({"delta": {"content": Form.PLACE}}).filled("hi")
    b'data: {"delta":{"content":"hi"}}\\n\\n'
    """

    PLACE = "\0"  # placeholder for the string

    def __init__(self, data: Any) -> None:
        self._before, _, self._after = encoded(None, data).rpartition(to_json(self.PLACE).encode())

    def filled(self, text: str) -> bytes:
        """The event with this string."""
        return self._before + to_json(text).encode() + self._after
