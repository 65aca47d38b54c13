"""From a name to a model: embedded, a folder, or a hub id."""

from __future__ import annotations

import warnings
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ..errors import InputError, ModelError, OutpaceWarning, UnknownNameError
from ..machine import lacks_bfloat16
from . import bundled
from .adapter import Model
from .adapters import FILE as ADAPTER
from .adapters import base_of, read_adapter
from .hf import HFModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FASTEST = "fastest"


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: Any


def load(name: str, dtype: str | torch.dtype | None = None, device: str | None = None) -> Loaded:
    """A model and its tokenizer. By default float32 on a CPU, bfloat16 on a GPU if there is one.

    "fastest" measures which of the two this CPU computes in less time. The text may depend on it.
    """
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    if place.type == "cpu" and kind != torch.float32 and dtype != FASTEST and lacks_bfloat16():
        message = (
            f"this CPU has no instructions for {str(kind).removeprefix('torch.')}, so each step may take many times "
            "longer than in float32. Use dtype='float32' (--dtype float32), or 'fastest', which measures both."
        )
        warnings.warn(message, OutpaceWarning, stacklevel=2)
    folder = _find(name)
    adapter = read_adapter(Path(folder))
    if adapter is not None:
        return _load_adapter(name, Path(folder), adapter, kind, place)
    local = Path(folder).is_dir()  # else transformers asks the hub about optional files of a folder
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=local)
    except Exception as error:
        raise ModelError(
            f"model {name!r} could not be loaded: {_reason(error)} A model folder needs config.json and whole "
            "safetensors weights that fit it; a hub id needs a network at first use."
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=local)
    except Exception as error:
        raise ModelError(
            f"the tokenizer of {name!r} could not be loaded: {_reason(error)} The folder needs tokenizer files "
            "(tokenizer.json and tokenizer_config.json)."
        ) from error
    return Loaded(model.to(place).eval(), tokenizer)


def _load_adapter(name: str, folder: Path, base: str, dtype: torch.dtype, device: torch.device) -> Loaded:
    """A model with an adapter (LoRA) that lies in a folder, and the tokenizer beside it, or the model's own."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ModelError(f"{name} is an adapter, which the package peft reads: pip install 'outpace[lora]'.") from error
    loaded = load(base, dtype, str(device))
    try:
        model = base_of(PeftModel.from_pretrained(loaded.model, str(folder)))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the adapter {name!r} could not be put into {base!r}: {_reason(error)}") from error
    own = (folder / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True) if own else loaded.tokenizer
    return Loaded(model.to(device).eval(), tokenizer)


def hide_bars() -> None:
    """Keep transformers' progress bars off the screen from now on."""
    logging.disable_progress_bar()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if first.endswith((".", "!", "?")) else f"{first}."


def as_model(source: str | PreTrainedModel | Model, like: Model) -> Model:
    """A second model to run beside `like`: named, loaded, or adapted already."""
    if isinstance(source, PreTrainedModel):
        return HFModel(source)
    if isinstance(source, str):
        dtype = getattr(like, "dtype", None)
        return HFModel(load(source, dtype, str(like.device)).model)
    if not hasattr(source, "vocabulary"):
        raise InputError(f"{source!r} is no model: give a name, a folder or a loaded transformers model.")
    return source


def resolve_device(device: str | None) -> torch.device:
    """The device by name; None for a GPU where there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            f"device {device!r} cannot be used here: {_reason(error)} Use 'cpu', or leave it out."
        ) from error
    return place


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype by name; None for float32 on a CPU and bfloat16 elsewhere."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, FASTEST) and device.type != "cpu":
        return torch.bfloat16
    if dtype is None:
        return torch.float32
    if dtype == FASTEST:
        return min((torch.float32, torch.bfloat16), key=product_time)
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", str(dtype), (*DTYPES, FASTEST))
    return DTYPES[dtype]


@torch.inference_mode()
def product_time(dtype: torch.dtype) -> float:
    """Seconds that this CPU takes for a product of one row, and one of eight, with 16 million weights."""
    weights = torch.ones(4096, 4096, dtype=dtype)
    seconds = list[float]()
    for rows in (torch.ones(count, 4096, dtype=dtype) for count in (1, 8)):
        times = []
        for _ in range(3):  # the first warms up
            start = perf_counter()
            F.linear(rows, weights)
            times.append(perf_counter() - start)
        seconds.append(min(times[1:]))
    return sum(seconds)


def _find(name: str) -> str:
    if name in bundled.NAMES:
        return str(bundled.ensure(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / ADAPTER).is_file():
            return str(path)
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model folder: it has no config.json.")
        if not _has_weights(path):
            raise ModelError(f"{path} has no weights: expected *.safetensors (or *.bin) beside config.json.")
        return str(path)
    if path.exists():
        raise ModelError(f"{path} is a file. Name the folder that holds it.")
    if "/" not in name or name.startswith((".", "/", "~")):
        raise UnknownNameError("model (no such folder, and not a hub id like owner/name)", name, bundled.NAMES)
    return name


def _has_weights(folder: Path) -> bool:
    return any(True for pattern in ("*.safetensors", "*.bin") for _ in folder.glob(pattern))
