"""CUDA graphs timed on the GPU: the cost of a step by rows and context, in exact mode and not, and its parts."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from outpace import Method, Sampling
from outpace.draft import chain
from outpace.models import attention
from outpace.models.attention import SlotLists, attend_by_mask
from outpace.models.hf import HFModel
from outpace.models.loading import load
from outpace.runtime.calibrate import _comb, _step, measure
from outpace.runtime.choose import engine_for
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.plain import Engine, alone
from outpace.runtime.program import Program
from outpace.sources.heads import quick, quick_head

from .models import Setup, llama_8b, load_small, widen

CONSOLE = Console(width=150)
READING = 4.48e12  # bytes per second that an H200 reads
ROWS = (1, 8, 32, 64, 128)


def median_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """Milliseconds by the GPU's clock."""
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def graph_of(engine: GraphEngine, rows: int, length: int) -> Any:
    """The captured forward pass for this many rows."""
    return engine._graph(next(size for size in engine.sizes if size >= rows), length)._graph


def launched(engine: Engine, rows: int, length: int, repeats: int = 20) -> float:
    """Milliseconds of a forward pass by the host's clock, as in calibration. The graph's buffers keep these rows."""
    with engine.turns, engine.pool.sequence([token % 1000 for token in range(length + 1)]) as text:
        times = [_step(engine, text, _comb(text.tokens[-1], rows)) for _ in range(repeats + 2)]
    return 1000 * statistics.median(times[2:])


def shape(arguments: argparse.Namespace) -> None:
    """A forward pass of the shape of Llama-3.1-8B by rows and context, its kernels, and the time to the first token."""
    model = llama_8b()
    start = time.perf_counter()
    adapted = HFModel(model)
    adapted.fuse()
    adapted.replace_products()
    engine = GraphEngine(adapted, capacity=16384)
    with engine.pool.sequence(list(range(100))) as sequence:
        assert engine.score(sequence, chain(99, (), "")).best
    print(f"first token {time.perf_counter() - start:.1f} s after load, compilation and capture included")
    table = Table("rows", "context", "graph ms", "rows / 1 row", "context / 1024", "with host ms", title="8B, bfloat16")
    cost: dict[tuple[int, int], float] = {}
    for length, rows in itertools.product((1024, 8192), ROWS):
        wall = launched(engine, rows, length)
        cost[rows, length] = graph = median_ms(graph_of(engine, rows, length).replay)
        ratios = graph / cost[1, length], graph / cost[rows, 1024]
        table.add_row(str(rows), str(length), *(f"{value:.2f}" for value in (graph, *ratios, wall)))
    for rows in (1, 32, 128):
        profile(f"{rows} rows", graph_of(engine, rows, 1024).replay)
    CONSOLE.print(table)


class Dense:
    """Attention with a dense mask over the whole pool, instead of `attention._launch`; for one sequence.

    The mask is made once per forward pass. `fused`: by torch's kernel that takes a mask; otherwise by two products.
    """

    def __init__(self, layers: int, fused: bool) -> None:
        self._layers = layers
        self._fused = fused
        self._calls = 0

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lists: SlotLists,
        scaling: float,
        softcap: float,
    ) -> torch.Tensor:
        if self._calls % self._layers == 0:
            self._mask = mask_of(lists, keys.shape[2])
        self._calls += 1
        if self._fused:
            mixed = attend_by_mask(query, keys, values, self._mask, scaling)
        else:
            groups = query.shape[1] // keys.shape[1]
            scores = query @ keys.repeat_interleave(groups, 1).transpose(2, 3) * scaling
            weights = scores.masked_fill(~self._mask, float("-inf")).softmax(-1, dtype=torch.float32)
            mixed = weights.to(query.dtype) @ values.repeat_interleave(groups, 1)
        return mixed.transpose(1, 2).contiguous()


