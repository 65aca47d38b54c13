"""What whoever runs a server may set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..decoder import Decoder
from ..errors import InputError

Source: TypeAlias = "Decoder | Callable[[], Decoder]"
"""A decoder, or what loads one."""


@dataclass(frozen=True)
class Settings:
    """How a server behaves."""

    name: str | None = None  # of the model, as clients say it; None: the model's own
    max_texts: int = 64  # that are written at the same time
    max_queue: int = 256  # that may wait
    api_keys: tuple[str, ...] = ()  # one of them must be sent; none: nobody is asked
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")  # names the server goes by; none: any
    deadline: float = 600.0  # seconds for a request
    max_body: int = 4 * 2**20  # bytes
    max_headers: int = 2**14  # bytes
    max_n: int = 16  # texts of a request, its prompts included
    max_new_tokens: int = 4096  # where a request does not say
    max_length: int | None = None  # of a text, its prompt included; None: the model's context
    slots: int = 2**14  # of the KV cache, where it is not sized by a GPU's memory; at least the model's context
    keep: int | None = None  # slots of ended texts that are kept; None: all on a GPU, 4096 where rows look at all slots
    warm: bool = True  # make every size of step before the first request

    def __post_init__(self) -> None:
        for name in ("max_texts", "max_queue", "max_body", "max_headers", "max_n", "max_new_tokens", "slots"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}={value!r} must be 1 or more, a whole number.")
        if self.max_length is not None and (not isinstance(self.max_length, int) or self.max_length < 2):
            raise InputError(f"max_length={self.max_length!r} must be 2 or more, a whole number.")
        if self.keep is not None and self.keep < 0:
            raise InputError(f"keep={self.keep!r} must be 0 or more.")
        if not self.deadline > 0:
            raise InputError(f"deadline={self.deadline!r} must be a number of seconds above 0.")
        for key in self.api_keys:
            if not key or not key.isascii() or any(letter.isspace() for letter in key):
                raise InputError("an API key must be ASCII text without spaces, and not empty.")
