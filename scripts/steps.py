"""What stands between the steps: tokens/s and milliseconds of whole steps on a CUDA GPU, in bfloat16.

    python scripts/steps.py one      --model DIR --data FILE --times 8   one text: where a step's time goes, by method
    python scripts/steps.py together --model DIR --data FILE --times 8   4, 16 and 64 texts at the same time
    python scripts/steps.py auto     --model DIR --data FILE --times 8   `auto` beside plain decoding, by task
    python scripts/steps.py exact    --model DIR --data FILE --times 8   `auto` in exact mode beside fast mode
    python scripts/steps.py sampling --model DIR --data FILE --times 8   plain sampling beside plain greedy decoding
    python scripts/steps.py ablate   --model DIR --data FILE --times 1   tokens per step, without one source or another

DIR and FILE are as in gpu_session.py. `--times 8` widens the embedded model to 7.25 billion weights; 1 leaves it as it
is, and then it may be any model. `--host` also runs every method the other way, with the host between draft, score and
verdict. All entries take turns on each prompt, in one process.

Without a GPU there is `auto` alone, in float32: `--times 1 --runtime plain` or compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_session import DTYPE, assemble, widen, widen_ready
from measure import spec_bench, written_together
from outpace import Amphista, Auto, Autoregressive, Block, Decoder, Lookahead, Medusa, Method, PromptLookup, Sampling
from outpace.errors import OutpaceWarning
from outpace.methods.auto import FLOOR, MEMORY, NODES
from outpace.methods.headed import REACH, Ready, load_heads, shipped
from outpace.models.hf import HFModel
from outpace.runtime import graphs
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.program import Program
from outpace.sources.base import Plan, Source
from outpace.sources.history import PLACES, History
from outpace.sources.recycle import Recycle
from outpace.sources.window import Settings, Window
from outpace.step.chances import Chances

CONSOLE = Console(width=150)
READING = 4.48e12  # bytes a second that an H200 reads


def prepare(arguments: argparse.Namespace) -> tuple[Decoder, dict[str, Method], dict[str, float]]:
    """A decoder, the methods, and for each the milliseconds that its heads' weights take to be read."""
    if arguments.gguf:
        assemble(arguments.gguf, Path(arguments.model))
    small = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if not torch.cuda.is_available():
        decoder = Decoder(small, tokenizer, Autoregressive(), runtime=arguments.runtime)
        free = {"plain": Autoregressive(), "auto": Auto(), "auto without heads": Auto(heads=False)}
        return decoder, {name: decoder.prepare(method) for name, method in free.items()}, {}
    narrow = HFModel(small, check=False)
    heads: dict[str, Ready] = {}
    for kind in ("medusa", "amphista", "block"):
        given = arguments.block if kind == "block" else None
        ready = load_heads(kind, given, narrow) if given else shipped(kind, narrow)
        if ready is not None:
            heads[kind] = widen_ready(ready, arguments.times)
    model = widen(small, arguments.times) if arguments.times > 1 else small.to("cuda", DTYPE)
    start = time.perf_counter()
    decoder = Decoder(model, tokenizer, Autoregressive(), exact=arguments.exact, memory=arguments.memory)
    decoder.generate("Hello", max_new_tokens=1, raw=not tokenizer.chat_template)
    print(decoder.engine.name)
    print(f"first token {time.perf_counter() - start:.1f} s after load, compilation and capture included")
    chosen: dict[str, Method] = {
        "plain": Autoregressive(),
        "prompt-lookup (32 rows)": PromptLookup(rows=32, priced=False),
        "lookahead (7, 4, 7)": Lookahead(window=7, ngram=4, guesses=7),
    }
    if heads:
        chosen |= {
            "medusa with lookup (64 rows)": Medusa(heads=heads["medusa"], rows=64, priced=False),
            "amphista with lookup (32 rows)": Amphista(heads=heads["amphista"], rows=32, priced=False),
            "amphista with lookup (64 rows)": Amphista(heads=heads["amphista"], rows=64, priced=False),
            "amphista with lookup, recycled": Amphista(heads=heads["amphista"], rows=64, recycled=8, priced=False),
        }
    if "block" in heads:
        chosen |= {
            "block (64 rows)": Block(heads=heads["block"], rows=64, lookup=0.0, priced=False),
            "block with lookup (64 rows)": Block(heads=heads["block"], rows=64, priced=False),
            "block with lookup, recycled": Block(heads=heads["block"], rows=64, recycled=8, priced=False),
            "auto with block": Auto(heads=heads["block"]),
        }
    chosen["auto"] = Auto(heads=heads.get("amphista", False))
    if heads:
        chosen["auto without heads"] = Auto(heads=False)
    if arguments.only:
        chosen = {name: method for name, method in chosen.items() if name.startswith(("plain", *arguments.only))}
    floors = dict.fromkeys(chosen, 0.0)
    output = decoder.model.vocabulary * decoder.model.width
    for name in chosen:
        kind = name.split()[0]
        if kind in heads:
            weights = sum(weight.numel() for weight in heads[kind].heads.parameters()) + output
            floors[name] = weights * torch.finfo(DTYPE).bits / 8 / READING * 1000
    return decoder, {name: decoder.prepare(method) for name, method in chosen.items()}, floors


