"""Exact mode on a CUDA GPU, kernel by kernel: bits, and costs compared with normal mode. No model is needed.

Each line says `same bits` or where bits differ.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from outpace.models import attention, gated, narrow
from outpace.models.launching import SPARE, device_of, early

CONSOLE = Console(width=170)
DEVICE = "cuda"
# Outputs and inputs: of the 8B shape, then of the widened model.
SHAPE_8B, WIDENED = [(6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096)], [(7680, 4608), (4608, 4608)]
PRODUCTS = [*SHAPE_8B, *WIDENED, (4608, 12288), (49152, 4608)]
GATED = [(28672, 4096), (24576, 4608)]
HEADS = {"8B": (32, 8, 128), "wide": (72, 24, 64)}  # query heads, key heads, size
COUNTS = (2, 7, 8, 16, 17, 24, 32, 33, 48, 64, 65, 96, 100, 127, 128, 129, 200, 256, 384, 512, 1000)
PRICED = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTHS = (256, 1024, 8192)
COLD = 256 << 20  # bytes of weights used in turn, so that none are in the cache


def kernels(arguments: argparse.Namespace) -> None:
    """All kernels, or those that `--only` names: products, gated, attention."""
    checks = {"products": products, "gated": gates, "attention": attentions}
    for name, check in checks.items():
        if not arguments.only or name in arguments.only:
            check()


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def timed(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Microseconds per call, in one graph of all calls; the median of some replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    del kept
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times)


def differing(found: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(found, expected):
        return ""
    rows = (found != expected).flatten(1).any(1)
    return f"{int(rows.sum())} of {len(rows)} rows differ by up to {(found.float() - expected.float()).abs().max():.2g}"


def verdict(faults: dict[Any, str]) -> str:
    wrong = {key: fault for key, fault in faults.items() if fault}
    return f"DIFFERENT BITS: {wrong}" if wrong else "same bits"


def products() -> None:
    """Products of 1 to 1000 rows: the bits of each row, and µs in exact and in normal mode."""
    for dtype in (torch.bfloat16, torch.float16):
        for outputs, inputs in PRODUCTS:
            states, weight = (
                numbers(max(COUNTS), inputs, dtype=dtype),
                numbers(outputs, inputs, dtype=dtype, scale=0.02),
            )
            alone = torch.cat([narrow.launch(states[row : row + 1], weight, None) for row in range(len(states))])
            faults = {count: differing(ours(states[:count], weight), alone[:count]) for count in COUNTS}
            shown = narrow.parts_of(outputs, inputs), narrow.walk_of(outputs, inputs)
            print(f"product {outputs} × {inputs}, {str(dtype)[6:]}, parts {shown}: {verdict(faults)}", flush=True)
            far = (alone[:128].float() - F.linear(states[:128], weight).float()).abs().max()
            print(f"   cuBLAS is up to {far:.2g} away", flush=True)
    table = Table("µs: exact / normal", *map(str, PRICED), title="products, bfloat16")
    for outputs, inputs in PRODUCTS:
        copies = max(2, -(-COLD // (2 * outputs * inputs)))
        weights = [numbers(outputs, inputs, scale=0.02) for _ in range(copies)]
        cells = []
        for count in PRICED:
            states = numbers(count, inputs)
            pair = [
                timed([lambda w=w, f=function, s=states: f(s, w) for w in weights * 4]) for function in (ours, normal)
            ]
            cells.append(f"{pair[0]:.1f} / {pair[1]:.1f} ({pair[0] / pair[1] - 1:+.0%})")
        table.add_row(f"{outputs} × {inputs}", *cells)
        del weights
    CONSOLE.print(table)


def ours(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.outpace.narrow(states, weight, None, True)


def normal(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product before its parts were constant: a few rows in one part, many by cuBLAS."""
    from outpace.models import kernels

    outputs, inputs = weight.shape
    if len(states) > narrow.FEW_ROWS:
        return torch.ops.outpace.narrow(states, weight, None, False)
    tile = 16 if len(states) <= 16 else narrow.FEW_ROWS
    processors, memory = device_of(states.device)
    programs = outputs // narrow.OUTPUTS
    fitting = (memory - SPARE) // ((narrow.OUTPUTS + tile) * narrow.BLOCK * 2)
    product = states.new_empty(len(states), outputs)
    kernels.product[(programs,)](
        *(states, weight, None, product, len(states), inputs, outputs, inputs),
        TILE=tile,
        OUTPUTS=narrow.OUTPUTS,
        BLOCK=narrow.BLOCK,
        PARTED=False,
        num_warps=4,
        num_stages=max(1, min(fitting, narrow.STAGES if programs <= processors else narrow.SHARING_STAGES)),
        **early(states.device),
    )
    return product


