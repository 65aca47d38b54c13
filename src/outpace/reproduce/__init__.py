"""The papers' tables and figures, measured on a model of the user's choice, beside the papers' own.

A paper is a function that takes a Lab, and heads by name where it has any. It gives Findings: tables, each with claims
that the numbers judge, and plots.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from ..decoder import Decoder
from . import adadecode, amphista, lookahead
from .findings import Findings

PAPERS: dict[str, Callable[..., Findings]] = {
    "lookahead": lookahead.reproduce,
    "adadecode": adadecode.reproduce,
    "amphista": amphista.reproduce,
}


def stem(paper: str, model: str, decoder: Decoder) -> str:
    """What the files of a reproduction are called: by paper, model and device."""
    device = decoder.model.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^a-z0-9.]+", "-", f"{paper} {Path(model).name} {where}".lower()).strip("-")
