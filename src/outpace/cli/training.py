"""`outpace train` and `outpace export`: heads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UnknownNameError
from . import options
from .loading import load_both, load_decoder
from .settings import choose_heads

WORTHWHILE = 1.1  # estimated speedup from which heads pay


def train(
    kinds: Annotated[
        list[str], typer.Argument(help="medusa, hydra, amphista, block, exits: one or several, trained together.")
    ],
    out: Annotated[Path, typer.Option(help="Output folder: a subfolder for each kind of heads, and the answers.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with prompts, or .txt; the model's answers to them are the training data. Default: 48 "
            "built-in prompts, enough to try it.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    answers: Annotated[
        Path | None,
        typer.Option(help="Folder where answers are cached for reuse. Default: in --out.", show_default=False),
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KIND.NAME=VALUE", help="A setting of the heads. May be repeated.")
    ] = [],
    start: Annotated[
        Path | None,
        typer.Option(
            help="Train heads further instead of new ones: a folder with a subfolder for each kind, such as the --out "
            "of an earlier training.",
            show_default=False,
        ),
    ] = None,
    updates: Annotated[
        int, typer.Option(help="Stop after this many optimizer steps. Give this or --minutes.", show_default=False)
    ] = 0,
    minutes: Annotated[
        float,
        typer.Option(
            help="Stop after this many minutes of training, once the answers are there (see --answer-minutes).",
            show_default=False,
        ),
    ] = 0.0,
    tokens: Annotated[int, typer.Option(help="Tokens per optimizer step.")] = 16384,
    rate: Annotated[float, typer.Option(help="Peak learning rate of matrices (Muon).")] = 1e-2,
    vector_rate: Annotated[float, typer.Option(help="Peak learning rate of norms and biases (AdamW).")] = 3e-3,
    weight: Annotated[float, typer.Option(help="Weight of each head's loss, relative to the head before it.")] = 0.8,
    hard: Annotated[
        float, typer.Option(help="Weight of the loss on hard labels; the rest is on the model's distribution.")
    ] = 0.0,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Number of held-out prompts, to measure accuracy. Default: a tenth, 256 at most.", show_default=False
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Answers per prompt.")] = 1,
    more: Annotated[
        float,
        typer.Option(help="Generated prompts (turns, translations, summaries) per given prompt."),
    ] = 0.5,
    judge: Annotated[
        Path | None,
        typer.Option(help="Prompts to evaluate on too; never trained on.", show_default=False),
    ] = None,
    bits: Annotated[int, typer.Option(metavar="16|8", help="Bits per stored weight.")] = 16,
    batch: Annotated[int, typer.Option(help="Batch size for generating answers; 0: as many as fit in memory.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="The most tokens per answer.")] = 256,
    answer_minutes: Annotated[
        float,
        typer.Option(
            help="Stop generating answers to train on after this many minutes, behind those to held-out prompts; 0: "
            "answer everything."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the answers, the generated prompts and the training.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a training that was stopped.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite finished heads in --out.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the accuracies to this file (.png, .svg); needs matplotlib.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Train draft heads on the model's own answers. Prints their accuracy on held-out prompts at the end.

    Ctrl-C stops after the current update; --resume continues from there.

    On several GPUs: accelerate launch -m outpace train ...
    """
    options.check(model, dtype=dtype)
    options.check_files({"--prompts": prompts, "--judge": judge}, {"--plot": plot})
    from ..bench.prompts import PROMPTS
    from ..board import console_for_output
    from ..chart import check_plot, print_accuracies, print_confidence, progress_bar, save_accuracies
    from ..heads.storing import check_bits
    from ..training.data import read_prompts
    from ..training.run import CHECKPOINT, Answers, make_heads, open_out, start_from
    from ..training.run import answers as get_answers
    from ..training.run import train as run
    from ..training.team import Team
    from ..training.trainer import Plan

    team = Team()
    chosen = choose_heads(kinds, settings)
    plan = Plan(updates, minutes, tokens, rate, vector_rate, weight, hard, seed=seed)
    texts = [text for task in PROMPTS.values() for text in task] if prompts is None else read_prompts(prompts)
    kept_back = max(1, min(256, len(texts) // 10)) if held_out is None else held_out
    how = Answers(kept_back, rounds, more, batch, new_tokens, answer_minutes, seed)
    judged = [] if judge is None else read_prompts(judge)
    check_bits(bits)
    check_plot(plot)
    open_out(out, resume, () if force else kinds)  # before anything that takes long
    decoder, loaded = load_both(model, dtype, device or team.device)
    ends = decoder.model.ends()
    earlier = {}
    if start is None:
        heads = {kind: make_heads(loaded, ends, kind, chosen[kind]) for kind in kinds}
    else:
        begun = {kind: start_from(start / kind, decoder.model, kind, chosen[kind]) for kind in kinds}
        heads = {kind: found for kind, (found, _) in begun.items()}
        earlier = {kind: stored.training for kind, (_, stored) in begun.items()}
    kept = answers or out / "answers"
    made_by = {"prompts": prompts.name if prompts else "own", **asdict(how)}
    try:
        with progress_bar("answering", team.leads) as show:
            written = get_answers(decoder, loaded, texts, kept, how, show, team, judged)
        with progress_bar("training", team.leads) as show:
            found = run(
                *(loaded, decoder.model, heads, written, plan, out),
                resume=resume,
                made_by=made_by,
                earlier=earlier,
                show=show,
                team=team,
                bits=bits,
            )
    except KeyboardInterrupt:
        if team.leads:
            there = f"the checkpoint is in {out / CHECKPOINT}: continue with --resume"
            first = f"finished answers are in {kept}: the same command uses them again"
            typer.echo(f"\n{there if (out / CHECKPOINT).exists() else first}", err=True)
        raise
    if not team.leads:
        return
    accuracies = {name: part.tolist() for name, part in found.held_out.items()}
    elsewhere = {name: part.tolist() for name, part in found.judged.items()}
    if plot is not None:
        save_accuracies(accuracies, plot)
    if as_json:
        report = {"out": str(out), "accuracies": accuracies, "judged": elsewhere}
        typer.echo(json.dumps({**report, "confidence": found.confidence, "speed": found.speed}))
        return
    console = console_for_output()
    print_accuracies(console, accuracies)
    if judge is not None:
        console.print(f"on answers to {judge.name}:")
        print_accuracies(console, elsewhere)
    for name, lines in found.confidence.items():
        print_confidence(console, name, lines)
    for name, (expected, speed) in found.speed.items():
        word = "" if speed >= WORTHWHILE else ": not worth using here"
        console.print(
            f"{name}: about {expected:.2f} tokens per step on similar prompts with large draft trees, "
            f"{speed:.2f} times plain decoding where extra rows cost nothing, as on a GPU{word}"
        )
    typer.echo(f"saved in {out}. To use them:", err=True)
    for kind in kinds:
        method = "adadecode" if kind == "exits" else kind
        typer.echo(f"  --method {method} --set heads={out / kind}", err=True)


def export(
    kind: Annotated[str, typer.Argument(help="medusa")],
    folder: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="vllm|tgi|reference", help="The target format.")],
    heads: Annotated[
        Path | None, typer.Option(help="Trained heads. Default: the installed ones.", show_default=False)
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    device: options.Device = None,
) -> None:
    """Write trained heads to FOLDER in the format of another system."""
    from ..heads import KINDS
    from ..heads.exporting import FORMATS
    from ..heads.exporting import export as write

    if kind not in KINDS:
        raise UnknownNameError("kind of heads", kind, KINDS)
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    decoder = load_decoder(model, dtype, device)
    method: Any = decoder.prepare(kind, **({"heads": str(heads)} if heads else {}))
    write(method.heads.heads, decoder.model, to, folder)
    typer.echo(f"written to {folder}", err=True)
