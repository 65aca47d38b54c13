"""The decoding thread, which owns all sequences and runs their steps.

Requests are added by `submit` and cancelled by `cancel`, from any thread. New tokens are handed to the event loop in
one call and wait in the mailboxes of their requests. A slow reader gets several steps at once, and delays nobody.

Python runs one thread at a time, and sending an event takes as long as deciding on one: with 64 readers, that would
take longer than a step of the model. So a sequence's steps are collected for a short time, the longer the more there
are (`EACH`). Its first step and its last are handed out at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from math import inf
from threading import Condition, Thread
from time import monotonic
from typing import Any, NamedTuple, Protocol

from ..batch import Writing
from ..decoder import Decoder, with_text
from ..draft import Step
from ..errors import OutpaceError
from ..methods.base import Method
from ..result import Result
from ..text import TextStream
from .faults import Fault, busy, not_ready, too_late

log = logging.getLogger("outpace.serve")
PATIENCE = 30  # the longest Retry-After, in seconds
EACH = 0.0005  # seconds between two events of a sequence, for each running one: sending takes a third of them


class Order(NamedTuple):
    """A sequence to generate: a prompt, and the options of `Decoder.request`."""

    tokens: Sequence[int]
    method: Method
    options: dict[str, Any]


class Mailbox:
    """New steps of one request's sequences, for one reader in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: list[tuple[int, Step | Exception]] = []
        self._there = asyncio.Event()

    def put(self, items: Sequence[tuple[int, Step | Exception]]) -> None:
        """Add steps; called in the event loop."""
        self._items += items
        self._there.set()

    async def take(self) -> list[tuple[int, Step | Exception]]:
        """All new steps, by sequence number within the request; waits until there are some."""
        await self._there.wait()
        self._there.clear()
        items, self._items = self._items, []
        return items


class Job:
    """A requested sequence, and the times of its events."""

    def __init__(self, order: Order, place: int, mailbox: Mailbox, deadline: float) -> None:
        self.order, self.place, self.mailbox = order, place, mailbox
        self.seconds = deadline
        self.arrived = monotonic()
        self.begun = self.first = self.last = 0.0
        self.stream: TextStream | None = None
        self.steps: list[Step] = []  # not handed out yet
        self.handed = -inf  # the time when the last ones were
        self.result = Result("", True, len(order.tokens))
        self.number: int | None = None  # in the batch
        self.ended = False


class Watch(Protocol):
    """Observes the decoding thread."""

    def stepped(self, tokens: int, jobs: Sequence[tuple[Job, Step]], now: float) -> None:
        """A step has yielded this many tokens."""

    def ended(self, job: Job, reason: str, now: float) -> None:
        """A sequence has ended: stop, length, abort or error."""

    def set_aside(self, times: int) -> None:
        """The total number of preemptions for lack of KV slots so far."""