def mask_of(lists: SlotLists, slots: int) -> torch.Tensor:
    """The mask [rows, slots] of one sequence's rows. No shape depends on data."""
    rows, at = len(lists.positions), lists.positions[:, None]
    place = torch.arange(lists.text.shape[1], device=at.device)
    cached = (place < lists.length[0]) & (place <= at)
    row = torch.arange(rows, device=at.device)
    drafted = lists.tree[:, row // 64] >> (row % 64) & 1
    count = torch.zeros(rows, slots, dtype=torch.long, device=at.device)
    count.scatter_add_(1, lists.text[:1].expand(rows, -1), cached.long())  # padding adds nothing
    count.scatter_add_(1, lists.slots.expand(rows, -1), drafted)
    count[:, 0] += count.sum(1) == 0  # padding rows attend to a slot, to avoid NaN
    return count > 0


def masks(arguments: argparse.Namespace) -> None:
    """Attention over slot lists and with a dense mask: forward passes of the 8B shape, interleaved."""
    model = llama_8b()
    table = Table("tokens", *(f"{rows} rows" for rows in ROWS), title="8B: ms by slot lists; × with a mask, fused; not")
    for length in (256, 1024, 4096):
        runs: list[list[Callable[[], Any]]] = []
        for kind in (None, True, False):
            adapted = HFModel(model, check=not runs)
            adapted.fuse()
            adapted.replace_products()
            engine = GraphEngine(adapted, capacity=length + 2 * ROWS[-1])
            launch = attention._launch if kind is None else Dense(adapted.layers, kind)
            with patch.object(attention, "_launch", launch):
                for rows in ROWS:
                    launched(engine, rows, length, repeats=1)
            runs.append([graph_of(engine, rows, length).replay for rows in ROWS])
        cells = []
        for same in zip(*runs, strict=True):
            times = [[median_ms(run, 1) for run in same] for _ in range(15)]
            lists, *dense = (statistics.median(kind) for kind in zip(*times, strict=True))
            cells.append(f"{lists:.2f}; " + ", ".join(f"{each / lists:.2f}" for each in dense))
        table.add_row(str(length), *cells)
        print(length, cells, flush=True)
    CONSOLE.print(table)


def prices(arguments: argparse.Namespace) -> None:
    """A step in exact mode and without, interleaved in one process: graphs on a GPU, engines on a CPU."""
    if not torch.cuda.is_available():
        CONSOLE.print(cpu_prices(arguments))
        return
    models: dict[str, Callable[[], Any]] = {"8B shape": llama_8b} if arguments.each else {}
    if arguments.model:
        models["7B cost"] = lambda: widen(load_small(arguments)[0], arguments.times)
    for name, make in models.items():
        model = make()
        engines = [
            engine_for(HFModel(model), "graphs", exact=False, memory=0.2),
            engine_for(HFModel(model), exact=True, memory=0.2),
        ]
        print(f"{name}: {engines[1].name}", flush=True)
        table = Table("tokens", *(f"{rows} rows" for rows in ROWS), title=f"{name}: ms fast, exact, price")
        for length in (256, 1024, 8192):
            cells = []
            for rows in ROWS:
                for engine in engines:
                    launched(engine, rows, length, repeats=1)
                runs = [graph_of(engine, rows, length).replay for engine in engines]  # type: ignore[arg-type]
                times = [[median_ms(run, 1) for run in runs] for _ in range(15)]
                fast, exact = (statistics.median(kind) for kind in zip(*times, strict=True))
                cells.append(f"{fast:.2f}, {exact:.2f}, {exact / fast - 1:+.1%}")
            table.add_row(str(length), *cells)
            print(length, cells, flush=True)
        CONSOLE.print(table)
        del model, engines, engine, runs
        torch.cuda.empty_cache()


def cpu_prices(arguments: argparse.Namespace) -> Table:
    """Milliseconds of a step, by kind of weights, mode and runtime: each turn times all engines."""
    torch.set_num_threads(arguments.threads)
    engines = {}
    runtimes = ("native", "plain", "compiled") if arguments.runtime == "auto" else (arguments.runtime,)
    for weights, exact, runtime in itertools.product(arguments.weights, (False, True), runtimes):
        full = weights in ("float32", "narrow")
        if (exact and (not full or runtime == "native")) or (runtime == "native" and not full):
            continue
        dtype = "bfloat16" if weights == "bfloat16" else "float32"
        model = load(arguments.model, dtype, "cpu", weights if full else None).model
        if weights == "int8":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig())
        label = ", ".join([weights, *["exact"] * exact, runtime])
        engines[label] = engine_for(HFModel(model), runtime, exact)
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _, (label, engine) in itertools.product(range(arguments.repeats), engines.items()):
        curve = measure(engine, arguments.rows, (128,), repeats=1)
        for rows in arguments.rows:
            times[label, rows].append(1000 * curve.step(rows, 128))
    table = Table(f"ms per step, {arguments.threads} threads", *(f"{rows} rows" for rows in arguments.rows))
    for label in engines:
        table.add_row(label, *(f"{statistics.median(times[label, rows]):.1f}" for rows in arguments.rows))
    return table


