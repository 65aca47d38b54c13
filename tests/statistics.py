"""A goodness-of-fit test, for distributions that must be exact."""

from __future__ import annotations

import torch


def chi_square_fits(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Whether counts [..., cells] may come from the probabilities, each last dimension a multinomial of its own.

    False for one true distribution in ten thousand. Cells that expect fewer than five draws are taken together.
    """
    statistic, freedom = 0.0, 0
    cells = counts.shape[-1]
    for found, p in zip(counts.reshape(-1, cells).double(), probabilities.reshape(-1, cells).double(), strict=True):
        expected = p * found.sum()
        if (found[p == 0] > 0).any():
            return False
        small = expected < 5
        found = torch.cat([found[~small], found[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        used = expected > 0
        statistic += float(((found - expected)[used] ** 2 / expected[used]).sum())
        freedom += int(used.sum()) - 1
    return statistic < _quantile(freedom)


def _quantile(freedom: int) -> float:
    """The chi-square distribution's 0.9999 quantile, by Wilson and Hilferty."""
    share = 2 / (9 * freedom)
    return float(freedom * (1 - share + 3.719 * share**0.5) ** 3)
