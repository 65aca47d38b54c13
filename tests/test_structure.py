"""The house: imports point one way, and the public names are as listed."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
from pathlib import Path

import pytest

import outpace

ROOT = Path(outpace.__file__).parent
# A module may import from its own level's package and from the levels before it.
LEVELS = [
    ["errors", "draft"],
    ["files", "limits", "machine"],
    ["picking", "pool", "report", "sending"],
    ["models"],
    ["step"],
    ["sources"],
    ["verifying"],
    ["runtime"],
    ["heads"],
    ["methods"],
    ["loop"],
    ["batch"],
    ["text", "grammar", "prompt", "result"],
    ["options"],
    ["hook", "decoder"],
    ["parallel", "trace"],
    ["receipt", "race", "training"],
    ["bench"],
    ["board"],
    ["chart", "picture"],
    ["reproduce"],
    ["serve"],
    ["cli"],
    ["__main__"],
]
# `Method.__call__` is the door that transformers' generate comes in by: it opens when called, not when imported.
DOORS = {("methods", "hook")}


def level(part: str) -> int:
    return next(index for index, names in enumerate(LEVELS) if part in names)


@functools.cache
def imports() -> list[tuple[str, str]]:
    """(importing part, imported part) for every import in the package, at any depth in the code."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT).with_suffix("").parts
        if place == ("__init__",):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            targets = []
            if isinstance(node, ast.ImportFrom):
                package = ("outpace", *place)[: len(place) + 1 - node.level] if node.level else ()
                base = [*package, *(node.module or "").split(".")]
                targets = [[*base, alias.name] for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [alias.name.split(".") for alias in node.names]
            for target in targets:
                parts = [part for part in target if part]
                if parts[0] == "outpace" and parts[1:] not in ([], ["__version__"]):
                    found.append((place[0], parts[1]))
    return found


def test_imports_are_seen() -> None:
    assert ("loop", "methods") in imports()
    assert ("methods", "hook") in imports()


def test_imports_point_one_way() -> None:
    wrong = [
        (importer, imported)
        for importer, imported in imports()
        if importer != imported and level(imported) >= level(importer) and (importer, imported) not in DOORS
    ]
    assert wrong == []


def test_report_reads_json_alone() -> None:
    assert {imported for importer, imported in imports() if importer == "report"} <= {"errors", "files"}


def test_only_models_know_transformers() -> None:
    users = {
        file.relative_to(ROOT).parts[0]
        for file in ROOT.rglob("*.py")
        if "transformers" in {name.split(".")[0] for name in _imported_modules(file)}
    }
    assert users == {"models"}


def _imported_modules(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return names


def test_public_names() -> None:
    assert outpace.__all__ == sorted(name for names in outpace._HOMES.values() for name in names)
    for name in outpace._PACKAGES:  # as documented, without an import of their own
        assert outpace.__getattr__(name).__name__ == f"outpace.{name}"
    for name in outpace.__all__:
        assert getattr(outpace, name).__doc__, name


MODULES = [
    "outpace." + ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.rglob("*.py"))
    if ">>>" in file.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


WIDEST = 120
REPOSITORY = Path(__file__).parents[1]
CODE = ("*.py", "*.cpp", "*.h", "*.toml", "*.yml", "Makefile")


def files_of(*kinds: str) -> list[Path]:
    folders = ("src", "tests", "scripts", "docs", "packages", ".github")
    found = [file for kind in kinds for folder in folders for file in (REPOSITORY / folder).rglob(kind)]
    return sorted([*found, *(file for kind in kinds for file in REPOSITORY.glob(kind))])


def test_no_line_is_too_long() -> None:
    """Code and Markdown. A row of a Markdown table cannot be broken: those of the log and of results may be longer."""
    records = (
        *(REPOSITORY / "docs" / name for name in ("log.md", "results.md")),
        *files_of("log/*.md", "results/*.md"),
    )
    long = [
        f"{file.relative_to(REPOSITORY)}:{number}"
        for file in files_of(*CODE, "*.md")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > WIDEST and not (file in records and line.startswith("|"))
    ]
    assert long == []
