"""`outpace doctor`: what this machine has, which runtime it gets, and what is slow and why."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from .. import __version__
from . import options

PACKAGES = {
    "torch": "",
    "transformers": "",
    "safetensors": "",
    "triton": "needed on a GPU",
    "peft": "needed for LoRA adapters",
    "llguidance": "needed for grammars and the server",
    "fastapi": "needed for the server",
    "matplotlib": "needed for plots",
}
"""What `doctor` lists, and what each is for."""


def doctor(as_json: options.Json = False) -> None:
    """Show what this machine has, how Outpace runs on it, and what could be faster. Include it in bug reports."""
    found = examine()
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, value in found.items():
        if name != "advice":
            typer.echo(f"{name}: {value}")
    for line in found["advice"]:
        typer.echo(f"- {line}")


def examine() -> dict[str, Any]:
    """Everything that `doctor` prints, by name."""
    import torch

    from ..heads.shipped import folders, hint
    from ..machine import cpu_name, lacks_bfloat16
    from ..models import bundled, products
    from ..models.launching import fetches_tiles
    from ..runtime.calibrate import folder as costs

    cache = bundled.cache_folder()
    there = cache if cache.exists() else Path.home()
    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())] if cuda else []
    compiler = products.compiler()
    runtime, advice = _runtime(cuda, torch.cuda.get_device_capability(0) if cuda else (0, 0), compiler is not None)
    if not gpus and lacks_bfloat16():
        advice.append("this CPU has no bfloat16 instructions: use float32 (the default), or --dtype fastest.")
    if not compiler:
        advice.append(
            "there is no C++ compiler: with one, models run several times as fast on a CPU (apt install g++). GGUF "
            "files, --runtime compiled and --exact need it."
        )
    if not folders():
        advice.append(f"no trained heads are installed.{hint()}")
    if not any(costs().glob("*.json")):
        advice.append(
            "nothing is calibrated: `outpace calibrate` sizes the drafts of methods other than auto for this machine."
        )
    return {
        "outpace": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}",
        "gpu": ", ".join(gpus) or "none that torch can use",
        "compiler": compiler or "none",
        **{name: _shown(name) for name in PACKAGES},
        "runtime": runtime,
        "mode": _mode(cuda, runtime == "graphs", cuda and fetches_tiles(torch.device("cuda", 0))),
        "dtype": "bfloat16" if cuda else "float32",
        "embedded model": "ready" if bundled.is_ready(options.DEFAULT_MODEL) else "downloaded at first use",
        "trained heads": ", ".join(map(str, folders())) or "none",
        "cache": f"{cache}, {shutil.disk_usage(there).free / 1e9:.0f} GB free",
        "command": sys.argv[0],
        "advice": advice,
    }


def _runtime(cuda: bool, capability: tuple[int, int], compiler: bool) -> tuple[str, list[str]]:
    """The runtime that `auto` selects here, and what would allow a faster one."""
    if not cuda:
        slower = "there is no GPU: on a CPU every extra draft token costs time, so speedups are smaller."
        return "native" if compiler else "plain", [slower]
    if capability < (8, 0):
        return "plain", [f"the GPU has compute capability {capability[0]}.{capability[1]}; CUDA graphs need 8.0."]
    if _version("triton") == "missing":
        return "plain", ["triton is missing: CUDA graphs need it (pip install triton)."]
    return "graphs", []


def _mode(cuda: bool, graphs: bool, recent: bool) -> str:
    """The mode that models get by default."""
    if not cuda:
        return "exact with packed weights and in the native runtime; otherwise fast, as --exact costs speed on a CPU"
    if not graphs:
        return "fast: exact mode needs CUDA graphs"
    if not recent:
        return "fast: exact mode (--exact) costs speed on a GPU without tensor descriptors (H100 and later have them)"
    return "exact in bfloat16 and float16, if the model passes the test at load; otherwise fast"


def _shown(package: str) -> str:
    found = _version(package)
    return f"{found} ({PACKAGES[package]})" if found == "missing" else found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
