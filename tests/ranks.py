"""Several ranks for tests: real processes that torch.distributed connects, or threads that take turns."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import HashStore

from outpace import RankError
from outpace.parallel import Ranks

_processes = multiprocessing.get_context("forkserver")  # imports happen once, in the server
_processes.set_forkserver_preload(["outpace.parallel", "tests.models", "transformers.models.llama.modeling_llama"])


class ThreadRanks(Ranks):
    """A rank that is a thread of this process: everything but the transport."""

    def __init__(self, rank: int, boxes: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.count = rank, len(boxes)
        self.exchanges = self.numbers = 0
        self._lost = ""
        self._boxes, self._barrier = boxes, barrier
        self._store = HashStore()

    def _exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        if self._lost:
            raise RankError(self._lost)
        try:
            found = self._all_gather(numbers, 0.0)
        except threading.BrokenBarrierError:
            raise RankError("another thread has ended") from None
        self.exchanges += 1
        return found

    def _all_gather(self, numbers: Sequence[int], patience: float) -> list[list[int]]:
        self._boxes[self.rank] = list(numbers)
        self._barrier.wait()
        found = [list(box) for box in self._boxes]
        self._barrier.wait()
        return found


def in_threads(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns on each rank. The first error of a rank is raised."""
    boxes: list[Any] = [None] * count
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, boxes, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def in_processes(count: int, work: Callable[..., Any], *arguments: Any, wait: float = 300.0) -> list[Any]:
    """What `work(rank, *arguments)` returns or raises in each of `count` processes; None from a killed one."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the server must not tell of ranks that are lost
    port = own_port()
    pipes = [_processes.Pipe(duplex=False) for _ in range(count)]
    started = [
        _processes.Process(target=_run, args=(rank, count, port, pipes[rank][1], work, arguments))
        for rank in range(count)
    ]
    for process, (_, sender) in zip(started, pipes, strict=True):
        process.start()
        sender.close()  # so that the end of the process ends the pipe
    results: list[Any] = []
    until = time.monotonic() + wait
    for process, (receiver, _) in zip(started, pipes, strict=True):
        try:
            results.append(receiver.recv() if receiver.poll(max(0, until - time.monotonic())) else "hangs")
        except EOFError:
            results.append(None)
        process.join(5)
        if process.is_alive():
            process.kill()
    return results


def own_port() -> int:
    """A free port below those that the system hands out, so that nobody gets it by chance before it is used."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _run(rank: int, count: int, port: int, results: Any, work: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    try:
        results.send(work(rank, *arguments))
    except Exception as error:
        results.send(error)
