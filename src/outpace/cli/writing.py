"""`outpace generate`, and `outpace verify`, which checks its output."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, OutpaceError
from ..models.bundled import NAMES
from . import options
from .loading import load_decoder
from .prompts import Entry, read_entries
from .settings import choose_method

if TYPE_CHECKING:
    from ..decoder import Decoder
    from ..draft import Step
    from ..result import Result


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. Without one, or with -, standard input is read.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Answer all prompts of this file as a batch; answers are JSON lines. The file has one prompt per line "
            "(.txt), or JSON lines with prompt, turns or messages; other fields are copied to the output."
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    model: options.Model = options.DEFAULT_MODEL,
    method: Annotated[
        str | None, typer.Option(help=f"The drafting method: {options.METHODS}. Default: auto.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method. May be repeated.")
    ] = [],
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the K most likely tokens; 0 is off.")] = 0,
    top_p: options.TopP = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this fraction of the best one.")] = 0.0,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1 discourages tokens that are in the prompt or the answer. Default: the model's own.",
            show_default=False,
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted once from the logit of each token that is in the answer.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted from a token's logit once per occurrence in the answer.")
    ] = 0.0,
    seed: options.Seed = 0,
    rule: Annotated[
        str,
        typer.Option(
            metavar="keyed|rejection|typical",
            help="The sampling rule: keyed noise, rejection sampling, or typical acceptance (lossy).",
        ),
    ] = "keyed",
    stop: Annotated[list[str], typer.Option(metavar="TEXT", help="Stop before this string. May be repeated.")] = [],
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    runtime: options.Runtime = "auto",
    exact: options.Exact = None,
    parallel: Annotated[
        bool,
        typer.Option("--parallel", help="Split each draft over the ranks started by torchrun; rank 0 prints."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="With --parallel: fail if a rank does not respond for this many seconds.")
    ] = 120.0,
    raw: options.Raw = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log probabilities, and this many alternatives per token.", show_default=False),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="Constrain the answer to the JSON schema in this file.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Constrain the whole answer to this regular expression.", show_default=False)
    ] = None,
    prediction: Annotated[Path | None, typer.Option(help="A file with an expected answer, to draft from.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="With early exits: also draw which layers ran when, to this .svg file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write a trace of the run to this file, for `outpace verify`.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Generate an answer to PROMPT, or to each prompt of a file."""
    chance = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "rule": rule,
    }
    options.check(model, [method] if method else [], runtime, dtype, max_new_tokens, **chance)
    options.check_files(
        {"--json-schema": json_schema, "--prediction": prediction},
        {"--trace": trace, "--picture": picture},
    )
    if trace and (json_schema is not None or regex is not None):
        raise InputError("--trace: a grammar cannot be written to a trace. Leave out --json-schema and --regex.")
    if logprobs is not None and not (as_json or prompts):
        raise InputError("--logprobs needs --json or --prompts.")
    if prompts is not None and (prompt is not None or trace or picture or parallel):
        raise InputError("--prompts cannot be combined with PROMPT, --trace, --picture or --parallel.")
    if system and raw:
        raise InputError("--system needs the chat template, which --raw turns off. Leave one of them out.")
    entries = None if prompts is None else read_entries(prompts, system, raw)
    text = None if entries is not None else options.prompt_or_pipe(prompt)
    if entries is None and text is None:
        raise InputError("there is no prompt. Give a PROMPT, pipe one in, or give a file of prompts with --prompts.")
    if text is not None:
        options.check_prompt(text, raw)

    from ..picking import Sampling
    from ..picture import check_picture, save_staircase
    from ..trace import record

    sampling = Sampling(**chance)  # type: ignore[arg-type] # of as many types as fields
    name, given = choose_method(method, settings, device)
    check_picture(picture, name, given.get("control"))
    if picture is not None and name == "adadecode":
        given.setdefault("control", "calibrated")  # by default it drafts trees on a GPU, without deferred layers
    grammar = options.read_grammar(json_schema, regex)
    silent = False
    if parallel:
        from ..parallel import join, local_device

        device = device or local_device()
    decoder = load_decoder(model, dtype, device, runtime, exact, weights, usual=True)
    if parallel:
        joined = join(decoder, timeout)
        decoder, silent = joined, joined.ranks.rank > 0
    decoder.method = decoder.prepare(name, **given)
    how = None if sampling == Sampling() else sampling  # None: warn if the model's config asks for sampling
    asked: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": how, "stop": stop}
    also: dict[str, Any] = {"logprobs": logprobs, "grammar": grammar}
    if prediction is not None:
        also["prediction"] = options.read_text("--prediction", prediction)
    if entries is not None:
        _write_together(decoder, entries, {**asked, **also, "raw": raw})
        return
    asks = [{"role": role, "content": said} for role, said in (("system", system), ("user", text))]
    tokens = decoder.encode(asks if system else text or "", raw)
    if silent:
        for _ in decoder.stream(tokens, **asked, **also):
            pass
        return
    steps = _write(decoder, tokens, {**asked, **also}, as_json)
    if trace is not None:
        asked["sampling"] = sampling
        record(decoder, decoder.method, tokens, steps, model=model, weights=weights, **asked).save(trace)
        if not as_json:
            typer.echo(f"trace in {trace}: check it with `outpace verify {trace}`", err=True)
    if picture is not None:
        save_staircase(picture, steps, decoder.model.layers, lambda token: decoder.tokenizer.decode([token]))


