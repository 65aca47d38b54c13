"""Parts of responses that several endpoints share: logprobs and traces, with tokens as text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ..draft import Step
from .metrics import acceptance, timings
from .worker import Job

LEAST = -9999.0  # for minus infinity, which JSON lacks


def new_id(kind: str) -> str:
    """An id for a response."""
    return f"{kind}{secrets.token_hex(12)}"


class Words(dict[int, str]):
    """Tokens as text; an incomplete character becomes a replacement character.

    Each is decoded once: the event loop writes logprobs and traces, and the same tokens come again and again.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        self[token] = text
        return text


def likely(words: Words, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The logprobs of a chat's tokens, in OpenAI's form."""

    def entry(token: int, chance: float) -> dict[str, Any]:
        text = words[token]
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(chance, LEAST), "bytes": whole}

    return [
        {**entry(token, found.chance), "top_logprobs": [entry(*other) for other in found.best]}
        for step in steps
        for token, found in zip(step.tokens, step.logprobs, strict=True)
    ]


def trace(words: Words, step: Step) -> dict[str, Any]:
    """A step with the source of every draft token."""
    draft = step.draft
    return {
        "text": step.text,
        "tokens": step.tokens,
        "texts": [words[token] for token in step.tokens],
        "sources": step.sources,
        "rows": step.rows,
        "draft": {
            "texts": [words[token] for token in draft.tokens],
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
