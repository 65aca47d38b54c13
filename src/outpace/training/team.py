"""The processes that train together: one, or those that `accelerate launch` started.

Each does its share of the work. Gradients are averaged, so all have the same heads after every update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, reduce

T = TypeVar("T")


class Team:
    """All processes of a training, as seen by one of them."""

    def __init__(self) -> None:
        self._state: Any = PartialState(cpu=not torch.cuda.is_available())
        self.number, self.count = int(self._state.process_index), int(self._state.num_processes)
        self.leads = bool(self._state.is_main_process)  # it writes the files

    @property
    def device(self) -> str | None:
        """The device of this process, if there are several."""
        if self.count == 1:
            return None
        return "cpu" if self._state.device.type == "cpu" else str(self._state.device)

    def share(self, items: Iterable[T]) -> Iterator[T]:
        """This process's share of the items."""
        return islice(items, self.number, None, self.count)

    @torch.no_grad()
    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make each tensor the mean of all processes' tensors."""
        if self.count > 1:
            for tensor in tensors:
                tensor.copy_(reduce(tensor, "mean"))

    @torch.no_grad()
    def agree(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast each tensor from the leading process."""
        if self.count > 1:
            for tensor in tensors:
                tensor.copy_(broadcast(tensor.detach().clone()))

    def mean(self, number: float) -> float:
        """The mean of all processes' numbers."""
        if self.count == 1:
            return number
        found = torch.tensor([number], dtype=torch.float64, device=self._state.device)
        self.average([found])
        return float(found)

    def one_first(self) -> AbstractContextManager[None]:
        """The leading process does this before the others."""
        found: AbstractContextManager[None] = self._state.main_process_first()
        return found

    def wait(self) -> None:
        """Wait for all processes."""
        self._state.wait_for_everyone()
