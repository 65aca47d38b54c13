"""Measurements of the runtime on a CUDA GPU, in bfloat16. Each part prints its table last.

    python scripts/gpu_session.py shape                          a step of a Llama-3.1-8B shape, by rows and context
    python scripts/gpu_session.py wide  --model DIR --data FILE  tokens/s on real text at 7B cost, beside transformers
    python scripts/gpu_session.py kernels [--only products gated attention]  exact mode's kernels: bits and prices
    python scripts/gpu_session.py prices [--model DIR]           what a step costs in exact mode, and without
    python scripts/gpu_session.py exact --model DIR --data FILE  exact mode: same bits with every method, host between
    python scripts/gpu_session.py texts --model DIR --data FILE --together 1  exact mode: same texts with every method
    python scripts/gpu_session.py digest --model DIR --data FILE  of the logits in exact mode, for another machine
    python scripts/gpu_session.py batch --model DIR --data FILE --tokens 64  tokens/s of batches of 1, 4, 16 and 64
    python scripts/gpu_session.py ablation --model DIR --answers DIR  Amphista with parts left out, trained alike
    python scripts/gpu_session.py reproduce --model DIR --data FILE --out DIR --each 1  the papers' tables at 7B cost
    python scripts/gpu_session.py exits --model DIR --answers DIR --prompts FILE --out DIR  exits, mixed and by domain

DIR holds the embedded model (`--gguf PART1 PART2` makes it, as in measure.py), FILE is Spec-Bench's question file. The
7B model is the embedded one widened eightfold: every feature is repeated, so it computes the same function with 7.25
billion weights. Acceptance is real, and so is the cost of a step.

The time to the first token depends on whether Python's modules are compiled, as pip leaves them. Where they are not,
`python -m compileall` does it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gzip
import hashlib
import json
import random
import shlex
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import outpace
from exactness import kernel_checks
from measure import assemble, record, same_bits, spec_bench, written_together
from outpace import (
    AdaDecode,
    Amphista,
    Auto,
    Autoregressive,
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
from outpace.bench.data import read_questions
from outpace.chart import print_accuracies
from outpace.draft import Draft, chain
from outpace.heads import Heads
from outpace.heads.storing import read_config
from outpace.methods.headed import Ready
from outpace.models.attention import without_cudnn
from outpace.models.hf import HFModel
from outpace.models.loading import load
from outpace.pool import Pool
from outpace.reproduce import PAPERS, stem
from outpace.reproduce.lab import Lab, Scale
from outpace.runtime.choose import EXACT_ROWS, engine_for
from outpace.runtime.graphs import FIRST_SPAN, GraphEngine
from outpace.runtime.plain import Engine
from outpace.training.data import Text, read_answers
from outpace.training.run import Texts, make_heads, train
from outpace.training.trainer import Plan, Trainer

CONSOLE = Console(width=150)
NEW_TOKENS = 128
DEVICE, DTYPE = "cuda", torch.bfloat16
BATCHES = (1, 4, 16, 64)
PRICED = (1, 8, 32, 64, 128)  # rows, for prices
LEAST, COMPARED = 8, 32  # of batch: prompts at least, and texts that are compared


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
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(DTYPE)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def widen(model: Any, times: int) -> Any:
    """The same function with every feature repeated: `times`² as many weights in every linear map."""
    config = copy.deepcopy(model.config)
    config.hidden_size *= times
    config.intermediate_size *= times
    config.num_attention_heads *= times
    config.num_key_value_heads *= times
    config.tie_word_embeddings = False
    torch.set_default_dtype(DTYPE)
    with torch.device(DEVICE):
        wide = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    narrow = {name: weight.to(DEVICE, DTYPE) for name, weight in model.state_dict().items()}
    narrow.setdefault("lm_head.weight", narrow["model.embed_tokens.weight"])
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            small = narrow[name]
            if small.dim() == 1:
                weight.copy_(small.repeat(times))
            elif "embed_tokens" in name:
                weight.copy_(small.repeat(1, times))
            elif "lm_head" in name:
                weight.copy_(small.repeat(1, times) / times)
            else:
                weight.copy_(small.repeat(times, times) / times)
    wide.generation_config = model.generation_config
    return wide


def comb(root: int, rows: int) -> Draft:
    """Branches of four rows below the root."""
    parents = [-1, *(0 if row % 4 == 1 else row - 1 for row in range(1, rows))]
    return Draft((root, *range(1, rows)), tuple(parents), rows, ("",) * rows)


def replay_time(engine: GraphEngine, rows: int, length: int, repeats: int = 20) -> float:
    """Median milliseconds of a graph alone, by the GPU's clock."""
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


