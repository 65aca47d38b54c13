"""Lookahead Parallelism: several ranks write what one process writes, in as many steps; a lost rank ends the run."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistNetworkError

from outpace import (
    AdaDecode,
    Amphista,
    Autoregressive,
    Decoder,
    Draft,
    Hydra,
    InputError,
    InvalidLogits,
    Jacobi,
    Lookahead,
    Medusa,
    Method,
    PromptLookup,
    RankError,
    Sampling,
    SelfSpeculative,
    Verdict,
    parallel,
)
from outpace.models.hf import HFModel
from outpace.models.toy import Bigram
from outpace.parallel import ParallelDecoder, Ranks, deal, join, load
from outpace.pool import Pool
from outpace.runtime.graphs import GraphEngine

from .models import VOCABULARY, examples, tiny
from .ranks import in_processes, in_threads
from .test_cli import folder, generate  # noqa: F401 (a fixture)
from .test_lossless import prompt_of

METHODS: list[Method] = [
    Autoregressive(),
    Lookahead(),
    Lookahead(window=6, ngram=4, guesses=6),
    Lookahead(window=4, ngram=4, guesses=4, published=True),
    PromptLookup(),
]
SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.2, logit_bias={5: 2.0}),
    Sampling(temperature=0.8, top_p=0.95, seed=3),
    Sampling(temperature=1.0, frequency_penalty=0.4, presence_penalty=0.2, seed=4),
    Sampling(temperature=1.0, seed=5, rule="rejection"),
]


def tree_of(parents: list[int], candidates: int | None = None) -> Draft:
    count = len(parents) + 1
    return Draft(tuple(range(count)), (-1, *parents), candidates or count, ("",) * count)


trees = st.integers(1, 40).flatmap(lambda count: st.tuples(*(st.integers(0, row) for row in range(count)))).map(list)


@given(trees, st.integers(1, 9))
def test_all_rows_are_dealt_out_with_their_ancestors(parents: list[int], count: int) -> None:
    draft = tree_of(parents)
    shares = deal(draft, count)
    assert len(shares) == count
    assert set().union(*shares) == set(range(len(draft)))
    for share in shares:
        assert list(share) == sorted(set(share))
        assert share[0] == 0
        assert {draft.parents[row] for row in share[1:]} <= set(share)
    assert deal(draft, 1) == [tuple(range(len(draft)))]
    assert max(map(len, shares)) <= max(map(len, deal(draft, max(1, count - 1))))


def test_shares_of_a_window_are_even() -> None:
    """The columns of Lookahead's comb: each has the spine above it, so the last ranks take fewer columns."""
    spine = list(range(14))  # rows 1 to 14
    teeth = [row for column in range(15) for row in (column, 15 + 3 * column, 16 + 3 * column)]  # three rows each
    draft = tree_of([*spine, *teeth])
    assert max(draft.depths) == 14 + 3
    assert [len(share) for share in deal(draft, 2)] == [36, 32]
    assert [len(share) for share in deal(draft, 4)] == [24, 24, 23, 12]


@given(trees, st.integers(1, 5), st.data())
def test_accepted_rows_of_others_become_text_that_is_not_computed(parents: list[int], count: int, data: Any) -> None:
    draft = tree_of(parents)
    path = [0]
    while below := draft.children[path[-1]]:
        if data.draw(st.booleans()):
            path.append(data.draw(st.sampled_from(below)))
        else:
            break
    verdict = Verdict(tuple(path), (*path[1:], 99))
    for share in deal(draft, count):
        pool = Pool()
        with pool.sequence([5, 6, 7, 0]) as sequence:
            places = {row: place for place, row in enumerate(share)}
            part = Draft(share, tuple(places.get(draft.parents[row], -1) for row in share), len(share), ())
            slots = pool.place(sequence, part).numbers[2].tolist()
            sequence.share = share
            pool.keep(sequence, draft, verdict)
            mine = [row for row in path if row in share]
            assert sequence.tokens == [5, 6, 7, 0, *path[1:], 99]
            assert sequence.slots == slots[:3] + [slots[3 + places[row]] for row in mine]
            assert pool.held == len(sequence.slots)
            again = pool.place(sequence, tree_of([]))
            assert again.numbers[0].tolist() == [*path[len(mine) :], 0]  # caught up, then row 0
        assert pool.held == 0


@functools.cache
def one(name: str = "Llama") -> Decoder:
    return Decoder(tiny(name))


