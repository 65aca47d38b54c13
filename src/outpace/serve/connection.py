"""Connections whose requests must arrive in time."""

from __future__ import annotations

from asyncio import BaseTransport, TimerHandle
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closes a connection if the headers and the body of a request do not arrive in time.

    uvicorn's own limit holds between two requests only: it ends with the first byte of the next.
    """

    seconds: float  # for each request, from its first byte on; for the first one, from the beginning
    _late: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        """A client has connected."""
        super().connection_made(cast(Any, transport))
        self._late = self.loop.call_later(self.seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._arrived()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Called with new data, and when a response is complete: the next request may be there already."""
        super().handle_events()
        state = self.conn.their_state
        if not (state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])):
            self._arrived()
        elif self._late is None:
            self._late = self.loop.call_later(self.seconds, self.transport.abort)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