def score_time(engine: Engine, rows: int, length: int, repeats: int = 20) -> float:
    """Median milliseconds of `score` with its picks, by the wall clock."""
    with engine.pool.sequence([token % 1000 for token in range(length + 1)]) as sequence:
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            best = engine.score(sequence, comb(sequence.tokens[-1], rows)).best
            times.append(time.perf_counter() - start)
            assert len(best) == rows
            behind = len(sequence.drafted) - rows
            sequence.slots += sequence.drafted[:behind]
            engine.pool.free(sequence.drafted[behind:])
            sequence.drafted = []
    return statistics.median(times[2:]) * 1000


def profile(engine: GraphEngine, rows: int, length: int) -> None:
    """What each kernel adds to a step. One that starts early does not count until the one before it is done."""
    graph = engine._graph(next(size for size in engine.sizes if size >= rows), length)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        graph._graph.replay()
        torch.cuda.synchronize()
    added: dict[str, list[float]] = defaultdict(list)
    done = 0.0
    for event in sorted(prof.events(), key=lambda event: event.time_range.end):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            added[event.name].append(event.time_range.end - max(done, event.time_range.start))
            done = event.time_range.end
    table = Table("kernel", "times", "µs each", "µs")
    for name, times in sorted(added.items(), key=lambda item: -sum(item[1]))[:16]:
        table.add_row(name[:60], str(len(times)), f"{statistics.mean(times):.1f}", f"{sum(times):.0f}")
    CONSOLE.print(f"the kernels of a step of {rows} rows", table)


@contextmanager
def samples(seconds: Counter[tuple[str, str]], every: float = 0.01) -> Iterator[None]:
    """Meanwhile, count the seconds that this thread spends, by function of ours and by library that works for it."""
    thread, stopped = threading.get_ident(), threading.Event()

    def take() -> None:
        last = time.perf_counter()
        while not stopped.wait(every):
            now = time.perf_counter()
            seconds[whereabouts(sys._current_frames()[thread])] += now - last
            last = now

    taker = threading.Thread(target=take)
    taker.start()
    try:
        yield
    finally:
        stopped.set()
        taker.join()


OURS = str(Path(outpace.__file__).parent)
LIBRARIES = (
    *("<frozen importlib", "triton/", "torch/_inductor/", "torch/_functorch/", "torch/_dynamo/"),
    *("torch/", "transformers/"),
)


def whereabouts(frame: Any) -> tuple[str, str]:
    """The innermost function of ours in a stack of frames, and the first of LIBRARIES that is at work within it."""
    inner: list[str] = []
    while frame is not None and not (file := frame.f_code.co_filename).startswith(OURS):
        inner.append(file.rpartition("-packages/")[2])
        frame = frame.f_back
    library = next((name for name in LIBRARIES if any(file.startswith(name) for file in inner)), "")
    return "" if frame is None else f"{Path(file).stem}.{frame.f_code.co_name}", library


def shape(arguments: argparse.Namespace) -> None:
    model = llama_8b()
    before = torch.cuda.memory_allocated()
    spent: Counter[tuple[str, str]] = Counter()
    start = time.perf_counter()
    with samples(spent) if arguments.samples else nullcontext():
        adapted = HFModel(model)
        adapted.fuse()
        adapted.replace_products()
        engine = GraphEngine(adapted, capacity=16384)
        with engine.pool.sequence(list(range(100))) as sequence:
            assert engine.score(sequence, chain(99, (), "")).best
    first = time.perf_counter() - start
    for (function, library), seconds in spent.most_common(24):
        print(f"{seconds:6.2f} s  {function}  {library}")
    table = Table(
        "rows", "context", "graph ms", "rows / 1 row", "context / 1024", "with host ms", title="8B shape, bfloat16"
    )
    cost: dict[tuple[int, int], float] = {}
    for length in (1024, 8192):
        for rows in (1, 8, 32, 64, 128):
            wall = score_time(engine, rows, length)
            cost[rows, length] = graph = replay_time(engine, rows, length)
            by_rows, by_context = graph / cost[1, length], graph / cost[rows, 1024]
            table.add_row(*map(str, (rows, length)), *(f"{x:.2f}" for x in (graph, by_rows, by_context, wall)))
    for rows in (1, 32, 128):
        profile(engine, rows, 1024)
    graphs = (torch.cuda.memory_allocated() - before - engine.pool.bytes) / 2**20
    print(f"first token {first:.1f} s after load, compilation and capture included")
    print(f"pool {engine.pool.bytes / 2**20:.0f} MiB for {engine.pool.capacity} slots; graphs {graphs:.0f} MiB")
    CONSOLE.print(table)


def load_wide(arguments: argparse.Namespace) -> tuple[Any, Any]:
    if arguments.gguf:
        assemble(arguments.gguf, Path(arguments.model))
    small = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    return widen(small, arguments.times), AutoTokenizer.from_pretrained(arguments.model)


