"""Lookahead Parallelism: the rows of a draft are split among several processes ("ranks"), each with a whole model.

    torchrun --nproc-per-node 4 script.py          decoder = outpace.parallel.load(..., method="lookahead", window=28)

Every rank drafts the same tree, computes a part of it that is closed under ancestors, and chooses tokens as far down as
it has rows. In one all-gather of integers the ranks then exchange the argmax of each row and their choices. After it
every rank knows what a single process would know: the verdict, the next draft and the output are the same everywhere.
Keys and values are not exchanged. Accepted rows that a rank did not compute count as tokens without cached keys and
values, and are computed along with its next step.

A rank that raises an error tells the others at once. If one dies or hangs, all others raise an error that names it,
within `timeout` seconds.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from hashlib import sha256
from os import PathLike
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from . import __version__
from .batch import MOST, Request
from .decoder import DEFAULT_MODEL, Batch, Decoder
from .decoder import load as load_decoder
from .draft import NOTHING, Draft, Scores, Step, chain
from .errors import InputError, InvalidLogits, RankError
from .loop import PLAINLY
from .methods import DEFAULT, Method
from .picking import Picker
from .pool import Sequence as Text
from .runtime.plain import Asking, Engine, See
from .text import TextStream

TIMEOUT = 120.0
BOX = 256  # integers per exchange: a kilobyte from each rank. What does not fit goes into a second one
PATIENCE = 0.8  # share of the timeout after which a rank stops waiting, and the roll call starts
FAREWELL = 1.0  # seconds that a rank with an error waits for the others to learn of it
PROBE = 64  # rows that every rank computes when it joins, to compare models


class Stage(IntEnum):
    """What a rank is exchanging."""

    JOINING = 0
    BEGINNING = 1
    WRITING = 2
    FAILED = 3


_WHERE = {Stage.JOINING: "joining", Stage.BEGINNING: "starting a sequence", Stage.WRITING: "within a sequence"}
_HEAD = 3  # integers of a box's header: the stage, its argument, how many numbers follow


class Ranks:
    """The process group started by torchrun, as seen by one rank.

    Ranks exchange integers that the host needs, so they use gloo on every device: NCCL would copy them to the GPU and
    back, and polls only every millisecond.
    """

    def __init__(self, timeout: float) -> None:
        if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
            raise InputError(f"timeout={timeout!r} must be a number of seconds above 0, and finite.")
        self.timeout = timeout
        self._lost = ""  # why no more exchanges are possible
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
                atexit.register(self._leave)
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        except ValueError as error:
            raise InputError(
                f"there are no ranks to join ({error}). Start the program with `torchrun --nproc-per-node N`."
            ) from error
        except RuntimeError as error:
            raise self._lose(f"not all ranks were there within {timeout:g} s ({_reason(error)}).") from error
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.exchanges = 0
        self.numbers = 0  # integers that this rank has sent so far
        self._store = _get_default_store()

    def gather(self, stage: Stage, about: int, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange numbers with all ranks; returns them by rank. All must be at the same stage, `about` the same."""
        self.numbers += len(numbers)
        room = BOX - _HEAD
        boxes = self._exchange(_box(stage, about, numbers))
        for rank, box in enumerate(boxes):
            if box[0] == Stage.FAILED:
                raise self._lose(f"rank {rank} has failed: {_words(box)}")
        for rank, box in enumerate(boxes):
            if box[0] != boxes[0][0]:
                where = f"rank 0 is {_WHERE[Stage(boxes[0][0])]}, rank {rank} is {_WHERE[Stage(box[0])]}"
                raise self._lose(f"the ranks are out of step: {where}. All must run the same program.")
            if box[1] != boxes[0][1]:
                raise self._lose(f"the ranks are out of step: rank {rank} has a different draft than rank 0.")
        told = [box[3 : 3 + box[2]] for box in boxes]
        longest = max(box[2] for box in boxes)
        if longest > room:
            rest = [*numbers[room:], *[0] * (longest - max(room, len(numbers)))]
            for box, mine, more in zip(boxes, told, self._exchange(rest), strict=True):
                mine += more[: max(0, box[2] - room)]
        return told

    def compare(self, stage: Stage, **values: object) -> None:
        """Raise RankError on all ranks if a value is not the same on all."""
        told = self.gather(stage, 0, [_digest(value) for value in values.values()])
        for place, name in enumerate(values):
            others = [str(rank) for rank, digests in enumerate(told) if digests[place] != told[0][place]]
            if others:
                whose = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(others)} have"
                raise RankError(
                    f"{whose} a different {name.replace('_', ' ')} than rank 0. All ranks must have the same."
                )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A context that tells the other ranks of an error inside it, so that they do not wait for this one."""
        try:
            yield
        except RankError:
            raise  # all ranks know, or cannot be told
        except (Exception, KeyboardInterrupt) as error:
            if not vars(error).get("told"):  # by an inner context
                vars(error)["told"] = True
                self._tell(f"{type(error).__name__}: {error}")
            raise

    def _tell(self, error: str) -> None:
        """Send the error instead of the next exchange. If all ranks do so, they are still in step.

        A rank that reaches that exchange after this process has ended finds the error in torch's store.
        """
        if self._lost:
            return
        key = f"outpace: {self.rank} failed"
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(key, error)
        try:
            boxes = self._all_gather(_box(Stage.FAILED, 0, error.encode()[: BOX - _HEAD]), FAREWELL)
        except RuntimeError:
            boxes = []  # no rank was there in time
        if boxes and all(box[0] == Stage.FAILED for box in boxes):
            self._store.delete_key(key)
        else:
            self._lost = f"this rank has failed before: {error}"

    def _exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        if self._lost:
            raise RankError(self._lost)
        deadline = monotonic() + self.timeout
        try:
            found = self._all_gather(numbers, self.timeout * PATIENCE)
        except RuntimeError as error:
            raise self._lose(self._roll_call(deadline, _reason(error))) from error
        self.exchanges += 1
        return found

    def _all_gather(self, numbers: Sequence[int], patience: float) -> list[list[int]]:
        """The boxes of all ranks, or RuntimeError after `patience` seconds."""
        mine = torch.tensor(numbers, dtype=torch.int32)
        theirs = [torch.empty_like(mine) for _ in range(self.count)]
        work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=patience))
        found: list[list[int]] = torch.stack(theirs).tolist()
        return found

    def _roll_call(self, deadline: float, reason: str) -> str:
        """Find the missing ranks: every waiting rank reports, and those that have not by the deadline are lost."""
        missing = set(range(self.count)) - {self.rank}
        try:
            self._store.set(f"outpace: {self.rank} waits", "")
            while missing and monotonic() < deadline:
                for rank in sorted(missing):
                    if self._store.check([f"outpace: {rank} failed"]):
                        return f"rank {rank} has failed: {self._store.get(f'outpace: {rank} failed').decode()}"
                missing -= {rank for rank in missing if self._store.check([f"outpace: {rank} waits"])}
                sleep(0.02)
        except RuntimeError:  # the store ended with rank 0 or torchrun; rank 0 may have finished the roll call
            missing = {0} if 0 in missing else missing
        if not missing:
            return (
                f"the exchange after {self.exchanges} others failed, and every rank noticed ({reason}): "
                f"the connection broke, or rank {self.rank} was too slow. Raise the timeout of {self.timeout:g} s."
            )
        names = ", ".join(map(str, sorted(missing)))
        who = f"rank {names} does" if len(missing) == 1 else f"ranks {names} do"
        return f"{who} not respond (seen from rank {self.rank}, timeout {self.timeout:g} s): dead, or too slow."

    def _leave(self) -> None:
        """Close the process group while Python still runs, unless a rank is lost, for which it would wait."""
        if dist.is_initialized() and not self._lost:
            dist.destroy_process_group()

    def _lose(self, reason: str) -> RankError:
        self._lost = reason
        return RankError(reason)


class ParallelEngine(Engine):
    """An engine that computes this rank's share of each draft, and gets the rest from the others."""

    def __init__(self, engine: Engine, ranks: Ranks, picker: Picker | None = None) -> None:
        self.engine = engine
        self.ranks = ranks
        self.picker = picker  # of the current sequence
        self.model, self.pool, self.compiled = engine.model, engine.pool, engine.compiled
        self.turns = engine.turns
        self.costs = None  # the cost of a share is not measured
        self.name = f"{engine.name}, {ranks.count} ranks"
        self.exact, self.why_fast = engine.exact, engine.why_fast

    def for_one_text(self, picker: Picker | None = None) -> Engine:
        return ParallelEngine(self.engine.for_one_text(picker), self.ranks, picker)

    def scoring(self, sequence: Text, draft: Draft, see: See | None = None) -> Asking[Scores]:
        """Scores with the argmax of every row and the target's choices. Logits stay on the rank that computed them."""
        shares = deal(draft, self.ranks.count)
        share = shares[self.ranks.rank]
        scores = yield from self.engine.scoring(sequence, _part(draft, share))
        sequence.share = share
        about = _digest((draft.tokens, draft.parents))
        best, chosen = [0] * len(draft), dict[int, int]()
        # One round, unless two ranks round a near-tie differently: then the path may lead to rows not chosen from yet.
        while not _reaches_an_end(draft, chosen):
            mine = self._choose(draft, share, scores, sequence.tokens, chosen)
            pairs = [number for pair in mine.items() for number in pair]
            told = self.ranks.gather(Stage.WRITING, about, [*scores.best, *pairs])
            for rows, numbers in reversed([*zip(shares, told, strict=True)]):  # the first rank with a row decides
                for row, token in zip(rows, numbers, strict=False):
                    best[row] = token
                pairs = numbers[len(rows) :]
                chosen.update(zip(pairs[::2], pairs[1::2], strict=True))
        found = torch.tensor([best, [0] * len(best)], dtype=torch.float64)
        return Scores(scores.logits[:0], scores.hidden[:0], found, chosen)

    def _choose(
        self, draft: Draft, share: Sequence[int], scores: Scores, text: Sequence[int], chosen: Mapping[int, int]
    ) -> dict[int, int]:
        """The target's choices by row, beyond those already `chosen`, as far down as this rank has rows."""
        assert self.picker is not None
        places = {row: place for place, row in enumerate(share)}
        found: dict[int, int] = {}
        prefix = list(text)
        row: int | None = 0
        while row is not None and (row in chosen or row in places):
            if row not in chosen:
                proposals = [(draft.tokens[child], draft.proposal(child)) for child in draft.children[row]]
                try:
                    found[row] = self.picker.choose_after(places[row], scores, prefix, proposals)
                except InvalidLogits:  # perhaps beyond the end of the sequence, where it does not matter
                    found[row] = NOTHING
            token = chosen.get(row, found.get(row, NOTHING))
            prefix.append(token)
            row = draft.child(row, token)
        return found


