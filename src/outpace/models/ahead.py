"""Parallel compilation of Triton kernels ahead of time. Otherwise each is compiled at its first run, one by one.

Each operator has a thread: two would compile the same kernel at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Ahead(TorchDispatchMode):
    """A context in which our operators run in threads, to compile their kernels; their results are meaningless.

    The threads continue after it, until `wait`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads: dict[Any, ThreadPoolExecutor] = defaultdict(partial(ThreadPoolExecutor, 1))
        self._running: list[Future[Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != "outpace":
            return function(*args, **(kwargs or {}))
        self._running.append(self._threads[function].submit(_run, function, args))
        shape = function(*tree_map_only(torch.Tensor, lambda given: given.to("meta"), args))
        return torch.empty_like(shape, device=args[0].device)

    def wait(self) -> None:
        """Wait for all threads. Raises the first error."""
        for thread in self._threads.values():
            thread.shutdown()
        for run in self._running:
            run.result()


def _run(function: Any, args: Any) -> None:
    with torch.inference_mode(), torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
        if args[0].is_cuda:
            torch.cuda.synchronize()  # gives a new thread the device's context, which cuBLAS needs
        function(*args)
