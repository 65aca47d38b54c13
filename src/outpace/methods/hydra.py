"""Hydra: heads guess one after another, each with the guesses before it in view."""

from __future__ import annotations

from dataclasses import dataclass

from .headed import Headed


@dataclass(frozen=True)
class Hydra(Headed):
    """Drafts with heads of the kind `hydra`. For the settings see Headed."""

    name = "hydra"
    about = "trained heads predict tokens ahead, one after another"
    kind = "hydra"

    beam: int = 16
