"""Argmax over the vocabulary on GPUs, in two kernels instead of torch's nine."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from .. import draft
from .launching import early

PART = 4096  # logits per program


def find_best(logits: torch.Tensor) -> torch.Tensor:
    """`draft.find_best`, with the kernels if possible."""
    exact = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if logits.device.type != "cuda" or not exact or not _has_triton():
        return draft.find_best(logits)
    found: torch.Tensor = torch.ops.outpace.best(logits)
    return found


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@torch.library.custom_op("outpace::best", mutates_args=())
def launch(logits: torch.Tensor) -> torch.Tensor:
    """[2, rows]: the argmax of each row of logits, the first of equals, and that logit.

    NaN counts as the highest.
    """
    from triton import cdiv, next_power_of_2

    from . import kernels

    rows, width = logits.shape
    parts = cdiv(width, PART)
    found = torch.empty(2, rows, dtype=torch.float64, device=logits.device)
    highest = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    kernels.highest[(rows, parts)](logits.contiguous(), highest, width, PART=PART, **early(logits.device))
    whole = next_power_of_2(parts)
    kernels.best[(rows,)](highest, found, rows, parts, PARTS=whole, num_warps=1, **early(logits.device))
    return found


@launch.register_fake
def _(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(2, len(logits), dtype=torch.float64)