def widen_heads(heads: Heads, times: int) -> Heads:
    """Heads for the widened model, that guess the same."""
    shape = replace(
        heads.shape,
        width=heads.shape.width * times,
        heads=heads.shape.heads * times,
        key_heads=heads.shape.key_heads * times,
        inner=heads.shape.inner * times,
    )
    wide = type(heads)(heads.settings, shape).to(DEVICE, DTYPE)
    narrow = heads.state_dict()
    for name, weight in wide.state_dict().items():
        small = narrow[name]
        if name in ("ids", "doubt"):  # of tokens; of numbers that are no states
            weight.copy_(small)
        elif name == "doubt_state":
            weight.copy_(small.repeat(times) / times)
        elif name == "memory.weight":  # keys and values of several layers, each of all heads
            parts = small.unflatten(0, (-1, heads.shape.key_heads * heads.shape.head_size))
            weight.copy_(parts.repeat(1, times, times).flatten(0, 1) / times)
        elif name == "pair_out.weight":
            weight.copy_(small.repeat(times, 1))
        elif name.startswith(("pair_", "outputs")):
            weight.copy_(small.repeat(1, times) / times)
        elif small.dim() == 1 or name == "positions":
            weight.copy_(small.repeat(*[1] * (small.dim() - 1), times))
        elif "from_tokens" in name or name == "context.weight":  # several side by side, each as wide as a state
            parts = small.unflatten(1, (-1, heads.shape.width))
            weight.copy_(parts.repeat(times, 1, times).flatten(1) / times)
        else:
            weight.copy_(small.repeat(times, times) / times)
    return wide.eval()


def with_heads(small: Any, times: int) -> dict[str, Method]:
    """The methods whose heads come with Outpace, for the widened model."""
    found: dict[str, Method] = {}
    adapted = HFModel(small.to(DEVICE, DTYPE))
    exits: Any = AdaDecode().prepare(adapted)
    found |= with_exits("adadecode", widen_ready(exits.heads, times), exits.exits)
    found["self-speculative (20)"] = SelfSpeculative(exit=20, length=3)
    for kind in (Medusa, Hydra, Amphista):
        ready: Any = kind().prepare(adapted)
        heads = widen_heads(ready.heads.heads, times)
        for rows in (16, 64):
            found[f"{kind.name} ({rows} rows)"] = kind(heads=heads, rows=rows, lookup=0.0, priced=False)
            found[f"{kind.name} with lookup ({rows} rows)"] = kind(heads=heads, rows=rows, priced=False)
        found[f"{kind.name} with lookup, priced"] = kind(heads=heads, rows=64)
    return found


def widen_ready(ready: Ready, times: int) -> Ready:
    return ready._replace(heads=widen_heads(ready.heads, times))


def with_exits(name: str, ready: Ready, layers: tuple[int, ...]) -> dict[str, Method]:
    """AdaDecode with widened exits: calibrated, and with the paper's threshold at three places."""
    fixed = {
        f"{name} (γ {gamma})": AdaDecode(heads=ready, exits=layers, control="fixed", gamma=gamma)
        for gamma in (0.5, 0.75, 0.9)
    }
    return {name: AdaDecode(heads=ready, exits=layers), **fixed}


def methods() -> dict[str, Method]:
    return {
        "plain": Autoregressive(),
        "jacobi (16)": Jacobi(),
        "prompt-lookup (8 rows)": PromptLookup(rows=8, priced=False),
        "prompt-lookup (64 rows)": PromptLookup(priced=False),
        "prompt-lookup, priced": PromptLookup(rows=128),
        "lookahead (4, 3, 4)": Lookahead(window=4, ngram=3, guesses=4),
        "lookahead (7, 4, 7)": Lookahead(window=7, ngram=4, guesses=7),
        "lookahead (15, 5, 15)": Lookahead(),
    }


