"""Progress, cost curves and accuracies, drawn: in a terminal with rich, in a file with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from .board import table_of
from .decoder import Decoder
from .errors import InputError
from .runtime.costs import CostCurve

BAR = 40


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """A bar on standard error; the function it gives is told which share is finished, and maybe what to write."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share, text=what: progress.update(task, completed=share, description=text)


def print_accuracies(console: Console, accuracies: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """How often the model's choice is among the first guesses of each head."""
    tops = (1, 2, 5, 10)
    rows = [
        [name, str(head), *(f"{sum(ranks[:top]):.3f}" for top in tops)]
        for name, heads in accuracies.items()
        for head, ranks in enumerate(heads, 1)
    ]
    console.print(table_of(["heads", "head", *(f"top {top}" for top in tops)], rows))


def print_costs(console: Console, curve: CostCurve, decoder: Decoder) -> None:
    """The curve as bars, the parts of a step, and the settings that methods take by it."""
    for key, value in curve.about.items():
        console.print(f"{key}: {value}")
    highest = max(max(costs) for costs in curve.seconds)
    for context, costs in zip(curve.contexts, curve.seconds, strict=True):
        rows = [
            [str(count), f"{cost * 1000:.2f}", f"{cost / costs[0]:.2f}", "█" * max(1, round(cost / highest * BAR))]
            for count, cost in zip(curve.rows, costs, strict=True)
        ]
        console.print(table_of(["rows", "ms a step", "one row = 1", f"{context} tokens of context"], rows))
    console.print("layers (one row): " + ", ".join(f"{name} {_ms(cost)}" for name, cost in curve.segments.items()))
    console.print("drafting a step: " + ", ".join(f"{name} {_ms(cost)}" for name, cost in curve.drafting.items()))
    for name in ("jacobi", "lookahead"):
        chosen = decoder.prepare(name)
        console.print(f"{name}: " + " ".join(f"{key}={getattr(chosen, key)}" for key in chosen.sizes[0].settings))
    console.print("prompt-lookup: as many rows as pay, step by step")


def save_plot(curve: CostCurve, path: Path) -> None:
    """Step time by rows, one line for each context."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise InputError("drawing to a file needs matplotlib: pip install 'outpace[bench]'.") from error
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for context, costs in zip(curve.contexts, curve.seconds, strict=True):
        axes.plot(curve.rows, [cost * 1000 for cost in costs], marker="o", label=f"{context} tokens of context")
    axes.set(xscale="log", xlabel="rows", ylabel="ms a step", title=curve.about["model"], ylim=(0, None))
    axes.set_xticks(curve.rows, [str(count) for count in curve.rows])
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"{path} could not be written: {error.strerror}.") from error
    plt.close(figure)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
