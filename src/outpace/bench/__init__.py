"""Benchmarks: questions (data, prompts), what is measured (entries), the harness, its journal, its results."""
