"""`outpace bench`, `outpace reproduce` and `outpace calibrate`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, OutpaceError, UnknownNameError
from . import options
from .loading import load_both, load_decoder
from .settings import choose_for_bench

if TYPE_CHECKING:
    from ..bench.entries import Entry


def bench(
    data: Annotated[
        Path | None,
        typer.Option(
            help="A file of Spec-Bench, MT-Bench, HumanEval (also infilling), GSM8K, MBPP or ClassEval. Default: 48 "
            "built-in prompts.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The results. Finished runs are kept next to it, in a .jsonl file.")] = Path(
        "results.json"
    ),
    model: options.Model = options.DEFAULT_MODEL,
    methods: Annotated[str, typer.Option(help="Comma-separated names. Plain decoding is always included.")] = (
        "prompt-lookup,lookahead,auto"
    ),
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="METHOD.NAME=VALUE",
            help="A setting of a method. May be repeated; several values of one setting are all measured.",
        ),
    ] = [],
    tasks: Annotated[
        str, typer.Option(help="Comma-separated; built in: chat, code, math, question, summary, translation.")
    ] = "",
    each: Annotated[int, typer.Option(help="Take the first N questions of each task; 0: all.")] = 0,
    repeats: Annotated[int, typer.Option(help="How many times each question is run.")] = 1,
    traces: Annotated[
        Path | None, typer.Option(help="A folder for traces of all new runs of ours, for `outpace verify`.")
    ] = None,
    transformers: Annotated[bool, typer.Option(help="Also run transformers' own generate and prompt lookup.")] = True,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    runtime: options.Runtime = "auto",
    exact: options.Exact = None,
    raw: options.Raw = False,
    as_json: options.Json = False,
) -> None:
    """Benchmark methods against plain decoding and transformers. Exit code 1 if an output differs.

    To resume a bench that was stopped, run the same command again.
    """
    options.check(
        *(model, options.listed(methods), runtime, dtype, max_new_tokens), temperature=temperature, top_p=top_p
    )
    if out.suffix != ".json":
        raise InputError(f"--out {out}: the file must end in .json.")
    options.check_files({"--data": data}, {"--out": out})
    from ..bench.data import choose_questions, own_questions, read_questions
    from ..bench.entries import Ours, Transformers
    from ..bench.harness import Settings, digest, measure
    from ..bench.results import assemble
    from ..board import console_for_output
    from ..chart import print_bench, progress_bar
    from ..files import write_whole
    from ..picking import Sampling

    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    known = own_questions() if data is None else read_questions(data)
    how = Settings(max_new_tokens, repeats, sampling, raw, data.name if data else "", digest(known))
    questions = choose_questions(known, [name for name in options.listed(tasks) if name], each)
    chosen = choose_for_bench(options.listed(methods), settings, device)
    decoder, loaded = load_both(model, dtype, device, runtime, exact, weights)
    entries: list[Entry] = [
        Ours(decoder, decoder.prepare(name, **given), label, given, model) for label, (name, given) in chosen
    ]
    if transformers:
        entries += [Transformers(decoder, loaded), Transformers(decoder, loaded, lookup=True)]
    with progress_bar("measuring") as show:
        measured = measure(decoder, entries, questions, how, out.with_suffix(".jsonl"), show, traces)
    results = assemble(decoder, entries, questions, how, measured)
    write_whole(out, json.dumps(results))
    if measured.resumed:
        typer.echo(
            f"{measured.resumed} runs were finished before, and reused from {out.with_suffix('.jsonl')}", err=True
        )
    if as_json:
        kept = ("version", "date", "about", "settings", "entries", "identical", "summary", "skipped")
        typer.echo(json.dumps({"file": str(out), **{name: results[name] for name in kept}}))
    else:
        print_bench(console_for_output(), results)
        typer.echo(f"saved in {out}: draw it with `outpace report {out}`", err=True)
    if not results["identical"]:
        raise typer.Exit(1)


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="lookahead|adadecode|amphista", show_default=False)],
    model: options.Model = options.DEFAULT_MODEL,
    data: Annotated[
        list[Path],
        typer.Option(help="A file of questions, as for `bench`. May be repeated. Default: 48 built-in prompts."),
    ] = [],
    short: Annotated[
        bool | None,
        typer.Option(
            "--short/--full",
            help="One question of each task and 32 new tokens, or 4 and 128. Default: short on a CPU.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FOLDER",
            help="Heads to use instead of the installed ones (exits, medusa, hydra, amphista), or variants to compare: "
            "for adadecode `full`, or a domain like `math`; for amphista any name. May be repeated.",
        ),
    ] = [],
    answers: Annotated[
        Path | None, typer.Option(help="amphista: also evaluate heads on these held-out answers, as saved by `train`.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for tables (.md, .json) and plots (.svg).")] = Path("reproduced"),
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    runtime: options.Runtime = "auto",
    exact: options.Exact = None,
    raw: options.Raw = False,
    as_json: options.Json = False,
) -> None:
    """Reproduce a paper's tables and figures, next to the paper's own numbers, and check its claims.

    Finished runs are kept in the folder `runs` of --out: run the same command again to resume.
    """
    options.check(model, runtime=runtime, dtype=dtype)
    from ..bench.data import own_questions, read_questions
    from ..chart import can_plot, progress_bar
    from ..reproduce import PAPERS, stem
    from ..reproduce.lab import FULL, SHORT, Lab

    if paper not in PAPERS:
        raise UnknownNameError("paper", paper, PAPERS)
    extra: dict[str, Any] = {}
    if heads:
        extra["heads"] = dict(map(_split_heads, heads))
    if answers is not None:
        extra["answers"] = answers
    if heads and paper == "lookahead":
        raise InputError("--heads: lookahead has no heads. Leave it out.")
    if answers is not None and paper != "amphista":
        raise InputError("--answers is for amphista only. Leave it out.")
    questions = read_questions(*data) if data else own_questions()
    decoder, loaded = load_both(model, dtype, device, runtime, exact, weights)
    scale = SHORT if short or (short is None and decoder.model.device.type == "cpu") else FULL
    name = stem(paper, model, decoder)
    with progress_bar(paper) as show:
        lab = Lab(
            *(decoder, questions, scale, out / "runs" / name),
            model=loaded,
            data=", ".join(path.name for path in data),
            raw=raw,
            show=show,
        )
        findings = PAPERS[paper](lab, **extra)
    command = ["outpace reproduce", paper]
    command += [f"--model {model}"] if model != options.DEFAULT_MODEL else []
    command += ["--short" if scale == SHORT else "--full", *(f"--data {path.name}" for path in data)]
    command += [f"--heads {text}" for text in heads]
    command += [] if exact is None else ["--exact" if exact else "--fast"]
    page = findings.save(out, name, " ".join(command))
    if as_json:
        typer.echo(json.dumps({"file": str(page), **findings.to_json()}))
    else:
        typer.echo(page.read_text(encoding="utf-8"))
        missing = "" if can_plot() else "; plots need matplotlib: pip install 'outpace[bench]'"
        typer.echo(f"saved in {page} and {page.with_suffix('.json')}{missing}", err=True)


def _split_heads(given: str) -> tuple[str, str]:
    name, equals, folder = given.partition("=")
    if not (name and equals and folder):
        raise InputError(f"--heads {given}: expected NAME=FOLDER, as in --heads exits=heads/exits.")
    return name, folder


def calibrate(
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    runtime: options.Runtime = "auto",
    exact: options.Exact = None,
    plot: Annotated[Path | None, typer.Option(help="Also plot it to this file (.png, .svg); needs matplotlib.")] = None,
    force: Annotated[bool, typer.Option(help="Save the figures of a busy machine too.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure the cost of steps by rows and context, so that methods given by name draft as much as pays here.

    Then show the state of `auto`, which needs no calibration: the acceptance it expects, and what it chose on a few
    prompts.
    """
    options.check(model, runtime=runtime, dtype=dtype)
    from ..bench.calibration import STEADY, look
    from ..bench.calibration import calibrate as run
    from ..board import console_for_output
    from ..chart import check_plot, print_costs, print_look, progress_bar, save_calibration
    from ..models.loading import usual_weights
    from ..runtime.calibrate import folder as costs_folder

    check_plot(plot)
    decoder = load_decoder(model, dtype, device, runtime, exact, weights)
    with progress_bar("measuring") as show:
        curve, swing = found = run(decoder, lambda share: show(0.9 * share))
        seen = look(decoder)
    path = curve.save(costs_folder()) if found.steady or force else None
    if plot is not None:
        save_calibration(curve, seen, plot)
    if as_json:
        typer.echo(json.dumps({**asdict(curve), "auto": seen.to_json(), "swing": swing, "file": path and str(path)}))
    else:
        console = console_for_output()
        print_costs(console, curve, decoder)
        print_look(console, seen)
    if path is None:
        raise OutpaceError(
            "not saved: other work disturbed the measurement. Between two runs of a prompt, plain decoding's speed "
            f"differed by {swing:.0%}; at most {STEADY:.0%} is allowed. Run it on an idle machine, or with --force."
        )
    if as_json:
        return
    typer.echo(f"saved in {path}", err=True)
    if weights is None and usual_weights(model, dtype, device, runtime):
        typer.echo(
            "measured in float32, as race and bench load this model; for generate, chat and serve: "
            "outpace calibrate --weights packed",
            err=True,
        )
