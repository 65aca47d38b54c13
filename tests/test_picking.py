from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from outpace import Decoder, PromptLookup
from outpace.errors import InputError, InvalidLogits
from outpace.picking import Picker, Sampling, _may_win, _warmed, _warmed_on_cpu, gumbel, uniform

from .models import examples, tiny
from .statistics import chi_square_fits

LOGITS = torch.randn(97, generator=torch.Generator().manual_seed(3)) * 3


def test_uniform_is_uniform_and_independent() -> None:
    numbers = torch.stack([uniform(1, position, 0, torch.arange(500)) for position in range(200)])
    assert numbers.min() > 0
    assert numbers.max() < 1
    cells = (numbers * 20).long().flatten()
    assert chi_square_fits(torch.bincount(cells, minlength=20), torch.full((20,), 1 / 20))
    pairs = (numbers[:, 1:] * 5).long() * 5 + (numbers[:, :-1] * 5).long()
    assert chi_square_fits(torch.bincount(pairs.flatten(), minlength=25), torch.full((25,), 1 / 25))
    later = (numbers[1:] * 5).long() * 5 + (numbers[:-1] * 5).long()
    assert chi_square_fits(torch.bincount(later.flatten(), minlength=25), torch.full((25,), 1 / 25))


@given(st.integers(), st.integers(0, 10**6), st.integers(0, 2), st.integers(0, 200_000))
def test_noise_depends_on_its_key_alone(seed: int, position: int, stream: int, token: int) -> None:
    alone = gumbel(seed, position, stream, torch.tensor([token]))
    among = gumbel(seed, position, stream, torch.tensor([5, token, 9]))[1:2]
    assert torch.equal(alone, among)
    assert alone.isfinite().all()


def test_seeds_positions_and_streams_differ() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0)]
    assert len({float(uniform(*key, torch.tensor([7]))) for key in keys}) == len(keys)


def test_greedy_is_argmax() -> None:
    assert Picker(Sampling(), 1).choose(LOGITS, [1]) == int(LOGITS.argmax())


def test_typical_acceptance_takes_what_is_likely_enough_and_says_that_it_is_lossy() -> None:
    how = Sampling(temperature=1.0, rule="typical", seed=3)
    flat, sure = torch.zeros(100), torch.tensor([9.0, 5.0, *[0.0] * 98])
    for logits, proposals, taken in (
        (flat, [(5, None), (6, None)], 5),  # p = 0.01 > 0.3 / 100
        (sure, [(1, None)], None),  # p = 0.02
        (sure, [(1, None), (0, None)], 0),  # the likeliest
        (flat, [], None),
    ):
        found = Picker(how, 1).choose(logits, [7], proposals)
        assert found == (Picker(Sampling(temperature=1.0, seed=3), 1).choose(logits, [7]) if taken is None else taken)
    assert not how.lossless
    assert Sampling(rule="typical").lossless  # greedy
    decoder = Decoder(tiny("Llama"))
    for rule in ("typical", "keyed"):
        sampling = Sampling(temperature=1.0, rule=rule)  # type: ignore[arg-type]
        found = decoder.generate([5, 9, 5, 9], method=PromptLookup(), sampling=sampling, max_new_tokens=8)
        assert found.lossless == (rule == "keyed")


@pytest.mark.parametrize("rule", ["keyed", "rejection"])
def test_temperature_sampling_has_the_softmax_distribution(rule: str) -> None:
    table = LOGITS[:8]
    picker = Picker(Sampling(temperature=1.5, rule=rule, seed=4), 1)  # type: ignore[arg-type]
    draws = torch.tensor([picker.choose(table, [0] * length) for length in range(2500)])
    assert chi_square_fits(torch.bincount(draws, minlength=8), (table / 1.5).softmax(-1))


@pytest.mark.parametrize(
    ("setting", "processor"),
    [
        ({"top_k": 5}, transformers.TopKLogitsWarper(5)),
        ({"top_p": 0.7}, transformers.TopPLogitsWarper(0.7)),
        ({"min_p": 0.1}, transformers.MinPLogitsWarper(0.1)),
        ({"repetition_penalty": 1.3}, transformers.RepetitionPenaltyLogitsProcessor(1.3)),
    ],
)
def test_settings_mean_what_they_mean_in_transformers(setting: dict[str, float], processor: object) -> None:
    prefix = [4, 9, 4, 60]
    ours = Picker(Sampling(temperature=1.0, **setting), 2).probabilities(LOGITS, prefix)  # type: ignore[arg-type]
    theirs = processor(torch.tensor([prefix]), LOGITS[None].clone())[0].softmax(-1)  # type: ignore[operator]
    assert torch.allclose(ours.float(), theirs, atol=1e-6)


