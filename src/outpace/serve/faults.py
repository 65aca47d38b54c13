"""Errors of requests, in the form that OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from ..errors import InputError, ModelError, OutpaceError

INVALID = "invalid_request_error"


class Fault(Exception):
    """An error response. Its message names the field and the remedy."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after = status, kind, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of an event within a stream."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def busy(seconds: int) -> Fault:
    """The queue is full."""
    return Fault("the server's queue is full. Try again later.", 429, "rate_limit_error", None, "queue_full", seconds)


def not_ready(state: str) -> Fault:
    """The model is being loaded, or the server is shutting down."""
    return Fault(f"the server is {state}. Try again later.", 503, "service_unavailable", None, state, 5)


def too_late(seconds: float) -> Fault:
    """The deadline of a request has passed."""
    message = f"the answer took longer than the deadline of {seconds:g} seconds. Ask for fewer tokens."
    return Fault(message, 408, "timeout", "timeout", "deadline_exceeded")


def fault_of(error: BaseException) -> Fault:
    """The fault that a client sees for an error. Internal errors are logged where they are caught, and not shown."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, InputError | ModelError):
        return Fault(str(error))
    why = "the server failed to generate this answer; see its log."
    if isinstance(error, OutpaceError):  # NaN in the model, or a device that is gone: no request can help it
        why = str(error)
    return Fault(why, 500, "server_error", None, "internal_error")
