"""What is kept of texts that have ended, and texts that are set aside: both only change what is computed anew."""

from __future__ import annotations

import math
import random
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace import Amphista, Autoregressive, BatchError, Decoder, Lookahead, Medusa, Method, PromptLookup, Sampling
from outpace.batch import Request, Writing
from outpace.draft import Step
from outpace.errors import NoRoom
from outpace.loop import Extras
from outpace.models.hf import HFModel
from outpace.pool import Pool, common
from outpace.runtime.graphs import GraphEngine
from outpace.text import Ending

from .models import examples, mostly_slow, tiny
from .test_heads import random_heads
from .test_lossless import prompt_of
from .test_pool import check_sequence, mark


def decoder_of(graphs: bool, capacity: int = 1024, keeps: int = 512) -> Decoder:
    decoder = Decoder(tiny("Llama"))
    if graphs:
        decoder.engine = GraphEngine(HFModel(tiny("Llama")), compiled=False, capacity=capacity)
    else:
        decoder.engine.pool = Pool(capacity=capacity, fixed=True)
    decoder.engine.pool.keeps = keeps
    return decoder


def write(
    decoder: Decoder, prompts: Any, method: Method, sampling: Any = None, length: int = 20, salt: str = ""
) -> Any:
    """Results of a batch."""
    batch = decoder.batch()
    for prompt in prompts:
        batch.add(prompt, method=method, sampling=sampling, max_new_tokens=length, salt=salt)
    results = [decoder.begin(request.prompt, method) for request in batch.requests]
    for number, item in batch:
        assert isinstance(item, Step), item
        results[number].take(item)
    assert decoder.engine.pool.held == 0
    return results


METHODS: dict[str, Method] = {
    "plain": Autoregressive(),
    "lookahead": Lookahead(window=3, ngram=3, guesses=3),
    "lookup": PromptLookup(rows=8),
    "medusa": Medusa(heads=random_heads("medusa", tiny("Llama")), rows=8),
    "amphista": Amphista(heads=random_heads("amphista", tiny("Llama")), rows=8, lookup=0.0),
}


@pytest.mark.parametrize(
    ("name", "graphs"),
    mostly_slow(
        product(METHODS, [False, True]),
        [*product(["lookahead", "medusa", "amphista"], [False]), *product(["plain", "lookup", "amphista"], [True])],
    ),
)
def test_a_second_turn_does_not_read_the_first_again(name: str, graphs: bool) -> None:
    """Its text and its guesses are those of a text that reads all."""
    keeping, plain = decoder_of(graphs), decoder_of(graphs, keeps=0)
    ready = keeping.prepare(METHODS[name])
    prompt = prompt_of(3, 30)
    (first,) = write(keeping, [prompt], ready)
    assert first.reused == 0
    second = [*prompt, *first.token_ids, 5, 9, 2]
    (found,) = write(keeping, [second], ready)
    (expected,) = write(plain, [second], ready)
    assert found.token_ids == expected.token_ids
    assert found.accepted_per_step == expected.accepted_per_step
    assert found.reused >= len(prompt) + 10  # heads on the host have not read the last step
    assert expected.reused == 0
    keeping.engine.pool.forget_all()
    assert (keeping.engine.pool.kept, keeping.engine.pool.used) == (0, 0)


def test_another_ending_is_read_anew() -> None:
    """What heads made of the last slot in common depends on the token behind it."""
    keeping, plain = decoder_of(False), decoder_of(False, keeps=0)
    ready = keeping.prepare(METHODS["amphista"])
    prompt = prompt_of(3, 30)
    write(keeping, [prompt], ready)
    for cut in (1, 7, 29, 30):
        other = [*prompt[:cut], 11, 4]
        (found,), (expected,) = write(keeping, [other], ready), write(plain, [other], ready)
        assert found.token_ids == expected.token_ids
        assert found.accepted_per_step == expected.accepted_per_step
        assert found.reused <= cut


