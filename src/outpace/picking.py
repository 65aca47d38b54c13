"""How the target chooses a token: logits processors, then greedy, keyed noise, or one of the papers' rules.

A choice depends on the logits, the tokens before it, and the seed, never on the draft, so the output is the same with
every method. Exceptions: the rejection rule preserves only the distribution, and typical acceptance not even that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from .draft import NOTHING, Scores, best_tokens
from .errors import InputError, InvalidLogits
from .limits import check_sampling

Processor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""As in transformers: takes input ids [1, length] and scores [1, vocabulary], returns new scores."""

Proposal: TypeAlias = "tuple[int, torch.Tensor | None]"
"""A draft token, and the distribution it was sampled from (None: it was not sampled)."""

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Fractions: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_TARGET, _GUESS, _ACCEPT = 0, 1, 2  # independent streams of noise
PIECE = 64  # tokens per piece; pieces are compared by their highest scores first
TYPICAL, SURE = 0.09, 0.3  # Medusa's typical acceptance: threshold, and factor of exp(-entropy)
SORTED = (256, 4096)  # the best tokens that top-p sorts first
MANY = 1024  # with more tokens to choose from, those that certainly lose are excluded first
ROUGH = 1e-5  # more than the error of uniform numbers and their bounds in float32
NOISED = 256  # a drafter adds noise to this many top tokens, to predict which will be sampled


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The default is greedy.

    `temperature` 0 is greedy. `repetition_penalty` covers prompt and answer, as in transformers; None uses the model's
    own (its `generation_config`), 1 turns it off. `presence_penalty` and `frequency_penalty` cover the answer only.
    `rule` is "keyed" (the same seed gives the same text with every method), "rejection" (the papers' rejection
    sampling: the same distribution, another text) or "typical" (Medusa's typical acceptance, LOSSY: draft tokens that
    are likely enough are accepted, which changes the distribution; for comparison only).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[Processor] = ()
    seed: int = 0
    rule: Literal["keyed", "rejection", "typical"] = "keyed"

    def __post_init__(self) -> None:
        check_sampling(vars(self))
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias={self.logit_bias!r:.60} must be a dict of token ids and numbers.")
        for token, bias in self.logit_bias.items():
            if not (isinstance(token, int) and isinstance(bias, (int, float)) and bias < math.inf):
                raise InputError(f"logit_bias={{{token!r}: {bias!r}}} must be a token id and a number below +inf.")
        given = self.processors
        if not (isinstance(given, Sequence) and all(callable(item) for item in given)):
            raise InputError(f"processors={given!r:.60} must be a list of functions of token ids and scores.")

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is the target's own."""
        return self.rule != "typical" or self.temperature == 0


class Foreseen(NamedTuple):
    """Predictions of a choice, most likely first."""

    tokens: Numbers  # [lines, count]
    chances: Fractions  # [lines, count] log probabilities


