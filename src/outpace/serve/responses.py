"""`/v1/responses`, stateless: nothing is stored, and every request has its whole conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import time
from typing import Any, TypeAlias

from pydantic import ValidationError

from .chat import Choice, orders_of
from .faults import Fault, fault_of
from .fields import (
    Call,
    Called,
    ChatRequest,
    FlatChoice,
    Function,
    InputItem,
    JsonSchema,
    Message,
    NamedFunction,
    ResponseFormat,
    ResponsesRequest,
    Tool,
    ToolChoice,
)
from .pieces import figures, new_id
from .prompts import text_of
from .service import Reply, Service

Named: TypeAlias = tuple[str, dict[str, Any]]  # an event


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    """The request as a chat request; a Fault if it is too large for one."""
    try:
        return _as_chat(asked)
    except ValidationError as error:
        raise Fault(f"the input is not a chat: {error.errors()[0]['msg']}.", param="input") from error


def _as_chat(asked: ResponsesRequest) -> ChatRequest:
    items = [InputItem(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
    messages = [Message(role="developer", content=asked.instructions)] if asked.instructions else []
    for item in items:
        _add(messages, item)
    choice = asked.tool_choice
    named = None if choice is None or isinstance(choice, str) else choice.name
    common = set(ResponsesRequest.model_fields) & set(ChatRequest.model_fields) - {"tools", "tool_choice", "stream"}
    return ChatRequest(
        **{name: getattr(asked, name) for name in common},
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        response_format=_format(asked),
        tools=None
        if asked.tools is None
        else [
            Tool(
                type="function",
                function=Function(name=tool.name, description=tool.description, parameters=tool.parameters),
            )
            for tool in asked.tools
        ],
        tool_choice=choice  # type: ignore[arg-type]
        if named is None
        else ToolChoice(type="function", function=NamedFunction(name=named)),
    )


def _add(messages: list[Message], item: InputItem) -> None:
    """The next message, or more of the last: a turn of the model is one, with its text and all its calls."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if item.type == "function_call_output":
        messages.append(Message(role="tool", content=text_of(item.output, "input"), tool_call_id=item.call_id))
    elif item.type == "function_call":
        if not item.name:
            raise Fault("a function_call has no name.", param="input")
        call = Call(id=item.call_id or "", function=Called(name=item.name, arguments=item.arguments or ""))
        before = messages.pop() if last else Message(role="assistant", tool_calls=[])
        messages.append(
            Message(role="assistant", content=before.content, tool_calls=[*(before.tool_calls or ()), call])
        )
    else:
        role = item.role or "user"
        if item.content is None:
            raise Fault(f"a message of the {role} has no content.", param="input")
        calls = messages.pop().tool_calls if last and last.content is None and role == "assistant" else None
        messages.append(Message(role=role, content=text_of(item.content, "input"), tool_calls=calls))


def _format(asked: ResponsesRequest) -> ResponseFormat | None:
    found = asked.text.format if asked.text else None
    if found is None:
        return None
    if found.type == "json_schema" and found.schema_ is None:
        raise Fault("the schema is missing.", param="text.format.schema")
    schema = None if found.schema_ is None else JsonSchema.model_validate({"name": found.name, "schema": found.schema_})
    return ResponseFormat(type=found.type, json_schema=schema)


