"""Measurements for the developers of Outpace, on a CUDA GPU in bfloat16 or on a CPU in float32.

    python scripts/lab speeds    --model DIR --data FILE --transformers  tokens/s by method and task
    python scripts/lab speeds    ... --only lookahead amphista --parts   and where the time of a step goes
    python scripts/lab ablate    --model DIR --data FILE --times 1   tokens per step of `auto`'s trees on a GPU, and
                                                                     of trees without some of the sources
    python scripts/lab together  --model DIR --data FILE --times 8   throughput of 1, 4, 16 and 64 sequences
    python scripts/lab modes     --model DIR --data FILE --times 8   `auto` in exact mode beside fast mode, in turns
    python scripts/lab sampling  --model DIR --data FILE --times 8   plain sampling beside plain greedy decoding
    python scripts/lab shape                                         a step of Llama-3.1-8B's shape, by rows and context
    python scripts/lab masks                                         attention over slot lists beside a dense mask
    python scripts/lab kernels   [--only products gated attention]   exact mode's kernels: bits and costs
    python scripts/lab prices    [--model DIR --each 0]              the cost of a step, in exact mode and without
    python scripts/lab start     --model DIR --times 8               what the first token waits for
    python scripts/lab packed                                        products with packed weights on a CPU, by rows
    python scripts/lab texts     --model DIR --data FILE --together 1 16   exact mode: same outputs with every method
    python scripts/lab reproduce --model DIR --data FILE --out DIR --each 1  the papers' tables
    python scripts/lab steps     --data FILE --out FILE              tokens per step: papers' methods and our changes
    python scripts/lab replay    --data FILE --out FILE              the same for heads, without the target's steps
    python scripts/lab equal     --out FILE                          outputs against plain decoding's and transformers'
    python scripts/lab accuracies [--data FILE] [--plot FILE]        accuracies of the shipped heads: held-out ones as
                                                                     stored, or on greedy answers to the prompts of FILE

A table is printed last. --data takes Spec-Bench's question file; without it, Outpace's own prompts are used. `--times
8` widens the embedded model to 7.25 billion weights that compute the same function. On a machine without a package
registry, copy the model's GGUF file there, if necessary in parts: `--gguf PART1 PART2 --model FOLDER` converts it
first. If --out is a file, finished runs in it are not repeated.

The time to the first token depends on whether Python's modules are byte-compiled, as pip leaves them; otherwise run
`python -m compileall`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from outpace.errors import OutpaceWarning
from outpace.reproduce import PAPERS

from . import batches, graphs, kernels, papers, quantized, replaying, speeds, starting

COMMANDS = {
    **{part.__name__: part for part in (speeds.speeds, speeds.ablate, speeds.steps, speeds.equal)},
    **{part.__name__: part for part in (batches.together, batches.modes, batches.sampling, batches.texts)},
    **{part.__name__: part for part in (graphs.shape, graphs.masks, graphs.prices, replaying.replay)},
    **{part.__name__: part for part in (kernels.kernels, quantized.packed, papers.reproduce, papers.accuracies)},
    "start": starting.start,
}
ON_GPUS = ("shape", "masks", "kernels", "start")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", default="smollm2-135m", help="a name or folder")
    parser.add_argument("--gguf", type=Path, nargs="+", help="parts of the model's GGUF file, to make --model from")
    parser.add_argument("--times", type=int, help="how many times as wide; 8, on a CPU 1")
    parser.add_argument("--heads", nargs="*", default=[], metavar="NAME=FOLDER", help="instead of installed heads")
    parser.add_argument("--data", type=Path, help="Spec-Bench's question file")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="further files of questions, for reproduce")
    parser.add_argument("--each", type=int, default=4, help="questions per task; for prices, 0 skips the 8B shape")
    parser.add_argument("--every", type=int, default=1, help="transformers runs on every n-th question")
    parser.add_argument("--longest", type=int, help="skip longer ones: tokens of prompt and answer; 900 on a GPU")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--only", nargs="+", help="besides plain decoding: labels, or how labels start; or kernels")
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 16, 64], help="sequences at a time")
    parser.add_argument("--transformers", action="store_true", help="for speeds: transformers' generate too")
    parser.add_argument("--parts", action="store_true", help="for speeds: where the time of a step goes")
    parser.add_argument("--profile", action="store_true", help="with --parts: the kernels of each step")
    parser.add_argument("--host", action="store_true", help="also with the host between the phases of a step")
    parser.add_argument("--exact", action="store_true", help="exact mode")
    parser.add_argument("--bits", action="store_true", help="for texts: compare logits too")
    parser.add_argument("--calibrate", action="store_true", help="for reproduce: measure costs first")
    parser.add_argument("--papers", nargs="+", choices=list(PAPERS), default=list(PAPERS), help="for reproduce")
    parser.add_argument("--out", type=Path, help="JSON lines of finished runs; for reproduce a folder")
    parser.add_argument("--plot", type=Path, help="for accuracies: draw to this file (.png, .svg)")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--weights", nargs="+", choices=["float32", "narrow", "bfloat16", "int8"], default=["float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="for prices on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="for modes, packed, and prices on a CPU")
    arguments = parser.parse_args(words)
    on_gpu = torch.cuda.is_available()
    arguments.times = arguments.times or (8 if on_gpu else 1)
    arguments.longest = arguments.longest or (900 if on_gpu else 1 << 20)  # graphs of one length for all
    if arguments.what in ON_GPUS and not on_gpu:
        parser.error(f"{arguments.what} needs a CUDA GPU")
    if arguments.data is not None and not arguments.data.is_file():
        parser.error(f"--data {arguments.data} is not a file")
    if arguments.what == "reproduce" and not (arguments.out and arguments.data):
        parser.error("reproduce needs --data and --out")
    if "int8" in arguments.weights and find_spec("torchao") is None:
        parser.error("--weights int8 needs torchao: pip install --no-deps torchao")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", OutpaceWarning)
    arguments = parse(words)
    COMMANDS[arguments.what](arguments)
