"""Tool calls: how the model is told about tools, how a call is forced, and how calls are parsed from its output.

A call is a JSON object with a name and arguments. Hermes, Qwen and SmolLM write it between <tool_call> and
</tool_call>. With Llama's and Mistral's templates the whole response is a call or a list of calls, marked by special
tokens that detokenized text does not show.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..grammar import Grammar

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # of Mistral and Llama, if the tokenizer shows them
_ARGUMENTS = ("arguments", "parameters")
_ABOUT = """You may call functions. They are listed as JSON between <tools> and </tools>:
<tools>
{tools}
</tools>
To call one, answer with a JSON object with its name and arguments:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def described(tools: Sequence[dict[str, Any]]) -> str:
    """The system prompt for models whose chat template does not support tools."""
    return _ABOUT.format(tools="\n".join(json.dumps(tool) for tool in tools))


def style_of(template: str) -> str:
    """The model's format of tool calls, judged by its chat template: hermes, llama or mistral."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama" if "<|python_tag|>" in template else "hermes"


def forced(tools: Sequence[dict[str, Any]], style: str = "hermes") -> Grammar:
    """A grammar that forces a call of one of these tools."""
    key = "parameters" if style == "llama" else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, key: _apart(tool, number)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    written = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    start = {"llama": "call", "mistral": '"[" call "]"'}.get(style, f'"{BEGIN}\\n" call "\\n{END}"')
    return Grammar.lark(f"start: {start}\ncall: %json {json.dumps({**schema, 'x-guidance': written})}\n")


def _apart(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """A tool's parameters as a schema with an id of its own: its references ("#/$defs/A", "#") start there."""
    schema = tool["function"].get("parameters") or {"type": "object"}
    # Before draft 2019-09, an id beside a $ref has no effect.
    return {**{key: value for key, value in schema.items() if key != "$schema"}, "$id": f"tool:{number}"}


def finder(style: str, tools: Sequence[str]) -> Calls | BareCalls:
    """A parser for calls of these tools."""
    return Calls() if style == "hermes" else BareCalls(tools)


@dataclass(frozen=True)
class Found:
    """A piece of the response: text, or part of a call."""

    text: str = ""
    call: int | None = None  # the number of its call
    name: str | None = None  # given once, when it is known
    arguments: str = ""


