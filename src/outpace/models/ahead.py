"""Parallel compilation of Triton kernels ahead of time. Otherwise each is compiled at its first run, one by one.

Compiling is mostly Python, and so is torch's compiler, which runs meanwhile: threads would take turns. So another
process compiles the kernels (`building.py`). If it fails, the threads do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .building import Job

THREADS = 16  # operators that run at the same time, nearly all of them waiting for a kernel
OURS = "outpace.models.kernels"  # the module of their kernels


class Ahead(TorchDispatchMode):
    """A context in which our operators run in threads, to compile their kernels; their results are meaningless.

    The threads continue after it, until `wait`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(THREADS)
        self._running: list[Future[Any]] = []
        self._builder = _builder()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != "outpace":
            return function(*args, **(kwargs or {}))
        self._running.append(self._threads.submit(_run, function, args))
        shape = function(*tree_map_only(torch.Tensor, lambda given: given.to("meta"), args))
        return torch.empty_like(shape, device=args[0].device)

    def wait(self) -> None:
        """Wait for all threads. Raises the first error."""
        self._threads.shutdown()
        if self._builder is not None:
            self._builder.close()
        for run in self._running:
            run.result()


class Builder:
    """A process that compiles what Triton is about to compile in this one, which then finds it in Triton's cache.

    Raises OSError if it cannot be started.
    """

    def __init__(self) -> None:
        from triton import knobs

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        command = [sys.executable, "-m", Job.__module__, str(max(1, min(THREADS, cores - 1))), OURS]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._lock = threading.Lock()
        self._asked: dict[Job, Future[None]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._knobs, self._before = knobs.runtime, knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._hook

    def _hook(self, **about: Any) -> Any:
        """Triton calls it before it compiles a kernel."""
        from triton.runtime import driver

        function = about["fn"]
        if function.module == OURS:
            target = driver.active.get_current_target()
            kind = (target.backend, target.arch, target.warp_size)
            self.submit(Job(OURS, function.name, kind, about["compile"]["specialization_data"])).result()
        return self._before(**about) if self._before else None

    def submit(self, job: Job) -> Future[None]:
        """Done when the process has compiled this, or failed; once for each kernel."""
        with self._lock:
            if job not in self._asked:
                self._asked[job] = Future()
                try:
                    assert self._process.stdin
                    self._process.stdin.write(json.dumps(job).encode() + b"\n")
                    self._process.stdin.flush()
                except (OSError, ValueError):  # it has ended
                    self._asked[job].set_result(None)
            return self._asked[job]

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.strip().isdigit():  # not what some import prints
                with self._lock:
                    [*self._asked.values()][int(line)].set_result(None)
        with self._lock:  # it has ended
            for done in self._asked.values():
                if not done.done():
                    done.set_result(None)

    def close(self) -> None:
        """End the process."""
        self._knobs.jit_cache_hook = self._before
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def _builder() -> Builder | None:
    """None where there is nothing to compile, or no process can be started."""
    if find_spec("triton") is None:
        return None
    try:
        return Builder()
    except OSError:
        return None


def _run(function: Any, args: Any) -> None:
    with torch.inference_mode(), torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
        if args[0].is_cuda:
            torch.cuda.synchronize()  # gives a new thread the device's context, which cuBLAS needs
        function(*args)
