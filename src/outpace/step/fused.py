"""Launches the Triton kernels of `kernels.py`. Where `usable`, they replace the torch functions of the same step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ..models.best import find_best
from ..models.launching import early
from .chances import CUTS, EXPECTED, FREE, HALVING, KNOTS, LOWEST, SOURCES
from .choosing import Choices
from .lanes import Lanes
from .nodes import DEEPER, LATER, MUST, NEVER, Nodes, Rows
from .texts import Texts
from .walking import Walk

PART = 4096  # logits per program
FEW = 32  # up to this k, our own kernels find the top k
WORDS = 2048  # tokens per program; the same for any number of rows, because float sums depend on how they are split
PASSES = 8  # radix-select passes for the threshold of top-k and top-p, four bits each
MINE, OTHERS = 32, 128  # nodes that a program compares with all others, and with how many at a time
BLOCK = 32  # how many at a time if one program compares all nodes
STRETCH = 1024  # positions of history searched per program
TOGETHER = 16  # depths of history computed at a time


def usable(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def plant(
    offers: Sequence[Nodes],
    lanes: Lanes,
    fixed: Any,
    scratch: int,
    most: int,
    count: int,
    context: int,
    turn: int,
    gate: float,
    prices: torch.Tensor | None,
    table: torch.Tensor | None = None,
) -> Rows:
    """`nodes.plant` with `count` rows, which are also written to `fixed`, where the model reads them."""
    from . import kernels

    group, device = lanes.lanes, lanes.device
    size = _power(count)
    words = -(-count // 64)
    if offers:
        joined = _joined(offers)
    else:
        none = torch.empty(0, dtype=torch.long, device=device)
        joined = (none, none, none.view(0, 0, 0), none.float(), none)
    tokens, depths, paths, chances, sources = joined
    nodes = tokens.shape[1] if offers and most > 1 else 0
    padded = _power(nodes) if nodes else 0

    def rows(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.empty(group, count, *shape, dtype=dtype, device=device)

    found = Rows(
        rows(),
        rows(),
        rows(),
        rows(count, dtype=torch.int8),
        rows(dtype=torch.int8),
        rows(dtype=torch.int8),
        rows(),
        rows(),
    )
    packed = rows(words)
    marks = _marks(
        tuple((offer.tokens.shape[1], offer.probe, offer.accepted, not offer.costly) for offer in offers), device
    )

    def scratch_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(group, *shape, dtype=dtype, device=device)

    keys, unique, expected = scratch_of(padded), scratch_of(3, padded), scratch_of(EXPECTED)
    flags, ranks, bits = (scratch_of(*shape, dtype=torch.int32) for shape in ((padded,), (2, padded), (padded,)))
    hashes, likely = (scratch_of(padded, dtype=torch.long) for _ in range(2))
    learned, costly = table is not None, any(offer.costly for offer in offers)
    if nodes:
        part = min(MINE, padded)
        kernels.compare[(group, padded // part)](
            *(depths, paths, chances, sources, marks, lanes.lengths, context, turn, keys if table is None else table),
            *(keys, bits, unique, hashes, likely, nodes, math.log(gate) if gate else NEVER),
            NODES=padded,
            PART=part,
            BLOCK=min(OTHERS, padded),
            DEEP=paths.shape[2],
            MUST=MUST,
            DEEPER=DEEPER,
            LATER=LATER,
            LEARNED=learned,
            KNOTS=KNOTS,
            HALVING=HALVING,
            LOWEST=LOWEST,
            SOURCES=SOURCES,
            COSTLY=learned and costly,
            **early(device),
        )
        kernels.rank[(group, padded // part, 2 if learned and costly else 1)](
            *(unique, ranks, nodes), NODES=padded, PART=part, BLOCK=min(OTHERS, padded), **early(device)
        )
    kernels.plant[(group,)](
        *(tokens, depths, paths, likely, hashes, unique, ranks, bits),
        *(lanes.tokens, lanes.lengths, lanes.limits, lanes.slots, lanes.slots.stride(0)),
        *(found.tokens, found.parents, found.depths, found.sees, packed, found.valid, found.accepted),
        *(found.sources, found.hashes),
        *(fixed.tokens, fixed.positions, fixed.slots, fixed.lists.tree, fixed.lists.tree.stride(0)),
        *(fixed.lists.length, scratch, keys, flags, scratch_of(2 * size, dtype=torch.long)),
        *(keys if prices is None else prices, expected, nodes, most, count),
        NODES=padded,
        ROWS=size,
        DEEP=paths.shape[2],
        WORDS=words,
        BLOCK=BLOCK,
        PROBES=any(offer.probe for offer in offers),
        PRICED=prices is not None and nodes > 0,
        MUST=MUST,
        LEARNED=learned,
        FREE=FREE,
        COSTLY=costly,
        CUTS=len(CUTS),
        WIDE=_power(len(CUTS)),
        EXACT=fixed.lists.exact,
        num_warps=8 if padded >= 256 else 4,
        **early(device),
    )
    return found._replace(
        sees=found.sees.view(torch.bool),
        valid=found.valid.view(torch.bool),
        accepted=found.accepted.view(torch.bool),
        words=packed,
        expected=None if table is None else expected,
    )


def choose(
    choices: Choices, logits: torch.Tensor, found: torch.Tensor, texts: Texts, rows: Rows, needs: frozenset[str]
) -> torch.Tensor:
    """`Choices.choose` for logits [all rows, tokens]. Takes and returns the form of `find_best`, as `found` is:

    [2, all rows] the target's token after each row, and a value that is not -inf if there is one.
    """
    from . import kernels

    count = rows.tokens.shape[1]
    size, width = logits.shape
    parts, device = -(-width // WORDS), logits.device
    logits = logits.contiguous()
    if "penalties" in needs:
        scores = torch.empty_like(logits, dtype=torch.float32)
        kernels.penalise[(size, parts)](
            *(logits, scores, choices.bias, choices.seen, choices.answered),
            *(choices.repetition, choices.presence, choices.frequency, rows.tokens, rows.parents, width, count),
            PART=WORDS,
            enable_fp_fusion=False,
            **early(device),
        )
        logits, found = scores, find_best(scores)
    if "noise" not in needs:
        return found

    def numbers(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    scored = (logits, found, choices.temperature)
    sizes = (size, count, width, parts)
    options = {"PART": WORDS, "PARTS": _power(parts), **early(device)}
    weights, wholes = numbers(size, parts, dtype=torch.float64), numbers(size, dtype=torch.float64)

    def sift(limits: torch.Tensor, mass: bool) -> tuple[torch.Tensor, torch.Tensor]:
        sums, states = numbers(PASSES, size, parts, 16), numbers(PASSES, size, 2)
        for number in range(PASSES):
            kernels.sift[(size, parts)](
                *(*scored, limits, weights, wholes, sums, states, *sizes, number),
                MASS=mass,
                FIRST=number == 0,
                num_warps=8,
                **options,
            )
        return sums[-1], states[-1]

    top_k, top_p = "top_k" in needs, "top_p" in needs
    counts = masses = (wholes, wholes)
    if top_k:
        counts = sift(choices.top_k, mass=False)
    if top_p:
        kernels.weigh[(size, parts)](*scored, *counts, weights, *sizes, TOP_K=top_k, num_warps=8, **options)
        masses = sift(choices.top_p, mass=True)
    tops, places = numbers(size, parts, dtype=torch.float64), numbers(size, parts)
    kernels.draw[(size, parts)](
        *(*scored, choices.min_p, texts.lengths, texts.seeds, rows.depths),
        *(*counts, *masses, wholes, tops, places, *sizes),
        TOP_K=top_k,
        TOP_P=top_p,
        num_warps=8,
        **options,
    )
    chosen = numbers(2, size, dtype=torch.float64)
    kernels.drawn[(size,)](
        *(tops, places, found, choices.temperature, chosen, size, count, parts),
        PARTS=_power(parts),
        num_warps=1,
        **early(device),
    )
    return chosen


def settle(
    rows: Rows,
    chosen: torch.Tensor,
    found: torch.Tensor,
    lanes: Lanes,
    deepest: int,
    counted: Choices | None = None,
) -> tuple[torch.Tensor, Walk, torch.Tensor, torch.Tensor]:
    """`walk` and `Lanes.keep`. Returns a report for the host, what was kept, argmax tokens [lanes, rows], old lengths.

    `found` comes from `find_best`, `chosen` from `choose`. The kept tokens are counted in `counted`, for penalties.
    """
    from . import kernels

    group, count = rows.tokens.shape
    device, deep = lanes.device, deepest + 1
    assert rows.words is not None

    def numbers(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.empty(group, *shape, dtype=dtype, device=device)

    best, kept, before = numbers(count), Walk(numbers(deep), numbers(deep), numbers()), numbers()
    said = 0 if rows.expected is None else EXPECTED
    report = numbers(2 + 2 * deep + 4 * count + said, dtype=torch.int32)
    kernels.settle[(group,)](
        *(chosen, found, found.shape[1]),
        *(rows.tokens, rows.parents, rows.depths, rows.words, rows.valid.view(torch.int8)),
        *(rows.accepted.view(torch.int8), rows.sources),
        *(lanes.tokens, lanes.lengths, lanes.limits, lanes.slots, lanes.slots.stride(0)),
        *((counted.seen, counted.answered, counted.vocabulary) if counted else (best, best, 0)),
        *(best, kept.rows, kept.tokens, kept.counts, before, report, report.stride(0), count),
        *(best if rows.expected is None else rows.expected.view(torch.int32), said),
        ROWS=_power(count),
        WORDS=rows.words.shape[2],
        DEEP=deep,
        DEPTHS=_power(deep),
        COUNTED=counted is not None,
        num_warps=2,
        **early(device),
    )
    return report, kept, best, before


def follow(
    kept: Walk, before: torch.Tensor, lanes: Lanes, fixed: Any, each: int, count: int, scratch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the kept tokens as `each` rows per lane to `fixed`.

    Returns the index of each one's state among those of all rows (`count` per lane), and [lanes] that of the last.
    """
    from . import kernels

    group, deep = kept.rows.shape
    states = torch.empty(group * each, dtype=torch.long, device=before.device)
    last = torch.empty(group, dtype=torch.long, device=before.device)
    kernels.follow[(group,)](
        *(kept.rows, kept.tokens, kept.counts, before, lanes.slots, lanes.slots.stride(0), scratch, count),
        *(fixed.tokens, fixed.positions, fixed.slots, fixed.lists.length, states, last),
        DEEP=deep,
        EACH=each,
        WIDTH=_power(each),
        num_warps=1,
        **early(before.device),
    )
    return states, last


