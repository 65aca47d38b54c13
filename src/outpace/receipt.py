"""The losslessness receipt: a trace's text is scored again with plain forward passes, and each token chosen again.

A forward pass over the whole text rounds differently from the steps that generated it. So a token is right if it is
chosen again, and a near-tie if it is not, but its score is within a small tolerance of the best. In exact mode the bits
are the same, and every token must be chosen again.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from .decoder import Decoder
from .draft import MODEL, Step, Verdict, chain
from .errors import InputError, InvalidLogits, ModelError
from .heads.storing import mismatch
from .picking import Picker, Sampling
from .runtime.plain import Engine
from .text import Ending, TextStream
from .trace import Trace, about, fingerprint_of

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}  # the most that rounding changes scores
_CHUNK = 128  # rows of a forward pass, whose logits are in memory together


@dataclass(frozen=True)
class Mark:
    """One token, checked."""

    token: int  # in the trace
    picked: int  # chosen now
    margin: float  # the best score minus the second best
    behind: float  # the best score minus this token's; 0 if it is the best


@dataclass(frozen=True)
class Receipt:
    """The result of checking a trace. Tokens are counted from 1."""

    marks: list[Mark]
    tolerance: float
    problems: list[str]  # other mismatches, of the end and of steps

    @property
    def near_ties(self) -> list[int]:
        """Tokens that rounding could change."""
        return [place for place, mark in enumerate(self.marks, 1) if mark.margin <= self.tolerance]

    @property
    def wrong(self) -> int | None:
        """The first token that the model would not have chosen."""
        places = (place for place, mark in enumerate(self.marks, 1) if not mark.behind <= self.tolerance)
        return next(places, None)

    @property
    def passed(self) -> bool:
        return self.wrong is None and not self.problems

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        if self.wrong is not None:
            mark = self.marks[self.wrong - 1]
            return (
                f"fail: token {self.wrong} is {mark.token}, but the model chooses {mark.picked} "
                f"(its score is {mark.behind:.4g} higher)"
            )
        if self.problems:
            return f"fail: {self.problems[0]}"
        again = sum(mark.token == mark.picked for mark in self.marks)
        return f"pass: {again} of {len(self.marks)} tokens chosen again, {len(self.near_ties)} near-ties"

    def to_json(self) -> dict[str, object]:
        """The receipt as plain values."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "wrong": self.wrong,
            "near_ties": self.near_ties,
            "tolerance": self.tolerance,
            "problems": self.problems,
            "tokens": [mark.token for mark in self.marks],
            "picked": [mark.picked for mark in self.marks],
            "margins": [mark.margin if math.isfinite(mark.margin) else None for mark in self.marks],
        }


def check(decoder: Decoder, trace: Trace, tolerance: float | None = None) -> Receipt:
    """Score the trace's text again with the decoder's model, and choose each of its tokens again."""
    _refuse_what_cannot_be_checked(decoder, trace)
    if tolerance is None:
        tolerance = 0.0 if _same_bits(decoder, trace) else TOLERANCES.get(decoder.model.dtype, 1e-3)
    if not 0 <= tolerance < math.inf:
        raise InputError(f"tolerance={tolerance} must be 0 or more, and finite.")
    sampling = decoder.sampling_for(trace.sampling, trace.prompt, trace.max_new_tokens)
    marks = judge(decoder.engine, trace.prompt, trace.tokens, sampling)
    return Receipt(marks, tolerance, [*_ending_problems(decoder, trace), *_step_problems(trace)])


def _same_bits(decoder: Decoder, trace: Trace) -> bool:
    """Whether the decoder and the trace have the same bits: both exact, with the same device, dtype and torch."""
    mine = about(decoder.engine)
    return decoder.engine.exact and all(
        mine[name] == trace.about.get(name) for name in ("device", "dtype", "runtime", "torch")
    )


