"""The setup of a reproduction: one decoder, some questions, and a journal for each part of the work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from ..bench.data import Question
from ..bench.entries import Entry, Ours, Run, Task, Transformers
from ..bench.harness import Settings, digest, measure
from ..bench.results import summarize
from ..decoder import Decoder
from ..errors import InputError
from ..methods import Method
from ..methods.headed import Ready
from ..picking import Sampling
from ..trace import about
from .findings import Claim

KINDS = {  # the papers' data sets by task, of our own prompts and of public files
    "chat": ("chat",),
    "summary": ("summary", "summarization"),
    "math": ("math", "math_reasoning", "gsm8k"),
    "code": ("code", "humaneval", "mbpp", "infilling", "classeval"),
}
PLAIN = "plain"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    each: int  # questions per task
    tokens: int  # new tokens per sequence


SHORT, FULL = Scale(1, 32), Scale(4, 128)


class Found:
    """The runs of one part, by label and task."""

    def __init__(self, entries: Sequence[Entry], runs: list[dict[str, Any]]) -> None:
        self.labels = [entry.label for entry in entries]
        self.lossless = [entry.label for entry in entries if entry.own and entry.lossless]
        self.runs = runs
        self.tasks = list(dict.fromkeys(run["task"] for run in runs))
        self._figures = {found["label"]: found for found in summarize(runs, self.labels)}

    def of(self, label: str, task: str = "") -> list[dict[str, Any]]:
        """The runs of an entry."""
        return [run for run in self.runs if run["label"] == label and task in ("", run["task"])]

    def figure(self, name: str, label: str, task: str = "") -> float | None:
        """A figure of the benchmark's summary; of quartiles, the median. None if it was not measured."""
        if label not in self._figures:
            return None
        found = self._figures[label]
        value = (found["tasks"][task] if task else found["all"])[name]
        chosen = value[1] if isinstance(value, list) else value
        return None if chosen is None else float(chosen)

    def steps(self, label: str, task: str = "") -> float | None:
        """Tokens per step."""
        return self.figure("tokens_per_step", label, task)

    def speed(self, label: str, task: str = "") -> float | None:
        """The speedup over plain decoding."""
        return self.figure("speed", label, task)

    def speed_on(self, label: str, kind: str) -> float | None:
        """The mean measured speedup over all tasks of a kind."""
        speeds = [self.speed(label, task) for task in KINDS[kind] if self.of(label, task)]
        known = [speed for speed in speeds if speed is not None]
        return sum(known) / len(known) if known else None

    def best(self, labels: Sequence[str], figure: Callable[[str], float | None]) -> str | None:
        """The label with the highest figure."""
        known = {label: value for label in labels if (value := figure(label)) is not None}
        return max(known, key=lambda label: known[label]) if known else None

    @property
    def different(self) -> dict[str, int]:
        """How many outputs of lossless methods differ from plain decoding's, by label."""
        wrong = {label: sum(run["equal"] is False for run in self.of(label)) for label in self.lossless}
        return {label: count for label, count in wrong.items() if count}


def same_text(found: Found) -> Claim:
    """The claim that all lossless methods generate plain decoding's output."""
    count = sum(len(found.of(label)) for label in found.lossless)
    wrong = ", ".join(f"{label} {wrong}" for label, wrong in found.different.items())
    differ = f"different outputs: {wrong}" if wrong else f"{count} outputs"
    return Claim("every lossless output is plain decoding's, token for token", not wrong, differ)


