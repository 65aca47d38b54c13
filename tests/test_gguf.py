"""GGUF files: what is in them is read, and whatever is wrong with one is an error of ours."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import ModelError
from outpace.models.gguf import File

from .ggufs import write


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_it_reads_what_the_gguf_package_reads(path: Path) -> None:
    file, theirs = File(path), gguf.GGUFReader(path)
    assert file.architecture == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["tokenizer.ggml.tokens"] == 97  # how many there are
    assert {*file.tensors} == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = file.tensors[tensor.name]
        assert mine.type == tensor.tensor_type
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert np.array_equal(mine.raw.reshape(-1), np.asarray(tensor.data).view(np.uint8).reshape(-1))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.9, 0.9999])
def test_a_file_that_is_cut_off_is_refused(path: Path, tmp_path: Path, share: float) -> None:
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        File(cut)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        File(other)
    with pytest.raises(ModelError, match="No such file"):
        File(tmp_path / "nothing.gguf")
    other.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ModelError, match="version 99"):
        File(other)


@given(st.integers(0, 5000), st.integers(1, 8), st.binary(min_size=8, max_size=8))
def test_a_damaged_header_is_read_or_refused(
    path: Path, tmp_path_factory: pytest.TempPathFactory, at: int, size: int, noise: bytes
) -> None:
    damaged = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = bytearray(path.read_bytes())
    whole[at : at + size] = noise[:size]
    damaged.write_bytes(whole)
    try:
        file = File(damaged)
    except ModelError:
        return
    for tensor in file.tensors.values():
        int(tensor.raw.sum())  # all of it is there


@given(st.binary(max_size=400))
def test_noise_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + noise)
    with suppress(ModelError):
        assert not File(path).tensors  # there is no room for any
