"""Products of a few rows by Triton, against torch's. They run on a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 128, False), (192, 384, True)])
def test_the_kernel_computes_the_product(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(rows)
    states, weight = numbers(1, rows, inputs).to(DTYPE), numbers(outputs, inputs).to(DTYPE)
    added = numbers(outputs).to(DTYPE) if bias else None
    found = narrow.launch(states, weight, added)
    expected = F.linear(states.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(DTYPE).eps, atol=1e-3)


@by_descriptors
@pytest.mark.parametrize("rows", [1, 33, 64, 128])
@pytest.mark.parametrize(
    ("each", "splits", "bias"), [(64, 1, False), (64, 1, True), (64, 2, False), (64, 5, True), (128, 3, True)]
)
def test_parts_make_up_the_product(rows: int, each: int, splits: int, bias: bool) -> None:
    torch.manual_seed(rows)
    outputs, inputs = 1152, 896
    states, weight = numbers(1, rows, inputs).to(DTYPE), numbers(outputs, inputs).to(DTYPE)
    added = numbers(outputs).to(DTYPE) if bias else None
    found = narrow.launch_split(states, weight, added, each, splits)
    assert found.shape == (1, rows, outputs)
    expected = F.linear(states.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(DTYPE).eps, atol=1e-3)


@pytest.mark.parametrize(
    ("outputs", "inputs", "expected"),
    [
        (6144, 4096, (64, 1)),  # 96 programs
        (4096, 4096, (64, 2)),  # 128
        (4096, 14336, (64, 2)),
        (4608, 12288, (128, 3)),  # 108; with 64 outputs each 72
        (4608, 4608, (64, 0)),  # few inputs: 72 programs would be busy
        (128256, 4096, (64, 0)),  # many outputs
        (576, 1536, (64, 0)),
    ],
)
def test_programs_share_inputs_as_far_as_that_keeps_a_gpu_busy(
    outputs: int, inputs: int, expected: tuple[int, int]
) -> None:
    assert narrow.shares(outputs, inputs, processors=132) == expected


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
    launch = narrow.launch_split
    monkeypatch.setattr(narrow, "launch_split", lambda *given: made.append(given) or launch(*given))
    torch.testing.assert_close(narrow.NarrowLinear(linear)(states), linear(states), rtol=0.02, atol=0.02)
    assert len(made) == calls
