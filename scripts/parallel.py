"""Lookahead Parallelism, measured on the embedded model. Results go to a file, and a table is printed last.

torchrun --nproc-per-node 2 scripts/parallel.py ranks --out out/ranks.jsonl
    the same window on several ranks: steps, rows, integers exchanged, seconds of forward passes. Run it with 1, 2
    and 4 ranks on the same file; outputs are compared with those of one rank.
python scripts/parallel.py windows --out out/windows.jsonl --plot docs/images/windows.svg
    tokens per step by window, which grows with the number of ranks, and a fit of the paper's Eq. 7 to the published
    algorithm. The number of processes does not change tokens per step, so one process measures it. Finished runs
    are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outpace import Decoder, Lookahead, load
from outpace import parallel as ranked
from outpace.bench.prompts import PROMPTS
from outpace.chart import check_plot, save_windows
from outpace.reproduce.scaling import Point, fit

NGRAM = 5
WINDOW = 3  # of one rank
RANKS = (1, 2, 4, 8)


def read(path: Path) -> list[dict[str, Any]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def prompts(each: int) -> list[str]:
    """The first `each` of every task."""
    return [group[number] for number in range(each) for group in PROMPTS.values()]


def windows(arguments: argparse.Namespace) -> None:
    check_plot(arguments.plot)
    texts = prompts(arguments.each)
    done = read(arguments.out)
    finished = {(row["prompt"], row["ranks"]) for row in done}
    left = [unit for unit in product(range(len(texts)), RANKS) if unit not in finished]
    decoder = open_decoder(arguments) if left else None
    for number, ranks in track(left, console=Console(stderr=True)):
        assert decoder is not None
        shape = {"window": WINDOW * ranks, "ngram": NGRAM, "guesses": WINDOW * ranks}
        method = Lookahead(published=True, prompt_pool=False, **shape)
        result = decoder.generate(texts[number], method=method, max_new_tokens=arguments.tokens)
        row = {"prompt": number, "ranks": ranks, "tokens": result.new_tokens, "steps": result.steps}
        done.append(row)
        append(arguments.out, row)
    points = []
    for ranks in RANKS:
        chosen = [row for row in done if row["ranks"] == ranks and row["prompt"] < len(texts)]
        points.append((WINDOW * ranks, sum(row["tokens"] for row in chosen) / sum(row["steps"] for row in chosen)))
    law = fit([Point(NGRAM, width, 0.0, tokens) for width, tokens in points])
    name = f"Eq. 7, α = {law.alpha:.3f}, f = {law.scarcity:.2f}"
    table = Table("ranks", "W = G", "tokens/step", name)
    for ranks, (width, tokens) in zip(RANKS, points, strict=True):
        table.add_row(str(ranks), str(width), f"{tokens:.3f}", f"{law.tokens(NGRAM, width):.3f}")
    Console().print(table)
    if arguments.plot:
        line = [(width, law.tokens(NGRAM, width)) for width in range(1, 2 * points[-1][0])]
        save_windows(points, line, name, arguments.plot)


@contextlib.contextmanager
def watched(decoder: Decoder) -> Iterator[list[tuple[int, float, float]]]:
    """Rows, seconds and seconds of processor time of each forward pass."""
    forward, seen = decoder.model.forward, list[tuple[int, float, float]]()

    def timed(pool: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        start, busy = time.perf_counter(), time.thread_time()
        output = forward(pool, rows, *args, **kwargs)
        seen.append((len(rows), time.perf_counter() - start, time.thread_time() - busy))
        return output

    decoder.model.forward = timed  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del decoder.model.forward


def ranks(arguments: argparse.Namespace) -> None:
    decoder = ranked.join(open_decoder(arguments))
    team = decoder.ranks
    method = Lookahead(window=arguments.window, ngram=NGRAM, guesses=arguments.window)
    known = {row["prompt"]: row["tokens"] for row in read(arguments.out) if row["ranks"] == 1}
    decoder.generate(prompts(1)[0], method=method, max_new_tokens=8)  # compiled layers are compiled here
    for number, text in enumerate(prompts(arguments.each)):
        before = team.exchanges, team.numbers
        with watched(decoder) as seen:
            start = time.perf_counter()
            result = decoder.generate(text, method=method, max_new_tokens=arguments.tokens)
            whole = time.perf_counter() - start
        forwards = seen[1:]  # without prefill
        row = {
            "ranks": team.count,
            "rank": team.rank,
            "prompt": number,
            "tokens": result.token_ids,
            "steps": result.steps,
            "exchanges": team.exchanges - before[0],
            "numbers": team.numbers - before[1],
            "rows": statistics.mean(rows for rows, _, _ in forwards),
            "forward": statistics.mean(seconds for _, seconds, _ in forwards),
            "busy": statistics.mean(busy for _, _, busy in forwards),
            "step": whole / result.steps,
            "same": result.token_ids == known.get(number, result.token_ids),
        }
        append(arguments.out, row)
    torch.distributed.barrier()
    if team.rank == 0:
        print_ranks(read(arguments.out))


def print_ranks(done: list[dict[str, Any]]) -> None:
    columns = (
        "ranks",
        "rank",
        "prompts",
        "same text",
        "steps",
        "rows/step",
        "forward, ms",
        "of it computing",
        "step, ms",
    )
    table = Table(*columns, "exchanges per step", "bytes per step")
    groups = sorted({(row["ranks"], row["rank"]) for row in done})
    for count, rank in groups:
        rows = [row for row in done if (row["ranks"], row["rank"]) == (count, rank)]
        steps = sum(row["steps"] for row in rows)

        def mean(name: str, rows: list[dict[str, Any]] = rows, steps: int = steps) -> float:
            return sum(row[name] * row["steps"] for row in rows) / steps

        exchanges = sum(row["exchanges"] - 1 for row in rows) / steps  # one per sequence compares prompts and settings
        table.add_row(
            *(str(count), str(rank), str(len(rows)), str(sum(row["same"] for row in rows)), str(steps)),
            f"{mean('rows'):.1f}",
            *(f"{mean(name) * 1000:.0f}" for name in ("forward", "busy", "step")),
            f"{exchanges:.3f}",
            f"{4 * sum(row['numbers'] for row in rows) / steps:.0f}",
        )
    Console(width=140).print(table)


def open_decoder(arguments: argparse.Namespace) -> Decoder:
    return load(
        arguments.model, dtype="float32", device=arguments.device, method="autoregressive", runtime=arguments.runtime
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ranks", "windows"])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--plot", type=Path, help="for windows: draw to this file (.png, .svg)")
    parser.add_argument("--each", type=int, default=1, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=64, help="the most new tokens")
    parser.add_argument("--window", type=int, default=12, help="for ranks: W = G, all ranks together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m", help="its name or folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runtime", default="plain")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    {"ranks": ranks, "windows": windows}[arguments.what](arguments)


if __name__ == "__main__":
    main()