class Calls:
    """Parses tool calls incrementally. The result does not depend on how the text is split.

    >>> calls = Calls()
    >>> [calls.push(piece) for piece in ('Hi <tool', '_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')][1]
    [Found(text='', call=0, name='f', arguments=''), Found(text='', call=0, name=None, arguments='{"a": 1}')]
    """

    def __init__(self) -> None:
        self.count = 0  # calls so far that have a name
        self._held = ""  # text that may be the start of a marker
        self._call: _Call | None = None

    def push(self, text: str) -> list[Found]:
        """More of the response."""
        found: list[Found] = []
        self._held += text
        while self._held:
            mark = BEGIN if self._call is None else END
            place = self._held.find(mark)
            if place >= 0:
                found += self._take(self._held[:place])
                self._held = self._held[place + len(mark) :]
                found += self._turn()
                continue
            kept = next((size for size in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:size])), 0)
            found += self._take(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            break
        return _merged(found)

    def finish(self) -> list[Found]:
        """The response has ended. An unfinished call is kept as it is; anything else is text."""
        found = self._take(self._held)
        self._held = ""
        if self._call is not None and self._call.number is None:
            found.append(Found(BEGIN + self._call.text))
        self._call = None
        return _merged(found)

    def _take(self, text: str) -> list[Found]:
        if self._call is None:
            return [Found(text)] if text else []
        arguments = self._call.push(text)
        found = []
        if self._call.name is not None and self._call.number is None:
            self._call.number = self.count
            self.count += 1
            found.append(Found(call=self._call.number, name=self._call.name))
        if arguments:
            found.append(Found(call=self._call.number, arguments=arguments))
        return found

    def _turn(self) -> list[Found]:
        """A marker: a call starts or ends here."""
        if self._call is None:
            self._call = _Call()
            return []
        call, self._call = self._call, None
        return [Found(f"{BEGIN}{call.text}{END}")] if call.number is None else []  # it was not a call


class BareCalls:
    """The same if the whole response is a call or a list of calls. An object that names no tool is text.

    >>> BareCalls(["f"]).push('{"name": "f", "parameters": {"a": 1}}')
    [Found(text='', call=0, name='f', arguments=''), Found(text='', call=0, name=None, arguments='{"a": 1}')]
    """

    def __init__(self, tools: Collection[str]) -> None:
        self.count = 0
        self._tools = tools
        self._held = ""  # text that may be a call
        self._call: _Call | None = None
        self._is_text = False

    def push(self, text: str) -> list[Found]:
        """More of the response."""
        found: list[Found] = []
        for letter in text:
            found += self._letter(letter)
        return _merged(found)

    def finish(self) -> list[Found]:
        """The response has ended. An unfinished call is kept as it is; anything else is text."""
        return self._text() if self._held and not self._is_text else []

    def _letter(self, letter: str) -> list[Found]:
        if self._is_text:
            return [Found(letter)]
        self._held += letter
        if self._call is None:
            begun = self._held.lstrip(" \n\t,;]" if self.count else " \n\t")
            for mark in MARKS:
                begun = begun.removeprefix(mark).lstrip()
            begun = begun.removeprefix("[").lstrip()
            if begun.startswith("{"):
                self._call = _Call()
            elif begun and not any(mark.startswith((f"[{begun}", begun)) for mark in MARKS):
                return self._text()
            else:
                return []
        arguments, found = self._call.push(letter), list[Found]()
        if self._call.number is None and self._call.name is not None:
            if self._call.name not in self._tools:
                return self._text()
            self._call.number, self._held = self.count, ""
            self.count += 1
            found.append(Found(call=self._call.number, name=self._call.name))
        if arguments:
            found.append(Found(call=self._call.number, arguments=arguments))
        if self._call.ended:
            if self._call.number is None:
                return self._text()
            self._call, self._held = None, ""
        return found

    def _text(self) -> list[Found]:
        """The held text is not a call, nor is anything after it."""
        if self._call is not None and self._call.number is not None:
            return []  # a call that was cut off
        self._is_text = True
        held = self._held.strip(" \n\t,;]") if self.count else self._held
        return [Found(held)] if held else []


def _merged(found: Sequence[Found]) -> list[Found]:
    """Merges neighbouring pieces of text, and of one call's arguments."""
    merged: list[Found] = []
    for piece in found:
        if merged and piece.call is None and merged[-1].call is None:
            merged[-1] = Found(merged[-1].text + piece.text)
        elif merged and piece.call == merged[-1].call and piece.name is None and merged[-1].name is None:
            merged[-1] = Found(call=piece.call, arguments=merged[-1].arguments + piece.arguments)
        else:
            merged.append(piece)
    return merged


class _Call:
    """Parses a JSON object character by character: the value of `name`, and that of `arguments` incrementally."""

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.number: int | None = None
        self._depth = 0
        self._in_text = self._escaped = False
        self._key = ""  # the last key at depth 1
        self._value = ""  # its value so far
        self._word = ""  # the string that was read last
        self._behind = False  # whether the colon was read
        self._waiting = ""  # arguments that came before the name

    @property
    def ended(self) -> bool:
        """Whether the object is complete."""
        return self._depth == 0 and bool(self.text.strip())

    def push(self, text: str) -> str:
        """More of the object. Returns new arguments, once the name is known."""
        self.text += text
        arguments = "".join(self._letter(letter) for letter in text)
        if self.name is None:
            self._waiting += arguments
            return ""
        arguments, self._waiting = self._waiting + arguments, ""
        return arguments

    def _letter(self, letter: str) -> str:
        inside = self._behind and self._depth >= 1
        if self._in_text:
            self._word += letter
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_text = False
            return self._part(letter) if inside else ""
        if letter == '"':
            self._in_text, self._word = True, letter
            return self._part(letter) if inside else ""
        if letter in "{[":
            self._depth += 1
            return self._part(letter) if inside else ""
        if letter in "}]":
            self._depth -= 1
            if self._depth >= 1:
                return self._part(letter, closes=True) if inside else ""
            return self._end_value()
        if self._depth == 1 and letter == ":" and not self._behind:
            self._behind, self._key, self._value = True, _text(self._word), ""
            return ""
        if self._depth == 1 and letter == ",":
            return self._end_value()
        return self._part(letter) if inside else ""

    def _part(self, letter: str, closes: bool = False) -> str:
        """A character of the value of a key."""
        if not self._value and letter.isspace():
            return ""
        self._value += letter
        return letter if self._key in _ARGUMENTS and (self._depth > 1 or closes) else ""

    def _end_value(self) -> str:
        if not self._behind:
            return ""
        self._behind = False
        if self._key == "name" and self.name is None:
            self.name = _text(self._value.strip()) or None
        return _text(self._value.strip()) if self._key in _ARGUMENTS else ""  # some models write them as a string


def _text(written: str) -> str:
    try:
        found = json.loads(written)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""
