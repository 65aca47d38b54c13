"""Parts of responses that several endpoints share: logprobs and traces, with tokens as text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ..decoder import Decoder
from ..draft import Step
from .metrics import acceptance, timings
from .worker import Job

LEAST = -9999.0  # for minus infinity, which JSON lacks


def new_id(kind: str) -> str:
    """An id for a response."""
    return f"{kind}{secrets.token_hex(12)}"


def word(decoder: Decoder, token: int) -> str:
    """A token as text; an incomplete character becomes a replacement character."""
    text: str = decoder.tokenizer.decode([token])
    return text


def likely(decoder: Decoder, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The logprobs of a chat's tokens, in OpenAI's form."""

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
    """A step with the source of every draft token."""
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
    """Speed and speculation statistics of a response, in the forms of vLLM and llama.cpp."""
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
