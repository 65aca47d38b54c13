"""The README's Python runs as it stands, but that texts are shorter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.embedded
def test_python_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        short = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", block)
        exec(compile(short, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "steps" in printed
    assert "def fibonacci(n):" in printed


def test_links_in_the_readme() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
