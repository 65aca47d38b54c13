"""The search for the best token by Triton, against torch's. On a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from outpace.draft import best_tokens, unpack_best
from outpace.models import best

from .test_attention import DEVICE, attention

pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not attention.INTERPRET, reason="no GPU, and not interpreted")


def check(logits: torch.Tensor) -> None:
    tokens, highest = unpack_best(best.launch(logits.to(DEVICE)))
    expected = best_tokens(logits)
    assert tokens == expected[0]
    torch.testing.assert_close(highest, expected[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [1, 7, 4096, 4097, 49152])
@pytest.mark.parametrize("rows", [1, 9])
def test_it_finds_what_torch_finds(rows: int, width: int) -> None:
    torch.manual_seed(width)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    logits = torch.randn(rows, width).to(dtype)
    check(logits)
    check(logits.round())  # ties, some of them between the two zeros


def test_it_takes_the_first_of_equals_and_knows_odd_numbers() -> None:
    inf, nan = math.inf, math.nan
    check(torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [-inf, -inf, -inf], [-1.0, inf, inf], [1.0, nan, inf]]))
    check(torch.tensor([[-5.0, -3.5, -3.5], [nan, -nan, 0.0], [-1e-40, -1e-42, -2.0], [3e38, inf, -inf]]))
    late = torch.full((2, 9000), -7.5)
    late[0, 8999] = late[1, [4095, 4096, 8191, 8192]] = -1.25
    check(late)
