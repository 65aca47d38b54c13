"""Speeds, acceptance and outputs by method, through Outpace's own bench: all methods in turn on every prompt."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outpace import Decoder, Method, Sampling
from outpace.bench.data import Question, choose_questions, own_questions, read_questions
from outpace.bench.entries import Entry, Ours, Run, Task, Transformers
from outpace.bench.harness import Settings, measure
from outpace.runtime.graphs import GraphEngine

from . import graphs
from .methods import PLAIN, ablations, lossless, named, published, usual
from .models import Setup, is_raw, set_up

CONSOLE = Console(width=150)
SETTLED, ENOUGH = 64, 96  # a prompt's speed is measured from this token on, if there are enough
SEEDS = range(5)
Runs = list[dict[str, Any]]


class Timed(Ours):
    """A method of ours that also measures its speed after the first tokens.

    whole: False has the host take part in every step.
    """

    def __init__(self, decoder: Decoder, method: Method, label: str, whole: bool = True) -> None:
        super().__init__(decoder, method, label if whole else f"{label}, by the host")
        self.method = self._method
        self.whole = whole

    def run(self, task: Task) -> Run:
        engine = self._decoder.engine
        if isinstance(engine, GraphEngine):
            engine.whole_steps = self.whole
        try:
            run = super().run(replace(task, record=True))
        finally:
            if isinstance(engine, GraphEngine):
                engine.whole_steps = True
        return replace(run, lane=None, counts={"pace": pace(run.lane or [])})


def pace(steps: Sequence[dict[str, Any]]) -> float:
    """Tokens/s from SETTLED tokens on; 0 if there are fewer than ENOUGH.

    >>> pace([{"tokens": [7], "at": 0.1 * number} for number in range(101)])
    10.0
    """
    written, seen = 0, []
    for step in steps:
        written += len(step["tokens"])
        seen.append((written, step["at"]))
    if written < ENOUGH:
        return 0.0
    before, start = next(item for item in seen if item[0] >= SETTLED)
    return round((written - before) / (seen[-1][1] - start), 6)


def questions_of(decoder: Decoder, arguments: argparse.Namespace, each: int) -> list[Question]:
    """The first turns of `each` questions of each task, those that fit `--longest`."""
    known = read_questions(arguments.data) if arguments.data else own_questions()
    first = [replace(question, turns=question.turns[:1]) for question in choose_questions(known, (), each)]
    room = min(arguments.longest, decoder.model.context) - arguments.tokens
    return [question for question in first if len(encoded(decoder, question)) < room]


def encoded(decoder: Decoder, question: Question) -> list[int]:
    return decoder.encode(question.turns[0], is_raw(decoder))


def prompts_of(decoder: Decoder, arguments: argparse.Namespace, each: int) -> list[list[int]]:
    """The same as tokens, the tasks in turn."""
    questions = sorted(questions_of(decoder, arguments, each), key=lambda question: question.number)
    return [encoded(decoder, question) for question in questions]


def measured(
    setup: Setup,
    methods: dict[str, Method],
    arguments: argparse.Namespace,
    sampling: Sampling | None = None,
    theirs: bool = False,
    out: Path | None = None,
) -> Runs:
    """All runs of all methods; with `theirs`, transformers' generate too. Finished runs are kept in `out`."""
    decoder, sampling = setup.decoder, sampling or Sampling()
    ways = (True, False)[: 1 + arguments.host]
    entries: list[Entry] = [Timed(decoder, method, label, way) for way in ways for label, method in methods.items()]
    if theirs:
        entries += [Transformers(decoder, setup.model, lookup) for lookup in (False, True)]
    questions = questions_of(decoder, arguments, arguments.each)
    how = Settings(arguments.tokens, sampling=sampling, raw=is_raw(decoder), every=arguments.every)

    def show(share: float, text: str = "") -> None:
        print(f"{share:.0%} {text}", flush=True)

    with tempfile.TemporaryDirectory() as place:
        journal = out or Path(place) / "runs.jsonl"
        return measure(decoder, entries, questions, how, journal, show).runs


def of(runs: Runs, label: str, task: str | None = None) -> Runs:
    return [run for run in runs if run["label"] == label and task in (None, run["task"])]


def labels_of(runs: Runs) -> list[str]:
    return [*dict.fromkeys(run["label"] for run in runs)]


def speed(runs: Runs) -> float:
    """All tokens over all seconds."""
    return sum(len(run["token_ids"]) for run in runs) / max(sum(run["seconds"] for run in runs), 1e-9)


def acceptance(runs: Runs) -> float:
    """All tokens over all steps."""
    return sum(len(run["token_ids"]) for run in runs) / max(sum(run["steps"] for run in runs), 1)


