"""Benchmarks: entries × questions × repeats, interleaved in one process, outputs compared with plain decoding's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from ..decoder import Decoder
from ..errors import InputError
from ..picking import Sampling
from ..race import first_difference
from ..receipt import judge
from ..trace import about, fingerprint_of, sampling_to_json
from .data import Question
from .entries import Entry, Task
from .journal import Journal

CPU_TOKENS, GPU_TOKENS = 4, 8  # to generate as a warm-up
WARM_UP_PROMPTS = (3, 12, 28, 60, 120, 250, 380, 500, 760)  # tokens: all sizes of prefill graphs
WARM_UP_EVERY = 500  # and from 1,000 on, for the graphs of longer contexts


@dataclass(frozen=True)
class Settings:
    """What all runs of a benchmark have in common."""

    max_new_tokens: int = 128
    repeats: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    raw: bool = False
    data: str = ""  # the name of the questions' file; empty: Outpace's own
    digest: str = ""  # of the questions
    every: int = 1  # transformers is slow: it runs on every n-th question of a task

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more.")
        if self.sampling.rule != "keyed":
            raise InputError("a bench compares outputs, so it can only sample with rule='keyed'.")

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        kept = {name: getattr(self, name) for name in ("max_new_tokens", "repeats", "raw", "data", "digest")}
        return {**kept, "sampling": sampling_to_json(self.sampling)}


@dataclass(frozen=True)
class Place:
    """The place of a run in the benchmark."""

    repeat: int
    index: int  # of the question among those chosen
    question: Question
    turn: int

    def key(self, entry: Entry) -> str:
        """The key of a run, which includes its settings."""
        where = [self.question.task, self.question.number, self.turn, self.repeat]
        return json.dumps([entry.label, dict(entry.settings), *where])

    def file(self, entry: Entry) -> str:
        """The file name of a run's trace."""
        parts = [self.question.task, self.question.number, self.turn, self.repeat, entry.label]
        return re.sub(r"[^\w.=-]+", "_", "-".join(map(str, parts))) + ".json"


@dataclass(frozen=True)
class Measured:
    """All runs, and the questions that did not fit in the context."""

    runs: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    resumed: int  # runs that were finished before


Show = Callable[..., None]


def measure(
    decoder: Decoder,
    entries: Sequence[Entry],
    questions: Sequence[Question],
    settings: Settings,
    journal: Path,
    show: Show = lambda share, text="": None,
    traces: Path | None = None,
) -> Measured:
    """Run everything that is not in the journal yet. The first entry is plain decoding, the reference for the others.

    With `traces`, each run of our methods writes one to that folder.
    """
    return _Bench(decoder, entries, questions, settings, journal, show, traces).run()


