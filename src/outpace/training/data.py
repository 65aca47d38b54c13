"""Training data: the target's own answers to prompts, generated once and used by every kind of heads.

Heads predict what the target generates, so they learn from nothing else. Half of the answers are greedy, the others
sampled, each at its own temperature. Each batch is stored in a file; an interrupted run continues with the next batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError
from ..files import PROMPT_FIELDS, read_prompt_lines
from ..heads.storing import read_tensors
from ..models.whole import write_batch
from ..sending import move
from .team import Team

LONGEST_PROMPT = 1600
USUAL = 768  # tokens of prompt and answer; batches of longer ones are smaller
GREEDY = 0.5  # the share of greedy answers
WARM = (0.3, 1.1)  # the range of temperatures of the others
HELD_OUT = ("held-out", "held-out-more")  # folders: answers to given prompts, and to derived ones


@dataclass(frozen=True)
class Text:
    """One prompt and the target's answer to it."""

    tokens: torch.Tensor  # [length]
    prompt: int  # the length of the prompt


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file of JSON lines (`prompt`, `question`, `instruction` or `turns`), or of plain lines."""
    plain = ".txt" in path.suffixes
    return [line if plain else _prompt(path, number, line) for number, line in read_prompt_lines(path)]


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
        found = entry["turns"][0] if "turns" in entry else next(entry[name] for name in PROMPT_FIELDS if name in entry)
    except (ValueError, KeyError, TypeError, IndexError, StopIteration):
        found = None
    if not isinstance(found, str) or not found.strip():
        raise InputError(
            f"{path}, line {number}: {line[:60]!r} is not a JSON object with {', '.join(PROMPT_FIELDS)} or turns. "
            "Plain prompts, one per line, need a file that ends in .txt."
        )
    return found


def write_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    ends: Sequence[int],
    *,
    batch: int,
    new_tokens: int,
    greedy: bool = False,
    seed: int = 0,
    show: Callable[[float], None] = lambda share: None,
    enough: Callable[[], bool] = lambda: False,
    team: Team | None = None,
) -> None:
    """Generate answers to all prompts in batches, one file per batch. Batches that have a file are skipped.

    `show` is called with the finished share. The processes of a team share the batches, and wait for each other at the
    end.
    """
    team = team or Team()
    folder.mkdir(parents=True, exist_ok=True)
    fitting = sorted((prompt for prompt in prompts if len(prompt) <= LONGEST_PROMPT), key=len, reverse=True)
    batches: list[Sequence[Sequence[int]]] = []
    while fitting:
        most = max(1, batch * USUAL // max(USUAL, len(fitting[0]) + new_tokens))
        batches.append(fitting[:most])
        fitting = fitting[most:]
    order = list(range(len(batches)))
    random.Random(seed).shuffle(order)  # an interrupted run has answers to prompts of all lengths
    for done, number in team.share(enumerate(order)):
        show(done / len(batches))
        file = folder / f"answers-{number:04}.safetensors"
        if file.exists():
            continue
        if enough():
            break
        rng = random.Random(f"{seed} {number}")
        warm = [0.0 if greedy or rng.random() < GREEDY else rng.uniform(*WARM) for _ in batches[number]]

        def tell(share: float, before: int = done) -> None:
            show((before + share) / len(batches))

        answers = _answer(model, batches[number], ends, new_tokens, warm, seed + number, tell)
        half = file.with_suffix(".part")
        save_file(
            {
                "tokens": _small(torch.cat([answer.tokens for answer in answers])),
                "lengths": torch.tensor([len(answer.tokens) for answer in answers]),
                "prompts": torch.tensor([answer.prompt for answer in answers]),
            },
            half,
        )
        half.replace(file)
    team.wait()
    show(1.0)


def _answer(
    model: Any,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    new_tokens: int,
    temperatures: Sequence[float],
    seed: int,
    show: Callable[[float], None],
) -> list[Text]:
    """Answers to a batch of prompts; in two halves if it does not fit in memory."""
    try:
        written = write_batch(model, prompts, ends, new_tokens, temperatures, seed, show)
        return [Text(torch.tensor([*prompt, *new]), len(prompt)) for prompt, new in zip(prompts, written, strict=True)]
    except torch.OutOfMemoryError:
        if len(prompts) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(prompts) // 2
    first, second = slice(half), slice(half, None)
    return [
        *_answer(model, prompts[first], ends, new_tokens, temperatures[first], seed, lambda share: show(share / 2)),
        *_answer(
            model, prompts[second], ends, new_tokens, temperatures[second], seed, lambda share: show((1 + share) / 2)
        ),
    ]


def _small(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens in the smallest integer type that holds them."""
    return tokens.to(torch.uint16 if int(tokens.max()) < 2**16 else torch.int32)


def read_answers(folder: Path) -> list[Text]:
    """All answers in a folder."""
    texts: list[Text] = []
    for file in sorted(folder.glob("answers-*.safetensors")):
        stored = read_tensors(file)
        parts = torch.split(stored["tokens"].to(torch.long), stored["lengths"].tolist())
        texts += [Text(tokens, prompt) for tokens, prompt in zip(parts, stored["prompts"].tolist(), strict=True)]
    if not texts:
        raise InputError(f"{folder} has no answers to train on.")
    return texts


@dataclass(frozen=True)
class Batch:
    """A batch of sequences, padded on the right."""

    tokens: torch.Tensor  # [texts, length]
    prompts: torch.Tensor  # [texts]
    lengths: torch.Tensor  # [texts]
    rows: torch.Tensor  # [places] flat positions where the target chooses a token of an answer
    since: torch.Tensor  # [places] how many tokens of the answer are before that position

    def to(self, device: torch.device) -> Batch:
        """A copy on the device; asynchronous."""
        parts = [getattr(self, part.name) for part in fields(self)]
        return Batch(*(move(part, device) for part in parts))


def side_by_side(texts: Sequence[Text]) -> Batch:
    """A batch of these sequences, on the host."""
    prompts, lengths = torch.tensor([(text.prompt, len(text.tokens)) for text in texts]).unbind(1)
    tokens = pad_sequence([text.tokens for text in texts], batch_first=True)
    position = torch.arange(tokens.shape[1]).expand_as(tokens)
    answered = (position >= prompts[:, None]) & (position < lengths[:, None] - 1)
    return Batch(
        tokens, prompts, lengths, answered.flatten().nonzero().squeeze(-1), (position - prompts[:, None])[answered]
    )


def batches(texts: Sequence[Text], tokens: int, rng: random.Random) -> Iterator[Batch]:
    """All sequences once, in batches of at most this many tokens and of similar lengths, in random order."""
    order = sorted(range(len(texts)), key=lambda text: (len(texts[text].tokens) // 16, rng.random()))
    groups: list[list[Text]] = [[]]
    longest = 0
    for text in (texts[place] for place in order):
        longest = max(longest, len(text.tokens))
        if groups[-1] and (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
            longest = len(text.tokens)
        groups[-1].append(text)
    rng.shuffle(groups)
    for group in groups:
        yield side_by_side(group)
