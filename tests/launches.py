"""Runs methods in Triton's interpreter, and prints as JSON lines which kernels their steps launch, and how.

    TRITON_INTERPRET=1 python -m tests.launches NAME ...

The interpreter accepts what the compiler rejects, such as a variable whose type changes in a loop.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from outpace import Auto, Sampling

from . import test_fused
from .models import tiny
from .test_heads import method_for, random_heads

KINDS = {torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.bool: "i1"}
EXACTLY = ("plain", "auto with block")  # also in exact mode
KINDS |= {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


def kind_of(value: Any) -> str | None:
    """The type of an argument that is not known when a kernel is compiled."""
    if isinstance(value, torch.Tensor):
        return f"*{KINDS[value.dtype]}"
    return {int: "i32", float: "fp32"}.get(type(value))


def main(names: list[str]) -> None:
    known, run = set[str](), InterpretedFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        parameters = inspect.signature(self.fn).parameters
        given = dict(zip(parameters, args, strict=False)) | options
        fixed = {name for name, about in parameters.items() if "constexpr" in str(about.annotation)}
        launch = {
            "module": self.fn.__module__,
            "kernel": self.fn.__name__,
            "types": {
                name: kind_of(value) for name, value in given.items() if name in parameters and name not in fixed
            },
            "constants": {name: value for name, value in given.items() if name in fixed},
            "warps": options.get("num_warps", 4),
        }
        said = json.dumps(launch)
        if said not in known:
            known.add(said)
            print(said, flush=True)
        return run(self, *args, grid=grid, warmup=warmup, **options)

    InterpretedFunction.run = record
    for name in names:
        method = test_fused.METHODS.get(name)
        if method is None and name.startswith("auto with"):
            method = Auto(heads=random_heads(name.split()[-1], tiny("Llama")), rows=16)
        elif method is None:
            method = method_for(name, random_heads(name, tiny("Llama")), rows=16, recycled=5)
        with pytest.MonkeyPatch.context() as patch:
            sampling = test_fused.ALL if name == "plain" else Sampling()
            test_fused.steps_of(method, 1, patch, kernels=True, samplings=[sampling], tokens=3)
            if name in EXACTLY:
                test_fused.steps_of(method, 1, patch, kernels=True, samplings=[sampling], tokens=3, exact_rows=128)


if __name__ == "__main__":
    main(sys.argv[1:])
