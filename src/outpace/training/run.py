"""From prompts to trained heads: answers, training, held-out accuracies, files."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..decoder import Decoder
from ..errors import InputError, UnknownNameError
from ..files import write_whole
from ..heads import TRAINABLE, BlockHeads, ExitHeads, Heads
from ..heads.blocks import BlockShape
from ..heads.storing import Stored, fingerprint, load, save
from ..heads.trees import best_tree
from ..models.adapter import Ends
from ..models.whole import last_layers, layer_sizes, layers_of
from .data import HELD_OUT, LONGEST_PROMPT, USUAL, Text, read_answers, write_answers
from .prompts import Exchange, Prompt, derive, distinct
from .team import Team
from .trainer import Plan, Trainer, noted_interrupts

CHECKPOINT = "checkpoint.pt"  # in the folder of a training, until it is finished
TREE = 256  # nodes of the stored tree
ON_CPU, MOST = 256, 4096  # batch size of answers: on a CPU, and at most
ROWS = 64  # of the tree whose speedup is estimated
Show = Callable[[float, str], None]


@dataclass(frozen=True)
class Answers:
    """Which answers to train on."""

    held_out: int = 256  # prompts to measure accuracies on, answered greedily
    rounds: int = 1  # each round answers all prompts again, with another seed
    more: float = 0.5  # prompts derived from prompts and answers, per prompt: turns, translations, summaries
    batch: int = 0  # batch size; 0: as many answers as there is memory for, or 256 on a CPU
    new_tokens: int = 256
    minutes: float = 0.0  # the most time for answers; 0: until all prompts are answered
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.held_out, self.rounds, self.new_tokens) < 1 or min(self.batch, self.minutes, self.more) < 0:
            raise InputError("held_out, rounds and new_tokens must be at least 1, batch, minutes and more at least 0.")


class Texts(NamedTuple):
    """The target's own answers."""

    learnt: list[Text]
    held_out: list[Text]
    judged: list[Text]  # answers to the prompts of --judge, on which accuracies are measured too


def make_heads(model: Any, ends: Ends, kind: str, settings: Mapping[str, Any]) -> Heads:
    """New heads for a loaded transformers model with these ends, initialized from its own layers."""
    if kind not in TRAINABLE:
        raise UnknownNameError("kind of heads", kind, TRAINABLE)
    known = TRAINABLE[kind].settings_type
    for name in settings:
        if name not in known.__dataclass_fields__:
            raise UnknownNameError(f"setting of {kind} heads", name, known.__dataclass_fields__)
    complete = known(**settings).for_model(len(layers_of(model)), ends.head.weight.shape[0])
    heads = TRAINABLE[kind](complete, BlockShape(**layer_sizes(model)))
    heads.begin_from(ends, last_layers(model, 2))
    return heads


def start_from(folder: Path, model: Any, kind: str, settings: Mapping[str, Any]) -> tuple[Heads, Stored]:
    """Trained heads, to be trained further, and what is stored about them. `model` is the adapted target."""
    found, about = load(folder, model, TRAINABLE)
    if found.kind != kind:
        raise InputError(f"{folder} has {found.kind} heads, not {kind}. Name the folder that contains {kind}.")
    stored = asdict(found.settings)
    for name, value in asdict(replace(found.settings, **settings)).items():
        if value != stored[name]:
            raise InputError(
                f"{kind}.{name}={value}: the heads in {folder} have {stored[name]}, and training further cannot change "
                "it. Leave out this setting, or --start."
            )
    return found, about


def answers(
    decoder: Decoder,
    model: Any,
    prompts: Sequence[str],
    folder: Path,
    how: Answers,
    show: Show = lambda share, text: None,
    team: Team | None = None,
    judge: Sequence[str] = (),
) -> Texts:
    """Answers to train on and held-out ones, generated unless the folder has them."""
    team = team or Team()
    if len(prompts) <= how.held_out:
        raise InputError(f"{len(prompts)} prompts are too few to hold {how.held_out} out. Lower --held-out.")
    about = {"base": fingerprint(decoder.model), "prompts": _digest(prompts), "judged": _digest(judge), **asdict(how)}
    about.pop("minutes")
    with team.one_first():
        how = replace(how, batch=_claim(folder, about, how.batch or fitting_batch(model)))
    shuffled = list(prompts)
    random.Random(how.seed).shuffle(shuffled)
    held_out = shuffled[: how.held_out]
    apart = [*held_out, *judge]
    rest = [prompt for prompt in distinct(shuffled[how.held_out :], apart) if isinstance(prompt, str)]
    if not rest:
        raise InputError(
            "every prompt equals a held-out or --judge prompt, or shares 13 consecutive words with one. Add more."
        )
    writer = _Writer(decoder, model, folder, how, show, team)
    if judge:
        writer.write("judged", list(judge), 0.0, greedy=True)
    first = writer.write(HELD_OUT[0], list(held_out), 0.0, greedy=True)
    writer.write(HELD_OUT[1], derive(first, int(how.more * len(held_out)), how.seed), 0.0, greedy=True)
    for number in range(1, how.rounds + 1):
        begun = (number - 1) / how.rounds
        share = 1 / (how.rounds * (1 + how.more))
        said = writer.write(f"round-{number}", list(rest), begun + share, seed=number)
        made = distinct(derive(said, int(how.more * len(rest)), how.seed + number), apart)
        writer.write(f"more-{number}", made, number / how.rounds, seed=500 + number)
    return Texts(
        writer.read("round-*", "more-*"),
        writer.read(*HELD_OUT),
        writer.read("judged") if judge else [],
    )


