"""Trainable parts that draft: Medusa, Hydra, Amphista."""

from __future__ import annotations

from .amphista import AmphistaHeads, AmphistaSettings
from .base import Heads, HeadSettings
from .hydra import HydraHeads
from .medusa import MedusaHeads, MedusaSettings

KINDS: dict[str, type[Heads]] = {kind.kind: kind for kind in (MedusaHeads, HydraHeads, AmphistaHeads)}

__all__ = [
    "KINDS",
    "AmphistaHeads",
    "AmphistaSettings",
    "HeadSettings",
    "Heads",
    "HydraHeads",
    "MedusaHeads",
    "MedusaSettings",
]