def written(decoder: Decoder, prompt: list[int], method: Method, sampling: Sampling, length: int) -> Any:
    result = decoder.generate(prompt, method=method, sampling=sampling, max_new_tokens=length)
    assert decoder.engine.pool.held == 0
    return result.token_ids, result.accepted_per_step, result.sources


@examples(12)
@given(st.data())
def test_any_tree_on_any_number_of_ranks(data: Any) -> None:
    small = st.integers(1, 6)
    method = data.draw(
        st.one_of(
            st.builds(PromptLookup, longest=small, rows=st.integers(1, 40), depth=small),
            st.builds(
                Lookahead,
                window=small,
                ngram=st.integers(2, 6),
                guesses=st.integers(0, 6),
                reach=small,
                recycle=st.booleans(),
            ),
            st.builds(Lookahead, window=small, ngram=st.integers(2, 6), published=st.just(True)),
        )
    )
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
    length = data.draw(st.integers(1, 12))
    expected = written(one(), prompt, method, sampling, length)

    def work(ranks: Ranks) -> Any:
        return written(ParallelDecoder(Decoder(tiny("Llama")), ranks), prompt, method, sampling, length)

    count = data.draw(st.integers(1, 5))
    assert in_threads(count, work) == [expected] * count


@pytest.mark.parametrize("exact_rows", [0, 8])
def test_fixed_rows_on_several_ranks(exact_rows: int) -> None:
    """Rows that a rank must catch up with go along with its next step: only the prompt is read apart."""
    prompt, model = prompt_of(1), tiny("Llama")
    method, samplings = Lookahead(window=5, ngram=3, guesses=5), (SAMPLINGS[0], SAMPLINGS[2])
    expected = [written(one(), prompt, method, sampling, 10) for sampling in samplings]

    def work(ranks: Ranks) -> Any:
        decoder = Decoder(model)
        decoder.engine = GraphEngine(HFModel(model), compiled=False, exact_rows=exact_rows, capacity=512)
        joined = ParallelDecoder(decoder, ranks)
        read = []
        place_text = joined.engine.pool.place_text
        joined.engine.pool.place_text = lambda *args: [read.append(1), place_text(*args)][1]  # type: ignore
        found = [written(joined, prompt, method, sampling, 10) for sampling in samplings]
        assert len(read) == len(samplings)
        return found

    assert in_threads(2, work) == [expected] * 2


def test_more_numbers_than_fit_in_one_box() -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.gather(0, 0, range(200 * ranks.rank))  # type: ignore[arg-type]

    assert in_threads(4, work) == [[[*range(200 * rank)] for rank in range(4)]] * 4


def test_ranks_that_round_a_near_tie_differently_stay_together() -> None:
    """Each rank's model favours another token by less than nothing to speak of: the text is one, on all ranks."""
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    table[:, 1] = table[:, 2] = table[:, 3] = table.max() + 1
    sampling = Sampling(temperature=0.3, seed=1)

    def work(ranks: Ranks) -> Any:
        decoder = ParallelDecoder(Decoder(Bigram(table)), ranks)
        decoder.engine.engine.model.table = table.clone()
        decoder.engine.engine.model.table[:, 1 + ranks.rank % 3] += 0.4  # the models part only now
        found = [
            written(decoder, [1, 2, 3] * 4, method, how, 60) for method in METHODS for how in (Sampling(), sampling)
        ]
        return found, ranks.exchanges

    found = in_threads(3, work)
    assert found[1:] == found[:1] * 2


def test_no_token_to_choose_is_an_error_on_all_ranks() -> None:
    table = torch.zeros(5, 5)
    table[:, 1], table[1, 2], table[2, 3], table[3] = 1, 2, 3, float("nan")

    def work(ranks: Ranks) -> str:
        decoder = ParallelDecoder(Decoder(Bigram(torch.zeros(5, 5))), ranks)
        decoder.engine.engine.model.table = table
        with pytest.raises(InvalidLogits) as error:
            decoder.generate([1, 2, 3, 1, 2, 3, 1], method=PromptLookup(), max_new_tokens=20)
        return str(error.value)

    assert len(set(in_threads(3, work))) == 1