def test_heads_take_over_what_they_have_read_alone() -> None:
    keeping = decoder_of(False)
    ready = keeping.prepare(METHODS["amphista"])
    prompt = prompt_of(3, 30)
    write(keeping, [prompt], Autoregressive())
    assert write(keeping, [prompt], ready)[0].reused == 0
    assert write(keeping, [prompt], ready)[0].reused > 20
    assert write(keeping, [prompt], Autoregressive())[0].reused > 20


def test_auto_drafts_without_heads_what_they_have_not_read() -> None:
    keeping = decoder_of(False)
    heads = random_heads("amphista", tiny("Llama"))
    auto = keeping.prepare("auto", heads=heads, rows=8)
    prompt = prompt_of(3, 30)
    (first,) = write(keeping, [prompt], Autoregressive())
    (found,) = write(keeping, [prompt], auto)
    assert found.token_ids == first.token_ids
    assert found.reused > 20
    assert not any(source.startswith("head") for source in found.offered)


def test_auto_as_a_program() -> None:
    """Its heads may not have read all of the first answer; what is taken over they have."""
    keeping, plain = decoder_of(True), decoder_of(True, keeps=0)
    auto = keeping.prepare("auto", heads=random_heads("amphista", tiny("Llama")), rows=8)
    prompt = prompt_of(3, 40)
    (first,) = write(keeping, [prompt], auto, length=40)
    second = [*prompt, *first.token_ids, 5, 9, 2]
    (found,) = write(keeping, [second], auto)
    assert found.token_ids == write(plain, [second], Autoregressive())[0].token_ids
    assert found.reused >= len(prompt) - 2


def test_texts_of_another_salt_share_nothing() -> None:
    keeping = decoder_of(False)
    prompt = prompt_of(3, 30)
    write(keeping, [prompt], Autoregressive(), salt="one")
    assert write(keeping, [prompt], Autoregressive(), salt="two")[0].reused == 0
    assert write(keeping, [prompt], Autoregressive(), salt="one")[0].reused == len(prompt) - 1


def test_the_least_recently_used_goes_first() -> None:
    keeping = decoder_of(False, keeps=80)
    one, two, three = (prompt_of(seed, 30) for seed in range(3))
    for prompt in (one, two, one, three):
        write(keeping, [prompt], Autoregressive(), length=10)
    assert keeping.engine.pool.kept <= 80
    assert write(keeping, [one], Autoregressive(), length=1)[0].reused == len(one) - 1
    assert write(keeping, [two], Autoregressive(), length=1)[0].reused <= 1


def test_slots_that_are_needed_are_taken() -> None:
    keeping = decoder_of(True, capacity=160)
    for seed in range(6):
        (found,) = write(keeping, [prompt_of(seed, 40)], Autoregressive())
        (expected,) = write(decoder_of(True, keeps=0), [prompt_of(seed, 40)], Autoregressive())
        assert found.token_ids == expected.token_ids


SAMPLED = Sampling(temperature=0.9, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.1, seed=4)


@pytest.mark.parametrize(
    ("name", "sampling", "keeps"),
    [("plain", None, 0), ("plain", SAMPLED, 512), ("lookahead", SAMPLED, 0), ("amphista", None, 512)],
)
def test_texts_that_are_set_aside_go_on(name: str, sampling: Sampling | None, keeps: int) -> None:
    small, plain = decoder_of(False, capacity=100, keeps=keeps), decoder_of(False, keeps=0)
    ready = small.prepare(METHODS[name])
    prompts = [prompt_of(seed, 16)[: 12 + seed] for seed in range(4)]
    batch = small.batch()
    for prompt in prompts:
        batch.add(prompt, method=ready, sampling=sampling, max_new_tokens=40)
    found: list[list[int]] = [[] for _ in prompts]
    for number, item in batch:
        assert isinstance(item, Step), item
        found[number] += item.tokens
    assert batch._writing.set_aside > 0
    assert found == [result.token_ids for result in write(plain, prompts, ready, sampling, 40)]
    assert small.engine.pool.held == 0


