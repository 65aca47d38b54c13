"""`outpace race`, and `outpace report`, a page of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from . import options
from .loading import load_both
from .settings import choose_for_race

if TYPE_CHECKING:
    from ..decoder import Decoder
    from ..draft import Step
    from ..methods import Method
    from ..race import Race
    from ..result import Result

# The answer alternates between repetition (the class, its methods) and new text: easy and hard to draft.
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


def race(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ] = PROMPT_FOR_RACE,
    model: options.Model = options.DEFAULT_MODEL,
    methods: Annotated[str, typer.Option(help=f"Some of {options.METHODS}. Speeds are relative to the first.")] = (
        "autoregressive,jacobi,prompt-lookup,lookahead,auto"
    ),
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="METHOD.NAME=VALUE", help="A setting of a method. May be repeated."),
    ] = [],
    max_new_tokens: options.MaxNewTokens = 96,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    runtime: options.Runtime = "auto",
    exact: options.Exact = None,
    raw: options.Raw = False,
    transformers: Annotated[bool, typer.Option(help="Also run transformers' own generate, after the methods.")] = False,
    page: Annotated[Path | None, typer.Option(help="Also write a page (.html) that replays the race.")] = None,
    as_json: options.Json = False,
) -> None:
    """Run several methods on one prompt, one after another, and compare. Exit code 1 if the outputs differ."""
    options.check(
        *(model, options.listed(methods), runtime, dtype, max_new_tokens), temperature=temperature, top_p=top_p
    )
    options.check_files(written={"--page": page})
    from ..bench.entries import Task, Transformers
    from ..bench.harness import Settings
    from ..bench.recording import Recorder
    from ..board import Board, console_for_output, print_race
    from ..picking import Sampling
    from ..race import Race, run
    from ..report import check_page
    from ..trace import about

    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    check_page(page)
    if transformers and temperature > 0:
        raise InputError(
            "--transformers needs --temperature 0: transformers' generate samples with its own random numbers."
        )
    chosen = choose_for_race(options.listed(methods), settings, device)
    text = options.read_prompt(prompt)
    options.check_prompt(text, raw)
    decoder, loaded = load_both(model, dtype, device, runtime, exact, weights)
    entered = [decoder.prepare(name, **given) for name, given in chosen]
    recorder = Recorder(decoder, entered)

    def finish(outcome: Race) -> Race:
        if not transformers:
            return outcome
        task = Task(decoder.encode(text, raw), sampling, max_new_tokens, record=page is not None)
        return Race([*outcome.runs, recorder.add(Transformers(decoder, loaded), task)])

    if as_json:
        outcome = finish(run(decoder, entered, text, sampling, max_new_tokens, raw, recorder.show))
        typer.echo(json.dumps(_race_json(decoder, entered, text, outcome)))
    else:
        console = console_for_output()
        board = Board(console, entered, decoder.tokenizer)

        def show(number: int, lane: Result, step: Step) -> None:
            recorder.show(number, lane, step)
            board.show(number, lane, step)

        with board:
            outcome = finish(run(decoder, entered, text, sampling, max_new_tokens, raw, show))
        facts = about(decoder.engine)
        where = f"{Path(decoder.model.name).name}: {facts['dtype']}, runtime {facts['runtime']}"
        print_race(console, board, entered, outcome, where)
    if page is not None:
        _write_page(recorder.results(text, Settings(max_new_tokens, sampling=sampling, raw=raw), outcome), page)
    if not outcome.identical:
        raise typer.Exit(1)


def report(
    results: Annotated[Path, typer.Argument(help="A file written by `outpace bench`.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    plot: Annotated[
        Path | None, typer.Option(help="Also draw speeds by task to this file (.png, .svg); needs matplotlib.")
    ] = None,
) -> None:
    """Show RESULTS as one offline page: the race, the drafts step by step, charts."""
    from ..report import check_page

    check_page(out)
    if plot is not None:
        from ..bench.results import read_results
        from ..chart import check_plot, save_speeds

        check_plot(plot)
        save_speeds(read_results(results), plot)
    _write_page(results, out)


def _write_page(results: Path | dict[str, Any], path: Path) -> None:
    from ..report import write_report

    left_out = write_report(results, path)
    if left_out:
        typer.echo(f"to keep the page small, it leaves out the races on {', '.join(left_out)}", err=True)
    typer.echo(f"written to {path}: open it in a browser, {path.resolve().as_uri()}", err=True)


def _race_json(decoder: Decoder, methods: Sequence[Method], prompt: str, outcome: Race) -> dict[str, object]:
    from ..trace import settings_of

    runs = [
        {
            **run.to_json(),
            "sources": run.sources,
            "settings": {} if method is None else settings_of(method),
            "speed": outcome.speed(run),
            "differs_at": outcome.differs_at(run),
        }
        for method, run in zip_longest(methods, outcome.runs)  # transformers' run, the last, has no method
    ]
    return {
        "model": decoder.model.name,
        "prompt": prompt,
        "identical": outcome.identical,
        "verdict": outcome.verdict,
        "runs": runs,
    }
