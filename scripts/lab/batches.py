"""Several sequences at a time: throughput, exactness of batches, and the cost of sampling."""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import time
from dataclasses import replace
from hashlib import sha256

import torch
from rich.console import Console
from rich.table import Table

from outpace import Autoregressive, Decoder, Method, Sampling
from outpace.bench.entries import Ours, Task

from .methods import PLAIN, lossless, named, usual
from .models import set_up
from .speeds import prompts_of

CONSOLE = Console(width=150)


def written_together(
    decoder: Decoder,
    method: Method,
    prompts: list[list[int]],
    most: int,
    tokens: int,
    samplings: list[Sampling] | None = None,
) -> tuple[list[list[int]], float]:
    """The output for each prompt, `most` of them at a time, and the seconds that all took."""
    start = time.perf_counter()
    batch = decoder.batch(most)
    for prompt, sampling in zip(prompts, samplings or [None] * len(prompts), strict=True):
        batch.add(prompt, method=method, max_new_tokens=tokens, sampling=sampling)
    written: list[list[int]] = [[] for _ in prompts]
    for number, step in batch:
        if isinstance(step, Exception):
            raise step
        written[number] += step.tokens
    return written, time.perf_counter() - start


def together(arguments: argparse.Namespace) -> None:
    """Throughput by batch size: with prefill, and while all sequences are running."""
    setup = set_up(arguments, arguments.exact)
    decoder = setup.decoder
    methods = {
        label: decoder.prepare(method) for label, method in named(usual(setup, arguments.times), arguments.only).items()
    }
    prompts = prompts_of(decoder, arguments, 24)[:64]
    table = Table("method", "sequences", "tokens/s", "plain, one = 1", "plain, as many = 1", "all running", "one = 1")
    base: dict[int, float] = {}
    running: dict[tuple[str, int], float] = {}
    first = arguments.together[0]
    for most in arguments.together:
        for label, method in methods.items():
            some = prompts[: max(4, most)]
            for _ in range(3):  # the first time graphs are captured
                written, spent = written_together(decoder, method, some, most, arguments.tokens)
            speed = sum(map(len, written)) / spent
            running[label, most] = steady(decoder, method, some[:most], arguments.tokens)
            if label == PLAIN:
                base[most] = speed
            table.add_row(
                *(label, str(most), f"{speed:.0f}", f"{speed / base[first]:.2f}", f"{speed / base[most]:.2f}"),
                *(f"{running[label, most]:.0f}", f"{running[label, most] / running[PLAIN, first]:.2f}"),
            )
    CONSOLE.print(f"times {arguments.times}, {arguments.tokens} tokens", table)


def modes(arguments: argparse.Namespace) -> None:
    """Exact mode and fast mode, interleaved: throughput by batch size, and outputs equal to plain decoding's."""
    setups = {mode: set_up(arguments, mode == "exact", memory=0.4) for mode in ("fast", "exact")}
    methods = {
        mode: {
            label: setup.decoder.prepare(method)
            for label, method in named(usual(setup, arguments.times), arguments.only or ["auto"]).items()
        }
        for mode, setup in setups.items()
    }
    prompts = prompts_of(setups["fast"].decoder, arguments, 24)[:64]
    few = prompts[: 6 * arguments.each]
    table = Table(
        "method", "sequences", "fast, tokens/s", "exact, tokens/s", "exact / fast", "exact: same", "fast: same"
    )
    for label, most in itertools.product(methods["fast"], arguments.together):
        some = prompts[:most] if most > 1 else few
        speeds: dict[str, list[float]] = {mode: [] for mode in setups}
        written: dict[str, list[list[int]]] = {}
        for turn in range(arguments.repeats + 1):  # the first time graphs are captured
            for mode, setup in setups.items():
                written[mode], spent = written_together(
                    setup.decoder, methods[mode][label], some, most, arguments.tokens
                )
                if turn:
                    speeds[mode].append(sum(map(len, written[mode])) / spent)
        fast, exact = (statistics.median(speeds[mode]) for mode in ("fast", "exact"))
        same = []
        for mode in ("exact", "fast"):
            alone, _ = written_together(setups[mode].decoder, methods[mode][PLAIN], few, 1, arguments.tokens)
            compared = [*zip(alone, written[mode], strict=False)]
            same.append(f"{sum(one == other for one, other in compared)} of {len(compared)}")
        table.add_row(label, str(most), f"{fast:.0f}", f"{exact:.0f}", f"{exact / fast:.3f}", *same)
        print(f"{label}, {most} sequences: exact / fast {exact / fast:.3f}", flush=True)
    CONSOLE.print(f"times {arguments.times}, {arguments.tokens} tokens", table)


def steady(decoder: Decoder, method: Method, prompts: list[list[int]], tokens: int) -> float:
    """Tokens/s from when all sequences are being decoded until the first one ends."""
    decoder.ends, ends = [], decoder.ends
    batch = decoder.batch()
    try:
        for prompt in prompts:
            batch.add(prompt, method=method, max_new_tokens=4 * tokens)
        begun: set[int] = set()
        written, start = 0, 0.0
        for number, step in batch:
            if isinstance(step, Exception):
                raise step
            if len(begun) == len(prompts):
                start = start or time.perf_counter()
                written += len(step.tokens)
                if step.finish or written > tokens * len(prompts):
                    break
            begun.add(number)
        return written / (time.perf_counter() - start)
    finally:
        batch.close()
        decoder.ends = ends


