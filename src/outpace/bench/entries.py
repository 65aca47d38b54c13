"""What a benchmark measures: our methods, and transformers' own `generate`, all timed and counted in the same way.

The clock runs from token ids in to token ids out, prefill included. Tokens are new tokens, the end-of-sequence token
included. A step is a forward pass of the model that yields tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from ..decoder import Decoder
from ..draft import Step
from ..loop import decode
from ..methods import Method
from ..models.attention import without_cudnn
from ..picking import Sampling
from ..result import Result
from ..text import Ending, TextStream
from ..trace import record, settings_of

PROMPT_LOOKUP_TOKENS = 10  # as in transformers' documentation


@dataclass(frozen=True)
class Run:
    """One generation, and its statistics."""

    prompt_tokens: int
    token_ids: list[int]
    seconds: float
    steps: int
    finish: str
    accepted_per_step: list[int] = field(default_factory=list)  # empty if unknown
    sources: dict[str, int] = field(default_factory=dict)  # tokens by the source whose draft token was accepted
    rows: int = 0  # of all steps, without prefill; 0 if unknown
    offered: list[int] = field(default_factory=list)  # by depth from 1: steps with a draft token that deep
    accepted: list[int] = field(default_factory=list)  # by depth from 1: steps that accepted a draft token there
    guesses: dict[str, int] = field(default_factory=dict)  # draft tokens computed, by source
    times_plain: float | None = None  # estimated speedup over plain decoding; None if unknown
    lane: list[dict[str, Any]] | None = None  # if recorded: each step with its time, for the race
    counts: dict[str, float] = field(default_factory=dict)  # further counts of an entry


@dataclass(frozen=True)
class Task:
    """What to generate."""

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    record: bool = False
    trace: Path | None = None  # where to write a trace, for our methods


class Entry(Protocol):
    """One line of the benchmark's table."""

    label: str
    name: str
    settings: Mapping[str, Any]
    lossless: bool  # whether its output must equal plain decoding's
    own: bool  # whether it is one of Outpace's methods

    def run(self, task: Task) -> Run:
        """Generate once."""
        ...


class Ours:
    """A method of Outpace."""

    own = True

    def __init__(
        self,
        decoder: Decoder,
        method: Method,
        label: str | None = None,
        given: Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> None:
        self._decoder = decoder
        self._model = model  # its name, for traces
        self._method = decoder.prepare(method)
        self.name = method.name
        self.label = label or method.name
        self.settings: Mapping[str, Any] = {**settings_of(self._method), **(given or {})}  # heads by their folder
        self.lossless = method.lossless

    def run(self, task: Task) -> Run:
        options: dict[str, Any] = {"sampling": task.sampling, "max_new_tokens": task.max_new_tokens}
        engine, result = self._decoder.engine, self._decoder.begin(task.prompt, self._method)
        steps, times = list[Step](), list[float]()
        limit = min(task.max_new_tokens, engine.model.context - len(task.prompt))
        ending = Ending(limit, self._decoder.ends)
        sampling = self._decoder.sampling_for(task.sampling, task.prompt, task.max_new_tokens)
        for step in result.follow(decode(engine, self._method, task.prompt, sampling, ending, limit)):
            steps.append(step)
            times.append(result.seconds)
        if engine.pool.device.type == "cuda":
            start = perf_counter()
            torch.cuda.synchronize()  # plain decoding has launched a step ahead; the next entry must not pay for it
            result.seconds += perf_counter() - start
        if task.trace is not None:
            record(self._decoder, self._method, task.prompt, steps, model=self._model, **options).save(task.trace)
        lane = lane_of(steps, times, self._decoder.tokenizer) if task.record else None
        return finished(result, steps, lane)


class Transformers:
    """transformers' own `generate`, plain or with its prompt lookup. It samples with its own random numbers.

    It runs without cuDNN attention, with which it is slower.
    """

    own = False

    def __init__(self, decoder: Decoder, model: Any, lookup: bool = False) -> None:
        self._decoder = decoder
        self._model = model
        self.name = "transformers"
        self.label = "transformers prompt lookup" if lookup else "transformers generate"
        self.settings: Mapping[str, Any] = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if lookup else {}
        self.lossless = True

    def run(self, task: Task) -> Run:
        with _forwards(self._model) as forwards:
            start = perf_counter()
            tokens = self._generate(task)
            seconds = perf_counter() - start
        finish = "stop" if tokens and tokens[-1] in self._decoder.ends else "length"
        lane = self._lane(task) if task.record else None
        return Run(len(task.prompt), tokens, seconds, len(forwards), finish, lane=lane)

    def _generate(self, task: Task, **options: Any) -> list[int]:
        ids = torch.tensor([task.prompt], device=self._decoder.model.device)
        sampling = task.sampling
        if sampling.temperature > 0:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        else:
            how = {"do_sample": False}
        settings = self._model.generation_config
        ends = self._decoder.ends
        pad = settings.pad_token_id if settings.pad_token_id is not None else (ends[0] if ends else 0)
        devices = [ids.device] if ids.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=sampling.temperature > 0), without_cudnn():
            if sampling.temperature > 0:
                torch.manual_seed(sampling.seed)
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=task.max_new_tokens,
                pad_token_id=pad,
                **how,
                **self.settings,
                **options,
            )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    def _lane(self, task: Task) -> list[dict[str, Any]]:
        """Generates again with a streamer, to record times: on a GPU a streamer synchronizes at every token."""
        streamer = _Streamer()
        start = perf_counter()
        self._generate(task, streamer=streamer)
        text = TextStream(self._decoder.tokenizer) if self._decoder.tokenizer is not None else None
        lane = []
        for tokens, at in streamer.seen[1:]:  # the first is the prompt
            texts = _texts(tokens, text)
            lane.append({"at": at - start, "tokens": tokens, "texts": texts, "sources": ["model"] * len(tokens)})
        return lane


