"""Products of draft heads with int8 weights, by Triton: on a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outpace.heads.blocks import BlockShape, FeedForward
from outpace.models import gated, int8, narrow
from outpace.models.fusing import Fusion
from outpace.models.products import Products
from outpace.sources.heads import quick_head

from .test_attention import DEVICE
from .test_narrow import DTYPE, by_kernel, numbers

SHAPE = BlockShape(width=2048, heads=2, key_heads=1, head_size=64, inner=2304)


@pytest.fixture
def _recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with tensor descriptors."""
    monkeypatch.setattr(int8, "is_recent", lambda _: True)
    monkeypatch.setattr(gated, "fetches_tiles", lambda _: True)


def split(values: torch.Tensor) -> torch.Tensor:
    """Values as two int8 parts represent them, row by row."""
    size = values.abs().amax(-1, keepdim=True) / int8.LEVELS
    return ((values / size) * 2 * int8.LEVELS).round() / (2 * int8.LEVELS) * size


@by_kernel
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "bias"), [(1, 64, 256, False), (8, 192, 768, True), (17, 128, 512, False)]
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_the_kernels_compute_the_product(rows: int, outputs: int, inputs: int, bias: bool, is_gated: bool) -> None:
    torch.manual_seed(rows)
    given = numbers(1, rows, inputs * (2 if is_gated else 1)).to(DTYPE)
    given[..., 3] *= 40  # an outlier
    weight, added = numbers(outputs, inputs).to(DTYPE), numbers(outputs).to(DTYPE) if bias else None
    weights, scales = int8.rounded(weight)
    states = F.silu(given[..., :inputs].double()) * given[..., inputs:].double() if is_gated else given.double()
    found = int8.launch(given, weights, scales, added, is_gated)
    assert found.shape == (1, rows, outputs)
    expected = split(states) @ (weights * scales[:, None].double()).T + (0 if added is None else added.double())
    size = states.norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)  # of sums of products that all count
    eps = torch.finfo(DTYPE).eps
    torch.testing.assert_close(found / size, expected / size, rtol=2 * eps, atol=2e-6, check_dtype=False)
    exact = F.linear(states, weight.double(), None if added is None else added.double())
    assert (found - exact).norm() / exact.norm() < 0.015


def test_weights_are_rounded_to_the_nearest_of_255_numbers() -> None:
    weight = torch.randn(5000, 64)  # more outputs than are converted at a time
    weight[7] = 0
    found, scales = int8.rounded(weight)
    assert found.dtype == torch.int8
    assert found.abs().amax() == 127
    assert torch.equal(found[7], torch.zeros(64, dtype=torch.int8))
    assert ((found * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()


def test_many_rows_are_computed_with_the_weights_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(256, 64)
    ours = int8.Int8Linear(linear)
    launched = []
    monkeypatch.setattr(int8, "launch", lambda states, *_: launched.append(len(states)) or states.new_ones(1))
    many = torch.randn(narrow.FEW_ROWS + 1, 256)
    torch.testing.assert_close(ours(many), linear(many))
    ours(many[: narrow.FEW_ROWS])
    assert launched == [narrow.FEW_ROWS]


@pytest.mark.usefixtures("_recent")
def test_what_is_replaced() -> None:
    mlp = FeedForward(SHAPE).to(DEVICE, torch.bfloat16)
    small = FeedForward(BlockShape(512, 2, 1, 64, 768)).to(DEVICE, torch.bfloat16)
    head = nn.Linear(2048, 640, bias=False, device=DEVICE, dtype=torch.bfloat16)
    heads = nn.ModuleDict({"mlp": mlp, "small": small, "map": head})
    Fusion().fuse(heads)
    Products().replace(heads, drafts=True)
    assert isinstance(heads["mlp"], int8.Int8MLP)
    assert isinstance(mlp.gate_proj.joined.whole, int8.Int8Linear)
    assert isinstance(mlp.down_proj, int8.Int8Linear)
    assert isinstance(heads["map"], int8.Int8Linear)
    assert isinstance(heads["small"], gated.GatedMLP)
    assert not any(isinstance(module, int8.Int8Linear) for module in small.modules())


@pytest.mark.usefixtures("_recent")
def test_the_output_head_for_drafts_is_made_once_and_shares_its_weights() -> None:
    head = nn.Linear(2048, 128, bias=False, device=DEVICE, dtype=torch.bfloat16)
    found = quick_head(head)
    assert isinstance(found, int8.Int8Linear)
    assert found.weight is head.weight
    assert quick_head(head) is found
    tiny = nn.Linear(64, 128, device=DEVICE, dtype=torch.bfloat16)
    assert quick_head(tiny) is tiny


@pytest.mark.usefixtures("_recent")
@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.float(),
        lambda linear: nn.Linear(2047, 64),
        lambda linear: nn.Linear(2048, 65),
        lambda linear: nn.Linear(1024, 64),
        lambda linear: SimpleNamespace(weight=linear.weight),
        lambda linear: linear.register_forward_hook(print) and linear,
    ],
)
def test_what_is_not_supported(change: object) -> None:
    linear = nn.Linear(2048, 64, dtype=torch.bfloat16)
    assert int8.fits(linear)
    assert not int8.fits(change(linear))  # type: ignore[operator]


@by_kernel
@pytest.mark.usefixtures("_recent")
def test_an_mlp_computes_nearly_the_same() -> None:
    torch.manual_seed(0)
    mlp = FeedForward(SHAPE).to(DEVICE, torch.bfloat16)
    states = torch.randn(4, 2048, device=DEVICE, dtype=torch.bfloat16)
    expected = mlp(states)
    heads = nn.ModuleDict({"mlp": mlp})
    Fusion().fuse(heads)
    Products().replace(heads, drafts=True)
    assert isinstance(heads["mlp"], int8.Int8MLP)
    found = heads["mlp"](states)
    assert (found - expected).float().norm() / expected.float().norm() < 0.02
