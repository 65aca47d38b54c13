"""Settings of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..decoder import Decoder
from ..errors import InputError

Source: TypeAlias = "Decoder | Callable[[], Decoder]"
"""A decoder, or a function that loads one."""


@dataclass(frozen=True)
class Settings:
    """Settings of a server."""

    name: str | None = None  # of the model, for clients; None: the model's own
    max_texts: int = 64  # sequences decoded at the same time
    max_queue: int = 256  # sequences that may wait
    api_keys: tuple[str, ...] = ()  # clients must send one of them; none: no key is needed
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")  # allowed Host headers; none: any
    deadline: float = 600.0  # seconds per request
    arrival: float = 30.0  # seconds for the headers and the body of a request to arrive
    max_body: int = 4 * 2**20  # bytes
    max_headers: int = 2**14  # bytes
    max_n: int = 16  # choices of a request, over all its prompts
    max_new_tokens: int = 4096  # of requests that set no limit
    max_length: int | None = None  # tokens of prompt and answer; None: the model's context
    slots: int = 2**14  # of the KV cache on a CPU, in tokens; at least the model's context
    keep: int | None = None  # prefix cache, in tokens; None: up to all slots on a GPU, 4096 elsewhere
    warm: bool = True  # prepare all step sizes before the first request

    def __post_init__(self) -> None:
        for name in ("max_texts", "max_queue", "max_body", "max_headers", "max_n", "max_new_tokens", "slots"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}={value!r} must be 1 or more, a whole number.")
        if self.max_length is not None and (not isinstance(self.max_length, int) or self.max_length < 2):
            raise InputError(f"max_length={self.max_length!r} must be 2 or more, a whole number.")
        if self.keep is not None and self.keep < 0:
            raise InputError(f"keep={self.keep!r} must be 0 or more.")
        for name in ("deadline", "arrival"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)!r} must be a number of seconds above 0.")
        for key in self.api_keys:
            if not key or not key.isascii() or any(letter.isspace() for letter in key):
                raise InputError("an API key must be non-empty ASCII text without spaces.")
