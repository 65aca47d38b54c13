"""Heads on disk: a folder with config.json and safetensors files of at most 15 MB, for one base model.

Weights have 16 bits; in format 2 matrices have 8: integers, with a scale for each GROUP values of a row.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from ..errors import InputError, ModelError, UnknownNameError
from ..models.adapter import Model
from ..models.packed import PackedEmbedding
from .base import Heads
from .blocks import BlockShape

FORMATS = {16: 1, 8: 2}  # by bits per weight
GROUP = 64
SCALES = ".scales"  # suffix of an 8-bit matrix's name
SHARD = 15_000_000  # bytes per file


@dataclass(frozen=True)
class Stored:
    """Metadata of heads."""

    base: dict[str, Any]  # the model that they were trained for: see `fingerprint`
    accuracies: list[list[float]] = field(default_factory=list)  # [head][rank] on held-out text
    tree: list[list[int]] = field(default_factory=list)  # paths of ranks, most likely first
    training: dict[str, Any] = field(default_factory=dict)  # how they were trained
    calibration: list[list[list[int]]] = field(default_factory=list)  # [exit][confidence bin] predictions, right ones


def fingerprint(model: Model) -> dict[str, Any]:
    """Identifies a model, whatever its dtype: its sizes, and some of its weights."""
    embed = model.ends().embed
    packed = isinstance(embed, PackedEmbedding)
    tokens = torch.arange(0, model.vocabulary, max(1, model.vocabulary // 16))[:16]
    rows = embed.matrix.rows(tokens) if packed else embed.weight.detach()[tokens.to(embed.weight.device)]
    sample = rows[:, :: max(1, rows.shape[1] // 2)][:, :2].flatten()
    return {
        "width": model.width,
        "vocabulary": model.vocabulary,
        "layers": model.layers,
        "sample": [round(float(value), 6) for value in sample],
    }


def check_bits(bits: int) -> None:
    """Raise InputError for a number of bits that weights cannot be stored in."""
    if bits not in FORMATS:
        raise InputError(f"bits={bits}: heads are stored in {' or '.join(map(str, sorted(FORMATS)))} bits.")


def save(heads: Heads, stored: Stored, folder: Path, bits: int = 16) -> None:
    """Write the folder atomically: an older one stays until the new one is complete."""
    check_bits(bits)
    half = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        shards = _shards(_packed(heads.state_dict(), bits))
        for number, shard in enumerate(shards, 1):
            save_file(shard, half / f"heads-{number}-of-{len(shards)}.safetensors")
        config = {
            "format": FORMATS[bits],
            "kind": heads.kind,
            "settings": asdict(heads.settings),
            "shape": asdict(heads.shape),
            **asdict(stored),
        }
        (half / "config.json").write_text(json.dumps(config, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        half.replace(folder)
    except OSError as error:
        raise InputError(f"heads could not be written to {folder}: {error.strerror}.") from error


def _packed(weights: Mapping[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in weights.items():
        if bits == 8 and weight.is_floating_point() and weight.dim() == 2:
            found[name], found[name + SCALES] = (part.cpu() for part in to_bytes(weight))
        else:
            found[name] = (weight.to(torch.bfloat16) if weight.is_floating_point() else weight).cpu()
    return found


def to_bytes(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as integers from -127 to 127, and their scales [rows, groups]."""
    columns = matrix.shape[1]
    groups = F.pad(matrix.float(), (0, -columns % GROUP)).view(len(matrix), -1, GROUP)
    scales = (groups.abs().amax(-1) / 127).clamp(min=1e-7).to(torch.float16)
    numbers = (groups / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return numbers.flatten(1)[:, :columns], scales


def from_bytes(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_bytes`."""
    return numbers.float() * scales.float().repeat_interleave(GROUP, 1)[:, : numbers.shape[1]]


def _shards(weights: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, weight in weights.items():
        if size + weight.nbytes > SHARD and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = weight.contiguous()
        size += weight.nbytes
    return shards


def load(folder: Path, model: Model, kinds: Mapping[str, type[Heads]]) -> tuple[Heads, Stored]:
    """The heads of a folder, checked against the model and moved to it."""
    config = read_config(folder)
    stored = Stored(**{item.name: config[item.name] for item in fields(Stored) if item.name in config})
    _check_base(folder, stored.base, model)
    if config["kind"] not in kinds:
        raise UnknownNameError(f"kind of heads in {folder}", str(config["kind"]), kinds)
    kind = kinds[config["kind"]]
    try:
        heads = kind(kind.settings_type(**config["settings"]), BlockShape(**config["shape"]))
    except TypeError as error:
        raise ModelError(f"{folder}/config.json does not fit this version of Outpace: {error}.") from error
    fill(heads, _weights(folder), folder)
    return heads.to(model.device, model.dtype).eval(), stored


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, with all entries."""
    path = folder / "config.json"
    if not path.is_file():
        inside = sorted(str(config.parent) for config in folder.glob("*/config.json"))
        remedy = f"Give a folder in it: {' or '.join(inside)}." if inside else "Give one that `outpace train` wrote."
        raise ModelError(f"{folder} has no heads: there is no config.json. {remedy}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}). Train or copy the heads again.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} has no JSON object. Train or copy the heads again.")
    needed = {"format", "kind", "settings", "shape", *(item.name for item in fields(Stored))} - {
        "calibration"
    }  # only exits have one
    missing = sorted(needed - set(config))
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing)}. Train or copy the heads again.")
    if config["format"] not in FORMATS.values():
        known = " and ".join(map(str, sorted(FORMATS.values())))
        raise ModelError(f"{path} has format {config['format']!r}; this version of Outpace reads {known}.")
    return dict(config)


def fill(heads: Heads, weights: Mapping[str, torch.Tensor], source: Path) -> None:
    """Load weights into heads. Names and shapes must match exactly."""
    wanted = heads.state_dict()
    missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or extra:
        parts = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has unknown", extra)) if names]
        raise ModelError(f"the head file in {source} {' and '.join(parts)}. Train or copy the heads again.")
    for name, weight in weights.items():
        if weight.shape != wanted[name].shape:
            raise ModelError(
                f"{source}: {name} has the shape {list(weight.shape)}; {list(wanted[name].shape)} is needed."
            )
    heads.load_state_dict(dict(weights))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("heads-*.safetensors"))
    expected = int(files[0].stem.rsplit("-", 1)[-1]) if files else 1
    if len(files) != expected:
        raise ModelError(f"{folder} has {len(files)} of {expected} head files. Train or copy the heads again.")
    for file in files:
        weights.update(read_tensors(file))
    for name in [name for name in weights if name + SCALES in weights]:
        weights[name] = from_bytes(weights[name], weights.pop(name + SCALES))
    return weights


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except Exception as error:
        raise ModelError(f"{file} cannot be read ({error}). It may be truncated: copy it again.") from error


def is_for(folder: Path, model: Model) -> bool:
    """Whether a folder of heads is for this model."""
    return mismatch(read_config(folder)["base"], fingerprint(model)) is None


def _check_base(folder: Path, base: Mapping[str, Any], model: Model) -> None:
    mine = fingerprint(model)
    if (name := mismatch(base, mine)) is not None:
        other = "other weights" if name == "sample" else f"{name} {base.get(name)}, not {mine[name]}"
        raise ModelError(
            f"the heads in {folder} are for a model other than {model.name}: one with {other}. Heads work only with "
            "the model they were trained for. Give that one (--model), or train some for this one with `outpace train`."
        )


def mismatch(base: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """The first difference of two fingerprints."""
    for name in ("width", "vocabulary", "layers"):
        if base.get(name) != mine[name]:
            return name
    sample = base.get("sample") or []
    alike = len(sample) == len(mine["sample"]) and all(
        math.isclose(old, new, rel_tol=0.02, abs_tol=1e-3) for old, new in zip(sample, mine["sample"], strict=True)
    )
    return None if alike else "sample"
