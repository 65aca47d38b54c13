"""Installed heads: those of installed packages, and of a checkout of this repository."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ..errors import OutpaceWarning

GROUP = "outpace.heads"
"""Entry points of packages with heads. Each names a folder: in it a folder per model, in that one per kind of heads."""
CHECKOUT = Path(__file__).parent.parent / "trained"
PACKAGE = "outpace-smollm2"


@cache
def folders() -> tuple[Path, ...]:
    """All folders of installed heads, a checkout's first."""
    brought = [folder for point in entry_points(group=GROUP) if (folder := _brought(point)) is not None]
    return tuple(folder for folder in (CHECKOUT, *brought) if folder.is_dir())


def _brought(point: EntryPoint) -> Path | None:
    try:
        return Path(point.load())
    except Exception as error:  # a broken package must not hide other heads
        package = point.dist.name if point.dist else point.value
        message = f"the heads of the package {package} cannot be used: {error!r}. Install it again, or remove it."
        warnings.warn(message, OutpaceWarning, stacklevel=2)
        return None


def hint() -> str:
    """What to install if there are no heads."""
    return "" if folders() else f" Those for smollm2-135m come with: pip install packages/{PACKAGE} (in a clone)."


def of_kind(kind: str) -> list[Path]:
    """The folders of all heads of a kind, for any model."""
    return [config.parent for folder in folders() for config in sorted(folder.glob(f"*/{kind}/config.json"))]
