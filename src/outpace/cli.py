"""The command line: `outpace generate`, `outpace race`, `outpace models`.

What is asked for goes to standard output, everything else to standard error. torch and transformers take seconds to
import, so that happens inside the commands, after the arguments are read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from .errors import InputError, OutpaceError, UnknownNameError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .decoder import Decoder
    from .draft import Step
    from .methods import Method
    from .race import Race, Run

FAILED, INTERRUPTED = 2, 130
# Repeats (the class, its methods) and fresh text in turn: something for every method to guess, and to guess wrong.
PROMPT_FOR_RACE = """\
Write this class with the methods sub, mul and div added:

class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        self.x += other.x
        self.y += other.y
"""
RESULT_KEYS = (
    "text",
    "token_ids",
    "prompt_tokens",
    "new_tokens",
    "steps",
    "tokens_per_step",
    "seconds",
    "tokens_per_second",
    "method",
    "finish_reason",
    "accepted_per_step",
    "lossless",
    "sources",
)


class _Group(TyperGroup):
    """Turns what a user can mend into one line and an exit code. Anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:  # Any: whose Context it is depends on the version of typer
        try:
            return super().invoke(ctx)
        except OutpaceError as error:
            typer.echo(f"outpace: {error}", err=True)
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as error:
            typer.echo("\noutpace: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    cls=_Group,
    name="outpace",
    help="The same text from a Hugging Face causal language model, in fewer steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point of the `outpace` command."""
    app(prog_name="outpace")


Model = Annotated[str, typer.Option(help="An embedded model (see `outpace models`), a folder, or a hub id.")]
MaxNewTokens = Annotated[int, typer.Option(help="The most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample among the so many best tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample among the fewest tokens with this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this part of the best one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages tokens of the prompt and answer.")]
PresencePenalty = Annotated[float, typer.Option(help="Taken off the logit of a token that the answer has.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each time that the answer has it.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text with every method.")]
Rule = Annotated[str, typer.Option(metavar="keyed|rejection", help="How samples are drawn.")]
Stop = Annotated[list[str], typer.Option(metavar="TEXT", help="End before this text. May be repeated.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16", help="Default: float32 on a CPU, otherwise bfloat16.", show_default=False
    ),
]
Device = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.", show_default=False)]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)],
    model: Model = "smollm2-135m",
    method: Annotated[str, typer.Option(help="How to draft.")] = "lookahead",
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method. May be repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    rule: Rule = "keyed",
    stop: Stop = [],  # noqa: B006
    dtype: Dtype = None,
    device: Device = None,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Write an answer to PROMPT."""
    from .picking import Sampling

    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        rule=rule,  # type: ignore[arg-type] # checked by Sampling
    )
    chosen = _make(method, dict(map(_split, settings)))
    text = _read(prompt)
    decoder = _load(model, chosen, dtype, device)
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop, "raw": raw}
    if as_json:
        result = decoder.generate(text, **options).to_json()
        typer.echo(json.dumps({key: result[key] for key in RESULT_KEYS}))
    else:
        _stream(decoder, text, options)


@app.command()
def race(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ] = PROMPT_FOR_RACE,
    model: Model = "smollm2-135m",
    methods: Annotated[str, typer.Option(help="Names with commas between. The first sets the pace.")] = (
        "autoregressive,jacobi,prompt-lookup,lookahead"
    ),
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="METHOD.NAME=VALUE", help="A setting of a method. May be repeated."),
    ] = [],  # noqa: B006
    max_new_tokens: MaxNewTokens = 96,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Let several methods write the same answer, one after another, and compare. Exit code 1 if the texts differ."""
    from .methods import Autoregressive
    from .picking import Sampling
    from .race import run

    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    entered = _enter(methods.split(","), settings, device)
    text = _read(prompt)
    decoder = _load(model, Autoregressive(), dtype, device)
    console = _console()
    if as_json:
        outcome = run(decoder, entered, text, sampling, max_new_tokens, raw)
        typer.echo(json.dumps(_race_json(decoder, entered, text, outcome)))
    else:
        board = _Board(console, entered, decoder.tokenizer)
        with board:
            outcome = run(decoder, entered, text, sampling, max_new_tokens, raw, board.show)
        _print_race(console, board, entered, outcome)
    if not outcome.identical:
        raise typer.Exit(1)


@app.command()
def models(as_json: Json = False) -> None:
    """List the embedded models."""
    from .models import bundled

    found = []
    for entry in bundled.MODELS.values():
        folder = bundled.cache_folder() / entry.name
        state = "ready" if bundled.is_ready(entry.name) else "fetched at first use"
        if folder.exists() and state != "ready":
            state = "broken: delete the folder"
        found.append([entry.name, state, str(folder), entry.licence, entry.description])
    columns = ("name", "state", "folder", "licence", "description")
    if as_json:
        typer.echo(json.dumps({"models": [dict(zip(columns, row, strict=True)) for row in found]}))
        return
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in found:
        table.add_row(*row)
    console = _console()
    console.print(table)
    console.print("--model also takes the folder of a Hugging Face causal language model, or a hub id (owner/name).")


def _read(prompt: str) -> str:
    """The prompt, from standard input for `-`."""
    try:
        if prompt == "-":
            return typer.get_binary_stream("stdin").read().decode()
        prompt.encode()  # bytes of an argument that are no text arrive as lone surrogates
    except UnicodeError as error:
        raise InputError("the prompt is not UTF-8 text.") from error
    return prompt


def _split(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not (name and equals):
        raise InputError(f"--set {setting}: expected NAME=VALUE, as in --set window=15.")
    return name.strip(), value.strip()


def _make(name: str, settings: dict[str, str], defaults: dict[str, object] | None = None) -> Method:
    """A method by name, its settings read by the types of its fields."""
    from .methods import METHODS, make

    kinds = get_type_hints(METHODS[name]) if name in METHODS else {}
    given = {key: _convert(name, key, value, kinds.get(key)) for key, value in settings.items()}
    return make(name, **{**(defaults or {}), **given})


def _convert(method: str, name: str, value: str, kind: object) -> object:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise InputError(f"{method}: {name}={value!r} must be true or false.")
        return value.lower() == "true"
    if kind is int or kind is float:
        try:
            return int(value) if kind is int else float(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise InputError(f"{method}: {name}={value!r} must be {wanted}.") from None
    return value


def _enter(names: Sequence[str], settings: Iterable[str], device: str | None) -> list[Method]:
    """The methods of a race, with their settings."""
    from .models.loading import resolve_device
    from .race import CPU_SETTINGS

    names = [name.strip() for name in names]
    given: dict[str, dict[str, str]] = {name: {} for name in names}
    for setting in settings:
        key, value = _split(setting)
        method, dot, name = key.partition(".")
        if not (dot and name):
            raise InputError(f"--set {setting}: expected METHOD.NAME=VALUE, as in --set lookahead.window=5.")
        if method not in given:
            raise UnknownNameError("method in this race", method, given)
        given[method][name] = value
    small = CPU_SETTINGS if resolve_device(device).type == "cpu" else {}
    return [_make(name, given[name], small.get(name)) for name in names]


def _load(model: str, method: Method, dtype: str | None, device: str | None) -> Decoder:
    from transformers.utils import logging

    from .decoder import load

    logging.disable_progress_bar()
    return load(model, method=method, dtype=dtype, device=device)


def _stream(decoder: Decoder, prompt: str, options: dict[str, Any]) -> None:
    from .race import Run

    run = Run(decoder.method)
    for step in run.follow(decoder.stream(prompt, **options)):
        typer.echo(step.text, nl=False)
    typer.echo()
    typer.echo(f"{decoder.method.name}: {_numbers(run)}", err=True)


def _numbers(run: Run) -> str:
    return (
        f"{len(run.token_ids)} tokens, {run.steps} steps, {run.tokens_per_step:.2f} tokens a step, "
        f"{run.tokens_per_second:.1f} tokens/s"
    )


def _settings(method: Method) -> dict[str, object]:
    return {item.name: getattr(method, item.name) for item in dataclasses.fields(method)}


def _race_json(decoder: Decoder, methods: Sequence[Method], prompt: str, outcome: Race) -> dict[str, object]:
    runs = [
        {
            "method": method.name,
            "settings": _settings(method),
            "text": run.text,
            "token_ids": run.token_ids,
            "new_tokens": len(run.token_ids),
            "steps": run.steps,
            "tokens_per_step": run.tokens_per_step,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "speed": outcome.speed(run),
            "differs_at": outcome.differs_at(run),
            "finish_reason": run.finish_reason,
            "accepted_per_step": run.accepted_per_step,
            "sources": run.sources,
        }
        for method, run in zip(methods, outcome.runs, strict=True)
    ]
    return {
        "model": decoder.model.name,
        "prompt": prompt,
        "identical": outcome.identical,
        "verdict": outcome.verdict,
        "runs": runs,
    }


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # nobody's screen: a table takes the width it needs and breaks no line
    return console


class _Lane:
    """One method's text in the race, each token in the colour of its source."""

    def __init__(self, method: Method, tokenizer: Any) -> None:
        from .text import TextStream

        self.method = method
        self.text = Text()
        self.run: Run | None = None
        self._stream = TextStream(tokenizer)

    def add(self, run: Run, step: Step, colours: _Colours) -> None:
        self.run = run
        for token, source in zip(step.tokens, step.sources, strict=True):
            self._stream.push(token)
            self.text.append(self._stream.take(), colours.style(source))

    def panel(self, console: Console, width: int, height: int | None) -> Panel:
        """The lane; with a height, only the last lines that fit in it."""
        lines = list(self.text.wrap(console, width - 4))
        if height is not None:
            room = height - 3  # the borders and the line of numbers take three
            lines = [*lines[-room:], *[Text()] * (room - len(lines))]
        shown = Text("\n").join(lines)
        numbers = Text(_numbers(self.run) if self.run else "waits", style="dim", overflow="ellipsis", no_wrap=True)
        done = self.run is not None and self.run.finish_reason is not None
        border = "green" if done else "bold" if self.run else "dim"
        return Panel(
            Group(shown, numbers), title=self.method.name, title_align="left", border_style=border, width=width
        )


class _Colours:
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


class _Board:
    """The race as it runs, on a terminal. Without a terminal it draws nothing."""

    _SECONDS_BETWEEN_FRAMES = 1 / 20

    def __init__(self, console: Console, methods: Sequence[Method], tokenizer: Any) -> None:
        self._console = console
        self._colours = _Colours()
        self._lanes = [_Lane(method, tokenizer) for method in methods]
        self._drawn = 0.0
        # No refreshing thread: it would take time from the method that is running.
        self._live = Live(self, console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> _Board:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, number: int, run: Run, step: Step) -> None:
        """Take in a step and draw, unless the last frame is too fresh."""
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


def _print_race(console: Console, board: _Board, methods: Sequence[Method], outcome: Race) -> None:
    if console.is_terminal:
        console.print(board.whole())
    else:
        typer.echo(outcome.runs[0].text)  # as it is; rich would drop control characters
    console.print(_table(outcome))
    for method in methods:
        settings = " ".join(f"{name}={json.dumps(value)}" for name, value in _settings(method).items())
        console.print(Text(f"{method.name}: {settings or 'no settings'}", style="dim"))
    console.print(Text(outcome.verdict, style="bold green" if outcome.identical else "bold red"))


def _table(outcome: Race) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("tokens", "steps", "tokens a step", "tokens/s", "speed"):
        table.add_column(name, justify="right")
    table.add_column("text")
    for run in outcome.runs:
        place = outcome.differs_at(run)
        table.add_row(
            run.method.name,
            str(len(run.token_ids)),
            str(run.steps),
            f"{run.tokens_per_step:.2f}",
            f"{run.tokens_per_second:.1f}",
            f"{outcome.speed(run):.2f}×",
            "identical" if place is None else Text(f"differs at token {place}", style="red"),
        )
    return table