def sampling(arguments: argparse.Namespace) -> None:
    """Plain decoding: sampled and greedy, prompt by prompt."""
    decoder = set_up(arguments).decoder
    decoder.ends = []
    plain = Ours(decoder, Autoregressive())
    ways = {
        "greedy": Sampling(),
        "T = 0.8": Sampling(temperature=0.8),
        "T = 0.8, top-p 0.95": Sampling(temperature=0.8, top_p=0.95),
        "repetition penalty 1.1": Sampling(repetition_penalty=1.1),
    }
    speeds: dict[str, list[float]] = {label: [] for label in ways}
    for turn in range(2):
        for prompt in prompts_of(decoder, arguments, arguments.each)[:8]:
            for label, way in ways.items():
                run = plain.run(Task(prompt, way, arguments.tokens))
                if turn:
                    speeds[label].append(len(run.token_ids) / run.seconds)
    table = Table("sampling", "tokens/s", "greedy = 1")
    base = statistics.median(speeds["greedy"])
    for label, found in speeds.items():
        table.add_row(label, f"{statistics.median(found):.1f}", f"{statistics.median(found) / base:.3f}")
    CONSOLE.print(table)


def texts(arguments: argparse.Namespace) -> None:
    """Exact mode: every method's outputs, in batches of --together, against plain decoding's without batching.

    In batches, sequences join at random times, and every fifth is decoded twice: one of the two is cancelled. With
    --bits, the logits of every token are compared too, for which the host takes part in every step. A digest of plain
    decoding's logits is printed, to be compared with another process's or machine's.
    """
    setup = set_up(arguments, exact=True)
    decoder = setup.decoder
    tried = named(lossless(setup), arguments.only)
    prompts = prompts_of(decoder, arguments, arguments.each)
    ways = {
        "greedy": [Sampling()] * len(prompts),
        "T = 0.8": [Sampling(temperature=0.8, seed=seed) for seed in range(len(prompts))],
    }
    known = {way: recorded(decoder, Autoregressive(), prompts, 1, arguments, given) for way, given in ways.items()}
    if arguments.bits:
        print(f"{decoder.engine.name}, digest of plain decoding's logits: {digest(known['greedy'][1])}", flush=True)
    table = Table("method", "sequences", *ways, *(f"{way}: same bits" for way in ways if arguments.bits))
    for most in arguments.together:
        for label, method in tried.items():
            ready, cells, bits = decoder.prepare(method), [], []
            for way, given in ways.items():
                start = time.perf_counter()
                found, logits = recorded(decoder, ready, prompts, most, arguments, given)
                same = sum(text == expected for text, expected in zip(found, known[way][0], strict=True))
                cells.append(f"{same} of {len(prompts)}, {time.perf_counter() - start:.0f} s")
                if arguments.bits:
                    bits.append(f"{sum(map(same_bits, logits, known[way][1]))} of {len(prompts)}")
            table.add_row(label, str(most), *cells, *bits)
            print(label, most, cells, bits, flush=True)
    CONSOLE.print(table)


Logits = list[torch.Tensor]  # one row for each token


def recorded(
    decoder: Decoder,
    method: Method,
    prompts: list[list[int]],
    most: int,
    arguments: argparse.Namespace,
    samplings: list[Sampling],
) -> tuple[list[list[int]], list[Logits]]:
    """The output for each prompt and, with --bits, the logits that each token was chosen from."""
    logits: list[Logits] = [[] for _ in prompts]
    if arguments.bits:
        samplings = [
            replace(given, processors=(functools.partial(record, rows),))
            for given, rows in zip(samplings, logits, strict=True)
        ]
    return joined_at_random(decoder, method, prompts, most, arguments.tokens, samplings), logits


def record(rows: Logits, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that records its input."""
    rows.append(scores[0].clone())
    return scores


def digest(texts: list[Logits]) -> str:
    """The SHA-256 of the logits of some sequences."""
    found = sha256()
    for rows in texts:
        found.update(torch.stack(rows).float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def same_bits(rows: Logits, others: Logits) -> bool:
    return len(rows) == len(others) and all(map(torch.equal, rows, others))


def joined_at_random(
    decoder: Decoder, method: Method, prompts: list[list[int]], most: int, tokens: int, samplings: list[Sampling]
) -> list[list[int]]:
    """The output for each prompt."""
    rng, batch = random.Random(most), decoder.batch(most)
    waiting = [*range(len(prompts)), *(range(0, len(prompts), 5) if most > 1 else ())]
    if most > 1:
        rng.shuffle(waiting)
    written: dict[int, list[int]] = {}
    whose: dict[int, int] = {}
    left: dict[int, int] = {}  # steps until a sequence is cancelled

    def join() -> None:
        place = waiting.pop()
        again = place in whose.values()
        given = replace(samplings[place], processors=()) if again else samplings[place]
        number = batch.add(prompts[place], method=method, max_new_tokens=tokens, sampling=given)
        if again:
            left[number] = rng.randrange(1, 30)
        else:
            whose[number], written[number] = place, []

    while waiting:
        for _ in range(min(len(waiting), max(1, most // 2))):
            join()
        for number, step in batch:
            if isinstance(step, Exception):
                raise step
            if number in whose:
                written[number] += step.tokens
            else:
                left[number] -= 1
                if not left[number]:
                    batch.cancel(number)
            if waiting and rng.random() < 0.2:
                join()
    return [text for _, text in sorted((whose[number], text) for number, text in written.items())]
