"""Kernels compiled ahead: our operators run in threads, and everything else as it is."""

from __future__ import annotations

import threading

import pytest
import torch

from outpace.models.ahead import Ahead

RAN: list[tuple[threading.Thread, torch.Tensor]] = []


@torch.library.custom_op("outpace::for_a_test", mutates_args=())
def repeated(states: torch.Tensor, times: int) -> torch.Tensor:
    if times < 0:
        raise ValueError(f"{times} times")
    RAN.append((threading.current_thread(), states.repeat(times)))
    return states.repeat(times)


@repeated.register_fake
def _(states: torch.Tensor, times: int) -> torch.Tensor:
    return states.new_empty(len(states) * times)


@torch.inference_mode()
def test_operators_of_our_own_run_in_threads_and_their_shapes_are_known_at_once() -> None:
    RAN.clear()
    with Ahead() as ahead:
        states = torch.arange(3.0) + 1
        found = repeated(states, 2) * 0
    assert found.shape == (6,)
    assert states.tolist() == [1, 2, 3]
    ahead.wait()
    ((thread, result),) = RAN
    assert thread is not threading.current_thread()
    assert result.tolist() == [1, 2, 3, 1, 2, 3]
    assert repeated(states, 2).tolist() == result.tolist()
    assert len(RAN) == 2  # behind the mode they run as they do


def test_what_they_raise_is_raised_in_the_end() -> None:
    with Ahead() as ahead:
        repeated(torch.ones(2), 3)
        assert len(repeated(torch.ones(0), -1)) == 0
    with pytest.raises(ValueError, match="-1 times"):
        ahead.wait()
