"""Outpace compared with llama.cpp: the same GGUF file, prompts, tokens and threads, interleaved in one run.

    python scripts/peers.py model.gguf --peer PYTHON [--tokens 128] [--threads 2] [--long 1000] [--busy]

PYTHON is that of an environment with `xllamacpp` (pip install xllamacpp), which is llama.cpp in a wheel. Every prompt
is decoded plainly, with `auto`, with llama.cpp, and with llama.cpp's n-gram speculation, in rotating order. All ignore
end-of-sequence tokens, so that they generate the same number of tokens. `--busy` adds load: another busy process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = (
    "Why is the sky blue? Explain it simply.",
    "List ten countries and their capitals.",
    "Write a Python class for a stack with push, pop and peek, and then one for a queue.",
    "Translate into French: The weather is nice today, and we are going to the beach with our friends.",
    "Tom has 12 apples. He gives 5 to Ann and buys 8 more. How many apples does Tom have? Show every step.",
    "Summarize: The river rises in the mountains, runs through three towns and ends in the sea. In spring it floods "
    "the meadows. The towns have built dams against the floods, but the river still rises every spring.",
)
FILLER = "The river rises in the mountains, runs through three towns and ends in the sea. "


def peer(path: str, threads: int, speculation: bool) -> None:
    """In the other environment: read requests from standard input; print seconds and tokens of each."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = 4096, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if speculation:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        said = server.handle_completions(
            {
                "prompt": asked["tokens"],
                "max_tokens": asked["count"],
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        seconds = time.perf_counter() - start
        print("answer " + json.dumps([seconds, said["usage"]["completion_tokens"]]), flush=True)


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, path: str, threads: int, speculation: bool) -> None:
        command = [python, __file__, path, "--threads", str(threads), "--as-peer", "speculation" if speculation else ""]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read("ready")

    def _read(self, mark: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise SystemExit(f"llama.cpp ended with status {self.process.wait()}")

    def __call__(self, tokens: list[int], count: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"tokens": tokens, "count": count}) + "\n")
        self.process.stdin.flush()
        seconds, written = json.loads(self._read("answer "))
        return float(seconds) / written * count


def ours(decoder: Any, method: Any) -> Any:
    def write(tokens: list[int], count: int) -> float:
        start = time.perf_counter()
        result = decoder.generate(tokens, max_new_tokens=count, method=method)
        return (time.perf_counter() - start) / result.new_tokens * count

    return write


def compare(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    import outpace

    torch.set_num_threads(options.threads)
    decoder = outpace.load(options.model, weights="packed", method="autoregressive")
    decoder.ends = []
    raw = not getattr(decoder.tokenizer, "chat_template", None)
    prompts = [decoder.encode(prompt, raw) for prompt in PROMPTS[: options.prompts]]
    entries = {
        "plain": ours(decoder, decoder.prepare("autoregressive")),
        "auto": ours(decoder, decoder.prepare("auto")),
        "llama.cpp": Peer(options.peer, options.model, options.threads, False),
        "llama.cpp, n-grams": Peer(options.peer, options.model, options.threads, True),
    }
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if options.busy else None
    try:
        for write in entries.values():  # warm up
            write(prompts[0], 16)
        seconds: dict[str, list[float]] = {name: [] for name in entries}
        for number, prompt in enumerate(prompts):
            names = [*entries]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds[name].append(entries[name](prompt, options.tokens))
        first = {name: [] for name in ("plain", "llama.cpp")}
        long = decoder.encode(FILLER * (options.long // 16 + 1), raw)[: options.long]
        for _ in range(2 if options.long else 0):
            for name, times in first.items():
                times.append(entries[name](long, 1))
    finally:
        if busy is not None:
            busy.kill()
    return {"seconds": seconds, "first": first, "prompt": len(long) if options.long else 0}


def show(found: dict[str, Any], tokens: int) -> None:
    seconds = found["seconds"]
    totals = {name: sum(times) for name, times in seconds.items()}
    print("| | tokens/s | x llama.cpp | worst prompt | best prompt | x llama.cpp, n-grams |\n|---|---|---|---|---|---|")
    for name, times in seconds.items():
        each = [theirs / mine for mine, theirs in zip(times, seconds["llama.cpp"], strict=True)]
        ratios = f"{totals['llama.cpp'] / totals[name]:.2f} | {min(each):.2f} | {max(each):.2f}"
        speed = tokens * len(times) / totals[name]
        print(f"| {name} | {speed:.1f} | {ratios} | {totals['llama.cpp, n-grams'] / totals[name]:.2f} |")
    if found["prompt"]:
        mine, theirs = (statistics.median(found["first"][name]) for name in ("plain", "llama.cpp"))
        print(f"\nfirst token after {found['prompt']} tokens: {mine:.2f} s, llama.cpp {theirs:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="the Python of an environment with xllamacpp")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--long", type=int, default=1000, help="tokens of a long prompt; 0 for none")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-peer", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer is not None:
        peer(options.model, options.threads, options.as_peer == "speculation")
        return
    found = compare(options)
    show(found, options.tokens)
    if options.out:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
