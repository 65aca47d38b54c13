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
BETWEEN = " \r\n\t,;]}"  # may come between calls; small models often write a } too many
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


def finder(style: str, tools: Collection[str]) -> Calls:
    """A parser for calls of these tools."""
    return Calls(tools, bare=style != "hermes")


@dataclass(frozen=True)
class Found:
    """A piece of the response: text, or part of a call."""

    text: str = ""
    call: int | None = None  # the number of its call
    name: str | None = None  # given once, when it is known
    arguments: str = ""


class Calls:
    """Parses tool calls incrementally. The result does not depend on how the text is split.

    A block of calls is an object, several, or a list of them, between <tool_call> and </tool_call>; bare calls are one
    block, with which the response starts. An object that names none of the tools is text.

    >>> calls = Calls(["f"])
    >>> [calls.push(piece) for piece in ('Hi <tool', '_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')][1]
    [Found(text='', call=0, name='f', arguments=''), Found(text='', call=0, name=None, arguments='{"a": 1}')]
    """

    def __init__(self, tools: Collection[str], bare: bool = False) -> None:
        self._tools, self._bare = tools, bare
        self._count = 0  # calls so far
        self._within = self._first = bare  # whether a block is open, and whether it has had no call yet
        self._held = ""  # what may turn out to be text, since the last call
        self._call: _Call | None = None
        self._mark = ""  # what may turn out to be END, behind part of a call

    def push(self, text: str) -> list[Found]:
        """More of the response."""
        found: list[Found] = []
        while text:
            if not self._within:
                said, text = self._outside(text)
                found.append(Found(said))
                continue
            place = 0
            while self._within and place < len(text):
                found += self._letter(text[place])
                place += 1
            text = text[place:]
        return _merged(found)

    def finish(self) -> list[Found]:
        """The response has ended. An unfinished call is kept as it is; anything else is text."""
        found: list[Found] = []
        if self._within and (self._first or not END.startswith(self._held.strip(BETWEEN))):
            found = self._text()
        elif self._within:
            self._held = ""
        return _merged([*found, Found(self._held)])

    def _outside(self, text: str) -> tuple[str, str]:
        """What is text, and what comes behind the start of a block."""
        if self._bare:
            return text, ""
        before, mark, after = (self._held + text).partition(BEGIN)
        if mark:
            self._within, self._first, self._held = True, True, mark
            return before, after
        kept = _overlap(before)
        self._held = before[len(before) - kept :]
        return before[: len(before) - kept], ""

    def _letter(self, letter: str) -> list[Found]:
        """A character of a block."""
        if self._call is None or self._call.number is None:
            self._held += letter
        if self._call is None:
            begun = self._begun()
            if begun == END and not self._bare:
                return self._close()
            if not begun.startswith("{"):
                marks = MARKS if self._bare else (END,)
                return [] if any(mark.startswith((f"[{begun}", begun)) for mark in marks) else self._text()
            self._call = _Call()
        elif not (self._bare or self._call.quoted) and END.startswith(self._mark + letter):
            self._mark += letter
            return self._close() if self._mark == END else []
        # A second "<" may be the start of END.
        letters, self._mark = (self._mark, "<") if self._mark and letter == "<" else (self._mark + letter, "")
        return self._called(self._call, self._call.push(letters))

    def _begun(self) -> str:
        """What is held of the next call, without what is before it."""
        held = self._held.removeprefix(BEGIN) if self._first else self._held.lstrip(BETWEEN)
        for mark in MARKS if self._bare else ():
            held = held.lstrip().removeprefix(mark)
        return held.lstrip().removeprefix("[").lstrip()

    def _called(self, call: _Call, arguments: str) -> list[Found]:
        """More of a call."""
        found: list[Found] = []
        if call.number is None and call.name is not None:
            if call.name not in self._tools:
                return self._text()
            call.number, self._held, self._first = self._count, "", False
            self._count += 1
            found.append(Found(call=call.number, name=call.name))
        if arguments:
            found.append(Found(call=call.number, arguments=arguments))
        if call.ended:
            if call.number is None:
                return self._text()
            found += self._done(call)
            self._call, self._held = None, ""
        return found

    def _close(self) -> list[Found]:
        """The end of a block. A call that it cuts off is kept as it is."""
        if self._call is not None and self._call.number is not None:
            found = self._done(self._call)
        elif self._first or self._held.strip(BETWEEN) != END:
            return self._text()
        else:
            found = []
        self._within, self._held, self._mark, self._call = False, "", "", None
        return found

    def _done(self, call: _Call) -> list[Found]:
        """Arguments for a call that has none."""
        return [] if call.given else [Found(call=call.number, arguments="{}")]

    def _text(self) -> list[Found]:
        """What is held is text, but for its end, if a block may start there."""
        held = self._held if self._first else self._held.lstrip(BETWEEN)
        kept = 0 if self._bare else _overlap(held)
        self._within, self._held, self._mark, self._call = False, held[len(held) - kept :], "", None
        return [Found(held[: len(held) - kept])]


def _overlap(text: str) -> int:
    """How many characters at the end of a text may be the start of BEGIN."""
    return next((size for size in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:size])), 0)


def _merged(found: Sequence[Found]) -> list[Found]:
    """Merges neighbouring pieces of text, and of one call's arguments."""
    merged: list[Found] = []
    for piece in found:
        if piece == Found():
            continue
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
        self.name: str | None = None
        self.number: int | None = None
        self.ended = False  # whether the object is complete
        self.quoted = False  # whether the next character is in a string
        self.given = False  # whether it has arguments
        self._depth = 0
        self._escaped = False
        self._key: str | None = None  # the key at depth 1 whose value is being read
        self._word = ""  # the last string at depth 1
        self._open = False  # whether the value is that of the arguments
        self._waiting = ""  # arguments that came before the name

    def push(self, text: str) -> str:
        """More of the object. Returns new arguments, once the name is known."""
        arguments = "".join(self._letter(letter) for letter in text)
        self.given = self.given or bool(arguments)
        if self.name is None:
            self._waiting += arguments
            return ""
        arguments, self._waiting = self._waiting + arguments, ""
        return arguments

    def _letter(self, letter: str) -> str:
        """One character; the arguments that it adds."""
        if self.quoted:
            self._word += letter if self._depth == 1 else ""
            self.quoted = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
            return self._inner(letter)
        if letter == '"':
            self.quoted, self._word = True, letter if self._depth == 1 else self._word
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            inner = self._inner(letter)
            self._depth -= 1
            return inner or (self._end_value() if self._depth == 0 else "")
        elif self._depth == 1 and letter == ":" and self._key is None:
            self._key, self._word = _string(self._word), ""
            self._open = self._key in _ARGUMENTS and not self.given
            return ""
        elif self._depth == 1 and letter == ",":
            return self._end_value()
        return self._inner(letter)

    def _inner(self, letter: str) -> str:
        """A character of an object or a list that is the arguments."""
        return letter if self._open and self._depth > 1 else ""

    def _end_value(self) -> str:
        """The end of a value at depth 1; the arguments, if they were written as a string, as some models do."""
        value, arguments = _string(self._word), ""
        if self._key == "name" and self.name is None:
            self.name = value or None
        elif self._open and not self.given:
            arguments = value
        self._key, self._word, self._open, self.ended = None, "", False, self._depth == 0
        return arguments


def _string(written: str) -> str:
    """A string's value; an empty one for what is no string."""
    try:
        found = json.loads(written)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""
