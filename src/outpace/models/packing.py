"""Models with packed weights: read from a GGUF file, or quantized from a loaded model."""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from accelerate import init_empty_weights
from gguf import quants
from platformdirs import user_cache_path
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError, OutpaceWarning
from . import bundled, vocabulary
from .fusing import is_plain
from .gguf import File, Tensor
from .layers import form_of, is_linear
from .packed import BLOCK, FORMATS, LANES, NUMBERS, Q4, Q8, Matrix, PackedEmbedding, PackedLinear

KINDS = {"q8": Q8, "q4": Q4}
"""The formats that a loaded model can be quantized to."""


@dataclass(frozen=True)
class Changes:
    """What llama.cpp's converter changes in the weights of an architecture."""

    turned: bool = False  # it permutes the rows of queries and keys, for its rotary embedding
    lifted: bool = False  # it adds one to the weights of norms


ARCHITECTURES = {
    "llama": Changes(turned=True),
    "qwen2": Changes(),
    "qwen3": Changes(),
    "gemma2": Changes(lifted=True),
    "gemma3": Changes(lifted=True),
}
"""Architectures whose weights stay as they are in the file. Others are dequantized, then quantized to 8 bits."""


FOLDERS = 2  # the version of folders that `prepared` makes


def prepared(file: File) -> Path:
    """A folder with the config and the tokenizer of a GGUF file. transformers makes it, once: that takes a while."""
    folder = user_cache_path("outpace", appauthor=False) / "gguf" / f"{file.digest[:32]}-{FOLDERS}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place, bundled.quiet():
            half = Path(place, "half")
            _write_folder(file, half)
            if not folder.is_dir():
                shutil.move(half, folder)
    except OSError as error:
        if error.errno is not None:
            raise bundled.disk_error(error, folder.parent) from error
        raise ModelError(f"transformers cannot read the config or tokenizer of {file.path}: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(
            f"transformers cannot read the config or tokenizer of {file.path} ({type(error).__name__}: {error})."
        ) from error
    return folder


def _write_folder(file: File, folder: Path) -> None:
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.path.parent), "gguf_file": file.path.name}
    config = AutoConfig.from_pretrained(**source)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    vocabulary.settle(tokenizer, config, file.metadata)
    config.tie_word_embeddings = "output.weight" not in file.tensors
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_packed(file: File, folder: Path) -> PreTrainedModel:
    """The model in a GGUF file, with the config in `folder`. Matrices stay packed."""
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _Filling(file, model).fill()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config._name_or_path = file.path.stem
    return model.eval()


def unpack(file: File, folder: Path) -> None:
    """Write the model in a GGUF file to `folder`, in float32, with its config and tokenizer."""
    _write_folder(file, folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    _Filling(file, model).fill_parameters()
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)


class _Filling:
    """Puts a file's tensors into a model without weights."""

    def __init__(self, file: File, model: PreTrainedModel) -> None:
        self.file, self.model = file, model
        self.config = model.config.get_text_config()
        self.changes = ARCHITECTURES[file.architecture]
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
        self.names = gguf.get_tensor_name_map(number, self.config.num_hidden_layers)
        self.rounded: dict[str, str] = {}  # tensors of formats that we have no kernel for
        self.shared: dict[str, Matrix] = {}

    def fill(self) -> None:
        replace(self.model, self._module)
        self.fill_parameters()
        if self.rounded:
            kinds = ", ".join(sorted(set(self.rounded.values())))
            warnings.warn(
                f"{self.file.path.name}: {len(self.rounded)} matrices of type {kinds} are quantized to {Q8.name}, "
                "because there is no kernel for their type.",
                OutpaceWarning,
                stacklevel=2,
            )

    def fill_parameters(self) -> None:
        """All that are not filled yet, as floats."""
        for name, parameter in self.model.named_parameters():
            if parameter.is_meta:
                owner, _, last = name.rpartition(".")
                self.model.get_submodule(owner)._parameters[last] = nn.Parameter(
                    self._numbers(name, parameter.shape), requires_grad=False
                )

    def _tensor(self, name: str) -> Tensor:
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found not in self.file.tensors and name == "lm_head.weight":
            found = "token_embd.weight"  # tied
        if found is None or found not in self.file.tensors:
            raise ModelError(f"{self.file.path} has no tensor for {name} (looked for {found}).")
        return self.file.tensors[found]

    def _module(self, name: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, nn.Linear | nn.Embedding):
            return None
        tensor = self._tensor(f"{name}.weight")
        if tensor.name not in self.shared:
            self.shared[tensor.name] = self._matrix(name, tensor, module.weight.shape)
        matrix = self.shared[tensor.name]
        if isinstance(module, nn.Embedding):
            return PackedEmbedding(matrix, scale_of(module))
        bias = None if module.bias is None else self._numbers(f"{name}.bias", module.bias.shape)
        return PackedLinear(matrix, bias)

    def _matrix(self, name: str, tensor: Tensor, shape: torch.Size) -> Matrix:
        self._check(tensor, shape)
        order = self._order(name, len(tensor.raw))
        if tensor.type in FORMATS or (tensor.type in NUMBERS.values() and shape[1] % LANES == 0):
            return Matrix(tensor.raw, tensor.type, order)
        self.rounded[tensor.name] = tensor.type.name
        return Matrix(quants.quantize(_unpacked(self.file, tensor), Q8), Q8, order)

    def _check(self, tensor: Tensor, shape: torch.Size) -> None:
        if tensor.shape != tuple(shape):
            raise ModelError(
                f"{self.file.path}: {tensor.name} has the shape {list(tensor.shape)}, and the model's config asks for "
                f"{list(shape)}."
            )

    def _order(self, name: str, rows: int) -> np.ndarray[Any, Any] | None:
        """The row of the file for each output, if the converter has permuted them."""
        if not self.changes.turned or not name.endswith(("q_proj", "k_proj")):
            return None
        heads = self.config.num_attention_heads if name.endswith("q_proj") else self.config.num_key_value_heads
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)

    def _numbers(self, name: str, shape: torch.Size) -> torch.Tensor:
        tensor = self._tensor(name)
        self._check(tensor, shape)
        values = _unpacked(self.file, tensor).reshape(tensor.shape)
        owner = name.rpartition(".")[0]
        if (order := self._order(owner, len(values))) is not None:
            values = values[order]
        if self.changes.lifted and owner.endswith("norm"):
            values = values - 1
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _unpacked(file: File, tensor: Tensor) -> np.ndarray[Any, Any]:
    try:
        return np.array(quants.dequantize(tensor.raw, tensor.type), np.float32)
    except NotImplementedError as error:
        raise ModelError(f"{file.path}: {tensor.name} has type {tensor.type.name}, which is not supported.") from error