class _Bench:
    def __init__(
        self,
        decoder: Decoder,
        entries: Sequence[Entry],
        questions: Sequence[Question],
        settings: Settings,
        journal: Path,
        show: Show,
        traces: Path | None,
    ) -> None:
        labels = [entry.label for entry in entries]
        if len(set(labels)) < len(labels):
            raise InputError(f"two entries of the bench are the same: {', '.join(sorted(labels))}. Leave one out.")
        self._decoder = decoder
        self._entries = entries
        self._questions = questions
        self._settings = settings
        common = {
            "about": about(decoder.engine),
            "fingerprint": fingerprint_of(decoder.model),
            "settings": {name: value for name, value in settings.to_json().items() if name != "repeats"},
        }
        self._journal = Journal(journal, common)
        self._resumed = 0
        self._show = show
        self._traces = traces
        self._warm = False

    def run(self) -> Measured:
        runs = list[dict[str, Any]]()
        skipped = list[dict[str, Any]]()
        places = list(self._places())
        for number, place in enumerate(places):
            prompt = self._prompt(place)
            if prompt is None or len(prompt) + self._settings.max_new_tokens > self._decoder.model.context:
                tokens = None if prompt is None else len(prompt)
                where = {"task": place.question.task, "prompt": place.question.number, "turn": place.turn}
                skipped.append({**where, "repeat": place.repeat, "prompt_tokens": tokens})
                continue
            runs += self._compared(self._all_entries(place, prompt, number, len(places)), prompt)
        return Measured(runs, skipped, self._resumed)

    def _places(self) -> Iterator[Place]:
        for repeat in range(self._settings.repeats):
            for index, question in enumerate(self._questions):
                for turn in range(len(question.turns)):
                    yield Place(repeat, index, question, turn)

    def _all_entries(
        self, place: Place, prompt: list[int], number: int, places: int
    ) -> list[tuple[Entry, dict[str, Any]]]:
        """Every entry on one prompt, in rotating order, so that none always follows the same other one."""
        found = dict[int, dict[str, Any]]()
        count = len(self._entries)
        for turn in range(count):
            which = (number + turn) % count
            entry = self._entries[which]
            if not entry.own and place.question.number % self._settings.every:
                continue
            self._show((number + turn / count) / places, f"{place.question.task}: {entry.label}")
            finished = self._journal.runs.get(place.key(entry))
            self._resumed += finished is not None
            found[which] = finished or self._run(entry, place, prompt)
        return [(self._entries[which], found[which]) for which in sorted(found)]

    def _run(self, entry: Entry, place: Place, prompt: list[int]) -> dict[str, Any]:
        self._warm_up()
        first = (place.repeat, place.question.number, place.turn) == (0, 0, 0)
        trace = None if self._traces is None else self._traces / place.file(entry)
        run = entry.run(Task(prompt, self._settings.sampling, self._settings.max_new_tokens, first, trace))
        where = {
            "label": entry.label,
            "task": place.question.task,
            "prompt": place.question.number,
            "turn": place.turn,
            "repeat": place.repeat,
        }
        return self._journal.add(place.key(entry), {**where, **asdict(run)})

    def _warm_up(self) -> None:
        """Allocate, compile and capture before anything is timed."""
        if self._warm:
            return
        self._warm = True
        self._decoder.engine.keep_programs(len(self._entries))
        for prompt, length in self._warm_ups():
            for entry in self._entries:
                self._show(0.0, f"warming up: {entry.label}")
                entry.run(Task(prompt, self._settings.sampling, min(length, self._settings.max_new_tokens)))

    def _warm_ups(self) -> Iterator[tuple[list[int], int]]:
        """Prompts with the numbers of tokens to generate.

        A GPU has graphs by rows and context length. Its prompts are not the bench's, so that `auto` learns nothing
        about those.
        """
        context = self._decoder.model.context
        if self._decoder.model.device.type == "cpu":
            prompts = (self._encode(question.turns[0]) for question in self._questions)
            yield from islice(((prompt, CPU_TOKENS) for prompt in prompts if len(prompt) + CPU_TOKENS <= context), 1)
            return
        longest = max(
            sum(len(self._encode(turn)) + self._settings.max_new_tokens for turn in question.turns)
            for question in self._questions
        )
        longest = min(longest, context - GPU_TOKENS)
        sizes = [*WARM_UP_PROMPTS, *range(1000, longest + WARM_UP_EVERY, WARM_UP_EVERY)]
        for size in sorted({min(size, longest) for size in sizes}):
            yield [1] * size, GPU_TOKENS

    def _encode(self, prompt: str) -> list[int]:
        return self._decoder.encode(prompt, self._settings.raw)

    def _prompt(self, place: Place) -> list[int] | None:
        """The turn's prompt, after plain decoding's answers to the earlier turns. None if one of them was skipped."""
        turns = place.question.turns
        messages = [{"role": "user", "content": turns[0]}]
        for turn in range(place.turn):
            before = Place(place.repeat, place.index, place.question, turn)
            run = self._journal.runs.get(before.key(self._entries[0]))
            if run is None:
                return None
            answer = self._decoder.tokenizer.decode(run["token_ids"], skip_special_tokens=True)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turns[turn + 1]}]
        if self._settings.raw:
            return self._decoder.encode("\n".join(message["content"] for message in messages), raw=True)
        return self._decoder.encode(messages)

    def _compared(self, found: list[tuple[Entry, dict[str, Any]]], prompt: list[int]) -> list[dict[str, Any]]:
        """The runs of one prompt, each with whether its output is plain decoding's, which is the first."""
        plain = found[0][1]["token_ids"]
        compared = []
        for entry, run in found:
            if not entry.own and self._settings.sampling.temperature > 0:
                verdict = {"equal": None, "differs_at": None, "gap": None}  # it samples with other random numbers
            else:
                how = self._decoder.sampling_for(self._settings.sampling, prompt, self._settings.max_new_tokens)
                verdict = compare(self._decoder, prompt, plain, run["token_ids"], how)
            compared.append({**{name: value for name, value in run.items() if name != "key"}, **verdict})
        return compared


def compare(
    decoder: Decoder, prompt: list[int], plain: Sequence[int], found: Sequence[int], sampling: Sampling
) -> dict[str, Any]:
    """Whether an output equals plain decoding's; if not, where it first differs, and the gap of the top two scores."""
    place = first_difference(plain, found)
    gap: float | None = None
    if place is not None and place <= len(plain):
        *_, last = judge(decoder.engine, prompt, plain[:place], sampling)
        gap = last.margin if math.isfinite(last.margin) else None
    return {"equal": place is None, "differs_at": place, "gap": gap}


def digest(questions: Sequence[Question]) -> str:
    """A digest of a set of questions."""
    return sha256(json.dumps([asdict(question) for question in questions]).encode()).hexdigest()[:16]
