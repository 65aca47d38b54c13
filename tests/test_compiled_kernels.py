"""Kernels compiled for an H100 and later, without one. Needs Triton; TRITON_INTERPRET must not be set."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="kernels are interpreted"),
]
ROOT = Path(__file__).parents[1]
SHAPES = {"8B": (128, 4), "135M": (64, 3)}  # size of a head, query heads of a key head
LISTS = ("text", "length", "positions", "slots", "tree", "whose", "tiles")


METHODS = ("plain", "auto with block", "auto with a store", "lookahead deep", "lookahead as published", "amphista")


def compiled(kernel: Any, constants: dict[str, Any], warps: int = 4) -> Any:
    """Numbers are divisible by 16 as they are for common models."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from outpace.models import kernels

    kinds = dict.fromkeys(LISTS, "*i64") | dict.fromkeys(("query", "keys", "values", "mixed"), "*bf16")
    kinds |= {"sums": "*fp32", "peaks": "*fp32", "factor": "fp32"}
    names, varying = kernel.arg_names, {*kernels.VARYING, *kernels.BOXED}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and name not in varying and signature[name] != "fp32"
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": 3, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembled(made: Any, folder: Path) -> tuple[str, int]:
    """What ptxas says of it, and its shared memory."""
    code = folder / "kernel.ptx"
    code.write_text(made.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", str(code), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr, made.metadata.shared


def exact_attention(shape: str, packed: bool) -> dict[str, Any]:
    """The constants of its kernels."""
    import triton.language as tl

    from outpace.models import attention

    size, group = SHAPES[shape]
    shared = {"SIZE": size, "PADDED": size, "GROUPS": group, "GROUP": group, "UNITS": 1, "WINDOW": 0, "SOFTCAP": 0.0}
    shared |= {"PRECISION": "tf32", "INDEX": tl.int32, "PACKED": packed, "EARLY": 2, "OWN": attention.OWN}
    return shared | {"SHORT": attention.SHORT, "TOGETHER": attention.TOGETHER}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_attention_compiles_and_needs_no_more_registers_than_there_are(
    shape: str, packed: bool, tmp_path: Path
) -> None:
    from outpace.models import attention, kernels

    shared, found = exact_attention(shape, packed), {}
    size = shared["SIZE"]
    for joined in (False, True):
        for tile in (16, 32, 64):
            made = {**shared, "TILE": tile, "BLOCK": attention.BLOCK, "JOINED": joined, "PAIRED": joined}
            found[tile, joined] = assembled(compiled(kernels.part_exactly, made, attention.WARPS), tmp_path)
        for columns, warps in ((16, 1), (32, 1), (size, 1), (size, 2)):
            unroll = attention._unroll(columns, size, joined, attention._groups(8192))
            made = {**shared, "HEADS": 4, "JOINED": joined, "COLUMNS": columns, "UNROLL": unroll}
            found["merge", joined, columns, warps] = assembled(compiled(kernels.merge_exactly, made, warps), tmp_path)
    spilled = {kind: int(re.findall(r"(\d+) bytes spill stores", said)[-1]) for kind, (said, _) in found.items()}
    some = spilled.pop(("merge", False, size, 1))  # bytes of a thread, once for a row
    assert max(spilled.values()) <= 8, spilled
    assert some <= 32
    for joined in (False, True):  # two programs on a multiprocessor, which keeps a KiB for each
        assert 2 * (found[64, joined][1] + 1024) <= 228 * 1024
        assert 2 * 128 * int(re.findall(r"Used (\d+) registers", found[64, joined][0])[-1]) <= 65536


@pytest.mark.parametrize("span", [1024, 4096, 8192])
def test_a_merge_has_few_loads(span: int) -> None:
    """Triton's time to compile grows faster than their square: 150 loads take 20 s, 43 take 2 s."""
    from outpace.models import attention, kernels

    columns, shared = attention.COLUMNS[0], exact_attention("8B", packed=False)
    unroll = attention._unroll(columns, shared["SIZE"], joined=False, groups=attention._groups(span))
    made = compiled(
        kernels.merge_exactly, {**shared, "HEADS": 4, "JOINED": False, "COLUMNS": columns, "UNROLL": unroll}, warps=1
    )
    assert made.asm["ttir"].count("tt.load") <= {1024: 45, 4096: 70, 8192: 120}[span]


@pytest.mark.parametrize("tile", [16, 32])
def test_int8_products_use_tensor_cores_and_fit_twice_on_a_multiprocessor(tile: int, tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from outpace.models import int8, kernels, narrow

    kernel, names = kernels.int8_product, kernels.int8_product.arg_names
    constants = {"TILE": tile, "OUTPUTS": narrow.OUTPUTS, "BLOCK": int8.BLOCK, "LEVELS": int8.LEVELS, "EARLY": 2}
    constants |= {"bias": None}
    kinds = {"parts": "*i8", "weights": "*i8", "sizes": "*fp32", "scales": "*fp32", "product": "*bf16"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and name != "count"
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": 4, "num_stages": int8.SHARING_STAGES, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["ptx"].count("s32.s8.s8") == 2 * int8.BLOCK // 32
    assert "mma.sync" not in made.asm["ptx"]
    assert 2 * (made.metadata.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", METHODS)
def test_the_kernels_of_a_step_compile(name: str) -> None:
    """Those that the interpreter runs, with the same types and constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.launches", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"plant", "settle"} <= {launch["kernel"] for launch in launches}
    for launch in launches:
        kernel = getattr(import_module(launch["module"]), launch["kernel"])
        types = {**launch["types"], **dict.fromkeys(launch["constants"], "constexpr")}
        signature = {parameter: types[parameter] or "constexpr" for parameter in kernel.arg_names}
        known = {**dict.fromkeys(kernel.arg_names), **launch["constants"]}
        known |= {"EARLY": 2} if "EARLY" in known else {}  # as on these GPUs
        constants = {
            (place,): known[parameter]
            for place, parameter in enumerate(kernel.arg_names)
            if signature[parameter] == "constexpr"
        }
        source = ASTSource(kernel, signature, constants)
        options = {"num_warps": launch["warps"], "launch_pdl": True}
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
