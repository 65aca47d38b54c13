"""Block: several tokens drafted in one pass, from the target's hidden states after several of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from ..sources.heads import CANDIDATES
from .headed import Headed


@dataclass(frozen=True)
class Block(Headed):
    """Drafts with heads of the kind `block`. For the settings see Headed."""

    name = "block"
    about = "trained layers draft several tokens in one pass, with a confidence each"
    kind = "block"

    top: int = CANDIDATES
