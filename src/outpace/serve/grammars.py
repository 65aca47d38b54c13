"""The grammars of requests: tried in a process of their own before they are compiled here.

llguidance compiles most schemas in milliseconds, and some small ones never: its limits do not count that work. A thread
cannot be ended, a process can. A grammar that the process compiles in time, this one does too.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256

from ..decoder import Decoder
from ..errors import InputError, OutpaceError
from ..grammar import Constraint, Grammar
from .faults import Fault, busy, not_ready

SECONDS = 5.0  # to compile a grammar
AT_ONCE = 2
WAITING = 64  # further ones that may wait
REMEMBERED = 1024  # that were tried
TRY = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # where nobody is left to end it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
except (ImportError, OSError, ValueError):
    pass
from llguidance import LLMatcher, LLTokenizer
LLMatcher(LLTokenizer("byte"), sys.stdin.buffer.read().decode(), log_level=0)
"""


class Grammars:
    """Compiles grammars, a few at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, "outpace-grammars")
        self._free = asyncio.Semaphore(AT_ONCE)
        self._open = 0
        self._tried: set[bytes] = set()
        self._processes: set[Process] = set()
        self._closed = False

    async def compiled(self, decoder: Decoder, grammar: Grammar, param: str) -> Constraint:
        """A grammar to copy for sequences. A Fault if it cannot be used, or takes too long to compile."""
        if self._open >= AT_ONCE + WAITING:
            raise busy(int(SECONDS))
        self._open += 1
        try:
            async with self._free:
                return await self._compiled(decoder, grammar)
        except asyncio.TimeoutError as error:
            why = f"the grammar takes more than {SECONDS:g} seconds to compile. Simplify it."
            raise Fault(why, param=param, code="invalid_schema") from error
        except OutpaceError as error:
            raise Fault(str(error), param=param, code="invalid_schema") from error
        finally:
            self._open -= 1

    async def _compiled(self, decoder: Decoder, grammar: Grammar) -> Constraint:
        if self._closed:
            raise not_ready("stopped")
        digest = sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        if digest not in self._tried:
            await asyncio.wait_for(self._try(grammar.rules()), SECONDS)
            if len(self._tried) >= REMEMBERED:
                self._tried.clear()
            self._tried.add(digest)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, decoder.constraint, grammar, 0)

    async def _try(self, rules: str) -> None:
        """Compile a grammar in a process that ends with it, or with the task that waits for it."""
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", TRY, stdin=pipe, stdout=none, stderr=none)
        self._processes.add(process)
        try:
            await process.communicate(rules.encode())
        finally:
            code = await _ended(process)
            self._processes.discard(process)
        if self._closed:
            raise not_ready("stopped")
        if code < 0:
            raise InputError("the grammar needs too much memory to compile. Simplify it.")
        if code > 0:
            raise RuntimeError(f"{sys.executable} could not try a grammar")

    async def close(self) -> None:
        """End all processes, and start no more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in [*self._processes]:
            await _ended(process)


async def _ended(process: Process) -> int:
    """The exit code of a process, which is ended if it has not."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    return await process.wait()
