"""The server process: address, signals, shutdown."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from types import FrameType

import uvicorn

from ..errors import InputError
from ..files import reason
from .application import build
from .connection import Connection
from .service import Service
from .settings import Settings, Source

log = logging.getLogger("outpace.serve")
PATIENCE = 2  # seconds for connections to close after all sequences have ended
UNREAD = 8  # times max_headers: larger headers close the connection, unread; up to there the guard says why
IDLE = 75  # seconds until an idle connection is closed: after clients do, who would fail if they still used it


class Server(uvicorn.Server):
    """At the first SIGTERM or Ctrl-C it rejects new requests and finishes open ones. The second stops it at once."""

    def __init__(self, source: Source, settings: Settings, drain: float = 30.0) -> None:
        app = build(source, settings)
        self.service: Service = app.state.service
        self._drain, self._until = drain, 0.0
        connection = type("Connection", (Connection,), {"seconds": settings.arrival})
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                http=connection,
                h11_max_incomplete_event_size=UNREAD * settings.max_headers,
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=PATIENCE,
                server_header=False,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: drain, or stop if draining already."""
        if self._until:
            super().handle_exit(sig, frame)
            return
        self._until = monotonic() + self._drain
        if self.service.state == "loading":
            log.info("stopping before the model is loaded")
        else:
            log.info("stopping, once the requests under way are answered")
        self.service.drain()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: stop once drained, or if the model could not be loaded."""
        if self._until and not self.should_exit and (self.service.open == 0 or monotonic() > self._until):
            await self.service.abort()
            self.should_exit = True
        if self.service.state == "failed":
            self.should_exit = True
        return await super().on_tick(counter)


def listen(host: str, port: int, has_key: bool) -> socket.socket:
    """A socket at an address. One that others can reach needs a key."""
    if not is_loopback(host) and not has_key:
        raise InputError(
            f"--host {host} can be reached from other machines. Give API keys with --api-key-file, or use 127.0.0.1."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}. Try another --port.") from error


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The API keys in a file, one per line."""
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeError) as error:
        raise InputError(f"--api-key-file {path} cannot be read: {reason(error)}.") from error
    if not keys:
        raise InputError(f"--api-key-file {path} has no keys. Put one on each line.")
    return keys


def run(
    source: Source, settings: Settings, place: socket.socket, drain: float, on_ready: Callable[[Server], None]
) -> None:
    """Serve until a signal comes. Raises the error if the model could not be loaded."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", force=False)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = Server(source, settings, drain)
    server.service.on_ready = lambda: on_ready(server) if server.service.state == "ready" else None
    server.run(sockets=[place])
    if server.service.error is not None:
        raise server.service.error
    if server.service.loads:  # Python would wait for what its thread is doing, or crash
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
