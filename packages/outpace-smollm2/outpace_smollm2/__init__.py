"""Trained heads and exits for SmolLM2-135M. Outpace finds them by the entry point `outpace.heads`."""

from pathlib import Path

FOLDER = Path(__file__).parent / "trained"
"""One folder a model, in it one a kind of heads."""
