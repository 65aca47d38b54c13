"""The endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from reprlib import repr as shown
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from .. import __version__
from . import chat, completions, responses
from .faults import Fault
from .fields import ChatRequest, CompletionRequest, DetokenizeRequest, ResponsesRequest, TokenizeRequest
from .guard import Guard
from .prompts import chat_tokens, raw_tokens
from .service import Service
from .settings import Settings, Source
from .streams import ClientGone, Events, unless_gone

# The page loads no other files, connects to this server only, and cannot be framed.
SAFE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def build(source: Source, settings: Settings) -> FastAPI:
    """The application. `app.state.service` holds what requests share."""
    service = Service(source, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="Outpace", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Guard, settings=settings, begin=service.start)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, lambda _, error: Response(status_code=499))
    started = int(time())

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        ready = service.state == "ready"
        return JSONResponse({"status": "ok" if ready else service.state}, 200 if ready else 503)

    @app.head("/", include_in_schema=False)
    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(_page(), headers={"Content-Security-Policy": SAFE})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def card() -> dict[str, Any]:
        name = service.name
        about = {"id": name, "object": "model", "created": started, "owned_by": "outpace", "root": name}
        return {**about, "max_model_len": service.context, "method": service.decoder.method.name}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return card()

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await _answer(chat, service, asked, request)

    @app.post("/v1/completions")
    async def text_completions(asked: CompletionRequest, request: Request) -> Response:
        return await _answer(completions, service, asked, request)

    @app.post("/v1/responses")
    async def stateless_responses(asked: ResponsesRequest, request: Request) -> Response:
        return await _answer(responses, service, asked, request)

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        decoder = service.decoder
        if (asked.prompt is None) == (asked.messages is None):
            raise Fault("give prompt or messages, not both.", param="prompt")

        def encode() -> list[int]:
            if asked.messages is not None:
                return chat_tokens(decoder, asked.messages, [], {})
            return raw_tokens(decoder, asked.prompt or "")

        tokens = await service.off_loop(encode)
        return {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        decoder = service.decoder
        largest = max(asked.tokens, default=0)
        if largest >= decoder.model.vocabulary:
            raise Fault(f"token id {largest} is not below {decoder.model.vocabulary}.", param="tokens")
        return {"prompt": await service.off_loop(lambda: decoder.tokenizer.decode(asked.tokens))}

    return app


async def _answer(kind: Any, service: Service, asked: Any, request: Request) -> Response:
    """A streaming or a complete response, unless the client disconnects."""
    salt = request.headers.get("authorization", "")
    if asked.stream:
        return Events(kind.streamed(service, asked, salt))
    return JSONResponse(await unless_gone(request.receive, kind.whole(service, asked, salt)))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()  # for a union field, one error per alternative
    first = min(found, key=lambda item: item["type"].endswith("_type"))
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return Fault(f"the body is not JSON: {why}, at character {place[0] if place else 0}.").response()
    param = ".".join(part for part in place if part.isidentifier() or part.isdigit())  # not pydantic's names of types
    if first["type"] == "missing":
        message = f"{param or 'the body'} is missing."
    else:
        message = f"{param or 'the body'}={shown(first.get('input'))}: {first['msg']}."
    return Fault(message, param=place[0] if place else None).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, path = str(error.detail), request.url.path
    if error.status_code == 404:
        message = f"there is no {path} here. The API is at /v1/chat/completions, /v1/completions and /v1/responses."
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}. Use {(error.headers or {}).get('Allow', 'POST')}."
    return Fault(message, error.status_code, code="body_too_large" if error.status_code == 413 else None).response()


@cache
def _page() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")