def test_in_programs_too_a_text_that_goes_on_has_its_penalties() -> None:
    """A text that is begun with a part of its answer is the rest of it."""
    decoder = decoder_of(True, keeps=0)
    prompt = prompt_of(2, 12)
    whole = decoder.generate(prompt, method=Autoregressive(), sampling=SAMPLED, max_new_tokens=30).token_ids
    with Writing() as writing:
        extras = Extras(written=13)
        text = [*prompt, *whole[:13]]
        how = decoder.sampling_for(SAMPLED, prompt, 30)
        writing.add(Request(decoder.engine, Autoregressive(), text, how, Ending(17, ()), 17, extras))
        rest: list[int] = []
        while writing:
            for _, item in writing.step():
                assert isinstance(item, Step), item
                rest += item.tokens
    assert rest == whole[13:]


def test_in_programs_a_text_waits_until_there_is_room() -> None:
    decoder = decoder_of(True, capacity=130, keeps=0)
    prompts = [prompt_of(seed, 40) for seed in range(5)]
    found = write(decoder, prompts, Autoregressive())
    assert [result.token_ids for result in found] == [
        write(decoder_of(True, keeps=0), [prompt], Autoregressive())[0].token_ids for prompt in prompts
    ]


def test_a_text_that_never_fits_is_refused() -> None:
    decoder = decoder_of(False, capacity=30)
    with pytest.raises(BatchError, match="30 are free") as caught:
        decoder.generate([prompt_of(1, 40)], method=Autoregressive())
    assert isinstance(caught.value.results[0].error, NoRoom)


@examples(60)
@given(st.integers(0, 10_000))
def test_slots_are_counted_right(seed: int) -> None:
    draw = random.Random(seed)
    pool = Pool(capacity=64, fixed=True)
    pool.keeps = draw.choice([10, 40, 64])
    texts = [[draw.randrange(3) for _ in range(draw.randrange(2, 14))] for _ in range(6)]
    living: list[tuple[ExitStack, Any]] = []
    for _ in range(25):
        if living and draw.random() < 0.5:
            living.pop(draw.randrange(len(living)))[0].close()
        else:
            text, stack = draw.choice(texts), ExitStack()
            sequence = stack.enter_context(pool.sequence(text, share=True, salt=draw.choice("ab")))
            behind = len(text) - 1 - len(sequence.slots)
            if pool.held + behind <= 60 and behind:
                mark(pool, pool.place_text(sequence, behind))
            living.append((stack, sequence))
        for _, sequence in living:
            check_sequence(pool, sequence)
        taken = {slot for _, sequence in living for slot in sequence.slots}
        kept = {slot for sequence in pool._ended for slot in sequence.slots}
        for sequence in pool._ended:
            check_sequence(pool, sequence)
        assert (pool.held, pool.kept) == (len(taken), len(kept - taken))
        assert pool.used == max([*taken, *kept], default=-1) + 1
    for stack, _ in living:
        stack.close()
    pool.forget_all()
    assert (pool.held, pool.kept, pool.used) == (0, 0, 0)
    assert common(texts[0], texts[0]) == len(texts[0])


@pytest.mark.parametrize("graphs", [False, True])
def test_a_failed_sequence_leaves_kept_prefixes_as_they_are(graphs: bool) -> None:
    """Its own slots are cleared, since they may hold NaN; those that it reuses are another sequence's."""
    decoder, prompt = decoder_of(graphs), prompt_of(3, 30)
    nothing = Sampling(logit_bias=dict.fromkeys(range(decoder.model.vocabulary), -math.inf))
    (expected,) = write(decoder, [prompt], Autoregressive())
    with pytest.raises(BatchError, match="every token is ruled out"):
        decoder.generate([prompt], method=Autoregressive(), sampling=nothing)
    (again,) = write(decoder, [prompt], Autoregressive())
    assert again.token_ids == expected.token_ids
    assert again.reused > 0
