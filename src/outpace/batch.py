"""Texts that are written together: the rows that they ask for go in one forward.

Each text is the loop's, with its own method, sampling and end. Texts join and leave between forwards.
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

MOST = 64  # texts that are written at the same time; others wait
WORTH = 128  # tokens in common that are worth waiting for

Event: TypeAlias = "tuple[int, Step | Exception]"
"""The number of a text, and its next step, or the error that has ended it."""


class Request(NamedTuple):
    """A text to be written: the arguments of `loop.write`."""

    engine: Engine
    method: Method
    prompt: Sequence[int]
    sampling: Sampling
    stop: Stop
    limit: int | None = None
    extras: Extras = PLAINLY


class _Begun:
    """A text at work."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.written: list[int] = []
        self.prompt, self.salt = request.prompt, request.extras.salt
        self.read = False  # whether its first step is done
        self.ended = False
        self.text: Text = request.engine.turns.begin(write(*request, share=True))
        self._turns = request.engine.turns
        self.work: Work | Turn  # what it waits for

    def go_on(self, reply: Any) -> list[Step | Exception]:
        """Its steps until it asks for work again. A reply that is an error ends it, as one of its own does."""
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
        """What is left to write: the same text goes on behind what is written. What ends it has seen that."""
        request, count = self.request, len(self.written)
        return request._replace(
            prompt=[*request.prompt, *self.written],
            limit=None if request.limit is None else request.limit - count,
            extras=request.extras._replace(written=request.extras.written + count),
        )

    def end(self) -> None:
        """Close the text, at the end of the step that runs now, if one does."""
        self._turns.end(self.text)


class Writing:
    """Requests and the texts that come of them, by numbers from 0. As a context manager it leaves no slot taken.

    `step`, `add` and `cancel` are for whoever has the engine's turn. A text's error is an event of its own; the others
    go on. A forward that fails ends all texts that had rows in it. Where there are no slots for a text, the youngest is
    set aside, and read again when another has ended.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._count = 0
        self._queue: deque[tuple[int, Request]] = deque()
        self._texts: dict[int, _Begun] = {}  # the first has waited longest
        self._full = False  # until a text ends, no other begins
        self.set_aside = 0  # how often one was

    def add(self, request: Request) -> int:
        """Have a text written too, from the next step on or when there is room; its number."""
        self._queue.append((self._count, request))
        self._count += 1
        return self._count - 1

    def cancel(self, number: int) -> None:
        """End a text now. Its slots come back. Nothing happens to one that has ended."""
        self._queue = deque(item for item in self._queue if item[0] != number)
        if number in self._texts:
            self._texts.pop(number).end()
            self._full = False

    @property
    def waiting(self) -> int:
        """How many texts are not begun."""
        return len(self._queue)

    def begun(self, number: int) -> bool:
        """Whether a text is at work."""
        return number in self._texts

    def __bool__(self) -> bool:
        """Whether there is anything left to write."""
        return bool(self._queue or self._texts)

    def step(self) -> list[Event]:
        """Let texts join, run one forward, and say what came of it."""
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
        # At once, before the next forward: outputs are good until then.
        for begun, reply in zip(pack, replies, strict=True):
            if self._texts.get(begun.number) is begun:  # otherwise it was set aside just now
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
        """There were no slots for a text to go on. It waits, and if a younger one is at work, that too."""
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
        """Start what waits, as far as there is room. What begins as a text that is still being read waits for it."""
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
        """Those whose work goes in the next forward: the first, and what it goes together with."""
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
        """End all texts."""
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
    """Whether a text had better wait until another is read: it is the same, or begins alike for the greater part."""
    if other.read or other.salt != request.extras.salt:
        return False
    prompt = request.prompt
    alike = common(prompt, other.prompt)
    return alike == len(prompt) or alike >= max(WORTH, len(prompt) // 2)
