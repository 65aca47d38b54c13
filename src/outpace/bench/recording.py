"""A race as benchmark results, so that the same page can show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..decoder import Decoder
from ..draft import Step
from ..methods import Method
from ..race import WARM_UP_TOKENS, Race
from ..result import Result
from .data import Question
from .entries import Entry, Ours, Run, Task, finished, lane_of
from .harness import Measured, Settings, compare
from .results import assemble

TASK = "race"


class Recorder:
    """Records every step of a race with its time."""

    def __init__(self, decoder: Decoder, methods: Sequence[Method]) -> None:
        self._decoder = decoder
        self._entries: list[Entry] = [Ours(decoder, method) for method in methods]
        self._steps: list[list[Step]] = [[] for _ in methods]
        self._times: list[list[float]] = [[] for _ in methods]
        self._added: list[Run] = []

    def show(self, number: int, run: Result, step: Step) -> None:
        """Called by `race.run` for each step."""
        self._steps[number].append(step)
        self._times[number].append(run.seconds)

    def add(self, entry: Entry, task: Task) -> Result:
        """Let transformers' `generate` run after the methods. Each of its steps counts as one row."""
        entry.run(replace(task, max_new_tokens=min(WARM_UP_TOKENS, task.max_new_tokens), record=False))
        run = entry.run(task)
        self._entries.append(entry)
        self._added.append(run)
        return Result(
            entry.label,
            entry.lossless,
            run.prompt_tokens,
            self._decoder.tokenizer.decode(run.token_ids, skip_special_tokens=True),
            token_ids=run.token_ids,
            accepted_per_step=[1] * run.steps,
            seconds=run.seconds,
            rows=run.steps,
            finish_reason=run.finish,
        )

    def results(self, prompt: str, settings: Settings, outcome: Race) -> dict[str, Any]:
        """The finished race, in the format of `outpace bench`."""
        question = Question(TASK, 0, (prompt,))
        tokens = self._decoder.encode(prompt, settings.raw)
        ran = [
            finished(result, steps, lane_of(steps, times, self._decoder.tokenizer))
            for result, steps, times in zip(outcome.runs, self._steps, self._times, strict=False)
        ]
        runs = []
        for entry, run in zip(self._entries, [*ran, *self._added], strict=True):
            where = {"label": entry.label, "task": TASK, "prompt": 0, "turn": 0, "repeat": 0}
            plain = outcome.runs[0].token_ids
            same = compare(self._decoder, tokens, plain, run.token_ids, settings.sampling)
            runs.append({**where, **asdict(run), **same})
        return assemble(
            self._decoder, self._entries, [question], replace(settings, data="one prompt"), Measured(runs, [], 0)
        )
