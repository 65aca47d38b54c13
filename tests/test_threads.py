"""torch has one thread while our C++ code computes the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outpace import Decoder
from outpace.models import threads

from .models import tiny

MANY = 3


@pytest.fixture(autouse=True)
def many() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(MANY)
    yield
    torch.set_num_threads(before)


def test_ours_stay_as_many_as_torch_had() -> None:
    def fail() -> None:
        with threads.torch_alone():
            assert (torch.get_num_threads(), threads.ours()) == (1, MANY)
            with threads.torch_too():
                assert (torch.get_num_threads(), threads.ours()) == (MANY, MANY)
            with threads.torch_alone():
                assert (torch.get_num_threads(), threads.ours()) == (1, MANY)
            assert (torch.get_num_threads(), threads.ours()) == (1, MANY)
            raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        fail()
    assert (torch.get_num_threads(), threads.ours()) == (MANY, MANY)
    with threads.torch_too():
        assert torch.get_num_threads() == MANY
    assert torch.get_num_threads() == MANY


def test_a_thread_that_begins_meanwhile_has_as_many() -> None:
    found: list[int] = []

    def run() -> None:
        with threads.torch_alone():
            found.append(threads.ours())
        found.append(torch.get_num_threads())

    with threads.torch_alone():
        other = threading.Thread(target=run)
        other.start()
        other.join()
    assert found == [MANY, MANY]
    assert torch.get_num_threads() == MANY


def test_a_native_engine_decodes_so_and_gives_torch_its_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny("Llama", hidden_size=64, intermediate_size=96, head_dim=16))
    assert decoder.engine.name == "native"
    seen: list[tuple[int, int]] = []
    forward = decoder.model.forward

    def watched(*args: Any, **more: Any) -> Any:
        seen.append((torch.get_num_threads(), threads.ours()))
        return forward(*args, **more)

    monkeypatch.setattr(decoder.model, "forward", watched)
    for _ in decoder.stream([1, 2, 3], max_new_tokens=8):
        assert torch.get_num_threads() == MANY  # the reader's own work is between the steps
    assert {*seen} == {(1, MANY)}