class ParallelDecoder(Decoder):
    """A decoder that works together with those of the other ranks. All must get the same calls, in the same order.

    It supports lookahead (the default) and prompt-lookup, and no logits processors, because these may keep state.
    """

    _grows = False  # ranks have computed different rows of the last sequence

    def __init__(self, decoder: Decoder, ranks: Ranks) -> None:
        vars(self).update(vars(decoder))
        self.ranks = ranks
        self.engine = ParallelEngine(decoder.engine, ranks)
        model = decoder.model
        with ranks.telling():
            self.method = self.prepare("lookahead" if decoder.method.name == DEFAULT else decoder.method)
            ranks.compare(
                Stage.JOINING,
                version_of_Outpace=__version__,
                kind_of_model=(model.layers, model.width, model.vocabulary, model.context),
                dtype=model.dtype,
                runtime=decoder.engine.name,
                model=_probe(decoder.engine),
                ends_of_text=self.ends,
            )

    def prepare(self, method: str | Method, **settings: object) -> Method:
        """As `Decoder.prepare`, for methods whose drafts can be split."""
        ready = super().prepare(method, **settings)
        if not ready.dealt:
            raise InputError(
                f"{ready.name} cannot be split over ranks: that needs draft trees that depend on tokens alone. Chains "
                "cannot be split, and hidden states stay on the rank that computed them. Use lookahead or "
                "prompt-lookup."
            )
        return ready

    def request(self, prompt: Any, **options: Any) -> tuple[Request, TextStream | None]:
        """As `Decoder.request`. All ranks must pass the same."""
        request, text = super().request(prompt, **options)
        if request.sampling.processors:
            names = ", ".join(type(item).__name__ for item in request.sampling.processors)
            raise InputError(
                f"logits processors ({names}) cannot be used on several ranks: each would be called for "
                "some of the tokens only. Leave them out, including those of the model's generation_config."
            )
        if request.extras != PLAINLY:
            raise InputError("logprobs and predictions are not supported on several ranks. Leave them out.")
        self.ranks.compare(
            Stage.BEGINNING,
            prompt=request.prompt,
            max_new_tokens=options.get("max_new_tokens"),
            sampling=request.sampling,
            list_of_stop_strings=options.get("stop"),
            method=request.method,
        )
        return request, text

    def generate(self, prompt: Any, **options: Any) -> Any:
        """As `Decoder.generate`, for one prompt at a time."""
        with self.ranks.telling():
            return super().generate(prompt, **options)

    def stream(self, prompt: Any, **options: Any) -> Any:
        """As `Decoder.stream`, for one prompt at a time."""
        with self.ranks.telling():
            return super().stream(prompt, **options)

    def _stream(self, request: Request, text: TextStream | None) -> Iterator[Step]:
        with self.ranks.telling():
            yield from super()._stream(request, text)

    def batch(self, most: int = MOST) -> Batch:
        """Not supported: ranks hold different rows, so they would build different batches."""
        raise InputError("batches are not supported on several ranks. Give one prompt at a time.")


