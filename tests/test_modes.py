"""Exact mode is the default where it costs next to nothing. GPUs are pretended here; `test_gpu.py` needs one."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outpace import Decoder, OutpaceWarning, cli
from outpace.cli import examining, measuring, racing, serving, writing
from outpace.errors import InputError, OutpaceError
from outpace.models.hf import HFModel
from outpace.runtime import choose
from outpace.runtime.choose import engine_for
from outpace.runtime.exact import ExactEngine
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.plain import Engine

from .models import tiny
from .test_cli import folder  # noqa: F401 (a fixture)

PROMPT = [5, 9, 5, 9, 7, 3] * 4


class Uncaptured(GraphEngine):
    """A GraphEngine of a model that only says it is on a GPU. There is never more than one."""

    living: weakref.WeakSet[GraphEngine]

    def __init__(self, model: Any, exact_rows: int = 0, memory: float = 0.5) -> None:
        assert not self.living
        self.living.add(self)
        model.device = torch.device("cpu")
        super().__init__(model, compiled=False, exact_rows=exact_rows, capacity=512, memory=memory)


class Watched(HFModel):
    """A model on a GPU, as it says, that lists what is done to it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(tiny("Llama"))
        self.device, self.dtype = torch.device("cuda"), dtype
        self.done: list[str] = []

    def fuse(self) -> int:
        self.done.append("fuse")
        return super().fuse()

    def replace_products(self, always: bool = False) -> int:
        self.done.append("replace always" if always else "replace")
        return super().replace_products(always)

    def unfuse(self) -> None:
        self.done.append("unfuse")
        super().unfuse()
        assert not [part for part in self._mirror.modules() if "Product" in type(part).__name__]


