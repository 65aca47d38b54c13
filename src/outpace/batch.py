"""Continuous batching: rows of several sequences share forward passes.

Each sequence runs its own decoding loop, with its own method, sampling and stop conditions. Sequences join and leave
between forward passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from .draft import Step
from .errors import NoRoom
from .loop import PLAINLY, Extras, Stop, Text, write
from .methods.base import Method
from .picking import Sampling
from .pool import common
from .runtime.plain import Engine, Turn, Work, together

MOST = 64  # sequences decoded at the same time; others wait
WORTH = 128  # tokens of common prefix that are worth waiting for

Event: TypeAlias = "tuple[int, Step | Exception]"
"""The number of a sequence, and its next step or the error that ended it."""


class Request(NamedTuple):
    """A request: the arguments of `loop.write`."""

    engine: Engine
    method: Method
    prompt: Sequence[int]
    sampling: Sampling
    stop: Stop
    limit: int | None = None
    extras: Extras = PLAINLY


class _Begun:
    """A running sequence."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.written: list[int] = []
        self.prompt, self.salt = request.prompt, request.extras.salt
        self.read = False  # whether its first step, and so prefill, is done
        self.ended = False
        self.text: Text = request.engine.turns.begin(write(*request, share=True), batched=True)
        self._turns = request.engine.turns
        self.work: Work | Turn  # what it waits for

    def go_on(self, reply: Any) -> list[Step | Exception]:
        """Its steps until it yields work again. A reply that is an error ends it, like an error of its own."""
        found: list[Step | Exception] = []
        try:
            item = self.text.throw(reply) if isinstance(reply, Exception) else self.text.send(reply)
            while isinstance(item, Step):
                self.read = True
                self.written += item.tokens
                found.append(item)
                item = self.text.send(None)
            self.work = item
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.ended = True
            found.append(error)
        if self.ended:
            self.end()
        return found

    def rest(self) -> Request:
        """The rest of the request, to continue after preemption. The stop conditions have seen the tokens so far."""
        request, count = self.request, len(self.written)
        return request._replace(
            prompt=[*request.prompt, *self.written],
            limit=None if request.limit is None else request.limit - count,
            extras=request.extras._replace(written=request.extras.written + count),
        )

    def end(self) -> None:
        """Close the sequence, after the current step if there is one."""
        self._turns.end(self.text)


class Writing:
    """Requests and their sequences, numbered from 0. As a context manager it frees all slots.

    Callers of `step`, `add` and `cancel` must hold the engine's lock. An error in one sequence is an event; the others
    continue. A failed forward pass ends all sequences with rows in it. When slots run out, the youngest sequence is
    preempted, and prefilled again when another has ended.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._count = 0
        self._queue: deque[tuple[int, Request]] = deque()
        self._texts: dict[int, _Begun] = {}  # the first has waited longest
        self._full = False  # no sequence starts until one ends
        self.set_aside = 0  # number of preemptions

    def add(self, request: Request) -> int:
        """Add a request, to start with the next step or when there is room. Returns its number."""
        self._queue.append((self._count, request))
        self._count += 1
        return self._count - 1

    def cancel(self, number: int) -> None:
        """End a sequence now and free its slots. No effect on one that has ended."""
        self._queue = deque(item for item in self._queue if item[0] != number)
        if number in self._texts:
            self._texts.pop(number).end()
            self._full = False

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    def begun(self, number: int) -> bool:
        """Whether a sequence is running."""
        return number in self._texts

    def __bool__(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._queue or self._texts)

    def step(self) -> list[Event]:
        """Start waiting requests, run one forward pass, and return its events."""
        events = self._admit()
        if not self._texts:
            return events
        pack = self._next_pack()
        works = [begun.work for begun in pack]
        replies: Sequence[Any]
        try:
            replies = together(works)
        except Exception as error:
            replies = [error] * len(pack)
        # Before the next forward pass, which overwrites the outputs.
        for begun, reply in zip(pack, replies, strict=True):
            if self._texts.get(begun.number) is begun:  # otherwise it was just preempted
                events += self._go_on(begun, reply)
        return events

    def _go_on(self, begun: _Begun, reply: Any) -> list[Event]:
        found = begun.go_on(reply)
        self._texts.pop(begun.number, None)
        if not begun.ended:
            self._texts[begun.number] = begun  # now the last
        elif self._texts and found and isinstance(found[-1], NoRoom):
            found.pop()
            self._make_room(begun)
        else:
            self._full = False
        return [(begun.number, item) for item in found]

    def _make_room(self, begun: _Begun) -> None:
        """Preempt a sequence that found no free slots, and the youngest running one, if that is younger."""
        aside = [begun]
        youngest = max(self._texts.values(), key=lambda text: text.number)
        if begun.written and youngest.number > begun.number:
            del self._texts[youngest.number]
            youngest.end()
            aside.insert(0, youngest)
        for text in aside:
            self._queue.appendleft((text.number, text.rest()))
            self.set_aside += bool(text.written)
        self._full = len(aside) == 1

    def _admit(self) -> list[Event]:
        """Start waiting requests while there is room, except those whose prefix is just being prefilled."""
        events: list[Event] = []
        waiting: list[tuple[int, Request]] = []
        while self._queue and len(self._texts) < self.most and not (self._full and self._texts):
            number, request = self._queue.popleft()
            if any(_worth_waiting(request, other) for other in self._texts.values()):
                waiting.append((number, request))
            else:
                begun = self._texts[number] = _Begun(number, request)
                events += self._go_on(begun, None)
        self._queue.extendleft(reversed(waiting))
        return events

    def _next_pack(self) -> list[_Begun]:
        """The sequences of the next forward pass: the first, and those whose work can be packed with it."""
        first, *others = self._texts.values()
        if isinstance(first.work, Turn):
            return [first, *(begun for begun in others if begun.work.goes_with(first.work))]
        pack, engine = [first], first.work.engine
        count, reads = len(first.work.rows), not first.work.logits
        for begun in others:
            work = begun.work
            if len(pack) == engine.most_texts or not isinstance(work, Work) or not work.goes_with(first.work):
                continue
            only = reads and not work.logits
            if count + len(work.rows) <= (engine.most_rows if only else engine.most_drafted):
                pack.append(begun)
                count, reads = count + len(work.rows), only
        return pack

    def close(self) -> None:
        """End all sequences."""
        self._queue.clear()
        for begun in [*self._texts.values()]:
            begun.end()
        self._texts.clear()

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _worth_waiting(request: Request, other: _Begun) -> bool:
    """Whether to wait for the prefill of another sequence: it has the same prompt, or most of it as a prefix."""
    if other.read or other.salt != request.extras.salt:
        return False
    prompt = request.prompt
    alike = common(prompt, other.prompt)
    return alike == len(prompt) or alike >= max(WORTH, len(prompt) // 2)