def judge(engine: Engine, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> list[Mark]:
    """A mark for each token of an answer."""
    picker = Picker(sampling, len(prompt))
    text, marks = list(prompt), list[Mark]()
    with engine.turns, closing(rescore(engine, prompt, answer)) as rows:
        for token, logits in zip(answer, rows, strict=True):
            try:
                scores = picker.ranking(logits, text)
                first, second = [*scores.topk(min(2, len(scores))).values.tolist(), -math.inf][:2]
                marks.append(Mark(token, picker.choose(logits, text), first - second, first - float(scores[token])))
            except InvalidLogits as error:
                raise InvalidLogits(f"at new token {len(text) - len(prompt) + 1}: {error}.") from error
            text.append(token)
    return marks


def rescore(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> Generator[torch.Tensor, None, None]:
    """The model's logits [vocabulary] before each token of an answer, from forward passes over many tokens at once."""
    engine = engine.for_one_text()
    with engine.pool.sequence(prompt) as sequence:
        done = 0
        while done < len(answer):
            count = min(_CHUNK, len(answer) - done, engine.model.room(sequence.position) + 1)
            part = answer[done : done + count]
            draft = chain(sequence.tokens[-1], part[:-1], MODEL)
            logits = engine.score(sequence, draft).logits.clone()  # the engine may reuse the memory
            engine.pool.keep(sequence, draft, Verdict(tuple(range(count)), tuple(part)))
            yield from logits
            done += count


def _refuse_what_cannot_be_checked(decoder: Decoder, trace: Trace) -> None:
    mine = fingerprint_of(decoder.model)
    if (name := mismatch(trace.fingerprint, mine)) is not None:
        other = "other weights" if name == "sample" else f"{name} {trace.fingerprint.get(name)}, not {mine[name]}"
        raise ModelError(
            f"the trace is of a model other than {decoder.model.name}: one with {other}. Give the right one "
            "with --model."
        )
    if trace.sampling.rule != "keyed" and trace.sampling.temperature > 0:
        raise InputError(
            f"with the rule {trace.sampling.rule!r} the output depends on the drafts, so it cannot be checked "
            "afterwards. Use the rule 'keyed'."
        )
    for token in (*trace.prompt, *trace.tokens):
        if not 0 <= token < decoder.model.vocabulary:
            raise InputError(
                f"the trace has token id {token}; the model's ids are 0 to {decoder.model.vocabulary - 1}."
            )
    if not trace.prompt or len(trace.prompt) + len(trace.tokens) > decoder.model.context:
        raise InputError(
            f"the trace has {len(trace.prompt)} tokens of prompt and {len(trace.tokens)} of answer; the model takes "
            f"1 to {decoder.model.context}."
        )


def _ending_problems(decoder: Decoder, trace: Trace) -> list[str]:
    """Problems with the end of the text and its finish reason."""
    if not trace.steps or trace.steps[-1].finish is None:
        return ["the text has no end: steps are missing"]
    if trace.stop and decoder.tokenizer is None:
        raise InputError("a trace with stop strings needs a tokenizer. Pass one to Decoder.")
    stream = TextStream(decoder.tokenizer, trace.stop) if trace.stop else None
    limit = min(trace.max_new_tokens, decoder.model.context - len(trace.prompt))
    ending = Ending(limit, decoder.ends, stream)
    ends = [ending(token) for token in trace.tokens]
    for place, finish in enumerate(ends[:-1], 1):
        if finish is not None:
            return [f"the text continues after its end ({finish}) at token {place}"]
    if ends[-1] != trace.steps[-1].finish:
        return [f"the trace's finish reason is {trace.steps[-1].finish!r}; it must be {ends[-1]!r}"]
    return []


def _step_problems(trace: Trace) -> list[str]:
    """Steps that did not accept what follows from their draft and the text."""
    problems = []
    last = trace.prompt[-1]
    for number, step in enumerate(trace.steps, 1):
        if step.draft.tokens[0] != last:
            problems.append(f"step {number} drafts after token {step.draft.tokens[0]}, but the text has {last} there")
        elif (step.rows, step.sources) != _accepted(step):
            problems.append(f"step {number} did not accept the path of its draft that has its tokens")
        if step.finish is not None and number < len(trace.steps):
            problems.append(f"step {number} ends the text ({step.finish}), but other steps follow")
        last = step.tokens[-1] if step.tokens else last
    return problems


def _accepted(step: Step) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The rows and sources of the step's tokens in its draft."""
    rows, sources = list[int](), list[str]()
    row: int | None = 0
    for token in step.tokens:
        if row is None:
            break
        rows.append(row)
        row = step.draft.child(row, token)
        sources.append(MODEL if row is None else step.draft.sources[row])
    if row is not None and step.finish is None:
        rows.append(row)  # verification would have continued
    return tuple(rows), tuple(sources)
