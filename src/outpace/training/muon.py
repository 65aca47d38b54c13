"""Muon: gradient descent for matrices, with nearly orthogonal updates.

torch's own always multiplies in bfloat16, which takes seconds per matrix on CPUs without bfloat16 instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that brings singular values close to 1 in five rounds
ROUNDS = 5
AS_ADAM = 0.2  # the RMS of an update, which matches AdamW's, so learning rates carry over


class Muon(torch.optim.Optimizer):
    """The optimizer. Matrices of one shape are updated together."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike[matrix.shape].append(matrix)
            for shape, matrices in alike.items():
                steps = orthogonal(torch.stack(self._directions(matrices, group["momentum"])))
                size = AS_ADAM * max(shape) ** 0.5
                torch._foreach_add_(matrices, [*steps], alpha=-group["lr"] * size)

    def _directions(self, matrices: list[torch.Tensor], momentum: float) -> tuple[torch.Tensor, ...]:
        """The gradients with Nesterov momentum."""
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        for matrix in matrices:
            self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
        means = [self.state[matrix]["mean"] for matrix in matrices]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        return tuple(torch._foreach_lerp(gradients, means, momentum))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """[matrices, rows, columns] with the same singular vectors, and singular values near 1 (about 0.7 to 1.2)."""
    near: torch.Tensor = matrices.bfloat16() if matrices.is_cuda else matrices
    flat = matrices.shape[1] <= matrices.shape[2]
    near = near if flat else near.mT
    near = near / near.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    one, three, five = COEFFICIENTS
    for _ in range(ROUNDS):
        square = near @ near.mT
        near = one * near + (three * square + five * square @ square) @ near
    return (near if flat else near.mT).to(matrices.dtype)