def test_penalties_count_the_answer_alone() -> None:
    picker = Picker(Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25), prompt_length=2)
    expected = LOGITS.clone()
    expected[7] -= 0.5 + 2 * 0.25
    expected[8] -= 0.5 + 0.25
    found = picker.probabilities(LOGITS, [7, 9, 7, 8, 7])
    assert torch.allclose(found.float(), expected.softmax(-1), atol=1e-6)


def test_logit_bias() -> None:
    assert Picker(Sampling(logit_bias={13: 1000.0}), 1).choose(LOGITS, [1]) == 13
    with pytest.raises(InputError, match="token 97"):
        Picker(Sampling(logit_bias={97: 1.0}), 1).choose(LOGITS, [1])


def test_a_users_processor_sees_the_rows_own_prefix() -> None:
    seen = []

    def forbid_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.tolist())
        return scores.index_fill(1, ids[0, -1:], -math.inf)

    best = int(LOGITS.argmax())
    second = int(LOGITS.topk(2).indices[1])
    assert Picker(Sampling(processors=[forbid_last]), 1).choose(LOGITS, [3, best]) == second
    assert seen == [[[3, best]]]


def test_processors_do_not_change_the_models_logits() -> None:
    before = LOGITS.clone()
    Picker(Sampling(temperature=0.5, repetition_penalty=2.0, top_p=0.5, logit_bias={1: 3.0}), 1).choose(LOGITS, [1, 2])
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)])
def test_nan_is_an_error_never_a_token(sampling: Sampling) -> None:
    bad = LOGITS.clone()
    bad[50] = math.nan
    with pytest.raises(InvalidLogits, match="NaN"):
        Picker(sampling, 1).choose(bad, [1])


def test_no_token_left_is_an_error() -> None:
    def forbid_all(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf)

    for temperature in (0.0, 1.0):
        with pytest.raises(InvalidLogits, match="ruled out"):
            Picker(Sampling(temperature=temperature, processors=[forbid_all]), 1).choose(LOGITS, [1])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"rule": "best"},
        {"temperature": "0.7"},
        {"top_p": None},
        {"top_k": 2.5},
        {"seed": 1.5},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: math.inf}},
        {"logit_bias": None},
        {"logit_bias": [(5, 1.0)]},
        {"top_k": True},
        {"temperature": True},
    ],
)
def test_settings_out_of_range_are_named(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(InputError, match=name):
        Sampling(**bad)  # type: ignore[arg-type]


def test_the_smallest_temperature_is_greedy() -> None:
    for temperature in (1e-3, 1e-39, 1e-44):
        assert Picker(Sampling(temperature=temperature), 1).choose(LOGITS, [1]) == int(LOGITS.argmax())


def test_a_processor_may_force_a_token() -> None:
    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([5]), math.inf)

    for temperature in (0.0, 1.0):
        assert Picker(Sampling(temperature=temperature, processors=[force]), 1).choose(LOGITS, [1]) == 5


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.floats(0.01, 100.0), st.booleans())
@examples(60)
def test_a_draw_from_many_tokens_is_the_highest_of_all_with_noise(
    seed: int, position: int, spread: float, ruled_out: bool
) -> None:
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(seed % 2**32)) * spread
    if ruled_out:
        scores[::3] = -math.inf
    everything = scores.double() + gumbel(seed, position, 0, torch.arange(5000))
    assert Picker(Sampling(temperature=1.0, seed=seed), 0)._draw_from_scores(scores, position, 0) == int(
        everything.argmax()
    )


@given(
    seed=st.integers(0, 10_000),
    words=st.sampled_from([1, 2, 97, 5000]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    setting=st.fixed_dictionaries(
        {"temperature": st.sampled_from([1e-40, 0.3, 1.0, 1.7])},
        optional={
            "top_k": st.sampled_from([1, 7, 300, 10_000]),
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.floats(0.0, 0.9),
        },
    ),
)
def test_on_a_cpu_scores_are_those_of_other_devices(
    seed: int, words: int, scale: float, setting: dict[str, float]
) -> None:
    """Rounded scores have ties, and some tokens are ruled out."""
    torch.manual_seed(seed)
    scores = (scale * torch.randn(words) * 8).round() / 8
    scores[torch.rand(words) < 0.1] = -math.inf
    scores[torch.randint(words, ())] = 0.5
    sampling = Sampling(**setting)  # type: ignore[arg-type]
    assert torch.equal(torch.from_numpy(_warmed_on_cpu(scores.numpy(), sampling)), _warmed(scores, sampling))


def test_tokens_that_may_win_include_the_one_that_wins() -> None:
    torch.manual_seed(0)
    for position in range(50):
        scores = 3 * torch.randn(5000)
        scores[::7] = -math.inf
        noised = scores.double() + gumbel(3, position, 0, torch.arange(5000))
        found = _may_win(scores.numpy(), (3, position, 0))
        assert int(noised.argmax()) in found
        assert len(found) < 500