def speed_table(runs: Runs) -> Table:
    """The speed of each label, also relative to plain decoding and to transformers, on the prompts that both ran."""
    table = Table(
        *("method", "tokens/s", "plain = 1", "generate = 1", "tokens/step", "ms/step", "worst prompt", "same text")
    )
    slow = {(run["task"], run["prompt"]) for run in of(runs, "transformers generate")}
    shared = [run for run in runs if (run["task"], run["prompt"]) in slow]
    base = {(run["task"], run["prompt"]): run["counts"]["pace"] for run in of(runs, PLAIN)}
    for label in labels_of(runs):
        mine = of(runs, label)
        steps = sum(run["steps"] for run in mine)
        paces = [
            (run["counts"]["pace"] / base[where], f"{run['task']} {run['prompt']}")
            for run in mine
            if run["counts"].get("pace") and base[where := (run["task"], run["prompt"])]
        ]
        worst, where = min(paces, default=(0.0, ""))
        table.add_row(
            *(label, f"{speed(mine):.1f}", f"{speed(mine) / speed(of(runs, PLAIN)):.2f}"),
            f"{speed(of(shared, label)) / speed(of(shared, 'transformers generate')):.2f}" if slow else "",
            *(f"{acceptance(mine):.2f}", f"{1000 * sum(run['seconds'] for run in mine) / steps:.2f}"),
            f"{worst:.2f} {where}" if where else "",
            f"{sum(run['equal'] for run in mine if run['equal'])} of {len(mine)}",
        )
    return table


def task_table(runs: Runs, title: str, figure: Callable[[Runs], float], base: str | None = None) -> Table:
    """A figure by task; with `base`, relative to that label's."""
    tasks = [*dict.fromkeys(run["task"] for run in runs)]
    table = Table(title, *tasks, "all", "mean of tasks")
    for label in labels_of(runs):
        each = [figure(of(runs, label, task)) / (figure(of(runs, base, task)) if base else 1) for task in tasks]
        whole = figure(of(runs, label)) / (figure(of(runs, base)) if base else 1)
        table.add_row(label, *(f"{value:.2f}" for value in (*each, whole, sum(each) / len(each))))
    return table


def speeds(arguments: argparse.Namespace) -> None:
    """Tokens/s by method and by task, beside plain decoding and, with --transformers, beside transformers."""
    setup = set_up(arguments, arguments.exact)
    methods = named(usual(setup, arguments.times), arguments.only)
    sampling = Sampling(temperature=arguments.temperature)
    runs = measured(setup, methods, arguments, sampling, arguments.transformers, arguments.out)
    CONSOLE.print(f"times {arguments.times}, T = {arguments.temperature}, {arguments.tokens} tokens", speed_table(runs))
    CONSOLE.print(task_table(runs, "plain = 1", speed, PLAIN))
    if arguments.parts:
        graphs.print_parts(setup, methods, prompts_of(setup.decoder, arguments, 1)[0], arguments.profile)


def ablate(arguments: argparse.Namespace) -> None:
    """Tokens per step of trees without some of the sources. On a CPU too, trees are those of a GPU."""
    setup = set_up(arguments)
    decoder = setup.decoder
    if not isinstance(decoder.engine, GraphEngine):
        decoder.engine = GraphEngine(decoder.model, compiled=False, capacity=4 * decoder.model.context)
    runs = measured(setup, named(ablations(setup), arguments.only), arguments, out=arguments.out)
    CONSOLE.print(task_table(runs, "tokens/step", acceptance), speed_table(runs))


def steps(arguments: argparse.Namespace) -> None:
    """Tokens per step by task: the papers' methods, and ours without one improvement each."""
    setup = set_up(arguments)
    sampling = Sampling(temperature=arguments.temperature)
    methods = named(published(setup.heads), arguments.only)
    runs = measured(setup, methods, arguments, sampling, out=arguments.out)
    CONSOLE.print(task_table(runs, "tokens/step", acceptance))


def equal(arguments: argparse.Namespace) -> None:
    """Whether every method generates plain decoding's output: greedy (and transformers too), and with five seeds."""
    setup = set_up(arguments, arguments.exact)
    found: dict[str, dict[str, list[bool]]] = {}
    for seed in (None, *SEEDS):
        sampling = Sampling() if seed is None else Sampling(temperature=0.8, top_p=0.95, seed=seed)
        methods = named(lossless(setup, small=seed is not None), arguments.only)
        out = arguments.out and arguments.out.with_name(f"{arguments.out.stem}-{seed}.jsonl")
        for run in measured(setup, methods, arguments, sampling, theirs=seed is None, out=out):
            kinds = found.setdefault(run["label"], {"greedy": [], "sampled": []})
            kinds["greedy" if seed is None else "sampled"].append(run["equal"])
    table = Table("method", "greedy: equal", "sampled, five seeds: equal")
    for label, kinds in found.items():
        if label != PLAIN:
            table.add_row(label, *(f"{sum(same)} of {len(same)}" for same in kinds.values()))
    CONSOLE.print(table)