def profile(name: str, run: Callable[[], Any], most: int = 16) -> None:
    """The time that each kernel adds to a step: from the end of the one before it, if it starts earlier."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    added: dict[str, list[float]] = defaultdict(list)
    done = 0.0
    for event in sorted(prof.events(), key=lambda event: event.time_range.end):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            added[event.name].append(event.time_range.end - max(done, event.time_range.start))
            done = event.time_range.end
    table = Table("kernel", "times", "µs each", "µs", title=f"the kernels of a step, {name}")
    for kernel, times in sorted(added.items(), key=lambda item: -sum(item[1]))[:most]:
        table.add_row(kernel[:90], str(len(times)), f"{statistics.mean(times):.1f}", f"{sum(times):.0f}")
    CONSOLE.print(table)


def print_parts(setup: Setup, methods: dict[str, Method], prompt: list[int], profiled: bool) -> None:
    """Milliseconds of each method's step on the device: the target's forward pass, the heads' weights, the rest."""
    engine = setup.decoder.engine
    if not isinstance(engine, GraphEngine):
        raise SystemExit("--parts needs CUDA graphs")
    table = Table("method", "whole step, ms", "target", "reading heads", "the rest")
    for label, method in methods.items():
        ready = setup.decoder.prepare(method)
        program = engine.program_for(ready, Sampling())
        if program is None:
            continue
        whole, target = step_ms(program, prompt)
        heads = getattr(ready, "heads", None)
        floor = 1000 * bytes_read(heads.heads, engine.model.ends().head) / READING if heads else 0.0
        table.add_row(label, *(f"{part:.2f}" for part in (whole, target, floor, whole - target - floor)))
        if profiled:
            profile(label, program._steps(1, 1024, frozenset())[-1].run, 40)
    CONSOLE.print(table)


def bytes_read(heads: Any, head: Any) -> int:
    """Of the weights of heads and of the output head, as a step reads them: some are int8."""
    parts = [heads, head] if heads.sequential else [quick(heads), quick_head(head)]
    found = 0
    for module in (module for part in parts for module in part.modules()):
        numbers = getattr(module, "numbers", None)
        own = [weight for weight in module._parameters.values() if weight is not None]
        found += sum(weight.nbytes for weight in own) if numbers is None else numbers.nbytes
    return found


def step_ms(program: Program, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds of a whole step while a sequence is decoded, and of its target's forward pass alone."""
    engine = program.engine
    with engine.pool.sequence(prompt) as sequence:
        seen: list[torch.Tensor] = []
        place = program.reserve(sequence, Sampling(), 700)
        alone(engine.read(sequence, program.sees(place, seen)))
        program.open(place, sequence, Sampling(), seen)
        try:
            whole = median_ms(program._steps(1, 1024, frozenset())[-1].run, 12)
        finally:
            program.close(place, sequence, [])
    return whole, median_ms(graph_of(engine, program.rows, len(prompt)).replay)