def test_what_cannot_be_dealt_out_is_refused() -> None:
    def work(ranks: Ranks) -> None:
        decoder = ParallelDecoder(Decoder(tiny("Llama")), ranks)
        for method in (Jacobi(), PromptLookup(tree=False)):
            with pytest.raises(InputError, match="cannot be split over ranks"):
                decoder.prepare(method)
        with pytest.raises(InputError, match="called for some of the tokens only"):
            decoder.generate([1], sampling=Sampling(processors=[lambda ids, scores: scores]))

    in_threads(2, work)
    assert not any(method.dealt for method in (Medusa(), Hydra(), Amphista(), AdaDecode(), SelfSpeculative()))
    with pytest.raises(InputError, match="torchrun --nproc-per-node"):
        join(one())
    with pytest.raises(InputError, match="timeout=0"):
        load(tiny("Llama"), timeout=0)


# Real processes. They may be slow: no test waits for a time to pass but to see that nothing hangs.
LONG = 120


def write_many(rank: int, name: str) -> Any:
    torch.set_num_threads(1)
    return all_cases(join(Decoder(tiny(name)), timeout=LONG))


def all_cases(decoder: Decoder) -> list[Any]:
    methods = (Lookahead(window=6, ngram=4, guesses=6), PromptLookup())
    return [
        written(decoder, prompt_of(seed), methods[seed % 2], sampling, 12) for seed, sampling in enumerate(SAMPLINGS)
    ]


@pytest.mark.parametrize(("count", "name"), [(2, "Llama"), pytest.param(4, "Gemma2", marks=pytest.mark.slow)])
def test_processes_write_what_one_writes(count: int, name: str) -> None:
    assert in_processes(count, write_many, name) == [all_cases(one(name))] * count


def write_until_one_stops(rank: int, count: int, which: int, kill: bool) -> str:
    """The error. Deadlines come when all that are left have noticed, however long that takes on this machine."""
    torch.set_num_threads(1)
    decoder = join(Decoder(tiny("Llama")), timeout=LONG)
    store, others = decoder.ranks._store, [other for other in range(count) if other != which]

    noticed = False

    def clock() -> float:
        nonlocal noticed
        before = noticed  # between two looks at the clock there is one at the store
        with suppress(RuntimeError):  # the store may have gone with rank 0
            noticed = store.check([f"outpace: {other} waits" for other in others])
        return 2.0 * LONG * before

    parallel.monotonic = clock  # type: ignore[attr-defined]
    try:
        for number, _ in enumerate(decoder.stream(prompt_of(1), method=Lookahead(window=6), max_new_tokens=100)):
            if number == 3:  # all are here, and nobody will hear from the one in the next exchange
                parallel.PATIENCE = 2.0 / LONG
            if number == 3 and rank == which:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                while not clock():
                    time.sleep(0.02)
    except RankError as error:
        if which != 0 or not kill:  # rank 0 keeps the store, and stays until all have looked
            with suppress(DistNetworkError):  # then rank 0 has heard all, and left
                store.set(f"{rank} is done", "")
                store.wait([f"{other} is done" for other in (others if kill else range(count))])
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("count", "which", "kill"), [(4, 2, True), pytest.param(3, 0, True, marks=pytest.mark.slow), (3, 1, False)]
)
def test_a_lost_rank_ends_the_run_and_is_named(count: int, which: int, kill: bool) -> None:
    found = in_processes(count, write_until_one_stops, count, which, kill)
    for rank, error in enumerate(found):
        if rank != which:
            assert f"rank {which} does not respond (seen from rank {rank}, timeout {LONG} s)" in error
    if kill:
        assert found[which] is None
    else:
        assert "too slow" in found[which]


def differ(rank: int, what: str) -> None:
    torch.set_num_threads(1)
    odd = rank == 1
    decoder = join(Decoder(tiny("Llama", seed=int(odd and what == "model")), method="autoregressive"), timeout=LONG)
    decoder.generate(
        prompt_of(2 if odd and what == "prompt" else 1),
        method=Lookahead(window=3 if odd and what == "method" else 4),
        sampling=Sampling(temperature=0.5, seed=int(odd and what == "sampling")),
        max_new_tokens=6 if odd and what == "max new tokens" else 8,
    )
    if odd or what != "texts":
        decoder.generate(prompt_of(1), max_new_tokens=4)
    else:
        next(iter(decoder.stream(prompt_of(1), max_new_tokens=4)))
        decoder.generate(prompt_of(1), max_new_tokens=4)


