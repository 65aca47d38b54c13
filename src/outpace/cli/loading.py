"""The model that a command runs, and `outpace models`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..decoder import Decoder


def load_decoder(
    model: str,
    dtype: str | None,
    device: str | None,
    runtime: str = "plain",
    exact: bool | None = None,
    weights: str | None = None,
    usual: bool = False,
) -> Decoder:
    """A decoder with plain decoding as its default; callers prepare methods. `usual`: with the default weights."""
    return load_both(model, dtype, device, runtime, exact, weights, usual)[0]


def load_both(
    model: str,
    dtype: str | None,
    device: str | None,
    runtime: str = "plain",
    exact: bool | None = None,
    weights: str | None = None,
    usual: bool = False,
) -> tuple[Decoder, Any]:
    """A decoder and the transformers model in it."""
    options.check(model, runtime=runtime, dtype=dtype)
    with options.spinner(model):
        from ..decoder import Decoder
        from ..models.loading import hide_bars, load, usual_weights

        hide_bars()
        if usual:
            weights = weights or usual_weights(model, dtype, device, runtime)
        loaded = load(model, dtype, device, weights)
        return Decoder(loaded.model, loaded.tokenizer, "autoregressive", runtime=runtime, exact=exact), loaded.model


def models(as_json: options.Json = False) -> None:
    """List the embedded models: those that Outpace downloads itself, by name."""
    from ..models import bundled

    found = []
    for entry in bundled.MODELS.values():
        folder = bundled.cache_folder() / entry.name
        state = "ready" if bundled.is_ready(entry.name) else "downloaded at first use"
        if folder.exists() and state != "ready":
            state = "broken: delete the folder"
        found.append([entry.name, state, str(folder), entry.licence, entry.description])
    columns = ("name", "state", "folder", "licence", "description")
    if as_json:
        typer.echo(json.dumps({"models": [dict(zip(columns, row, strict=True)) for row in found]}))
        return
    from ..board import console_for_output, table_of

    console = console_for_output()
    console.print(table_of(columns, found))
    console.print(
        "--model also takes a folder with a Hugging Face causal language model, a GGUF file, or a hub id (owner/name)."
    )
