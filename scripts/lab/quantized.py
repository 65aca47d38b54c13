"""Products with packed weights on a CPU, by format and number of rows, and torch's. No model is needed."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from rich.console import Console
from rich.table import Table
from torch import nn

from outpace.models.packed import FORMATS, NUMBERS, Matrix, PackedLinear

CONSOLE = Console(width=150)
OUTPUTS, INPUTS = 55_296, 1024  # of each matrix: more than caches hold
SCALES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}  # 16-bit numbers that a block starts with, where not one


def packed(arguments: argparse.Namespace) -> None:
    """Milliseconds of a product by rows, all formats in turns; what 8 rows cost beside one, and the speed of 128."""
    torch.set_num_threads(arguments.threads)
    counts = (1, 2, 4, 8, 16, 128)
    layers: dict[str, nn.Module] = {kind.name: layer(kind) for kind in FORMATS}
    numbers = torch.randn(OUTPUTS, INPUTS)
    layers |= {kind.name: PackedLinear(Matrix.over(numbers.to(dtype))) for dtype, kind in NUMBERS.items()}
    layers["F32, by torch"] = plain = nn.Linear(INPUTS, OUTPUTS, bias=False)
    plain.weight = nn.Parameter(numbers, requires_grad=False)
    states = {count: torch.randn(count, INPUTS) for count in counts}
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(arguments.repeats * 7 + 1):
        for name, linear in layers.items():
            for count in counts if turn % 7 == 0 else counts[:-1]:
                start = time.perf_counter()
                linear(states[count])
                if turn:  # the first is slower
                    times.setdefault((name, count), []).append(1000 * (time.perf_counter() - start))
    table = Table("ms", *(f"{count} rows" for count in counts), "8 rows / 1", "GB/s of 1 row", "GFLOPS of 128 rows")
    for name, linear in layers.items():
        found = [statistics.median(times[name, count]) for count in counts]
        held = linear.matrix.cells if isinstance(linear, PackedLinear) else numbers
        rate, speed = held.nbytes / found[0] / 1e6, 2 * counts[-1] * OUTPUTS * INPUTS / found[-1] / 1e6
        ratio = found[counts.index(8)] / found[0]
        table.add_row(name, *(f"{ms:.2f}" for ms in found), f"{ratio:.2f}", f"{rate:.1f}", f"{speed:.0f}")
    CONSOLE.print(f"{arguments.threads} threads, {OUTPUTS:,} outputs, {INPUTS:,} inputs", table)


def layer(kind: GGMLQuantizationType) -> PackedLinear:
    """Random weights: any bits are weights, but scales must be finite."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (OUTPUTS * INPUTS // block, size), np.uint8)
    scales = blocks[:, -2:] if kind.name == "Q6_K" else blocks[:, : 2 * SCALES.get(kind.name, 1)]
    scales[:] = np.full(scales.shape[1] // 2, 0.01, np.float16).view(np.uint8)
    return PackedLinear(Matrix(blocks.reshape(OUTPUTS, -1), kind))
