"""Progress, cost curves and accuracies, drawn: in a terminal with rich, in a file with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

from .bench.calibration import Look
from .board import BUSY, NOISE, table_of, times
from .decoder import Decoder
from .errors import InputError
from .files import write_bytes_whole
from .receipt import Receipt
from .runtime.costs import CostCurve

BAR = 40
CLOSEST = 5  # tokens of a receipt that are shown in any case
IDLE = " (so it decodes without drafts)"
Points: TypeAlias = "Sequence[tuple[float, float]]"
# Grey for plain decoding, then Okabe and Ito's colours, as on the report's page.
_PALETTE = ("#888888", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#0072b2", "#f0e442")


@contextmanager
def progress_bar(what: str, shown: bool = True) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error. The function it yields takes the finished share, and maybe a new text."""
    console = Console(stderr=True)
    if shown and not console.is_terminal:
        yield _Lines(what)
        return
    with Progress(console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share, text=what: progress.update(task, completed=share, description=text)


class _Lines:
    """Progress without a terminal: a line now and then, so that a log shows activity."""

    EVERY = 30.0  # seconds

    def __init__(self, what: str, clock: Callable[[], float] = monotonic) -> None:
        self._what, self._clock = what, clock
        self._last = clock()

    def __call__(self, share: float, text: str | None = None) -> None:
        now = self._clock()
        if now - self._last >= self.EVERY:
            self._last = now
            typer.echo(f"{share:.0%} {self._what if text is None else text}", err=True)


def print_accuracies(console: Console, accuracies: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Top-k accuracy of each head."""
    tops = (1, 2, 5, 10)
    rows = [
        [name, str(head), *(f"{sum(ranks[:top]):.3f}" for top in tops)]
        for name, heads in accuracies.items()
        for head, ranks in enumerate(heads, 1)
    ]
    console.print(table_of(["heads", "head", *(f"top {top}" for top in tops)], rows))


def print_confidence(console: Console, name: str, bins: Sequence[Sequence[float]]) -> None:
    """Calibration of the confidence: how many draft tokens survive, by confidence."""
    rows = [
        [name, f"{place / 10:.1f} to {(place + 1) / 10:.1f}", f"{count:.0f}", f"{said:.3f}", f"{survived:.3f}"]
        for place, (count, said, survived) in enumerate(bins)
    ]
    console.print(table_of(["heads", "confidence", "drafted", "mean", "survived"], rows))


def print_costs(console: Console, curve: CostCurve, decoder: Decoder) -> None:
    """The cost curve as bars, the parts of a step, and the settings that methods get from it."""
    for key, value in curve.about.items():
        console.print(f"{key}: {value}")
    highest = max(max(costs) for costs in curve.seconds)
    for context, costs in zip(curve.contexts, curve.seconds, strict=True):
        rows = [
            [str(count), f"{cost * 1000:.2f}", f"{cost / costs[0]:.2f}", "█" * max(1, round(cost / highest * BAR))]
            for count, cost in zip(curve.rows, costs, strict=True)
        ]
        console.print(table_of(["rows", "ms/step", "one row = 1", f"{context} tokens of context"], rows))
    console.print("layers (one row): " + ", ".join(f"{name} {_ms(cost)}" for name, cost in curve.segments.items()))
    console.print("drafting, per step: " + ", ".join(f"{name} {_ms(cost)}" for name, cost in curve.drafting.items()))
    paces = (f"{name} {pace:.2f}{'' if pace >= 1 else IDLE}" for name, pace in curve.paces.items())
    console.print("speed with drafts, plain = 1: " + ", ".join(paces))
    for name in ("jacobi", "lookahead", "self-speculative"):
        chosen = decoder.prepare(name)
        console.print(f"{name}: " + " ".join(f"{key}={getattr(chosen, key)}" for key in chosen.sizes[0].settings))
    console.print("prompt-lookup: as many rows as pay, decided in each step")


def print_look(console: Console, look: Look) -> None:
    """The acceptance that `auto` expects of each source, and what it chose."""
    beliefs = {name: belief for name, belief in look.beliefs.items() if any(belief.guesses)}  # of sources that drafted
    if beliefs:
        knots = [
            [
                f"{said:.3f}",
                *(f"{belief.believed[knot]:.3f} ({belief.guesses[knot]:.0f})" for belief in beliefs.values()),
            ]
            for knot, said in enumerate(next(iter(beliefs.values())).said)
        ]
        console.print(
            table_of(["source's own estimate", *(f"{name}: acceptance (drafted)" for name in beliefs)], knots)
        )
    if look.steps:
        everything = sum(look.steps.values())
        steps = [
            [str(rows), "yes" if heads else "no", str(count), f"{count / everything:.0%}"]
            for (rows, heads), count in look.steps.items()
        ]
        console.print(table_of(["rows", "with heads", "steps that auto chose", "share"], steps))
    if look.texts:
        texts = [
            [name, str(look.texts.get(name, 0)), times(look.speeds.get(name))] for name in {**look.texts, **look.speeds}
        ]
        console.print(table_of(["drafts as", "sequences started so", "speed: plain = 1"], texts))
    total = look.total
    console.print(
        f"{total.method}: {total.rows_per_step:.1f} rows and {total.tokens_per_step:.2f} tokens per step, estimated at "
        f"{times(total.times_plain)} the speed of plain decoding"
    )


def print_bench(console: Console, results: Mapping[str, Any]) -> None:
    """Speeds and counts of each entry, speeds by task, and what differs."""
    rows = []
    for entry in results["summary"]:
        found = entry["all"]
        same = f"{found['equal']} of {found['compared']}" if found["compared"] else "not compared"
        speeds = [_spread(found[name], mark) for name, mark in _SPEEDS.items()]
        steps = [
            f"{found['rows_per_step']:.1f}" if found["rows_per_step"] else "",
            f"{found['tokens_per_step'] or 0:.2f}",
        ]
        rows.append([entry["label"], str(found["tokens"]), *steps, *speeds, same])
    columns = ("tokens", "rows/step", "tokens/step", "tokens/s", "speed: plain = 1", "estimate", "transformers = 1")
    console.print(table_of(["method", *columns, "identical"], rows))
    tasks = list(results["summary"][0]["tasks"])
    speeds_by_task = [
        [entry["label"], *(_spread(entry["tasks"][task]["speed"], "×") for task in tasks)]
        for entry in results["summary"]
    ]
    console.print(table_of(["speed: plain = 1", *tasks], speeds_by_task))
    console.print("medians over prompts and repeats; quartiles in brackets", style="dim", markup=False)
    base = results["summary"][0]["all"]["tokens_per_step"] or 1.0
    ours = [entry["all"] for entry in results["summary"] if entry["all"]["rows_per_step"] and entry["all"]["speed"]]
    if any(found["speed"][1] > NOISE * found["tokens_per_step"] / base for found in ours):
        console.print(BUSY, style="yellow", markup=False)
    for run in results["runs"]:
        if run["equal"] is False:
            gap = "" if run["gap"] is None else f"; the two best scores there are {run['gap']:.4g} apart"
            where = f"{run['task']} {run['prompt']}, turn {run['turn']}, repeat {run['repeat']}"
            console.print(f"{run['label']} differs on {where}, at token {run['differs_at']}{gap}", markup=False)
    if results["skipped"]:
        console.print(
            f"{len(results['skipped'])} prompts were skipped: prompt and answer do not fit the model's context"
        )


_SPEEDS = {"tokens_per_second": "", "speed": "×", "times_plain": "×", "speed_to_transformers": "×"}


def _spread(quartiles: Sequence[float] | None, mark: str) -> str:
    if quartiles is None:
        return ""
    low, middle, high = quartiles
    digits = 2 if mark else 1
    return f"{middle:.{digits}f}{mark} ({low:.{digits}f}–{high:.{digits}f})"


def print_receipt(console: Console, receipt: Receipt, tokenizer: Any) -> None:
    """The verdict, under the tokens that it may turn on: differing ones, near-ties, and the closest choices."""
    places = range(1, len(receipt.marks) + 1)
    closest = sorted(places, key=lambda place: receipt.marks[place - 1].margin)[:CLOSEST]
    rows = []
    for place, mark in zip(places, receipt.marks, strict=True):
        notes = [] if mark.token == mark.picked else [f"the model chooses {mark.picked}"]
        notes += ["near-tie"] if place in receipt.near_ties else []
        if notes or place in closest:
            text = repr(tokenizer.decode([mark.token])) if tokenizer is not None else ""
            rows.append([str(place), str(mark.token), text, f"{mark.margin:.4g}", ", ".join(notes)])
    console.print(table_of(["closest", "token", "text", "margin", ""], rows), markup=False)
    for problem in receipt.problems:
        console.print(problem, markup=False)
    console.print(receipt.verdict, style="bold green" if receipt.passed else "bold red", markup=False)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_plot(path: Path | None) -> None:
    """Raise InputError if the plot could not be written, before the work that it shows."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"--plot {path}: the file must end in .png or .svg.")
    if not can_plot():
        raise InputError("--plot needs matplotlib: pip install 'outpace[bench]'.")


def save_calibration(curve: CostCurve, look: Look, path: Path) -> None:
    """Step time by rows and, where `auto` has them, expected acceptance, steps by rows, and speeds."""
    with _figure(path, 1 + bool(look.beliefs) + bool(look.steps) + bool(look.speeds)) as (figure, panels):
        figure.suptitle(curve.about["model"])
        free = iter(panels)
        _draw_costs(next(free), curve)
        if look.beliefs:
            _draw_beliefs(next(free), look)
        if look.steps:
            names = [f"{rows}{' with heads' if heads else ''}" for rows, heads in look.steps]
            axes = next(free)
            axes.bar(names, list(look.steps.values()), color=_PALETTE[6])
            axes.set(xlabel="rows", ylabel="steps that auto chose")
        if look.speeds:
            axes = next(free)
            axes.bar(list(look.speeds), list(look.speeds.values()), color=_PALETTE[6])
            axes.set(xlabel="auto drafts as", ylabel="speed: plain decoding = 1")


def _draw_costs(axes: Any, curve: CostCurve) -> None:
    """Step time by rows, one line for each context."""
    for context, costs in zip(curve.contexts, curve.seconds, strict=True):
        axes.plot(curve.rows, [cost * 1000 for cost in costs], marker="o", label=f"{context} tokens of context")
    axes.set(xscale="log", xlabel="rows", ylabel="ms/step", ylim=(0, None))
    axes.set_xticks(curve.rows, [str(count) for count in curve.rows])
    axes.legend()


def _draw_beliefs(axes: Any, look: Look) -> None:
    """Learnt acceptance by a source's own estimate, one line per source; points where there are counts."""
    for number, (name, belief) in enumerate(look.beliefs.items()):
        counted = [knot for knot, guesses in enumerate(belief.guesses) if guesses >= 1]
        how = {"marker": "o", "markevery": counted, "color": _PALETTE[1 + number % 7], "label": name}
        axes.plot(belief.said, belief.believed, **how)
    axes.plot(belief.said, belief.said, ":", color=_PALETTE[0], label="as estimated")
    axes.set(xlabel="acceptance, by the source's own estimate", ylabel="acceptance, learnt")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.legend()


def save_accuracies(accuracies: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Top-1 (solid) and top-5 (dashed) accuracy of each head, by kind."""
    with _axes(path) as axes:
        for number, (name, heads) in enumerate(accuracies.items()):
            for top, style in ((1, "-"), (5, "--")):
                shares = [sum(ranks[:top]) for ranks in heads]
                axes.plot(range(1, len(heads) + 1), shares, f"C{number}o{style}", label=f"{name}, top {top}")
        axes.set(xlabel="head", ylabel="accuracy on held-out answers", ylim=(0, 1))
        axes.set_xticks(range(1, 1 + max(map(len, accuracies.values()))))


def save_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, across: str, up: str, logarithmic: bool = False
) -> None:
    """Lines by name, each as points."""
    with _axes(path) as axes:
        for number, (name, points) in enumerate(lines.items()):
            colour, dashes = _PALETTE[1 + number % 7], ("-", "--", ":", "-.")[number % 4]
            axes.plot(*zip(*points, strict=True), dashes, marker="o", color=colour, label=name)
        axes.set(xlabel=across, ylabel=up)
        if logarithmic:
            axes.set_xscale("log", base=2)


def save_speeds(results: Mapping[str, Any], path: Path) -> None:
    """Speeds of a bench by task: a bar for each entry up to its median, with its quartiles."""
    tasks = list(results["summary"][0]["tasks"])
    width = 0.8 / len(results["summary"])
    with _axes(path) as axes:
        for number, entry in enumerate(results["summary"]):
            found = [(place, entry["tasks"][task]["speed"]) for place, task in enumerate(tasks)]
            places = [place + (number + 0.5) * width - 0.4 for place, speed in found if speed]
            low, middle, high = zip(*(speed for _, speed in found if speed), strict=True) if places else ((), (), ())
            below = [half - least for half, least in zip(middle, low, strict=True)]
            above = [most - half for half, most in zip(middle, high, strict=True)]
            axes.bar(places, middle, width, yerr=(below, above), label=entry["label"], color=_PALETTE[number % 8])
        axes.set(ylabel="speed: plain decoding = 1")
        axes.set_xticks(range(len(tasks)), tasks)


def save_windows(measured: Points, fitted: Points, name: str, path: Path) -> None:
    """Tokens per step by window: measured as points, the fit as a line with that name."""
    with _axes(path) as axes:
        axes.plot(*zip(*measured, strict=True), "C0o", label="measured")
        axes.plot(*zip(*fitted, strict=True), "C0--", label=name)
        axes.set(xscale="log", xlabel="window W = n-grams G, all ranks together", ylabel="tokens/step", ylim=(1, None))
        axes.set_xticks([width for width, _ in measured], [f"{width:g}" for width, _ in measured])
        axes.minorticks_off()


@contextmanager
def _axes(path: Path) -> Iterator[Any]:
    """Axes to draw on; saved to a file with a legend."""
    with _figure(path, 1) as (figure, (axes,)):
        yield axes
        figure.legend(loc="outside upper center", ncols=3)


@contextmanager
def _figure(path: Path, panels: int) -> Iterator[tuple[Any, Sequence[Any]]]:
    """A figure with that many panels side by side; saved to a file."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(6 * panels, 4), layout="constrained", squeeze=False)
    yield figure, axes[0]
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix.removeprefix("."))
    plt.close(figure)
    write_bytes_whole(path, drawn.getvalue())


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
