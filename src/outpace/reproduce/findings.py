"""The result of a reproduction: tables beside the paper's figures, claims checked against them, plots."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..chart import can_plot, save_lines
from ..files import write_whole

KIND, VERSION = "outpace reproduction", 1
WIDTH = 120  # of a page's lines, except tables


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and whether it holds here."""

    text: str
    holds: bool | None  # None: not measured
    found: str

    def __str__(self) -> str:
        verdict = {True: "holds", False: "**does not hold**", None: "not measured"}[self.holds]
        return f"{verdict}: {self.text}" + (f" ({self.found})" if self.found else "")


def falling(text: str, values: Mapping[str, float | None]) -> Claim:
    """The claim that these values decrease strictly.

    >>> str(falling("the more the better", {"many": 2.0, "few": 1.5}))
    'holds: the more the better (many 2.00 > few 1.50)'
    """
    known = [value for value in values.values() if value is not None]
    if len(known) < len(values):
        return Claim(text, None, "")
    signs = [">" if left > right else "≤" for left, right in pairwise(known)]
    words = [f"{name} {value:.2f}" for name, value in zip(values, known, strict=True)]
    found = words[0] + "".join(f" {sign} {word}" for sign, word in zip(signs, words[1:], strict=True))
    return Claim(text, "≤" not in signs, found)


def everywhere(text: str, values: Mapping[str, float | None], least: float) -> Claim:
    """The claim that all of these values are above `least`.

    >>> str(everywhere("quicker on every task", {"chat": 0.9, "code": 1.5}, 1.0))
    '**does not hold**: quicker on every task (chat 0.90, code 1.50)'
    """
    known = {name: value for name, value in values.items() if value is not None}
    found = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
    return Claim(text, all(value > least for value in known.values()) if known else None, found)


def at_most(text: str, value: float | None, most: float, mark: str = "") -> Claim:
    """The claim that a value is at most `most`."""
    return Claim(text, None if value is None else value <= most, "" if value is None else f"{value:.3g}{mark}")


@dataclass(frozen=True)
class Table:
    """Measured figures beside the paper's own, with a note and claims."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    claims: Sequence[Claim] = ()
    note: str = ""

    def markdown(self) -> str:
        """The table, its note and its claims."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        claims = "\n".join(_wrapped(f"- {claim}", "  ") for claim in self.claims)
        return "\n\n".join(part for part in (f"## {self.title}", table, _wrapped(self.note), claims) if part)


@dataclass(frozen=True)
class Plot:
    """Lines by name, each as points."""

    name: str
    across: str
    up: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    logarithmic: bool = False


@dataclass(frozen=True)
class Findings:
    """All findings about one paper."""

    paper: str
    about: str  # model, device, questions
    tables: Sequence[Table]
    plots: Sequence[Plot] = ()

    @property
    def claims(self) -> list[Claim]:
        """The claims of all tables."""
        return [claim for table in self.tables for claim in table.claims]

    @property
    def verdict(self) -> str:
        """How many claims hold."""
        judged = [claim.holds for claim in self.claims if claim.holds is not None]
        return f"{sum(judged)} of {len(judged)} claims hold"

    def markdown(self, command: str = "", plots: Iterable[str] = ()) -> str:
        """The whole page, with the command that made it and links to the plots beside it."""
        made = [" \\\n".join(_wrapped(command, "      ", "    ", WIDTH - 2).splitlines())] if command else []
        pictures = [f"![{name}]({name})" for name in plots]
        tables = [table.markdown() for table in self.tables]
        about = _wrapped(self.about)
        return "\n\n".join([f"# {self.paper}", *made, about, *tables, *pictures, f"**{self.verdict}.**"]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": KIND, "version": VERSION, **asdict(self), "verdict": self.verdict}

    def save(self, folder: Path, stem: str, command: str = "") -> Path:
        """Write STEM.json, the plots if matplotlib is installed, and last STEM.md."""
        write_whole(folder / f"{stem}.json", json.dumps({"command": command, **self.to_json()}, indent=1))
        drawn = []
        if can_plot():
            for plot in self.plots:
                drawn.append(f"{stem}-{plot.name}.svg")
                save_lines(plot.lines, folder / drawn[-1], plot.across, plot.up, plot.logarithmic)
        page = folder / f"{stem}.md"
        write_whole(page, self.markdown(command, drawn))
        return page


def _wrapped(text: str, indent: str = "", first: str = "", width: int = WIDTH) -> str:
    lines = textwrap.TextWrapper(width, first, indent, break_long_words=False, break_on_hyphens=False)
    return lines.fill(text)


def number(value: float | None, mark: str = "", digits: int = 2) -> str:
    """A figure for a table.

    >>> number(1.234, "×"), number(None)
    ('1.23×', '–')
    """
    return "–" if value is None else f"{value:.{digits}f}{mark}"


def percent(value: float | None) -> str:
    """A share for a table."""
    return "–" if value is None else f"{value:.1%}"
