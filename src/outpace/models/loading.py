"""Loading a model by name: embedded, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import warnings
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ..errors import InputError, ModelError, OutpaceWarning, UnknownNameError
from ..machine import lacks_bfloat16
from . import bundled, packing, products
from .adapter import Model
from .adapters import FILE as ADAPTER
from .adapters import base_of, read_adapter
from .gguf import File
from .hf import HFModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FASTEST = "fastest"
PACKED, NARROW = "packed", "narrow"
WEIGHTS = {
    PACKED: "quantized as in the GGUF file; the default for such files on a CPU",
    NARROW: "unquantized; matrices that 16 bits hold exactly are kept in 16 bits, on a CPU",
    "q8": "rounded to 8 bits, on a CPU",
    "q4": "rounded to 4 bits, on a CPU",
    "float32": "unquantized, in the model's dtype; the default otherwise",
}


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: Any


def load(
    name: str, dtype: str | torch.dtype | None = None, device: str | None = None, weights: str | None = None
) -> Loaded:
    """A model and its tokenizer. By default float32 on a CPU, bfloat16 on a GPU if there is one.

    "fastest" measures which of the two is faster on this CPU. The output may depend on it.
    `weights` is one of WEIGHTS. A model with packed or rounded weights is not the same model as one with full
    precision; every method generates the output of the one that is loaded.
    """
    if weights is not None and weights not in WEIGHTS:
        raise UnknownNameError("weights", weights, WEIGHTS)
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    packs = place.type == "cpu" and kind == torch.float32
    if weights in (PACKED, NARROW, *packing.KINDS) and not packs:
        raise InputError(
            f"weights={weights!r} are for CPUs in float32. Leave out device and dtype, or leave out weights."
        )
    if place.type == "cpu" and kind != torch.float32 and dtype != FASTEST and lacks_bfloat16():
        message = (
            f"this CPU has no {str(kind).removeprefix('torch.')} instructions, so each step may take many times "
            "longer than in float32. Use dtype='float32' (--dtype float32), or 'fastest', which measures both."
        )
        warnings.warn(message, OutpaceWarning, stacklevel=2)
    file = _gguf(name, weights)
    if file is None:
        loaded = _load_numbers(name, kind, place)
    elif weights == PACKED or (weights in (None, NARROW) and packs):
        return _load_packed(name, file)
    else:
        loaded = _load_unpacked(file, kind, place)
    if weights in packing.KINDS:
        packing.round_weights(loaded.model, weights)
    elif weights == NARROW and not hasattr(loaded.model, "peft_config"):  # adapters are switched and merged by torch
        packing.narrow_weights(loaded.model)
    return loaded


def usual_weights(name: str, dtype: str | None, device: str | None, runtime: str) -> str | None:
    """The default weights to generate with on a CPU: packed for embedded models, narrow for others.

    That is several times as fast. Benchmarks and training load full precision, as transformers does.
    """
    if dtype is not None or runtime not in ("auto", "native") or products.compiler() is None:
        return None
    if resolve_device(device).type != "cpu":
        return None
    return PACKED if name in bundled.NAMES else NARROW


def _gguf(name: str, weights: str | None) -> File | None:
    """The GGUF file, if the name is one."""
    if name in bundled.NAMES:
        return File(bundled.ensure_gguf(name)) if weights == PACKED else None
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return File(path)
    if weights == PACKED:
        raise InputError(f"{name!r} is not a GGUF file, so it has no packed weights. Use weights='q8' or 'q4'.")
    return None


def _load_packed(name: str, file: File) -> Loaded:
    """A GGUF file with packed weights; for unsupported architectures, unpacked and rounded."""
    if file.architecture in packing.ARCHITECTURES:
        folder = bundled.ensure(name) if name in bundled.NAMES else packing.prepared(file)
        return Loaded(packing.read_packed(file, folder), _tokenizer(name, folder))
    message = f"{name}: GGUF files of {file.architecture!r} models are unpacked and rounded to 8 bits."
    warnings.warn(message, OutpaceWarning, stacklevel=3)
    loaded = _load_unpacked(file, torch.float32, torch.device("cpu"))
    return Loaded(packing.round_weights(loaded.model, "q8"), loaded.tokenizer)


def _load_unpacked(file: File, kind: torch.dtype, place: torch.device) -> Loaded:
    """A GGUF file in full precision."""
    source = {"gguf_file": file.path.name, "dtype": kind, **bundled.dequantize_option()}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.path.parent), **source)
    except Exception as error:
        raise ModelError(f"{file.path} could not be dequantized by transformers: {_reason(error)}") from error
    return Loaded(model.to(place).eval(), _tokenizer(str(file.path), packing.prepared(file)))


def _load_numbers(name: str, kind: torch.dtype, place: torch.device) -> Loaded:
    folder = _find(name)
    adapter = read_adapter(Path(folder))
    if adapter is not None:
        return _load_adapter(name, Path(folder), adapter, kind, place)
    local = Path(folder).is_dir()  # otherwise transformers asks the hub for optional files of a folder
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=local)
    except Exception as error:
        raise ModelError(
            f"model {name!r} could not be loaded: {_reason(error)} A model folder needs config.json and complete "
            "safetensors weights that fit it; a hub id needs network access at first use."
        ) from error
    return Loaded(model.to(place).eval(), _tokenizer(name, folder))


def _tokenizer(name: str, folder: str | Path) -> Any:
    needed = "The folder needs tokenizer files (tokenizer.json and tokenizer_config.json)."
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=Path(folder).is_dir())
    except Exception as error:
        raise ModelError(f"the tokenizer of {name!r} could not be loaded: {_reason(error)} {needed}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers creates an empty one if there are no files
        raise ModelError(f"{name!r} has no tokenizer. {needed}")
    return tokenizer


def _load_adapter(name: str, folder: Path, base: str, dtype: torch.dtype, device: torch.device) -> Loaded:
    """A model with a LoRA adapter from a folder, and the tokenizer there, or the model's own."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ModelError(f"{name} is an adapter, which needs the package peft: pip install 'outpace[lora]'.") from error
    loaded = load(base, dtype, str(device))
    try:
        model = base_of(PeftModel.from_pretrained(loaded.model, str(folder)))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the adapter {name!r} could not be loaded into {base!r}: {_reason(error)}") from error
    own = (folder / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True) if own else loaded.tokenizer
    return Loaded(model.to(device).eval(), tokenizer)


