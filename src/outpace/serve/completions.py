"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from time import time
from typing import Any

from ..decoder import Decoder
from ..draft import Step
from .fields import CompletionRequest
from .pieces import LEAST, figures, new_id, trace, word
from .prompts import raw_tokens
from .service import Service
from .streams import Event, Form
from .worker import Order

USUAL = 16  # OpenAI's default for max_tokens


async def orders_of(service: Service, asked: CompletionRequest, salt: str) -> tuple[list[Order], int]:
    """The sequences of a request, in the order of its prompts, and the number of prompts."""
    service.check_model(asked.model)
    decoder, method = service.decoder, service.method_of(asked)
    prompt = asked.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    service.check_count(asked.n or 1, len(prompts))
    samplings = service.samplings_of(asked, asked.n or 1)
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []

    def prepare() -> list[Order]:
        common = {"stop": stop, "logprobs": asked.logprobs, "salt": salt}
        found = []
        for tokens in (raw_tokens(decoder, item) for item in prompts):
            limit = service.limit_of(tokens, USUAL if asked.max_tokens is None else asked.max_tokens, "prompt")
            found += [
                Order(tokens, method, {**common, "max_new_tokens": limit, "sampling": sampling})
                for sampling in samplings
            ]
        return found

    return await service.off_loop(prepare), len(prompts)


class _Chances:
    """The logprobs of a choice in the form of completions, with the text offset of each token."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._offset = 0

    def take(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Add those of new steps."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for step in steps:
            for token, entry in zip(step.tokens, step.logprobs, strict=True):
                text = word(self._decoder, token)
                found["tokens"].append(text)
                found["token_logprobs"].append(max(entry.chance, LEAST))
                best = {word(self._decoder, other): max(chance, LEAST) for other, chance in entry.best}
                found["top_logprobs"].append({**best, text: max(entry.chance, LEAST)})
                found["text_offset"].append(self._offset)
                self._offset += len(text)
        return found


async def whole(service: Service, asked: CompletionRequest, salt: str) -> dict[str, Any]:
    """The complete response."""
    (orders, prompts), created = await orders_of(service, asked, salt), int(time())
    steps: list[list[Step]] = [[] for _ in orders]
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            for place, step in batch:
                steps[place].append(step)
    decoder = service.decoder
    choices = []
    for place, job in enumerate(reply.jobs):
        entry: dict[str, Any] = {
            "index": place,
            "text": job.result.text,
            "logprobs": None if asked.logprobs is None else _Chances(decoder).take(steps[place]),
            "finish_reason": job.result.finish_reason,
        }
        if asked.trace:
            entry["trace"] = [trace(decoder, step) for step in steps[place]]
        choices.append(entry)
    return {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": created,
        "model": service.name,
        "choices": choices,
        "usage": reply.usage(prompts),
        **figures(reply.jobs),
    }


async def streamed(service: Service, asked: CompletionRequest, salt: str) -> AsyncGenerator[Event, None]:
    """The response as a stream."""
    orders, prompts = await orders_of(service, asked, salt)
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time()), "model": service.name}
    empty: dict[str, Any] = {"usage": None} if wants_usage else {}
    decoder = service.decoder
    chances = [_Chances(decoder) for _ in orders]
    plainly = not asked.trace and asked.logprobs is None
    blank = {"text": Form.PLACE, "logprobs": None, "finish_reason": None}
    forms = [Form({**head, "choices": [{"index": place, **blank}], **empty}) for place in range(len(orders))]
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            for place in dict.fromkeys(place for place, _ in batch):
                steps = [step for other, step in batch if other == place]
                text, finish = "".join(step.text for step in steps), steps[-1].finish
                if not (text or finish or asked.trace or asked.logprobs is not None):
                    continue
                if plainly and not finish:
                    yield forms[place].filled(text)
                    continue
                choice: dict[str, Any] = {
                    "index": place,
                    "text": text,
                    "logprobs": None if asked.logprobs is None else chances[place].take(steps),
                    "finish_reason": finish,
                }
                if asked.trace:
                    choice["trace"] = [trace(decoder, step) for step in steps]
                yield None, {**head, "choices": [choice], **empty}
        if wants_usage:
            yield None, {**head, "choices": [], "usage": reply.usage(prompts), **figures(reply.jobs)}
    yield None, "[DONE]"