def known_by(method: Method) -> dict[str, str]:
    """Identifies a method's heads, so that runs with different heads are not confused."""
    ready = getattr(method, "heads", None)
    if not isinstance(ready, Ready):
        return {}
    weights = {name: weight.flatten() for name, weight in ready.heads.state_dict().items()}
    sample = {name: weight[:: max(1, len(weight) // 16)].tolist() for name, weight in weights.items()}
    return {"heads": sha256(json.dumps(sample).encode()).hexdigest()[:16]}


class ByRule(Ours):
    """A method that samples by a paper's acceptance rule. Its output is not compared with plain decoding's."""

    def __init__(self, decoder: Decoder, method: Method, label: str, rule: Literal["rejection", "typical"]) -> None:
        super().__init__(decoder, method, label, {**known_by(decoder.prepare(method)), "rule": rule})
        self.lossless = False
        self._rule = rule

    def run(self, task: Task) -> Run:
        return super().run(replace(task, sampling=replace(task.sampling, rule=self._rule)))


class Lab:
    """Measures the parts of a reproduction. What is in their journals already is not measured again."""

    def __init__(
        self,
        decoder: Decoder,
        questions: Sequence[Question],
        scale: Scale,
        runs: Path,
        *,
        model: Any = None,
        data: str = "",
        raw: bool = False,
        every: int = 1,
        show: Callable[..., None] = lambda share, text="": None,
    ) -> None:
        """`runs` is the folder of journals; `model` the transformers model, to measure its own `generate` too.

        That runs on every `every`-th question of a task.
        """
        self.decoder = decoder
        self.questions = questions
        self.scale = scale
        self.model = model
        self.parts = 1  # how many parts the work has, for the progress bar
        self._done = 0
        self._runs = runs
        self._data = data
        self._raw = raw
        self._every = every
        self._show = show
        if not questions:
            raise InputError("there are no questions to measure on.")

    @property
    def cpu(self) -> bool:
        """Whether it runs on a CPU, where every row costs time."""
        return self.decoder.model.device.type == "cpu"

    def tasks(self, *kinds: str) -> list[str]:
        """The questions' tasks of these kinds; all tasks if there are none, or no kind is named."""
        known = list(dict.fromkeys(question.task for question in self.questions))
        return [task for task in known if any(task in KINDS[kind] for kind in kinds)] or known

    def ours(self, methods: dict[str, Method | str]) -> list[Entry]:
        """Entries for methods by label, plain decoding first. A method given by name gets settings for this device."""
        plain: dict[str, Method | str] = {PLAIN: "autoregressive"}
        ready = {label: self.decoder.prepare(method) for label, method in {**plain, **methods}.items()}
        return [Ours(self.decoder, method, label, known_by(method)) for label, method in ready.items()]

    def theirs(self) -> list[Entry]:
        """transformers' own `generate`, if its model was given."""
        return [] if self.model is None else [Transformers(self.decoder, self.model)]

    def measure(
        self,
        part: str,
        entries: Sequence[Entry],
        tasks: Sequence[str],
        *,
        each: int = 0,
        temperature: float = 0.0,
        questions: Sequence[Question] = (),
    ) -> Found:
        """All entries on the first questions of each task. The first entry is plain decoding."""
        count, questions = each or self.scale.each, questions or self.questions
        chosen = [question for question in questions if question.task in tasks and question.number < count]
        how = Settings(
            self.scale.tokens,
            sampling=Sampling(temperature=temperature),
            raw=self._raw,
            data=self._data,
            digest=digest(questions),
            every=self._every,
        )

        def show(share: float, text: str = "") -> None:
            self._show((self._done + share) / self.parts, f"{part}: {text}")

        found = measure(self.decoder, entries, chosen, how, self._runs / f"{part}.jsonl", show)
        self._done += 1
        if not found.runs:
            raise InputError(f"no question fits the context of {self.decoder.model.name} with its answer.")
        return Found(entries, found.runs)

    def about(self) -> str:
        """Model, device and questions, in a sentence or two."""
        facts = about(self.decoder.engine)
        where = self._data or "our own prompts"
        model = re.sub(r"^.*/(?=[^/]+, )", "", facts["model"])  # without its folder
        each = self.scale.each
        return (
            f"{model}; {facts['device']}; {facts['dtype']}, runtime {facts['runtime']}, torch {facts['torch']}, "
            f"transformers {facts['transformers']}, outpace {facts['outpace']}. Questions: {where}, {each} to "
            f"{2 * each} of each task, {self.scale.tokens} new tokens at most. Speeds are medians over questions of "
            "the time per token, prefill included; tokens per step are all tokens divided by all steps."
        )
