"""The decoding loop: `write`, the only one, for every method, sampling rule and kind of output."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from .draft import MODEL, Draft, Likely, Scores, Step, Verdict, extended
from .errors import InvalidLogits, NoRoom
from .methods.autoregressive import Autoregressive
from .methods.base import Drafter, Method
from .picking import Picker, Sampling
from .pool import Sequence as Owner
from .runtime.plain import Engine, Turn, Work
from .sources.prediction import Prediction
from .verifying import verify

Stop: TypeAlias = "Callable[[int], str | None]"
"""Called with every new token once, in order; returns the finish reason if the sequence ends with it, or None."""


class Hint(Protocol):
    """An external source of draft tokens, such as a prediction. A wrong hint costs time, never the output."""

    name: str  # the name of the source

    def after(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Draft tokens after the sequence, at most this many; none if it has none."""
        ...


class Extras(NamedTuple):
    """Further options of a request. Logprobs, and hints other than a prediction, need the host in every step."""

    logprobs: int | None = None  # log probabilities of each token, and of this many alternatives
    hints: tuple[Hint, ...] = ()
    salt: str = ""  # KV slots are shared only with sequences of the same salt
    written: int = 0  # the prompt's last tokens that belong to the answer, after preemption


PLAINLY = Extras()


Text: TypeAlias = "Generator[Work | Turn | Step, Any, None]"
"""A running sequence: it yields work and is sent the output, or yields a step and is sent None."""


def decode(
    engine: Engine,
    method: Method,
    prompt: Sequence[int],
    sampling: Sampling,
    stop: Stop,
    limit: int | None = None,
    extras: Extras = PLAINLY,
    grows: bool = False,
) -> Generator[Step, None, None]:
    """Decode `prompt` step by step until `stop`. Other sequences may take steps in between.

    If it `grows`, it may reuse the KV cache of the last sequence, and the next one may reuse its own.
    """
    text = engine.turns.begin(write(engine, method, prompt, sampling, stop, limit, extras, grows=grows))
    try:
        while True:
            with engine.turns:
                step = _step(text)
            if step is None:
                return
            yield step
    finally:
        engine.turns.end(text)


def _step(text: Text) -> Step | None:
    """The next step, with its work done at once; None after the last."""
    item = next(text, None)
    while isinstance(item, Work | Turn):
        item = text.send(item.do())
    return item


def write(
    engine: Engine,
    method: Method,
    prompt: Sequence[int],
    sampling: Sampling,
    stop: Stop,
    limit: int | None = None,
    extras: Extras = PLAINLY,
    share: bool = False,
    grows: bool = False,
) -> Text:
    """The loop for one sequence, a coroutine that yields work, to be done alone or batched.

    It generates at most `limit` tokens, or until `stop`. With `share` it may reuse KV slots of a sequence with the same
    prefix.
    """
    picker = Picker(sampling, len(prompt) - extras.written)
    engine = engine.for_one_text(picker)
    may_share = engine.most_texts > 1 and method.shares
    share, grows = share and may_share, grows and may_share
    prediction = next((hint for hint in extras.hints if isinstance(hint, Prediction)), None)
    by_host = extras.logprobs is not None or any(hint is not prediction for hint in extras.hints)
    program = None if by_host else engine.program_for(method, sampling)
    if prediction is not None and program is not None and not program.predicts:
        program = None

    reader = method.reader if program is None else program.reader
    with engine.pool.sequence(prompt, share, extras.salt, reader, grows) as sequence:
        sequence.written = extras.written
        place = None if program is None else program.reserve(sequence, sampling, limit, prediction)
        text = sequence.tokens if place is None else [*prompt]

        def relieve(tokens: int) -> bool:
            """Whether plain decoding's program takes over, behind this many new tokens."""
            nonlocal program, place
            program = None if by_host or extras.hints else engine.program_for(Autoregressive(), sampling)
            if program is not None:
                with suppress(NoRoom):  # the host goes on, and allocates slots as needed
                    place = program.reserve(sequence, sampling, None if limit is None else limit - tokens)
            return place is not None

        try:
            if place is None:
                with method.start(engine, sequence, picker) as drafter:
                    yield from _by_drafter(engine, drafter, sequence, picker, stop, limit, extras, relieve)
                text = [*sequence.tokens]
            if place is not None:
                yield from _by_program(engine, program, place, sequence, sampling, stop, text)
        finally:
            method.remember(engine.model, text)


