"""The Python of the README and of the docs runs as it stands, but that texts are shorter; their commands are known."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from outpace.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_PYTHON = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.embedded
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        short = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", block) if "assert " not in block else block
        exec(compile(short, str(page), "exec", dont_inherit=True), names)


def commands() -> list[str]:
    found = [line for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()]
    calls = [part.strip() for line in found for part in line.split("&&")]
    return sorted({call for call in calls if call.startswith("outpace ")})


@pytest.mark.parametrize("command", commands())
def test_commands(command: str) -> None:
    """Every option there is, and every command."""
    words = shlex.split(re.split(" [<>] ", command)[0], comments=True)[1:]
    root = get_command(app)
    context = root.make_context("outpace", list(words))
    name, found, rest = root.resolve_command(context, words)  # type: ignore[attr-defined]
    found.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
