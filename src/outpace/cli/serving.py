"""`outpace serve`, a server, and `outpace chat`, a chat in the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, ModelError, OutpaceError
from . import options
from .loading import load_decoder
from .settings import choose_method

if TYPE_CHECKING:
    from ..decoder import Decoder

HELP = "Ctrl-C stops an answer; /exit or Ctrl-D ends the chat; /new starts another; /help shows this."


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    method: Annotated[str, typer.Option(help="The drafting method of requests that name none.")] = "auto",
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method. May be repeated.")
    ] = [],
    host: Annotated[str, typer.Option(help="The address to listen on. Any but loopback needs --api-key-file.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 picks a free port.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="A file of API keys, one per line.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients. Default: --model.")] = None,
    max_texts: Annotated[int, typer.Option(help="Sequences decoded at the same time.", min=1)] = 64,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; requests beyond that get 429.", min=1)] = 256,
    max_new_tokens: Annotated[int, typer.Option(help="Token limit of chats that set none.", min=1)] = 4096,
    max_length: Annotated[
        int | None, typer.Option(help="Limit of prompt and answer, in tokens. A lower limit warms up faster.", min=2)
    ] = None,
    memory: Annotated[float, typer.Option(help="The share of a GPU's free memory for the KV cache.")] = 0.9,
    slots: Annotated[int, typer.Option(help="Size of the KV cache on a CPU, in tokens.", min=1)] = 2**14,
    keep: Annotated[
        int | None,
        typer.Option(
            help="Prefix cache: tokens of finished sequences kept for reuse. Default: all on a GPU, else 4096."
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(help="Time limit per request, in seconds.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds for open requests to finish after SIGTERM.")] = 30.0,
    warm: Annotated[bool, typer.Option(help="Compile and capture every batch size before the first request.")] = True,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    runtime: options.Runtime = "auto",
    exact: options.Exact = None,
) -> None:
    """Serve a model over OpenAI's protocol, with a chat page at /."""
    from ..serve import check_installed

    check_installed()
    options.check(model, [method], runtime, dtype)
    from ..serve.running import Server, is_loopback, listen, read_keys, run
    from ..serve.settings import Settings

    chosen, given = choose_method(method, settings, device)
    keys = read_keys(api_key_file)
    local = is_loopback(host)
    how = Settings(
        name=name or model,
        max_texts=max_texts,
        max_queue=max_queue,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        api_keys=keys,
        hosts=(*Settings.hosts, f"[{host}]" if ":" in host else host) if local else (),
        deadline=deadline,
        slots=slots,
        keep=keep,
        warm=warm,
    )
    place = listen(host, port, bool(keys))

    def load() -> Decoder:
        from ..decoder import load
        from ..models.loading import hide_bars

        hide_bars()
        return load(
            model,
            method=chosen,
            dtype=dtype,
            device=device,
            weights=weights,
            runtime=runtime,
            exact=exact,
            memory=memory,
            **given,
        )

    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{place.getsockname()[1]}"

    def ready(server: Server) -> None:
        typer.echo(f"outpace: {how.name} is ready at {address} ({server.service.decoder.engine.mode})")

    with place:
        run(load, how, place, drain, ready)


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    method: Annotated[str, typer.Option(help=f"The drafting method: {options.METHODS}.")] = "auto",
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method. May be repeated.")
    ] = [],
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens per answer.")] = 1024,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    runtime: options.Runtime = "auto",
    exact: options.Exact = None,
) -> None:
    """Chat with a model. Ctrl-C stops an answer; /exit, Ctrl-C again or Ctrl-D ends the chat; /new starts another."""
    options.check(model, [method], runtime, dtype, max_new_tokens, temperature=temperature, top_p=top_p)
    from ..picking import Sampling

    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    chosen, given = choose_method(method, settings, device)
    decoder = load_decoder(model, dtype, device, runtime, exact, weights, usual=True)
    decoder.method = decoder.prepare(chosen, **given)
    if not getattr(decoder.tokenizer, "chat_template", None):
        raise ModelError(f"{model} has no chat template, so it cannot chat. Use `outpace generate --raw` instead.")
    begin = [{"role": "system", "content": system}] if system else []
    messages = [*begin]
    for said in _lines():
        if said.strip() in ("/exit", "/quit"):
            return
        if said.strip() == "/help":
            typer.echo(HELP, err=True)
            continue
        if said.strip() == "/new":
            messages = [*begin]
            typer.echo("a new chat", err=True)
            continue
        if re.fullmatch(r"/\w+", said.strip()):
            typer.echo(f"outpace: unknown command {said.strip()}. {HELP}", err=True)
            continue
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        try:
            text = _answer(decoder, messages, {"sampling": sampling, "max_new_tokens": max_new_tokens})
        except OutpaceError as error:
            typer.echo(f"outpace: {error}", err=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def _lines() -> Iterator[str]:
    """The lines typed or piped in. Everything but answers goes to standard error."""
    stdin = typer.get_text_stream("stdin")
    typed = stdin.isatty()
    if typed:
        typer.echo(HELP, err=True)
    while True:
        if typed:
            typer.echo("> ", nl=False, err=True)
        try:
            line = stdin.readline()
        except KeyboardInterrupt:
            typer.echo(err=True)
            return
        except UnicodeError as error:
            raise InputError("the input is not UTF-8 text. Convert it to UTF-8.") from error
        if not line:
            if typed:
                typer.echo(err=True)
            return
        yield line.rstrip("\n")


def _answer(decoder: Decoder, messages: list[dict[str, str]], asked: dict[str, Any]) -> str:
    """Print an answer as it comes, then its speed. Ctrl-C stops it; the text so far is kept."""
    from ..board import numbers

    result = decoder.begin(decoder.encode(messages))
    steps = decoder.stream(messages, **asked)
    note = ""
    try:
        for step in result.follow(steps):
            typer.echo(step.text, nl=False)
    except KeyboardInterrupt:
        note = "stopped, "
    typer.echo()
    typer.echo(f"({note}{result.method}: {numbers(result, apart=True)})", err=True)
    return result.text
