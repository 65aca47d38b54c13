"""A process that compiles Triton kernels into Triton's cache: `python -m outpace.models.building`.

It reads a line of JSON per kernel, and prints the line's number when that kernel is compiled or has failed. Each is
compiled in a fork, so that Python and Triton are imported once.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
from importlib import import_module
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A kernel to compile: where it is defined, the kind of GPU, and Triton's own description of a specialization."""

    module: str
    kernel: str
    target: tuple[str, int, int]
    data: str


class _Driver:
    """What compiling asks of a GPU's driver."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def build(job: Job) -> None:
    """Compile a kernel. The GPU need not be here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(_Driver(GPUTarget(*job.target)))
    getattr(import_module(job.module), job.kernel).preload(job.data)


def serve(most: int, given: int = 0, said: int = 1) -> None:
    """Compile what comes in on the file descriptor `given`, at most so many at a time, until it is closed."""
    waiting: list[tuple[int, Job]] = []
    running: dict[int, tuple[int, int]] = {}  # by pipe: process and number. A pipe ends with its process
    chosen = selectors.DefaultSelector()
    chosen.register(given, selectors.EVENT_READ)
    text, count = b"", 0
    while True:
        for key, _ in chosen.select():
            if key.fd == given:
                more = os.read(given, 1 << 16)
                if not more:
                    return
                *lines, text = (text + more).split(b"\n")
                for line in lines:
                    waiting.append((count, Job(*json.loads(line))))
                    count += 1
            else:
                process, number = running.pop(key.fd)
                chosen.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(process, 0)
                os.write(said, b"%d\n" % number)
        while waiting and len(running) < most:
            number, job = waiting.pop(0)
            ends = os.pipe()
            process = os.fork()
            if not process:
                try:
                    build(job)
                finally:
                    os._exit(0)
            os.close(ends[1])
            running[ends[0]] = process, number
            chosen.register(ends[0], selectors.EVENT_READ)


if __name__ == "__main__":
    for name in sys.argv[2:]:  # before any fork
        import_module(name)
    serve(int(sys.argv[1]))
