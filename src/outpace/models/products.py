"""Linear layers on CPUs in float32: a few rows at little more than the cost of one.

BLAS libraries repack all weights for each product of more than one row, which costs more than the product itself.
`products.cpp` reads weights in place, and gives a row the same bits in any batch. Beyond 32 rows BLAS takes over,
except in exact mode.

The system's C++ compiler builds it at first use, with `exact.cpp`; the library is kept in the user's cache.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch
from platformdirs import user_cache_path
from torch import nn

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

from ..errors import InputError
from . import gated, int8, narrow
from .fusing import is_plain

HERE = Path(__file__).parent
SOURCES = (HERE / "products.cpp", HERE / "exact.cpp")
HEADERS = (HERE / "vectors.h",)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-shared", "-fPIC")
FUNCTIONS = ("cos", "exp", "gelu", "gelu_tanh", "sigmoid", "silu", "sin", "tanh")  # of `exact.cpp`
WITHOUT = "use weights='float32', runtime='plain' and exact=False"
REMEDY = f"Install a C++ compiler (g++ or clang++), or {WITHOUT}."


class Products:
    """The replaced modules of one mirror."""

    def __init__(self) -> None:
        self._done: list[tuple[nn.Module, str, nn.Module]] = []  # owner, name, what was there

    def replace(self, mirror: nn.Module, always: bool = False, drafts: bool = False) -> int:
        """Replace all modules that we have code for; returns how many. The weights stay in place.

        `always`: on a GPU ours compute any number of rows, so that a row has the same bits in any batch.
        `drafts`: these are draft heads, which may compute few rows in int8.
        """
        for owner in list(mirror.modules()):
            for name, child in owner._modules.items():
                if (
                    child is not None
                    and not isinstance(owner, (gated.GatedMLP, int8.Int8MLP))
                    and (product := _product_for(child, always, drafts))
                ):
                    owner._modules[name] = product
                    self._done.append((owner, name, child))
        return len(self._done)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context in which the original modules are in place."""
        ours = [owner._modules[name] for owner, name, _ in self._done]
        for owner, name, child in self._done:
            owner._modules[name] = child
        try:
            yield
        finally:
            for (owner, name, _), product in zip(self._done, ours, strict=True):
                owner._modules[name] = product

    def undo(self) -> None:
        """Put every module back."""
        for owner, name, child in self._done:
            owner._modules[name] = child
        self._done.clear()


class _Product(nn.Module):
    """Takes the place of a Linear, with its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.outpace.linear(states, self.weight, self.bias)
        return product


def _product_for(module: nn.Module, always: bool, drafts: bool) -> nn.Module | None:
    if drafts and (product := int8_for(module)):
        return product
    if gated.fits(module, always):
        return gated.GatedMLP(module, always)
    return _linear_for(module, always) if type(module) is nn.Linear else None


def int8_for(module: nn.Module) -> nn.Module | None:
    """What computes few rows in int8 in its place, if that is faster."""
    if int8.fits_mlp(module):
        return int8.Int8MLP(module)
    return int8.Int8Linear(module) if int8.fits(module) else None


def _linear_for(linear: nn.Linear, always: bool) -> nn.Module | None:
    if linear._forward_hooks or linear._forward_pre_hooks or not is_plain(*linear.parameters()):
        return None
    if narrow.fits(linear, always):
        return narrow.NarrowLinear(linear, always)
    if all(
        weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
        for weight in linear.parameters()
    ):
        load()
        return _Product(linear)
    return None


@functools.cache
def load() -> None:
    """Register `torch.ops.outpace.linear` and the operators of exact mode, once per process."""
    path = build(folder())
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InputError(f"{path} cannot be loaded ({error.__cause__ or error}). Delete it, or {WITHOUT}.") from error
    fakes: dict[str, Callable[..., torch.Tensor]] = {
        "linear": lambda rows, weights, bias, exact=False: rows.new_empty(*rows.shape[:-1], len(weights)),
        "exact_mean": lambda x: x.new_empty(*x.shape[:-1], 1),
        "exact_attention": lambda query, *_: query.new_empty(1, query.shape[2], query.shape[1], query.shape[3]),
        **{f"exact_{name}": lambda x: x.new_empty(x.shape) for name in FUNCTIONS},
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"outpace::{name}", fake)


def folder() -> Path:
    """Where built libraries are kept."""
    return user_cache_path("outpace", appauthor=False) / "products"


def compiler(names: Sequence[str] = COMPILERS) -> str | None:
    """The C++ compiler, if there is one."""
    return next(filter(None, map(shutil.which, names)), None)


def build(
    folder: Path,
    compilers: Sequence[str] = COMPILERS,
    *,
    sources: Sequence[Path] = SOURCES,
    headers: Sequence[Path] = HEADERS,
    flags: Sequence[str] = FLAGS,
    torch_too: bool = True,
) -> Path:
    """The library, built if it is not in the folder yet. Its name is a hash of sources, compiler and CPU.

    `torch_too`: whether it calls torch.
    """
    found = compiler(compilers)
    if found is None:
        raise InputError(
            "on a CPU packed weights, compiled layers and exact mode need a C++ compiler, and there is no "
            f"{' or '.join(compilers)}. {REMEDY}"
        )
    root = Path(torch.__file__).parent
    # The predefined macros include the compiler's version and all instruction sets of this CPU.
    macros = _run(found, *flags, "-E", "-dM", "-x", "c++", os.devnull)
    texts = [source.read_text() for source in (*headers, *sources)]
    parts = (*texts, macros, *((torch.__version__, str(root)) if torch_too else ()), found, *flags)
    path = folder / f"{sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        libraries = (f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch_cpu", "-lc10") if torch_too else ()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone_in(folder):
                if path.exists():  # another process has built it meanwhile
                    return path
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    half = Path(place, path.name)
                    _run(found, *flags, f"-I{root / 'include'}", *map(str, sources), "-o", str(half), *libraries)
                    half.replace(path)
        except OSError as error:
            raise InputError(
                f"{folder} cannot be written ({error.strerror}). Fix its permissions or free space there, or {WITHOUT}."
            ) from error
    return path


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """A lock between processes, if files can be locked: ranks start together, and need the same library."""
    if fcntl is None:
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network drives have no locks: then several may build it
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise InputError(f"{command[0]} failed with status {done.returncode} ({said}). {REMEDY}")
    return done.stdout
