"""Amphista: heads that attend to each other, on states adapted in two stages."""

from __future__ import annotations

from dataclasses import dataclass

from .headed import Headed


@dataclass(frozen=True)
class Amphista(Headed):
    """Drafts with heads of the kind `amphista`. For the settings see Headed."""

    name = "amphista"
    about = "trained heads predict tokens ahead and attend to each other"
    kind = "amphista"
