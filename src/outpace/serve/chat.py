"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from copy import deepcopy
from time import time
from typing import Any

from ..draft import Step
from ..grammar import Constraint, Grammar
from .faults import Fault
from .fields import ChatRequest, ResponseFormat, Tool, ToolChoice
from .pieces import figures, likely, new_id, trace
from .prompts import chat_tokens, text_of
from .service import Reply, Service
from .streams import Event, Form
from .tools import Found, finder, forced, style_of
from .worker import Order


async def orders_of(service: Service, asked: ChatRequest, salt: str) -> list[Order]:
    """The sequences that a chat request asks for."""
    service.check_model(asked.model)
    decoder, method = service.decoder, await service.method_of(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise Fault("top_logprobs needs logprobs: true.", param="top_logprobs")
    tools, must = chosen_tools(asked.tools, asked.tool_choice)
    grammar = grammar_of(asked.response_format) if must is None else forced(must, style(service))
    service.check_count(asked.n or 1)
    samplings = service.samplings_of(asked, asked.n or 1)
    settings = {} if asked.chat_template_kwargs is None else asked.chat_template_kwargs.model_dump(exclude_none=True)
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    limit = asked.max_completion_tokens or asked.max_tokens or service.settings.max_new_tokens
    constraint = None
    if grammar is not None:
        constraint = await _compiled(service, grammar, must)
    predicted = None if asked.prediction is None else text_of(asked.prediction.content, "prediction")

    def prepare() -> list[Order]:
        tokens = chat_tokens(decoder, asked.messages, tools, settings)
        expected = decoder.encode(predicted, raw=True, add_special_tokens=False) if predicted else []
        common: dict[str, Any] = {
            "max_new_tokens": service.limit_of(tokens, limit, "messages"),
            "stop": stop,
            "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
            "prediction": expected[: service.context] or None,
            "salt": salt,
        }
        found = []
        for sampling in samplings:
            follows = None if constraint is None else constraint.copy(len(tokens))
            found.append(Order(tokens, method, {**common, "sampling": sampling, "grammar": follows}))
        return found

    return await service.off_loop(prepare)


def style(service: Service) -> str:
    """The model's format of tool calls."""
    return style_of(str(getattr(service.decoder.tokenizer, "chat_template", None)))


def callable_tools(asked: ChatRequest) -> list[str]:
    """The names of the tools that the response may call."""
    return [] if asked.tool_choice == "none" else [tool.function.name for tool in asked.tools or ()]


async def _compiled(service: Service, grammar: Grammar, must: Sequence[dict[str, Any]] | None) -> Constraint:
    """A grammar to copy for each choice; a Fault if it cannot be used. must: the tools of which it forces a call."""
    if must is None:
        return await service.compiled(grammar, "response_format")
    try:
        return await service.compiled(grammar, "tools")
    except Fault as fault:
        if fault.code != "invalid_schema" or isinstance(fault.__cause__, asyncio.TimeoutError):
            raise
        reason = _reason(fault)
        names = [tool["function"]["name"] for tool in must]
        whose = f"the tool {names[0]!r}" if len(names) == 1 else "the tools together"
        for name, tool in zip(names, must if len(must) > 1 else (), strict=False):
            if why := await _unusable(service, tool):
                whose, reason = f"the tool {name!r}", why
                break
        message = f"the parameters of {whose} cannot be used: {reason}"
        raise Fault(message, param="tools", code="invalid_schema") from fault


async def _unusable(service: Service, tool: dict[str, Any]) -> str:
    """What is wrong with a tool's parameters, if anything."""
    try:
        await service.compiled(forced([tool]), "tools")
    except Fault as fault:
        if fault.code != "invalid_schema":  # the server is busy, or stops
            raise
        return _reason(fault)
    return ""


def _reason(fault: Fault) -> str:
    """What is wrong with a schema within a grammar of ours."""
    return str(fault).removeprefix("the lark cannot be used: ").rpartition("failed to compile JSON schema: ")[2]


def grammar_of(asked: ResponseFormat | None) -> Grammar | None:
    """The grammar that the response must follow, if any."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.json_schema is None:
        raise Fault("json_schema is missing.", param="response_format")
    return Grammar.json_schema(asked.json_schema.schema_)


def chosen_tools(
    tools: Sequence[Tool] | None, choice: str | ToolChoice | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The tools in the prompt, and the list from which the model must call one, if any."""
    known = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    if choice == "none":
        return [], None
    if choice in (None, "auto"):
        return known, None
    if isinstance(choice, ToolChoice):
        named = [tool for tool in known if tool["function"]["name"] == choice.function.name]
        if not named:
            raise Fault(f"there is no tool {choice.function.name[:64]!r}.", param="tool_choice")
        return known, named
    if not known:
        raise Fault("tool_choice needs tools.", param="tool_choice")
    return known, known


class Choice:
    """One choice of a response, as it is generated."""

    def __init__(self, service: Service, asked: ChatRequest) -> None:
        """It is parsed for calls of the tools that the request has."""
        tools = callable_tools(asked)
        self.text = ""
        self.finish: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.finds_calls = bool(tools)
        self._found = finder(style(service), tools) if tools else None
        self._one = asked.parallel_tool_calls is False  # all calls but the first are left out

    def take(self, step: Step) -> list[dict[str, Any]]:
        """The deltas of a step."""
        found = [Found(step.text)] if self._found is None else self._found.push(step.text)
        if step.finish is not None:
            found += [] if self._found is None else self._found.finish()
        found = [piece for piece in found if not (self._one and piece.call)]
        deltas = [self._delta(piece) for piece in found if piece.text or piece.call is not None]
        if step.finish is not None:
            self.finish = "tool_calls" if self.calls and step.finish == "stop" else step.finish
        return deltas

    def _delta(self, piece: Found) -> dict[str, Any]:
        if piece.call is None:
            self.text += piece.text
            return {"content": piece.text}
        if piece.name is not None:
            call = {
                "id": new_id("call_"),
                "type": "function",
                "function": {"name": piece.name, "arguments": piece.arguments},
            }
            self.calls.append(call)
            return {"tool_calls": [{"index": piece.call, **deepcopy(call)}]}
        self.calls[piece.call]["function"]["arguments"] += piece.arguments
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.arguments}}]}

    def message(self) -> dict[str, Any]:
        """The complete message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text or None if self.calls else self.text}
        if self.calls:
            found["tool_calls"] = self.calls
        return found


async def whole(service: Service, asked: ChatRequest, salt: str) -> dict[str, Any]:
    """The complete response."""
    orders, created = await orders_of(service, asked, salt), int(time())
    choices = [Choice(service, asked) for _ in orders]
    chances: list[list[dict[str, Any]]] = [[] for _ in orders]
    traces: list[list[dict[str, Any]]] = [[] for _ in orders]
    async with service.ask(orders) as reply:
        async for batch in reply.batches():  # all is written as it comes, and not in one long go at the end
            for place, step in batch:
                choices[place].take(step)
                if asked.logprobs:
                    chances[place] += likely(service.words, [step])
                if asked.trace:
                    traces[place].append(trace(service.words, step))
    found = []
    for place, choice in enumerate(choices):
        logprobs = {"content": chances[place], "refusal": None} if asked.logprobs else None
        entry = {"index": place, "message": choice.message(), "logprobs": logprobs, "finish_reason": choice.finish}
        found.append({**entry, "trace": traces[place]} if asked.trace else entry)
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": created,
        "model": service.name,
        "choices": found,
        "usage": reply.usage(),
        **figures(reply.jobs),
    }


async def streamed(service: Service, asked: ChatRequest, salt: str) -> AsyncGenerator[Event, None]:
    """The response as a stream."""
    orders, name = await orders_of(service, asked, salt), new_id("chatcmpl-")
    choices = [Choice(service, asked) for _ in orders]
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
    head = {"id": name, "object": "chat.completion.chunk", "created": int(time()), "model": service.name}
    empty: dict[str, Any] = {"usage": None} if wants_usage else {}
    words = service.words
    begun: set[int] = set()
    # Most events differ from the last only in their text.
    plainly = not (choices[0].finds_calls or asked.logprobs or asked.trace)
    content = {"delta": {"content": Form.PLACE}, "finish_reason": None}
    forms = [Form({**head, "choices": [{"index": place, **content}], **empty}) for place in range(len(orders))]
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            for place, steps in _by_place(batch).items():
                if plainly and place in begun and steps[-1].finish is None:
                    if text := "".join([step.text for step in steps]):
                        yield forms[place].filled(text)
                    continue
                deltas = [delta for step in steps for delta in choices[place].take(step)]
                deltas = _merged(deltas)
                if place not in begun:
                    begun.add(place)
                    deltas = [{"role": "assistant", "content": ""}, *deltas]
                for number, delta in enumerate(deltas or ([{}] if asked.logprobs or asked.trace else [])):
                    more: dict[str, Any] = {}
                    last = number == max(len(deltas) - 1, 0)
                    if asked.logprobs:
                        entries = likely(words, steps) if last else []
                        more["logprobs"] = {"content": entries, "refusal": None}
                    if asked.trace and last:
                        more["trace"] = [trace(words, step) for step in steps]
                    choice = {"index": place, "delta": delta, **more, "finish_reason": None}
                    yield None, {**head, "choices": [choice], **empty}
                if choices[place].finish is not None:
                    choice = {"index": place, "delta": {}, "finish_reason": choices[place].finish}
                    yield None, {**head, "choices": [choice], **empty}
        if wants_usage:
            yield None, {**head, "choices": [], "usage": reply.usage(), **figures(reply.jobs)}
    yield None, "[DONE]"


def _by_place(batch: Sequence[tuple[int, Step]]) -> dict[int, list[Step]]:
    found: dict[int, list[Step]] = {}
    for place, step in batch:
        found.setdefault(place, []).append(step)
    return found


def _merged(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges neighbouring text deltas: a slow reader gets fewer events."""
    merged: list[dict[str, Any]] = []
    for delta in deltas:
        if merged and "content" in delta and "content" in merged[-1]:
            merged[-1] = {"content": merged[-1]["content"] + delta["content"]}
        else:
            merged.append(delta)
    return merged


__all__ = ["Choice", "Reply", "chosen_tools", "grammar_of", "orders_of", "streamed", "whole"]
