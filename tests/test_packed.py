"""Packed weights: the products are right, and every method writes what plain decoding writes, bit for bit."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from platform import machine
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from torch import nn
from transformers import AutoModelForCausalLM

import outpace
from outpace import Decoder, Sampling
from outpace.errors import InputError, ModelError, OutpaceWarning, UnsupportedModel
from outpace.models import bundled, packed, packing, products
from outpace.models.adapter import Ends
from outpace.models.gguf import File
from outpace.models.loading import load
from outpace.models.packed import FLAGS, FORMATS, Matrix, PackedEmbedding, PackedLinear, library

from .ggufs import random_rows, write
from .models import mostly_slow, tiny

ARCHITECTURES = sorted(packing.ARCHITECTURES)
OURS = ("packed", "numbers")  # products in C++
PROMPT = [5, 9, 5, 9, 31, 5, 9, 5]


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows as the products see them: 8 bits a number, a scale for each 32."""
    blocks = rows.view(len(rows), -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(most > 0, 127 / most, most)).round()
    return (codes.double() * (most / 127).double()).view(rows.shape)


def draw(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("outputs", [16, 37])
def test_products_are_those_of_the_unpacked_weights(kind: Kind, outputs: int) -> None:
    raw = random_rows(kind, outputs, 512)
    expected = torch.from_numpy(np.array(quants.dequantize(raw, kind)))
    matrix = Matrix(raw, kind)
    torch.testing.assert_close(matrix.numbers, expected, rtol=1e-6, atol=1e-7)
    rows = draw(11, 512)
    rows[3] = 0
    bias = draw(1, outputs, 7)[0]
    found = PackedLinear(matrix, bias)(rows)
    product = rounded(rows) @ expected.double().T + bias
    torch.testing.assert_close(found.double(), product, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_beside_any_rows(kind: Kind) -> None:
    linear = PackedLinear(Matrix(random_rows(kind, 100, 768), kind))
    rows = draw(37, 768)
    whole = linear(rows)
    for count in (1, 2, 3, 5, 8, 9):
        assert torch.equal(linear(rows[4 : 4 + count]), whole[4 : 4 + count])


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [("-DPORTABLE", "-O1"), ("-mno-avx512f" if machine() == "x86_64" else "-march=armv8-a",)],
    ids=["portable", "old"],
)
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_other_instruction_sets_compute_the_same(
    kind: Kind, extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, raw = draw(9, 512), random_rows(kind, 48, 512)
    here = PackedLinear(Matrix(raw, kind))(rows)
    there = library((*FLAGS, *extra))
    monkeypatch.setattr("outpace.models.packed.library", lambda: there)
    assert torch.equal(PackedLinear(Matrix(raw, kind))(rows), here)


@pytest.mark.slow
def test_arm_computes_the_same_with_and_without_dot_products_and_i8mm(tmp_path: Path) -> None:
    qemu = shutil.which("qemu-aarch64")
    compiler = products.compiler() if machine() == "aarch64" else shutil.which("aarch64-linux-gnu-g++")
    if not qemu or not compiler:
        pytest.skip("there is no qemu-aarch64, or no compiler for it")
    sources = [str(Path(__file__).with_name("formats.cpp")), *(str(packed.HERE / f"{name}.cpp") for name in OURS)]
    found = {}
    for number, kind in enumerate(
        [("-DPORTABLE",), ("-march=armv8-a",), ("-march=armv8.2-a+dotprod",), ("-march=armv8.2-a+dotprod+i8mm",)]
    ):
        program = tmp_path / str(number)
        flags = ("-O1", "-std=c++20", "-ffp-contract=off", "-static", "-pthread", f"-I{packed.HERE}", *kind)
        built = subprocess.run([compiler, *flags, *sources, "-o", program], capture_output=True, text=True, check=False)
        if built.returncode:
            pytest.skip(f"{compiler} does not build for {kind[0]}: {built.stderr[:500]}")
        found[kind] = subprocess.run([qemu, "-cpu", "max", program], capture_output=True, check=True).stdout
    numbers = np.frombuffer(found["-DPORTABLE",], np.float32)
    assert np.isfinite(numbers).all()
    assert (numbers != 0).mean() > 0.9
    for kind, bits in found.items():
        assert bits == found["-DPORTABLE",], kind


def test_nan_stays_nan() -> None:
    rows = draw(2, 64)
    rows[0, 40] = float("nan")
    found = PackedLinear(Matrix(random_rows(Kind.Q4_0, 16, 64), Kind.Q4_0))(rows)
    assert found[0].isnan().all()
    assert not found[1].isnan().any()


def test_rows_beyond_a_matrix_are_an_error() -> None:
    with pytest.raises(IndexError):
        PackedEmbedding(Matrix(random_rows(Kind.Q8_0, 16, 64), Kind.Q8_0))(torch.tensor([16]))


def test_rows_of_another_size_are_an_error() -> None:
    """Not memory beyond the output."""
    with pytest.raises(RuntimeError, match="64 inputs was given 128"):
        PackedLinear(Matrix.of(draw(32, 64), packed.Q8))(draw(8, 128))


def test_row_indices_are_integers() -> None:
    embedding = PackedEmbedding(Matrix(random_rows(Kind.Q8_0, 16, 64), Kind.Q8_0))
    with pytest.raises(TypeError, match="must be integers"):
        embedding(torch.tensor([0.25, -0.5]))  # as numbers both would be row 0, as addresses nowhere
    assert torch.equal(embedding(torch.tensor([3, 9], dtype=torch.int32)), embedding(torch.tensor([3, 9])))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    return {
        name: write(
            folder / f"{name}.gguf", name, Kind.Q5_0 if name.startswith("gemma") else Kind.Q4_1, name != "qwen2"
        )
        for name in ARCHITECTURES
    }


def read(path: Path) -> tuple[Any, Any]:
    """The packed model, and the one that transformers makes of the file."""
    theirs = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, **bundled.dequantize_option()
    ).eval()
    folder = path.with_suffix("")
    config = theirs.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.tie_word_embeddings = "output.weight" not in File(path).tensors
    config.save_pretrained(folder)
    return packing.read_packed(File(path), folder), theirs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_is_unpacked_to_what_transformers_reads(
    files: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, theirs = read(files[name])
    folder = files[name].with_suffix("")
    theirs.generation_config.save_pretrained(folder)
    monkeypatch.setattr(packing, "_write_folder", lambda file, folder: None)  # these files have no tokenizer
    packing.unpack(File(files[name]), folder)
    ours, expected = AutoModelForCausalLM.from_pretrained(folder).state_dict(), theirs.state_dict()
    assert ours.keys() == expected.keys()
    assert [key for key in ours if not torch.equal(ours[key], expected[key])] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_that_transformers_reads(files: dict[str, Path], name: str) -> None:
    mine, theirs = read(files[name])
    for place, module in theirs.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            found = mine.get_submodule(place)
            torch.testing.assert_close(found.weight, module.weight.data, rtol=1e-5, atol=1e-6)
            if getattr(module, "bias", None) is not None:
                torch.testing.assert_close(found.bias, module.bias.data)
    packed = {id(module) for module in mine.modules() if isinstance(module, PackedLinear | PackedEmbedding)}
    assert packed
    assert all(not weight.is_meta for weight in mine.parameters())
    for place, weight in mine.named_parameters():
        if weight.numel():
            torch.testing.assert_close(weight.data, theirs.get_parameter(place).data)
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        embedded = theirs.get_input_embeddings()(tokens)
        torch.testing.assert_close(mine.get_input_embeddings()(tokens), embedded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "threads"), [*((name, 2) for name in ARCHITECTURES), pytest.param("llama", 1, marks=pytest.mark.slow)]
)
def test_layers_are_computed_in_one_call_and_every_method_writes_the_same(
    files: dict[str, Path], name: str, threads: int
) -> None:
    model, _ = read(files[name])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder = Decoder(model, method="autoregressive")
        assert decoder.engine.exact
        assert decoder.engine.name == "packed"
        assert decoder.model._stack is not None  # type: ignore[attr-defined]
        _check_methods(decoder)
    finally:
        torch.set_num_threads(before)


def _check_methods(decoder: Decoder) -> None:
    for sampling in (None, Sampling(temperature=0.9, seed=3)):
        options: dict[str, Any] = {"max_new_tokens": 12, "sampling": sampling, "raw": True}
        plain = decoder.generate(PROMPT, **options)
        for method in ("prompt-lookup", "lookahead", "jacobi", "auto"):
            assert decoder.generate(PROMPT, method=method, **options).token_ids == plain.token_ids
        prompts = [PROMPT, PROMPT[::-1], PROMPT[2:]]
        alone = [decoder.generate(prompt, **options).token_ids for prompt in prompts]
        together = decoder.generate(prompts, method=["auto", "lookahead", "autoregressive"], **options)
        assert [result.token_ids for result in together] == alone


@pytest.mark.parametrize("kind", mostly_slow(["q8", "q4"], quick=["q4"]))
@pytest.mark.parametrize("name", mostly_slow(["Llama", "Granite", "GPT2"]))
def test_other_models_are_rounded(kind: str, name: str, tmp_path: Path) -> None:
    decoder = outpace.load(saved(name, tmp_path), method="autoregressive", weights=kind)
    assert decoder.model._stack is None or name == "Llama"  # type: ignore[attr-defined]
    assert decoder.engine.exact
    _check_methods(decoder)


def test_a_model_that_exact_mode_does_not_know_is_rounded_all_the_same(tmp_path: Path) -> None:
    decoder = outpace.load(saved("Mixtral", tmp_path), method="autoregressive", weights="q8")
    assert not decoder.engine.exact  # its experts are computed together
    assert decoder.generate(PROMPT, max_new_tokens=4).new_tokens == 4
    with pytest.raises(UnsupportedModel, match="Use exact=False"):
        outpace.load(tmp_path, weights="q8", exact=True)


class NormedEmbedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(super().forward(tokens), (self.embedding_dim,))


def test_an_embedding_that_does_more_than_look_up_is_left_alone() -> None:
    model = copy.deepcopy(tiny("Llama"))
    normed = NormedEmbedding(*model.model.embed_tokens.weight.shape, _weight=model.model.embed_tokens.weight)
    model.set_input_embeddings(normed)
    packing.round_weights(model, "q8")
    assert model.get_input_embeddings() is normed


def saved(name: str, folder: Path) -> Path:
    tiny(name).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


TOKENIZER = json.dumps(
    {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
)


def test_numbers_keep_eight_bits() -> None:
    model = packing.round_weights(AutoModelForCausalLM.from_config(tiny("Llama").config), "q8")
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    rows = draw(64, 64)
    assert (Matrix.of(rows, Kind.Q8_0).numbers - rows).abs().max() < rows.abs().max() / 127
    assert (Matrix.of(rows, Kind.Q4_1).numbers - rows).abs().max() < 2 * rows.abs().max() / 15


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    _, theirs = read(path)
    theirs.config.num_hidden_layers = 4
    theirs.config.save_pretrained(tmp_path / "four")
    with pytest.raises(ModelError, match=r"no tensor for model\.layers\.3"):
        packing.read_packed(File(path), tmp_path / "four")
    theirs.config.num_hidden_layers, theirs.config.intermediate_size = 3, 160
    theirs.config.save_pretrained(tmp_path / "wide")
    with pytest.raises(ModelError, match="has the shape"):
        packing.read_packed(File(path), tmp_path / "wide")


def test_matrices_of_other_types_are_rounded_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", kind=Kind.IQ4_NL)
    with pytest.warns(OutpaceWarning, match="IQ4_NL are quantized to Q8_0"):
        model, _ = read(path)
    assert model.model.layers[0].mlp.up_proj.matrix.kind == Kind.Q8_0


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_unquantized_matrices_of_a_file_stay_as_they_are(kind: Kind, tmp_path: Path) -> None:
    model, theirs = read(write(tmp_path / "tiny.gguf", kind=kind))
    for place, module in model.named_modules():
        if isinstance(module, PackedLinear | PackedEmbedding):
            assert module.matrix.kind == kind
            assert torch.equal(module.weight, theirs.get_submodule(place).weight)
    decoder = Decoder(model, method="autoregressive")
    assert decoder.engine.name == "native"
    _check_methods(decoder)


@pytest.mark.parametrize(("kind", "head"), [(Kind.Q4_1, Kind.F16), (Kind.F16, Kind.Q8_0)])
def test_quantized_and_unquantized_matrices_go_together(kind: Kind, head: Kind, tmp_path: Path) -> None:
    model, _ = read(write(tmp_path / "tiny.gguf", kind=kind, tied=False, mixed=head))
    assert model.lm_head.matrix.kind == head
    decoder = Decoder(model, method="autoregressive")
    assert decoder.engine.name == "packed"
    assert decoder.model._stack is not None  # type: ignore[attr-defined]
    _check_methods(decoder)


def test_what_cannot_be_asked_for(tmp_path: Path, files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="q5"):
        load("smollm2-135m", weights="q5")
    with pytest.raises(InputError, match="is not a GGUF file"):
        load(str(tmp_path), weights="packed")
    with pytest.raises(InputError, match="are for CPUs in float32"):
        load(str(files["llama"]), dtype="bfloat16", weights="packed")
    with pytest.raises(InputError, match="loaded by name"):
        outpace.load(tiny("Llama"), weights="q8")
    model, _ = read(files["llama"])
    with pytest.raises(InputError, match="need runtime='auto'"):
        Decoder(model, runtime="compiled")


def test_threads_that_are_late_do_no_part_twice_and_leave_none(tmp_path: Path) -> None:
    """A late thread once took a share of the next work by the counter of the one before; a step hung or crashed."""
    program, headers = tmp_path / "late", Path(packed.__file__).parent
    source = Path(__file__).with_name("late.cpp")
    command = [
        str(products.compiler()),
        "-std=c++20",
        "-O2",
        "-pthread",
        f"-I{headers}",
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


def test_some_rows_of_a_head_are_read_without_unpacking_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    head = PackedLinear(Matrix.of(draw(50, 64), packed.Q8))
    tokens = torch.tensor([[3, 7], [49, 0]])
    expected = head.weight[tokens]
    monkeypatch.setattr(Matrix, "numbers", property(lambda _: pytest.fail("the whole matrix was unpacked")))
    assert torch.equal(Ends(None, None, head).rows(tokens), expected)
    plain = torch.nn.Linear(64, 50)
    assert torch.equal(Ends(None, None, plain).rows(tokens), plain.weight[tokens])
