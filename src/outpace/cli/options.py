"""Options that several commands share, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, UnknownNameError
from ..files import reason
from ..limits import check_sampling, warn_if_greedy
from ..models.bundled import NAMES, NOT_FOUND, is_ready, may_be_hub_id

if TYPE_CHECKING:
    from ..grammar import Grammar

DEFAULT_MODEL = "smollm2-135m"
_NAME = re.compile(r'^    name = "([a-z-]+)"', re.MULTILINE)
DTYPES = "float32|bfloat16|float16|fastest"

Model = Annotated[
    str, typer.Option(help="An embedded model (see `outpace models`), a folder, a GGUF file, or a hub id.")
]
MaxNewTokens = Annotated[int, typer.Option(help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")]
TopP = Annotated[
    float, typer.Option(help="Nucleus sampling: sample from the fewest tokens with this total probability.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text with every method.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar=DTYPES,
        help="Default: float32 on a CPU, bfloat16 on a GPU. fastest: measure both and use the faster.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="packed|narrow|q8|q4|float32",
        help="On a CPU. packed: as in the GGUF file; narrow: unquantized, in 16 bits where these hold all numbers; "
        "q8, q4: rounded to 8 or 4 bits at load; float32: not quantized. Default: packed for *.gguf; in generate, chat "
        "and serve also for embedded models, and narrow for others; else float32.",
        show_default=False,
    ),
]
Device = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.", show_default=False)]
Runtime = Annotated[
    str,
    typer.Option(
        metavar="auto|plain|compiled|graphs|native",
        help="How forward passes run. auto: graphs on CUDA, native on a CPU, else plain.",
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--fast",
        help="Bit-identical logits with every method (CUDA, a CPU in float32, packed weights), or the fastest kernels. "
        "Default: exact where it costs next to nothing.",
        show_default=False,
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


RUNTIMES = ("auto", "plain", "compiled", "graphs", "native")


def method_names() -> list[str]:
    """The names of all methods, read from their source files: importing them would import torch, which is slow."""
    files = (Path(__file__).parent.parent / "methods").glob("*.py")
    return sorted(name for file in files for name in _NAME.findall(file.read_text(encoding="utf-8")))


METHODS = ", ".join(method_names())


def check(
    model: str | None = None,
    methods: Iterable[str] = (),
    runtime: str = "auto",
    dtype: str | None = None,
    max_new_tokens: int = 1,
    **sampling: Any,
) -> None:
    """Reject obvious mistakes before importing torch, which takes seconds."""
    there = model is None or model in NAMES or Path(model).expanduser().exists()
    if model is not None and not there and not may_be_hub_id(model):
        raise UnknownNameError("model", model, NAMES, NOT_FOUND)
    known = method_names()
    for method in methods:
        if method not in known:
            raise UnknownNameError("method", method, known)
    if runtime not in RUNTIMES:
        raise UnknownNameError("runtime", runtime, RUNTIMES)
    if dtype is not None and dtype not in DTYPES.split("|"):
        raise UnknownNameError("dtype", dtype, DTYPES.split("|"))
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens} must be 1 or more, a whole number.")
    check_sampling(sampling)
    warn_if_greedy(sampling)


def prompt_or_pipe(prompt: str | None) -> str | None:
    """The prompt, or standard input if none is given; None if that is a terminal or empty."""
    if prompt is not None:
        return read_prompt(prompt)
    stdin = typer.get_binary_stream("stdin")
    return None if stdin.isatty() else read_prompt("-") or None


def check_prompt(text: str, raw: bool) -> None:
    """Reject an empty prompt before a model is loaded. A raw one may get a token that the tokenizer adds."""
    if not raw and not text.strip():
        raise InputError("the prompt is empty. Give at least one word.")


def read_prompt(prompt: str) -> str:
    """The prompt, from standard input for `-`."""
    try:
        if prompt == "-":
            return typer.get_binary_stream("stdin").read().decode()
        prompt.encode()  # invalid UTF-8 in an argument arrives as lone surrogates
    except UnicodeError as error:
        raise InputError("the prompt is not UTF-8 text. Convert it to UTF-8.") from error
    return prompt


def check_files(read: dict[str, Path | None] | None = None, written: dict[str, Path | None] | None = None) -> None:
    """Reject files that are not there, and folders in place of files, by option. As `check`, before importing torch."""
    for option, path in (read or {}).items():
        if path is not None and not path.exists():
            raise InputError(f"{option} {path} could not be read: No such file or directory.")
    for option, path in {**(read or {}), **(written or {})}.items():
        if path is not None and path.is_dir():
            raise InputError(f"{option} {path} is a folder. Name a file.")


def read_text(option: str, path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{option} {path} cannot be read: {reason(error)}.") from error


def read_grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """The grammar that the output must match, if any."""
    from ..grammar import Grammar

    if json_schema is not None and regex is not None:
        raise InputError("--json-schema and --regex cannot be combined. Give one of them.")
    if json_schema is not None:
        return Grammar.json_schema(read_text("--json-schema", json_schema))
    return None if regex is None else Grammar.regex(regex)


@contextmanager
def spinner(model: str) -> Iterator[None]:
    """Show on a terminal that a model is being loaded. Downloads have their own progress bar."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or (model in NAMES and not is_ready(model)):
        yield
        return
    with console.status(f"loading {model}"):
        yield


def listed(names: str) -> list[str]:
    """Split a comma-separated list."""
    return [name.strip() for name in names.split(",")]