def gates() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for outputs, inputs in GATED:
            states, weight = (
                numbers(max(COUNTS), inputs, dtype=dtype),
                numbers(outputs, inputs, dtype=dtype, scale=0.02),
            )
            alone = torch.cat([gated.launch(states[row : row + 1], weight) for row in range(len(states))])
            faults = {count: differing(gated.launch(states[:count], weight), alone[:count]) for count in COUNTS}
            print(f"gated {outputs} × {inputs}, {str(dtype)[6:]}: {verdict(faults)}", flush=True)
    table = Table(
        "µs: exact / normal", *map(str, PRICED), title="gated MLPs, bfloat16 (the same kernel up to 128 rows)"
    )
    for outputs, inputs in GATED:
        weights = [numbers(outputs, inputs, scale=0.02) for _ in range(2)]
        cells = []
        for count in PRICED:
            states = numbers(count, inputs)
            pair = [
                timed([lambda w=w, a=always, s=states: torch.ops.outpace.gated(s, w, a) for w in weights * 4])
                for always in (True, False)
            ]
            cells.append(f"{pair[0]:.1f} / {pair[1]:.1f} ({pair[0] / pair[1] - 1:+.0%})")
        table.add_row(f"{outputs} × {inputs}", *cells)
    CONSOLE.print(table)


