"""Files written atomically, JSON with a kind and a version, and files of prompts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from . import __version__
from .errors import InputError

PROMPT_FIELDS = ("prompt", "question", "instruction")  # of a file of prompts, in JSON lines
CODE = "utf-8-sig"  # some editors add a byte order mark


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. A device or a pipe is written to directly."""
    write_bytes_whole(path, text.encode())


def write_bytes_whole(path: Path, data: bytes) -> None:
    """The same for bytes."""
    half: Path | None = None
    try:
        place = path.resolve()  # a link stays one
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and not place.is_file():
            with place.open("wb") as file:
                file.write(data)
            return
        half = place.with_name(f"{place.name}.{uuid4().hex}.part")  # another process may write the same file
        half.write_bytes(data)
        half.replace(place)
    except OSError as error:
        if half is not None:
            with suppress(OSError):
                half.unlink(missing_ok=True)
        raise InputError(f"{path} could not be written: {error.strerror or error}.") from error


def read_prompt_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a file of prompts that are not empty, with their numbers."""
    try:
        with gzip.open(path, "rt", encoding=CODE) if path.suffix == ".gz" else path.open(encoding=CODE) as file:
            lines = [(number, line) for number, line in enumerate(file.read().splitlines(), 1) if line.strip()]
    except UnicodeError as error:
        raise InputError(f"prompts cannot be read from {path}: it is not UTF-8 text.") from error
    except (OSError, EOFError) as error:
        raise InputError(f"prompts cannot be read from {path}: {reason(error)}.") from error
    if not lines:
        raise InputError(f"{path} has no prompts. Give one per line.")
    return lines


def reason(error: Exception) -> str:
    """Why a file cannot be read, without its name."""
    return getattr(error, "strerror", None) or str(error)


def read_json(path: Path, kind: str, version: int) -> dict[str, Any]:
    """The object in a file of this kind and version. Raises InputError for any other file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} could not be read: {reason(error)}.") from error
    except ValueError as error:
        raise InputError(
            f"{path} is not complete JSON: it is not an {kind} file, or is truncated ({error})."
        ) from error
    check_version(path, stored, kind, version)
    return dict(stored)


def check_version(path: Path, stored: Any, kind: str, version: int) -> None:
    """Raise InputError unless the JSON is of this kind and version."""
    if not isinstance(stored, Mapping) or stored.get("kind") != kind:
        raise InputError(f"{path} is not an {kind} file.")
    if stored.get("version") != version:
        raise InputError(
            f"{path} has version {stored.get('version')!r}; this Outpace ({__version__}) reads version {version}. "
            "Create it again, or use the version that wrote it."
        )