class Picker:
    """Chooses the tokens of one sequence, by its Sampling."""

    def __init__(self, sampling: Sampling, prompt_length: int) -> None:
        self.sampling = sampling
        self.prompt_length = prompt_length
        self.greedy = sampling.temperature == 0
        self._penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        self._processes = bool(
            sampling.logit_bias
            or sampling.processors
            or self._penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )
        self.takes_best = self.greedy and not self._processes  # always the token with the highest logit

    def for_drafts(self) -> Picker:
        """The same without a user's processors, which may count their calls, or fail beyond the end."""
        return Picker(replace(self.sampling, processors=()), self.prompt_length)

    def choose_after(self, row: int, scores: Scores, prefix: Sequence[int], proposals: Sequence[Proposal] = ()) -> int:
        """The target's token after `row` of a draft. `prefix` are the tokens up to there, the row's last."""
        if scores.chosen is not None:
            if scores.chosen[row] == NOTHING:
                raise InvalidLogits("the model's logits contain NaN, or every token is ruled out, on one of the ranks")
            return scores.chosen[row]
        if self.takes_best:
            if not scores.best_logits[row] > -math.inf:
                self._checked(scores.logits[row])
            return scores.best[row]
        return self.choose(scores.logits[row], prefix, proposals)

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], proposals: Sequence[Proposal] = ()) -> int:
        """The target's token after `prefix`, given its logits there [vocabulary]."""
        if self.sampling.rule == "rejection" and not self.greedy:
            return self._reject(self.probabilities(logits, prefix), len(prefix), proposals)
        if not self.sampling.lossless and (token := self._typical(logits, prefix, proposals)) is not None:
            return token
        return self._pick(logits, prefix)

    def guess(self, logits: torch.Tensor, prefix: Sequence[int]) -> Proposal:
        """A drafter's prediction of `choose`, from its own logits.

        With keyed noise it uses the target's noise, so that similar logits give the same sample. The rejection rule
        needs an independent sample, and its distribution.
        """
        if self.sampling.rule == "rejection" and not self.greedy:
            q = self.probabilities(logits, prefix)
            return self._draw(q, len(prefix), _GUESS), q
        return self._pick(logits, prefix), None

    def candidates(self, count: int) -> int:
        """How many top tokens a drafter must give for `foresee` to find `count`."""
        return count if self.greedy else max(NOISED, count)

    def foresee(self, likeliest: torch.Tensor, positions: Sequence[int], count: int, coupled: bool = True) -> Foreseen:
        """Predict the target's choices at `positions`: the `count` most likely tokens of each line.

        `likeliest` is the result of the function of that name, a line for each position. When sampling with keyed noise
        and `coupled`, tokens are ranked with the target's noise. Bias, penalties and top-k/p are left out.
        """
        found = likeliest.cpu()  # one transfer
        tokens, chances = found[0].long(), found[1]
        if not self.greedy:
            chances = chances / self.sampling.temperature
            if coupled and self.sampling.rule == "keyed":
                places = zip(positions, tokens, strict=True)
                noise = [gumbel(self.sampling.seed, position, _TARGET, line) for position, line in places]
                chances, order = (chances + torch.stack(noise)).sort(-1, descending=True)
                tokens = tokens.gather(-1, order)
            chances = chances.log_softmax(-1)
        return Foreseen(tokens[:, :count].numpy(), chances[:, :count].numpy())

    def probabilities(self, logits: torch.Tensor, prefix: Sequence[int]) -> torch.Tensor:
        """The distribution [vocabulary] that a token after `prefix` is sampled from, unless greedy."""
        return self._checked(self._process(logits, prefix)).softmax(-1, dtype=torch.float64)

    def ranking(self, logits: torch.Tensor, prefix: Sequence[int]) -> torch.Tensor:
        """[vocabulary] scores whose argmax is the target's choice: log probabilities, plus noise when sampling."""
        scores = self.probabilities(logits, prefix).log()
        if self.greedy:
            return scores
        tokens = torch.arange(len(scores), device=scores.device)
        return scores + gumbel(self.sampling.seed, len(prefix), _TARGET, tokens)

    def _pick(self, logits: torch.Tensor, prefix: Sequence[int]) -> int:
        scores = self._process(logits, prefix)
        if self.greedy:
            (token,), (best,) = best_tokens(scores[None])
            if not best > -math.inf:
                self._checked(scores)
            return token
        return self._draw_from_scores(self._checked(scores), len(prefix), _TARGET)

    def _process(self, logits: torch.Tensor, prefix: Sequence[int]) -> torch.Tensor:
        """Logits to scores: bias, penalties, the user's processors, then (unless greedy) temperature and top-k/p."""
        setting = self.sampling
        if self.takes_best:
            return logits
        scores = logits.float()
        if self._processes:
            scores = self._penalise(scores.clone() if scores is logits else scores, prefix)
            if setting.processors:
                ids = torch.tensor([list(prefix)], device=scores.device)
                with torch.no_grad():  # as in transformers: some run a model
                    for processor in setting.processors:
                        found = processor(ids, scores[None])
                        if not isinstance(found, torch.Tensor):
                            raise InputError(f"the logits processor {processor!r:.60} must return the scores.")
                        scores = found[0]
        if self.greedy:
            return scores
        on_cpu = scores.device.type == "cpu"
        return torch.from_numpy(_warmed_on_cpu(scores.numpy(), setting)) if on_cpu else _warmed(scores, setting)

    def _penalise(self, scores: torch.Tensor, prefix: Sequence[int]) -> torch.Tensor:
        setting = self.sampling
        for token, bias in setting.logit_bias.items():
            if not 0 <= token < len(scores):
                raise InputError(f"logit_bias names token {token}; the vocabulary has ids 0 to {len(scores) - 1}.")
            scores[token] += bias
        if self._penalty != 1:
            seen = torch.tensor(sorted(set(prefix)), device=scores.device)
            old = scores[seen]
            scores[seen] = torch.where(old < 0, old * self._penalty, old / self._penalty)
        if setting.presence_penalty or setting.frequency_penalty:
            counts = Counter(prefix[self.prompt_length :])
            tokens = torch.tensor([*counts], dtype=torch.long, device=scores.device)
            often = torch.tensor([*counts.values()], dtype=scores.dtype, device=scores.device)
            scores[tokens] -= setting.presence_penalty + setting.frequency_penalty * often
        return scores

    def _checked(self, scores: torch.Tensor) -> torch.Tensor:
        best = float((scores.numpy() if scores.device.type == "cpu" else scores).max())
        if math.isnan(best):
            raise InvalidLogits("the model's logits contain NaN")
        if best == -math.inf:
            raise InvalidLogits("every token is ruled out (all scores are -inf); loosen the logits processors")
        return scores

    def _draw_from_scores(self, scores: torch.Tensor, position: int, stream: int) -> int:
        """Argmax of scores plus Gumbel noise: an exact draw from their softmax."""
        key = (self.sampling.seed, position, stream)
        if scores.device.type == "cpu":
            alive = torch.from_numpy(_may_win(scores.numpy(), key))
        else:
            alive = (scores > -math.inf).nonzero().squeeze(-1)
        return int(alive[(scores[alive].double() + gumbel(*key, alive)).argmax()])

    def _draw(self, probabilities: torch.Tensor, position: int, stream: int) -> int:
        return self._draw_from_scores(probabilities.log(), position, stream)

    def _typical(self, logits: torch.Tensor, prefix: Sequence[int], proposals: Sequence[Proposal]) -> int | None:
        """The most likely draft token, if it is likely enough given the target's entropy; otherwise None."""
        if not proposals:
            return None
        p = self.probabilities(logits, prefix)
        least = min(TYPICAL, SURE * math.exp(-float(torch.special.entr(p).sum())))
        token = max((token for token, _ in proposals), key=lambda token: float(p[token]))
        return token if p[token] > least else None

    def _reject(self, p: torch.Tensor, position: int, proposals: Sequence[Proposal]) -> int:
        """Accept a draft token x with min(1, p(x)/q(x)); after a rejection p is the normalized positive part of p − q.

        The children of a row were sampled from the same q without replacement, in this order; for a draft token that
        was not sampled, q is 1.
        """
        refused: list[int] = []
        for turn, (token, drawn_from) in enumerate(proposals):
            if drawn_from is None:
                q = torch.zeros_like(p)
                q[token] = 1
            else:
                q = drawn_from.clone()
                q[refused] = 0
                q /= q.sum()
            chance = torch.tensor([turn], device=p.device)
            if float(uniform(self.sampling.seed, position, _ACCEPT, chance)) * q[token] < p[token]:
                return token
            p = (p - q).clamp(min=0)
            p = p / p.sum()
            refused.append(token)
        return self._draw(p, position, _TARGET)


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[2, lines, count] the top tokens by logits [lines, vocabulary], and their log probabilities.

    Nothing leaves the device and shapes are fixed, so it can be captured in a CUDA graph.

    >>> likeliest(torch.tensor([[0.0, 3.0, 1.0]]), 2)[0].tolist()
    [[1.0, 2.0]]
    """
    logits = logits.float()
    best, tokens = _largest(logits, min(count, logits.shape[-1]))
    chances = best - logits.logsumexp(-1, keepdim=True)
    return torch.stack([tokens.double(), chances.double()])


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk` with one pass over the vocabulary: the largest are in the pieces with the largest maxima."""
    lines, words = logits.shape
    if words < PIECE * count or words % PIECE:
        return logits.topk(count)
    pieces = logits.view(lines, -1, PIECE)
    among = pieces.amax(-1).topk(count).indices  # [lines, count]
    best, place = pieces.gather(1, among[..., None].expand(-1, -1, PIECE)).flatten(1).topk(count)
    return best, among.gather(1, place // PIECE) * PIECE + place % PIECE


def _warmed(scores: torch.Tensor, setting: Sampling) -> torch.Tensor:
    """Scores by temperature, top-k, top-p and min-p."""
    best = scores.max()
    if best.isfinite():
        scores = scores - best  # so that no temperature is too small for float32
    scores = scores / setting.temperature
    if 0 < setting.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(setting.top_k).values[-1], -math.inf)
    if setting.top_p < 1:
        scores = _cut_top_p(scores, setting.top_p)
    if setting.min_p > 0:
        scores = scores.masked_fill(scores < scores.max() + math.log(setting.min_p), -math.inf)
    return scores


