"""Trained draft heads: Medusa, Hydra, Amphista, block, and early exits."""

from __future__ import annotations

from .amphista import AmphistaHeads, AmphistaSettings
from .base import Heads, HeadSettings
from .block import BlockHeads, BlockSettings
from .exits import ExitHeads, ExitSettings
from .hydra import HydraHeads
from .medusa import MedusaHeads, MedusaSettings

KINDS: dict[str, type[Heads]] = {kind.kind: kind for kind in (MedusaHeads, HydraHeads, AmphistaHeads, BlockHeads)}
TRAINABLE: dict[str, type[Heads]] = {**KINDS, ExitHeads.kind: ExitHeads}
"""KINDS predict beyond the target's next token; exits predict that token at a middle layer."""

__all__ = [
    "KINDS",
    "TRAINABLE",
    "AmphistaHeads",
    "AmphistaSettings",
    "BlockHeads",
    "BlockSettings",
    "ExitHeads",
    "ExitSettings",
    "HeadSettings",
    "Heads",
    "HydraHeads",
    "MedusaHeads",
    "MedusaSettings",
]
