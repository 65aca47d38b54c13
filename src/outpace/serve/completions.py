"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from time import time
from typing import Any

from ..draft import Step
from .fields import CompletionRequest
from .pieces import LEAST, Words, figures, new_id, trace
from .prompts import raw_tokens
from .service import Service
from .streams import Event, Form
from .worker import Order

USUAL = 16  # OpenAI's default for max_tokens


async def orders_of(service: Service, asked: CompletionRequest, salt: str) -> tuple[list[Order], int]:
    """The sequences of a request, in the order of its prompts, and the number of prompts."""
    service.check_model(asked.model)
    decoder, method = service.decoder, await service.method_of(asked)
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

    def __init__(self, words: Words) -> None:
        self.all: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._words = words
        self._offset = 0

    def add(self, step: Step) -> None:
        """Keep those of a new step."""
        for name, values in self.take([step]).items():
            self.all[name] += values

    def take(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Those of new steps."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for step in steps:
            for token, entry in zip(step.tokens, step.logprobs, strict=True):
                text = self._words[token]
                found["tokens"].append(text)
                found["token_logprobs"].append(max(entry.chance, LEAST))
                best = {self._words[other]: max(chance, LEAST) for other, chance in entry.best}
                found["top_logprobs"].append({**best, text: max(entry.chance, LEAST)})
                found["text_offset"].append(self._offset)
                self._offset += len(text)
        return found


async def whole(service: Service, asked: CompletionRequest, salt: str) -> dict[str, Any]:
    """The complete response."""
    (orders, prompts), created = await orders_of(service, asked, salt), int(time())
    chances = [_Chances(service.words) for _ in orders]
    traces: list[list[dict[str, Any]]] = [[] for _ in orders]
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            for place, step in batch:
                if asked.logprobs is not None:
                    chances[place].add(step)
                if asked.trace:
                    traces[place].append(trace(service.words, step))
    choices = []
    for place, job in enumerate(reply.jobs):
        entry = {
            "index": place,
            "text": job.result.text,
            "logprobs": None if asked.logprobs is None else chances[place].all,
            "finish_reason": job.result.finish_reason,
        }
        choices.append({**entry, "trace": traces[place]} if asked.trace else entry)
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
    words = service.words
    chances = [_Chances(words) for _ in orders]
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
                    choice["trace"] = [trace(words, step) for step in steps]
                yield None, {**head, "choices": [choice], **empty}
        if wants_usage:
            yield None, {**head, "choices": [], "usage": reply.usage(prompts), **figures(reply.jobs)}
    yield None, "[DONE]"
