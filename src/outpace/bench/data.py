"""Questions to measure on: our own, or files of Spec-Bench, MT-Bench, HumanEval, its infilling, GSM8K, MBPP, ClassEval.

A file is JSON lines or one JSON list, gzipped or not. Its kind is recognized by its entries:

    turns, category           Spec-Bench, MT-Bench    task: chat, translation, summarization, qa, math_reasoning, rag
    question, answer          GSM8K                   gsm8k
    prompt, suffix            HumanEval infilling     infilling
    prompt, entry_point       HumanEval               humaneval
    prompt or text, test_list MBPP                    mbpp
    skeleton                  ClassEval               classeval

Prompts are used as they are in the file; for infilling, the gap is marked, and a sentence asks to fill it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, UnknownNameError
from ..files import reason
from .prompts import PROMPTS

_GAP = "# to be written"
_FILL = f"Write the part of this Python code that belongs in place of the line `{_GAP}`:\n\n"
_SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")  # its other categories are MT-Bench's


@dataclass(frozen=True)
class Question:
    """What a user says, turn by turn."""

    task: str
    number: int  # from 0, within the task
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()  # reference answers for the first turns, if the file has any


def own_questions() -> list[Question]:
    """The prompts that come with Outpace."""
    return _numbered(Question(task, 0, (prompt,)) for task, group in PROMPTS.items() for prompt in group)


def read_questions(*paths: Path) -> list[Question]:
    """The questions of some files. An InputError names the line."""
    found = list[Question]()
    for path in paths:
        entries = list(_entries(path))
        if not entries:
            raise InputError(f"{path} is empty. Give a file of questions.")
        found += [_question(entry, place) for place, entry in entries]
    return _numbered(found)


def choose_questions(questions: Sequence[Question], tasks: Sequence[str], each: int) -> list[Question]:
    """The first `each` questions (0: all) of each of these tasks (none: all)."""
    known = list(dict.fromkeys(question.task for question in questions))
    for task in tasks:
        if task not in known:
            raise UnknownNameError("task", task, known)
    if each < 0:
        raise InputError(f"--each {each} must be 0 (all) or more.")
    return [
        question
        for question in questions
        if (not tasks or question.task in tasks) and (not each or question.number < each)
    ]


def _numbered(found: Iterable[Question]) -> list[Question]:
    counts = Counter[str]()
    questions = []
    for question in found:
        questions.append(replace(question, number=counts[question.task]))
        counts[question.task] += 1
    return questions


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each entry of the file, with its location for error messages."""
    text = _text(path)
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path} is not a complete JSON list: {error}.") from error
        for number, entry in enumerate(listed, 1):
            yield f"{path}, entry {number}", entry
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error}).") from error
        yield f"{path}, line {number}", entry


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return content.decode()
    except (OSError, EOFError) as error:
        raise InputError(f"{path} could not be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text. Give a file of questions: JSON lines, or a JSON list.") from error


def _question(entry: Any, place: str) -> Question:
    """A question, not yet numbered."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{place}: expected an object, found {json.dumps(entry)[:40]}.")
    if "turns" in entry and "category" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise InputError(f"{place}: turns must be a non-empty list of strings.")
        category = str(entry["category"])
        task = category if category in _SPEC_BENCH else "chat"
        return Question(task, 0, tuple(_checked(turn, "turns", place) for turn in turns), _references(entry))
    if "prompt" in entry and "suffix" in entry:
        before, after = _checked(entry["prompt"], "prompt", place), entry["suffix"]
        if not isinstance(after, str):  # it is empty where the gap is at the end
            raise InputError(f"{place}: suffix must be a string.")
        return Question("infilling", 0, (f"{_FILL}{before}{_GAP}\n{after}",), _references(entry, "canonical_solution"))
    for task, text, mark, reference in (
        ("humaneval", "prompt", "entry_point", "canonical_solution"),
        ("mbpp", "prompt", "test_list", "code"),
        ("mbpp", "text", "test_list", "code"),
        ("gsm8k", "question", "answer", "answer"),
        ("classeval", "skeleton", "skeleton", "solution_code"),
    ):
        if text in entry and mark in entry:
            return Question(task, 0, (_checked(entry[text], text, place),), _references(entry, reference))
    raise InputError(
        f"{place}: this is not an entry of Spec-Bench, MT-Bench, HumanEval, its infilling, GSM8K, MBPP or ClassEval: "
        f"it has {', '.join(map(str, entry)) or 'nothing'}. Expected turns and category; question and answer; prompt "
        "and suffix; prompt and entry_point; prompt and test_list; or skeleton."
    )


def _references(entry: Mapping[str, Any], name: str = "reference") -> tuple[str, ...]:
    found = entry.get(name)
    listed: list[Any] = found if isinstance(found, list) else [found]
    return tuple(listed) if all(isinstance(text, str) for text in listed) else ()


def _checked(text: Any, name: str, place: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{place}: {name} must be a non-empty string.")
    return text
