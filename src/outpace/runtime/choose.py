"""Choice of a runtime for a model."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import InputError, OutpaceError, OutpaceWarning, UnknownNameError, UnsupportedModel
from ..models.adapter import Model
from ..models.launching import fetches_tiles
from ..models.products import compiler
from .exact import ExactEngine
from .graphs import MEMORY, GraphEngine
from .plain import Engine

RUNTIMES = {
    "auto": "the fastest that works: graphs or native, otherwise plain",
    "plain": "ordinary forward passes",
    "compiled": "forward passes of compiled layers; the first step takes some seconds",
    "graphs": "CUDA graphs of compiled layers, joined weights, attention by slot lists",
    "native": "a forward pass in one call of C++ code, on a CPU in float32; always exact",
}
EXACT_ROWS = 128  # the most rows of a forward pass in exact mode, on GPUs with tensor descriptors (TMA)
FEW_EXACT_ROWS = 32  # the same on other GPUs


def engine_for(
    model: Model,
    runtime: str = "auto",
    exact: bool | None = None,
    exact_rows: int | None = None,
    join: bool = True,
    memory: float = MEMORY,
) -> Engine:
    """An engine for the model. Without `join`, CUDA graphs do not fuse the user's weights.

    `memory` is the share of the GPU's free memory for the KV cache, with CUDA graphs.

    With `exact`, logits have the same bits with every method and in every batch. On CUDA a forward pass then has up to
    `exact_rows` rows (by default as many as our kernels take), or exactly that many if the device's bits depend on the
    number. This is tested on the model first. None, the default: exact where it costs next to nothing, which is on
    CUDA graphs with kernels of our own; otherwise fast, and on CUDA the engine's `why_fast` says why.
    """
    if not (isinstance(memory, (int, float)) and 0 < memory <= 1):
        raise InputError(f"memory={memory!r} is out of range: it must be above 0 and at most 1.")
    if runtime not in RUNTIMES:
        raise UnknownNameError("runtime", runtime, RUNTIMES)
    if getattr(model, "packed", False):
        return _packed(model, runtime, exact)
    if runtime in ("auto", "native") and model.device.type == "cpu":
        native = _native(model)
        if isinstance(native, ExactEngine):
            return native
        if runtime == "native":
            raise InputError(f"runtime='native' cannot be used: {native}. Use runtime='plain'.")
    elif runtime == "native":
        raise InputError(f"runtime='native' is for CPUs, and the model is on {model.device.type}. Use runtime='auto'.")
    if exact and model.device.type == "cpu":
        return _exact_on_cpu(model, runtime)
    obstacle = _obstacle(model)
    if exact:
        if runtime not in ("auto", "graphs"):
            raise InputError(f"exact mode needs runtime='graphs', not {runtime!r}.")
        if obstacle:
            raise InputError(f"exact mode needs CUDA graphs: {obstacle}.")
        return _exact_engine(model, _rows(model, exact_rows), memory)
    if runtime == "graphs" and obstacle:
        raise InputError(f"runtime='graphs' cannot be used: {obstacle}. Use runtime='plain'.")
    why_fast = ""
    if exact is None and runtime in ("auto", "graphs") and model.device.type == "cuda":
        why_fast = f"exact mode needs CUDA graphs: {obstacle}" if obstacle else _price(model, join)
        if not why_fast:
            found = _cheap_exact_engine(model, _rows(model, exact_rows), memory)
            if isinstance(found, GraphEngine):
                return found
            why_fast = found
            _unfuse(model)  # now that the engine's memory is free
    engine = _fast_engine(model, runtime, join, memory, graphs=not obstacle)
    engine.why_fast = why_fast
    return engine


def _fast_engine(model: Model, runtime: str, join: bool, memory: float, graphs: bool) -> Engine:
    if runtime == "graphs" or (runtime == "auto" and graphs):
        if join:
            _fuse(model)
        _replace_products(model)
        return GraphEngine(model, memory=memory)
    if runtime == "compiled":
        _fuse(model)
        _replace_products(model)
        _compile(model)
    return Engine(model, compiled=runtime == "compiled")


def _obstacle(model: Model) -> str | None:
    """Why a model cannot run on CUDA graphs."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}, and there is no CUDA there"
    major, minor = torch.cuda.get_device_capability(model.device)
    if major < 8:
        return (
            f"{torch.cuda.get_device_name(model.device)} has compute capability {major}.{minor}; 8.0 or later is needed"
        )
    if find_spec("triton") is None:
        return "triton is not installed"
    if not model.lists:
        return f"{model.name} has attention that slot lists cannot express"
    return None


def _price(model: Model, join: bool) -> str:
    """Why exact mode on CUDA graphs would cost more than next to nothing; empty if it should not."""
    if not fetches_tiles(model.device):
        name = torch.cuda.get_device_name(model.device)
        return f"{name} has no tensor descriptors, which cheap exact mode needs (H100 or later)"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"cheap exact mode needs bfloat16 or float16, not {str(model.dtype).removeprefix('torch.')}"
    return "" if join else "exact mode fuses weights, and these may not be fused"


