"""Measurements of the core on a real model. Each command appends to a file and goes on where it was stopped.

    python scripts/measure.py equal  --out out/equal.jsonl                 every method writes plain decoding's text
    python scripts/measure.py steps  --out out/steps.jsonl --data FILE     tokens per step by task (Spec-Bench's file)
    python scripts/measure.py replay --out out/replay.jsonl --data FILE    the same for heads, on plain decoding's texts
    python scripts/measure.py clock  --out out/clock.jsonl                 time ratios, interleaved, in one process
    python scripts/measure.py batch  --out out/batch.jsonl                 tokens/s of batches, in one process
    python scripts/measure.py batch  --out out/batch.jsonl --exact         the same, and whether logits' bits are equal
    python scripts/measure.py price  --repeats 7                           a step's cost on a CPU, in exact mode and not
    python scripts/measure.py price  --repeats 7 --weights float32 int8    the same by kind of weights
    python scripts/measure.py heads  --plot FILE                           held-out accuracies of the shipped heads

A table is printed last. On a machine without a package registry, carry the embedded model's GGUF file there, in parts
if need be, and name it: `--gguf PART1 PART2 --model FOLDER` puts it together and converts it to FOLDER first.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM

from outpace import (
    AdaDecode,
    Amphista,
    Autoregressive,
    Block,
    Decoder,
    DraftModel,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    Method,
    PromptLookup,
    Sampling,
    SelfSpeculative,
)
from outpace.bench.calibration import calibrate
from outpace.bench.prompts import PROMPTS
from outpace.chart import check_plot, print_accuracies, save_accuracies
from outpace.draft import Scores, Verdict, chain
from outpace.heads.shipped import of_kind
from outpace.heads.storing import read_config
from outpace.methods import METHODS
from outpace.models import bundled
from outpace.models.hf import HFModel
from outpace.models.loading import load
from outpace.picking import Picker
from outpace.runtime.calibrate import measure
from outpace.runtime.choose import engine_for

NEW_TOKENS = 128
GEMMA = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # sha256 of Gemma 3 270M's GGUF file
PLAIN = Autoregressive()
SEEDS = range(5)

ALONE: dict[str, Any] = {"lookup": 0.0}

# The paper's own method, then all our improvements but one.
STEPS: dict[str, Method] = {
    "jacobi": Jacobi(),
    "prompt-lookup, a chain": PromptLookup(tree=False),
    "prompt-lookup, 16 rows": PromptLookup(rows=16),
    "prompt-lookup": PromptLookup(),
    "lookahead as published, no prompt pool": Lookahead(published=True, prompt_pool=False),
    "lookahead as published": Lookahead(published=True),
    "lookahead": Lookahead(),
    "lookahead, no prompt pool": Lookahead(prompt_pool=False),
    "lookahead, keys of one token": Lookahead(longest_key=1),
    "lookahead, reach 0": Lookahead(reach=0),
    "lookahead, no recycling": Lookahead(recycle=False),
    # Heads as published guess alone.
    "medusa": Medusa(**ALONE),
    "hydra": Hydra(**ALONE),
    "amphista": Amphista(**ALONE),
    "medusa, measured tree": Medusa(**ALONE, tree="measured"),
    "hydra, measured tree": Hydra(**ALONE, tree="measured"),
    "amphista, measured tree": Amphista(**ALONE, tree="measured"),
    "medusa, not coupled": Medusa(**ALONE, coupled=False),
    "hydra, not coupled": Hydra(**ALONE, coupled=False),
    "amphista, not coupled": Amphista(**ALONE, coupled=False),
    "medusa, 16 rows": Medusa(**ALONE, rows=16),
    "hydra, 16 rows": Hydra(**ALONE, rows=16),
    "amphista, 16 rows": Amphista(**ALONE, rows=16),
    "medusa with lookup": Medusa(),
    "hydra with lookup": Hydra(),
    "amphista with lookup": Amphista(),
    "amphista with lookup, 16 rows": Amphista(rows=16),
    "amphista with lookup, recycled": Amphista(recycled=8),
    "block": Block(**ALONE),
    "block, 16 rows": Block(**ALONE, rows=16),
    "block with lookup": Block(),
    "block with lookup, 16 rows": Block(rows=16),
    "block with lookup, recycled": Block(recycled=8),
}
HEADS = ("medusa", "hydra", "amphista")
# On a CPU every row costs, so the clock runs small settings too.
CLOCK: dict[str, Method] = {
    "jacobi (7)": Jacobi(window=7),
    "prompt-lookup (8 rows)": PromptLookup(rows=8),
    "prompt-lookup (8 rows, gate 0.2)": PromptLookup(rows=8, gate=0.2),
    "prompt-lookup (64 rows)": PromptLookup(),
    "lookahead (2, 3, 2)": Lookahead(window=2, ngram=3, guesses=2),
    "lookahead (15, 5, 15)": Lookahead(),
}

BATCH: dict[str, Method] = {"plain": PLAIN, "prompt-lookup (8 rows)": PromptLookup(rows=8)}
BATCHES = (1, 4, 8)

# By a cost curve that is measured first.
SIZED = ("jacobi", "prompt-lookup", "lookahead", *HEADS, "adadecode", "self-speculative")

_decoder: Decoder
_model: Any


def open_model(name: str, dtype: str, device: str, threads: int, runtime: str, sized: bool, exact: bool) -> None:
    """Load the model once in each worker."""
    global _decoder, _model
    torch.set_num_threads(threads)
    _model, tokenizer = load(name, dtype, device)
    _decoder = Decoder(_model, tokenizer, runtime=runtime, exact=exact)
    _decoder.engine.costs = None
    if sized:
        curve = calibrate(_decoder)
        print("rows: ms a step", {n: round(curve.step(n) * 1000, 1) for n in curve.rows}, flush=True)


@functools.cache
def first_layers(count: int) -> Any:
    """A draft model: the target's own first layers, under its own head."""
    config = copy.deepcopy(_model.config)
    config.num_hidden_layers = count
    small = AutoModelForCausalLM.from_config(config).to(_model.dtype)
    small.load_state_dict(_model.state_dict(), strict=False)
    return small.to(_model.device).eval()


