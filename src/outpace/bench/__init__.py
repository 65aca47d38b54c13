"""Measuring: prompts of our own, and (to come) the harness that runs methods on them."""
