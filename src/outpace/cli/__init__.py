"""The command line: a file for each subject, a function for each command.

Results go to standard output, everything else to standard error. torch and transformers take seconds to import, so the
commands import them only after parsing their arguments.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import OutpaceError
from .examining import doctor
from .loading import models
from .measuring import bench, calibrate, reproduce
from .racing import race, report
from .serving import chat, serve
from .training import export, train
from .writing import generate, verify

FAILED, INTERRUPTED = 2, 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of standard output; other files raise InputError


class _Group(TyperGroup):
    """Shows errors that a user can fix as one line, with an exit code. Others are bugs and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:  # Any: whose Context it is depends on the version of typer
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                found = super().invoke(ctx)
                sys.stdout.flush()  # while an error can still be reported
                return found
        except OutpaceError as error:
            typer.echo(f"outpace: {error}", err=True)
            raise typer.Exit(FAILED) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            with suppress(OSError), Path(os.devnull).open("wb") as nowhere:  # otherwise Python flushes again at exit
                os.dup2(nowhere.fileno(), 1)
            typer.echo(f"outpace: standard output could not be written: {error.strerror}.", err=True)
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as error:
            typer.echo("\noutpace: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """A warning as one line, without a source location. Some of torch's continue with a C++ stack trace."""
    typer.echo(f"outpace: warning: {str(message).splitlines()[0]}", err=True)


app = typer.Typer(
    cls=_Group,
    name="outpace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    generate,
    chat,
    serve,
    verify,
    race,
    bench,
    report,
    reproduce,
    calibrate,
    train,
    export,
    models,
    doctor,
)  # in the order of --help
for command in COMMANDS:
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face causal language models."""


def main() -> None:
    """The entry point of the `outpace` command."""
    app(prog_name="outpace")
