"""Options that several commands have, and what is read from them in one way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..grammar import Grammar

DEFAULT_MODEL = "smollm2-135m"
DTYPES = "float32|bfloat16|float16|fastest"

Model = Annotated[str, typer.Option(help="An embedded model (see `outpace models`), a folder, or a hub id.")]
MaxNewTokens = Annotated[int, typer.Option(help="The most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling: from the fewest tokens with this total probability.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text with every method.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar=DTYPES,
        help="Default: float32 on a CPU, otherwise bfloat16. fastest: measure both and take the faster.",
        show_default=False,
    ),
]
Device = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.", show_default=False)]
Runtime = Annotated[
    str,
    typer.Option(
        metavar="auto|plain|compiled|graphs", help="How forward passes run. auto: graphs on CUDA, else plain."
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Bit-identical logits with every method, at some cost. CUDA, or a CPU in float32.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def read_prompt(prompt: str) -> str:
    """The prompt, from standard input for `-`."""
    try:
        if prompt == "-":
            return typer.get_binary_stream("stdin").read().decode()
        prompt.encode()  # bytes of an argument that are no text arrive as lone surrogates
    except UnicodeError as error:
        raise InputError("the prompt is not UTF-8 text.") from error
    return prompt


def read_text(option: str, path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{option} {path}: {error}") from error


def read_grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """What the answer must match."""
    from ..grammar import Grammar

    if json_schema is not None and regex is not None:
        raise InputError("--json-schema and --regex do not go together.")
    if json_schema is not None:
        return Grammar.json_schema(read_text("--json-schema", json_schema))
    return None if regex is None else Grammar.regex(regex)


def listed(names: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in names.split(",")]