def wide(arguments: argparse.Namespace) -> None:
    """All methods and transformers on each prompt in turn; tokens/s is all tokens over all seconds.

    transformers runs as it comes and without cuDNN's attention; compared is the faster.
    """
    start = time.perf_counter()
    model, tokenizer = load_wide(arguments)
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"widened to {weights / 1e9:.2f} billion weights in {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    decoder = Decoder(model, tokenizer)
    decoder.generate("Hello", max_new_tokens=1, method=Autoregressive())
    print(f"first token {time.perf_counter() - start:.1f} s after load, compilation and capture included")
    curve = calibrate(decoder)
    for context, costs in zip(curve.contexts, curve.seconds, strict=True):
        print(
            context,
            "tokens of context:",
            " ".join(f"{n}:{c * 1000:.2f}" for n, c in zip(curve.rows, costs, strict=True)),
        )
    print("layers", {name: round(1000 * cost, 2) for name, cost in curve.segments.items()})
    print("drafting", {name: round(1000 * cost, 2) for name, cost in curve.drafting.items()})
    runners: dict[str, Callable[[list[int]], Run]] = {}
    small = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    for name, method in {**methods(), **with_heads(small, arguments.times)}.items():
        if wanted(name, arguments.only):
            ready = decoder.prepare(method)
            runners[name] = lambda prompt, ready=ready: ours(decoder, ready, prompt)
    for name, options in (("generate", {}), ("prompt lookup", {"prompt_lookup_num_tokens": 10})):
        for without, attention in (("", nullcontext), (", no cuDNN", without_cudnn)):
            if wanted(title := f"transformers {name}{without}", arguments.only):
                runners[title] = functools.partial(theirs, model, attention=attention, **options)
    questions = spec_bench(arguments.data, arguments.each)
    seconds, tokens, steps, same, drafting, verifying = ({name: [] for name in runners} for _ in range(6))
    warm_up(decoder, [run for name, run in runners.items() if not name.startswith("transformers")], questions)
    for number, question in enumerate(questions):
        prompt = decoder.encode(question["text"])
        shared = number % arguments.every == 0  # transformers takes many times as long, so it runs on some prompts only
        plain: list[int] = []
        for name, run in runners.items():
            if name.startswith("transformers") and not shared:
                continue
            start = time.perf_counter()
            found = run(prompt)
            torch.cuda.synchronize()  # plain decoding leaves a step that it began ahead
            seconds[name].append(time.perf_counter() - start)
            plain = plain or found.tokens
            tokens[name].append(len(found.tokens))
            steps[name].append(found.steps)
            same[name].append(found.tokens == plain)
            drafting[name].append(found.drafting)
            verifying[name].append(found.verifying)
        speed = {name: sum(tokens[name]) / sum(seconds[name]) for name in runners}
        print(number, {name: round(value, 1) for name, value in speed.items()}, flush=True)
    table = Table(
        *("method", "tokens/s", "plain = 1", "generate = 1", "tokens/step", "ms/step"),
        *("drafting", "verifying", "same text as plain"),
    )
    step = arguments.every
    base = {
        name: speed[name] if name.startswith("transformers") else sum(tokens[name][::step]) / sum(seconds[name][::step])
        for name in runners
    }
    theirs_best = max((value for name, value in base.items() if name.startswith("transformers generate")), default=0.0)
    for name in runners:
        count, whole = sum(steps[name]), sum(seconds[name])
        extra = ["", "", "", ""]
        if count:
            extra = [f"{sum(tokens[name]) / count:.2f}", f"{whole / count * 1000:.2f}"]
            extra += [f"{sum(part[name]) / whole:.0%}" for part in (drafting, verifying)]
        table.add_row(
            name,
            f"{speed[name]:.1f}",
            f"{speed[name] / speed['plain']:.2f}",
            f"{base[name] / theirs_best:.2f}" if theirs_best else "",
            *extra,
            f"{sum(same[name])} of {len(same[name])}",
        )
    CONSOLE.print(f"{len(questions)} prompts; transformers on one of {step}, and compared on those", table)


def wanted(name: str, only: list[str] | None) -> bool:
    return name == "plain" or not only or name.startswith(tuple(only))


def warm_up(decoder: Decoder, runs: list[Callable[[list[int]], Run]], questions: list[dict[str, Any]]) -> None:
    """Capture the graphs that a run may need: of all sizes, and those of heads and exits on some prompts."""
    engine = decoder.engine
    assert isinstance(engine, GraphEngine)
    prompts = sorted((decoder.encode(question["text"]) for question in questions), key=len)
    for length in range(0, len(prompts[-1]) + NEW_TOKENS, FIRST_SPAN):
        for rows in engine.sizes:
            engine._graph(rows, length + 1)
    for prompt in prompts[:: max(1, len(prompts) // 4)] + prompts[-1:]:
        for run in runs:
            run(prompt)


class Run(NamedTuple):
    """One text, and where the time went: the rest is neither."""

    tokens: list[int]
    steps: int
    drafting: float
    verifying: float


def ours(decoder: Decoder, method: Method, prompt: list[int]) -> Run:
    tokens, steps, drafting, verifying = [], 0, 0.0, 0.0
    for step in decoder.stream(prompt, method=method, max_new_tokens=NEW_TOKENS):
        tokens += step.tokens
        steps += 1
        spent = step.seconds  # a whole step in one graph is all "score"
        drafting += spent.get("draft", 0.0) + spent.get("learn", 0.0)
        verifying += spent["score"] + spent.get("verify", 0.0)  # the second waits for what the first began
    return Run(tokens, steps, drafting, verifying)


def theirs(model: Any, prompt: list[int], attention: Callable[[], AbstractContextManager[None]], **options: Any) -> Run:
    ids = torch.tensor([prompt], device=DEVICE)
    mask = torch.ones_like(ids)
    with attention():
        output = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return Run(output[0, ids.shape[1] :].tolist(), 0, 0.0, 0.0)


def exact(arguments: argparse.Namespace) -> None:
    """Every method's text and logits against plain decoding's, bit for bit, in exact mode; greedy and sampled."""
    model, tokenizer = load_wide(arguments)
    decoder = Decoder(model, tokenizer, exact=True)
    small = HFModel(first_layers(model, 3))
    tried: dict[str, Method] = {
        "jacobi": Jacobi(),
        "prompt-lookup": PromptLookup(rows=32, priced=False),
        "lookahead": Lookahead(window=5, ngram=4, guesses=5),
        "draft-model": DraftModel(model=small, length=4),
    }
    own = with_heads(AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32), arguments.times)
    heads = ("medusa (16 rows)", "hydra (16 rows)", "amphista with lookup (16 rows)")
    tried |= {name: own[name] for name in (*heads, "adadecode (γ 0.75)", "self-speculative (20)")}
    questions = spec_bench(arguments.data, arguments.each)
    ready = {name: decoder.prepare(method) for name, method in tried.items()}
    equal = {name: [0] * 4 for name in tried}
    for number, question in enumerate(questions):
        prompt = decoder.encode(question["text"])
        for place, sampling in enumerate((Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=number))):
            tokens, logits = recorded(decoder, Autoregressive(), prompt, sampling, arguments.tokens)
            for name, method in ready.items():
                found, rows = recorded(decoder, method, prompt, sampling, arguments.tokens)
                equal[name][2 * place] += found == tokens
                equal[name][2 * place + 1] += same_bits(rows, logits)
        print(number, equal, flush=True)
    table = Table("method", "greedy: same text", "same bits in all logits", "sampled: same text", "same bits")
    for name, counts in equal.items():
        table.add_row(name, *(f"{count} of {len(questions)}" for count in counts))
    print(decoder.engine.name)
    CONSOLE.print(table)


