"""Medusa: heads on the last hidden state predict several tokens ahead, independently."""

from __future__ import annotations

from dataclasses import dataclass

from .headed import Headed


@dataclass(frozen=True)
class Medusa(Headed):
    """Drafts with heads of the kind `medusa`. For the settings see Headed."""

    name = "medusa"
    about = "trained heads predict tokens ahead, independently"
    kind = "medusa"
