"""The command line: `outpace generate`, `race`, `bench`, `verify`, `report`, `reproduce`, `train`, `export`,
`calibrate`, `models`.

What is asked for goes to standard output, everything else to standard error. torch and transformers take seconds to
import, so that happens inside the commands, after the arguments are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer
from typer.core import TyperGroup

from .errors import InputError, OutpaceError, UnknownNameError

if TYPE_CHECKING:
    from .bench.entries import Entry as Entered
    from .decoder import Decoder, Result
    from .draft import Step
    from .methods import Method
    from .race import Race

FAILED, INTERRUPTED = 2, 130
# Repeats (the class, its methods) and fresh text in turn: something for every method to guess, and to guess wrong.
PROMPT_FOR_RACE = """\
Write this class with the methods sub, mul and div added:

class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        self.x += other.x
        self.y += other.y
"""


class _Group(TyperGroup):
    """Turns what a user can mend into one line and an exit code. Anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:  # Any: whose Context it is depends on the version of typer
        try:
            return super().invoke(ctx)
        except OutpaceError as error:
            typer.echo(f"outpace: {error}", err=True)
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as error:
            typer.echo("\noutpace: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    cls=_Group,
    name="outpace",
    help="The same text from a Hugging Face causal language model, in fewer steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point of the `outpace` command."""
    app(prog_name="outpace")


Model = Annotated[str, typer.Option(help="An embedded model (see `outpace models`), a folder, or a hub id.")]
MaxNewTokens = Annotated[int, typer.Option(help="The most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample among the so many best tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample among the fewest tokens with this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this part of the best one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages tokens of the prompt and answer.")]
PresencePenalty = Annotated[float, typer.Option(help="Taken off the logit of a token that the answer has.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each time that the answer has it.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text with every method.")]
Rule = Annotated[str, typer.Option(metavar="keyed|rejection", help="How samples are drawn.")]
Stop = Annotated[list[str], typer.Option(metavar="TEXT", help="End before this text. May be repeated.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16", help="Default: float32 on a CPU, otherwise bfloat16.", show_default=False
    ),
]
Device = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.", show_default=False)]
Runtime = Annotated[str, typer.Option(metavar="auto|plain|compiled|graphs", help="How steps are executed.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="CUDA, or a CPU in float32: the same bits with every method, at some cost.")
]
Parallel = Annotated[
    bool, typer.Option("--parallel", help="Deal drafts out to the ranks that torchrun started; the first one prints.")
]
Timeout = Annotated[float, typer.Option(help="With --parallel: a rank that is silent for so many seconds is an error.")]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Write answers to the prompts of this file (JSON lines, or .txt) together, as JSON lines."),
    ] = None,
    model: Model = "smollm2-135m",
    method: Annotated[
        str | None, typer.Option(help="How to draft. Default: lookahead, on a CPU prompt-lookup.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method. May be repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    rule: Rule = "keyed",
    stop: Stop = [],  # noqa: B006
    dtype: Dtype = None,
    device: Device = None,
    runtime: Runtime = "auto",
    exact: Exact = False,
    parallel: Parallel = False,
    timeout: Timeout = 120.0,
    raw: Raw = False,
    picture: Annotated[
        Path | None, typer.Option(help="With early exits: also draw which layers ran when, to this .svg file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write all that the run did to this file, for `outpace verify`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an answer to PROMPT, or to each prompt of a file."""
    from .picking import Sampling
    from .picture import check_picture, save_staircase
    from .trace import record
    from .training.data import read_prompts

    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        rule=rule,  # type: ignore[arg-type] # checked by Sampling
    )
    name, given = _entry(method, dict(map(_split, settings)), device)
    check_picture(picture, name)
    if prompts is not None and (prompt is not None or trace or picture or parallel):
        raise InputError("--prompts has all prompts: PROMPT, --trace, --picture and --parallel do not go with it.")
    if prompt is None and prompts is None:
        raise InputError("there is no prompt. Give a PROMPT, or a file of prompts with --prompts.")
    texts = read_prompts(prompts) if prompts is not None else [_read(prompt or "")]
    silent = False
    if parallel:
        from .parallel import join, local_device

        device = device or local_device()
    decoder = _load(model, dtype, device, runtime, exact)
    if parallel:
        joined = join(decoder, timeout)
        decoder, silent = joined, joined.ranks.rank > 0
    decoder.method = decoder.prepare(name, **given)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop}
    if prompts is not None:
        _write_together(decoder, texts, {**options, "raw": raw})
        return
    tokens = decoder.encode(texts[0], raw)
    if silent:
        for _ in decoder.stream(tokens, **options):
            pass
        return
    steps = _stream(decoder, tokens, options, as_json)
    if trace is not None:
        record(decoder, decoder.method, tokens, steps, model=model, **options).save(trace)
        if not as_json:
            typer.echo(f"trace in {trace}: check it with `outpace verify {trace}`", err=True)
    if picture is not None:
        save_staircase(picture, steps, decoder.model.layers, lambda token: decoder.tokenizer.decode([token]))


@app.command()
def verify(
    trace: Annotated[Path, typer.Argument(help="A file that --trace wrote.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="Default: the model that the trace names.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Scores so near are a near-tie. Default: by the dtype, float32 0.001.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16|float16", help="Default: as in the trace.", show_default=False),
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Score the text of a trace again with plain forwards, and pick each token again. Exit code 1 on a failure."""
    from .board import console_for_output
    from .chart import print_receipt
    from .receipt import check
    from .trace import read_trace

    found = read_trace(trace)
    decoder = _load(model or found.model, dtype or found.about.get("dtype"), device, "plain")
    receipt = check(decoder, found, tolerance)
    if as_json:
        typer.echo(json.dumps(receipt.to_json()))
    else:
        print_receipt(console_for_output(), receipt, decoder.tokenizer)
    if not receipt.passed:
        raise typer.Exit(1)


@app.command()
def race(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ] = PROMPT_FOR_RACE,
    model: Model = "smollm2-135m",
    methods: Annotated[str, typer.Option(help="Names with commas between. The first sets the pace.")] = (
        "autoregressive,jacobi,prompt-lookup,lookahead"
    ),
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="METHOD.NAME=VALUE", help="A setting of a method. May be repeated."),
    ] = [],  # noqa: B006
    max_new_tokens: MaxNewTokens = 96,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    runtime: Runtime = "auto",
    exact: Exact = False,
    raw: Raw = False,
    page: Annotated[Path | None, typer.Option(help="Also write the race as a page (.html), to play it again.")] = None,
    as_json: Json = False,
) -> None:
    """Let several methods write the same answer, one after another, and compare. Exit code 1 if the texts differ."""
    from .bench.harness import Settings
    from .bench.recording import Recorder
    from .board import Board, console_for_output, print_race
    from .picking import Sampling
    from .race import run

    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    _check_page(page)
    entries = _entries(methods.split(","), settings, device)
    text = _read(prompt)
    decoder = _load(model, dtype, device, runtime, exact)
    entered = [decoder.prepare(name, **given) for name, given in entries]
    recorder = Recorder(decoder, entered)
    if as_json:
        outcome = run(decoder, entered, text, sampling, max_new_tokens, raw, recorder.show)
        typer.echo(json.dumps(_race_json(decoder, entered, text, outcome)))
    else:
        console = console_for_output()
        board = Board(console, entered, decoder.tokenizer)

        def show(number: int, lane: Result, step: Step) -> None:
            recorder.show(number, lane, step)
            board.show(number, lane, step)

        with board:
            outcome = run(decoder, entered, text, sampling, max_new_tokens, raw, show)
        print_race(console, board, entered, outcome)
    if page is not None:
        _write_page(recorder.results(text, Settings(max_new_tokens, sampling=sampling, raw=raw), outcome), page)
    if not outcome.identical:
        raise typer.Exit(1)


@app.command()
def bench(
    data: Annotated[
        Path | None,
        typer.Option(
            help="A file of Spec-Bench, MT-Bench, HumanEval, GSM8K, MBPP or ClassEval. Default: 48 prompts of our own.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The results. Finished runs are kept beside it, in a .jsonl file.")] = Path(
        "results.json"
    ),
    model: Model = "smollm2-135m",
    methods: Annotated[str, typer.Option(help="Names with commas between. Plain decoding is always among them.")] = (
        "prompt-lookup,lookahead"
    ),
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="METHOD.NAME=VALUE",
            help="A setting of a method. May be repeated; the same one with several values measures each.",
        ),
    ] = [],  # noqa: B006
    tasks: Annotated[str, typer.Option(help="Names of tasks with commas between. Default: all.")] = "",
    each: Annotated[int, typer.Option(help="The first so many questions of each task; 0: all.")] = 0,
    repeats: Annotated[int, typer.Option(help="Times over all questions.")] = 1,
    traces: Annotated[
        Path | None, typer.Option(help="A folder: each new run of ours leaves a trace there, for `outpace verify`.")
    ] = None,
    transformers: Annotated[bool, typer.Option(help="Also run transformers' own generate and prompt lookup.")] = True,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    runtime: Runtime = "auto",
    exact: Exact = False,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Measure methods on questions, against plain decoding and transformers. Exit code 1 if a text differs.

    A bench that was stopped goes on where it was when it is called again in the same way.
    """
    from .bench.data import choose_questions, own_questions, read_questions
    from .bench.entries import Ours, Transformers
    from .bench.harness import Settings, digest, measure
    from .bench.results import assemble
    from .board import console_for_output
    from .chart import print_bench, progress_bar
    from .files import write_whole
    from .picking import Sampling

    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    known = own_questions() if data is None else read_questions(data)
    how = Settings(max_new_tokens, repeats, sampling, raw, data.name if data else "", digest(known))
    questions = choose_questions(known, [name.strip() for name in tasks.split(",") if name.strip()], each)
    if out.suffix != ".json":
        raise InputError(f"--out {out}: the file must end in .json.")
    grid = _grid([name.strip() for name in methods.split(",")], settings, device)
    decoder, loaded = _load_both(model, dtype, device, runtime, exact)
    entries: list[Entered] = [
        Ours(decoder, decoder.prepare(name, **given), label, given, model) for label, name, given in grid
    ]
    if transformers:
        entries += [Transformers(decoder, loaded), Transformers(decoder, loaded, lookup=True)]
    with progress_bar("measuring") as show:
        measured = measure(decoder, entries, questions, how, out.with_suffix(".jsonl"), show, traces)
    results = assemble(decoder, entries, questions, how, measured)
    write_whole(out, json.dumps(results))
    if measured.resumed:
        typer.echo(f"{measured.resumed} runs were finished before, in {out.with_suffix('.jsonl')}", err=True)
    if as_json:
        kept = ("version", "date", "about", "settings", "entries", "identical", "summary", "skipped")
        typer.echo(json.dumps({"file": str(out), **{name: results[name] for name in kept}}))
    else:
        print_bench(console_for_output(), results)
        typer.echo(f"kept in {out}: draw it with `outpace report {out}`", err=True)
    if not results["identical"]:
        raise typer.Exit(1)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A file that `outpace bench` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    plot: Annotated[
        Path | None, typer.Option(help="Also draw speeds by task to this file (.png, .svg); needs matplotlib.")
    ] = None,
) -> None:
    """Draw RESULTS as one page: the race, the guesses step by step, charts. It needs no network."""
    _check_page(out)
    if plot is not None:
        from .bench.results import read_results
        from .chart import check_plot, save_speeds

        check_plot(plot)
        save_speeds(read_results(results), plot)
    _write_page(results, out)


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="lookahead|adadecode|amphista", show_default=False)],
    model: Model = "smollm2-135m",
    data: Annotated[
        list[Path],
        typer.Option(help="A file of questions, as for `bench`. May be repeated. Default: 48 prompts of our own."),
    ] = [],  # noqa: B006
    short: Annotated[
        bool | None,
        typer.Option(
            "--short/--full",
            help="One question of each task and 32 new tokens, or 8 and 128. Default: short on a CPU.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FOLDER",
            help="Heads in place of those that come with Outpace (exits, medusa, hydra, amphista), or variants to "
            "compare with: for adadecode `full`, or a domain like `math`; for amphista any name. May be repeated.",
        ),
    ] = [],  # noqa: B006
    answers: Annotated[
        Path | None, typer.Option(help="amphista: judge heads on these held-out answers too, as `train` keeps them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for tables (.md, .json) and plots (.svg).")] = Path("reproduced"),
    dtype: Dtype = None,
    device: Device = None,
    runtime: Runtime = "auto",
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Measure the tables and figures of PAPER, and print them beside the paper's own, with what holds.

    Finished runs are kept in the folder `runs` of --out: what was stopped goes on where it was.
    """
    from .bench.data import own_questions, read_questions
    from .chart import can_plot, progress_bar
    from .reproduce import PAPERS, stem
    from .reproduce.lab import FULL, SHORT, Lab

    if paper not in PAPERS:
        raise UnknownNameError("paper", paper, PAPERS)
    options: dict[str, Any] = {}
    if heads:
        options["heads"] = dict(map(_split_heads, heads))
    if answers is not None:
        options["answers"] = answers
    if heads and paper == "lookahead":
        raise InputError("--heads: lookahead has no heads.")
    if answers is not None and paper != "amphista":
        raise InputError("--answers is for amphista alone.")
    questions = read_questions(*data) if data else own_questions()
    decoder, loaded = _load_both(model, dtype, device, runtime)
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
        findings = PAPERS[paper](lab, **options)
    given = [f"--model {model}"] if model != "smollm2-135m" else []
    given += ["--short" if scale == SHORT else "--full", *(f"--data {path.name}" for path in data)]
    given += [f"--heads {text}" for text in heads]
    page = findings.save(out, name, " ".join(["outpace reproduce", paper, *given]))
    if as_json:
        typer.echo(json.dumps({"file": str(page), **findings.to_json()}))
    else:
        typer.echo(page.read_text(encoding="utf-8"))
        missing = "" if can_plot() else "; plots need matplotlib: pip install 'outpace[bench]'"
        typer.echo(f"kept in {page} and {page.with_suffix('.json')}{missing}", err=True)


@app.command()
def calibrate(
    model: Model = "smollm2-135m",
    dtype: Dtype = None,
    device: Device = None,
    runtime: Runtime = "auto",
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the curve to this file (.png, .svg); needs matplotlib.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what steps cost by rows and context, so that methods draft as much as pays here."""
    from .bench.calibration import calibrate as run
    from .board import console_for_output
    from .chart import check_plot, print_costs, progress_bar, save_costs
    from .runtime.calibrate import folder as costs_folder

    check_plot(plot)
    decoder = _load(model, dtype, device, runtime)
    with progress_bar("measuring") as show:
        curve = run(decoder, show)
    path = curve.save(costs_folder())
    if plot is not None:
        save_costs(curve, plot)
    if as_json:
        typer.echo(json.dumps({**asdict(curve), "file": str(path)}))
        return
    print_costs(console_for_output(), curve, decoder)
    typer.echo(f"kept in {path}", err=True)


@app.command()
def train(
    kinds: Annotated[
        list[str], typer.Argument(help="medusa, hydra, amphista, exits: one or several, trained together.")
    ],
    prompts: Annotated[Path, typer.Option(help="JSON lines with prompts; the model's own answers are trained on.")],
    out: Annotated[Path, typer.Option(help="Where the heads go, a folder each, and the answers.")],
    model: Model = "smollm2-135m",
    answers: Annotated[
        Path | None, typer.Option(help="Where answers are kept and found again. Default: in --out.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KIND.NAME=VALUE", help="A setting of the heads. May be repeated.")
    ] = [],  # noqa: B006
    updates: Annotated[int, typer.Option(help="Stop after so many updates.")] = 0,
    minutes: Annotated[float, typer.Option(help="Or after so many minutes.")] = 0.0,
    tokens: Annotated[int, typer.Option(help="Tokens of an update.")] = 16384,
    rate: Annotated[float, typer.Option(help="The highest learning rate of matrices, by Muon.")] = 1e-2,
    vector_rate: Annotated[float, typer.Option(help="The same for norms and biases, by AdamW.")] = 3e-3,
    weight: Annotated[float, typer.Option(help="Of each head's loss, relative to the head before it.")] = 0.8,
    hard: Annotated[float, typer.Option(help="Share of the loss that counts the model's choice alone.")] = 0.0,
    held_out: Annotated[int, typer.Option(help="Prompts kept back, to measure accuracies on.")] = 256,
    rounds: Annotated[int, typer.Option(help="How often all prompts are answered.")] = 1,
    batch: Annotated[int, typer.Option(help="Prompts that are answered at a time.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 256,
    answer_minutes: Annotated[float, typer.Option(help="Stop answering after so long; 0: when all is answered.")] = 0.0,
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a training that was stopped.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the accuracies to this file (.png, .svg); needs matplotlib.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train heads that draft, on the model's own answers. Ends with a table of held-out accuracies.

    On several GPUs: accelerate launch -m outpace train ...
    """
    from .board import console_for_output
    from .chart import check_plot, print_accuracies, progress_bar, save_accuracies
    from .training.data import read_prompts
    from .training.run import Answers, make_heads, open_out
    from .training.run import answers as get_answers
    from .training.run import train as run
    from .training.team import Team
    from .training.trainer import Plan

    team = Team()
    plan = Plan(updates, minutes, tokens, rate, vector_rate, weight, hard, seed=seed)
    how = Answers(held_out, rounds, batch, new_tokens, answer_minutes, seed)
    given = _grouped(kinds, settings, "kind of heads to train", "KIND.NAME=VALUE, as in --set amphista.stages=1")
    chosen = {kind: _head_settings(kind, given[kind]) for kind in kinds}
    texts = read_prompts(prompts)
    check_plot(plot)
    open_out(out, resume)  # before anything that takes long
    decoder, loaded = _load_both(model, dtype, device or team.device)
    ends = decoder.model.ends()
    heads = {kind: make_heads(loaded, ends, kind, chosen[kind]) for kind in kinds}
    with progress_bar("answering", team.leads) as show:
        train_on, held = get_answers(decoder, loaded, texts, answers or out / "answers", how, show, team)
    made_by = {"prompts": prompts.name, **asdict(how)}
    with progress_bar("training", team.leads) as show:
        found = run(
            *(loaded, decoder.model, heads, train_on, held, plan, out),
            resume=resume,
            made_by=made_by,
            show=show,
            team=team,
        )
    if not team.leads:
        return
    accuracies = {name: part.tolist() for name, part in found.items()}
    if plot is not None:
        save_accuracies(accuracies, plot)
    if as_json:
        typer.echo(json.dumps({"out": str(out), "accuracies": accuracies}))
        return
    print_accuracies(console_for_output(), accuracies)
    typer.echo(f"kept in {out}: use them with --method KIND (exits: adadecode) --set heads={out}/KIND", err=True)


@app.command()
def export(
    kind: Annotated[str, typer.Argument(help="medusa")],
    folder: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="vllm|tgi|reference", help="Whose format.")],
    heads: Annotated[
        Path | None, typer.Option(help="Trained heads. Default: those that come with Outpace.", show_default=False)
    ] = None,
    model: Model = "smollm2-135m",
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Write trained heads to FOLDER in the format of another system."""
    from .heads import KINDS
    from .heads.exporting import FORMATS
    from .heads.exporting import export as write

    if kind not in KINDS:
        raise UnknownNameError("kind of heads", kind, KINDS)
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    decoder = _load(model, dtype, device, "plain")
    method: Any = decoder.prepare(kind, **({"heads": str(heads)} if heads else {}))
    write(method.heads.heads, decoder.model, to, folder)
    typer.echo(f"written to {folder}", err=True)


@app.command()
def models(as_json: Json = False) -> None:
    """List the embedded models."""
    from .models import bundled

    found = []
    for entry in bundled.MODELS.values():
        folder = bundled.cache_folder() / entry.name
        state = "ready" if bundled.is_ready(entry.name) else "fetched at first use"
        if folder.exists() and state != "ready":
            state = "broken: delete the folder"
        found.append([entry.name, state, str(folder), entry.licence, entry.description])
    columns = ("name", "state", "folder", "licence", "description")
    if as_json:
        typer.echo(json.dumps({"models": [dict(zip(columns, row, strict=True)) for row in found]}))
        return
    from .board import console_for_output, table_of

    console = console_for_output()
    console.print(table_of(columns, found))
    console.print("--model also takes the folder of a Hugging Face causal language model, or a hub id (owner/name).")


def _read(prompt: str) -> str:
    """The prompt, from standard input for `-`."""
    try:
        if prompt == "-":
            return typer.get_binary_stream("stdin").read().decode()
        prompt.encode()  # bytes of an argument that are no text arrive as lone surrogates
    except UnicodeError as error:
        raise InputError("the prompt is not UTF-8 text.") from error
    return prompt


def _split_heads(given: str) -> tuple[str, str]:
    name, equals, folder = given.partition("=")
    if not (name and equals and folder):
        raise InputError(f"--heads {given}: expected NAME=FOLDER, as in --heads exits=heads/exits.")
    return name, folder


def _split(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not (name and equals):
        raise InputError(f"--set {setting}: expected NAME=VALUE, as in --set window=15.")
    return name.strip(), value.strip()


Entry: TypeAlias = tuple[str, dict[str, object]]
"""A method's name and the settings that are given."""


def _entry(name: str | None, settings: dict[str, str], device: str | None) -> Entry:
    """A method by name, its settings read by the types of its fields, and checked before a model is loaded."""
    from .methods import METHODS, default_method, make
    from .models.loading import resolve_device

    cpu = resolve_device(device).type == "cpu"
    name = name or default_method(cpu=cpu)
    kinds = get_type_hints(METHODS[name]) if name in METHODS else {}
    given = {key: _convert(name, key, value, kinds.get(key)) for key, value in settings.items()}
    make(name, cpu=cpu, costs=None, **given)
    return name, given


def _convert(method: str, name: str, value: str, kind: object) -> object:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise InputError(f"{method}: {name}={value!r} must be true or false.")
        return value.lower() == "true"
    if kind is int or kind is float:
        try:
            return int(value) if kind is int else float(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise InputError(f"{method}: {name}={value!r} must be {wanted}.") from None
    return value


def _head_settings(kind: str, settings: dict[str, str]) -> dict[str, object]:
    """Settings of heads, read by the types of their fields."""
    from .heads import TRAINABLE

    if kind not in TRAINABLE:
        raise UnknownNameError("kind of heads", kind, TRAINABLE)
    types = get_type_hints(TRAINABLE[kind].settings_type)
    return {name: _convert(kind, name, value, types.get(name)) for name, value in settings.items()}


def _entries(names: Sequence[str], settings: Iterable[str], device: str | None) -> list[Entry]:
    """The methods of a race, with their settings."""
    names = [name.strip() for name in names]
    given = _grouped(names, settings, "method in this race", "METHOD.NAME=VALUE, as in --set lookahead.window=5")
    return [_entry(name, given[name], device) for name in names]


def _grid(
    names: Sequence[str], settings: Sequence[str], device: str | None
) -> list[tuple[str, str, dict[str, object]]]:
    """The methods of a bench with their settings: label, name, settings. Plain decoding comes first."""
    plain = "autoregressive"
    names = [plain, *(name for name in names if name != plain)]
    choices: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for setting in settings:
        for name, given in _grouped(names, [setting], "method in this bench", _FORM).items():
            for key, value in given.items():
                choices[name].setdefault(key, []).append(value)
    found = []
    for name in names:
        for values in product(*choices[name].values()):
            chosen = dict(zip(choices[name], values, strict=True))
            label = " ".join([name, *(f"{key}={value}" for key, value in chosen.items())])
            found.append((label, *_entry(name, chosen, device)))
    return found


_FORM = "METHOD.NAME=VALUE, as in --set lookahead.window=5"


def _grouped(names: Sequence[str], settings: Iterable[str], kind: str, form: str) -> dict[str, dict[str, str]]:
    """Settings like OWNER.NAME=VALUE by owner."""
    given: dict[str, dict[str, str]] = {name: {} for name in names}
    for setting in settings:
        key, value = _split(setting)
        owner, dot, name = key.partition(".")
        if not (dot and name):
            raise InputError(f"--set {setting}: expected {form}.")
        if owner not in given:
            raise UnknownNameError(kind, owner, given)
        given[owner][name] = value
    return given


def _load(model: str, dtype: str | None, device: str | None, runtime: str, exact: bool = False) -> Decoder:
    from transformers.utils import logging

    from .decoder import load
    from .runtime.choose import RUNTIMES

    if runtime not in RUNTIMES:
        raise UnknownNameError("runtime", runtime, RUNTIMES)
    logging.disable_progress_bar()
    return load(model, method="autoregressive", dtype=dtype, device=device, runtime=runtime, exact=exact)


def _load_both(
    model: str, dtype: str | None, device: str | None, runtime: str = "plain", exact: bool = False
) -> tuple[Decoder, Any]:
    """A decoder and the transformers model in it."""
    from transformers.utils import logging

    from .decoder import Decoder
    from .models.loading import load
    from .runtime.choose import RUNTIMES

    if runtime not in RUNTIMES:
        raise UnknownNameError("runtime", runtime, RUNTIMES)
    logging.disable_progress_bar()
    loaded = load(model, dtype, device)
    return Decoder(loaded.model, loaded.tokenizer, "autoregressive", runtime=runtime, exact=exact), loaded.model


def _stream(decoder: Decoder, tokens: list[int], options: dict[str, Any], as_json: bool) -> list[Step]:
    """Write and print: the text as it comes, or at the end one JSON object."""
    from .board import numbers

    result = decoder.begin(tokens)
    steps = []
    for step in result.follow(decoder.stream(tokens, **options)):
        steps.append(step)
        if not as_json:
            typer.echo(step.text, nl=False)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        typer.echo()
        typer.echo(f"{result.method}: {numbers(result)}", err=True)
    return steps


def _write_together(decoder: Decoder, prompts: list[str], options: dict[str, Any]) -> None:
    """Write and print: a JSON object for each text, when it ends. Exit code 2 if one failed."""
    from .chart import progress_bar

    batch = decoder.stream(prompts, **options)
    results = [decoder.begin(request.prompt) for request in batch.requests]
    start = perf_counter()
    done = failed = 0
    with progress_bar("writing") as show:
        for number, item in batch:
            result = results[number]
            result.seconds = perf_counter() - start
            error = {}
            if isinstance(item, Exception):
                result.finish_reason, error = "error", {"error": str(item)}
                failed += 1
            else:
                result.take(item)
            if result.finish_reason is not None:
                done += 1
                typer.echo(json.dumps({"number": number, "prompt": prompts[number], **result.to_json(), **error}))
                show(done / len(prompts))
    if failed:
        typer.echo(f"outpace: {failed} of {len(prompts)} texts failed; their lines have an error.", err=True)
        raise typer.Exit(FAILED)


def _check_page(path: Path | None) -> None:
    if path is not None and path.suffix not in (".html", ".htm"):
        raise InputError(f"{path}: a page must end in .html.")


def _write_page(results: Path | dict[str, Any], path: Path) -> None:
    from .report import write_report

    left_out = write_report(results, path)
    if left_out:
        typer.echo(f"to keep the page small, the races on {', '.join(left_out)} are not in it", err=True)
    typer.echo(f"written to {path}: open it in a browser, {path.resolve().as_uri()}", err=True)


def _race_json(decoder: Decoder, methods: Sequence[Method], prompt: str, outcome: Race) -> dict[str, object]:
    from .board import settings_of

    runs = [
        {
            **run.to_json(),
            "sources": run.sources,
            "settings": settings_of(method),
            "speed": outcome.speed(run),
            "differs_at": outcome.differs_at(run),
        }
        for method, run in zip(methods, outcome.runs, strict=True)
    ]
    return {
        "model": decoder.model.name,
        "prompt": prompt,
        "identical": outcome.identical,
        "verdict": outcome.verdict,
        "runs": runs,
    }