class _Writer:
    """Generates answers, one folder for each set of prompts."""

    def __init__(self, decoder: Decoder, model: Any, folder: Path, how: Answers, show: Show, team: Team) -> None:
        self.decoder, self.model, self.folder = decoder, model, folder
        self.how, self.show, self.team = how, show, team
        self.begun = 0.0  # when answers to train on were first generated

    def write(
        self, name: str, prompts: Sequence[Prompt], until: float, *, greedy: bool = False, seed: int = 0
    ) -> list[Exchange]:
        """Generate answers to these until the share `until` of the time has passed, or to all of them if it is 0.

        There is always a batch of answers. Returns the exchanges of prompts with a single turn.
        """
        how, folder = self.how, self.folder / name
        if not prompts:
            return []

        if until and not self.begun:
            self.begun = time.perf_counter()

        def enough() -> bool:
            late = 0 < 60 * how.minutes * until < time.perf_counter() - self.begun
            return late and any(folder.glob("answers-*"))

        def tell(share: float) -> None:
            self.show(until, f"answers, {name}: {share:.0%}")

        encoded = encode_all(self.decoder, prompts)
        most = min(LONGEST_PROMPT, self.decoder.model.context - how.new_tokens)
        write_answers(
            *(self.model, [tokens for tokens in encoded if len(tokens) <= most], folder, sorted(self.decoder.ends)),
            batch=how.batch,
            new_tokens=how.new_tokens,
            greedy=greedy,
            seed=how.seed + 1000 * seed,
            show=tell,
            enough=enough,
            team=self.team,
        )
        known = {tuple(tokens): prompt for tokens, prompt in zip(encoded, prompts, strict=True)}
        if not any(folder.glob("answers-*")):  # all prompts are too long
            return []
        found = []
        texts = read_answers(folder)
        written = self.decoder.tokenizer.batch_decode(
            [text.tokens[text.prompt :].tolist() for text in texts], skip_special_tokens=True
        )
        for text, answer in zip(texts, written, strict=True):
            prompt = known.get(tuple(text.tokens[: text.prompt].tolist()))
            if isinstance(prompt, str):
                found.append(Exchange(prompt, answer))
        return found

    def read(self, *names: str) -> list[Text]:
        """All answers in the folders of these names."""
        folders = [
            folder for name in names for folder in sorted(self.folder.glob(name)) if any(folder.glob("answers-*"))
        ]
        if not folders:
            raise InputError(f"{self.folder} has no answers to train on.")
        return [text for folder in folders for text in read_answers(folder)]


