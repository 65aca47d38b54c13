"""The papers' tables and figures, measured on a model of the user's choice, beside the papers' own numbers.

Each paper is a function of a Lab, and of heads by name if it uses any. It returns Findings: plots, and tables with
claims that are checked against the measurements.
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
    """The file name of a reproduction: paper, model and device."""
    device = decoder.model.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^a-z0-9.]+", "-", f"{paper} {Path(model).name} {where}".lower()).strip("-")
