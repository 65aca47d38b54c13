"""The cost curve: measured, kept, and followed."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace import CostCurve, Decoder, Jacobi, Lookahead, PromptLookup, Result, Sampling, SelfSpeculative, loop
from outpace.bench.calibration import Look, calibrate
from outpace.chart import save_accuracies, save_calibration
from outpace.draft import Tree
from outpace.errors import InputError
from outpace.methods import make
from outpace.methods.ngrams import History
from outpace.models.hf import HFModel
from outpace.picking import Picker
from outpace.runtime.calibrate import ROWS, _corners, about, measure
from outpace.runtime.costs import Prices, load
from outpace.runtime.graphs import GraphEngine
from outpace.runtime.plain import Engine

from .models import tiny, tiny_chain

STEEP = CostCurve({}, (1, 2, 128), (100,), ((1.0, 2.0, 20.0),))  # as on a small CPU
FLAT = CostCurve({}, (1, 128), (100, 1000), ((1.0, 1.04), (1.1, 1.2)))  # as on a large GPU


def test_between_the_points_it_is_straight() -> None:
    assert STEEP.step(2) == 2
    assert STEEP.price(65) == pytest.approx(11)
    assert STEEP.price(254) == pytest.approx(38)  # beyond the last point too
    assert FLAT.step(128, 550) == pytest.approx(1.12)
    assert FLAT.step(1, 5000) == pytest.approx(1.1)  # a longer text than was measured


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 30),
    st.lists(st.floats(-0.02, 0.3), min_size=1, max_size=24),
)
def test_a_draft_is_worth_its_price(text: list[int], rows: int, rises: list[float]) -> None:
    """It is that beginning of the full tree which gives the most expected tokens for its price, the first of these."""
    history = History(3)
    history.extend(text)
    price = Prices([1.0, *accumulate(rises, initial=1.1)])
    whole, priced = Tree(text[-1]), Tree(text[-1])
    history.grow(whole, rows, 6, "")
    found = history.grow(priced, rows, 6, "", price=price)
    expected = list(accumulate(chance(history, whole, row) for row in range(len(whole))))
    worth = [tokens / price(count) for count, tokens in enumerate(expected, 1)]
    assert len(priced) == 1 + worth.index(max(worth)) or max(worth) == pytest.approx(worth[len(priced) - 1])
    assert whole.tokens[: len(priced)] == priced.tokens
    assert whole.parents[: len(priced)] == priced.parents
    assert found == pytest.approx(expected[len(priced) - 1])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 30))
def test_dear_rows_and_free_rows(text: list[int], rows: int) -> None:
    history = History(3)
    history.extend(text)
    whole, priced = Tree(text[-1]), Tree(text[-1])
    history.grow(whole, rows, 6, "")
    history.grow(priced, rows, 6, "", price=FLAT.price)
    assert whole.tokens[: len(priced)] == priced.tokens
    assert whole.parents[: len(priced)] == priced.parents
    nothing = Tree(text[-1])
    history.grow(nothing, rows, 6, "", price=Prices([100.0, 200.0]))
    assert len(nothing) == 1
    everything = Tree(text[-1])
    history.grow(everything, rows, 6, "", price=Prices([1.0]))
    assert everything.tokens == whole.tokens


def chance(history: History, tree: Tree, row: int) -> float:
    """Of a row to be what the text goes on with."""
    if row == 0:
        return 1.0
    path = []
    while row:
        path.insert(0, tree.tokens[row])
        row = tree.parents[row]
    ends = [[*history._end, *path[:place]][-history._longest :] for place in range(len(path))]
    return math.prod(history.chances(end)[token] for end, token in zip(ends, path, strict=True))


@given(st.lists(st.floats(-0.1, 1), max_size=30), st.integers(1, 40), st.integers(1, 40))
def test_no_way_to_more_rows_costs_less_than_the_slope(rises: list[float], rows: int, more: int) -> None:
    price = Prices(list(accumulate(rises, initial=1.0)))
    cost = price(rows + more) - price(rows)
    assert cost >= more * price.slope(rows) - 1e-9
    assert price.slope(rows) >= price.least
    assert price.plus(0.5)(rows) == pytest.approx(price(rows) + 0.5)
    assert price.plus(0.5).slope(rows) == price.slope(rows)


def test_curves_are_measured_where_steps_jump() -> None:
    model = HFModel(tiny("Llama"))
    assert _corners(Engine(model)) == ROWS
    graphs = GraphEngine(model, compiled=False, capacity=512)
    assert _corners(graphs) == [1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128]
    graphs.sizes = [32]  # of exact mode: more rows are computed in parts
    assert _corners(graphs) == [1, 32, 33, 64, 65, 96, 97, 128]


def test_methods_are_sized_by_the_curve() -> None:
    assert make("jacobi", costs=STEEP) == Jacobi(window=0)
    assert make("jacobi", costs=FLAT) == Jacobi(window=16)
    assert make("self-speculative", costs=STEEP) == SelfSpeculative(length=0)
    assert make("self-speculative", costs=FLAT) == SelfSpeculative(length=5)
    assert make("self-speculative", costs=replace(FLAT, drafting={"self-speculative": 2.5})) == SelfSpeculative(
        length=0
    )
    assert make("lookahead", costs=STEEP) == Lookahead(window=1, ngram=2, guesses=16)
    assert make("lookahead", costs=FLAT) == Lookahead(window=15, ngram=5, guesses=15)
    assert make("lookahead", costs=STEEP, window=5).window == 5  # what is given stays


@pytest.mark.parametrize("method", [Jacobi(window=0), PromptLookup(), Lookahead(window=1, ngram=2, guesses=16)])
@pytest.mark.parametrize("curve", [STEEP, FLAT])
def test_sized_methods_write_the_same_text(method: object, curve: CostCurve) -> None:
    decoder = Decoder(tiny("Llama"))
    prompt = [5, 9, 5, 9, 7, 3] * 4
    expected = decoder.generate(prompt, method="autoregressive", max_new_tokens=30).token_ids
    decoder.engine.costs = curve
    assert decoder.generate(prompt, method=method, max_new_tokens=30).token_ids == expected


@pytest.mark.parametrize("settings", [{"published": True, "prompt_pool": False}, {"reach": 0}, {}])
def test_a_single_column_offers_the_pool_as_far_as_rows_pay(settings: dict[str, Any]) -> None:
    decoder, prompt = Decoder(tiny("Llama")), [1, 2, 3, 1, 2]
    method = Lookahead(window=1, ngram=4, **settings)
    expected = decoder.generate(prompt, method="autoregressive", max_new_tokens=60).token_ids
    free = len(list(decoder.stream(prompt, method=method, max_new_tokens=60)))
    drafted = {}
    for name, curve in (("flat", FLAT), ("dear", CostCurve({}, (1, 2), (100,), ((1.0, 9.0),)))):
        decoder.engine.costs = curve
        steps = list(decoder.stream(prompt, method=method, max_new_tokens=60))
        assert [token for step in steps for token in step.tokens] == expected
        drafted[name] = sum(source == "n-gram" for step in steps for source in step.draft.sources)
        assert name == "dear" or len(steps) <= free + 1  # what is likelier goes first, not what is newer
    assert drafted["flat"] > 0
    assert drafted["dear"] == 0


def test_lookahead_without_a_window_says_that_it_is_prompt_lookup() -> None:
    decoder, prompt = Decoder(tiny("Llama")), [5, 9, 5, 9, 7, 3] * 4
    decoder.engine.costs = CostCurve({}, (1, 2), (100,), ((1.0, 1.3),))
    small = decoder.generate(prompt, method=Lookahead(window=1, ngram=2, guesses=16), max_new_tokens=20)
    assert [*small.offered] == ["history"]
    assert "prompt-lookup" in (small.remark or "")
    assert decoder.generate(prompt, method=Lookahead(window=3), max_new_tokens=20).remark is None


def test_a_pool_that_is_wrong_is_believed_less() -> None:
    decoder = Decoder(tiny("Llama"))
    decoder.engine.costs = CostCurve({}, (1, 2), (100,), ((1.0, 1.08),))  # a guess must be right one time in twelve
    with decoder.engine.pool.sequence([5, 7]) as text:
        method = Lookahead(published=True, prompt_pool=False, window=1)
        drafter: Any = method.start(decoder.engine, text, Picker(Sampling(), 2))
        for ngram in ([7, 1, 2, 3, 4], [7, 1, 9, 9, 9]):
            drafter.pool.add(ngram)
        rows = []
        for token in (1, 1, *[8] * 40):
            tree = Tree(7)
            drafter._add_guesses(tree, 100)
            rows.append(len(tree))
            drafter._judge([5, 7], token)
        assert rows[:3] == [2, 2, 2]  # the token that both n-grams have
        assert rows == sorted(rows, reverse=True)
        assert rows[-1] == 1


def test_an_estimate_counts_what_drafting_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "perf_counter", count(0.0, 0.25).__next__)  # every lap takes a quarter
    decoder = Decoder(tiny("Llama"))
    decoder.engine.costs = CostCurve({}, (1, 2), (100,), ((0.5, 0.75),))
    steps = list(decoder.stream([1, 2, 3], method=PromptLookup(rows=2, priced=False), max_new_tokens=9))
    assert len(steps) > 2
    for number, step in enumerate(steps):
        rows = 1.0 if len(step.draft) == 1 else 1.5
        assert step.cost == (rows + (0.5 if number == 0 else 1.0), 1.0)  # learning, and but for the first drafting


def test_models_of_chains_go_by_their_costs() -> None:
    engine = Engine(HFModel(tiny_chain("Bloom")))
    engine.costs = STEEP
    assert engine.for_one_text().costs is STEEP
    assert engine.for_one_text().pool is not engine.pool


def test_a_curve_is_kept_for_its_model_and_machine(tmp_path: Path) -> None:
    engine = Engine(HFModel(tiny("Llama")))
    curve = measure(engine, rows=(1, 2, 4), contexts=(8, 20), repeats=1)
    assert engine.pool.held == 0
    assert all(cost > 0 for costs in curve.seconds for cost in costs)
    assert list(curve.segments) == ["0-0", "1-1", "2-2", "3-3"]
    path = curve.save(tmp_path)
    assert load(tmp_path, about(engine)) == curve
    assert load(tmp_path, {**about(engine), "dtype": "bfloat16"}) is None
    path.write_text(path.read_text()[:40])
    assert load(tmp_path, about(engine)) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="could not be written"):
        replace(FLAT, about={"model": "m"}).save(tmp_path / "file")


FREE = ("jacobi", "prompt-lookup", "lookahead", "self-speculative", "swift", "auto")  # nothing is trained for them


def test_calibration_serves_the_decoder_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.bench.calibration.measure", lambda engine, done: FLAT)
    decoder = Decoder(tiny("Llama"))
    shares: list[float] = []
    curve, swing = calibrate(decoder, shares.append)
    assert swing >= 0
    assert decoder.engine.costs == curve
    assert set(curve.drafting) == set(curve.paces) == {*FREE}
    assert all(pace > 0 for pace in curve.paces.values())
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert decoder.prepare("lookahead") == make("lookahead", costs=curve)  # whatever was measured here


def test_drawings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = CostCurve({"model": "m"}, (1, 2, 4), (128,), ((0.01, 0.02, 0.03),))
    look = Look(Result("auto", True, 5), {}, {}, {"lookahead": 2}, {"lookahead": 1.2, "prompt-lookup": 1.1})
    save_calibration(curve, look, tmp_path / "costs.svg")
    save_accuracies({"medusa": [[0.5, 0.2], [0.3, 0.1]], "hydra": [[0.6, 0.1]]}, tmp_path / "heads.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("costs.svg", "heads.png"))
    with pytest.raises(InputError, match="could not be written"):
        save_calibration(curve, look, tmp_path / "nowhere" / "costs.svg")


@pytest.mark.parametrize("text", ["5", '"x"', "null", "[]", "{}", "{"])
def test_a_curve_that_is_none_is_ignored(tmp_path: Path, text: str) -> None:
    saved = FLAT.save(tmp_path)
    saved.write_text(text)
    assert load(tmp_path, FLAT.about) is None
