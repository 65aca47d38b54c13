"""From prompts to trained heads: answers, training, held-out accuracies, files."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..decoder import Decoder
from ..errors import InputError, UnknownNameError
from ..heads import TRAINABLE, ExitHeads, Heads
from ..heads.blocks import BlockShape
from ..heads.storing import Stored, fingerprint, save
from ..heads.trees import best_tree
from ..models.adapter import Ends
from ..models.whole import last_layers, layer_sizes, layers_of
from .data import Text, read_answers, write_answers
from .team import Team
from .trainer import Plan, Trainer

TREE = 256  # nodes that are stored
Show = Callable[[float, str], None]


@dataclass(frozen=True)
class Answers:
    """Which answers to train on: of how many prompts, in how many rounds, how long."""

    held_out: int = 256  # prompts kept back, answered greedily: accuracies are measured on them
    rounds: int = 1  # each round answers all prompts once more, sampled otherwise
    batch: int = 256
    new_tokens: int = 256
    minutes: float = 0.0  # stop answering after so long; 0: when all prompts are answered
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.held_out, self.rounds, self.batch, self.new_tokens) < 1 or self.minutes < 0:
            raise InputError("held_out, rounds, batch and new_tokens must be at least 1, minutes at least 0.")


def make_heads(model: Any, ends: Ends, kind: str, settings: Mapping[str, Any]) -> Heads:
    """New heads for a loaded transformers model with these ends, begun from its own layers."""
    if kind not in TRAINABLE:
        raise UnknownNameError("kind of heads", kind, TRAINABLE)
    known = TRAINABLE[kind].settings_type
    for name in settings:
        if name not in known.__dataclass_fields__:
            raise UnknownNameError(f"setting of {kind} heads", name, known.__dataclass_fields__)
    complete = known(**settings).for_model(len(layers_of(model)), ends.head.weight.shape[0])
    heads = TRAINABLE[kind](complete, BlockShape(**layer_sizes(model)))
    heads.begin_from(ends.norm, last_layers(model, 2))
    return heads


def answers(
    decoder: Decoder,
    model: Any,
    prompts: Sequence[str],
    folder: Path,
    how: Answers,
    show: Show = lambda share, text: None,
    team: Team | None = None,
) -> tuple[list[Text], list[Text]]:
    """Texts to train on and held-out ones, written by the model where the folder does not have them yet."""
    team = team or Team()
    if len(prompts) <= how.held_out:
        raise InputError(f"{len(prompts)} prompts are too few to hold {how.held_out} out. Lower --held-out.")
    about = {"base": fingerprint(decoder.model), "prompts": len(prompts), **asdict(how)}
    about.pop("minutes")
    with team.one_first():
        _claim(folder, about)
    shuffled = list(prompts)
    random.Random(how.seed).shuffle(shuffled)
    encoded = [decoder.encode(prompt) for prompt in shuffled]
    begun = time.perf_counter()

    def enough() -> bool:
        return how.minutes > 0 and time.perf_counter() - begun > 60 * how.minutes

    common: dict[str, Any] = {"batch": how.batch, "new_tokens": how.new_tokens, "team": team}
    ends = sorted(decoder.ends)
    for number in range(how.rounds + 1):
        name = "held-out" if number == 0 else f"round-{number}"

        def tell(done: int, total: int, name: str = name, number: int = number) -> None:
            show((number + done / total) / (how.rounds + 1), f"answers, {name}: {done} of {total} batches")

        if number == 0:
            write_answers(model, encoded[: how.held_out], folder / name, ends, greedy=True, show=tell, **common)
        else:
            write_answers(
                *(model, encoded[how.held_out :], folder / name, ends),
                seed=how.seed + 1000 * number,
                show=tell,
                enough=enough,
                **common,
            )
    rounds = [folder / f"round-{number}" for number in range(1, how.rounds + 1)]
    found = [text for round_ in rounds if any(round_.glob("answers-*")) for text in read_answers(round_)]
    return found or read_answers(rounds[0]), read_answers(folder / "held-out")


def _claim(folder: Path, about: Mapping[str, Any]) -> None:
    """Note what the answers in a folder are; refuse one with others."""
    note = folder / "about.json"
    text = json.dumps(about, indent=1, sort_keys=True)
    try:
        if not note.exists():
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(text)
        elif note.read_text() != text:
            raise InputError(
                f"{folder} holds answers of another model, to other prompts or by other settings. Name another "
                "folder with --answers, or delete this one."
            )
    except OSError as error:
        raise InputError(f"answers cannot be kept in {folder}: {error.strerror}.") from error


def open_out(out: Path, resume: bool) -> Path:
    """The file for what a training needs to go on, in a folder that is there and not another training's."""
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists() and not resume:
        raise InputError(f"{checkpoint} is of a training that was stopped. Go on with --resume, or delete it.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be written to: {error.strerror}.") from error
    return checkpoint


def train(
    model: Any,
    adapted: Any,
    heads: Mapping[str, Heads],
    texts: Sequence[Text],
    held_out: Sequence[Text],
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    made_by: Mapping[str, Any] | None = None,
    show: Show = lambda share, text: None,
    team: Team | None = None,
) -> dict[str, torch.Tensor]:
    """Train heads together and write each to its folder in `out`; their held-out accuracies [heads, ranks] by name."""
    checkpoint = open_out(out, resume)
    trainer = Trainer(model, adapted.norm, adapted.ends(), heads, plan, team)
    if checkpoint.exists():
        trainer.resume(checkpoint)
    trainer.run(texts, show, checkpoint)
    accuracies = trainer.accuracies(held_out)
    base = fingerprint(adapted)
    tokens = sum(len(text.tokens) - text.prompt for text in texts)
    training = {
        "plan": asdict(plan),
        "answers": {**(made_by or {}), "count": len(texts), "tokens": tokens},
        "processes": trainer.team.count,
        "updates": trainer.progress.update,
        "seconds": round(trainer.progress.seconds),
    }
    for name, part in heads.items():
        found = [[round(share, 4) for share in ranks] for ranks in accuracies[name].tolist()]
        if isinstance(part, ExitHeads):
            about = Stored(base, found, [], training, trainer.calibration(part, held_out))
        else:
            about = Stored(base, found, [list(path) for path in best_tree(found, TREE)], training)
        if trainer.team.leads:
            save(part, about, out / name)
    if trainer.team.leads:
        checkpoint.unlink(missing_ok=True)
    trainer.team.wait()
    return accuracies
