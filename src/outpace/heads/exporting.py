"""Export of Medusa heads to other projects' formats, and import of public heads in the reference format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import InputError, ModelError, UnknownNameError
from ..models.adapter import Model
from .base import Heads
from .blocks import BlockShape
from .medusa import MedusaHeads, MedusaSettings
from .storing import fill, read_tensors

FORMATS = {
    "reference": "the format of Medusa's own repository",
    "tgi": "Text Generation Inference: the reference format",
    "vllm": "vLLM",
}
REFERENCE_FILE = "medusa_lm_head"


def export(heads: Heads, model: Model, form: str, folder: Path) -> None:
    """Write Medusa heads to a new folder, with their own output matrices or the target's.

    The target's is written once for vLLM, where heads can share it, and for each head in the other formats.
    """
    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    if not isinstance(heads, MedusaHeads):
        raise InputError(
            f"{heads.kind} heads cannot be exported: these formats are for medusa heads only, and {heads.kind} has no "
            "counterpart there."
        )
    if folder.exists():
        raise InputError(f"{folder} exists. Give a new folder.")
    layers = heads.settings.layers
    if form == "vllm":
        config: dict[str, Any] = {
            "model_type": "medusa",
            "hidden_size": heads.shape.width,
            "vocab_size": model.vocabulary,
            "num_heads": heads.count,
            "num_hidden_layers": layers,
            "medusa_fc_bias": True,
            "original_lm_head": not heads.settings.own_output,
        }
    else:
        config = {
            "medusa_num_heads": heads.count,
            "medusa_num_layers": layers,
            "base_model_name_or_path": model.name,
        }
    name = "model" if form == "vllm" else REFERENCE_FILE
    half = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        save_file(_named(heads, model, form), half / f"{name}.safetensors")
        (half / "config.json").write_text(json.dumps(config, indent=1))
        half.replace(folder)
    except OSError as error:
        raise InputError(f"heads could not be written to {folder}: {error.strerror}.") from error


def _named(heads: MedusaHeads, model: Model, form: str) -> dict[str, torch.Tensor]:
    """All weights under the names of a format."""
    layer, output = (
        ("blocks.{}.layers.{}", "lm_heads.{}") if form == "vllm" else ("{}.{}.linear", f"{{}}.{heads.settings.layers}")
    )
    weights: dict[str, Any] = {}
    blocks: Any
    for number, blocks in enumerate(heads.heads):
        for place, block in enumerate(blocks):
            for kind in ("weight", "bias"):
                weights[f"{layer.format(number, place)}.{kind}"] = getattr(block.linear, kind)
        last = heads.outputs[number] if heads.settings.own_output else model.ends().head
        if number == 0 or form != "vllm" or heads.settings.own_output:
            weights[f"{output.format(number)}.weight"] = last.weight
    return {name: weight.detach().cpu().clone().contiguous() for name, weight in weights.items()}


def is_reference(folder: Path) -> bool:
    """Whether a folder holds heads in the reference format."""
    return any((folder / f"{REFERENCE_FILE}.{ending}").is_file() for ending in ("safetensors", "pt"))


def load_reference(folder: Path, model: Model) -> MedusaHeads:
    """Public Medusa heads: config.json and medusa_lm_head.safetensors (or .pt)."""
    try:
        config = json.loads((folder / "config.json").read_text())
        count, layers = int(config["medusa_num_heads"]), int(config["medusa_num_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}/config.json needs medusa_num_heads and medusa_num_layers ({error}).") from error
    weights = _renamed(_read(folder), layers)
    outputs = [weight for name, weight in weights.items() if name.startswith("outputs.")]
    if outputs and outputs[0].shape != (model.vocabulary, model.width):
        raise ModelError(
            f"the heads in {folder} are for a vocabulary of {outputs[0].shape[0]} tokens and hidden states of width "
            f"{outputs[0].shape[1]}; {model.name} has {model.vocabulary} and {model.width}."
        )
    settings = MedusaSettings(count=count, layers=layers, own_output=True, vocabulary=model.vocabulary)
    heads = MedusaHeads(settings, BlockShape(model.width, 1, 1, model.width, model.width))
    fill(heads, weights, folder)
    return heads.to(model.device, model.dtype).eval()


def _read(folder: Path) -> dict[str, torch.Tensor]:
    tensors = folder / f"{REFERENCE_FILE}.safetensors"
    if tensors.is_file():
        return read_tensors(tensors)
    old = folder / f"{REFERENCE_FILE}.pt"
    try:
        return dict(torch.load(old, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ModelError(f"{old} cannot be read ({error}). It may be truncated: copy it again.") from error


def _renamed(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """From the reference's names to ours. Unknown names stay, to be reported."""
    renamed = {}
    for name, weight in weights.items():
        head, _, rest = name.partition(".")
        renamed[f"outputs.{head}.weight" if rest == f"{layers}.weight" else f"heads.{head}.{rest}"] = weight
    return renamed
