"""An OpenAI-compatible server: `outpace serve`, or `app(decoder)` to mount it. Needs `pip install 'outpace[serve]'`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .settings import Source

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def check_installed() -> None:
    """Raise InputError if the extra `serve` is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"the server needs {', '.join(missing)}: pip install 'outpace[serve]'.")


def app(decoder: Source, **settings: Any) -> FastAPI:
    """The server as an ASGI application, for a Decoder or for a function that loads one.

    `settings` are those of `outpace.serve.settings.Settings`: max_texts, max_queue, api_keys, ... The application's
    lifespan starts and ends the decoding thread.

    >>> import outpace, outpace.serve
    >>> outpace.serve.app(outpace.load())  # doctest: +SKIP
    """
    check_installed()
    from .application import build
    from .settings import Settings

    return build(decoder, Settings(**settings))
