"""Trains heads on the target's own answers. Several kinds train together and share the target's forward pass.

A head learns the target's whole distribution at its position (soft cross-entropy), not just its choice. Logits are by
far the largest tensors here, so the loss is computed in chunks of positions.
"""

from __future__ import annotations

import math
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..errors import InputError
from ..heads import BlockHeads, ExitHeads, Heads
from ..heads.base import Example
from ..heads.block import FORGOTTEN, feelings
from ..heads.exits import BINS, BORDERS
from ..models.adapter import Ends
from ..models.attention import without_cudnn
from ..models.whole import states_behind
from ..sending import send
from .data import Batch, Text, batches
from .muon import Muon
from .team import Team

CHUNK = 8192  # positions whose logits are in memory at a time
RANKS = 10  # top tokens of a head whose accuracy is counted
POINTS = 8  # of the curve of accuracies over time
MEASURED = 65536  # held-out positions that accuracies are measured on
EXAMPLES = 32  # positions that heads are fitted to before training, per dimension of a hidden state


@dataclass(frozen=True)
class Plan:
    """How to train.

    updates or minutes: when to end; the learning rate decays to zero by then.
    tokens: of one update. rate: of matrices, which Muon trains; vector_rate: of all else, which AdamW trains.
    weight: of each head's loss, relative to the head before. hard: share of the loss against the target's choice alone.
    """

    updates: int = 0
    minutes: float = 0.0
    tokens: int = 16384
    rate: float = 1e-2
    vector_rate: float = 3e-3
    weight: float = 0.8
    hard: float = 0.0
    warm_up: float = 0.05
    clip: float = 1.0
    seed: int = 0
    save_every: float = 2.0  # minutes

    def __post_init__(self) -> None:
        if (self.updates > 0) == (self.minutes > 0):
            raise InputError(
                f"updates={self.updates}, minutes={self.minutes}: give one of the two, --updates or --minutes."
            )
        if not 0 <= self.hard <= 1 or not 0 < self.weight <= 1 or not 0 <= self.warm_up < 1:
            raise InputError("hard must be 0 to 1, weight above 0 to 1, warm_up 0 to below 1.")
        if min(self.tokens, self.rate, self.vector_rate, self.clip) <= 0:
            raise InputError("tokens, rate, vector_rate and clip must be above 0.")