FAST = ["fuse", "replace"]
EXACT = ["fuse", "replace always"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A recent GPU, on which exact mode passes its test."""
    monkeypatch.setattr(Uncaptured, "living", weakref.WeakSet(), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(choose, "find_spec", lambda name: True)
    monkeypatch.setattr(choose, "fetches_tiles", lambda device: True)
    monkeypatch.setattr(choose, "GraphEngine", Uncaptured)
    monkeypatch.setattr(Uncaptured, "is_exact", lambda self: True)
    return monkeypatch


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("runtime", ["auto", "graphs"])
@pytest.mark.parametrize("exact", [None, True])
def test_exact_mode_is_the_default_on_a_recent_gpu(runtime: str, exact: bool | None) -> None:
    model = Watched()
    engine = engine_for(model, runtime, exact=exact)
    assert (engine.exact, engine.mode, engine.name) == (True, "exact", f"exact, up to {choose.EXACT_ROWS} rows")
    assert model.done == EXACT


@pytest.mark.usefixtures("gpu")
def test_fast_mode_on_request_tries_nothing_and_needs_no_reason() -> None:
    model = Watched()
    engine = engine_for(model, exact=False)
    assert (engine.exact, engine.mode, engine.name) == (False, "fast", "graphs")
    assert model.done == FAST


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (False, "the model's bits depend on the number of rows in a step"),
        ("uncompiled", "the model's layers cannot be compiled"),
        ("turns", "the model's bits depend on the other sequences of a batch"),
        (InputError("no memory for a graph. Use exact=False."), "no memory for a graph"),
        (torch.OutOfMemoryError(), "there is too little memory to test exact mode"),
    ],
)
def test_a_model_that_fails_the_test_runs_fast_as_if_nothing_had_been_tried(
    outcome: Any, words: str, gpu: pytest.MonkeyPatch
) -> None:
    def is_exact(self: Any) -> bool:
        assert self.exact
        if isinstance(outcome, Exception):
            raise type(outcome)(*outcome.args)  # a new one: it holds the engine
        self.takes_turns = outcome == "turns"
        self._compile = outcome != "uncompiled"
        return outcome == "turns"

    gpu.setattr(Uncaptured, "is_exact", is_exact)
    model = Watched()
    engine = engine_for(model)
    assert type(engine) is Uncaptured
    assert (engine.exact, engine.mode, engine.name) == (False, f"fast: {words}", "graphs")
    assert model.done == [*EXACT, "unfuse", *FAST]


def test_a_layer_that_our_kernels_do_not_compute_is_named_and_nothing_is_tried(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(HFModel, "replace_products", lambda self, always=False: 0)
    gpu.setattr(Uncaptured, "is_exact", lambda self: pytest.fail("it was tried"))
    model = Watched()
    assert re.fullmatch(
        r"fast: our kernels do not compute \S+ of layer 0 \(\d+ inputs, \d+ outputs\)", engine_for(model).mode
    )
    assert model.done == [*EXACT, "unfuse", *FAST]


def test_the_test_of_an_engine_leaves_no_memory_taken(gpu: pytest.MonkeyPatch) -> None:
    """The next engine is made when the first is gone."""
    gpu.setattr(Uncaptured, "is_exact", GraphEngine.is_exact)
    engine = engine_for(Watched())
    assert engine.mode == "fast: the model's layers cannot be compiled"  # they are not, here


@pytest.mark.parametrize(
    ("recent", "dtype", "join", "words"),
    [
        (False, torch.bfloat16, True, "a GPU has no tensor descriptors, which cheap exact mode needs"),
        (True, torch.float32, True, "cheap exact mode needs bfloat16 or float16, not float32"),
        (True, torch.float16, False, "exact mode fuses weights, and these may not be fused"),
    ],
)
def test_where_exact_mode_has_a_price_the_default_is_fast(
    recent: bool, dtype: torch.dtype, join: bool, words: str, gpu: pytest.MonkeyPatch
) -> None:
    gpu.setattr(choose, "fetches_tiles", lambda device: recent)
    model = Watched(dtype)
    engine = engine_for(model, join=join)
    assert not engine.exact
    assert engine.mode.startswith(f"fast: {words}")
    assert model.done == (FAST if join else ["replace"])


def test_without_graphs_the_default_is_fast(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(choose, "find_spec", lambda name: None)
    engine = engine_for(Watched())
    assert (engine.name, engine.mode) == ("plain", "fast: exact mode needs CUDA graphs: triton is not installed")
    with pytest.raises(InputError, match="runtime='graphs' cannot be used: triton is not installed"):
        engine_for(Watched(), "graphs")


@pytest.mark.usefixtures("gpu")
def test_another_runtime_is_a_choice_and_needs_no_reason() -> None:
    assert engine_for(Watched(), "plain").mode == "fast"


@pytest.mark.usefixtures("gpu")
def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(InputError, match="exact_rows=1 is out of range"):
        engine_for(Watched(), exact_rows=1)


@pytest.mark.parametrize(("exact", "kind"), [(None, Engine), (False, Engine), (True, ExactEngine)])
def test_on_a_cpu_exact_mode_is_opt_in(exact: bool | None, kind: type) -> None:
    engine = engine_for(HFModel(tiny("Llama")), exact=exact)
    assert type(engine) is kind
    assert engine.mode == ("exact" if exact else "fast")


def test_a_decoder_says_why_it_is_fast_once(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(Uncaptured, "is_exact", lambda self: False)
    assert Decoder(Watched(), exact=False).engine.mode == "fast"  # without a warning, which would be an error here
    with pytest.warns(
        OutpaceWarning, match=r"fast mode.*: the model's layers cannot.*exact=False \(--fast\)"
    ) as warned:
        decoder = Decoder(Watched())
    assert len(warned) == 1
    assert "mode='fast: the model's layers" in repr(decoder).replace('"', "'")
    expected = Decoder(tiny("Llama")).generate(PROMPT, max_new_tokens=9).token_ids
    assert decoder.generate(PROMPT, max_new_tokens=9).token_ids == expected


@pytest.mark.parametrize(
    ("home", "name", "words"),
    [
        (writing, "load_decoder", ("generate", "hello")),
        (serving, "load_decoder", ("chat",)),
        (measuring, "load_decoder", ("calibrate",)),
        (measuring, "load_both", ("bench",)),
        (measuring, "load_both", ("reproduce", "lookahead")),
        (racing, "load_both", ("race", "hello")),
    ],
)
@pytest.mark.parametrize(("option", "exact"), [((), None), (("--exact",), True), (("--fast",), False)])
def test_commands_take_exact_and_fast(
    home: ModuleType,
    name: str,
    words: tuple[str, ...],
    option: tuple[str, ...],
    exact: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load(model: str, dtype: Any, device: Any, runtime: str, exact: bool | None, *_: Any, **__: Any) -> None:
        asked.append(exact)
        raise OutpaceError("enough")

    monkeypatch.setattr(home, name, load)
    result = CliRunner().invoke(cli.app, [*words, *option])
    assert (result.exit_code, asked) == (2, [exact]), result.output


def test_traces_of_exact_mode_are_verified_by_bits_where_there_is_that_mode(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    def run(*words: object) -> str:
        result = CliRunner().invoke(cli.app, [*map(str, words), "--device", "cpu", "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    path = tmp_path / "trace.json"
    run("generate", "hello", "--model", folder, "--max-new-tokens", 12, "--exact", "--trace", path)
    trace = json.loads(path.read_text())
    assert trace["about"]["runtime"] == "exact"
    assert json.loads(run("verify", path))["tolerance"] == 0
    trace["about"]["kind"] = "cuda"  # as if a GPU had written it
    path.write_text(json.dumps(trace))
    assert json.loads(run("verify", path))["tolerance"] > 0


def test_doctor_says_the_mode() -> None:
    assert examining._mode(True, True, True).startswith("exact in bfloat16")
    for cuda, graphs, words in (
        (True, True, "tensor descriptors"),
        (True, False, "CUDA graphs"),
        (False, False, "CPU"),
    ):
        assert "fast" in examining._mode(cuda, graphs, False)
        assert words in examining._mode(cuda, graphs, False)
