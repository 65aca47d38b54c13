"""The race, drawn on a terminal with rich."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import cycle
from time import monotonic
from typing import Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .draft import Step
from .methods import Method
from .race import Race
from .result import Result
from .text import TextStream
from .trace import settings_of


def numbers(run: Result, apart: bool = False) -> str:
    """A run in one line; with `apart`, its speed excludes the time to the first token, and it has all remarks."""
    counts = f"{run.new_tokens} tokens, {run.steps} steps, {run.tokens_per_step:.2f} tokens per step, "
    if not apart or run.seconds_to_first_token is None:
        return f"{counts}{run.tokens_per_second:.1f} tokens/s"
    speed = f"{run.decoding_tokens_per_second:.1f} tokens/s, the first after {run.seconds_to_first_token:.1f} s"
    remarks = [*([run.remark] if run.remark else []), *([] if run.lossless else ["lossy: the text may differ"])]
    return f"{counts}{speed}{''.join(f'; {remark}' for remark in remarks)}"


def forecast(run: Result) -> str:
    """Rows per step and the estimated speedup of a run, in a few words."""
    estimate = "" if run.times_plain is None else f", about {times(run.times_plain)} plain"
    return f"{run.rows_per_step:.1f} rows per step{estimate}"


def guesses(run: Result) -> str:
    """Accepted draft tokens of a run, of those drafted, by source."""
    made = [f"{name} {run.accepted.get(name, 0)} of {offered}" for name, offered in run.offered.items()]
    remark = f" ({run.remark})" if run.remark else ""
    return f"accepted: {', '.join(made)}{remark}" if made else "nothing drafted"


def times(speed: float | None) -> str:
    """A ratio of speeds; a dash if it is unknown."""
    return "–" if speed is None else f"{speed:.2f}×"


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table."""
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def console_for_output() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # not a screen: let tables take the width they need
    return console


class Lane:
    """One method's text in the race, each token in the colour of its source."""

    def __init__(self, method: Method, tokenizer: Any) -> None:
        self.method = method
        self.text = Text()
        self.run: Result | None = None
        self._stream = TextStream(tokenizer)

    def add(self, run: Result, step: Step, colours: Colours) -> None:
        self.run = run
        for token, source in zip(step.tokens, step.sources, strict=True):
            self._stream.push(token)
            self.text.append(self._stream.take(), colours.style(source))
        if step.finish is not None:
            self._stream.finish()
            self.text.append(self._stream.take())

    def panel(self, console: Console, width: int, height: int | None) -> Panel:
        """The lane; with a height, only the last lines that fit in it."""
        lines = list(self.text.wrap(console, width - 4))
        if height is not None:
            room = height - 3  # the borders and the line of numbers take three
            lines = [*lines[-room:], *[Text()] * (room - len(lines))]
        shown = Text("\n").join(lines)
        below = Text(numbers(self.run) if self.run else "waits", style="dim", overflow="ellipsis", no_wrap=True)
        done = self.run is not None and self.run.finish_reason is not None
        border = "green" if done else "bold" if self.run else "dim"
        return Panel(
            Group(shown, below),
            title=self.method.name,
            title_align="left",
            subtitle=forecast(self.run) if self.run else None,
            subtitle_align="left",
            border_style=border,
            width=width,
        )


class Colours:
    """A colour for each source, in the order they turn up. The model's own tokens keep the terminal's colour."""

    def __init__(self) -> None:
        # Okabe and Ito's colours, which colour-blind readers can tell apart; those hard to read on white or black last.
        self._free = cycle(("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#0072b2", "#f0e442"))
        self._styles = {"model": ""}

    def style(self, source: str) -> str:
        if source not in self._styles:
            self._styles[source] = next(self._free)
        return self._styles[source]

    def legend(self) -> Text:
        return Text("  ").join(Text(f"■ {source}", style) for source, style in self._styles.items())


class Board:
    """The race as it runs, on a terminal. Without a terminal it draws nothing."""

    _SECONDS_BETWEEN_FRAMES = 1 / 20

    def __init__(self, console: Console, methods: Sequence[Method], tokenizer: Any) -> None:
        self._console = console
        self._colours = Colours()
        self._lanes = [Lane(method, tokenizer) for method in methods]
        self._drawn = 0.0
        # No refresh thread: it would slow down the running method.
        self._live = Live(self, console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, number: int, run: Result, step: Step) -> None:
        """Add a step and draw, unless the last frame is too recent."""
        self._lanes[number].add(run, step, self._colours)
        now = monotonic()
        if step.finish is not None or now - self._drawn > self._SECONDS_BETWEEN_FRAMES:
            self._drawn = now
            self._live.refresh()

    def __rich__(self) -> RenderableType:
        """A frame that fits on the screen."""
        rows = math.ceil(len(self._lanes) / self._columns)
        return self._frame(max(4, (self._console.height - 2) // rows))

    def whole(self) -> RenderableType:
        """All of the text, however long."""
        return self._frame(None)

    @property
    def _columns(self) -> int:
        return 2 if self._console.width >= 120 else 1

    def _frame(self, height: int | None) -> RenderableType:
        grid = Table.grid()
        width = self._console.width // self._columns
        panels = [lane.panel(self._console, width, height) for lane in self._lanes]
        for start in range(0, len(panels), self._columns):
            grid.add_row(*panels[start : start + self._columns])
        return Group(grid, self._colours.legend())


NOISE = 1.1  # no method is faster than its tokens per step allow, but for this much
BUSY = "A speed above tokens/step: the machine was busy with other work. Run it again."


def print_race(console: Console, board: Board, methods: Sequence[Method], outcome: Race, where: str) -> None:
    """`where` says which model ran, and how."""
    if console.is_terminal:
        console.print(board.whole())
    else:
        typer.echo(outcome.runs[0].text)  # as it is; rich would drop control characters
    console.print(_table(outcome))
    console.print(Text(where, style="dim"))
    for method, run in zip(methods, outcome.runs, strict=False):  # a run of transformers, the last, has no settings
        settings = " ".join(f"{name}={json.dumps(value)}" for name, value in settings_of(method).items())
        console.print(Text(f"{method.name}: {settings or 'no settings'}; {guesses(run)}", style="dim"))
    base = outcome.runs[0].tokens_per_step
    if any(outcome.speed(run) > NOISE * run.tokens_per_step / base for run in outcome.runs[: len(methods)]):
        console.print(Text(BUSY, "yellow"))
    console.print(Text(outcome.verdict, style="bold green" if outcome.identical else "bold red"))


def _table(outcome: Race) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("tokens", "steps", "rows/step", "tokens/step", "tokens/s", "speed", "estimate"):
        table.add_column(name, justify="right")
    table.add_column("text")
    for run in outcome.runs:
        place = outcome.differs_at(run)
        table.add_row(
            run.method,
            str(len(run.token_ids)),
            str(run.steps),
            f"{run.rows_per_step:.1f}",
            f"{run.tokens_per_step:.2f}",
            f"{run.tokens_per_second:.1f}",
            times(outcome.speed(run)),
            times(run.times_plain),
            "identical" if place is None else Text(f"differs at token {place}", style="red"),
        )
    return table