def prices(arguments: argparse.Namespace) -> None:
    """A step's graph in exact mode and without: both in one process, replayed in turn. 8B, and 7B cost with --model."""
    models = {"8B shape": llama_8b} if arguments.each else {}
    if arguments.model:
        models["7B cost"] = lambda: load_wide(arguments)[0]
    for name, make in models.items():
        model = make()
        fast = engine_for(HFModel(model), "graphs", exact=False, memory=0.2)
        exactly = engine_for(HFModel(model), exact=True, memory=0.2)
        print(f"{name}: {exactly.name}", flush=True)
        table = Table("tokens", *(f"{rows} rows" for rows in PRICED), title=f"{name}: ms fast, exact, price")
        for length in (256, 1024, 8192):
            cells = []
            for rows in PRICED:
                for engine in (fast, exactly):
                    score_time(engine, rows, length, repeats=1)
                times = [[replay_time(engine, rows, length, 1) for engine in (fast, exactly)] for _ in range(15)]
                before, after = (statistics.median(kind) for kind in zip(*times, strict=True))
                cells.append(f"{before:.2f}, {after:.2f}, {after / before - 1:+.1%}")
            table.add_row(str(length), *cells)
            print(length, cells, flush=True)
        CONSOLE.print(table)
        del model, fast, exactly, engine
        torch.cuda.empty_cache()


def texts(arguments: argparse.Namespace) -> None:
    """Every method's texts against plain decoding's one at a time, in exact mode; --together at the same time.

    With several, texts join at random times, and every fifth is written twice: one of the two is cancelled on its way.
    """
    model, tokenizer = load_wide(arguments)
    decoder = Decoder(model, tokenizer, exact=True, method=Autoregressive())
    print(decoder.engine.name, flush=True)
    own = with_heads(AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32), arguments.times)
    tried: dict[str, Method] = {
        "plain": Autoregressive(),
        "jacobi": Jacobi(),
        "prompt-lookup": PromptLookup(priced=False),
        "lookahead": Lookahead(window=7, ngram=4, guesses=7),
        "draft-model": DraftModel(model=HFModel(first_layers(model, 3)), length=4),
        "auto": Auto(heads=False),
        **{name: own[name] for name in ("medusa (16 rows)", "hydra (16 rows)", "amphista with lookup (64 rows)")},
        **{name: own[name] for name in ("adadecode (γ 0.75)", "self-speculative (20)")},
    }
    tried = {
        name: method for name, method in tried.items() if not arguments.only or name.startswith(tuple(arguments.only))
    }
    prompts = [decoder.encode(question["text"]) for question in spec_bench(arguments.data, arguments.each)]
    samplings = {
        "greedy": [Sampling()] * len(prompts),
        "T = 0.8": [Sampling(temperature=0.8, seed=seed) for seed in range(len(prompts))],
    }
    expected = {
        kind: written_together(decoder, Autoregressive(), prompts, 1, arguments.tokens, given)[0]
        for kind, given in samplings.items()
    }
    table = Table("method", "texts together", *samplings)
    for most in arguments.together:
        for name, method in tried.items():
            ready, cells = decoder.prepare(method), []
            for kind, given in samplings.items():
                start = time.perf_counter()
                found = joined_at_random(decoder, ready, prompts, most, arguments.tokens, given)
                same = sum(text == known for text, known in zip(found, expected[kind], strict=True))
                cells.append(f"{same} of {len(prompts)}, {time.perf_counter() - start:.0f} s")
            table.add_row(name, str(most), *cells)
            print(name, most, cells, flush=True)
    CONSOLE.print(table)


