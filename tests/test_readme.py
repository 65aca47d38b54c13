"""The Python of the README and of the docs runs as it stands, but that texts are shorter; their commands are known.

The README's commands are run, too.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.main import get_command

from outpace.cli import app
from outpace.models import loading

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_PYTHON = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


loaded = functools.lru_cache(loading.load)  # pages may share a model


@pytest.mark.embedded
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.loading.load", loaded)
    monkeypatch.setattr("outpace.decoder.load_model", loaded)
    names: dict[str, object] = {"__name__": "__main__"}
    length = 16 if "\nassert " in page.read_text(encoding="utf-8") else 4
    for block in blocks(page, "python"):
        short = re.sub(r"max_new_tokens=\d+", f"max_new_tokens={length}", block)
        exec(compile(short, str(page), "exec", dont_inherit=True), names)


def commands(*pages: Path) -> list[str]:
    found = [line for page in pages for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()]
    return [part.strip() for line in found for part in line.split("&&")]


@pytest.mark.parametrize("command", sorted({call for call in commands(*PAGES) if call.startswith("outpace ")}))
def test_commands(command: str) -> None:
    """Every option there is, and every command."""
    words = shlex.split(re.split(" [<>] ", command)[0], comments=True)[1:]
    root = get_command(app)
    context = root.make_context("outpace", list(words))
    name, found, rest = root.resolve_command(context, words)  # type: ignore[attr-defined]
    found.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")  # no page was lost
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


BIN = Path(sys.executable).parent
HERE = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.slow
@pytest.mark.embedded
def test_the_commands_of_the_readme_work_one_after_the_other(tmp_path: Path) -> None:
    """Those that follow installation. What wants a GPU or a file is asked for its help; the server is stopped again."""

    def run(*words: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(words, cwd=cwd, env=HERE, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    inline = re.findall(r"`(outpace [^`]+)`", README.read_text(encoding="utf-8"))
    calls = [shlex.split(call, comments=True) for call in [*inline, *commands(README)]]
    for words in calls:
        match words:
            case ["pip", *_] | ["make", "test"] | ["curl", *_]:
                continue  # what is here already, what this belongs to, and what the server is asked below
            case ["make", "demo"]:
                assert "identical" in run("make", "-f", str(ROOT / "Makefile"), "demo", "READY=", f"BIN={BIN}")
                assert {file.name for file in (tmp_path / "out").iterdir()} == {"race.html", "methods.html"}
            case ["outpace", "verify"]:
                run(*words, "--help")
            case ["outpace", "serve", *_]:
                [asked] = [call for call in calls if call[0] == "curl"]
                with serving(words) as url:
                    answer = run(*(word.replace("http://127.0.0.1:8000", url) for word in asked), "--silent")
                assert json.loads(answer)["choices"][0]["message"]["content"]
            case ["outpace", *_]:
                run(*words)
            case _:
                assert words[0] == "python", words
                run(*words[:3], "--help", cwd=ROOT)
    assert {words[0] for words in calls} == {"curl", "make", "outpace", "pip", "python"}


@contextmanager
def serving(words: list[str]) -> Iterator[str]:
    """The server's address, while it runs."""
    with subprocess.Popen([*words, "--port", "0"], env=HERE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split(" at ")[1].split()[0]
        finally:
            server.terminate()
    assert server.returncode == 0
