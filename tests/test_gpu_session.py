"""scripts/gpu_session.py as far as a CPU can show it: the widened model and heads write what the narrow ones write."""

from __future__ import annotations

import itertools
import json
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from outpace import AdaDecode, Amphista, Block, Decoder, Hydra, Medusa
from outpace.heads import BlockSettings
from outpace.heads.storing import Stored
from outpace.methods.headed import Ready
from outpace.models.hf import HFModel
from outpace.models.loading import load

from .conftest import tiny
from .test_cli import folder
from .test_cli_bench import wide
from .test_heads import random_heads
from .test_reproduce import trained

assert folder  # fixtures
assert wide
assert trained


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    import gpu_session

    monkeypatch.setattr(gpu_session, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_session, "DTYPE", torch.float32)
    yield gpu_session
    del sys.modules["gpu_session"]


@pytest.mark.parametrize("kind", [Medusa, Hydra, Amphista, AdaDecode])
def test_widened_heads_guess_the_same(session: Any, folder: Path, trained: Path, kind: Any) -> None:
    model = load(str(folder), device="cpu").model
    narrow, broad = Decoder(model), Decoder(session.widen(model, 2))
    given: Any = {"control": "fixed", "gamma": 0.01} if kind is AdaDecode else {"rows": 8}
    name = "exits" if kind is AdaDecode else kind.name
    method: Any = narrow.prepare(kind(heads=str(trained / name), **given))
    heads = session.widen_ready(method.heads, 2)
    expected = list(narrow.stream([7, 8, 7, 8, 9], method=method, max_new_tokens=16))
    found = list(broad.stream([7, 8, 7, 8, 9], method=kind(heads=heads, **given), max_new_tokens=16))
    assert [step.tokens for step in found] == [step.tokens for step in expected]
    assert [step.draft.tokens for step in found] == [step.draft.tokens for step in expected]
    assert any(len(step.draft) > 1 for step in found)


def test_widened_block_heads_guess_the_same(session: Any, folder: Path) -> None:
    model = load(str(folder), device="cpu").model
    narrow, broad = Decoder(model), Decoder(session.widen(model, 2))
    ready = Ready(random_heads("block", model, BlockSettings(count=4, layers="1,2", rank=8)), Stored({}))
    expected = list(narrow.stream([7, 8, 7, 8, 9], method=Block(heads=ready, rows=8), max_new_tokens=16))
    wider = Block(heads=session.widen_ready(ready, 2), rows=8)
    found = list(broad.stream([7, 8, 7, 8, 9], method=wider, max_new_tokens=16))
    assert [step.draft.tokens for step in found] == [step.draft.tokens for step in expected]
    assert any(len(step.draft) > 1 for step in found)


def test_samples_say_where_the_time_goes(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # a clock that is one second further each time it is read
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    spent: Counter[tuple[str, str]] = Counter()
    with session.samples(spent, every=0.0):
        while not spent:
            time.sleep(0)
    assert spent.total() == next(ticks) - 1


def test_whereabouts_are_a_function_of_ours_and_the_library_at_work(session: Any) -> None:
    model, found = HFModel(tiny("Llama")), set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.add(session.whereabouts(sys._getframe(1)))
            return function(*args, **(kwargs or {}))

    with Watch():
        model._check()
    assert ("hf.forward", "torch/") in found
    assert session.whereabouts(None) == ("", "")


@pytest.mark.filterwarnings("ignore:adadecode. these exits are predicted")
def test_reproduce(
    session: Any, wide: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}))
    kinds = ("medusa", "hydra", "amphista", "exits")
    arguments = Namespace(
        model=str(wide),
        gguf=None,
        data=tmp_path / "q.jsonl",
        more=[],
        papers=["adadecode", "amphista"],
        heads=[*(f"{kind}={trained / kind}" for kind in kinds), f"math={trained / 'exits'}"],
        calibrate=False,
        exact=False,
        each=1,
        every=1,
        tokens=6,
        times=2,
        out=tmp_path / "out",
    )
    session.reproduce(arguments)
    adadecode, amphista = sorted((tmp_path / "out").glob("*.md"))
    assert adadecode.name == "adadecode-smollm2-135m-times-2-cpu.md"
    assert "trained on math" in adadecode.read_text()
    assert "trained on math" not in amphista.read_text()
