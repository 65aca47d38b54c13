"""Products of a few rows by Triton, against torch's. They run on a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outpace.models
from outpace.models import narrow
from outpace.models.launching import fetches_tiles
from outpace.models.products import Products

from .test_attention import DEVICE, attention

by_kernel = pytest.mark.skipif(DEVICE == "cpu" and not attention.INTERPRET, reason="no GPU, and not interpreted")
CAPABLE = fetches_tiles(torch.device(DEVICE))
by_descriptors = pytest.mark.skipif(not CAPABLE and not attention.INTERPRET, reason="no such GPU, and not interpreted")
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # as exact as the interpreter is


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float64)


@by_kernel
@pytest.mark.parametrize("rows", [1, 2, 11, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 128, False), (192, 384, True), (64, 192, False)])
def test_the_kernel_computes_the_product(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(rows)
    states, weight = numbers(1, rows, inputs).to(DTYPE), numbers(outputs, inputs).to(DTYPE)
    added = numbers(outputs).to(DTYPE) if bias else None
    found = narrow.launch(states, weight, added)
    expected = F.linear(states.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(DTYPE).eps, atol=1e-3)


@by_descriptors
@pytest.mark.parametrize("rows", [1, 33, 128, 150])
@pytest.mark.parametrize(("each", "parts", "bias"), [(64, 1, True), (64, 2, False), (64, 5, True), (128, 3, True)])
def test_parts_make_up_the_product(
    rows: int, each: int, parts: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "parts_of", lambda outputs, inputs: (each, parts))
    torch.manual_seed(rows)
    outputs, inputs = 384, 896
    states, weight = numbers(1, rows, inputs).to(DTYPE), numbers(outputs, inputs).to(DTYPE)
    added = numbers(outputs).to(DTYPE) if bias else None
    found = narrow.launch_tiles(states, weight, added)
    assert found.shape == (1, rows, outputs)
    expected = F.linear(states.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(DTYPE).eps, atol=1e-3)


def numbers_that_tell(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States and weights whose sums tell in which parts they were added up: huge numbers swallow small ones.

    There is one number for each block of inputs, so that it does not matter how a block is added up.
    """
    choices = torch.tensor([2.0**26, -(2.0**26), 2.0**24, 3.0, 1.0, -1.0])
    weight = torch.zeros(outputs, inputs)
    weight[:, :: narrow.BLOCK] = choices[torch.randint(6, (outputs, inputs // narrow.BLOCK))]
    states = torch.randint(1, 3, (rows, inputs)).float()
    return states.to(DEVICE, DTYPE), weight.to(DEVICE, DTYPE)


def added_up(states: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Block by block within each part, then the parts."""
    blocks = [
        (s[:, None].double() * w.double()).sum(-1)
        for s, w in zip(states.split(narrow.BLOCK, 1), weight.split(narrow.BLOCK, 1), strict=True)
    ]
    each, total = -(-len(blocks) // parts), torch.zeros(len(states), len(weight), device=DEVICE)
    for start in range(0, len(blocks), each):
        part = torch.zeros_like(total)
        for block in blocks[start : start + each]:
            part = (part.double() + block).float()
        total += part
    return total.to(DTYPE)


@pytest.mark.skipif(not attention.INTERPRET, reason="not interpreted; a GPU rounds these sums in a way of its own")
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_product_is_split_in_the_same_way_for_every_number_of_rows(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    states, weight = numbers_that_tell(150, 128, 1024)
    monkeypatch.setattr(narrow, "parts_of", lambda outputs, inputs: (64, parts))
    expected = added_up(states, weight, parts)
    assert all(not torch.equal(expected, added_up(states, weight, other)) for other in {1, 2, 3} - {parts})
    for launch, counts in ((narrow.launch, (1, 7, 32)), (narrow.launch_tiles, (1, 33, 64, 128, 150))):
        for count in counts:
            assert torch.equal(launch(states[:count], weight, None), expected[:count]), (launch, count)


class Launched:
    """Stands for a kernel: keeps how it was launched."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **options: self.made.append((grid, given, options))


def test_how_a_product_is_split_does_not_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton: what kernels are told, for 1 to 1,024 rows, of shapes with one part, two, three and seven."""
    kernels = SimpleNamespace(product=Launched(), split_product=Launched(), add_up=Launched())
    triton, descriptor = ModuleType("triton"), ModuleType("tensor_descriptor")
    triton.cdiv = lambda of, by: -(-of // by)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()  # type: ignore[attr-defined]
    descriptor.TensorDescriptor = SimpleNamespace(from_tensor=lambda *_: None)  # type: ignore[attr-defined]
    made = {"triton": triton, "triton.tools": triton, "triton.tools.tensor_descriptor": descriptor}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(outpace.models, "kernels", kernels, raising=False)
    monkeypatch.setitem(sys.modules, "outpace.models.kernels", kernels)
    shapes = [(6144, 4096), (4096, 4096), (4096, 14336), (4608, 12288), (4608, 4608), (1024, 16384), (576, 1536)]
    for outputs, inputs in shapes:
        weight, splits = torch.empty(outputs, inputs, device="meta"), set[tuple[int, int]]()
        for count in (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024):
            states = torch.empty(count, inputs, device="meta")
            for launch in (narrow.launch, narrow.launch_tiles)[count > narrow.FEW_ROWS :]:
                launch(states, weight, None)
        for _, given, options in kernels.product.made:
            splits.add((given[7], inputs // given[7] if options["PARTED"] else 1))
        for grid, given, options in kernels.split_product.made:
            splits.add((given[8], grid[2] * options["PARTS"]))
        assert len(kernels.product.made) == 6
        assert len(kernels.split_product.made) == 14
        assert len(splits) == 1, (outputs, inputs)
        for kernel in (kernels.product, kernels.split_product):
            kernel.made.clear()


@pytest.mark.skipif(not CAPABLE, reason="needs an H100 or later")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4608, 12288), (6144, 4096), (4608, 4608), (960, 576)])
def test_a_row_has_the_same_bits_beside_any_number_of_rows(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = narrow.NarrowLinear(nn.Linear(inputs, outputs).to(DEVICE, dtype), always=True)
    states = numbers(600, inputs).to(dtype)
    expected = torch.cat([linear(states[row : row + 1]) for row in range(600)])
    for count in (2, 8, 16, 17, 32, 33, 48, 64, 65, 100, 128, 129, 256, 300, 512, 600):
        assert torch.equal(linear(states[:count]), expected[:count]), count


@pytest.mark.parametrize(
    ("outputs", "inputs", "expected"),
    [
        (6144, 4096, (64, 1)),  # 96 programs
        (4096, 4096, (64, 2)),  # 128
        (4096, 14336, (64, 2)),
        (4608, 12288, (128, 3)),  # 108; with 64 outputs each 72
        (4608, 4608, (128, 3)),
        (128256, 4096, (64, 0)),  # many outputs
        (576, 1536, (64, 0)),
    ],
)
def test_programs_share_inputs_as_far_as_that_keeps_a_gpu_busy(
    outputs: int, inputs: int, expected: tuple[int, int]
) -> None:
    assert narrow.parts_of(outputs, inputs, processors=132) == expected


@by_kernel
@pytest.mark.parametrize("tile", [16, 32])
def test_a_row_has_the_same_bits_beside_others(tile: int) -> None:
    torch.manual_seed(0)
    states, weight = numbers(tile, 256).to(DTYPE), numbers(128, 256).to(DTYPE)
    together = narrow.launch(states, weight, None)
    for count in range(tile // 2 + 1, tile):
        assert torch.equal(narrow.launch(states[:count], weight, None), together[:count])


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_maps_are_replaced_and_put_back() -> None:
    torch.manual_seed(0)
    maps = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 96), nn.Linear(96, 128)).to(DEVICE, DTYPE)
    states = numbers(3, 128).to(DTYPE)
    expected, before = maps(states), list(maps)
    products = Products()
    assert products.replace(maps) == 1  # the others are no whole blocks
    torch.testing.assert_close(maps(states), expected)
    assert torch.equal(maps(states.expand(20, 3, 128))[7], maps(states.expand(20, 3, 128))[0])  # too many: cuBLAS
    products.undo()
    assert list(maps) == before


@pytest.mark.skipif(not CAPABLE, reason="needs an H100 or later")
@pytest.mark.parametrize(("rows", "calls"), [(32, 0), (33, 1), (100, 1), (128, 1), (129, 0)])
def test_maps_of_more_rows_are_computed_in_parts(rows: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4096, 4096).to(DEVICE, DTYPE)
    states = numbers(1, rows, 4096).to(DTYPE)
    made = []
    launch = narrow.launch_tiles
    monkeypatch.setattr(narrow, "launch_tiles", lambda *given: made.append(given) or launch(*given))
    torch.testing.assert_close(narrow.NarrowLinear(linear)(states), linear(states), rtol=0.02, atol=0.02)
    assert len(made) == calls
