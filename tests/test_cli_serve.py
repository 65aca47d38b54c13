"""`outpace serve` and `outpace chat` as processes: what they print, how they end, what they refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import httpx
import pytest

from outpace import cli, load
from outpace.models.hf import HFModel

from .serving import LONG, new_decoder
from .test_cli import assert_refused, generate, outpace


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokens are bytes."""
    place = tmp_path_factory.mktemp("served")
    decoder = new_decoder(context=512)
    decoder.tokenizer.save_pretrained(place)
    decoder._defaults._model.save_pretrained(place)
    return place


def started(*arguments: object, stdin: Any = None, code: str | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *(["-m", "outpace"] if code is None else ["-c", code]), *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )


def test_it_says_where_it_is_and_ends_by_a_signal(folder: Path) -> None:
    process = started("serve", "--model", folder, "--device", "cpu", "--port", 0, "--name", "mine")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("outpace: mine is ready at http://127.0.0.1:")
    assert line.endswith(" (fast)\n")
    url = line.split(" at ")[1].split()[0]
    ask = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=LONG).json()
    expected = load(str(folder), device="cpu", method="autoregressive").generate("hello", max_new_tokens=8)
    assert answer["choices"][0]["message"]["content"] == expected.text
    process.send_signal(signal.SIGTERM)
    _, logged = process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert "loading mine" in logged
    assert "POST /v1/chat/completions 200" in logged
    assert "hello" not in logged


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_it_while_the_model_is_loaded(folder: Path, number: int) -> None:
    endless = (
        "import sys, threading, outpace.decoder as decoder; from outpace.cli import main\n"
        "decoder.load = lambda *a, **k: (print('loads', flush=True), threading.Event().wait())\n"
        "main()"
    )
    process = started("serve", "--model", folder, "--device", "cpu", "--port", 0, code=endless)
    assert process.stdout is not None
    assert process.stdout.readline() == "loads\n"
    process.send_signal(number)
    _, logged = process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert "stopping before the model is loaded" in logged
    assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], ["--host 0.0.0.0", "--api-key-file"]),
        (["--method", "magic"], ["unknown method 'magic'"]),
        (["--api-key-file", "/nothing"], ["--api-key-file /nothing cannot be read: No such file"]),
        (["--model", "nothing"], ["unknown model 'nothing': there is no such folder"]),
    ],
)
def test_what_serve_refuses(folder: Path, arguments: list[str], words: list[str]) -> None:
    assert_refused(outpace("serve", "--model", folder, "--device", "cpu", *arguments), *words)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from outpace import serve

    monkeypatch.setattr(serve, "NEEDED", ("fastapi", "no_such_package"))
    assert_refused(outpace("serve", "--model", folder), "no_such_package", "pip install 'outpace[serve]'")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(outpace("serve", "--model", tmp_path / "none", "--port", 0, "--device", "cpu"), "none")


def test_chat_remembers_and_begins_anew(folder: Path) -> None:
    options = ("--model", folder, "--device", "cpu", "--max-new-tokens", 9, "--method", "autoregressive")
    result = outpace("chat", *options, stdin="hello\n\nagain\n/new\nhello\n")
    decoder = load(str(folder), device="cpu", method="autoregressive")
    first = decoder.generate([{"role": "user", "content": "hello"}], max_new_tokens=9).text
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "again"},
    ]
    second = decoder.generate(turns, max_new_tokens=9).text
    assert result.exit_code == 0
    assert result.stdout == f"{first}\n{second}\n{first}\n"
    assert "tokens" in result.stderr
    assert ">" not in result.stderr  # nobody types


def test_chat_has_commands(folder: Path) -> None:
    result = outpace("chat", "--model", folder, "--device", "cpu", stdin="/help\n/nope\n/new\n/exit\nhello\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert all(word in result.stderr for word in ("/new", "/exit", "Ctrl-D", "unknown command /nope", "a new chat"))


def test_an_interrupt_stops_the_answer_and_not_the_chat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, stopped = HFModel.forward, list[bool]()

    def interrupted(self: HFModel, pool: Any, rows: Any, *given: Any, **more: Any) -> Any:
        if not stopped and int(rows.positions[-1]) == 20:  # some tokens behind the prompt
            stopped.append(True)
            signal.raise_signal(signal.SIGINT)
        return forward(self, pool, rows, *given, **more)

    monkeypatch.setattr(HFModel, "forward", interrupted)
    options = ("--model", folder, "--device", "cpu", "--max-new-tokens", 400, "--method", "autoregressive")
    result = outpace("chat", *options, stdin="hello\n/help\n")
    assert result.exit_code == 0
    assert re.search(r"stopped, autoregressive: \d tokens(.|\n)*/help shows this", result.stderr)


@pytest.mark.slow
def test_an_interrupt_of_the_process_stops_the_answer_and_not_the_chat(folder: Path) -> None:
    """The model is slowed down, so that the answer is interrupted in its midst."""
    slow = (
        "import time, outpace.models.hf as hf; from outpace.cli import main\n"
        "forward = hf.HFModel.forward\n"
        "hf.HFModel.forward = lambda *a, **k: (time.sleep(0.05), forward(*a, **k))[1]\n"
        "main()"
    )
    options = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "400", "--method", "autoregressive"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", slow, "chat", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    late = Timer(LONG, process.kill)
    late.daemon = True
    late.start()
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    said = b""
    while b"autoregressive:" not in said:  # the answer has ended
        part = os.read(process.stderr.fileno(), 4096)
        assert part, said
        said += part
    assert b"stopped, autoregressive:" in said
    _, said = process.communicate(b"/help\n")
    late.cancel()
    assert process.returncode == 0
    assert b"/help shows this" in said


def test_generate_has_grammars_logprobs_and_predictions(folder: Path, tmp_path: Path) -> None:
    schema, expected = tmp_path / "schema.json", tmp_path / "expected.txt"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
    result = generate(folder, "--json-schema", schema, "--json", "--logprobs", 2, "--max-new-tokens", 60)
    found = json.loads(result.stdout)
    assert isinstance(json.loads(found["text"] if found["finish_reason"] == "stop" else '{"a": true}')["a"], bool)
    assert len(found["logprobs"]) == found["new_tokens"]
    assert len(found["logprobs"][0]["top"]) == 2
    assert generate(folder, "--regex", "(yes|no)", "--max-new-tokens", 9).stdout.strip() in ("yes", "no")
    expected.write_text(generate(folder, "--max-new-tokens", 20).stdout)
    again = generate(folder, "--max-new-tokens", 20, "--prediction", expected)
    assert again.stdout == generate(folder, "--max-new-tokens", 20).stdout
    assert_refused(generate(folder, "--regex", "("), "regex cannot be used")
    assert_refused(generate(folder, "--regex", "a", "--json-schema", schema), "cannot be combined")
    assert_refused(generate(folder, "--json-schema", tmp_path / "none"), "--json-schema")
    assert_refused(generate(folder, "--logprobs", 1), "--logprobs needs --json")
    assert_refused(generate(folder, "--regex", "a", "--trace", tmp_path / "t"), "--trace")