def _rows(model: Model, asked: int | None) -> int:
    """The most rows of a forward pass in exact mode."""
    rows = (EXACT_ROWS if fetches_tiles(model.device) else FEW_EXACT_ROWS) if asked is None else asked
    if not 2 <= rows <= 256:
        raise InputError(f"exact_rows={rows} is out of range: it must be 2 to 256.")
    return rows


def _cheap_exact_engine(model: Any, rows: int, memory: float) -> GraphEngine | str:
    """An exact engine that batches sequences, in steps of all sizes; if the model does not allow it, why not."""
    try:
        _fuse(model)
        _replace_products(model, always=True)
        if hasattr(model, "uncomputed") and (layer := model.uncomputed()):
            return f"our kernels do not compute {layer}"
        engine = GraphEngine(model, exact_rows=rows, memory=memory)
        if not engine.is_exact():
            if not engine.compiling:
                return "the model's layers cannot be compiled"
            return "the model's bits depend on the number of rows in a step"
        if engine.takes_turns:
            return "the model's bits depend on the other sequences of a batch"
        return engine
    except OutpaceError as error:
        return str(error).partition(". Use ")[0]
    except torch.OutOfMemoryError:
        return "there is too little memory to test exact mode"


def _exact_engine(model: Any, rows: int, memory: float) -> GraphEngine:
    _fuse(model)
    _replace_products(model, always=True)
    engine = GraphEngine(model, exact_rows=rows, memory=memory)
    if engine.is_exact():
        return engine
    engine.use_one_size()
    if not engine.is_exact():
        raise UnsupportedModel(
            f"{model.name}: on {torch.cuda.get_device_name(model.device)} a draft tree does not give the same "
            "bits as single steps, so exact mode cannot be guaranteed. Use exact=False."
        )
    return engine


def _native(model: Any) -> ExactEngine | str:
    """An engine whose forward passes are one call of C++ code; if the model does not allow it, why not."""
    if not hasattr(model, "compute_natively"):
        return "the model is no model of transformers"
    if model.dtype != torch.float32:
        return f"it computes in float32, and the model is in {str(model.dtype).removeprefix('torch.')}"
    if compiler() is None:
        return "it needs a C++ compiler (g++ or clang++), and there is none"
    try:
        fits = model.compute_natively()
    except InputError as error:
        if not model.packed:  # it would not run without
            warnings.warn(
                f"the C++ code for CPUs cannot be used, and torch is slower: {error}", OutpaceWarning, stacklevel=2
            )
            return str(error)
        raise
    if not fits:
        return f"the C++ code has no layers like those of {model.name}"
    engine = ExactEngine(model, "native")
    if engine.is_exact():
        return engine
    model.unfuse()
    return f"{model.name}: a row has other bits in a draft tree than alone"


def _packed(model: Any, runtime: str, exact: bool | None) -> Engine:
    """With quantized weights exact mode is always on if possible: it costs nothing."""
    if runtime not in ("auto", "plain", "native"):
        raise InputError(f"packed weights need runtime='auto', not {runtime!r}.")
    engine: Engine | str = (
        "runtime='plain' was asked for" if runtime == "plain" and not model.quantized else _native(model)
    )
    if isinstance(engine, str):
        if runtime == "native":
            raise InputError(f"runtime='native' cannot be used: {engine}. Use runtime='auto'.")
        engine = Engine(model)
        if exact or model.quantized:
            try:
                engine = _exact_on_cpu(model, "plain")
            except UnsupportedModel:
                if exact:
                    raise
    if model.quantized:
        engine.name = "packed"
    return engine


def _exact_on_cpu(model: Any, runtime: str) -> ExactEngine:
    if runtime not in ("auto", "plain", "compiled"):
        raise InputError(f"on a CPU exact mode needs runtime='auto', 'native', 'plain' or 'compiled', not {runtime!r}.")
    if model.dtype != torch.float32:
        name = str(model.dtype).removeprefix("torch.")
        raise InputError(f"on a CPU exact mode needs float32, and {model.name} is in {name}. Use dtype='float32'.")
    if not model.lists:
        raise UnsupportedModel(f"{model.name} has attention that exact mode does not support. Use exact=False.")
    _fuse(model)
    model.compute_exactly()
    if runtime == "compiled":
        model.compile_layers()
    engine = ExactEngine(model, "exact", compiled=runtime == "compiled")
    try:
        if not engine.is_exact():
            raise UnsupportedModel(
                f"{model.name}: a row does not have the same bits in a draft tree, in a batch and alone, so exact "
                "mode cannot be guaranteed. Use exact=False."
            )
    except UnsupportedModel:
        model.unfuse()
        raise
    return engine


def _fuse(model: Any) -> None:
    if hasattr(model, "fuse"):
        model.fuse()


def _unfuse(model: Any) -> None:
    if hasattr(model, "unfuse"):
        model.unfuse()


def _replace_products(model: Any, always: bool = False) -> None:
    if hasattr(model, "replace_products"):
        model.replace_products(always)


def _compile(model: Any) -> None:
    if hasattr(model, "compile_layers"):
        model.compile_layers()