def prompts_of(decoder: Decoder, arguments: argparse.Namespace, each: int) -> list[list[int]]:
    """Prompts of all tasks in turn, none too long for the first size of graphs."""
    questions = spec_bench(arguments.data, each)
    mixed = [question for first in range(each) for question in questions[first::each]]
    prompts = [encoded(decoder, question["text"]) for question in mixed]
    return [prompt for prompt in prompts if len(prompt) + arguments.tokens < 900]


def encoded(decoder: Decoder, text: str) -> list[int]:
    """A prompt, as it is for base models."""
    return [*decoder.encode(text, not decoder.tokenizer.chat_template)]


def median_ms(run: Any, repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def graph_ms(program: Program, prompt: list[int], group: int = 1) -> tuple[float, float]:
    """Milliseconds of a whole step on the device while a text is written, and of its target's forward alone."""
    engine = program.engine
    with engine.pool.sequence(prompt) as sequence:
        from outpace.runtime.plain import alone

        seen: list[torch.Tensor] = []
        place = program.reserve(sequence, Sampling(), 700)
        alone(engine.read(sequence, program.sees(place, seen)))
        program.open(place, sequence, Sampling(), seen)
        try:
            whole = program._steps(group, 1024, frozenset())[-1]
            both = median_ms(whole.run, 12)
        finally:
            program.close(place, sequence, [])
    if group > 1:
        return both, 0.0
    target = engine._graph(next(size for size in [*engine.sizes] if size >= program.rows), len(prompt))
    return both, median_ms(target._graph.replay)


def one(arguments: argparse.Namespace) -> None:
    decoder, methods, floors = prepare(arguments)
    engine = decoder.engine
    assert isinstance(engine, GraphEngine)
    prompts = prompts_of(decoder, arguments, arguments.each)
    entries = {
        (name, whole): method for name, method in methods.items() for whole in (True, False)[: 1 + arguments.host]
    }
    seconds, tokens, steps, same = ({entry: [] for entry in entries} for _ in range(4))

    def write(entry: tuple[str, bool], prompt: list[int]) -> tuple[float, Any]:
        engine.whole_steps = entry[1]
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = decoder.generate(prompt, method=entries[entry], max_new_tokens=arguments.tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - start, result

    for entry in entries:  # graphs are captured
        start = time.perf_counter()
        for prompt in [*prompts[:2], *(prompts[0][:1] * size for size in (3, 12, 28, 60, 120, 250, 380, 500, 760))]:
            write(entry, prompt)
        print(f"{entry}: {time.perf_counter() - start:.1f} s for two texts, captures included", flush=True)
    for prompt in prompts:
        plain: list[int] = []
        for entry in entries:
            spent, result = write(entry, prompt)
            plain = plain or result.token_ids
            seconds[entry].append(spent)
            tokens[entry].append(result.new_tokens)
            steps[entry].append(result.steps)
            same[entry].append(result.token_ids == plain)
    engine.whole_steps = True
    table = Table(
        "method",
        "host",
        "tokens/s",
        "plain = 1",
        "tokens/step",
        "ms/step",
        "graph",
        "target",
        "heads",
        "beyond",
        "same",
    )
    base = sum(tokens["plain", True]) / sum(seconds["plain", True])
    for (name, whole), method in entries.items():
        entry = (name, whole)
        speed, count = sum(tokens[entry]) / sum(seconds[entry]), sum(steps[entry])
        parts = ["", "", "", ""]
        if whole:
            both, target = graph_ms(engine.program_for(method, Sampling()), prompts[0])
            parts = [f"{both:.2f}", f"{target:.2f}", f"{floors[name]:.2f}", f"{both - target - floors[name]:.2f}"]
        table.add_row(
            *(name, "ahead" if whole else "between", f"{speed:.1f}", f"{speed / base:.2f}"),
            *(f"{sum(tokens[entry]) / count:.2f}", f"{sum(seconds[entry]) / count * 1000:.2f}", *parts),
            f"{sum(same[entry])} of {len(same[entry])}",
        )
    CONSOLE.print(f"times {arguments.times}, {len(prompts)} prompts, {arguments.tokens} tokens", table)
    if arguments.profile:
        profile(engine, methods, prompts[0])


def profile(engine: GraphEngine, methods: dict[str, Method], prompt: list[int]) -> None:
    """What each kernel adds to a step."""
    for name, method in methods.items():
        program = engine.program_for(method, Sampling())
        whole = program._steps(1, 1024, frozenset())[-1]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            whole.run()
            torch.cuda.synchronize()
        added: dict[str, list[float]] = {}
        done = 0.0
        for event in sorted(prof.events(), key=lambda event: event.time_range.end):
            if event.device_type == torch.autograd.DeviceType.CUDA:
                added.setdefault(event.name, []).append(event.time_range.end - max(done, event.time_range.start))
                done = event.time_range.end
        print(f"{name}: {sum(map(len, added.values()))} kernels, {sum(map(sum, added.values())) / 1000:.2f} ms")
        for kernel, times in sorted(added.items(), key=lambda item: -sum(item[1]))[:40]:
            print(f"   {sum(times):8.0f} us {len(times):5d} x  {kernel[:110]}")


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def auto(arguments: argparse.Namespace) -> None:
    """Each method beside plain decoding on every prompt: all tokens of a task, and the worst prompt.

    Of the worst prompt only what comes behind its first 64 tokens counts. No text is written before those that count,
    but for one of other tokens: what is captured and compiled is not counted.
    """
    decoder, methods, _ = prepare(arguments)
    questions = spec_bench(arguments.data, arguments.each)
    how = Sampling(temperature=arguments.temperature)
    options: dict[str, Any] = {"max_new_tokens": arguments.tokens, "sampling": how}
    for method in methods.values():
        for size in (3, 12, 28, 60, 120, 250, 380, 500, 760) if torch.cuda.is_available() else (12,):
            decoder.generate([1] * size, method=method, max_new_tokens=8, sampling=how)
    tasks: dict[tuple[str, str], list[float]] = {}
    worst: dict[str, list[tuple[float, str]]] = {name: [] for name in methods}
    counted = {name: [0, 0] for name in methods}
    for number, question in enumerate(questions):
        prompt = encoded(decoder, question["text"])
        if len(prompt) + arguments.tokens >= 900:
            continue
        base = 0.0
        for name, method in methods.items():
            synchronize()
            start, times, written = time.perf_counter(), [], 0
            for step in decoder.stream(prompt, method=method, **options):
                written += len(step.tokens)
                times.append((written, time.perf_counter() - start))
            synchronize()
            tasks.setdefault((question["task"], name), []).extend([written, time.perf_counter() - start])
            counted[name][0] += written
            counted[name][1] += len(times)
            begun = next((item for item in times if item[0] >= 64), times[-1])
            pace = (times[-1][0] - begun[0]) / (times[-1][1] - begun[1]) if times[-1][0] >= 96 else 0.0
            base = pace if name == "plain" else base
            if pace and base:
                worst[name].append((pace / base, f"{question['task']} {number}"))
    names = [*methods]
    table = Table("task", *names)
    speeds: dict[tuple[str, str], float] = {}
    for task in dict.fromkeys(task for task, _ in tasks):
        for name in names:
            spent = tasks[task, name]
            speeds[task, name] = sum(spent[::2]) / sum(spent[1::2])
        table.add_row(task, *(f"{speeds[task, name] / speeds[task, 'plain']:.2f}" for name in names))
    total = {
        name: sum(sum(spent[::2]) for (_, each), spent in tasks.items() if each == name)
        / sum(sum(spent[1::2]) for (_, each), spent in tasks.items() if each == name)
        for name in names
    }
    table.add_row("all", *(f"{total[name] / total['plain']:.2f}" for name in names))
    table.add_row("tokens/s", *(f"{total[name]:.0f}" for name in names))
    table.add_row("tokens/step", *(f"{counted[name][0] / max(counted[name][1], 1):.2f}" for name in names))
    if all(worst.values()):
        table.add_row("worst prompt", *(f"{min(worst[name])[0]:.2f} {min(worst[name])[1]}" for name in names))
    CONSOLE.print(f"times {arguments.times}, T = {arguments.temperature}, plain = 1", table)


@dataclass(frozen=True)
class Parts(Method):
    """Some of the sources that guess without training, in one tree whose steps all have so many rows."""

    name = "parts"

    history: int = 16  # the longest match; 0: none
    ranks: int = 8  # tokens that are recycled; 0: none
    runners: int = 7
    carried: bool = True  # from text to text
    window: int = 0  # lookahead's columns; 0: none
    rows: int = 64

    def plan(self, engine: Any) -> Plan:
        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = []
            if self.window:
                found.append(Window(Settings(self.window, 4, 7, 3, True, True, True, False, False), lanes, device))
            if self.history:
                found.append(History(self.history, REACH, PLACES, "lookup", device, FLOOR))
            if self.ranks:
                paths = NODES - PLACES * REACH - 2 * self.runners
                found.append(Recycle(self.ranks, paths, lanes, device, MEMORY, self.runners, self.carried))
            return found

        return Plan(sources, self.rows, learned=Chances)

    def start(self, *_: Any) -> Any:
        raise NotImplementedError("steps are whole here")


def ablate(arguments: argparse.Namespace) -> None:
    """Tokens a step and tokens/s of trees that lack something, on the same prompts in turn."""
    graphs.PROGRAMS = 32  # all of them are kept
    decoder, _, _ = prepare(arguments)
    variants: dict[str, Method] = {
        "plain": Autoregressive(),
        "lookahead (7, 4, 7)": Lookahead(window=7, ngram=4, guesses=7),
        "the same, its window not recycled": Lookahead(window=7, ngram=4, guesses=7, recycle=False),
        "auto without heads": Auto(heads=False),
        "history, recycling, runners-up": Parts(),
        "the same, nothing carried": Parts(carried=False),
        "the same, matches of 4 at most": Parts(history=4),
        "the same, no history": Parts(history=0),
        "the same, no recycling": Parts(ranks=0),
        "the same, best token alone recycled": Parts(ranks=2, runners=0),
        "the same, no runners-up": Parts(runners=0),
        "the same with lookahead's window of 7": Parts(window=7),
        "the same with a window of 3": Parts(window=3),
        "the same, 32 rows": Parts(rows=32),
        "the same, 128 rows": Parts(rows=128),
    }
    variants = {name: decoder.prepare(method) for name, method in variants.items()}
    for method in variants.values():
        for size in (12, 250, 500):
            decoder.generate([1] * size, method=method, max_new_tokens=8)
    spent: dict[tuple[str, str], list[float]] = {}
    for question in spec_bench(arguments.data, arguments.each):
        prompt = encoded(decoder, question["text"])
        if len(prompt) + arguments.tokens >= 900:
            continue
        for name, method in variants.items():
            synchronize()
            start = time.perf_counter()
            result = decoder.generate(prompt, method=method, max_new_tokens=arguments.tokens)
            synchronize()
            numbers = [result.new_tokens, result.steps, time.perf_counter() - start]
            for task in (question["task"], "all"):
                known = spent.setdefault((name, task), [0.0] * 3)
                spent[name, task] = [old + new for old, new in zip(known, numbers, strict=True)]
    tasks = [*dict.fromkeys(task for _, task in spent)]
    table = Table("tokens/step", *tasks, "tokens/s")
    for name in variants:
        each = [spent[name, task][0] / spent[name, task][1] for task in tasks]
        table.add_row(name, *(f"{one:.2f}" for one in each), f"{spent[name, 'all'][0] / spent[name, 'all'][2]:.0f}")
    CONSOLE.print(f"times {arguments.times}, {arguments.each} prompts a task, {arguments.tokens} tokens", table)


def together(arguments: argparse.Namespace) -> None:
    decoder, methods, _ = prepare(arguments)
    prompts = prompts_of(decoder, arguments, 24)[:64]
    table = Table(
        "method", "texts", "tokens/s", "plain alone = 1", "plain of as many = 1", "while all are written", "of one"
    )
    base: dict[int, float] = {}
    writing: dict[tuple[str, int], float] = {}
    for most in arguments.texts:
        for name, method in methods.items():
            some = prompts[: max(4, most)]
            for _ in range(3):  # the first time graphs are captured
                written, spent = written_together(decoder, method, some, most, arguments.tokens)
            speed = sum(map(len, written)) / spent
            writing[name, most] = steady(decoder, method, some[:most], arguments.tokens)
            if name == "plain":
                base[most] = speed
            table.add_row(
                *(
                    name,
                    str(most),
                    f"{speed:.0f}",
                    f"{speed / base[arguments.texts[0]]:.2f}",
                    f"{speed / base[most]:.2f}",
                ),
                *(f"{writing[name, most]:.0f}", f"{writing[name, most] / writing['plain', arguments.texts[0]]:.2f}"),
            )
    CONSOLE.print(f"times {arguments.times}, {arguments.tokens} tokens", table)


def exact(arguments: argparse.Namespace) -> None:
    """Both modes take turns: the same prompts, one after the other or so many at a time."""
    decoders: dict[str, tuple[Decoder, dict[str, Method]]] = {}
    arguments.only = arguments.only or ["auto"]
    for mode in ("fast", "exact"):
        arguments.exact, arguments.memory = mode == "exact", 0.4
        decoder, methods, _ = prepare(arguments)
        decoders[mode] = decoder, methods
    prompts = prompts_of(decoder, arguments, 24)[:64]
    table = Table("method", "texts", "fast, tokens/s", "exact, tokens/s", "exact / fast", "same text, exact", "fast")
    for name in methods:
        for most in arguments.texts:
            some = prompts[: most if most > 1 else 6 * arguments.each]
            speeds: dict[str, list[float]] = {mode: [] for mode in decoders}
            for turn in range(arguments.turns + 1):  # the first time graphs are captured
                for mode, (decoder, methods) in decoders.items():
                    written, spent = written_together(decoder, methods[name], some, most, arguments.tokens)
                    if turn:
                        speeds[mode].append(sum(map(len, written)) / spent)
            fast, slow = (statistics.median(speeds[mode]) for mode in ("fast", "exact"))
            same = []
            for mode in ("exact", "fast"):
                decoder, methods = decoders[mode]
                few = some[: 6 * arguments.each]
                alone, _ = written_together(decoder, methods["plain"], few, 1, arguments.tokens)
                beside, _ = written_together(decoder, methods[name], some, most, arguments.tokens)
                same.append(f"{sum(map(list.__eq__, alone, beside))} of {len(few)}")
            table.add_row(name, str(most), f"{fast:.0f}", f"{slow:.0f}", f"{slow / fast:.3f}", *same)
            print(f"{name}, {most} texts: exact / fast {slow / fast:.3f}", flush=True)
    CONSOLE.print(f"times {arguments.times}, {arguments.tokens} tokens, exact and fast mode in turns", table)


def steady(decoder: Decoder, method: Method, prompts: list[list[int]], tokens: int) -> float:
    """Tokens/s from when all texts are being written until the first one ends."""
    decoder.ends, ends = [], decoder.ends
    try:
        batch = decoder.batch()
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
    decoder, methods, _ = prepare(arguments)
    prompts = prompts_of(decoder, arguments, arguments.each)
    entries = {
        "greedy": Sampling(),
        "T = 0.8": Sampling(temperature=0.8),
        "T = 0.8, top-p 0.95": Sampling(temperature=0.8, top_p=0.95),
        "repetition penalty 1.1": Sampling(repetition_penalty=1.1),
    }
    decoder.ends = []
    speeds: dict[str, list[float]] = {name: [] for name in entries}
    for turn in range(2):
        for prompt in prompts[:8]:
            for name, chosen in entries.items():
                start = time.perf_counter()
                result = decoder.generate(
                    prompt, method=methods["plain"], max_new_tokens=arguments.tokens, sampling=chosen
                )
                torch.cuda.synchronize()
                if turn:
                    speeds[name].append(result.new_tokens / (time.perf_counter() - start))
    table = Table("sampling", "tokens/s", "greedy = 1")
    for name, found in speeds.items():
        table.add_row(
            name,
            f"{statistics.median(found):.1f}",
            f"{statistics.median(found) / statistics.median(speeds['greedy']):.3f}",
        )
    CONSOLE.print(table)


def main() -> None:
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", OutpaceWarning)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["one", "auto", "ablate", "together", "exact", "sampling"])
    parser.add_argument("--model", required=True, help="the embedded model's folder")
    parser.add_argument("--gguf", type=Path, nargs="+", help="pieces of its file, to make the folder from")
    parser.add_argument("--data", type=Path, required=True, help="Spec-Bench's question file")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--each", type=int, default=3, help="prompts of each of the six tasks")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--only", nargs="+", help="plain, and methods that begin so")
    parser.add_argument("--block", help="a folder of block heads, where none are shipped")
    parser.add_argument("--exact", action="store_true", help="in exact mode")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the free memory for the KV cache")
    parser.add_argument("--turns", type=int, default=3, help="for exact: how often each is timed")
    parser.add_argument("--runtime", default="plain", help="without a GPU")
    parser.add_argument("--temperature", type=float, default=0.0, help="for auto")
    parser.add_argument("--host", action="store_true", help="also with the host between the verbs of a step")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each step")
    arguments = parser.parse_args()
    globals()[arguments.what](arguments)


if __name__ == "__main__":
    main()
