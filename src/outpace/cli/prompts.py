"""`--prompts`: a file of prompts, and the other fields of its lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import PROMPT_FIELDS, read_prompt_lines

PLAIN = "Plain prompts, one per line, need a file that ends in .txt."


@dataclass(frozen=True)
class Entry:
    """One line: the user's turns, the messages before the first, and other fields, copied to the output."""

    turns: list[str]
    before: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    plain: bool = True  # a single string, for which the chat template is optional


def read_entries(path: Path, system: str, raw: bool) -> list[Entry]:
    """The prompts of JSON lines (`prompt`, `question`, `instruction`, `turns`, `messages`), or of plain lines."""
    first = [{"role": "system", "content": system}] if system else []
    entries = []
    for number, line in read_prompt_lines(path):
        entry = Entry([line]) if ".txt" in path.suffixes else _entry(f"{path}, line {number}", line)
        if raw and not (entry.plain and not system):
            raise InputError(f"{path}, line {number}: turns, messages and --system need the chat template, not --raw.")
        begins = bool(entry.before) and entry.before[0]["role"] == "system"
        entries.append(entry if begins else Entry(entry.turns, [*first, *entry.before], entry.fields, entry.plain))
    return entries


def _entry(where: str, line: str) -> Entry:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError
    except ValueError:
        raise InputError(f"{where}: {line[:60]!r} is not a JSON object. {PLAIN}") from None
    if "messages" in found:
        messages = found.pop("messages")
        if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
            raise InputError(f"{where}: messages must be a list of objects with role and content.")
        if messages[-1]["role"] != "user":
            raise InputError(f"{where}: the last message has the role {messages[-1]['role']!r}; it must be 'user'.")
        return Entry([messages[-1]["content"]], messages[:-1], found, plain=False)
    name = next((name for name in ("turns", *PROMPT_FIELDS) if name in found), None)
    turns = found.pop(name) if name else None
    turns = [turns] if isinstance(turns, str) else turns
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)):
        raise InputError(f"{where}: {line[:60]!r} has no {', '.join(PROMPT_FIELDS)}, turns or messages.")
    return Entry(turns, [], found, plain=len(turns) == 1)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