def joined_at_random(
    decoder: Decoder, method: Method, prompts: list[list[int]], most: int, tokens: int, samplings: list[Sampling]
) -> list[list[int]]:
    """What is written after each prompt."""
    rng, batch = random.Random(most), decoder.batch(most)
    waiting = [*range(len(prompts)), *(range(0, len(prompts), 5) if most > 1 else ())]
    if most > 1:
        rng.shuffle(waiting)
    written: dict[int, list[int]] = {}
    whose: dict[int, int] = {}
    left: dict[int, int] = {}  # steps until a text is cancelled

    def join() -> None:
        place = waiting.pop()
        number = batch.add(prompts[place], method=method, max_new_tokens=tokens, sampling=samplings[place])
        if place in whose.values():
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


def digest(arguments: argparse.Namespace) -> None:
    """A digest of the logits of plain decoding in exact mode; and whether lookahead has the same."""
    model, tokenizer = load_wide(arguments)
    decoder = Decoder(model, tokenizer, exact=True, method=Autoregressive())
    print(decoder.engine.name, torch.cuda.get_device_name(), torch.__version__, flush=True)
    found: dict[str, list[str]] = {"plain": [], "lookahead": []}
    for question in spec_bench(arguments.data, 1):
        prompt = decoder.encode(question["text"])
        for name, method in (("plain", Autoregressive()), ("lookahead", Lookahead())):
            _, rows = recorded(decoder, method, prompt, Sampling(), 32)
            data = torch.stack(rows).float().cpu().contiguous().numpy().tobytes()
            found[name].append(hashlib.sha256(data).hexdigest())
    print("lookahead has the same bits:", found["lookahead"] == found["plain"])
    print("digest:", hashlib.sha256("".join(found["plain"]).encode()).hexdigest())


def recorded(
    decoder: Decoder, method: Method, prompt: list[int], sampling: Sampling, tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """What is written, and the logits that each token was chosen from."""
    rows: list[torch.Tensor] = []
    watched = replace(sampling, processors=(functools.partial(record, rows),))
    return decoder.generate(prompt, method=method, sampling=watched, max_new_tokens=tokens).token_ids, rows


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without auto-embedding": {"auto_embedding": False},
    "without positions": {"positions": False},
    "one stage": {"stages": 1},
    "no adaptation": {"stages": 0},
}


def ablation(arguments: argparse.Namespace) -> None:
    """Amphista and what is left when a part is taken away, trained on the same batches; held-out accuracies."""
    model, tokenizer = load(arguments.model, DTYPE, DEVICE)
    decoder = Decoder(model, tokenizer, runtime="plain")
    torch.manual_seed(0)
    ends = decoder.model.ends()
    heads = {name: make_heads(model, ends, "amphista", settings) for name, settings in VARIANTS.items()}
    folders = sorted({file.parent for file in Path(arguments.answers).glob("round-*/answers-*")})
    texts = [text for folder in folders for text in read_answers(folder)]
    plan = Plan(minutes=arguments.minutes, tokens=arguments.batch_tokens)
    trainer = Trainer(model, decoder.model.norm, ends, heads, plan)
    trainer.run(texts)
    found = trainer.accuracies(read_answers(Path(arguments.answers) / "held-out"))
    print(f"{trainer.progress.update} updates of {plan.tokens} tokens, {trainer.progress.seconds:.0f} s")
    for name, part in heads.items():
        print(f"{name}: {sum(weight.numel() for weight in part.parameters()) / 1e6:.1f} million weights")
    print_accuracies(CONSOLE, {name: part.tolist() for name, part in found.items()})


def reproduce(arguments: argparse.Namespace) -> None:
    """`outpace reproduce` for each paper, on the widened model with widened heads. Its pages go to --out."""
    model, tokenizer = load_wide(arguments)
    decoder = Decoder(model, tokenizer, Autoregressive(), exact=arguments.exact)
    if arguments.calibrate:
        calibrate(decoder)
    small = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    adapted = HFModel(small.to(DEVICE, DTYPE))
    given = dict(text.split("=", 1) for text in arguments.heads)
    files = [arguments.data, *arguments.more]
    questions = read_questions(*files)
    for paper in arguments.papers:
        start = time.perf_counter()
        name = stem(paper, f"smollm2-135m-times-{arguments.times}", decoder)
        lab = Lab(
            *(decoder, questions, Scale(arguments.each, arguments.tokens), arguments.out / "runs" / name),
            model=model,
            data=", ".join(file.name for file in files),
            every=arguments.every,
            show=lambda share, text="": print(f"{share:.0%} {text}", flush=True),
        )
        heads = heads_for(paper, adapted, arguments.times, given)
        more: dict[str, Any] = {"heads": heads} if heads else {}
        if paper == "amphista" and arguments.exact:
            more["rows"] = EXACT_ROWS
        findings = PAPERS[paper](lab, **more)
        page = findings.save(arguments.out, name, shlex.join(["python", *sys.argv]))
        print(page.read_text())
        print(f"{paper}: {time.perf_counter() - start:.0f} s")


