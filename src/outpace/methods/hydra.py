"""Hydra: heads that draft one after another, each conditioned on the draft tokens before it."""

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
