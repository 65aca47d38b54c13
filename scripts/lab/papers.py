"""`outpace reproduce` on the widened model, and the accuracies of the installed heads."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from typing import Any

import torch
from rich.console import Console

from outpace import Autoregressive
from outpace.bench.calibration import calibrate
from outpace.bench.data import read_questions
from outpace.chart import check_plot, print_accuracies, save_accuracies
from outpace.heads.shipped import of_kind
from outpace.heads.storing import read_config
from outpace.methods.headed import Ready
from outpace.reproduce import PAPERS, stem
from outpace.reproduce.lab import Lab, Scale
from outpace.runtime.choose import EXACT_ROWS
from outpace.training.data import Text
from outpace.training.trainer import Plan, Trainer

from .methods import HEADED
from .models import set_up
from .speeds import prompts_of

HEADS = {"lookahead": (), "adadecode": ("exits",), "amphista": ("medusa", "hydra", "amphista")}


def reproduce(arguments: argparse.Namespace) -> None:
    """Each paper's tables on the widened model, with widened heads. The pages go to --out."""
    decoder, model, heads = set_up(arguments, arguments.exact)
    if arguments.calibrate:
        calibrate(decoder)
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
        chosen = heads_for(paper, heads)
        more: dict[str, Any] = {"heads": chosen} if chosen else {}
        if paper == "amphista" and arguments.exact:
            more["rows"] = EXACT_ROWS
        page = PAPERS[paper](lab, **more).save(arguments.out, name, shlex.join(["python", *sys.argv]))
        print(page.read_text())
        print(f"{paper}: {time.perf_counter() - start:.0f} s")


def heads_for(paper: str, heads: dict[str, Ready]) -> dict[str, Ready]:
    """The heads that a paper is about: those of its kinds, under any name."""
    return {name: ready for name, ready in heads.items() if ready.heads.kind in HEADS[paper]}


def accuracies(arguments: argparse.Namespace) -> None:
    """Accuracies of the installed heads: held-out ones, from their own files, or on greedy answers to --data."""
    check_plot(arguments.plot)
    if arguments.data:
        found = accuracies_on_data(arguments)
    else:
        found = {kind: read_config(of_kind(kind)[0])["accuracies"] for kind in HEADS["amphista"]}
    if arguments.plot:
        save_accuracies(found, arguments.plot)
    print_accuracies(Console(), found)


def accuracies_on_data(arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """By kind [heads, ranks]: all kinds on the same answers of the model as it is, which are generated first."""
    arguments.times = 1
    decoder, model, heads = set_up(arguments)
    texts = []
    for prompt in prompts_of(decoder, arguments, arguments.each):
        answer = decoder.generate(prompt, method=Autoregressive(), max_new_tokens=arguments.tokens).token_ids
        texts.append(Text(torch.tensor([*prompt, *answer]), len(prompt)))
    kinds = {name: ready.heads for name, ready in heads.items() if name in HEADED}
    adapted: Any = decoder.model
    found = Trainer(model, adapted.norm, adapted.ends(), kinds, Plan(updates=1)).accuracies(texts)
    return {name: part.tolist() for name, part in found.items()}