def prompts() -> list[tuple[str, str]]:
    """The first five of each task: those that the published figures were measured on."""
    return [(task, prompt) for task, group in PROMPTS.items() for prompt in group[:5]]


def transformers_generate(prompt: list[int], max_new_tokens: int = NEW_TOKENS, **options: Any) -> list[int]:
    ids = torch.tensor([prompt], device=_decoder.model.device)
    output = _model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **options
    )
    return output[0, ids.shape[1] :].tolist()


def equal_unit(unit: dict[str, Any]) -> dict[str, Any]:
    """All methods on one prompt with one seed (None: greedy), against plain decoding."""
    prompt = _decoder.encode(prompts()[unit["prompt"]][1])
    seed = unit["seed"]
    small = seed is not None
    sampling = Sampling() if seed is None else Sampling(temperature=0.8, top_p=0.95, seed=seed)
    options: dict[str, Any] = {"max_new_tokens": unit.get("new_tokens", NEW_TOKENS), "sampling": sampling}
    if unit.get("only") == "heads":
        methods: list[Method] = [METHODS[name](rows=16 if small else 64) for name in HEADS]
    elif unit.get("only") == "exits":
        methods = [AdaDecode(exits="8,16,24", control="fixed", gamma=0.4), SelfSpeculative(exit=20, length=3)]
    else:
        methods = [
            Jacobi(window=4 if small else 16),
            PromptLookup(rows=8, gate=0.2) if small else PromptLookup(),
            Lookahead(window=5, ngram=4, guesses=5) if small else Lookahead(),
            DraftModel(model=first_layers(4), length=3),
        ]
    plain = _decoder.generate(prompt, method=PLAIN, **options).token_ids
    found = {}
    if seed is None:
        found["transformers"] = transformers_generate(prompt, options["max_new_tokens"]) == plain
    for method in methods:
        found[method.name] = _decoder.generate(prompt, method=_decoder.prepare(method), **options).token_ids == plain
    return {**unit, "tokens": len(plain), "equal": found}