@dataclass
class Progress:
    """The state of a training, without weights."""

    update: int = 0
    seconds: float = 0.0
    losses: dict[str, list[float]] = field(default_factory=dict)  # by name, for each head; a running mean
    curve: list[tuple[float, dict[str, list[float]]]] = field(default_factory=list)  # seconds; each head's accuracy


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first one is only noted, a second one interrupts as usual."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)
        print("\nstopping after this update; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Trainer:
    """Trains heads, by name."""

    def __init__(
        self, model: Any, norm: str, ends: Ends, heads: Mapping[str, Heads], plan: Plan, team: Team | None = None
    ) -> None:
        self.team = team or Team()
        self.model = model.requires_grad_(False)
        self.norm = norm
        self.ends = ends
        self.heads = dict(heads)
        self.plan = plan
        self.device = next(model.parameters()).device
        self.progress = Progress()
        self._unread: dict[str, torch.Tensor] = {}  # losses of the last update, not yet waited for
        self.optimizers = {name: _optimizers(part, plan) for name, part in self.heads.items()}
        for part in self.heads.values():
            part.to(self.device, torch.float32).train()
        self._on_gpu = self.device.type == "cuda"
        self.chunk = CHUNK if self._on_gpu else 256
        self._loss = torch.compile(_loss) if self._on_gpu else _loss  # fuses what goes over the vocabulary
        self._two = torch.compile(_two) if self._on_gpu else _two

    def run(
        self,
        texts: Sequence[Text],
        show: Callable[[float, str], None] = lambda share, text: None,
        checkpoint: Path | None = None,
        held_out: Sequence[Text] = (),
        stopping: Callable[[], bool] = lambda: False,
        fit: bool = True,
    ) -> None:
        """Train until the plan's end. `show` gets the share done and the losses; `fit`: new heads are fitted first.

        When `stopping` returns True, it saves a checkpoint after the current update and raises KeyboardInterrupt.
        Accuracies on the held-out answers are measured a few times on the way.
        """
        if self.progress.update == 0 and fit:
            for part in self.heads.values():
                part.fit(self._examples(part, texts), self.ends)
                self.team.agree(part.parameters())
        last_save = time.perf_counter()
        for batch in self._endless(texts):
            start = time.perf_counter()
            self._update(batch.to(self.device))
            self.progress.update += 1
            self.progress.seconds = self.team.mean(self.progress.seconds + time.perf_counter() - start)
            share = self._share()
            if held_out and share * POINTS >= len(self.progress.curve) + 1:
                right = {name: found[:, 0] for name, found in self.accuracies(held_out, MEASURED // 8).items()}
                lines = {name: [round(head, 4) for head in found.tolist()] for name, found in right.items()}
                self.progress.curve.append((round(self.progress.seconds, 1), lines))
            if share >= 1:
                self._note({})
            show(min(share, 1.0), self._summary())
            stop = self.team.mean(float(stopping())) > 0  # all processes do the same
            if checkpoint and (share >= 1 or stop or time.perf_counter() - last_save > 60 * self.plan.save_every):
                self.save(checkpoint)
                last_save = time.perf_counter()
            if share >= 1:
                return
            if stop:
                raise KeyboardInterrupt

    def _endless(self, texts: Sequence[Text]) -> Iterator[Batch]:
        """The batches from the next update on; a resumed training gets the same ones."""
        left, epoch = self.progress.update, 0
        while True:
            rng = random.Random(f"{self.plan.seed} {epoch}")
            for batch in self.team.share(batches(texts, self.plan.tokens, rng)):
                if left:
                    left -= 1
                else:
                    yield batch
            epoch += 1

    def _share(self) -> float:
        plan, progress = self.plan, self.progress
        return progress.update / plan.updates if plan.updates else progress.seconds / (60 * plan.minutes)

    def _examples(self, part: Heads, texts: Sequence[Text]) -> Iterator[Example]:
        """The target's states at some positions of its answers."""
        seen = 0
        for batch in batches(texts, self.plan.tokens, random.Random(self.plan.seed)):
            there = batch.to(self.device)
            states = self._compute(there.tokens)
            read = states.of(part).reshape(-1, there.tokens.numel(), part.shape.width)[:, there.rows]
            yield Example(there.tokens.flatten()[there.rows], read, states.final.flatten(0, 1)[there.rows])
            seen += len(there.rows)
            if seen >= EXAMPLES * part.shape.width:
                return

    def _compute(self, tokens: torch.Tensor) -> _States:
        """The target's forward pass, once for all heads."""
        layers = sorted({layer for part in self.heads.values() for layer in part.reads})
        with without_cudnn():  # it would make a new plan for every length
            return _States(*states_behind(self.model, self.norm, tokens, layers))

    def _update(self, batch: Batch) -> None:
        target = self._compute(batch.tokens)
        rows, weights = batch.rows, self._weights(batch)
        chance = torch.Generator(self.device).manual_seed(self.plan.seed + self.progress.update)
        learnt = {name: self._learnt(part, target, batch.tokens, rows, chance) for name, part in self.heads.items()}
        leaves = {name: found.leaves() for name, found in learnt.items()}
        self._note(self._backward(leaves, target.final, rows, weights, chance))
        for name, optimizers in self.optimizers.items():
            for found, leaf in zip(learnt[name], leaves[name], strict=True):
                if found.requires_grad and leaf.grad is not None:  # otherwise nothing trained precedes the states
                    torch.autograd.backward(found, leaf.grad)
            self.team.average(weight.grad for weight in self.heads[name].parameters() if weight.grad is not None)
            torch.nn.utils.clip_grad_norm_(self.heads[name].parameters(), self.plan.clip)
            for optimizer, peak in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = peak * self._factor()
                optimizer.step()
                optimizer.zero_grad()

    def _factor(self) -> float:
        """The learning rate relative to its peak: linear warm-up, then cosine decay."""
        share, warm_up = min(self._share(), 1.0), self.plan.warm_up
        if share < warm_up:
            return max(share / warm_up, 0.01)
        return 0.5 + 0.5 * math.cos(math.pi * (share - warm_up) / (1 - warm_up))

    @contextmanager
    def _mixed(self) -> Iterator[None]:
        """On CUDA, matrix products in bfloat16. torch warns once that norms with float32 weights are slower there."""
        with warnings.catch_warnings(), torch.autocast(self.device.type, torch.bfloat16, enabled=self._on_gpu):
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            yield

    def _weights(self, batch: Batch) -> dict[str, torch.Tensor]:
        """By name [heads, places] loss weights.

        A head predicts the token at p from p - ahead; the weight is 0 if that is before the prompt's end.
        """
        found = {}
        for name, part in self.heads.items():
            further = send(part.ahead, self.device)[:, None] - 1
            found[name] = (batch.since >= further) * self.plan.weight ** further.clamp(min=0)
        return found

    def _backward(
        self,
        learnt: Mapping[str, _Learnt],
        hidden: torch.Tensor,
        rows: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        chance: torch.Generator,
    ) -> dict[str, torch.Tensor]:
        """By name [heads] losses; gradients accumulate in `learnt`.

        If there are several chunks of positions, a head of less weight learns from proportionally fewer of them.
        """
        totals = {name: torch.zeros(part.count, device=self.device) for name, part in self.heads.items()}
        order = torch.arange(len(rows), device=self.device)
        if len(rows) > self.chunk:
            order = torch.randperm(len(rows), generator=chance, device=self.device)
        chunks = -(-len(rows) // self.chunk)
        shares = {
            name: [math.ceil(chunks * self.plan.weight ** max(ahead - 1, 0)) for ahead in part.ahead]
            for name, part in self.heads.items()
        }
        counts = {
            name: [
                weights[name][head, order[: share * self.chunk]].gt(0).sum().clamp(min=1)
                for head, share in enumerate(shares[name])
            ]
            for name in self.heads
        }
        for number in range(chunks):
            chosen = order[number * self.chunk : (number + 1) * self.chunk]
            missing = self.chunk - len(chosen)  # the last chunk is padded: one size, compiled once
            chosen = F.pad(chosen, (0, missing))
            aim = self._aim(hidden, rows[chosen])
            for name, part in self.heads.items():
                for head in range(part.count):
                    if number >= shares[name][head]:
                        continue
                    weight = weights[name][head, chosen]
                    if missing:
                        weight[-missing:] = 0.0
                    places = self._behind(part, head, chosen)
                    logits = self._logits(part, head, learnt[name].states[head].index_select(0, places))
                    losses = self._loss(logits, *aim, self.plan.hard)
                    loss = (losses * weight).sum() / counts[name][head]
                    totals[name][head] += loss.detach() / weights[name][head].amax().clamp(min=1e-9)
                    if isinstance(part, BlockHeads) and number == 0:
                        doubts = learnt[name].doubts[head].index_select(0, places)
                        loss = loss + self._doubt(part, head, logits, doubts, aim.best, weight > 0)
                    torch.autograd.backward(loss)
        return totals

    def _doubt(
        self, part: BlockHeads, head: int, logits: torch.Tensor, doubts: torch.Tensor, best: torch.Tensor, counted: Any
    ) -> torch.Tensor:
        """The loss of the confidence: whether a prediction is right, given right ones before it."""
        with torch.no_grad():
            guess, chances = self._two(logits)
        sure = part.sure(head, doubts, feelings(chances))
        right = (guess == best).float()
        lost = F.binary_cross_entropy_with_logits(sure, right, reduction="none")
        mean: torch.Tensor = (lost * counted).sum() / counted.sum().clamp(min=1)
        return mean

    def _learnt(
        self, part: Heads, target: _States, tokens: torch.Tensor, rows: torch.Tensor, chance: torch.Generator | None
    ) -> _Learnt:
        """The heads' outputs for whole sequences. On CUDA matrix products are in bfloat16, the rest in float32."""
        with self._mixed(), without_cudnn():
            hidden, embedded = target.of(part).float(), self.ends.embed(tokens).float()
            behind = rows - part.ahead[0]
            if isinstance(part, BlockHeads):
                forgotten = None
                if chance is not None:
                    forgotten = torch.rand(part.count, len(rows), generator=chance, device=self.device) < FORGOTTEN
                return _Learnt(*part.states_at(hidden, embedded, behind, forgotten))
            states = part.states(hidden, embedded, self.ends).flatten(1, 2)
            return _Learnt(states[:, behind], states.new_zeros(part.count, 0))

    @torch.no_grad()
    def _aim(self, hidden: torch.Tensor, chosen: torch.Tensor) -> _Aim:
        """The target's own distribution at flat positions."""
        logits: torch.Tensor = self.ends.head(self.ends.norm(hidden.flatten(0, 1)[chosen]))
        return _Aim(logits.float().softmax(-1).to(logits.dtype), logits.argmax(-1))

    @staticmethod
    def _behind(part: Heads, head: int, chosen: torch.Tensor) -> torch.Tensor:
        """The rows of `_Learnt` from which a head predicts the target's choice at these places."""
        return (chosen - (part.ahead[head] - part.ahead[0])).clamp(min=0)

    def _logits(self, part: Heads, head: int, states: torch.Tensor) -> torch.Tensor:
        """One head's logits from states [places, width]."""
        with self._mixed():
            return part.logits(states[None], self.ends, head)[0]

    def _note(self, losses: dict[str, torch.Tensor]) -> None:
        """Store the losses of an update, and read those of the update before, so that nothing waits for the device."""
        unread, self._unread = self._unread, losses
        for name, found in unread.items():
            now = found.tolist()
            if not all(map(math.isfinite, now)):
                raise InputError(f"{name}: the loss is {now} at update {self.progress.update}. Use a lower rate.")
            old = self.progress.losses.get(name, now)
            self.progress.losses[name] = [0.95 * before + 0.05 * new for before, new in zip(old, now, strict=True)]

    def _summary(self) -> str:
        losses = (f"{name} {' '.join(f'{loss:.2f}' for loss in found)}" for name, found in self.progress.losses.items())
        return f"update {self.progress.update}: {'; '.join(losses)}"

    def save(self, path: Path) -> None:
        """Write a checkpoint, atomically."""
        self._note({})
        if not self.team.leads:
            return
        state = {
            "progress": vars(self.progress),
            "plan": asdict(self.plan),
            "heads": {name: part.state_dict() for name, part in self.heads.items()},
            "optimizers": {name: [one.state_dict() for one, _ in both] for name, both in self.optimizers.items()},
        }
        half = path.with_suffix(".part")
        try:
            torch.save(state, half)
            half.replace(path)
        except (OSError, RuntimeError) as error:
            half.unlink(missing_ok=True)
            raise InputError(f"the checkpoint could not be written to {path}: {error}.") from error

    def resume(self, path: Path) -> None:
        """Load a checkpoint of the same heads and the same plan; only how often to save may differ."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            if state["heads"].keys() != self.heads.keys():
                raise InputError(
                    f"{path} is a checkpoint of {', '.join(state['heads'])}, not of "
                    f"{', '.join(self.heads)}. Delete it to start over."
                )
            for name, mine in asdict(replace(self.plan, save_every=state["plan"]["save_every"])).items():
                if mine != (theirs := state["plan"][name]):
                    raise InputError(
                        f"{path} is of a training with {name}={theirs}, not {mine}. Give the same settings to resume "
                        "it, or delete it to start over."
                    )
            for name, part in self.heads.items():
                part.load_state_dict(state["heads"][name])
                for (optimizer, _), stored in zip(self.optimizers[name], state["optimizers"][name], strict=True):
                    optimizer.load_state_dict(stored)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{path} cannot be resumed from: {error} Delete it to start over.") from error
        self.progress = Progress(**state["progress"])

    @torch.no_grad()
    def accuracies(self, texts: Sequence[Text], most: int = MEASURED) -> dict[str, torch.Tensor]:
        """By name [heads, ranks]: how often the token of each rank is the target's choice, at up to `most` positions.

        Heads conditioned on the token before get the right one.
        """
        hits = {name: torch.zeros(part.count, RANKS, device=self.device) for name, part in self.heads.items()}
        counts = {name: torch.zeros(part.count, 1, device=self.device) for name, part in self.heads.items()}
        seen = 0
        for part in self.heads.values():
            part.eval()
        for batch in batches(texts, self.plan.tokens, random.Random(0)):
            there = batch.to(self.device)
            target = self._compute(there.tokens)
            rows, weights = there.rows, self._weights(there)
            for name, part in self.heads.items():
                states = self._learnt(part, target, there.tokens, rows, None).states
                for chosen in torch.split(torch.arange(len(rows), device=self.device), self.chunk):
                    best = self._aim(target.final, rows[chosen]).best[:, None]
                    for head in range(part.count):
                        counted = weights[name][head, chosen, None] > 0
                        ranked = self._logits(part, head, states[head, self._behind(part, head, chosen)]).topk(RANKS)
                        hits[name][head] += ((ranked.indices == best) & counted).sum(0)
                        counts[name][head] += counted.sum()
            seen += len(rows)
            if seen >= most:
                break
        for part in self.heads.values():
            part.train()
        return {name: (hits[name] / counts[name].clamp(min=1)).cpu() for name in self.heads}

    @torch.no_grad()
    def confidence(self, name: str, texts: Sequence[Text]) -> list[list[float]]:
        """[ten bins of confidence] the number of predictions, their mean confidence, and the share that survives.

        Predictions are those along the most likely path; one survives if it and all before it are the target's choice.
        """
        part = self.heads[name]
        assert isinstance(part, BlockHeads)
        sums = torch.zeros(3, 10, dtype=torch.float64, device=self.device)
        seen = 0
        part.eval()
        for batch in batches(texts, self.plan.tokens, random.Random(0)):
            there = batch.to(self.device)
            target = self._compute(there.tokens)
            rows, weights = there.rows, self._weights(there)
            learnt = self._learnt(part, target, there.tokens, rows, None)
            sure, right = torch.zeros(2, part.count, len(rows), device=self.device)
            counted = torch.zeros(part.count, len(rows), dtype=torch.bool, device=self.device)
            for chosen in torch.split(torch.arange(len(rows), device=self.device), self.chunk):
                best = self._aim(target.final, rows[chosen]).best
                for head in range(part.count):
                    places = self._behind(part, head, chosen)
                    logits = self._logits(part, head, learnt.states[head, places])
                    chances, tokens = logits.float().log_softmax(-1).topk(2)
                    real = weights[name][head, chosen] > 0
                    said = F.logsigmoid(part.sure(head, learnt.doubts[head, places], feelings(chances)))
                    sure[head, places[real]] = said[real]
                    right[head, places[real]] = (tokens[:, 0] == best).float()[real]
                    counted[head, places[real]] = True
            counted = counted.cumprod(0).bool()
            said, survived = sure.cumsum(0).exp()[counted].double(), right.cumprod(0)[counted].double()
            bins = (said * 10).long().clamp(max=9)
            for line, values in enumerate((torch.ones_like(said), said, survived)):
                sums[line].index_add_(0, bins, values)
            seen += len(rows)
            if seen >= MEASURED:
                break
        part.train()
        count = sums[0].clamp(min=1)
        found: list[list[float]] = torch.stack([sums[0], sums[1] / count, sums[2] / count], 1).tolist()
        return found

    @torch.no_grad()
    def calibration(self, part: ExitHeads, texts: Sequence[Text]) -> list[list[list[int]]]:
        """[exit][bin of confidence] how many predictions an exit makes, and how many are the target's choice."""
        counts = torch.zeros(part.count, 2, BINS, dtype=torch.long, device=self.device)
        borders = torch.tensor(BORDERS, device=self.device)
        seen = 0
        for batch in batches(texts, self.plan.tokens, random.Random(0)):
            there = batch.to(self.device)
            target = self._compute(there.tokens)
            rows = there.rows
            read = target.of(part).flatten(1, 2)
            for start in range(0, len(rows), self.chunk):
                chosen = rows[start : start + self.chunk]
                choice = self._aim(target.final, chosen).best
                for place in range(part.count):
                    with self._mixed():
                        logits = part.probe(place, read[place, chosen].float(), self.ends)
                    confidence, guess = logits.float().softmax(-1).max(-1)
                    places = torch.bucketize(confidence, borders, right=True)
                    counts[place, 0] += torch.bincount(places, minlength=BINS)
                    counts[place, 1] += torch.bincount(places[guess == choice], minlength=BINS)
            seen += len(rows)
            if seen >= MEASURED:
                break
        found: list[list[list[int]]] = counts.transpose(1, 2).tolist()
        return found


class _Learnt(NamedTuple):
    """The heads' outputs at the positions that they are trained on."""

    states: torch.Tensor  # [heads, places, width] what the output head reads
    doubts: torch.Tensor  # [heads, places] the heads' part of the confidence, if they have one

    def leaves(self) -> _Learnt:
        """Detached copies that collect gradients."""
        return _Learnt(*(part.detach().requires_grad_() for part in self))


class _Aim(NamedTuple):
    """The target's distribution and choice at some positions."""

    chances: torch.Tensor  # [places, vocabulary]
    best: torch.Tensor  # [places]


class _States(NamedTuple):
    """The target's hidden states of whole sequences [texts, length, width]."""

    final: torch.Tensor  # after the last layer
    behind: dict[int, torch.Tensor]  # after this many layers, as heads need

    def of(self, part: Heads) -> torch.Tensor:
        """The states that these heads read."""
        return torch.stack([self.behind[layer] for layer in part.reads]) if part.reads else self.final


def _loss(logits: torch.Tensor, chances: torch.Tensor, best: torch.Tensor, hard: float) -> torch.Tensor:
    """[places] cross-entropy to the target's distribution, `hard` of it to its best token alone."""
    logits = logits.float()
    normal = logits.logsumexp(-1)
    loss = normal - (chances.float() * logits).sum(-1)
    if hard:
        choice = logits.gather(-1, best[:, None]).squeeze(-1)
        loss = (1 - hard) * loss + hard * (normal - choice)
    return loss


def _two(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's best token, and the log probabilities [rows, 2] of the best two; faster than topk."""
    logits = logits.float()
    first, best = logits.max(-1)
    second = logits.scatter(-1, best[:, None], -torch.inf).amax(-1)
    return best, torch.stack([first, second], -1) - logits.logsumexp(-1, keepdim=True)


def _optimizers(heads: Heads, plan: Plan) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for matrices, AdamW for everything else, each with its peak learning rate."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, parameter in heads.named_parameters():
        (matrices if name.endswith("weight") and parameter.dim() == 2 else others).append(parameter)
    found: list[tuple[torch.optim.Optimizer, float]] = []
    if matrices:
        found.append((Muon(matrices, plan.rate), plan.rate))
    if others:
        adam = torch.optim.AdamW(others, plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.0)
        found.append((adam, plan.vector_rate))
    return found
