"""Steps of methods with heads, without computing the target again.

What heads draft depends on the sequence and the target's hidden states on it. Both are known once plain decoding has
generated the sequence, and every method generates the same. So each step is drafted, but not computed again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outpace import Autoregressive, Method, Sampling
from outpace.bench.journal import Journal
from outpace.draft import Scores, Verdict, chain
from outpace.picking import Picker

from .methods import HEADED, named, published
from .models import Setup, set_up
from .speeds import acceptance, encoded, questions_of, task_table


def replay(arguments: argparse.Namespace) -> None:
    """Tokens per step by task of all methods with heads, except those that recycle: these need the target's logits."""
    setup = set_up(arguments)
    decoder = setup.decoder
    methods = {
        label: decoder.prepare(method)
        for label, method in named(published(setup.heads), arguments.only).items()
        if method.name in HEADED and not getattr(method, "recycled", 0)
    }
    for method in methods.values():
        decoder.model.keep(method.heads.heads.reads)  # type: ignore[attr-defined]
    how = {name: getattr(arguments, name) for name in ("model", "tokens", "temperature", "heads")}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        journal = Journal(arguments.out or Path(place) / "runs.jsonl", how)
        for question in questions_of(decoder, arguments, arguments.each):
            sampling = Sampling(temperature=arguments.temperature, seed=question.number)
            where = {"task": question.task, "prompt": question.number}
            left = [label for label in methods if f"{where} {label}" not in journal.runs]
            if left:
                prompt = encoded(decoder, question)
                text, states = written(setup, prompt, sampling, arguments.tokens)
                for label in left:
                    steps = count_steps(setup, methods[label], sampling, len(prompt), text, states)
                    journal.add(f"{where} {label}", {**where, "steps": steps, "token_ids": text[len(prompt) :]})
            runs += [{**journal.runs[f"{where} {label}"], "label": label} for label in methods]
    Console(width=150).print(task_table(runs, "tokens/step", acceptance))


def written(setup: Setup, prompt: list[int], sampling: Sampling, tokens: int) -> tuple[list[int], torch.Tensor]:
    """Plain decoding's sequence, prompt included, and the target's hidden states on it."""
    decoder, hidden = setup.decoder, list[torch.Tensor]()
    plain = decoder.generate(prompt, method=Autoregressive(), max_new_tokens=tokens, sampling=sampling)
    text = [*prompt, *plain.token_ids]
    with decoder.engine.pool.sequence(text) as sequence:
        last = decoder.engine.score(sequence, chain(text[-1], (), ""), hidden.append).hidden
    return text, torch.cat([*hidden, last])


def count_steps(
    setup: Setup, method: Method, sampling: Sampling, prompt: int, text: list[int], states: torch.Tensor
) -> int:
    """How many steps the method takes for a sequence whose hidden states are known."""
    engine, steps = setup.decoder.engine, 0
    pool, picker = engine.pool, Picker(sampling, prompt)
    with pool.sequence(text[:prompt]) as sequence, method.start(engine, sequence, picker) as drafter:
        while len(sequence.tokens) < len(text):
            draft = drafter.draft(setup.decoder.model.room(sequence.position))
            before, behind = len(sequence.tokens) - 1, len(sequence.slots)
            pool.place(sequence, draft)
            if before > behind:
                drafter._see(states[behind:before])  # type: ignore[attr-defined]
            rows, ahead = [0], text[before + 1 :]
            while len(rows) < len(ahead) and (child := draft.child(rows[-1], ahead[len(rows) - 1])) is not None:
                rows.append(child)
            hidden = torch.zeros(len(draft), states.shape[1], dtype=states.dtype, device=states.device)
            hidden[rows] = states[before : before + len(rows)]
            verdict = Verdict(tuple(rows), tuple(ahead[: len(rows)]))
            pool.keep(sequence, draft, verdict)
            drafter.learn(draft, Scores(hidden[:, :0], hidden), verdict)
            steps += 1
    return steps
