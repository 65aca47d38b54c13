"""What this machine supports, without torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

CPU_FILE = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}  # the last is Arm's


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's instruction flags; none if they are not available (macOS, Windows)."""
    try:
        lines = CPU_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        word
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for word in line.partition(":")[2].split()
    )


def cpu_name() -> str:
    """The CPU's name."""
    try:
        lines = CPU_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def lacks_bfloat16() -> bool:
    """Whether the CPU's instruction flags are known, and bfloat16 is not among them."""
    return bool(cpu_flags()) and not cpu_flags() & BFLOAT16