class _Output:
    """The items of a response as they grow: messages and calls. The last one is open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._blank = ""  # whitespace that is part of a message only if more text follows

    def take(self, delta: dict[str, Any]) -> list[Named]:
        """The events of a chat's delta."""
        events: list[Named] = []
        if "content" in delta:
            events += self._say(delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._blank = ""
                events += self._add(_called(call))
            if written := call["function"]["arguments"]:
                self.items[-1]["arguments"] += written
                events.append(("response.function_call_arguments.delta", {**self._place(), "delta": written}))
        return events

    def finish(self, short: bool) -> list[Named]:
        """The last events. short: whether the limit of tokens was reached."""
        empty = [] if self.items else [*self._add(_message()), *self._write(self._blank)]
        return [*empty, *self._end("incomplete" if short else "completed")]

    def _say(self, text: str) -> list[Named]:
        text, self._blank = self._blank + text, ""
        if self.items and self.items[-1]["type"] == "message":
            return self._write(text)
        if text.strip():
            return [*self._add(_message()), *self._write(text)]
        self._blank = text
        return []

    def _write(self, text: str) -> list[Named]:
        self.items[-1]["content"][0]["text"] += text
        return [("response.output_text.delta", {**self._place(), "delta": text, "logprobs": []})] if text else []

    def _add(self, item: dict[str, Any]) -> list[Named]:
        events = self._end("completed") if self.items else []
        self.items.append(item)
        shown = {**item, "content": []} if item["type"] == "message" else {**item}
        events.append(("response.output_item.added", {"output_index": len(self.items) - 1, "item": shown}))
        if item["type"] == "message":
            events.append(("response.content_part.added", {**self._place(), "part": {**item["content"][0]}}))
        return events

    def _end(self, status: str) -> list[Named]:
        item, place = self.items[-1], self._place()
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events: list[Named] = [
                ("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
                ("response.content_part.done", {**place, "part": part}),
            ]
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [("response.function_call_arguments.done", {**place, **told})]
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _place(self) -> dict[str, Any]:
        place = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        return {**place, "content_index": 0} if self.items[-1]["type"] == "message" else place


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": []}
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [part],
    }


def _called(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": call["id"].replace("call_", "fc_"),
        "type": "function_call",
        "status": "in_progress",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": "",
    }


class _Shape:
    """What all states of a response have."""

    def __init__(self, service: Service, asked: ResponsesRequest) -> None:
        choice, given = asked.tool_choice, asked.text.format if asked.text else None
        form: dict[str, Any] = {"type": given.type if given else "text"}
        if given is not None and given.type == "json_schema":
            form |= {"name": given.name, "schema": given.schema_}
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time()),
            "error": None,
            "model": service.name,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "text": {"format": form},
            "tools": [{"strict": False, **tool.model_dump()} for tool in asked.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto",
            "metadata": {},
        }

    def begun(self) -> dict[str, Any]:
        """A response without output."""
        return {**self._head, "status": "in_progress", "incomplete_details": None, "output": []}

    def ended(self, output: _Output, short: bool, reply: Reply) -> dict[str, Any]:
        """A complete response."""
        return {
            **self._head,
            "status": "incomplete" if short else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": output.items,
            "usage": _usage(reply),
            **figures(reply.jobs),
        }


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


async def whole(service: Service, asked: ResponsesRequest, salt: str) -> dict[str, Any]:
    """The complete response."""
    chat = as_chat(asked)
    orders = await orders_of(service, chat, salt)
    shape, choice, output = _Shape(service, asked), Choice(service, chat), _Output()
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            for delta in [delta for _, step in batch for delta in choice.take(step)]:
                output.take(delta)
    short = choice.finish == "length"
    output.finish(short)
    return shape.ended(output, short, reply)


async def streamed(
    service: Service, asked: ResponsesRequest, salt: str
) -> AsyncGenerator[tuple[str | None, Any], None]:
    """The response as a stream of named and numbered events."""
    number = 0
    try:
        async with aclosing(_events(service, asked, salt)) as events:
            async for kind, fields in events:
                yield kind, {"type": kind, "sequence_number": number, **fields}
                number += 1
    except Exception as error:
        if number == 0:
            raise
        fault = fault_of(error)
        told = {"code": fault.code, "message": str(fault), "param": fault.param}
        yield "error", {"type": "error", "sequence_number": number, **told}


async def _events(service: Service, asked: ResponsesRequest, salt: str) -> AsyncGenerator[Named, None]:
    chat = as_chat(asked)
    orders = await orders_of(service, chat, salt)
    shape, choice, output = _Shape(service, asked), Choice(service, chat), _Output()
    begun = False
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            if not begun:
                begun = True
                yield "response.created", {"response": shape.begun()}
                yield "response.in_progress", {"response": shape.begun()}
            for delta in [delta for _, step in batch for delta in choice.take(step)]:
                for event in output.take(delta):
                    yield event
        short = choice.finish == "length"
        for event in output.finish(short):
            yield event
        last = shape.ended(output, short, reply)
        yield f"response.{last['status']}", {"response": last}


__all__ = ["as_chat", "streamed", "whole"]