def heads_for(paper: str, adapted: HFModel, times: int, given: dict[str, str]) -> dict[str, Ready]:
    """Heads by name for a paper: those that come with Outpace or folders in their place, and variants, all widened."""
    kinds: dict[str, Any] = {
        "lookahead": {},
        "adadecode": {"exits": AdaDecode},
        "amphista": {"medusa": Medusa, "hydra": Hydra, "amphista": Amphista},
    }[paper]
    found: dict[str, Any] = {name: kind(heads=given.get(name)) for name, kind in kinds.items()}
    for name, folder in given.items():
        kind = kinds.get(read_config(Path(folder))["kind"])
        if kind is not None and name not in kinds:
            found[name] = kind(heads=folder)
    return {name: widen_ready(method.prepare(adapted).heads, times) for name, method in found.items()}


EXITS = "4,8,12,16,20,24,28"


def exits(arguments: argparse.Namespace) -> None:
    """Exits with both orders of norm and T, and with output matrices of their own; then for one domain alone.

    --minutes is the time for a domain or for output matrices; the mixed ones get three times as long, the orders half.
    What is printed is their top-1 accuracy on held-out greedy answers.
    """
    model, tokenizer = load(arguments.model, DTYPE, DEVICE)
    decoder = Decoder(model, tokenizer, runtime="plain", method="autoregressive")
    ends = decoder.model.ends()
    folders = sorted({file.parent for file in Path(arguments.answers).glob("round-*/answers-*")})
    texts = [text for folder in folders for text in read_answers(folder)]
    held_out = read_answers(Path(arguments.answers) / "held-out")
    tasks = tasks_of(arguments.prompts, decoder)
    table = Table("exits", "updates", "held out", *EXITS.split(","))

    def only(given: list[Text], task: str) -> list[Text]:
        return [text for text in given if task in ("all", tasks.get(tuple(text.tokens[: text.prompt].tolist())))]

    for name, task, settings, rate, minutes in (
        ("norm first", "all", {"norm": "first"}, 1e-2, 0.5),
        ("norm last", "all", {"norm": "last"}, 1e-2, 0.5),
        ("norm first, rate 3e-3", "all", {"norm": "first"}, 3e-3, 0.5),
        ("mixed", "all", {"norm": arguments.norm}, arguments.rate, 3.0),
        ("math", "math", {"norm": arguments.norm}, arguments.rate, 1.0),
        ("code", "code", {"norm": arguments.norm}, arguments.rate, 1.0),
        ("full", "all", {"output": "full"}, arguments.rate, 1.0),
    ):
        if arguments.only and name not in arguments.only:
            continue
        heads = {"exits": make_heads(model, ends, "exits", {"layers": EXITS, **settings})}
        plan = Plan(minutes=minutes * arguments.minutes, rate=rate)
        out = Path(arguments.out) / name
        train(model, decoder.model, heads, Texts(only(texts, task), only(held_out, task), []), plan, out)
        trained = Trainer(model, decoder.model.norm, ends, heads, plan)
        updates = json.loads((out / "exits" / "config.json").read_text())["training"]["updates"]
        for part in ("all", "math", "code"):
            found = trained.accuracies(only(held_out, part))["exits"][:, 0].tolist()
            table.add_row(name, str(updates), part, *(f"{share:.3f}" for share in found))
        CONSOLE.print(table)


def tasks_of(prompts: Path, decoder: Decoder) -> dict[tuple[int, ...], str]:
    """The task of each prompt, by its tokens."""
    with gzip.open(prompts, "rt") as file:
        entries = [json.loads(line) for line in file]
    return {tuple(decoder.encode(entry["prompt"])): entry["task"] for entry in entries}