@functools.cache
def prepared(name: str, heads: str | None = None) -> Method:
    """A method of the table, with what it has to load: those of `block` may be heads of a folder."""
    method = STEPS[name]
    return _decoder.prepare(replace(method, heads=heads) if isinstance(method, Block) else method)


def steps_unit(unit: dict[str, Any]) -> dict[str, Any]:
    """One method on one Spec-Bench prompt: tokens and steps."""
    sampling = Sampling(temperature=unit.get("temperature", 0.0), seed=unit["question"])
    method = prepared(unit["method"], unit.get("heads"))
    result = _decoder.generate(unit["text"], method=method, max_new_tokens=NEW_TOKENS, sampling=sampling)
    kept = {key: value for key, value in unit.items() if key != "text"}
    return {**kept, "tokens": result.new_tokens, "steps": result.steps, "accepted": result.accepted_per_step}


def replay_unit(unit: dict[str, Any]) -> dict[str, Any]:
    """All methods with heads on one Spec-Bench prompt: steps without the target.

    What heads draft depends on the text and the target's states on it, both of which are known once plain decoding
    has written the text: every method writes the same. So each step is drafted, but not computed again.
    """
    sampling = Sampling(temperature=unit.get("temperature", 0.0), seed=unit["question"])
    methods = {name: prepared(name, unit.get("heads")) for name in unit["methods"]}
    for method in methods.values():
        _decoder.model.keep(method.heads.heads.reads)
    prompt = _decoder.encode(unit["text"])
    answer = _decoder.generate(prompt, method=PLAIN, max_new_tokens=NEW_TOKENS, sampling=sampling).token_ids
    text, engine, hidden = [*prompt, *answer], _decoder.engine, list[torch.Tensor]()
    with engine.pool.sequence(text) as sequence:
        last = engine.score(sequence, chain(text[-1], (), ""), hidden.append).hidden
    states = torch.cat([*hidden, last])
    steps = {name: replay(method, sampling, len(prompt), text, states) for name, method in methods.items()}
    kept = {key: value for key, value in unit.items() if key not in ("text", "methods")}
    return {**kept, "tokens": len(answer), "steps": steps}


def replay(method: Method, sampling: Sampling, prompt: int, text: list[int], states: torch.Tensor) -> int:
    """How many steps the method takes for a text whose states are known."""
    pool, steps = _decoder.engine.pool, 0
    picker = Picker(sampling, prompt)
    with pool.sequence(text[:prompt]) as sequence, method.start(_decoder.engine, sequence, picker) as drafter:
        while len(sequence.tokens) < len(text):
            draft = drafter.draft(_decoder.model.room(sequence.position))
            before = len(sequence.tokens) - 1
            behind = len(sequence.slots)
            pool.place(sequence, draft)
            if before > behind:
                drafter._see(states[behind:before])
            rows, ahead = [0], text[before + 1 :]
            while len(rows) < len(ahead) and (child := draft.child(rows[-1], ahead[len(rows) - 1])) is not None:
                rows.append(child)
            hidden = torch.zeros(len(draft), states.shape[1], dtype=states.dtype, device=states.device)
            hidden[rows] = states[before : before + len(rows)]
            verdict = Verdict(tuple(rows), tuple(ahead[: len(rows)]))
            pool.keep(sequence, draft, verdict)
            drafter.learn(draft, Scores(hidden[:, :0], hidden), verdict)
            steps += 1
    return steps