def _by_drafter(
    engine: Engine,
    drafter: Drafter,
    sequence: Owner,
    picker: Picker,
    stop: Stop,
    limit: int | None,
    extras: Extras,
    relieve: Callable[[int], bool],
) -> Text:
    """The loop with the host in every step: draft, score, verify, learn. Ends early if a program takes over."""
    finish: str | None = None
    written, reused = 0, 0 if extras.written else len(sequence.slots)
    may_rest = True

    def finished(token: int) -> bool:
        nonlocal finish, written
        written += 1
        finish = stop(token) or ("length" if written == limit else None)
        return finish is not None

    while finish is None:
        if drafter.rests and may_rest:
            sequence.written = extras.written + written
            if relieve(written):
                return
            may_rest = False
        clock = _Clock()
        try:
            room = engine.model.room(sequence.position)
            draft = yield from drafter.drafting(room)
            for hint in extras.hints if drafter.extends else ():
                path = hint.after(sequence.tokens, room)
                draft = extended(draft, path, hint.name, engine.model.branches)
            clock.lap("draft")
            scores = yield from drafter.score(draft)
            clock.lap("score")
            verdict = verify(draft, scores, picker, sequence.tokens, finished)
        except InvalidLogits as error:
            raise InvalidLogits(f"at new token {written + 1}: {error}.") from error
        likely = () if extras.logprobs is None else _likely(scores, verdict, extras.logprobs)
        engine.pool.keep(sequence, draft, verdict)
        clock.lap("verify")
        drafter.learn(draft, scores, verdict)
        clock.lap("learn")
        cost = _cost(drafter, draft, clock.laps, first=written == len(verdict.tokens))
        sources = _sources(draft, verdict)
        lossless = picker.sampling.lossless
        yield Step(verdict.tokens, sources, draft, verdict.rows, finish, clock.laps, "", cost, likely, reused, lossless)
        reused = 0


def _by_program(
    engine: Engine, program: Any, place: Any, sequence: Owner, sampling: Sampling, stop: Stop, text: list[int]
) -> Text:
    """The loop where a whole step runs without the host, which only reads the results. `text` grows."""
    finish: str | None = None
    reused = 0 if sequence.written else len(sequence.slots)
    seen: list[Any] = []
    try:
        try:
            yield from engine.read(sequence, program.sees(place, seen))
        except InvalidLogits as error:
            raise InvalidLogits(f"at new token {sequence.written + 1}: {error}.") from error
        yield Turn(program, place)  # let waiting prompts prefill first, since opening keeps the host busy
        program.open(place, sequence, sampling, seen)
        while finish is None:
            clock = _Clock()
            stepped = None
            while stepped is None:
                stepped = yield Turn(program, place)
            clock.lap("score")
            count = 0
            for token in stepped.tokens:
                count += 1
                finish = stop(token)
                if finish is not None:
                    break
            text += stepped.tokens[:count]
            if finish is None and len(text) == place.limit:
                finish = "length"  # the end of the context: the lane is idle
            if finish is None and stepped.fault:
                place_of_it = len(text) - len(sequence.tokens) + sequence.written + 1
                raise InvalidLogits(
                    f"at new token {place_of_it}: the model's logits contain NaN, or every token is ruled out."
                )
            verdict = Verdict(stepped.rows[:count], stepped.tokens[:count])
            draft = stepped.draft
            sources = _sources(draft, verdict)
            yield Step(
                verdict.tokens, sources, draft, verdict.rows, finish, clock.laps, cost=stepped.cost, reused=reused
            )
            reused = 0
    finally:
        program.close(place, sequence, text[len(sequence.tokens) :])


def _cost(drafter: Drafter, draft: Draft, laps: dict[str, float], first: bool) -> tuple[float, float] | None:
    """The cost of a step, drafting included, and of a plain decoding step, if the cost curve is known."""
    costs = drafter.engine.costs
    if costs is None:
        return None
    own = laps["learn"]
    if not (first or drafter.asks):  # heads prefill before their first draft
        own += laps["draft"]
    return costs.price(len(draft)) + own / costs.step(1), 1.0


def _sources(draft: Draft, verdict: Verdict) -> tuple[str, ...]:
    """The source of each token: who drafted it, or the model."""
    found = [draft.sources[row] for row in verdict.rows[1:]]
    last = verdict.rows[-1]  # the sequence may end with a token that is drafted below it
    for row in range(last + 1, draft.candidates):
        if draft.parents[row] == last and draft.tokens[row] == verdict.tokens[-1]:
            return (*found, draft.sources[row])
    return (*found, MODEL)


@torch.inference_mode()
def _likely(scores: Scores, verdict: Verdict, most: int) -> tuple[Likely, ...]:
    """Log probabilities of the chosen tokens, from the logits of the accepted rows."""
    chances = scores.logits[list(verdict.rows)].float().log_softmax(-1)
    tokens = torch.tensor(verdict.tokens, device=chances.device)
    chosen = chances.gather(1, tokens[:, None])[:, 0].tolist()
    values, best = (found.tolist() for found in chances.topk(min(most, chances.shape[1])))
    pairs = [tuple(zip(*line, strict=True)) for line in zip(best, values, strict=True)]
    return tuple(map(Likely, chosen, pairs))


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        self.laps[name] = now - self._last
        self._last = now
