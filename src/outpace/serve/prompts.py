"""From the messages of a request to prompt tokens. Runs off the event loop, since long prompts take a while."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from ..decoder import Decoder
from ..errors import OutpaceError
from .faults import Fault
from .fields import Message, Part
from .tools import BEGIN, END, described, style_of


def chat_tokens(
    decoder: Decoder, messages: Sequence[Message], tools: Sequence[dict[str, Any]], settings: dict[str, Any]
) -> list[int]:
    """The tokens of a chat, by the model's chat template."""
    template = getattr(decoder.tokenizer, "chat_template", None)
    if not template:
        raise Fault("this model has no chat template. Use /v1/completions.", param="messages", code="no_chat_template")
    knows = "tools" in str(template)
    chat = [_plain(message, knows, style_of(str(template))) for message in messages]
    given: dict[str, Any] = {"tools": list(tools)} if tools and knows else {}
    if tools and not knows:
        first = chat[0] if chat[0]["role"] == "system" else {"role": "system", "content": ""}
        rest = chat[1:] if first is chat[0] else chat
        chat = [{**first, "content": f"{first['content']}\n\n{described(tools)}".strip()}, *rest]
    try:
        found = decoder.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, **given, **settings
        )
        tokens = list(found)
    except Exception as error:  # templates may raise anything
        raise Fault(f"the model's chat template rejects these messages: {error}", param="messages") from error
    return checked(tokens, "messages")


def raw_tokens(decoder: Decoder, prompt: str | Sequence[int]) -> list[int]:
    """The tokens of a raw prompt."""
    try:
        tokens = decoder.encode(prompt, raw=True)
    except OutpaceError as error:
        raise Fault(str(error), param="prompt") from error
    return checked(tokens, "prompt")


def checked(tokens: list[int], param: str) -> list[int]:
    """The tokens; a Fault if there are none."""
    if not tokens:
        raise Fault("the prompt is empty. Give at least one token.", param=param)
    return tokens


def text_of(content: str | Sequence[Part] | None, param: str) -> str:
    """A message's text. Raises a Fault for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    found = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            raise Fault(f"parts of type {part.type!r} are not supported: only text is.", param=param)
        found.append(text)
    return "".join(found)


def _plain(message: Message, knows_tools: bool, style: str) -> dict[str, Any]:
    """A message as chat templates take it. Templates without tool support get tool calls and results as text."""
    role = "system" if message.role == "developer" else message.role
    text = text_of(message.content, "messages")
    found: dict[str, Any] = {"role": role, "content": text}
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or ()]
    if calls and knows_tools:
        found["tool_calls"] = [
            {
                "type": "function",
                "id": _call_id(asked.id, style),
                "function": {**call, "arguments": _as_object(call["arguments"])},
            }
            for asked, call in zip(message.tool_calls or (), calls, strict=True)
        ]
    elif calls:
        written = [
            f'{BEGIN}\n{{"name": "{call["name"]}", "arguments": {call["arguments"] or "{}"}}}\n{END}' for call in calls
        ]
        found["content"] = "\n".join([*([text] if text else []), *written])
    if role == "tool" and not knows_tools:
        found = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    if role == "tool" and knows_tools and message.tool_call_id is not None:
        found["tool_call_id"] = _call_id(message.tool_call_id, style)
    if message.name is not None:
        found["name"] = message.name
    return found


def _as_object(arguments: str) -> Any:
    """Arguments as an object, which templates write as JSON; a string that is not JSON stays one."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _call_id(name: str, style: str) -> str:
    """The id of a call. Mistral's templates require nine letters or digits."""
    return sha256(name.encode()).hexdigest()[:9] if style == "mistral" else name
