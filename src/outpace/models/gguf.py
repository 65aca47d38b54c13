"""GGUF files, memory-mapped and validated: every value of the header is checked against the file."""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST_NAME = 256
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
DEEPEST = 4  # nested arrays
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Raw: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


@dataclass(frozen=True)
class Tensor:
    """A tensor in the file."""

    name: str
    shape: tuple[int, ...]  # the last dimension is contiguous, as in torch
    type: GGMLQuantizationType
    raw: Raw  # [rows, bytes of a row]


class File:
    """A GGUF file: `metadata`, with the length of arrays in place of their items, and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise ModelError(f"{path} is empty.") from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
        self._at = 0
        if self._take(4, "magic") != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not start with {MAGIC.decode()}.")
        self.version = self._number(4, "version")
        if self.version not in VERSIONS:
            self._refuse(
                f"version {self.version} is unknown ({' and '.join(map(str, VERSIONS))} are known; is it big-endian?)"
            )
        tensors, pairs = self._number(8, "tensor count"), self._number(8, "metadata count")
        self.metadata: dict[str, Any] = {}
        for _ in range(self._plausible(pairs, 12, "metadata count")):
            key = self._string("a metadata key")
            self.metadata[key] = self._value(self._number(4, f"type of {key}"), key)
        infos = [self._info() for _ in range(self._plausible(tensors, 24, "tensor count"))]
        self.digest = sha256(self._bytes[: self._at]).hexdigest()  # of all but the weights
        self.tensors = self._placed(infos)

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the architecture."""
        return str(self.metadata.get("general.architecture", ""))

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self.path} cannot be used: {why}. It may be truncated or corrupt: download it again.")

    def _take(self, count: int, what: str) -> bytes:
        if count > len(self._bytes) - self._at:
            self._refuse(f"it ends in the middle of {what}")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _number(self, size: int, what: str) -> int:
        return int.from_bytes(self._take(size, what), "little")

    def _plausible(self, count: int, least: int, what: str) -> int:
        """A count of items of at least `least` bytes each. Raises ModelError if they cannot fit in the file."""
        if count * least > len(self._bytes) - self._at:
            self._refuse(f"its {what} of {count} is more than the file can hold")
        return count

    def _string(self, what: str, most: int | None = None) -> str:
        size = self._number(8, f"the length of {what}")
        if most is not None and size > most:
            self._refuse(f"{what} has {size} bytes")
        text = self._take(self._plausible(size, 1, f"length of {what}"), what)
        try:
            return text.decode()
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8")

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            return self._array(key, depth)
        if kind not in _NUMBERS:
            self._refuse(f"{key} has the unknown type {kind}")
        form = "<" + _NUMBERS[kind]
        return struct.unpack(form, self._take(struct.calcsize(form), key))[0]

    def _array(self, key: str, depth: int) -> int:
        """Skips an array, and returns its length."""
        kind, count = self._number(4, f"the type of {key}"), self._number(8, f"the length of {key}")
        if kind in _NUMBERS:
            size = struct.calcsize("<" + _NUMBERS[kind])
            self._take(size * self._plausible(count, size, f"length of {key}"), key)
            return count
        if depth == DEEPEST:
            self._refuse(f"{key} has nested arrays")
        for _ in range(self._plausible(count, 8, f"length of {key}")):
            if kind == STRING:
                self._take(self._number(8, key), key)
            else:
                self._value(kind, key, depth + 1)
        return count

    def _info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string("a tensor's name", LONGEST_NAME)
        dimensions = self._number(4, f"the dimensions of {name}")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            self._refuse(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number(8, f"the shape of {name}") for _ in range(dimensions))[::-1]
        number = self._number(4, f"the type of {name}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self._refuse(f"the tensor {name} has the unknown type {number}")
        return name, shape, kind, self._number(8, f"the offset of {name}")

    def _placed(self, infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]) -> dict[str, Tensor]:
        """The tensors; each must lie within the file, and none may overlap another."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"its alignment {alignment!r} is not a power of two")
        base = -(-self._at // alignment) * alignment
        everything: Raw = np.frombuffer(self._bytes, np.uint8)
        found: dict[str, Tensor] = {}
        spans: list[tuple[int, int, str]] = []
        for name, shape, kind, offset in infos:
            block, size = GGML_QUANT_SIZES[kind]
            rows = math.prod(shape[:-1])
            if not shape[-1] or not rows or shape[-1] % block:
                self._refuse(f"the tensor {name} of type {kind.name} cannot have the shape {list(shape)}")
            width = shape[-1] // block * size
            start, stop = base + offset, base + offset + rows * width
            if offset % alignment or stop > len(everything):
                self._refuse(f"the tensor {name} would be at bytes {start} to {stop} of {len(everything)}")
            if name in found:
                self._refuse(f"there are two tensors named {name}")
            found[name] = Tensor(name, shape, kind, everything[start:stop].reshape(rows, width))
            spans.append((start, stop, name))
        spans.sort()
        for (_, stop, one), (start, _, other) in itertools.pairwise(spans):
            if start < stop:
                self._refuse(f"the tensors {one} and {other} overlap")
        return found
