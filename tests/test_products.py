"""Products of a few rows: right, and a row has the same bits whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from outpace import Autoregressive, Decoder
from outpace.errors import InputError
from outpace.models import products
from outpace.models.hf import HFModel

from .models import tiny
from .test_runtime import METHODS, PROMPT

FEW = 32


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    products.load()


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def product(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = torch.ops.outpace.linear(rows, weights, bias)
    return result


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 48), st.integers(1, 90), st.integers(1, 90), st.booleans(), st.integers(0, 9))
def test_it_is_the_product(rows: int, inputs: int, outputs: int, biased: bool, seed: int) -> None:
    x, w = draw(rows, inputs, seed=seed), draw(outputs, inputs, seed=seed + 100)
    b = draw(outputs, seed=seed + 200) if biased else None
    expected = F.linear(x.double(), w.double(), None if b is None else b.double())
    torch.testing.assert_close(product(x, w, b).double(), expected, rtol=1e-5, atol=3e-5)


def test_rows_of_another_size_are_an_error() -> None:
    """Not memory beyond the output."""
    with pytest.raises(RuntimeError, match="different sizes"):
        product(draw(8, 128), draw(32, 64))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (61, 1001), (7, 5), (64, 4)])
def test_a_row_has_the_same_bits_beside_any_rows(inputs: int, outputs: int) -> None:
    x, w, b = draw(FEW, inputs), draw(outputs, inputs, seed=1), draw(outputs, seed=2)
    alone = torch.cat([product(row[None], w, b) for row in x])
    for count in range(1, FEW + 1):
        for first in range(FEW - count + 1):
            assert torch.equal(product(x[first : first + count], w, b), alone[first : first + count])


@given(st.integers(1, 80), st.integers(1, 9), st.integers(2, 9))
def test_a_row_has_the_same_bits_at_any_length(inputs: int, outputs: int, rows: int) -> None:
    x, w = draw(rows, inputs), draw(outputs, inputs, seed=1)
    assert torch.equal(product(x, w), torch.cat([product(row[None], w) for row in x]))


def test_threads_do_not_change_bits() -> None:
    x, w = draw(8, 576), draw(3073, 576, seed=1)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(product(x, w))
    torch.set_num_threads(1)
    assert torch.equal(*found)


def test_any_layout_of_rows() -> None:
    x, w = draw(2, 6, 40), draw(9, 20, seed=1)
    for rows in (x[..., ::2], x[..., 20:], x[0, :, :20], x[0, 0, :20], x[:, :0, :20], x.transpose(0, 1)[..., :20]):
        torch.testing.assert_close(product(rows, w), F.linear(rows, w))
        assert torch.equal(product(rows, w), product(rows.contiguous(), w))


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma3Text"])
def test_the_text_is_the_same(name: str) -> None:
    model = tiny(name)
    expected = Decoder(model).generate(PROMPT, method=Autoregressive(), max_new_tokens=16).token_ids
    decoder = Decoder(model)
    adapted: Any = decoder.model
    linears = sum(type(module) is torch.nn.Linear for module in model.modules())
    saved = adapted.fuse()
    assert adapted.replace_products() == linears - saved
    assert adapted.replace_products() == linears - saved  # nothing is left to replace
    assert model.lm_head.weight is adapted._mirror.lm_head.weight
    for method in (Autoregressive(), *METHODS):
        assert decoder.generate(PROMPT, method=method, max_new_tokens=16).token_ids == expected
    assert all(type(module) is not products._Product for module in model.modules())
    adapted.unfuse()
    assert all(type(module) is not products._Product for module in adapted._mirror.modules())


def test_at_rest_the_modules_are_those_that_were_there() -> None:
    model = HFModel(tiny("Llama"))
    model.fuse()
    before = dict(model._mirror.named_modules())
    model.replace_products()
    replaced = dict(model._mirror.named_modules())
    assert replaced != before
    with model._products.at_rest():
        assert dict(model._mirror.named_modules()) == before
    assert dict(model._mirror.named_modules()) == replaced


def test_it_compiles_whole_and_for_any_rows() -> None:
    import torch._dynamo

    layer = products._Product(torch.nn.Linear(20, 12).requires_grad_(False))
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for rows in (3, 5, 33, 40):
        x = draw(1, rows, 20)
        assert torch.equal(compiled(x), layer(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_other_types_are_left_to_torch() -> None:
    assert HFModel(tiny("Llama", dtype=torch.float64)).replace_products() == 0


def test_it_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(*command: str) -> str:
        calls.append(command)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_text("built")
        return ""

    monkeypatch.setattr(products, "_run", run)
    paths = {products.build(tmp_path / "new") for _ in range(2)}
    assert [path.read_text() for path in paths] == ["built"]
    assert sum("-o" in command for command in calls) == 1
    assert list((tmp_path / "new").iterdir()) == list(paths)  # nothing half done is left


def test_without_a_compiler_the_error_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no no-compiler.*Install a C\+\+ compiler.*runtime='plain'"):
        products.build(tmp_path, compilers=["no-compiler"])


def test_a_broken_compiler_is_named_with_what_it_says(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'fatal error: no headers' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(InputError, match=r"broken failed with status 3 \(fatal error: no headers\).*runtime='plain'"):
        products.build(tmp_path, compilers=[str(broken)])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file cannot be written.*runtime='plain'"):
        products.build(tmp_path / "file")
