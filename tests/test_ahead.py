"""Kernels compiled ahead: our operators run in threads, and everything else as it is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.models.ahead import Ahead, Builder
from outpace.models.building import Job

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


class Target:
    """A driver for a GPU that is not here."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, empty; kernels are compiled for an H100."""
    driver = pytest.importorskip("triton.runtime.driver").driver
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Target())
    return tmp_path


def prepare(width: int) -> None:
    """Have Triton compile a small kernel of ours, if its cache has it not yet."""
    from triton.runtime.jit import MockTensor

    from outpace.models import kernels

    kernels.gate.device_caches.clear()
    states = MockTensor(torch.bfloat16)
    kernels.gate.warmup(states, states, 1536, PIECE=width, grid=(1,))


def test_another_process_compiles_kernels_and_this_one_finds_them(cache: Path) -> None:
    import triton

    in_this_one: list[bool] = []
    before = triton.knobs.runtime.jit_cache_hook
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: in_this_one.append(not cache_hit))
        builder = Builder()
        for width in (256, 512, 256):
            prepare(width)
        builder.close()
        assert triton.knobs.runtime.jit_cache_hook is before
        prepare(1024)
    assert in_this_one == [False, False, False, True]
    assert len(list(cache.rglob("gate.cubin"))) == 3


def test_without_that_process_this_one_compiles(cache: Path) -> None:
    builder = Builder()
    builder._process.kill()
    builder._process.wait()
    prepare(256)
    builder.close()
    assert len(list(cache.rglob("gate.cubin"))) == 1


def test_a_kernel_that_cannot_be_compiled_is_waited_for_like_any_other(cache: Path) -> None:
    builder = Builder()
    builder.submit(Job("outpace.models.kernels", "no_such_kernel", ("cuda", 90, 32), "")).result()
    prepare(256)
    builder.close()
    assert len(list(cache.rglob("gate.cubin"))) == 1
