"""Authentication and size limits, as the outermost ASGI middleware."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from hashlib import sha256
from time import perf_counter
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import OutpaceError
from .faults import Fault, fault_of
from .settings import Settings

log = logging.getLogger("outpace.serve")
OPEN = ("/health", "/")  # need no key: the page is a static file, and asks the user for the key


class Guard:
    """Checks API key, Host, Origin, and the sizes of headers and body. Logs requests, never their contents.

    Answers what the application raises: above this layer, the server would close the connection behind the answer, and
    a client that has sent its next request on it would see a reset.

    Calls `begin` at every request: nobody else starts a mounted application.
    """

    def __init__(self, app: ASGIApp, settings: Settings, begin: Callable[[], None]) -> None:
        self.app, self.settings, self._begin = app, settings, begin
        self._hosts = {name.lower() for name in settings.hosts}
        self._digests = [sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})  # before it is accepted: servers answer 403
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, read = perf_counter(), 499, 0
        started = ended = False

        async def watched(message: Message) -> None:
            nonlocal status, started, ended
            if message["type"] == "http.response.start":
                status, started = message["status"], True
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self.settings.max_body:  # raised inside the application, which handles Faults
                    raise HTTPException(413, str(_too_large(self.settings)))
            return message

        try:
            self._check(scope)
            self._begin()
            await self.app(scope, limited, watched)
        except Exception as error:
            if started:
                status, ended = 500, True
                raise
            if not isinstance(error, (Fault, OutpaceError)):
                log.exception("a request failed")
            await fault_of(error).response()(scope, receive, watched)
        finally:
            spent = 1000 * (perf_counter() - start)
            status = status if ended else 499  # the client left
            log.info("%s %s %d %.0f ms", scope["method"], quote(scope["path"]), status, spent)

    def _check(self, scope: Scope) -> None:
        headers = _headers(scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self.settings.max_headers:
            raise Fault(f"the headers are larger than {self.settings.max_headers} bytes.", 431)
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._hosts and name.removesuffix(".") not in self._hosts:
            raise Fault(f"the Host {name!r} is not a name of this server.", 403, code="invalid_host")
        origin = headers.get("origin")
        if origin is not None and _place(origin) != host:
            raise Fault("requests from other sites are not allowed.", 403, code="invalid_origin")
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if self._digests and path not in OPEN and not self._knows(_bearer(headers)):
            message = "a valid API key is needed: send the header Authorization: Bearer KEY."
            raise Fault(message, 401, code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Fault("the body must be JSON: send the header Content-Type: application/json.", 415)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > self.settings.max_body:
            raise _too_large(self.settings)

    def _knows(self, key: str) -> bool:
        """Compares with every key, in constant time."""
        given = sha256(key.encode("utf-8", "surrogateescape")).digest()
        return sum([hmac.compare_digest(given, digest) for digest in self._digests]) > 0


def _too_large(settings: Settings) -> Fault:
    return Fault(f"the body is larger than {settings.max_body} bytes.", 413, code="body_too_large")


def _place(origin: str) -> str | None:
    """The host and port of an Origin, in lower case; None if it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _headers(scope: Scope) -> dict[str, str]:
    """By name; of duplicates the last."""
    found: dict[str, Any] = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    return found


def _bearer(headers: dict[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
