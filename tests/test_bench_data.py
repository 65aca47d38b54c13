"""Files of questions: every format by its content, and errors that name the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from outpace import InputError
from outpace.bench.data import choose_questions, own_questions, read_questions

ENTRIES: dict[str, dict[str, Any]] = {
    "rag": {"question_id": 1, "category": "rag", "turns": ["Why?"]},
    "chat": {"question_id": 2, "category": "writing", "turns": ["Write.", "Write again."]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""},
    "infilling": {"task_id": "a/0", "prompt": "def f():\n", "suffix": "    return x\n", "entry_point": "f"},
    "gsm8k": {"question": "1 + 1?", "answer": "#### 2"},
    "mbpp": {"task_id": 11, "prompt": "Write a function.", "code": "", "test_list": []},
    "classeval": {"task_id": "ClassEval_0", "skeleton": "class A:\n", "class_name": "A"},
}


@pytest.mark.parametrize("task", ENTRIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_formats_are_known_by_their_content(tmp_path: Path, task: str, packed: bool, listed: bool) -> None:
    entries = [ENTRIES[task]] * 3
    text = json.dumps(entries) if listed else "\n".join(map(json.dumps, entries)) + "\n"
    path = tmp_path / "questions"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    questions = read_questions(path)
    assert [(question.task, question.number) for question in questions] == [(task, number) for number in range(3)]
    assert len(questions[0].turns) == (2 if task == "chat" else 1)
    if task == "infilling":
        assert questions[0].turns[0].endswith("def f():\n# to be written\n    return x\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b'{"question": "a", "answer": "b"}\n\n{"question": "a", "ans', "line 3: not JSON"),
        (b'{"question": "a", "answer": "b"}\n{"question": "a"}', "line 2: this is not an entry of Spec-Bench"),
        (b'{"question": " ", "answer": "b"}', "line 1: question must be a non-empty string"),
        (b'{"category": "qa", "turns": "Why?"}', "line 1: turns must be a non-empty list"),
        (b'{"category": "qa", "turns": ["Why?", 3]}', "line 1: turns must be a non-empty string"),
        (b'[{"skeleton": "a"}, {"skeleton": 5}]', "entry 2: skeleton must be a non-empty string"),
        (b'{"prompt": "a", "suffix": 1}', "line 1: suffix must be a string"),
        (b'[{"skeleton": "a"}', "not a complete JSON list"),
        (b"5\n", "line 1: expected an object"),
        (b"\xff\xfe", "not UTF-8"),
        (gzip.compress(b"{}" * 99, mtime=0)[:-9], "could not be read"),
    ],
)
def test_errors_say_where(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_questions(path)


def test_no_such_file() -> None:
    with pytest.raises(InputError, match="/nowhere could not be read: No such file"):
        read_questions(Path("/nowhere"))


def test_choosing() -> None:
    questions = own_questions()
    assert len(questions) == 48
    chosen = choose_questions(questions, ["math", "code"], 2)
    assert [(question.task, question.number) for question in chosen] == [
        *(("math", 0), ("math", 1)),
        *(("code", 0), ("code", 1)),
    ]
    with pytest.raises(InputError, match="Did you mean 'math'"):
        choose_questions(questions, ["maths"], 0)
    with pytest.raises(InputError, match="--each -1"):
        choose_questions(questions, [], -1)
