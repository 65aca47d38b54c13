"""What holds for every test. Torch is imported late: with xdist, pytest's own process needs none, and starts sooner."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: those that it starts inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # others run the tests
        return
    gc.disable()  # while all is imported: collections would take a second, and find next to nothing
    from hypothesis import settings

    settings.register_profile("all", deadline=None, derandomize=True, max_examples=100)
    settings.register_profile("not slow", settings.get_profile("all"), max_examples=30)
    settings.load_profile("not slow" if config.getoption("markexpr") == "not slow" else "all")


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: garbage collections need not look through it again
    gc.enable()


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Whatever tests were run before in this process."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _rounded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter NumPy adds up, in an order that depends on shape and processor: round from float64."""
    if not os.environ.get("TRITON_INTERPRET"):
        return
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self: Any, left: Any, right: Any, total: Any, *_: Any) -> Any:
        product = np.matmul(left.data, right.data, dtype=np.float64)
        return interpreter.TensorHandle((product + total.data).astype(total.data.dtype), total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _large_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of full size takes half the time with what slows tiny ones down: see `models.py`."""
    if "embedded" in request.keywords:
        import torch

        monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)


@pytest.fixture(scope="session", autouse=True)
def _no_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """How fast this machine is must not decide what tests do, nor what a module's server does for all of them."""
    from outpace import CostCurve
    from outpace.methods import auto
    from outpace.runtime import calibrate, fixed, steps

    from . import models  # noqa: F401 (its settings of torch are for all tests)

    glance = CostCurve({}, (1, 2, 4, 8, 16), (64,), ((0.010, 0.011, 0.013, 0.017, 0.025),))
    folder = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "folder", lambda: folder)
        patch.setattr(auto, "glance", lambda engine: glance)
        patch.setattr(steps.Whole, "_timed", lambda step: 20.0)
        patch.setattr(fixed.Clock, "ms", lambda clock: 20.0)
        yield


@pytest.fixture(autouse=True)
def _no_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor what was calibrated, or learnt by another test."""
    from outpace.runtime import calibrate

    monkeypatch.setattr(calibrate, "folder", lambda: tmp_path / "costs")