def load(
    model: Any = DEFAULT_MODEL,
    tokenizer: Any = None,
    *,
    device: str | None = None,
    timeout: float = TIMEOUT,
    **options: Any,
) -> ParallelDecoder:
    """`outpace.load` in a program started by torchrun, each rank on its own GPU if there are any."""
    if isinstance(model, str | PathLike):
        device = device or local_device()
    return join(load_decoder(model, tokenizer, device=device, **options), timeout)


def join(decoder: Decoder, timeout: float = TIMEOUT) -> ParallelDecoder:
    """A parallel decoder from this rank's decoder. A rank that is silent for `timeout` seconds is an error."""
    return ParallelDecoder(decoder, Ranks(timeout))


def local_device() -> str | None:
    """This rank's GPU; None if there is none."""
    return f"cuda:{dist.get_node_local_rank(0)}" if torch.cuda.is_available() else None


def deal(draft: Draft, count: int) -> list[tuple[int, ...]]:
    """Split a draft among `count` ranks: every row goes to some rank, together with its ancestors.

    Paths are dealt in the order of the tree, so that paths with a common prefix stay together. The largest share is as
    small as that order allows.

    >>> from .draft import Tree
    >>> tree = Tree(7)
    >>> for path in ([1, 2], [1, 3], [4, 5]):
    ...     _ = tree.insert(path, "")
    >>> deal(tree.draft(), 2)
    [(0, 1, 2, 3), (0, 4, 5)]
    """
    below: list[list[int]] = [[] for _ in draft.tokens]
    for row in range(1, len(draft)):
        below[draft.parents[row]].append(row)
    leaves: list[int] = []
    sizes: list[tuple[int, int]] = []  # of each leaf's path: rows not shared with the path before it, and all rows
    waiting, seen = [0], 0
    while waiting:
        row = waiting.pop()
        seen += 1
        if not below[row]:
            leaves.append(row)
            sizes.append((seen, draft.depths[row] + 1))
            seen = 0
        waiting += reversed(below[row])

    def cut(most: int) -> list[int]:
        """The first leaf of each share, if no share may have more than `most` rows."""
        starts = [0]
        size = 0
        for leaf, (more, alone) in enumerate(sizes):
            size += more
            if size > most:
                starts.append(leaf)
                size = alone
        return starts

    low, high = max(max(draft.depths) + 1, -(-len(draft) // count)), len(draft)  # a path is not split
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= count else (middle + 1, high)
    starts = cut(high)
    parts = [leaves[start:stop] for start, stop in zip(starts, [*starts[1:], len(leaves)], strict=True)]
    return [_with_ancestors(draft, part) for part in parts] + [(0,)] * (count - len(parts))


def _with_ancestors(draft: Draft, leaves: Sequence[int]) -> tuple[int, ...]:
    rows: set[int] = set()
    for row in leaves:
        while row >= 0 and row not in rows:
            rows.add(row)
            row = draft.parents[row]
    return tuple(sorted(rows))


def _part(draft: Draft, rows: Sequence[int]) -> Draft:
    """The rows of a draft as a draft of their own."""
    places = {row: place for place, row in enumerate(rows)}
    return Draft(
        tokens=tuple(draft.tokens[row] for row in rows),
        parents=tuple(places.get(draft.parents[row], -1) for row in rows),
        candidates=sum(row < draft.candidates for row in rows),
        sources=tuple(draft.sources[row] for row in rows),
    )


def _reaches_an_end(draft: Draft, chosen: Mapping[int, int]) -> bool:
    """Whether the path of the choices ends at a choice that no row has."""
    row: int | None = 0
    while row is not None and row in chosen:
        row = draft.child(row, chosen[row])
    return row is None


def _probe(engine: Engine) -> list[int]:
    """The model's argmax after each token of a fixed sequence."""
    model = engine.model
    count = min(PROBE, model.room(0) + 1)
    text = [(7 + 31 * place) % model.vocabulary for place in range(count)]
    with engine.turns, engine.pool.sequence(text[:1]) as sequence:
        return list(engine.score(sequence, chain(text[0], text[1:], "")).best)


def _digest(value: object) -> int:
    return int.from_bytes(sha256(repr(value).encode()).digest()[:4], "big") & 0x7FFFFFFF


def _box(stage: Stage, about: int, numbers: Sequence[int]) -> list[int]:
    """A rank's message in an exchange, as far as it fits."""
    said = [stage, about, len(numbers), *numbers[: BOX - _HEAD]]
    return [*said, *[0] * (BOX - len(said))]


def _words(box: Sequence[int]) -> str:
    return bytes(box[_HEAD : _HEAD + box[2]]).decode(errors="replace")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