def round_weights(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Quantize a loaded model's matrices in place, embeddings and output head to 8 bits.

    Matrices whose inputs are no multiple of BLOCK stay as they are, and so do embeddings that do more than look up.
    """
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}

    def rounded(module: Any, weight: torch.Tensor) -> Matrix | None:
        if weight.shape[1] % BLOCK:
            return None
        return Matrix.of(weight, Q8 if id(module) in ends else KINDS[kind])

    return _pack(model, rounded)


def narrow_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Keep matrices in 16 bits, in place, if these hold every number exactly: the same model in half the memory.

    Only where layers.cpp computes the layers: elsewhere torch is faster in float32. GPT-2's matrices, which it does not
    read as they are, are transposed. Models with weights of another kind, as quantization libraries have them, stay as
    they are.
    """
    stacks = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part))
    if not any(all(form_of(layer) for layer in stack) for stack in stacks):
        return model
    if not all(is_plain(weight) and weight.dtype == torch.float32 for weight in model.parameters()):
        return model
    return _pack(model, lambda module, weight: None if weight.shape[1] % LANES else _narrow(module, weight.detach()))


def _narrow(module: Any, weight: torch.Tensor) -> Matrix | None:
    for dtype in (torch.bfloat16, torch.float16):
        sample = weight[:8]
        if torch.equal(sample.to(dtype).float(), sample) and torch.equal((short := weight.to(dtype)).float(), weight):
            return Matrix.over(short)
    return Matrix.over(weight) if type(module) is Conv1D else None


@torch.no_grad()
def _pack(model: PreTrainedModel, matrix_of: Callable[[Any, torch.Tensor], Matrix | None]) -> PreTrainedModel:
    """Pack a loaded model's matrices in place, those that `matrix_of(module, weight)` makes a matrix of."""
    embeddings = model.get_input_embeddings()
    shared: dict[int, Matrix | None] = {}

    def packed(name: str, module: Any) -> nn.Module | None:
        linear = type(module) is Conv1D or is_linear(type(module))
        if not linear and not (module is embeddings and _looks_up(module)):
            return None
        place = module.weight.data_ptr()
        weight = module.weight.T.contiguous() if type(module) is Conv1D else module.weight  # GPT-2's are transposed
        if place not in shared:
            shared[place] = matrix_of(module, weight)
        matrix = shared[place]
        if matrix is None:
            return None
        if linear:
            return PackedLinear(matrix, module.bias)
        return PackedEmbedding(matrix, scale_of(module))

    model.to(torch.float32)
    replace(model, packed)
    return model


def replace(model: nn.Module, change: Callable[[str, nn.Module], nn.Module | None]) -> None:
    """Replace each module for which `change` returns another."""
    for owner_name, owner in [*model.named_modules()]:
        for name, child in [*owner._modules.items()]:
            if child is not None and (new := change(f"{owner_name}.{name}".lstrip("."), child)) is not None:
                owner._modules[name] = new


@torch.inference_mode()
def _looks_up(module: Any) -> bool:
    """Whether a module returns the rows of its weight, times some factor, and does nothing else."""
    if not isinstance(module, nn.Embedding):
        return False
    rows = module.weight[:8]
    found = module(torch.arange(len(rows)))
    return found.shape == rows.shape and torch.allclose(found, rows * (found.norm() / rows.norm()))


def scale_of(embedding: Any) -> float:
    """The factor that an embedding multiplies its weights by, found by trying it with ones."""
    twin = copy.copy(embedding)
    twin._parameters = {"weight": nn.Parameter(torch.ones(1, 1), requires_grad=False)}
    twin.padding_idx = None
    return float(twin(torch.zeros(1, dtype=torch.long))[0, 0])
