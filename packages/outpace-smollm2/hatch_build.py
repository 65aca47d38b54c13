"""Puts the trained weights into the wheel and the source archive, from wherever this is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
PLACES = (HERE / "trained", HERE.parents[1] / "src" / "outpace" / "trained")  # of a source archive; of the repository


class Weights(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        found = next((place for place in PLACES if place.is_dir()), None)
        if found is None:
            raise FileNotFoundError(f"the trained weights are in none of {', '.join(map(str, PLACES))}.")
        build_data["force_include"][str(found)] = (
            "outpace_smollm2/trained" if self.target_name == "wheel" else "trained"
        )
