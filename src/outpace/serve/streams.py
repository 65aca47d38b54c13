"""Answers that a client may not wait for: it goes, and its texts end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .faults import fault_of

T = TypeVar("T")
ALIVE = 15.0  # seconds without an event until a comment says that the stream lives


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to. If the client goes, it is cancelled."""
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
    """Server-sent events, from what a generator gives: (name of the event or None, data).

    The answer begins with the first event. Until then an error is an HTTP error; later it is an event.
    """

    def __init__(self, events: AsyncGenerator[tuple[str | None, Any], None]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, unless the client goes."""
        with suppress(ClientGone):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        started = False
        try:
            while True:
                coming = asyncio.ensure_future(anext(self._events))
                while started and not (await asyncio.wait({coming}, timeout=ALIVE))[0]:
                    await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
                event = await coming
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                await send({"type": "http.response.body", "body": encoded(*event), "more_body": True})
        except StopAsyncIteration:
            pass
        except Exception as error:
            if not started:
                raise
            body = encoded(None, fault_of(error).body)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def encoded(name: str | None, data: Any) -> bytes:
    """An event as it goes over the wire."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