def fitting_batch(model: Any) -> int:
    """The batch size whose KV cache takes half of the free memory."""
    if model.device.type != "cuda":
        return ON_CPU
    free: int = torch.cuda.mem_get_info(model.device)[0]
    sizes = layer_sizes(model)
    token = 2 * len(layers_of(model)) * sizes["key_heads"] * sizes["head_size"] * torch.finfo(model.dtype).bits // 8
    return max(1, min(MOST, int(free // 2 // (token * USUAL))))


def encode_all(decoder: Decoder, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The token ids of many prompts, as from `Decoder.encode`; without a chat template, those of the plain text."""
    if not getattr(decoder.tokenizer, "chat_template", None):
        said = [[prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt] for prompt in prompts]
        return [decoder.encode("\n\n".join(turns), raw=True) for turns in said]
    talks = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
    found: list[list[int]] = decoder.tokenizer.apply_chat_template(talks, add_generation_prompt=True, return_dict=False)
    return found


def _digest(prompts: Sequence[str]) -> str:
    return sha256(json.dumps([*prompts]).encode()).hexdigest()


def _claim(folder: Path, about: Mapping[str, Any], batch: int) -> int:
    """Record how the answers in a folder are made; reject a folder with answers made differently.

    Returns the batch size they are made with: `batch`, or what was recorded, since other batches have other prompts.
    """
    note = folder / "about.json"
    try:
        if not note.exists():
            write_whole(note, json.dumps({**about, "fitting": batch}, indent=1, sort_keys=True))
        stored = json.loads(note.read_text())
        batch = int(stored.pop("fitting"))
    except OSError as error:
        raise InputError(f"answers cannot be kept in {folder}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        stored = None
    if stored != json.loads(json.dumps(about)):
        raise InputError(
            f"{folder} has answers of another model, to other prompts or with other settings. Give another folder with "
            "--answers, or delete this one."
        )
    return batch


def open_out(out: Path, resume: bool, guarded: Sequence[str] = ()) -> Path:
    """The checkpoint file of a training in the folder `out`, which is created if it is missing.

    Raises InputError for another training's folder, or one with finished heads of the `guarded` kinds.
    """
    checkpoint = out / CHECKPOINT
    if checkpoint.exists() and not resume:
        raise InputError(f"{checkpoint} is from a training that was stopped. Continue with --resume, or delete it.")
    if resume and not checkpoint.exists():
        raise InputError(
            f"there is no {checkpoint} to resume from: that training is finished, or was stopped before its first "
            "update. Leave out --resume; cached answers are reused."
        )
    for kind in guarded:
        if not resume and (out / kind / "config.json").exists():
            raise InputError(f"{out / kind} has finished heads. Give another --out, or overwrite them with --force.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be written to: {error.strerror}.") from error
    return checkpoint


class Trained(NamedTuple):
    """The result of a training: accuracies by kind, [heads, ranks]."""

    held_out: dict[str, torch.Tensor]
    judged: dict[str, torch.Tensor]  # on answers to the prompts of --judge
    confidence: dict[str, list[list[float]]]  # of kinds that have one, on `judged` if given: see `Trainer.confidence`
    speed: dict[str, tuple[float, float]]  # expected tokens per step, and speedup over plain decoding


def train(
    model: Any,
    adapted: Any,
    heads: Mapping[str, Heads],
    texts: Texts,
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    made_by: Mapping[str, Any] | None = None,
    show: Show = lambda share, text: None,
    team: Team | None = None,
    bits: int = 16,
    earlier: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Trained:
    """Train heads together and write each kind to its folder in `out`. `earlier`: how they were trained before."""
    checkpoint = open_out(out, resume)
    trainer = Trainer(model, adapted.norm, adapted.ends(), heads, plan, team)
    if checkpoint.exists():
        trainer.resume(checkpoint)
    with noted_interrupts() as stopping:
        trainer.run(texts.learnt, show, checkpoint, texts.held_out, stopping, fit=not earlier)
    accuracies = trainer.accuracies(texts.held_out)
    judged = trainer.accuracies(texts.judged) if texts.judged else {}
    base = fingerprint(adapted)
    training = {
        "plan": asdict(plan),
        "answers": {
            **(made_by or {}),
            "count": len(texts.learnt),
            "tokens": sum(len(text.tokens) - text.prompt for text in texts.learnt),
        },
        "processes": trainer.team.count,
        "updates": trainer.progress.update,
        "seconds": round(trainer.progress.seconds),
        "curve": trainer.progress.curve,
    }
    size = sum(weight.numel() for weight in model.parameters())
    confidence, speed = {}, {}
    for name, part in heads.items():
        found = _rounded(accuracies[name])
        more: dict[str, Any] = {"judged": _rounded(judged[name])} if judged else {}
        if name in earlier:
            more["after"] = {key: value for key, value in earlier[name].items() if key in training and key != "curve"}
        tree: list[list[int]] = []
        counts: list[list[list[int]]] = []
        if isinstance(part, ExitHeads):
            counts = trainer.calibration(part, texts.held_out)
        else:
            tree = [list(path) for path in best_tree(found, TREE)]
            speed[name] = expected_speed(found, sum(weight.numel() for weight in part.parameters()) / size)
        if isinstance(part, BlockHeads):
            confidence[name] = trainer.confidence(name, texts.judged or texts.held_out)
            more["confidence"] = _rounded(torch.tensor(confidence[name]))
        if trainer.team.leads:
            save(part, Stored(base, found, tree, {**training, **more}, counts), out / name, bits)
    if trainer.team.leads:
        checkpoint.unlink(missing_ok=True)
    trainer.team.wait()
    return Trained(accuracies, judged, confidence, speed)


def _rounded(numbers: torch.Tensor) -> list[list[float]]:
    return [[round(number, 4) for number in line] for line in numbers.tolist()]


def expected_speed(accuracies: Sequence[Sequence[float]], weights: float) -> tuple[float, float]:
    """Tokens per step and speedup over plain decoding, of a tree of ROWS rows, if a step costs reading all weights.

    `weights` is the number of the heads' weights relative to the target's.

    >>> expected_speed([[0.5], [0.5]], 0.25)
    (1.75, 1.4)
    """
    tokens = 1.0
    for path in best_tree(accuracies, ROWS - 1):
        tokens += math.prod(accuracies[head][rank] for head, rank in enumerate(path))
    return tokens, tokens / (1 + weights)
