"""Measurements for the developers of Outpace: `python scripts/lab COMMAND`. `commands.py` lists them."""
