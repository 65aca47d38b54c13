"""The KV cache as a pool of slots, and the sequences that own them.

A slot holds one token's keys and values in every layer. A sequence owns slots in the order of its tokens. Accepting
rows keeps their slots, rejecting rows frees them; nothing is copied except when the pool grows. Sequences with a common
prefix may share its slots: a slot is free when its last owner is gone. Slots of finished sequences may be kept for
others with the same prefix, until they are needed (prefix caching).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from .draft import Draft, Mask, Verdict
from .errors import InvalidLogits, NoRoom

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

FIRST_CAPACITY = 512
SLACK = 16  # the next turn may lack this many last prompt tokens: templates end prompts in their own ways


class Placed:
    """Rows with their slots, ready to be computed, of one or several sequences."""

    numbers: Numbers  # [3, rows] tokens, positions, slots
    pool: Pool

    @property
    def parts(self) -> Items[Rows]:
        """The rows of each sequence."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.numbers[0])

    @cached_property
    def _on_device(self) -> torch.Tensor:
        return torch.from_numpy(self.numbers).to(self.pool.device)

    @property
    def tokens(self) -> torch.Tensor:
        """[rows]"""
        return self._on_device[0]

    @property
    def positions(self) -> torch.Tensor:
        """[rows]"""
        return self._on_device[1]

    @property
    def slots(self) -> torch.Tensor:
        """[rows]"""
        return self._on_device[2]

    @cached_property
    def sees(self) -> torch.Tensor:
        """[rows, used slots] whether the row attends to the slot, for attention with a dense mask."""
        sees = np.zeros((len(self), self.pool.used), dtype=np.bool_)
        self.show(sees)
        return torch.from_numpy(sees).to(self.pool.device)

    @cached_property
    def slot_positions(self) -> torch.Tensor:
        """[used slots] the position that each slot holds."""
        return torch.from_numpy(self.pool.positions()).to(self.pool.device)

    def show(self, sees: Mask) -> None:
        """Set in `sees`, initially all False, what the rows attend to."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rows(Placed):
    """Rows of one sequence: tokens, positions, the slots they write and those they attend to."""

    numbers: Numbers  # [3, rows] tokens, positions, slots
    text: list[int]  # the computed sequence's slots, in order: every row attends to them
    tree: Mask | None  # [rows, rows] which of these rows a row attends to, itself included; None: they are a chain
    pool: Pool

    @property
    def among(self) -> Mask:
        """The same for a chain too. Made when it is needed: exact mode reads prompts without."""
        return np.tri(len(self), dtype=np.bool_) if self.tree is None else self.tree

    @property
    def parts(self) -> Items[Rows]:
        return [self]

    def show(self, sees: Mask) -> None:
        sees[:, self.text] = True
        sees[:, self.numbers[2]] = self.among

    def bits(self) -> Numbers:
        """[rows, rows / 64] `among` as bits: bit k of word w is set if the row attends to row 64 w + k."""
        count = len(self)
        padded = np.zeros((count, -(-count // 64) * 64), dtype=np.bool_)
        padded[:, :count] = self.among
        packed: Numbers = np.packbits(padded, axis=1, bitorder="little").view(np.int64)
        return packed

    def tails(self) -> Numbers:
        """[rows, deepest] the slots that a row attends to beyond the computed sequence, in order; padded with 0.

        They are those of positions `len(text)` to the row's own.
        """
        row, other = np.nonzero(self.among)
        place = np.arange(len(row)) - np.searchsorted(row, np.arange(len(self)))[row]
        tails = np.zeros((len(self), place.max() + 1), dtype=np.int64)
        tails[row, place] = self.numbers[2][other]
        return tails


class Packed(Placed):
    """Rows of several sequences; each attends to its own sequence only."""

    def __init__(self, parts: Items[Rows]) -> None:
        self._parts = parts
        self.pool = parts[0].pool
        self.numbers = np.concatenate([part.numbers for part in parts], 1)

    @property
    def parts(self) -> Items[Rows]:
        return self._parts

    def show(self, sees: Mask) -> None:
        first = 0
        for part in self.parts:
            part.show(sees[first : first + len(part)])
            first += len(part)


@dataclass
class Sequence:
    """One sequence: its tokens, and the slots of those that are computed. The last tokens may not be yet."""

    tokens: list[int]
    slots: list[int] = field(default_factory=list)  # slots[i] holds tokens[i]
    drafted: list[int] = field(default_factory=list)  # slots of draft rows that await the verdict
    reserved: list[int] = field(default_factory=list)  # reserved for tokens to come
    share: tuple[int, ...] | None = None  # which rows of the draft they are, if not all
    stable: int = 0  # this many first slots are unchanged since a runtime set this
    asked: int = 0  # this many last slots are not computed yet
    salt: str = ""  # it shares slots only with sequences of the same salt
    reader: object = None  # heads with their own state in its slots
    read: int = 0  # in this many first slots
    written: int = 0  # last tokens of its initial tokens that belong to the answer
    prompt: int = 0  # number of initial tokens
    grows: bool = False  # the next sequence may continue it, as in a chat

    @property
    def position(self) -> int:
        """The position of the last token."""
        return len(self.tokens) - 1


class Pool:
    """KV storage in slots, shared by any number of sequences.

    Storage is allocated by the first forward pass, when shapes are known. It doubles when slots run out, unless its
    capacity is `fixed`.
    """

    def __init__(self, device: torch.device | str = "cpu", capacity: int = FIRST_CAPACITY, fixed: bool = False) -> None:
        self.device = torch.device(device)
        self.capacity = capacity
        self.limit = capacity if fixed else None  # the most slots
        self.keeps = 0  # about this many slots of finished sequences are kept; the newest sequence always
        self.held = 0  # slots taken by running sequences
        self.kept = 0  # other slots, kept of finished sequences
        self.used = 0  # no slot from here on is taken or kept, so rows need not look there
        self._owners = [0] * capacity  # number of running owners of each slot
        self._keepers = [0] * capacity  # number of finished owners of each slot
        self._ended: list[Sequence] = []  # most recently used last
        self._listed = 0  # slots of all of them
        self._free: list[int] = []  # a heap: the lowest go first, so the pool stays dense; may hold taken ones
        self._living: list[Sequence] = []
        self._positions = np.zeros(capacity, dtype=np.int64)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [1, heads, capacity + 1, head size]

    @property
    def bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(part.nbytes for layer in self._layers.values() for part in layer)

    @property
    def texts(self) -> int:
        """The number of running sequences."""
        return len(self._living)

    @contextmanager
    def sequence(
        self, tokens: Items[int], share: bool = False, salt: str = "", reader: object = None, grows: bool = False
    ) -> Iterator[Sequence]:
        """A sequence whose slots are freed however the block ends.

        With `share` it reuses computed slots of a sequence with the same prefix and salt, running or kept. A `reader`
        must have its state in them.

        One that `grows` is kept until the next starts, whatever the pool keeps. If the next continues it, as the next
        turn of a chat does, it takes over the slots.
        """
        sequence = Sequence(list(tokens), salt=salt, prompt=len(tokens), grows=grows)
        if share or grows:
            self._share(sequence, reader, share)
            if not self.keeps:
                self.forget_all()
        self._living.append(sequence)
        try:
            yield sequence
            self._keep(sequence)
        except GeneratorExit:  # prefill has stopped; what is computed is valid
            self._keep(sequence)
            raise
        except InvalidLogits:  # its own slots may hold NaN; shared and kept ones have served others
            own = [slot for slot in _taken(sequence) if self._owners[slot] == 1 and not self._keepers[slot]]
            self.wipe(own)
            raise
        finally:
            self._living = [other for other in self._living if other is not sequence]
            self.free(_taken(sequence))
            sequence.slots, sequence.drafted, sequence.reserved = [], [], []

    def _share(self, sequence: Sequence, reader: object, share: bool) -> None:
        """Reuse slots of the sequence with the longest common prefix."""
        tokens = sequence.tokens[:-1]
        best, most = None, 0
        living = self._living if share else []
        ended = reversed(self._ended) if share and self.keeps else [o for o in self._ended if _goes_on(sequence, o)]
        for other in [*living, *ended]:
            if other.salt != sequence.salt:
                continue
            known = len(other.slots) - other.asked
            if reader is not None:
                known = min(known, other.read) if other.reader is reader else 0
            # There may be a thousand, so this must be fast: is its common prefix longer than the best?
            longer = min(known, len(tokens)) > most and tokens[most] == other.tokens[most]
            if longer and tokens[:most] == other.tokens[:most]:
                best, most = other, common(tokens, other.tokens[:known])
        if best is None:
            return
        if best.read >= most:
            most -= 1  # a reader's state in the last slot depends on the token after it
        sequence.slots = best.slots[:most]
        sequence.reader, sequence.read = best.reader, min(best.read, most)
        for slot in sequence.slots:
            self._owners[slot] += 1
            if self._owners[slot] == 1:
                self.held, self.kept = self.held + 1, self.kept - 1
        if best in self._ended:
            self._ended = [*(other for other in self._ended if other is not best), best]

    def _keep(self, sequence: Sequence) -> None:
        """Keep the computed part of a finished sequence, instead of kept ones that it continues."""
        computed = _computed(sequence)
        if not computed or not (self.keeps or sequence.grows):
            return
        slots = sequence.slots[: len(computed)]
        kept = Sequence(computed, slots, salt=sequence.salt, reader=sequence.reader, read=sequence.read)
        kept.prompt, kept.grows = sequence.prompt, sequence.grows
        for slot in slots:
            self._keepers[slot] += 1
        for other in [other for other in self._ended if _begins(slots, other.slots)]:
            self._forget(other)
        self._ended.append(kept)
        self._listed += len(slots)
        while len(self._ended) > 1 and self._listed > self.keeps:
            self._forget(self._ended[0])

    def _forget(self, sequence: Sequence) -> None:
        """Drop a kept sequence."""
        self._ended = [other for other in self._ended if other is not sequence]
        self._listed -= len(sequence.slots)
        freed = []
        for slot in sequence.slots:
            self._keepers[slot] -= 1
            if not self._keepers[slot] and not self._owners[slot]:
                freed.append(slot)
        self.kept -= len(freed)
        self._reuse(freed)

    def forget_all(self) -> None:
        """Drop all kept sequences."""
        for sequence in [*self._ended]:
            self._forget(sequence)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots, the lowest free ones; those of kept sequences only if no others are left."""
        while self.limit is not None and self._ended and self.held + self.kept + count > self.limit:
            self._forget(self._ended[0])
        if self.held + self.kept + count > self.capacity:
            if self.limit is not None and self.held + self.kept + count > self.limit:
                raise NoRoom(
                    f"{count} KV slots are needed, and {self.limit - self.held} of {self.limit} are free. "
                    "Shorten the prompt, request fewer new tokens or a smaller batch, or give the KV cache a "
                    "larger share of the memory: Decoder(..., memory=0.9)."
                )
            self._grow(self.held + self.kept + count)
        slots: list[int] = []
        while self._free and len(slots) < count:
            slot = heapq.heappop(self._free)
            if slot < self.used and not self._owners[slot] and not self._keepers[slot]:
                self._owners[slot] = 1
                slots.append(slot)
        fresh = range(self.used, self.used + count - len(slots))
        self._owners[fresh.start : fresh.stop] = [1] * len(fresh)
        self.used += len(fresh)
        self.held += count
        return [*slots, *fresh]

    def free(self, slots: Items[int]) -> None:
        """Free slots. Those that another sequence shares stay taken."""
        owners, keepers = self._owners, self._keepers
        for slot in slots:
            owners[slot] -= 1
        left = [slot for slot in slots if not owners[slot]]
        freed = [slot for slot in left if not keepers[slot]]
        self.held -= len(left)
        self.kept += len(left) - len(freed)
        self._reuse(freed)

    def _reuse(self, freed: Items[int]) -> None:
        """Offer slots again that nobody has. Those behind the last taken one are as good as never used."""
        owners, keepers, used = self._owners, self._keepers, self.used
        while used and not owners[used - 1] and not keepers[used - 1]:
            used -= 1
        self.used = used
        for slot in freed:
            if slot < used:
                heapq.heappush(self._free, slot)

    @torch.inference_mode()
    def wipe(self, slots: Items[int], start: int = 0) -> None:
        """Zero the keys and values of slots, in the layers from `start` on."""
        for layer, stored in self._layers.items():
            for part in stored if layer >= start else ():
                part[:, :, list(slots)] = 0

    def positions(self) -> Numbers:
        """[used slots] the position that each slot holds."""
        return self._positions[: self.used].copy()

    def place(self, sequence: Sequence, draft: Draft) -> Rows:
        """Give slots to the sequence's tokens that are not computed yet, then to the draft tokens.

        The last of those tokens is the draft's row 0, so a draft of n rows comes out as the last n rows.
        """
        behind = sequence.tokens[len(sequence.slots) : -1]
        positions = [*range(len(sequence.slots), sequence.position)]
        positions += [sequence.position + depth for depth in draft.depths]
        among = draft.ancestors()
        if behind:
            among = np.pad(among, ((len(behind), 0), (len(behind), 0)), constant_values=True)
            among[: len(behind)] = np.tri(len(behind), len(positions), dtype=np.bool_)
        sequence.drafted = self.allocate(len(positions))
        return self._rows(sequence.slots, [*behind, *draft.tokens], positions, sequence.drafted, among)

    def place_text(self, sequence: Sequence, count: int) -> Rows:
        """Give slots to the next `count` tokens that are not computed yet. They need no verdict."""
        start, stop = len(sequence.slots), len(sequence.slots) + count
        slots, sequence.reserved = sequence.reserved[:count], sequence.reserved[count:]
        slots += self.allocate(count - len(slots))
        rows = self._rows(sequence.slots, sequence.tokens[start:stop], range(start, stop), slots)
        sequence.slots.extend(slots)
        return rows

    def place_again(self, sequence: Sequence, count: int) -> Rows:
        """The last `count` computed tokens as rows once more, with slots of their own, which await a verdict."""
        start, stop = len(sequence.slots) - count, len(sequence.slots)
        sequence.drafted = self.allocate(count)
        return self._rows(sequence.slots[:start], sequence.tokens[start:stop], range(start, stop), sequence.drafted)

    def extend(self, sequence: Sequence) -> None:
        """Give a slot to one more row of a drafted chain."""
        sequence.drafted += self.allocate(1)

    def chain_from(self, sequence: Sequence, tokens: Items[int], first: int) -> Rows:
        """The rows of a draft chain from `first` on. For them, the rows before are part of the sequence.

        `tokens` are the whole chain's. All of the sequence is computed except its last token, which is row 0.
        """
        start = len(sequence.slots)
        text = [*sequence.slots, *sequence.drafted[:first]]
        positions = range(start + first, start + len(tokens))
        return self._rows(text, tokens[first:], positions, sequence.drafted[first:])

    def keep(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """Make the accepted path part of the sequence, and free the other rows' slots.

        Accepted rows that were not computed here become tokens that are not computed yet.
        """
        rows = range(len(draft)) if sequence.share is None else sequence.share
        behind = len(sequence.drafted) - len(rows)
        slots = dict(zip(rows, sequence.drafted[behind:], strict=True))
        accepted = [*sequence.drafted[:behind], *(slots[row] for row in verdict.rows if row in slots)]
        rejected = set(sequence.drafted).difference(accepted)
        sequence.slots.extend(accepted)
        sequence.drafted, sequence.share = [], None
        sequence.stable = min(sequence.stable, len(sequence.slots))  # a runtime may have treated the chain as text
        sequence.tokens.extend(verdict.tokens)
        self.free(sorted(rejected))

    def rewrite(self, sequence: Sequence, text: Items[int]) -> None:
        """Replace the sequence's tokens. The common prefix stays computed."""
        kept = min(common(sequence.tokens, text[:-1]), len(sequence.slots))  # the last token is a draft's row 0 again
        self.free(sequence.slots[kept:])
        del sequence.slots[kept:]
        sequence.stable = min(sequence.stable, kept)
        sequence.tokens[:] = text

    @property
    def scratch(self) -> int:
        """A slot without an owner: padding rows write there."""
        return self.capacity

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All keys and values of one layer [1, heads, slots, head size]; None before `store`."""
        return self._layers.get(layer)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate storage for one layer's keys and values, like these."""
        self._layers[layer] = (_storage(keys, self.capacity), _storage(values, self.capacity))
        return self._layers[layer]

    def _grow(self, needed: int) -> None:
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        capacity = capacity if self.limit is None else min(capacity, max(self.limit, self.capacity))
        larger: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, stored in self._layers.items():
            new = (_storage(stored[0], capacity), _storage(stored[1], capacity))
            for target, source in zip(new, stored, strict=True):
                target[:, :, : self.capacity] = source[:, :, : self.capacity]
            larger[layer] = new
        # Only now that nothing can fail: a pool that ran out of memory stays usable.
        self._layers = larger
        self._positions = np.pad(self._positions, (0, capacity - self.capacity))
        self._owners += [0] * (capacity - self.capacity)
        self._keepers += [0] * (capacity - self.capacity)
        self.capacity = capacity

    def _rows(
        self, text: list[int], tokens: Items[int], positions: Items[int], slots: Items[int], tree: Mask | None = None
    ) -> Rows:
        """Rows that attend to all slots of `text`, and to each other by `tree`."""
        numbers = np.array([tokens, positions, slots])
        self._positions[numbers[2]] = numbers[1]
        return Rows(numbers, list(text), tree, self)


def common(one: Items[int], other: Items[int]) -> int:
    """The length of the common prefix.

    >>> common([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _begins(slots: list[int], others: list[int]) -> bool:
    """Whether `slots` begin with `others`."""
    count = len(others)
    return count <= len(slots) and slots[count - 1] == others[-1] and slots[:count] == others


def _goes_on(sequence: Sequence, other: Sequence) -> bool:
    """Whether a sequence continues a finished one: it is longer than its prompt, and starts with it.

    The same prompt again is prefilled again, so that measuring it twice measures the same thing.
    """
    if not other.grows or len(sequence.tokens) <= other.prompt:
        return False
    return common(sequence.tokens, other.tokens) >= other.prompt - min(SLACK, other.prompt // 4)


def _computed(sequence: Sequence) -> list[int]:
    """The computed tokens of the sequence."""
    return sequence.tokens[: len(sequence.slots) - sequence.asked]


def _taken(sequence: Sequence) -> list[int]:
    """All slots of the sequence."""
    return sequence.slots + sequence.drafted + sequence.reserved


def _storage(like: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros, not uninitialized memory: masked slots still enter the product, and 0 * NaN is NaN.
    return like.new_zeros((1, like.shape[1], capacity + 1, like.shape[3]))  # the last is scratch