@pytest.mark.parametrize("what", ["model", "prompt", "method", "sampling", "max new tokens"])
def test_ranks_that_differ_are_told_so_at_the_start(what: str) -> None:
    found = in_processes(2, differ, what)
    for error in found:
        assert isinstance(error, RankError)
        assert f"rank 1 has a different {what} than rank 0" in str(error)


def test_ranks_that_come_apart_are_told_so() -> None:
    for error in in_processes(2, differ, "texts"):
        assert isinstance(error, RankError)
        assert "rank 0 is starting a sequence, rank 1 is within a sequence" in str(error)


WINDOW = ("--set", "window=6", "--max-new-tokens", "40", "--json")
HELLO = "hello hello hello"


def alike(answer: str) -> dict[str, Any]:
    """Of an answer as JSON, what must be the same on one rank and on several."""
    found = json.loads(answer)
    return {key: found[key] for key in ("text", "token_ids", "steps", "accepted_per_step", "method")}


def by_command(rank: int, place: Path) -> tuple[int, str]:
    torch.set_num_threads(1)
    result = generate(place, *WINDOW, "--parallel", prompt=HELLO)
    return result.exit_code, result.stdout


def test_the_command_line_on_several_ranks(folder: Path) -> None:  # noqa: F811
    (first, answer), other = in_processes(2, by_command, folder)
    assert (first, other) == (0, (0, ""))  # rank 0 alone prints
    assert alike(answer) == alike(generate(folder, *WINDOW, prompt=HELLO).stdout)


@pytest.mark.slow
def test_the_command_line_under_torchrun(folder: Path) -> None:  # noqa: F811
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "outpace"]
    command += ["generate", HELLO, "--model", str(folder), "--device", "cpu", "--method", "lookahead"]
    several = subprocess.run(
        [*command, *WINDOW, "--parallel"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
    )
    assert several.returncode == 0, several.stderr
    assert alike(several.stdout) == alike(generate(folder, *WINDOW, prompt=HELLO).stdout)


def test_a_rank_that_raises_tells_the_others_which_stay_together_if_all_do() -> None:
    """Errors of one rank end the run; the same error on all ranks does not."""

    def work(ranks: Ranks) -> list[str]:
        decoder = ParallelDecoder(Decoder(tiny("Llama")), ranks)
        with pytest.raises(InputError, match="max_new_tokens=0"):
            decoder.generate([1, 2], max_new_tokens=0)
        assert decoder.generate([1, 2], method=Lookahead(window=3), max_new_tokens=3).new_tokens == 3
        with pytest.raises((InputError, RankError)) as first:
            decoder.generate([] if ranks.rank == 1 else [1, 2], max_new_tokens=3)
        with pytest.raises(RankError) as second:
            decoder.generate([1, 2], max_new_tokens=3)
        return [str(first.value), str(second.value)]

    (one_told, one_later), (raised, later), (two_told, two_later) = in_threads(3, work)
    assert "the prompt is empty" in raised
    assert one_told == two_told == one_later == two_later == f"rank 1 has failed: InputError: {raised}"
    assert later == f"this rank has failed before: InputError: {raised}"


def raise_on_one(rank: int, which: int, late: bool) -> tuple[str, str]:
    """The error. Whoever is not told of it hangs; a `late` rank comes when the one that raised has given up."""
    torch.set_num_threads(1)
    decoder = join(Decoder(tiny("Llama")), timeout=100 * LONG)
    parallel.FAREWELL = 0.01 if late else LONG
    forward, calls, store = decoder.model.forward, [], decoder.ranks._store

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            if rank == which:
                raise ValueError(f"the forward broke: {'é' * 200}")
            if late:
                store.wait(["given up"])
        return forward(*args, **kwargs)

    decoder.engine.engine.model.forward = counted  # type: ignore[attr-defined, method-assign]
    try:
        list(decoder.stream(prompt_of(1), method=Lookahead(window=6), max_new_tokens=100))
    except (ValueError, RankError) as error:
        if rank == which:
            store.set("given up", "")
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(("count", "which", "late"), [(3, 1, False), (2, 0, False), (2, 1, True)])
def test_an_error_on_one_rank_is_told_at_once(count: int, which: int, late: bool) -> None:
    for rank, (kind, message) in enumerate(in_processes(count, raise_on_one, which, late)):
        assert kind == ("ValueError" if rank == which else "RankError")
        if rank != which:
            assert message.startswith(f"rank {which} has failed: ValueError: the forward broke: éé")
