"""What decoding returns: the output for one prompt, with statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

from .draft import MODEL, Likely, Step


@dataclass
class Result:
    """The output for one prompt, as it grows, with statistics of its decoding."""

    method: str
    lossless: bool
    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # for each token, the source that drafted it, or "model"
    accepted_per_step: list[int] = field(default_factory=list)
    seconds: float = 0.0  # in a batch: until the sequence ends, work for others included
    rows: int = 0  # computed by the model, in all steps
    offered: dict[str, int] = field(default_factory=dict)  # draft tokens among them, by source
    seconds_by_part: dict[str, float] = field(default_factory=dict)  # draft, score, verify, learn
    cost: tuple[float, float] = (0.0, 0.0)  # of all steps, and of plain decoding, where known
    finish_reason: str | None = None
    error: Exception | None = None  # of a failed sequence of a batch; finish_reason is then "error"
    logprobs: list[Likely] = field(default_factory=list)  # for each token, if requested
    reused: int = 0  # prompt tokens found in the KV cache
    seconds_to_first_token: float | None = None  # prefill, and compilation at first use

    @property
    def new_tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.token_ids)

    @property
    def steps(self) -> int:
        """The number of decoding steps."""
        return len(self.accepted_per_step)

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per step; 1 with plain decoding."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def rows_per_step(self) -> float:
        """Rows computed per step; 1 with plain decoding."""
        return self.rows / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed, prefill included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def decoding_tokens_per_second(self) -> float:
        """Speed after the first step: prefill, and compilation at first use, are excluded."""
        if self.steps < 2 or self.seconds_to_first_token is None:
            return self.tokens_per_second
        return sum(self.accepted_per_step[1:]) / max(self.seconds - self.seconds_to_first_token, 1e-9)

    @property
    def accepted(self) -> dict[str, int]:
        """Accepted draft tokens, by source."""
        return {name: self.sources.count(name) for name in dict.fromkeys(self.sources) if name != MODEL}

    @property
    def times_plain(self) -> float | None:
        """The estimated speedup over plain decoding, from the cost of a one-row step; None if that is unknown.

        Prefill is excluded.
        """
        steps, plain = self.cost
        return plain / steps if steps else None

    @property
    def remark(self) -> str | None:
        """A note on what the method did, if its name is misleading; otherwise None."""
        if self.method == "lookahead" and [*self.offered] == ["history"]:
            return "a window does not pay here, so all draft tokens came from the text, as in prompt-lookup"
        return None

    def follow(self, stream: Iterator[Step]) -> Iterator[Step]:
        """Pass steps on, counted and timed. The consumer's own time is not counted."""
        while True:
            start = perf_counter()
            step = next(stream, None)
            self.seconds += perf_counter() - start
            if step is None:
                return
            self.take(step)
            yield step

    def take(self, step: Step) -> None:
        """Add a step."""
        if self.seconds_to_first_token is None:
            self.seconds_to_first_token = self.seconds
        self.text += step.text
        self.token_ids += step.tokens
        self.sources += step.sources
        self.accepted_per_step.append(len(step.tokens))
        self.finish_reason = step.finish
        self.logprobs += step.logprobs
        self.reused += step.reused
        self.lossless = self.lossless and step.lossless
        self.rows += len(step.draft)
        for source in step.draft.sources[1:]:
            self.offered[source] = self.offered.get(source, 0) + 1
        for part, seconds in step.seconds.items():
            self.seconds_by_part[part] = self.seconds_by_part.get(part, 0.0) + seconds
        if step.cost is not None:
            spent, single = step.cost
            self.cost = (self.cost[0] + spent, self.cost[1] + single * len(step.tokens))

    def to_json(self) -> dict[str, object]:
        """The result as plain values: what `outpace generate --json` prints."""
        return {name: getattr(self, name) for name in _JSON}


_JSON = (
    "text",
    "token_ids",
    "prompt_tokens",
    "new_tokens",
    "steps",
    "tokens_per_step",
    "seconds",
    "seconds_to_first_token",
    "tokens_per_second",
    "method",
    "finish_reason",
    "accepted_per_step",
    "rows",
    "offered",
    "accepted",
    "times_plain",
    "remark",
    "seconds_by_part",
    "lossless",
)
