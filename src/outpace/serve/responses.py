"""`/v1/responses`, stateless: nothing is stored, and every request has its whole conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import time
from typing import Any

from pydantic import ValidationError

from .chat import Choice, orders_of
from .faults import Fault
from .fields import (
    Call,
    Called,
    ChatRequest,
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


class _Shape:
    """A response as it grows."""

    def __init__(self, service: Service, asked: ResponsesRequest) -> None:
        self.asked, self.model = asked, service.name
        self.id, self.created = new_id("resp_"), int(time())
        self.message_id = new_id("msg_")

    def response(self, status: str, output: list[dict[str, Any]], reply: Reply | None = None) -> dict[str, Any]:
        asked = self.asked
        finish = None if reply is None else reply.jobs[0].result.finish_reason
        short = status == "completed" and finish == "length"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "incomplete" if short else status,
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "error": None,
            "model": self.model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "text": {"format": {"type": asked.text.format.type if asked.text and asked.text.format else "text"}},
            "tools": [{"strict": False, **tool.model_dump()} for tool in asked.tools or ()],
            "tool_choice": asked.tool_choice if isinstance(asked.tool_choice, str) else "auto",
            "metadata": {},
            **({} if reply is None else {"usage": _usage(reply), **figures(reply.jobs)}),
        }

    def message(self, text: str, status: str = "completed") -> dict[str, Any]:
        content = [] if status == "in_progress" else [_part(text)]
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def output(self, choice: Choice) -> list[dict[str, Any]]:
        found = [self.message(choice.text)] if choice.text or not choice.calls else []
        return [*found, *(_called(call, "completed") for call in choice.calls)]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _called(call: dict[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": call["id"].replace("call_", "fc_"),
        "type": "function_call",
        "status": status,
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


async def whole(service: Service, asked: ResponsesRequest, salt: str) -> dict[str, Any]:
    """The complete response."""
    chat = as_chat(asked)
    orders = await orders_of(service, chat, salt)
    shape, choice = _Shape(service, asked), Choice(service, chat)
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            for _, step in batch:
                choice.take(step)
    return shape.response("completed", shape.output(choice), reply)


async def streamed(
    service: Service, asked: ResponsesRequest, salt: str
) -> AsyncGenerator[tuple[str | None, Any], None]:
    """The response as a stream of named and numbered events."""
    chat = as_chat(asked)
    orders = await orders_of(service, chat, salt)
    shape, choice = _Shape(service, asked), Choice(service, chat)
    number = -1
    items: list[str | int] = []  # the response's items in order: "message", or the number of a call

    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number, **fields}

    started = False
    async with service.ask(orders) as reply:
        async for batch in reply.batches():
            if not started:
                started = True
                yield event("response.created", response=shape.response("in_progress", []))
                yield event("response.in_progress", response=shape.response("in_progress", []))
            for delta in [delta for _, step in batch for delta in choice.take(step)]:
                if "content" in delta:
                    if "message" not in items:
                        items.append("message")
                        place = len(items) - 1
                        at = {"output_index": place, "item_id": shape.message_id, "content_index": 0}
                        yield event(
                            "response.output_item.added", output_index=place, item=shape.message("", "in_progress")
                        )
                        yield event("response.content_part.added", **at, part=_part(""))
                    at = {"output_index": items.index("message"), "item_id": shape.message_id, "content_index": 0}
                    yield event("response.output_text.delta", **at, delta=delta["content"], logprobs=[])
                for call in delta.get("tool_calls", ()):
                    index = call["index"]
                    made = _called(choice.calls[index], "in_progress")
                    if index not in items:
                        items.append(index)
                        made["arguments"] = ""
                        yield event("response.output_item.added", output_index=len(items) - 1, item=made)
                    if call["function"]["arguments"]:
                        yield event(
                            "response.function_call_arguments.delta",
                            output_index=items.index(index),
                            item_id=made["id"],
                            delta=call["function"]["arguments"],
                        )
        done = []
        for place, item in enumerate(items):
            if item == "message":
                at = {"output_index": place, "item_id": shape.message_id, "content_index": 0}
                yield event("response.output_text.done", **at, text=choice.text, logprobs=[])
                yield event("response.content_part.done", **at, part=_part(choice.text))
                done.append(shape.message(choice.text))
            else:
                made = _called(choice.calls[int(item)], "completed")
                yield event(
                    "response.function_call_arguments.done",
                    output_index=place,
                    item_id=made["id"],
                    name=made["name"],
                    arguments=made["arguments"],
                )
                done.append(made)
            yield event("response.output_item.done", output_index=place, item=done[-1])
        last = shape.response("completed", done, reply)
        yield event(f"response.{last['status']}", response=last)


__all__ = ["as_chat", "streamed", "whole"]