def hide_bars() -> None:
    """Hide transformers' progress bars from now on."""
    logging.disable_progress_bar()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if first.endswith((".", "!", "?")) else f"{first}."


def as_model(source: str | PreTrainedModel | Model, like: Model) -> Model:
    """A second model to run beside `like`: by name, loaded, or already wrapped."""
    if isinstance(source, PreTrainedModel):
        return HFModel(source)
    if isinstance(source, str):
        dtype = getattr(like, "dtype", None)
        return HFModel(load(source, dtype, str(like.device)).model)
    if not hasattr(source, "vocabulary"):
        raise InputError(f"{source!r} is not a model: give a name, a folder or a loaded transformers model.")
    return source


def resolve_device(device: str | None) -> torch.device:
    """The device by name; None for a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = "torch knows no such device." if "Expected one of" in str(error) else _reason(error)  # it lists twenty
        raise InputError(f"device {device!r} cannot be used here: {reason} Use 'cpu', or leave it out.") from error
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
    """Seconds that this CPU takes to multiply one row, then eight rows, by 16 million weights."""
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
            raise ModelError(f"{path} has no weights: expected *.safetensors (or *.bin) next to config.json.")
        return str(path)
    if path.exists():
        raise ModelError(f"{path} is a file, but not *.gguf. Give the folder that contains it.")
    if not bundled.may_be_hub_id(name):
        raise UnknownNameError("model", name, bundled.NAMES, bundled.NOT_FOUND)
    return of_hub(name, HfApi())


def of_hub(name: str, hub: HfApi) -> str:
    """The hub id itself; if the hub does not answer, the folder of its downloaded files.

    transformers would try again for minutes.
    """
    try:
        hub.model_info(name, timeout=10)
    except Exception as error:  # its type depends on the version of huggingface_hub
        if getattr(error, "response", None) is None:  # the hub has not answered
            config = try_to_load_from_cache(name, "config.json")
            if not isinstance(config, str):
                raise ModelError(
                    f"model {name!r} is no folder here, and {hub.endpoint} cannot be reached to download it "
                    f"({_reason(error)}) Give a model folder, or try again with a network."
                ) from error
            return str(Path(config).parent)
    return name


def _has_weights(folder: Path) -> bool:
    return any(True for pattern in ("*.safetensors", "*.bin") for _ in folder.glob(pattern))
