"""Parts of answers that several endpoints have: likelihoods and traces, with tokens as texts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ..decoder import Decoder
from ..draft import Step
from .metrics import acceptance, timings
from .worker import Job

LEAST = -9999.0  # in place of minus infinity, which JSON has not


def new_id(kind: str) -> str:
    """A name for an answer."""
    return f"{kind}{secrets.token_hex(12)}"


def word(decoder: Decoder, token: int) -> str:
    """A token as text; one that is no whole character has a question mark in it."""
    text: str = decoder.tokenizer.decode([token])
    return text


def likely(decoder: Decoder, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The likelihoods of a chat's tokens, as OpenAI has them."""

    def entry(token: int, chance: float) -> dict[str, Any]:
        text = word(decoder, token)
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(chance, LEAST), "bytes": whole}

    return [
        {**entry(token, found.chance), "top_logprobs": [entry(*other) for other in found.best]}
        for step in steps
        for token, found in zip(step.tokens, step.logprobs, strict=True)
    ]


def trace(decoder: Decoder, step: Step) -> dict[str, Any]:
    """A step, for those who want to see who guessed what."""
    draft = step.draft
    return {
        "text": step.text,
        "tokens": step.tokens,
        "texts": [word(decoder, token) for token in step.tokens],
        "sources": step.sources,
        "rows": step.rows,
        "draft": {
            "texts": [word(decoder, token) for token in draft.tokens],
            "parents": draft.parents,
            "sources": draft.sources,
            "candidates": draft.candidates,
        },
        "cost": step.cost,
        "seconds": sum(step.seconds.values()),
    }


def figures(jobs: Sequence[Job]) -> dict[str, Any]:
    """What a response says of its speed and its guesses, as vLLM and llama.cpp say it."""
    results = [job.result for job in jobs]
    return {
        "metrics": {"speculative_decoding": acceptance(results)},
        "timings": timings(jobs),
        "outpace": {
            "method": results[0].method,
            "steps": sum(result.steps for result in results),
            "tokens_per_step": results[0].tokens_per_step,
            "times_plain": results[0].times_plain,
        },
    }