@contextlib.contextmanager
def forward_time() -> Iterator[list[float]]:
    """The seconds of each forward pass of the model alone."""
    forward, times = _decoder.model.forward, list[float]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        times.append(time.perf_counter() - start)
        return output

    _decoder.model.forward = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        del _decoder.model.forward


def clock_unit(unit: dict[str, Any]) -> dict[str, Any]:
    """All methods on one prompt, in an order of its own: seconds a token. Plain decoding twice, to show the noise."""
    prompt = _decoder.encode(prompts()[unit["prompt"]][1])
    seconds: dict[str, float] = {}
    outside: dict[str, float] = {}

    def ours(name: str, method: Method) -> None:
        with forward_time() as forwards:
            start = time.perf_counter()
            steps = list(_decoder.stream(prompt, method=method, max_new_tokens=NEW_TOKENS))
            whole = time.perf_counter() - start
        seconds[name] = whole / sum(len(step.tokens) for step in steps)
        outside[name] = (whole - sum(forwards)) / len(steps)

    def theirs(name: str, **options: Any) -> None:
        start = time.perf_counter()
        tokens = len(transformers_generate(prompt, **options))
        seconds[name] = (time.perf_counter() - start) / tokens

    if unit["sized"]:
        chosen = {f"{name}, sized": _decoder.prepare(name) for name in SIZED}
    else:
        chosen = {name: CLOCK[name] for name in named(CLOCK, unit["only"])}
    runs: dict[str, Callable[[str], None]] = {
        "transformers generate": theirs,
        "transformers prompt lookup": functools.partial(theirs, prompt_lookup_num_tokens=10),
    }
    runs |= {
        name: functools.partial(ours, method=method)
        for name, method in {"plain": PLAIN, "plain again": PLAIN, **chosen}.items()
    }
    for name in random.Random(f"{unit['prompt']} {unit['repeat']}").sample([*runs], len(runs)):
        runs[name](name)
    return {**unit, "seconds": {name: seconds[name] for name in runs}, "outside": outside}


def batch_unit(unit: dict[str, Any]) -> dict[str, Any]:
    """Some prompts by each method, so many at the same time: tokens, seconds, those of the processor, equal texts.

    In exact mode also how many texts have the same bits in all logits.
    """
    texts = [_decoder.encode(prompt) for _, prompt in prompts()[: unit["prompt"]]]
    found: dict[str, list[float]] = {}
    alone: list[list[int]] = []
    logits: list[list[torch.Tensor]] = []
    for most, (name, method) in itertools.product(BATCHES, BATCH.items()):
        records: list[list[torch.Tensor]] = [[] for _ in texts]
        samplings = [Sampling(processors=(functools.partial(record, rows),)) for rows in records]
        start = time.process_time()
        written, seconds = written_together(
            _decoder, method, texts, most, unit["new_tokens"], samplings if unit.get("exact") else None
        )
        alone, logits = alone or written, logits or records
        same = sum(text == expected for text, expected in zip(written, alone, strict=True))
        numbers = [sum(map(len, written)), seconds, time.process_time() - start, same]
        if unit.get("exact"):
            numbers.append(sum(map(same_bits, records, logits)))
        found[f"{name}, {most}"] = numbers
    return {**unit, "found": found}