class _Streamer:
    """Records when `generate` yields tokens."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], float]] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((value.reshape(-1).tolist(), perf_counter()))

    def end(self) -> None:
        pass


def lane_of(steps: Sequence[Step], times: Sequence[float], tokenizer: Any) -> list[dict[str, Any]]:
    """The steps with their times, for the race."""
    text = TextStream(tokenizer) if tokenizer is not None else None
    lane = []
    for step, at in zip(steps, times, strict=True):
        draft = {
            "tokens": step.draft.tokens,
            "parents": step.draft.parents,
            "candidates": step.draft.candidates,
            "sources": step.draft.sources,
            "rows": step.rows,
        }
        texts = _texts(step.tokens, text)
        lane.append({"at": at, "tokens": step.tokens, "texts": texts, "sources": step.sources, "draft": draft})
    return lane


def _texts(tokens: Sequence[int], text: TextStream | None) -> list[str]:
    """The text that each token adds: none while a character is incomplete."""
    texts = []
    for token in tokens:
        if text is None:
            texts.append(f"{token} ")
        else:
            text.push(token)
            texts.append(text.take())
    return texts


def finished(result: Result, steps: Sequence[Step], lane: list[dict[str, Any]] | None) -> Run:
    """The statistics of one of our runs."""
    offered, accepted = Counter[int](), Counter[int]()
    for step in steps:
        offered.update(range(1, 1 + max(step.draft.depths[: step.draft.candidates])))
        accepted.update(range(1, len(step.rows)))
    deepest = max(offered, default=0)
    return Run(
        result.prompt_tokens,
        result.token_ids,
        result.seconds,
        result.steps,
        result.finish_reason or "",
        result.accepted_per_step,
        dict(Counter(result.sources)),
        result.rows,
        [offered[depth] for depth in range(1, deepest + 1)],
        [accepted[depth] for depth in range(1, deepest + 1)],
        result.offered,
        result.times_plain,
        lane,
    )


@contextmanager
def _forwards(model: Any) -> Iterator[list[None]]:
    """A list that grows with each forward pass of the model."""
    seen: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(None))
    try:
        yield seen
    finally:
        handle.remove()