def batch(arguments: argparse.Namespace) -> None:
    """Texts of one method, so many at the same time; texts join as others leave. Tokens/s are those of all texts."""
    model, tokenizer = load_wide(arguments)
    decoder = Decoder(model, tokenizer, method=Autoregressive())
    if isinstance(decoder.engine, GraphEngine):  # room for all texts: a pool that grows has its graphs captured anew
        decoder.engine.pool = Pool(decoder.model.device, capacity=arguments.slots)
    small = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    heads = with_heads(small, arguments.times)
    chosen = {
        "plain": Autoregressive(),
        "prompt-lookup (8 rows)": PromptLookup(rows=8, priced=False),
        "lookahead (4, 3, 4)": Lookahead(window=4, ngram=3, guesses=4),
        "amphista with lookup (16 rows)": heads["amphista with lookup (16 rows)"],
    }
    ready = {name: decoder.prepare(method) for name, method in chosen.items()}
    questions = spec_bench(arguments.data, 20)
    mixed = [question for first in range(20) for question in questions[first::20]]  # the tasks in turn
    prompts = [decoder.encode(question["text"]) for question in mixed]
    prompts = [prompt for prompt in prompts if len(prompt) + arguments.tokens < FIRST_SPAN][: max(BATCHES)]
    alone, _ = written_together(decoder, ready["plain"], prompts[:COMPARED], 1, arguments.tokens)
    table = Table("method", "texts together", "tokens/s", "plain alone = 1", "same text as plain alone")
    base = 0.0
    for most in BATCHES:
        for name, method in ready.items():
            for _ in range(2):  # the first time graphs are captured, and it is not counted
                written, seconds = written_together(
                    decoder, method, prompts[: max(LEAST, most)], most, arguments.tokens
                )
            speed = sum(map(len, written)) / seconds
            base = base or speed
            same = [text == expected for text, expected in zip(written, alone, strict=False)]
            table.add_row(name, str(most), f"{speed:.1f}", f"{speed / base:.2f}", f"{sum(same)} of {len(same)}")
    CONSOLE.print(f"{len(prompts)} prompts, {arguments.tokens} new tokens", table)


def first_layers(model: Any, count: int) -> Any:
    """A draft model: the target's own first layers, under its own head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    torch.set_default_dtype(DTYPE)
    with torch.device(DEVICE):
        small = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    small.load_state_dict(model.state_dict(), strict=False)
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=[
            "shape",
            "wide",
            "kernels",
            "prices",
            "exact",
            "texts",
            "digest",
            "batch",
            "ablation",
            "exits",
            "reproduce",
        ],
    )
    parser.add_argument("--model", help="the embedded model's folder")
    parser.add_argument(
        "--gguf", type=Path, nargs="+", help="pieces of the embedded model's file, to make --model from"
    )
    parser.add_argument("--data", type=Path, help="Spec-Bench's question file")
    parser.add_argument(
        "--each", type=int, default=4, help="prompts of each of the six tasks; for prices 0: not the 8B shape"
    )
    parser.add_argument("--every", type=int, default=4, help="transformers runs on every so many prompts")
    parser.add_argument(
        "--only", nargs="+", help="for wide: plain, and what begins so (transformers too); for kernels: which"
    )
    parser.add_argument("--together", type=int, nargs="+", default=[1], help="for texts: so many at the same time")
    parser.add_argument("--samples", action="store_true", help="for shape: say where the time to the first token goes")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="new tokens, for exact, batch and reproduce")
    parser.add_argument("--slots", type=int, default=65536, help="of the pool, for batch")
    parser.add_argument("--answers", help="what `outpace train` kept in --answers, for ablation and exits")
    parser.add_argument("--prompts", type=Path, help="the prompts (.jsonl.gz) of these answers, for exits")
    parser.add_argument("--out", type=Path, help="a folder, for exits and reproduce")
    parser.add_argument("--norm", default="first", help="of the exits that are trained longest")
    parser.add_argument("--rate", type=float, default=1e-2, help="the same")
    parser.add_argument("--minutes", type=float, default=1.0, help="of training, for ablation and exits")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="of an update, for ablation")
    parser.add_argument("--times", type=int, default=8, help="how many times as wide")
    parser.add_argument("--papers", nargs="+", choices=list(PAPERS), default=list(PAPERS), help="for reproduce")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="further files of questions, for reproduce")
    parser.add_argument(
        "--heads", nargs="*", default=[], metavar="NAME=FOLDER", help="for reproduce, as for `outpace reproduce`"
    )
    parser.add_argument("--exact", action="store_true", help="for reproduce: exact mode")
    parser.add_argument("--calibrate", action="store_true", help="for reproduce: measure costs first")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here")
    if arguments.what in ("wide", "exact", "texts", "digest", "batch", "reproduce") and not (
        arguments.model and arguments.data and arguments.data.is_file()
    ):
        parser.error(f"{arguments.what} needs --model and --data")
    if arguments.what in ("ablation", "exits") and not (arguments.model and arguments.answers):
        parser.error(f"{arguments.what} needs --model and --answers")
    if arguments.what in ("exits", "reproduce") and not arguments.out:
        parser.error(f"{arguments.what} needs --out")
    if arguments.what == "exits" and not arguments.prompts:
        parser.error("exits needs --prompts")
    parts = (shape, wide, prices, exact, texts, digest, batch, ablation, exits, reproduce)
    {"kernels": kernel_checks, **{part.__name__: part for part in parts}}[arguments.what](arguments)


if __name__ == "__main__":
    main()
