"""Gated MLPs by one kernel, against torch's. It runs on a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outpace.models import gated, launching
from outpace.models.fusing import Fusion
from outpace.models.hf import HFModel
from outpace.models.products import Products

from .models import build
from .test_attention import DEVICE
from .test_narrow import CAPABLE, DTYPE, by_descriptors, numbers

on_gpu = pytest.mark.skipif(not CAPABLE, reason="needs an H100 or later")


class MLP(nn.Module):
    """As most architectures have it."""

    def __init__(self, inputs: int = 128, inner: int = 192, act: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(inputs, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, inputs, bias=False)
        self.act_fn = act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return product


class CutOff(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).clamp(max=7), self.up_proj(x).clamp(-7, 7)
        product: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return product


class Scaled(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


class Asking(MLP):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


def block(mlp: nn.Module, dtype: torch.dtype = DTYPE) -> Any:
    """What holds such a module, with its weights joined."""
    torch.manual_seed(0)
    owner = nn.ModuleDict({"mlp": mlp}).to(DEVICE, dtype).requires_grad_(False)
    assert Fusion().fuse(owner) == 1
    return owner


def expected(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(states.double(), weight.double()).chunk(2, -1)
    return F.silu(gate) * up


@by_descriptors
@pytest.mark.parametrize("rows", [1, 2, 11, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (192, 384), (64, 192)])
def test_the_kernel_computes_gates_and_products(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    states, weight = numbers(1, rows, inputs).to(DTYPE), (numbers(2 * outputs, inputs) / 8).to(DTYPE)
    found = gated.launch(states, weight)
    assert found.shape == (1, rows, outputs)
    rounding = 4 * torch.finfo(DTYPE).eps
    torch.testing.assert_close(found.double(), expected(states, weight), rtol=rounding, atol=1e-3)


@by_descriptors
@pytest.mark.parametrize(("rows", "outputs"), [(1, 64), (3, 1024), (2, 1500)])
def test_gates_of_products(rows: int, outputs: int) -> None:
    torch.manual_seed(rows)
    products = numbers(1, rows, 2 * outputs).to(DTYPE)
    gates, rest = products.double().chunk(2, -1)
    torch.testing.assert_close(
        gated.gate(products).double(), F.silu(gates) * rest, rtol=torch.finfo(DTYPE).eps, atol=1e-6
    )
    assert gated.gate(products[:, :0]).shape == (1, 0, outputs)


@by_descriptors
def test_programs_are_large_where_they_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    states, weight = numbers(5, 128).to(DTYPE), (numbers(2 * 384, 128) / 8).to(DTYPE)
    small = gated.launch(states, weight)
    monkeypatch.setattr(gated, "device_of", lambda _: (3, launching.device_of(states.device)[1]))
    torch.testing.assert_close(gated.launch(states, weight), small)


@by_descriptors
def test_a_row_has_the_same_bits_beside_a_few_others() -> None:
    torch.manual_seed(0)
    states, weight = numbers(gated.FEW_ROWS, 256).to(DTYPE), (numbers(256, 256) / 8).to(DTYPE)
    together = gated.launch(states, weight)
    for count in range(1, gated.FEW_ROWS):
        assert torch.equal(gated.launch(states[:count], weight), together[:count])


def test_small_and_old_gpus_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for capability, memory, works in (((9, 0), 232448, True), ((12, 0), 101376, False), ((8, 0), 232448, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        monkeypatch.setattr(launching, "device_of", lambda _, found=memory: (132, found))
        assert launching.fetches_tiles(gpu) == works


@pytest.mark.parametrize(
    ("mlp", "is_one"),
    [
        (MLP(), True),
        (MLP(act=nn.GELU), False),
        (MLP(act=nn.ReLU), False),
        (CutOff(), False),
        (Scaled(), False),
        (Asking(), False),
    ],
)
def test_what_is_computed_is_looked_at(mlp: MLP, is_one: bool) -> None:
    assert gated.is_gated(block(mlp)["mlp"]) == is_one


@on_gpu
@pytest.mark.parametrize("rows", [1, 40, 128, 129, 300])
def test_mlps_are_replaced_and_put_back(rows: int) -> None:
    owner, products = block(MLP()), Products()
    mlp, states = owner["mlp"], numbers(1, rows, 128).to(DTYPE)
    before = mlp(states)
    assert products.replace(owner) == 2  # and what is joined within; down is no whole blocks
    assert isinstance(owner["mlp"], gated.GatedMLP)
    torch.testing.assert_close(owner["mlp"](states), before, rtol=0.05, atol=0.05)
    products.undo()
    assert owner["mlp"] is mlp
    assert torch.equal(mlp(states), before)


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device were for the kernel, which is not run."""
    monkeypatch.setattr(gated, "fetches_tiles", lambda _: True)


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("mlp", [MLP(act=nn.GELU), MLP(inner=96), MLP(inputs=64), CutOff()])
def test_others_are_left_as_they_are(mlp: MLP) -> None:
    assert not gated.fits(block(mlp, torch.bfloat16)["mlp"])


@pytest.mark.usefixtures("_everywhere")
def test_what_is_hooked_or_not_joined_is_left_as_it_is() -> None:
    mlp = block(MLP(), torch.bfloat16)["mlp"]
    assert gated.fits(mlp)
    mlp.register_forward_hook(lambda *_: None)
    assert not gated.fits(mlp)
    assert not gated.fits(MLP().to(DEVICE, torch.bfloat16))


@pytest.mark.usefixtures("_everywhere")
def test_a_second_engine_finds_nothing_more_to_replace() -> None:
    owner, products = block(MLP(), torch.bfloat16), Products()
    count, found = products.replace(owner), owner["mlp"]
    assert isinstance(found, gated.GatedMLP)
    assert products.replace(owner) == count
    assert owner["mlp"] is found
    assert isinstance(found.mlp, MLP)


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize(
    ("name", "options", "early"),
    [
        ("Llama", {}, True),
        ("Gemma2", {}, False),  # gated, but not by SiLU
        ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 128}, False),  # a gated one among others
    ],
)
def test_what_torch_compiles_starts_early_beside_gated_mlps_of_ours(
    name: str, options: dict[str, Any], early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    model = HFModel(build(name, sizes | options, 0, torch.bfloat16), check=False)
    model.fuse()
    model.replace_products()
    assert any(isinstance(module, gated.GatedMLP) for module in model._mirror.modules()) == (name != "Gemma2")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda _, options, **__: asked.append(options))
    model._gates[0].compile()
    assert asked[0].get("triton.enable_pdl", False) == early
