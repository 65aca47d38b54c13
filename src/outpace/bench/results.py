"""The results of a benchmark as one JSON object. docs/results-schema.md describes it; `VERSION` counts its changes."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..decoder import Decoder
from ..files import read_json
from ..trace import about, fingerprint_of
from .data import Question
from .entries import Entry
from .harness import Measured, Settings

KIND, VERSION = "outpace bench", 2
PACE = "transformers generate"  # the second baseline of speedups, beside plain decoding


def assemble(
    decoder: Decoder,
    entries: Sequence[Entry],
    questions: Sequence[Question],
    settings: Settings,
    measured: Measured,
) -> dict[str, Any]:
    """All results, and what they were measured with."""
    runs = [{name: value for name, value in run.items() if name != "lane"} for run in measured.runs]
    costs = decoder.engine.costs
    return {
        "kind": KIND,
        "version": VERSION,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "about": about(decoder.engine),
        "fingerprint": fingerprint_of(decoder.model),
        "settings": settings.to_json(),
        "entries": [
            {
                "label": entry.label,
                "name": entry.name,
                "settings": dict(entry.settings),
                "lossless": entry.lossless,
                "own": entry.own,
            }
            for entry in entries
        ],
        "identical": all(run["equal"] is not False for run in runs if run["label"] in _promised(entries)),
        "summary": summarize(runs, [entry.label for entry in entries]),
        "costs": None if costs is None else asdict(costs),
        "races": _races(decoder, questions, measured.runs),
        "skipped": measured.skipped,
        "runs": runs,
    }


def read_results(path: Path) -> dict[str, Any]:
    """A results file of this version."""
    return read_json(path, KIND, VERSION)


def summarize(runs: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Speedups and counts for each label, by task and overall.

    A speedup is a ratio of seconds per token on the same prompt, given as quartiles over all prompts and repeats: the
    first, the median, the third.
    """
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    paces = {label: {_where(run): _cost(run) for run in runs if run["label"] == label} for label in (labels[0], PACE)}
    found = []
    for label in labels:
        mine = [run for run in runs if run["label"] == label]
        by_task = {task: _figures([run for run in mine if run["task"] == task], paces) for task in tasks}
        found.append({"label": label, "all": _figures(mine, paces), "tasks": by_task})
    return found


def _figures(runs: Sequence[dict[str, Any]], paces: dict[str, dict[Any, float]]) -> dict[str, Any]:
    plain, other = paces.values()
    tokens, steps = sum(len(run["token_ids"]) for run in runs), sum(run["steps"] for run in runs)
    rows = sum(run["rows"] for run in runs)
    offered, right = Counter[str](), Counter[str]()
    for run in runs:
        offered.update(run["guesses"])
        right.update(run["sources"])
    compared = [run["equal"] for run in runs if run["equal"] is not None]
    return {
        "runs": len(runs),
        "tokens": tokens,
        "steps": steps,
        "rows_per_step": rows / steps if rows else None,
        "tokens_per_step": tokens / steps if steps else None,
        "guesses": {name: [count, right[name]] for name, count in offered.items()},
        "tokens_per_second": quartiles(1 / _cost(run) for run in runs),
        "speed": quartiles(plain[_where(run)] / _cost(run) for run in runs if _where(run) in plain),
        "times_plain": quartiles(run["times_plain"] for run in runs if run["times_plain"] is not None),
        "speed_to_transformers": quartiles(other[_where(run)] / _cost(run) for run in runs if _where(run) in other),
        "equal": sum(compared),
        "compared": len(compared),
    }


def quartiles(values: Iterable[float]) -> list[float] | None:
    """The first quartile, the median and the third quartile; None without values.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0]), quartiles([2.0]), quartiles([])
    ([2.0, 3.0, 4.0], [2.0, 2.0, 2.0], None)
    """
    listed = sorted(values)
    if len(listed) < 2:
        return listed * 3 or None
    return statistics.quantiles(listed, n=4, method="inclusive")


def _where(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["task"], run["prompt"], run["turn"], run["repeat"]


def _cost(run: dict[str, Any]) -> float:
    """Seconds per token."""
    return float(run["seconds"]) / max(1, len(run["token_ids"]))


def _promised(entries: Sequence[Entry]) -> set[str]:
    """The entries whose output must equal plain decoding's."""
    return {entry.label for entry in entries if entry.own and entry.lossless}


def _races(decoder: Decoder, questions: Sequence[Question], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recorded runs by prompt, with the text of their draft tokens."""
    lanes: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        if run["lane"] is not None:
            kept = {name: run[name] for name in ("label", "equal", "differs_at", "gap")}
            lanes[run["task"], run["prompt"]].append({**kept, "steps": run["lane"]})
    texts = {(question.task, question.number): question.turns[0] for question in questions}
    return [
        {"task": task, "prompt": number, "text": texts[task, number], "words": _words(decoder, found), "lanes": found}
        for (task, number), found in lanes.items()
    ]


def _words(decoder: Decoder, lanes: Iterable[dict[str, Any]]) -> dict[str, str]:
    drafts = [step["draft"] for lane in lanes for step in lane["steps"] if "draft" in step]
    tokens = sorted({token for draft in drafts for token in draft["tokens"]})
    if decoder.tokenizer is None:
        return {str(token): str(token) for token in tokens}
    return {str(token): decoder.tokenizer.decode([token]) for token in tokens}
