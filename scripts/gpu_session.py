"""A whole session of measurements on a CUDA GPU. Each part prints its table last.

    python scripts/gpu_session.py shape            step time of a Llama-3.1-8B shape by rows and context
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.draft import Draft, Verdict, chain
from outpace.models.hf import HFModel
from outpace.runtime.graphs import GraphEngine

CONSOLE = Console(width=150)


def llama_8b() -> Any:
    """The shape of Llama-3.1-8B with random weights."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def comb(root: int, rows: int) -> Draft:
    """A tree of many short branches."""
    parents = [-1, *(0 if row % 4 == 1 else row - 1 for row in range(1, rows))]
    return Draft((root, *range(1, rows)), tuple(parents), rows, ("",) * rows)


def replay_time(engine: GraphEngine, rows: int, length: int, repeats: int = 20) -> float:
    """Median milliseconds of a graph's replay."""
    graph = engine._graph(next(size for size in engine.sizes if size >= rows), length)
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph._graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def step_times(engine: GraphEngine, rows: tuple[int, ...], lengths: tuple[int, ...]) -> dict[tuple[int, int], Any]:
    """(rows, context) -> milliseconds of the graph, of the whole `score` with picks."""
    found = {}
    for length in lengths:
        with engine.pool.sequence([token % 1000 for token in range(length)]) as sequence:
            for count in rows:
                draft = comb(sequence.tokens[-1], count)
                walls = []
                for _ in range(12):
                    start = time.perf_counter()
                    scores = engine.score(sequence, draft)
                    assert len(scores.best) == count
                    walls.append(time.perf_counter() - start)
                    engine.pool.free(sequence.drafted)
                    sequence.drafted = []
                found[count, length] = (replay_time(engine, count, length), statistics.median(walls) * 1000)
                print(count, length, found[count, length], flush=True)
    return found


def profile(engine: GraphEngine, rows: int, length: int) -> None:
    graph = engine._graph(next(size for size in engine.sizes if size >= rows), length)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        graph._graph.replay()
        torch.cuda.synchronize()
    print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=70))


def shape(arguments: argparse.Namespace) -> None:
    model = llama_8b()
    table = Table("runtime", "rows", "context", "graph ms", "score ms")
    start = time.perf_counter()
    hf = HFModel(model)
    print("adapter", time.perf_counter() - start)
    for fused, compiled in ((False, False), (True, True)):
        if fused:
            print("fused", hf.fuse())
        engine = GraphEngine(hf, compiled=compiled, capacity=16384)
        start = time.perf_counter()
        rows, lengths = ((1, 32), (1024,)) if not compiled else ((1, 8, 32, 64, 128), (1024, 8192))
        with engine.pool.sequence(list(range(100))) as sequence:
            assert engine.score(sequence, chain(99, (), "")).best
        print("first token", time.perf_counter() - start, flush=True)
        for (count, length), (graph, wall) in step_times(engine, rows, lengths).items():
            table.add_row(f"fused={fused} compiled={compiled}", str(count), str(length), f"{graph:.2f}", f"{wall:.2f}")
        if compiled:
            profile(engine, 1, 1024)
            profile(engine, 32, 1024)
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["shape"])
    arguments = parser.parse_args()
    {"shape": shape}[arguments.what](arguments)


if __name__ == "__main__":
    main()