def verify(
    trace: Annotated[Path, typer.Argument(help="A file written by --trace.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="Default: the model named in the trace.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Logits this close count as a tie. Default: by dtype (float32 0.001); 0 for traces of exact mode.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar=options.DTYPES, help="Default: as in the trace.", show_default=False),
    ] = None,
    weights: options.Weights = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Check a trace: score its text again with plain forward passes, and choose each token again.

    Exit code 1 if the check fails.
    """
    options.check_files({"TRACE": trace})
    from ..board import console_for_output
    from ..chart import print_receipt
    from ..models.loading import resolve_device
    from ..receipt import check
    from ..trace import read_trace

    found = read_trace(trace)
    runtime = found.about.get("runtime", "")
    same_kind = found.about.get("kind") == resolve_device(device).type  # other devices have other bits
    exact = runtime.startswith(("exact", "native")) and same_kind
    how = "compiled" if exact and runtime.endswith("compiled") else "auto" if exact else "plain"
    name = model or found.model
    if weights is None and name == found.model:
        weights = found.about.get("weights")
    if weights is None and runtime == "packed" and name in NAMES:  # a GGUF file is loaded packed anyway
        weights = "packed"
    decoder = load_decoder(name, dtype or found.about.get("dtype"), device, how, exact, weights)
    if runtime == "packed" and decoder.engine.name != "packed":
        raise InputError(f"{trace} is of a model with packed weights. Check it with --weights packed, q8 or q4.")
    receipt = check(decoder, found, tolerance)
    if as_json:
        typer.echo(json.dumps(receipt.to_json()))
    else:
        print_receipt(console_for_output(), receipt, decoder.tokenizer)
    if not receipt.passed:
        raise typer.Exit(1)


def _write(decoder: Decoder, tokens: list[int], asked: dict[str, Any], as_json: bool) -> list[Step]:
    """Generate and print: the text as it comes, or one JSON object at the end."""
    from ..board import numbers

    result = decoder.begin(tokens)
    steps = []
    for step in result.follow(decoder.stream(tokens, **asked)):
        steps.append(step)
        if not as_json:
            typer.echo(step.text, nl=False)
    if as_json:
        typer.echo(json.dumps({**result.to_json(), **_likely(result)}))
    else:
        typer.echo()
        typer.echo(f"{result.method}: {numbers(result, apart=True)}", err=True)
    return steps


def _likely(result: Result) -> dict[str, Any]:
    """The log probabilities of a result's tokens, if requested."""
    if not result.logprobs:
        return {}
    return {"logprobs": [{"logprob": entry.chance, "top": dict(entry.best)} for entry in result.logprobs]}


def _write_together(decoder: Decoder, entries: list[Entry], asked: dict[str, Any]) -> None:
    """Generate and print one JSON object per finished answer. Exit code 2 if one failed.

    The next turn of an entry starts when the one before it is answered.
    """
    from ..chart import progress_bar

    batch = decoder.batch()
    chats = [[*entry.before] for entry in entries]
    running: list[tuple[int, int]] = []  # by request: its entry and turn
    results: list[Result] = []
    start, total = perf_counter(), sum(len(entry.turns) for entry in entries)
    done = failed = 0

    def ask(place: int, turn: int) -> None:
        entry, chat = entries[place], chats[place]
        chat.append({"role": "user", "content": entry.turns[turn]})
        try:
            batch.add(entry.turns[turn] if entry.plain and not entry.before else [*chat], **asked)
        except OutpaceError as error:
            tell(place, turn, decoder.begin(()), error)
            return
        running.append((place, turn))
        results.append(decoder.begin(batch.requests[-1].prompt))

    def tell(place: int, turn: int, result: Result, error: Exception | None) -> None:
        nonlocal done, failed
        entry, why = entries[place], {}
        if error is not None:
            result.finish_reason, why = "error", {"error": str(error)}
            failed += 1
        named = {"turn": turn + 1} if len(entry.turns) > 1 else {}
        line = {**entry.fields, "number": place, **named, "prompt": entry.turns[turn], **result.to_json()}
        typer.echo(json.dumps({**line, **_likely(result), **why}))
        done += 1
        show(done / total)

    with progress_bar("generating") as show:
        for place in range(len(entries)):
            ask(place, 0)
        for number, item in batch:
            result, (place, turn) = results[number], running[number]
            result.seconds = perf_counter() - start
            if isinstance(item, Exception):
                tell(place, turn, result, item)
                continue
            result.take(item)
            if result.finish_reason is None:
                continue
            tell(place, turn, result, None)
            if turn + 1 < len(entries[place].turns):
                chats[place].append({"role": "assistant", "content": result.text})
                ask(place, turn + 1)
    if failed:
        raise OutpaceError(f"{failed} of {total} answers failed; their lines have an error.")