class Texts:
    """Keys, values and queries of some sequences, in scattered slots, and the rows of draft trees after them."""

    def __init__(
        self, texts: int, length: int, shape: str, dtype: torch.dtype = torch.bfloat16, scattered: bool = True
    ) -> None:
        torch.manual_seed(texts)
        heads, key_heads, size = HEADS[shape]
        self.size, self.length = size, length + 256
        self.scratch = texts * self.length
        self.keys, self.values = numbers(2, 1, key_heads, self.scratch + 1, size, dtype=dtype).unbind()
        self.query = 2 * numbers(texts, self.length, heads, size, dtype=dtype)
        order = torch.randperm if scattered else torch.arange
        self.slots = order(self.scratch, device=DEVICE).view(texts, self.length)

    def lists(self, pasts: list[int], depths: list[int], exact: bool, reading: bool = False) -> Any:
        """The same tree after each sequence. Row r is at depth depths[r], below the last row one level higher.

        So depths that count up are a chain, and those of `comb_depths` branches of four rows.
        """
        texts, each = len(pasts), len(depths)
        at = torch.tensor([[past + depth for depth in depths] for past in pasts], device=DEVICE)
        sees = torch.eye(each, dtype=torch.bool)
        for row in range(1, each):
            above = [other for other in range(row) if depths[other] == depths[row] - 1]
            if above:
                sees[row] |= sees[above[-1]]
        # Rows at the same depth need different slots: those after the sequence's, in the order of rows.
        own = torch.stack([self.slots[text, past : past + each] for text, past in enumerate(pasts)])
        if reading:
            tree = torch.zeros(texts * each, 2, dtype=torch.long, device=DEVICE)
        elif exact:
            tree = torch.zeros(texts * each, max(2, max(depths) + 1), dtype=torch.long, device=DEVICE)
            for row in range(each):
                path = sees[row].nonzero()[:, 0].to(DEVICE)
                tree[row::each, : len(path)] = own[:, path]
        else:
            among = torch.zeros(texts * each, -(-texts * each // 64) * 64, dtype=torch.bool)
            for text in range(texts):
                mine = slice(text * each, (text + 1) * each)
                among[mine, mine] = sees
            words = torch.from_numpy(_packed(among.numpy())).to(DEVICE)
            tree = F.pad(words, (0, max(0, 2 - words.shape[1])))
        tile = min(16, max(4, each)) if texts > 1 else 0
        tiles = [
            (start, min(start + tile, (text + 1) * each), text * each)
            for text in range(texts)
            for start in range(text * each, (text + 1) * each, tile or each)
        ]
        lengths = [past + each if reading else past for past in pasts]
        return attention.SlotLists(
            text=self.slots,
            length=torch.tensor(lengths, device=DEVICE),
            whose=torch.arange(texts, device=DEVICE).repeat_interleave(each),
            tiles=torch.tensor(tiles, device=DEVICE).T.flatten().contiguous(),
            positions=at.flatten(),
            slots=own.flatten(),
            tree=tree,
            span=max(1024, 1 << (max(lengths) - 1).bit_length()),
            packed=tile,
            exact=exact,
        )

    def attend(self, lists: Any) -> torch.Tensor:
        """[texts, rows, heads, size]"""
        texts = len(lists.length)
        positions = lists.positions.view(texts, -1)
        query = self.query[torch.arange(texts, device=DEVICE)[:, None], positions].flatten(0, 1)
        found = torch.ops.outpace.slot_attention(
            query.transpose(0, 1)[None], self.keys, self.values, *lists, self.size**-0.5, 0.0
        )
        return found.view(texts, -1, *found.shape[2:])


def _packed(mask: Any) -> Any:
    import numpy as np

    return np.packbits(mask, axis=1, bitorder="little").view(np.int64)


def joining(joined: bool) -> AbstractContextManager[Any]:
    """Meanwhile, a program walks a group of splits, or one split."""
    return patch.object(attention, "_joined", lambda *_: joined)


def comb_depths(rows: int) -> list[int]:
    return [0, *(1 + (row - 1) % 4 for row in range(1, rows))]


def attentions() -> None:
    for shape in HEADS:
        for dtype in (torch.bfloat16, torch.float16):
            print(f"attention, {shape}, {str(dtype)[6:]}: {verdict(attention_faults(shape, dtype))}", flush=True)
    for shape in HEADS:
        prices(shape)


def attention_faults(shape: str, dtype: torch.dtype) -> dict[Any, str]:
    """Chains and branches of 1 to 64 sequences, prefilled or drafted, with one or more splits per program: against
    rows computed alone.
    """
    faults: dict[Any, str] = {}
    for texts, each, length in ((1, 16, 300), (1, 33, 1000), (1, 128, 2040), (4, 16, 700), (16, 4, 1020), (64, 2, 250)):
        written = Texts(texts, length, shape, dtype)
        pasts = [length - 7 * (text % 5) for text in range(texts)]
        path = list(range(each))
        alone = []
        for row in path:  # each row alone, with all before it as cached tokens
            with joining(False):
                alone.append(written.attend(written.lists([past + row for past in pasts], [0], True))[:, 0])
        expected = torch.stack(alone, 1)
        chain = path[: attention.OWN]  # no draft reaches further
        for join in (False, True):
            with joining(join):
                kind = (texts, each, length, join)
                found = written.attend(written.lists(pasts, chain, True))
                faults[(*kind, "chain")] = differing(found, expected[:, : len(chain)])
                faults[(*kind, "read")] = differing(written.attend(written.lists(pasts, path, True, True)), expected)
        # Branches of four rows: their keys are those of the chain's first rows, copied to slots of their own.
        depths = comb_depths(each)
        branches = written.lists(pasts, depths, True)
        below = torch.tensor(depths, device=DEVICE)
        for text, past in enumerate(pasts):
            here, there = written.slots[text, past : past + each], written.slots[text, past + below]
            for part in (written.keys, written.values):
                part[:, :, here] = part[:, :, there].clone()
        for join in (False, True):
            with joining(join):
                found = written.attend(branches)
                faults[texts, each, length, join, "branches"] = differing(found, expected[:, depths])
    return faults


def prices(shape: str) -> None:
    """µs of attention in one layer: normal, exact, and exact by what a program walks.

    As in a step, slots are in order, and keys are not in the cache.
    """
    title = f"attention, {shape}, bfloat16"
    table = Table("texts × rows, tokens", "normal", "exact", "", "splits", "groups", title=title)
    for length in LENGTHS:
        for texts, each in ((1, 1), (1, 8), (1, 32), (1, 64), (1, 128), (4, 16), (16, 4), (64, 1), (64, 2)):
            if texts * length > 1 << 17:
                continue
            written = Texts(texts, length, shape, scattered=False)
            layers = max(2, -(-COLD // (4 * written.keys.numel())))
            stored = [(written.keys.clone(), written.values.clone()) for _ in range(layers)] * max(1, 16 // layers)
            pasts = [length - 3 * (text % 7) - 1 for text in range(texts)]
            given = {exact: written.lists(pasts, comb_depths(each), exact) for exact in (False, True)}
            heads = HEADS[shape][0]
            query = numbers(1, heads, texts * each, written.size)

            def called(exact: bool, given: Any = given, query: Any = query, stored: Any = stored) -> float:
                attend, more = torch.ops.outpace.slot_attention, (query.shape[3] ** -0.5, 0.0)
                return timed([lambda k=k, v=v: attend(query, k, v, *given[exact], *more) for k, v in stored])

            times = [called(False), called(True)]
            for join in (False, True):
                with joining(join):
                    times.append(called(True))
            change = f"{times[1] - times[0]:+.1f} µs"
            shown = [f"{value:.1f}" for value in times]
            table.add_row(f"{texts} × {each}, {length}", *shown[:2], change, *shown[2:])
    CONSOLE.print(table)
    print("a layer of a step takes 120 to 150 µs: 3 % are 4 µs")