class Worker:
    """Decodes the sequences of requests in a thread of its own."""

    def __init__(self, decoder: Decoder, watch: Watch, most: int, queue: int) -> None:
        self.decoder, self.watch = decoder, watch
        self.most, self.queue = most, queue
        self._changed = Condition()
        self._new: deque[Job] = deque()
        self._gone: deque[Job] = deque()  # cancelled
        self._state = "ready"
        self._writing = Writing(most)
        self._jobs: dict[int, Job] = {}  # by number in the batch
        self._open = 0  # sequences that were submitted and have not ended
        self._pace = 1.0  # seconds per sequence, averaged over ended ones
        self._thread = Thread(target=self._run, name="outpace-writes", daemon=True)

    def start(self) -> None:
        """Start decoding."""
        self._thread.start()

    @property
    def open(self) -> int:
        """How many sequences were submitted and have not ended."""
        return self._open

    @property
    def waiting(self) -> int:
        """How many of them wait to be started."""
        return len(self._new) + self._writing.waiting

    @property
    def running(self) -> int:
        """How many of them are running."""
        return max(0, self._open - self.waiting)

    def submit(self, orders: Sequence[Order], mailbox: Mailbox, deadline: float) -> list[Job]:
        """Submit sequences, all or none of them. Raises a Fault if the queue is full."""
        jobs = [Job(order, place, mailbox, deadline) for place, order in enumerate(orders)]
        with self._changed:
            if self._state != "ready":
                raise not_ready(self._state)
            if self._open + len(jobs) > self.most + self.queue:
                raise busy(self._wait())
            self._open += len(jobs)
            self._new += jobs
            self._changed.notify()
        return jobs

    def _wait(self) -> int:
        """An estimate of the seconds until there is room."""
        return int(min(PATIENCE, max(1.0, self._pace * self._open / self.most)))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End sequences before the next step. Has no effect on those that have ended."""
        with self._changed:
            self._gone += [job for job in jobs if not job.ended]
            self._changed.notify()

    def drain(self) -> None:
        """Reject new requests; open ones continue."""
        with self._changed:
            self._state = "draining"

    def stop(self) -> None:
        """End all sequences, and the thread."""
        with self._changed:
            self._state = "stopped"
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._new or self._gone or self._writing or self._state == "stopped"):
                    self._changed.wait()
                new, gone = [*self._new], [*self._gone]
                self._new.clear()
                self._gone.clear()
                stopped = self._state == "stopped"
            try:
                if stopped:
                    self._end_all(not_ready("stopped"), new)
                    return
                self._turn(new, gone)
            except Exception as error:  # a bug: fail the open requests, and keep serving
                log.exception("a step failed")
                self._end_all(error, new)

    def _turn(self, new: Sequence[Job], gone: Sequence[Job]) -> None:
        """Add new sequences, drop cancelled ones, and run one step."""
        found: list[tuple[Job, Step | Exception]] = []
        for job in gone:
            self._end(job, "abort")
        for job in new:
            if not job.ended:
                found += self._begin(job)
        now = monotonic()
        for job in [job for job in self._jobs.values() if now - job.arrived > job.seconds]:
            found.append((job, too_late(job.seconds)))
        if self._writing:
            with self.decoder.engine.turns:
                events = self._writing.step()
            found += [(self._jobs[number], item) for number, item in events if number in self._jobs]
            self.watch.set_aside(self._writing.set_aside)
            begun = {number for number, _ in events}
            for number, job in self._jobs.items():
                if not job.begun and (number in begun or self._writing.begun(number)):
                    job.begun = now
        self._hand_out(found)

    def _begin(self, job: Job) -> list[tuple[Job, Step | Exception]]:
        """Add a sequence to the batch; returns the error if it is rejected."""
        try:
            method = job.order.method
            request, job.stream = self.decoder.request(job.order.tokens, method=method, **job.order.options)
        except Exception as error:
            return [(job, error)]
        job.result = self.decoder.begin(request.prompt, method)
        job.number = self._writing.add(request)
        self._jobs[job.number] = job
        return []

    def _hand_out(self, found: Sequence[tuple[Job, Step | Exception]]) -> None:
        """Take in new steps, and hand those that are due to their mailboxes, in one call of the event loop."""
        now = monotonic()
        mail: dict[Mailbox, list[tuple[int, Step | Exception]]] = {}
        steps: list[tuple[Job, Step]] = []
        for job, item in found:
            if job.ended:
                continue
            if isinstance(item, Step):
                job.steps.append(item)
                steps.append((job, item))
                if item.finish is None:
                    continue
                reason = item.finish
            else:
                if not isinstance(item, Fault):
                    unexpected = None if isinstance(item, OutpaceError) else item
                    log.warning("a sequence ended with %s", type(item).__name__, exc_info=unexpected)
                reason = "error"
            mail.setdefault(job.mailbox, []).extend(self._due(job, now))
            self._end(job, reason)
            if not isinstance(item, Step):
                mail[job.mailbox].append((job.place, item))
        wait = EACH * self.running
        for job in self._jobs.values():
            if job.steps and now - job.handed >= wait:
                mail.setdefault(job.mailbox, []).extend(self._due(job, now))
        if steps:
            self.watch.stepped(sum(len(step.tokens) for _, step in steps), steps, now)
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mail:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, boxes in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, [(box, mail[box]) for box in boxes])

    def _due(self, job: Job, now: float) -> list[tuple[int, Step | Exception]]:
        """The collected steps of a sequence; the last one has the text of all."""
        steps, job.steps, job.handed = job.steps, [], now
        steps[-1:] = [with_text(step, job.stream) for step in steps[-1:]]
        for step in steps:
            job.result.take(step)
        return [(job.place, step) for step in steps]

    def _end(self, job: Job, reason: str) -> None:
        """End a sequence; if it was cancelled or failed, free its slots."""
        if job.ended:
            return
        job.ended = True
        self._due(job, monotonic())  # counts them, if nobody waits for them any more
        if job.number is not None:
            del self._jobs[job.number]
            if reason in ("abort", "error"):
                with self.decoder.engine.turns:
                    self._writing.cancel(job.number)
        now = monotonic()
        self._pace += 0.1 * (now - job.arrived - self._pace)
        with self._changed:
            self._open -= 1
        self.watch.ended(job, reason, now)

    def _end_all(self, error: Exception, more: Sequence[Job]) -> None:
        """End every sequence with an error."""
        jobs = [*self._jobs.values(), *more]
        self._hand_out([(job, error) for job in jobs])
        with self.decoder.engine.turns:
            self._writing.close()


def _deliver(mail: Sequence[tuple[Mailbox, list[tuple[int, Step | Exception]]]]) -> None:
    for mailbox, items in mail:
        mailbox.put(items)