def history(
    texts: Any,
    longest: int,
    places: int,
    depth: int,
    least: torch.Tensor,
    doubts: tuple[float, float, float, float],
    floor: float,
    source: int,
    store: torch.Tensor | None = None,
) -> Nodes:
    """The nodes of `History.guess`."""
    from . import kernels

    searched = texts.tokens if store is None else store.expand(texts.lanes, -1)
    lanes, span = searched.shape
    device, nodes, blocks = texts.device, places * depth, -(-span // STRETCH)
    found = blocks * places
    tokens = torch.empty(lanes, nodes, dtype=torch.long, device=device)
    chances = torch.empty(lanes, nodes, device=device)
    paths = torch.empty(lanes, nodes, depth + 1, dtype=torch.long, device=device)
    scores = torch.empty(lanes, found, dtype=torch.int32, device=device)
    kernels.matches[(lanes, blocks)](
        *(texts.tokens, texts.lengths, texts.tokens.stride(0), searched, searched.stride(0), span, scores),
        LONGEST=longest,
        PLACES=places,
        BLOCK=STRETCH,
        OWN=store is None,
        num_warps=4,
        **early(device),
    )
    kernels.history[(lanes,)](
        *(searched, searched.stride(0), span, texts.lengths, scores, found, least, floor),
        *(tokens, chances, paths, nodes),
        CLASSES=len(least),
        **dict(zip(("DOUBT", "AGAIN", "OTHER", "MOST"), map(math.log2, doubts), strict=True)),
        FOUND=_power(found),
        PLACES=places,
        WIDTH=_power(places),
        DEPTH=depth,
        DEPTHS=min(_power(depth), TOGETHER),
        OWN=store is None,
        num_warps=4,
        **early(device),
    )
    return Nodes(tokens, _chained(places, depth, device).expand(lanes, -1), paths, chances, source)


def ranks(
    places: torch.Tensor,
    depths: torch.Tensor,
    guesses: torch.Tensor,
    chances: torch.Tensor,
    worths: torch.Tensor | None,
    lanes: int,
    sources: torch.Tensor,
) -> Nodes:
    """The nodes of `HeadGuesses.guess`, from its heads' top tokens [lanes, …]."""
    from . import kernels

    nodes, heads = places.shape
    tokens = torch.empty(lanes, nodes, dtype=torch.long, device=places.device)
    found = torch.empty(lanes, nodes, device=places.device)
    paths = torch.empty(lanes, nodes, heads + 1, dtype=torch.long, device=places.device)
    kernels.ranks[(lanes,)](
        *(places, depths, guesses, chances, found if worths is None else worths, guesses.stride(0)),
        *(tokens, found, paths, nodes),
        NODES=_power(nodes),
        HEADS=heads,
        GIVEN=worths is not None,
        num_warps=4,
        **early(places.device),
    )
    return Nodes(tokens, depths.expand(lanes, -1), paths, found, sources.expand(lanes, -1))


def pairs(
    ranks: torch.Tensor,
    depths: torch.Tensor,
    guesses: torch.Tensor,
    order: torch.Tensor,
    chances: torch.Tensor,
    worths: torch.Tensor | None,
    lanes: int,
    sources: torch.Tensor,
) -> Nodes:
    """The nodes of `PairedGuesses.guess`, from its heads' top tokens [lanes, places, top]."""
    from . import kernels

    nodes, heads = ranks.shape
    tokens = torch.empty(lanes, nodes, dtype=torch.long, device=ranks.device)
    found = torch.empty(lanes, nodes, device=ranks.device)
    paths = torch.empty(lanes, nodes, heads + 1, dtype=torch.long, device=ranks.device)
    kernels.pairs[(lanes,)](
        *(ranks, depths, guesses, order, chances, found if worths is None else worths, tokens, found, paths, nodes),
        NODES=_power(nodes),
        HEADS=heads,
        TOP=guesses.shape[2],
        GIVEN=worths is not None,
        num_warps=4,
        **early(ranks.device),
    )
    return Nodes(tokens, depths.expand(lanes, -1), paths, found, sources.expand(lanes, -1))


def _joined(offers: Sequence[Nodes]) -> tuple[torch.Tensor, ...]:
    """Tokens, depths, paths, chances and sources of all offers, each concatenated to [lanes, nodes, …]."""
    from . import kernels

    lanes, device = len(offers[0].tokens), offers[0].tokens.device
    sizes = [offer.tokens.shape[1] for offer in offers]
    deepest, total, at = max(offer.paths.shape[2] for offer in offers), sum(sizes), 0

    def numbers(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.empty(lanes, total, *shape, dtype=dtype, device=device)

    found = (numbers(), numbers(), numbers(deepest), numbers(dtype=torch.float32), numbers())
    for offer, size in zip(offers, sizes, strict=True):
        given = isinstance(offer.sources, torch.Tensor)
        sources = offer.sources if isinstance(offer.sources, torch.Tensor) else offer.tokens
        offered = (offer.tokens, offer.depths, offer.paths, offer.chances, sources)
        parts = [part if part.stride(-1) == 1 else part.contiguous() for part in offered]
        tokens, depths, paths, chances, sources = parts
        kernels.join[(lanes,)](
            *parts,
            *(tokens.stride(0), depths.stride(0), paths.stride(0), paths.stride(1), chances.stride(0)),
            *(sources.stride(0), *found, 0 if given else offer.sources, size, at, total),
            NODES=_power(size),
            FROM=paths.shape[2],
            DEEP=deepest,
            GIVEN=given,
            num_warps=4,
            **early(device),
        )
        at += size
    return found


@cache
def _chained(chains: int, length: int, device: torch.device) -> torch.Tensor:
    """[nodes] the depths of `chains` chains."""
    return torch.arange(1, length + 1, device=device).repeat(chains)


@cache
def _marks(offers: tuple[tuple[int, bool, bool, bool], ...], device: torch.device) -> torch.Tensor:
    """[nodes] bit flags: 1 a probe, 2 may be accepted, 4 from a source that is not costly."""
    marks = [probe + 2 * accepted + 4 * free for size, probe, accepted, free in offers for _ in range(size)]
    return torch.tensor(marks or [0], dtype=torch.int32, device=device)


def _power(number: int) -> int:
    """The next power of two, or the number itself if it is one."""
    return 1 << max(number - 1, 0).bit_length()


def comb(window: torch.Tensor, filled: torch.Tensor, drafted: torch.Tensor, room: torch.Tensor, **about: Any) -> Nodes:
    """The nodes of `Window` from its window [lanes, levels, columns]."""
    from . import kernels

    lanes, (_, levels, columns) = len(room), window.shape
    nodes = levels * columns
    tokens = torch.empty(lanes, nodes, dtype=torch.long, device=room.device)
    depths, chances = torch.empty_like(tokens), torch.empty(lanes, nodes, device=room.device)
    paths = torch.empty(lanes, nodes, columns, dtype=torch.long, device=room.device)
    kernels.comb[(lanes,)](
        *(window, filled, drafted.view(torch.int8), room, tokens, depths, chances, paths),
        COLUMNS=columns,
        LEVELS=levels,
        NODES=_power(nodes),
        num_warps=2,
        **early(room.device),
    )
    return Nodes(tokens, depths, paths, chances, **about)


def ngrams(
    texts: Any,
    runs: torch.Tensor,
    names: torch.Tensor,
    counts: torch.Tensor,
    filled: torch.Tensor,
    trusts: torch.Tensor,
    *,
    guesses: int,
    longest: int,
    length: int,
    levels: int,
    recycle: bool,
    unfilled: bool,
    older: float,
    deeper: float,
    source: int,
) -> Nodes:
    """The nodes of `Window` from its n-gram pool, `runs` [lanes, size + 1, width]."""
    from . import kernels

    lanes, device = texts.lanes, texts.device
    _, size, width = runs.shape
    size -= 1

    def numbers(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.empty(lanes, *shape, dtype=dtype, device=device)

    found, keys, ends = numbers(guesses, width - 1), numbers(guesses, dtype=torch.int32), numbers(longest)
    sizes = {"SIZE": size, "WIDTH": width, "LONGEST": longest, "GUESSES": guesses}
    kernels.ngrams[(lanes,)](
        *(texts.tokens, texts.lengths, texts.tokens.stride(0), runs, counts, found, keys, ends),
        **sizes,
        TAIL=_power(width),
        num_warps=8,
        **early(device),
    )
    tokens, chances = numbers(guesses * length), numbers(guesses * length, dtype=torch.float32)
    paths = numbers(guesses * length, length + 1)
    kernels.prolonged[(lanes, guesses)](
        *(runs, counts, found, keys, ends, numbers(guesses, longest + length), trusts, filled),
        *(tokens, chances, paths, older, deeper),
        **sizes,
        LENGTH=length,
        RECYCLE=recycle,
        LEVELS=levels,
        UNFILLED=unfilled,
        num_warps=8,
        **early(device),
    )
    return Nodes(tokens, _chained(guesses, length, device).expand(lanes, -1), paths, chances, source)


def look(
    window: torch.Tensor,
    filled: torch.Tensor,
    drafted: torch.Tensor,
    runs: torch.Tensor,
    names: torch.Tensor,
    counts: torch.Tensor,
    rows: Rows,
    best: torch.Tensor,
    width: int,
    recycle: bool,
) -> None:
    """`Window.learn`, for a window of `width` columns."""
    from . import kernels

    lanes, count = rows.tokens.shape
    _, levels, columns = window.shape
    wide = _power(columns)
    answers = torch.empty(lanes, wide, dtype=torch.long, device=window.device)
    kernels.look[(lanes,)](
        *(window, filled, drafted.view(torch.int8), runs, names, counts),
        *(rows.tokens, rows.parents, rows.valid.view(torch.int8), rows.hashes, best, answers, count),
        COLUMNS=columns,
        WIDE=wide,
        LEVELS=levels,
        HIGH=_power(levels),
        ROWS=_power(count),
        WINDOW=width,
        SIZE=runs.shape[1] - 1,
        WIDTH=runs.shape[2],
        RECYCLE=recycle,
        num_warps=4,
        **early(window.device),
    )


def recycled(
    texts: Any,
    ranks: torch.Tensor,
    depths: torch.Tensor,
    known: torch.Tensor,
    following: torch.Tensor,
    chances: torch.Tensor,
    own: int,
    source: int,
) -> Nodes:
    """The recycled nodes of `Recycle`, by paths of `ranks` [nodes, deepest]; the first `own` start at the root."""
    from . import kernels

    lanes, device = texts.lanes, texts.device
    nodes, deepest = ranks.shape
    tokens = torch.empty(lanes, nodes, dtype=torch.long, device=device)
    found = torch.empty(lanes, nodes, device=device)
    paths = torch.empty(lanes, nodes, deepest + 1, dtype=torch.long, device=device)
    kernels.recycled[(lanes,)](
        *(texts.tokens, texts.lengths, texts.tokens.stride(0), ranks, depths, known, following, chances),
        *(tokens, found, paths, nodes, own),
        NODES=_power(nodes),
        DEEP=deepest,
        SIZE=known.shape[1] - 2,
        RANKS=following.shape[2],
        num_warps=4,
        **early(device),
    )
    return Nodes(tokens, depths.expand(lanes, -1), paths, found, source)


def remember(
    tokens: torch.Tensor,
    valid: torch.Tensor,
    found: torch.Tensor,
    known: torch.Tensor,
    following: torch.Tensor,
    chances: torch.Tensor,
    kept: Walk,
    trust: torch.Tensor | None,
) -> None:
    """`Recycle.learn` for rows [lanes, rows], from the top tokens after each, `found` [2, all rows, ranks].

    With `trust` [ranks], it learns the runners-up too.
    """
    from . import kernels

    lanes, count = tokens.shape
    top = found.shape[2]
    kernels.remember[(lanes, count)](
        *(tokens.contiguous(), valid.contiguous().view(torch.int8), found, known, following, chances),
        *(kept.rows, kept.counts, kept.rows.stride(0), chances if trust is None else trust, count),
        ROWS=_power(count),
        TOP=top,
        WIDE=_power(top),
        SIZE=known.shape[1] - 2,
        RANKS=following.shape[2],
        RUNNERS=trust is not None,
        num_warps=1,
        **early(tokens.device),
    )


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """`picking.likeliest` for small k: the top tokens of each row of logits [rows, tokens]."""
    from . import kernels

    rows, width = logits.shape
    parts, held = -(-width // PART), _power(count)
    tops = torch.empty(rows, parts, held, dtype=torch.long, device=logits.device)
    sums = torch.empty(rows, parts, 2, device=logits.device)
    found = torch.empty(2, rows, count, dtype=torch.float64, device=logits.device)
    kernels.likely_parts[(rows, parts)](
        *(logits.contiguous(), tops, sums, width, parts),
        PART=PART,
        TOP=count,
        HELD=held,
        SHORT=logits.dtype == torch.bfloat16,
        num_warps=4,
        **early(logits.device),
    )
    kernels.likely[(rows,)](
        *(tops, sums, found, rows, parts),
        TOP=count,
        HELD=held,
        ALL=_power(parts * held),
        PARTS=_power(parts),
        num_warps=4,
        **early(logits.device),
    )
    return found