def _warmed_on_cpu(scores: Floats, setting: Sampling) -> Floats:
    """The same by NumPy, in one thread: on a busy machine, torch's threads wait for each other in every operation."""
    best = scores.max()
    if not np.isfinite(best):
        return scores  # an error, or certain
    with np.errstate(all="ignore"):  # the smallest temperatures are 0 in float32
        scores = (scores - best) / np.float32(setting.temperature)
    scores[np.isnan(scores)] = 0.0  # the best
    if 0 < setting.top_k < len(scores):
        scores = np.where(scores < np.partition(scores, -setting.top_k)[-setting.top_k], -np.inf, scores)
    if setting.top_p < 1:
        scores = _cut_top_p_on_cpu(scores, setting.top_p)
    if setting.min_p > 0:
        scores = np.where(scores < scores.max() + np.float32(math.log(setting.min_p)), -np.inf, scores)
    return scores.astype(np.float32, copy=False)


def _cut_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest best tokens whose probabilities reach `top_p`."""
    best, order = scores.sort(descending=True, stable=True)
    # Integer sums do not depend on the order; on a GPU, float sums differ from run to run.
    mass = (best.softmax(-1, dtype=torch.float64) * 2**52).long().cumsum(-1)
    kept = int((mass < top_p * 2**52).sum()) + 1
    cut = torch.full_like(scores, -math.inf)
    return cut.scatter(0, order[:kept], best[:kept])


def _cut_top_p_on_cpu(scores: Floats, top_p: float) -> Floats:
    """The same: sorts only as many of the best tokens as are needed."""
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    mass = (weights / weights.sum() * 2**52).astype(np.int64)
    cut = np.full_like(scores, -np.inf)
    for count in (*SORTED, len(scores)):
        least = np.partition(scores, -count)[-count] if count < len(scores) else -np.inf
        best = np.flatnonzero(scores >= least)
        best = best[np.argsort(-scores[best], kind="stable")]
        kept = int((mass[best].cumsum() < top_p * 2**52).sum()) + 1
        if kept <= len(best) or count >= len(scores):
            break
    cut[best[:kept]] = scores[best[:kept]]
    return cut


def _may_win(scores: Floats, key: tuple[int, int, int]) -> Numbers:
    """The tokens that may have the highest score with noise: certainly the one that has it, and few others.

    A token with the uniform number u is above a bar b if u > exp(-exp(score - b)). Mostly a rough u can deny that.
    """
    alive = scores > -np.inf
    if np.count_nonzero(alive) > MANY:
        best = int(scores.argmax())
        bar = float(scores[best]) + float(gumbel(*key, torch.tensor([best])))
        below = np.exp(-np.exp(scores - np.float32(bar)))
        alive &= _rough(key, len(scores)) > below - np.float32(ROUGH)
    return np.flatnonzero(alive)


def uniform(seed: int, position: int, stream: int, index: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1), one for each index, that depend only on the arguments: the same on every device.

    >>> a, b = uniform(0, 5, 0, torch.tensor([3, 4])).tolist()
    >>> a == float(uniform(0, 5, 0, torch.tensor([3]))) and a != b
    True
    """
    first, second = _key(seed, position, stream)
    # For a few numbers numpy takes a quarter of torch's time.
    numbers: Any = index.numpy() if index.device.type == "cpu" else index
    high = mixed(mixed(numbers ^ (first & _LOW)) ^ (first >> 32))
    low = mixed(mixed(numbers ^ (second & _LOW)) ^ (second >> 32))
    bits = torch.as_tensor((high << 20) | (low >> 12))  # 52 bits
    return (bits.double() + 0.5) * 2.0**-52


def _rough(key: tuple[int, int, int], count: int) -> Any:
    """[count] the same numbers in float32, from their first 32 bits."""
    first, _ = _key(*key)
    numbers = np.arange(count, dtype=np.uint32)  # `mixed` keeps numbers below 2^32, so nothing is lost
    high = mixed(mixed(numbers ^ np.uint32(first & _LOW)) ^ np.uint32(first >> 32))
    return high.astype(np.float32) * np.float32(2.0**-32)


def gumbel(seed: int, position: int, stream: int, index: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, keyed like `uniform`."""
    return -torch.log(-torch.log(uniform(seed, position, stream, index)))


_LOW = 0xFFFFFFFF


def mixed(x: Any) -> Any:
    """A bijection of 32-bit numbers (kept in int64) that spreads every input bit over all output bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _key(seed: int, position: int, stream: int) -> tuple[int, int]:
    """Two 64-bit keys from seed, position and stream, by splitmix64."""
    state = seed & (2**64 - 1)
    for value in (position, stream, 1):
        state = _splitmix(state ^ _splitmix(value))
    return state, _splitmix(state)


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