def record(rows: list[torch.Tensor], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that keeps what it is given: one row for each token of the text."""
    rows.append(scores[0].clone())
    return scores


def same_bits(rows: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(rows) == len(others) and all(map(torch.equal, rows, others))


def written_together(
    decoder: Decoder,
    method: Method,
    texts: list[list[int]],
    most: int,
    tokens: int,
    samplings: list[Sampling] | None = None,
) -> tuple[list[list[int]], float]:
    """What is written after each text, `most` of them at the same time, and the seconds that all took."""
    start = time.perf_counter()
    batch = decoder.batch(most)
    for text, sampling in zip(texts, samplings or [None] * len(texts), strict=True):
        batch.add(text, method=method, max_new_tokens=tokens, sampling=sampling)
    written: list[list[int]] = [[] for _ in texts]
    for number, step in batch:
        if isinstance(step, Exception):
            raise step
        written[number] += step.tokens
    return written, time.perf_counter() - start


def batch_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("method, texts together", "tokens/s", "plain alone = 1", "by processor time", "same text as alone")
    if rows[0].get("exact"):
        table.add_column("same bits in all logits")
    for name in rows[0]["found"]:
        found = [(row["found"][name], row["found"]["plain, 1"]) for row in rows]
        speed = statistics.median(mine[0] / mine[1] for mine, _ in found)
        ratios = [
            statistics.median(mine[0] / mine[clock] * base[clock] / base[0] for mine, base in found) for clock in (1, 2)
        ]
        texts = sum(row["prompt"] for row in rows)
        same = [f"{sum(mine[place] for mine, _ in found)} of {texts}" for place in range(3, len(found[0][0]))]
        table.add_row(name, f"{speed:.1f}", *(f"{ratio:.2f}" for ratio in ratios), *same)
    return table


def price_table(arguments: argparse.Namespace) -> Table:
    """Milliseconds of a step, in one process: each turn times all engines, by all numbers of rows."""
    torch.set_num_threads(arguments.threads)
    engines = {}
    for weights, exact, runtime in itertools.product(arguments.weights, (False, True), ("plain", "compiled")):
        if exact and weights != "float32":
            continue
        model = load(arguments.model, "float32" if weights == "int8" else weights, "cpu").model
        if weights == "int8":
            make_int8(model)
        mode = "exact, " if exact else ""
        engines[f"{weights}, {mode}{runtime}"] = engine_for(HFModel(model), runtime, exact)
    steps: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _, (label, engine) in itertools.product(range(arguments.repeats), engines.items()):
        curve = measure(engine, arguments.rows, (arguments.context,), repeats=1)
        for rows in arguments.rows:
            steps[label, rows].append(1000 * curve.step(rows, arguments.context))
    table = Table(f"ms a step, {arguments.threads} threads", *(f"{rows} rows" for rows in arguments.rows))
    for label in engines:
        table.add_row(label, *(f"{statistics.median(steps[label, rows]):.1f}" for rows in arguments.rows))
    return table


def make_int8(model: Any) -> None:
    """Weights alone, by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def named(methods: dict[str, Method], only: str) -> list[str]:
    """The method of that name, or else those whose names begin so. `/` stands between several."""
    parts = only.split("/")
    return [
        name
        for name in methods
        if name in parts or any(part not in methods and name.startswith(part) for part in parts)
    ]


def task_of(category: str) -> str:
    known = ("translation", "summarization", "qa", "math_reasoning", "rag")
    return category if category in known else "chat"


def spec_bench(path: Path, each: int) -> list[dict[str, Any]]:
    """The first turns of `each` prompts of each task."""
    taken: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read(path):
        task = task_of(row["category"])
        if len(taken[task]) < each:
            taken[task].append({"task": task, "question": row["question_id"], "text": row["turns"][0]})
    return [row for rows in taken.values() for row in rows]


def key(unit: dict[str, Any]) -> str:
    names = (
        "model",
        "dtype",
        "prompt",
        "seed",
        "method",
        "question",
        "repeat",
        "only",
        "sized",
        "runtime",
        "exact",
        "temperature",
        "new_tokens",
        "heads",
    )
    return json.dumps([unit.get(name) for name in names])


def read(path: Path) -> list[dict[str, Any]]:
    """Finished work. A line that a kill cut short is not finished."""
    rows = []
    for line in path.read_text().split("\n") if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def run(units: list[dict[str, Any]], work: Callable[..., Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Do what is not in the output file yet, and append it."""
    path = Path(arguments.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    units = [{**unit, "model": arguments.model, "dtype": arguments.dtype} for unit in units]
    done = read(path)
    finished = {key(row) for row in done}
    left = [unit for unit in units if key(unit) not in finished]
    setup = (
        arguments.model,
        arguments.dtype,
        arguments.device,
        arguments.threads,
        arguments.runtime,
        arguments.sized,
        arguments.exact,
    )
    context = multiprocessing.get_context("spawn")
    with (
        path.open("a") as file,
        Progress(console=Console(stderr=True)) as progress,
        context.Pool(arguments.workers, open_model, setup) as pool,
    ):
        for row in progress.track(pool.imap_unordered(work, left), total=len(left)):
            done.append(row)
            file.write("\n" + json.dumps(row))
            file.flush()
    wanted = {key(unit) for unit in units}
    return [row for row in done if key(row) in wanted]


def equal_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("method", "greedy: equal", "sampled, five seeds: equal")
    counts: dict[str, dict[bool, list[bool]]] = defaultdict(lambda: {True: [], False: []})
    for row in rows:
        for name, same in row["equal"].items():
            counts[name][row["seed"] is None].append(same)
    for name, found in counts.items():
        table.add_row(name, *(f"{sum(found[kind])} of {len(found[kind])}" for kind in (True, False)))
    return table


def steps_table(rows: list[dict[str, Any]]) -> Table:
    tasks = list(dict.fromkeys(sorted(row["task"] for row in rows)))
    table = Table("method", *tasks, "all", "mean of tasks")
    for name in dict.fromkeys(row["method"] for row in rows):
        ratios = [ratio(row for row in rows if row["method"] == name and row["task"] == task) for task in tasks]
        whole = ratio(row for row in rows if row["method"] == name)
        mean = sum(ratios) / len(ratios)
        table.add_row(name, *(f"{value:.2f}" for value in [*ratios, whole, mean]))
    return table


def ratio(rows: Iterable[dict[str, Any]]) -> float:
    chosen = list(rows)
    return sum(row["tokens"] for row in chosen) / max(1, sum(row["steps"] for row in chosen))


def clock_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("method", "ms a token", "speed: plain = 1", "transformers = 1", "ms a step outside the forward")
    for name in rows[0]["seconds"]:
        cost = statistics.median(row["seconds"][name] for row in rows)
        ratios = [
            statistics.median(row["seconds"][base] / row["seconds"][name] for row in rows)
            for base in ("plain", "transformers generate")
        ]
        outside = [row["outside"][name] for row in rows if name in row["outside"]]
        over = f"{statistics.median(outside) * 1000:.2f}" if outside else ""
        table.add_row(name, f"{cost * 1000:.1f}", *(f"{value:.2f}" for value in ratios), over)
    return table


def show_heads(plot: Path | None) -> None:
    """What the shipped heads' own files say about them."""
    check_plot(plot)
    accuracies = {name: read_config(of_kind(name)[0])["accuracies"] for name in HEADS}
    if plot:
        save_accuracies(accuracies, plot)
    print_accuracies(Console(), accuracies)


def assemble(parts: list[Path], folder: Path) -> None:
    """Make a model folder from the pieces of a GGUF file: the embedded model's, or Gemma 3 270M's (docs/design.md)."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        gguf = Path(place) / "model.gguf"
        gguf.write_bytes(b"".join(part.read_bytes() for part in parts))
        gemma = "gemma" in parts[0].name
        bundled._check_digest(gguf, GEMMA if gemma else bundled.describe("smollm2-135m").gguf_sha256)
        bundled._convert_with_transformers(gguf, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "steps", "replay", "clock", "batch", "price", "heads"])
    parser.add_argument("--out", help="JSON lines; finished work in it is not done again")
    parser.add_argument("--plot", type=Path, help="for heads: draw to this file (.png, .svg)")
    parser.add_argument("--data", type=Path, help="Spec-Bench's question file, for steps")
    parser.add_argument("--each", type=int, default=10, help="prompts of each task, for steps")
    parser.add_argument(
        "--only",
        default="",
        help="for steps and clock a method, or the beginning of some methods' names; for equal: heads, exits",
    )
    parser.add_argument("--heads", help="for steps and replay: a folder of block's heads")
    parser.add_argument("--temperature", type=float, default=0.0, help="for steps; each question is a seed")
    parser.add_argument("--repeats", type=int, default=1, help="times over all prompts, for clock, batch and price")
    parser.add_argument("--tokens", type=int, default=0, help="new tokens of each text, for batch (48) and equal (128)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--gguf", type=Path, nargs="+", help="pieces of the embedded model's file, to make --model from"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runtime", default="plain", help="how steps are executed")
    parser.add_argument("--exact", action="store_true", help="exact mode, for batch")
    parser.add_argument("--sized", action="store_true", help="clock: measure the cost curve and size methods by it")
    parser.add_argument(
        "--weights", nargs="+", choices=["float32", "bfloat16", "int8"], default=["float32"], help="for price"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="of a step, for price")
    parser.add_argument("--context", type=int, default=128, help="tokens before the step, for price")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="threads of one worker")
    arguments = parser.parse_args()
    if arguments.what == "heads":
        show_heads(arguments.plot)
        return
    if "int8" in arguments.weights and find_spec("torchao") is None:
        parser.error("--weights int8 needs torchao: pip install --no-deps torchao")
    if arguments.what == "price":
        Console(width=140).print(price_table(arguments))
        return
    if arguments.out is None:
        parser.error(f"{arguments.what} needs --out")
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.gguf:
        assemble(arguments.gguf, Path(arguments.model))
    if arguments.what in ("steps", "replay") and (arguments.data is None or not arguments.data.is_file()):
        parser.error(f"{arguments.what} needs --data with Spec-Bench's question file; {arguments.data} is none")
    given = {name: value for name in ("temperature", "heads") if (value := getattr(arguments, name))}
    if arguments.what == "equal":
        seeds = [None, *SEEDS]
        only = {"only": arguments.only} if arguments.only else {}
        only |= {"new_tokens": arguments.tokens} if arguments.tokens else {}
        units = [{"prompt": index, "seed": seed, **only} for seed in seeds for index in range(len(prompts()))]
        table = equal_table(run(units, equal_unit, arguments))
    elif arguments.what == "steps":
        questions = spec_bench(arguments.data, arguments.each)
        chosen = named(STEPS, arguments.only)
        units = [{**question, "method": name, **given} for name in chosen for question in questions]
        table = steps_table(run(units, steps_unit, arguments))
    elif arguments.what == "replay":
        # What is recycled is what the target says, which is not computed here.
        heads = [name for name in named(STEPS, arguments.only) if name.startswith((*HEADS, "block"))]
        chosen = [name for name in heads if not getattr(STEPS[name], "recycled", 0)]
        more = {"only": arguments.only, "methods": chosen, **given}
        found = run(
            [{**question, **more} for question in spec_bench(arguments.data, arguments.each)], replay_unit, arguments
        )
        table = steps_table([{**row, "method": name, "steps": row["steps"][name]} for name in chosen for row in found])
    elif arguments.what == "batch":
        units = [
            {
                "prompt": 8,
                "repeat": repeat,
                "runtime": arguments.runtime,
                "new_tokens": arguments.tokens or 48,
                **({"exact": True} if arguments.exact else {}),
            }
            for repeat in range(arguments.repeats)
        ]
        table = batch_table(run(units, batch_unit, arguments))
    else:
        units = [
            {
                "prompt": index,
                "repeat": repeat,
                "only": arguments.only,
                "sized": arguments.sized,
                "runtime": arguments.runtime,
            }
            for repeat in range(arguments.repeats)
            for index in range(0, len(prompts()), 5)
        ]
        table = clock_table(run(units, clock_unit, arguments))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
