"""The papers' tables on a tiny model: what is counted, what is judged, and that a stopped reproduction goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import AdaDecode, Autoregressive, Decoder, InputError, Medusa, Sampling, UnverifiedAdaDecode
from outpace.bench.data import Question, read_questions
from outpace.bench.entries import Task
from outpace.heads import ExitHeads
from outpace.heads.blocks import BlockShape
from outpace.heads.exits import ExitSettings
from outpace.reproduce import PAPERS, adadecode, amphista, lookahead, stem
from outpace.reproduce.findings import Claim, Findings, Table, at_most, everywhere, falling
from outpace.reproduce.lab import Lab, Scale
from outpace.reproduce.rouge import Rouge, in_order, mean, rouge
from outpace.reproduce.scaling import Fit, Point, fit

from .models import tiny
from .test_cli import assert_refused, folder, outpace, train
from .test_cli_bench import wide

assert folder  # fixtures: a tiny Llama whose tokens are bytes
assert wide  # and the same with a larger context
words = st.lists(st.sampled_from("abcd"), max_size=9)


def slow_common(left: list[str], right: list[str]) -> int:
    if not left or not right:
        return 0
    if left[-1] == right[-1]:
        return 1 + slow_common(left[:-1], right[:-1])
    return max(slow_common(left[:-1], right), slow_common(left, right[:-1]))


@given(words, words)
def test_rouge_l_is_the_longest_common_sequence(left: list[str], right: list[str]) -> None:
    both = len(left) + len(right)
    assert in_order(left, right) == in_order(right, left)
    assert in_order(left, right) == (2 * slow_common(left, right) / both if both else 1.0)


@given(words)
def test_rouge_of_a_text_with_itself(text: list[str]) -> None:
    assert rouge(" ".join(text), " ".join(text)) == (1.0, 1.0, 1.0)


def test_rouge_by_hand() -> None:
    found = rouge("The cat sat on the mat.", "the cat lay on a mat")
    assert found == (2 * 4 / 12, 2 * 1 / 10, 2 * 4 / 12)
    assert rouge("", "two words") == (0.0, 0.0, 0.0)
    assert mean([Rouge(1, 1, 1), Rouge(0, 0, 1)]) == (0.5, 0.5, 1.0)
    assert mean([]) is None


def test_the_law_is_found_again() -> None:
    law = Fit(0.425, 3.1, 0.0)
    points = [Point(n, b, 2 * b * (n - 1), law.tokens(n, b)) for n in (3, 5) for b in (1, 3, 7, 15)]
    found = fit(points)
    assert found.alpha == pytest.approx(0.425, abs=1e-3)
    assert found.scarcity == pytest.approx(3.1, abs=0.02)
    assert found.error < 1e-3
    assert fit([point._replace(tokens=1.0) for point in points]).tokens(5, 15) == pytest.approx(1.0, abs=1e-3)


def test_claims_follow_from_numbers() -> None:
    assert falling("", {"a": 2.0, "b": 1.0}).holds is True
    assert falling("", {"a": 2.0, "b": 2.0}).holds is False
    assert falling("", {"a": 2.0, "b": None}).holds is None
    assert everywhere("", {"a": 1.1, "b": 0.9}, 1.0).holds is False
    assert everywhere("", {}, 1.0).holds is None
    assert at_most("", 6.0, 6.0).holds is True
    assert at_most("", None, 6.0).holds is None
    claims = [Claim("x", True, "1"), Claim("y", False, ""), Claim("z", None, "")]
    findings = Findings("P", "about", [Table("T", ["a|b"], [["c"]], claims)])
    assert findings.verdict == "1 of 2 claims hold"
    assert "| a/b |" in findings.markdown()
    assert "- **does not hold**: y" in findings.markdown()


QUESTIONS = [
    Question(task, number, (text,), ("a b",) if task == "summary" else ())
    for task in ("chat", "summary", "math", "code")
    for number, text in enumerate(("ab ab ab", "xyxyxy"))
]


def lab(folder: Path, runs: Path, **options: Any) -> Lab:
    from outpace.models.loading import load

    loaded = load(str(folder), device="cpu")
    decoder = Decoder(loaded.model, loaded.tokenizer, "autoregressive")
    return Lab(decoder, QUESTIONS, Scale(1, 8), runs, **{"model": loaded.model, **options})


def cells(table: Table, row: str) -> dict[str, str]:
    return next(dict(zip(table.columns, cells, strict=True)) for cells in table.rows if row in cells[:2])


def test_lookahead_stopped_and_gone_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "runs"

    class Stop(Exception):
        pass

    def stop(share: float, text: str = "") -> None:
        if share > 0.6:
            raise Stop

    with pytest.raises(Stop):
        PAPERS["lookahead"](lab(folder, place, show=stop))
    kept = {file: file.read_text() for file in place.iterdir()}
    seen: list[float] = []
    found = PAPERS["lookahead"](lab(folder, place, show=lambda share, text="": seen.append(share)))
    assert all(file.read_text().startswith(text) for file, text in kept.items())
    whole = {file: file.read_text() for file in place.iterdir()}
    monkeypatch.setattr("outpace.bench.entries.Ours.run", None)  # nothing is measured again
    assert PAPERS["lookahead"](lab(folder, place)) == found
    assert {file: file.read_text() for file in place.iterdir()} == whole
    speeds, sampling, settings, law, devices = found.tables
    assert [row[0] for row in speeds.rows] == ["chat", "summary", "math", "code", "all"]
    assert speeds.claims[0].holds is True
    assert [claim.holds for claim in sampling.claims[:4]] == [True] * 4
    assert sampling.claims[4].holds is not None  # ROUGE to the references
    assert lookahead.PAPERS_RULE in [row[2] for row in sampling.rows]
    ways = [way for way in lookahead.ON_SUMMARIES for _ in range(len(sampling.rows) // 2)]
    assert [row[0] for row in sampling.rows] == ways
    assert {row[6] for row in sampling.rows if row[0] == lookahead.BRIEF} == {"–"}  # without references
    assert sum("100.0 / 100.0 / 100.0" in row for row in sampling.rows) >= 6
    assert {row[0] for row in settings.rows} == set(lookahead.TABLE_3)
    assert len(law.rows) == len(found.plots[0].lines["N = 3, measured"]) + len(found.plots[0].lines["N = 5, Eq. 7"])
    assert [row[0] for row in devices.rows] == ["1", "2", "4", "8"]
    assert devices.claims[0].holds is None  # it is predicted
    assert 0 <= min(seen) <= max(seen) < 1
    page = found.save(tmp_path, stem("lookahead", "/a/Tiny_Model", Decoder(tiny("Llama"))), "the command")
    assert page.name == "lookahead-tiny-model-cpu.md"
    assert "    the command\n" in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["verdict"] == found.verdict


@pytest.fixture(scope="session")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("papers")
    (place / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": "abc"[: 1 + n % 3]}) for n in range(6)))
    result = train(folder, place / "out", kinds=("medusa", "hydra", "amphista", "exits"))
    assert result.exit_code == 0, result.stderr
    return place / "out"


@pytest.mark.filterwarnings("ignore:adadecode. these exits are predicted")
def test_adadecode(folder: Path, trained: Path, tmp_path: Path) -> None:
    heads = {name: str(trained / "exits") for name in ("exits", "full", "math")}
    main, ablation, sweep = PAPERS["adadecode"](lab(folder, tmp_path), heads=heads).tables
    assert [row[0] for row in main.rows] == ["summary", "math", "code", "all"]
    assert {"trained on math", "trained on math, a tree", "ours, a tree with lookup"} < {*main.columns}
    assert all(table.claims[0].holds for table in (main, sweep))
    labels = [row[0] for row in ablation.rows]
    assert labels == [
        *("as published, mixed exits", "ours, calibrated", "no verification", "one exit, layer 1", "original head"),
        *("full-parameter heads", "trained on math", "trained on math, calibrated"),
    ]
    for label in labels:
        if label != "no verification":
            assert cells(ablation, label)["same text"] == "6 of 6"
            assert cells(ablation, label)["consistency"] == "1.000"
    assert [row[0] for row in sweep.rows] == [f"{gamma:g}" for gamma in adadecode.GAMMAS]


class TestStairs:
    """What is counted with early exits, on a model of four layers."""

    def run(self, method: type[AdaDecode] = AdaDecode, **settings: Any) -> Any:
        decoder = Decoder(tiny("Llama"), None, Autoregressive())
        shape = BlockShape(32, heads=1, key_heads=1, head_size=32, inner=32)
        heads = ExitHeads(ExitSettings(layers=(1, 3)), shape)
        torch.manual_seed(1)
        for weight in heads.parameters():
            torch.nn.init.normal_(weight)
        entry = adadecode.Stairs(decoder, method(heads=heads, control="fixed", **settings), "x")
        self.decoder = decoder
        return entry.run(Task([5, 9, 5], Sampling(), 20))

    def test_nothing_leaves(self) -> None:
        found = self.run(gamma=1.0)
        assert (found.steps, found.lane) == (20, None)
        assert found.counts["layers"] == 20 * 4
        assert found.counts["asked"] == 19 * 2  # the first step reads the prompt
        assert (found.counts["guessed"], found.counts["right"], found.counts["wrong"]) == (0, 0, 0)
        assert found.counts["cost_8b"] > 20  # asking is not free

    def test_everything_leaves_at_once(self) -> None:
        found = self.run(gamma=1e-9, pending=3)
        assert found.counts["guessed"] <= 3 * (found.steps - 1)
        assert found.counts["guessed"] == found.counts["asked"]
        # Each guess leaves after layer 1, so a step runs all layers once, and layer 1 once more for each guess.
        assert found.counts["layers"] == 4 * found.steps + found.counts["guessed"]
        assert found.counts["right"] == 20 - found.steps
        assert found.token_ids == self.decoder.generate([5, 9, 5], max_new_tokens=20).token_ids

    def test_without_verification_all_is_right(self) -> None:
        found = self.run(UnverifiedAdaDecode, gamma=1e-9, pending=3)
        assert found.counts["wrong"] == 0
        assert found.steps < 10


def test_other_heads_are_other_runs(folder: Path, trained: Path, tmp_path: Path) -> None:
    here = lab(folder, tmp_path)
    kept = here.decoder.prepare(Medusa(heads=str(trained / "medusa")))
    other: Any = here.decoder.prepare(Medusa(heads=str(trained / "medusa")))
    assert here.ours({"x": kept})[1].settings == here.ours({"x": other})[1].settings
    next(other.heads.heads.parameters()).data += 1
    assert here.ours({"x": kept})[1].settings != here.ours({"x": other})[1].settings


def test_three_exits_as_in_the_paper() -> None:
    assert adadecode.three_of((4, 8, 12, 16, 20, 24, 28), 32) == (8, 16, 24)
    assert adadecode.three_of((1,), 2) == (1,)


def test_amphista(folder: Path, trained: Path, tmp_path: Path) -> None:
    heads = {name: str(trained / name) for name in ("medusa", "hydra", "amphista")}
    here = lab(folder, tmp_path)
    found = PAPERS["amphista"](here, heads={**heads, "again": heads["amphista"]}, answers=trained / "answers")
    stored, judged, greedy, sampled = found.tables
    assert len(stored.rows) == len(judged.rows) == 6
    # Stored ones were rounded, and measured in the same way.
    assert [row[1] for row in judged.rows] == [row[1] for row in stored.rows]
    assert "amphista, again" in [row[0] for row in greedy.rows]
    assert "amphista, not coupled" not in [row[0] for row in greedy.rows]
    assert {"amphista, not coupled", amphista.TYPICAL} <= {row[0] for row in sampled.rows}
    assert all(table.claims[0].holds for table in (greedy, sampled))


def test_references_come_with_questions(tmp_path: Path) -> None:
    entries = [
        {"turns": ["a", "b"], "category": "summarization", "reference": ["r", "s"]},
        {"turns": ["a"], "category": "qa"},
        {"question": "1?", "answer": "1"},
        {"turns": ["a"], "category": "math", "reference": [3]},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    assert [question.references for question in read_questions(path)] == [("r", "s"), (), ("1",), ()]
    twice = read_questions(path, path)
    assert [question.number for question in twice] == [0] * 4 + [1] * 4
    assert replace(twice[4], number=0) == twice[0]


class TestCommand:
    def test_page_and_json(self, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outpace.reproduce.lab.SHORT", Scale(1, 6))
        (tmp_path / "q.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}))
        options = ("--model", wide, "--data", tmp_path / "q.jsonl", "--out", tmp_path / "out", "--device", "cpu")
        result = outpace("reproduce", "lookahead", *options)
        assert result.exit_code == 0, result.output
        page = tmp_path / "out" / "lookahead-model-cpu.md"
        assert result.stdout == page.read_text() + "\n"
        command = f"outpace reproduce lookahead --model {wide} --short --data q.jsonl"  # may be wrapped
        assert command in " ".join(result.stdout.replace("\\\n", "").split())
        assert str(page) in result.stderr
        found = json.loads(outpace("reproduce", "lookahead", *options, "--json").stdout)
        assert found["file"] == str(page)
        assert found["kind"] == "outpace reproduction"
        assert all({"text", "holds", "found"} == set(claim) for table in found["tables"] for claim in table["claims"])

    def test_refused(self, folder: Path, tmp_path: Path) -> None:
        assert_refused(outpace("reproduce", "medusa"), "medusa", "lookahead")
        assert_refused(outpace("reproduce", "adadecode", "--heads", "exits"), "NAME=FOLDER")
        assert_refused(outpace("reproduce", "lookahead", "--heads", "a=b"), "lookahead has no heads")
        assert_refused(outpace("reproduce", "lookahead", "--answers", tmp_path), "amphista")
        assert_refused(outpace("reproduce", "lookahead", "--data", tmp_path / "none"), "none could not be read")
        adadecode = ("reproduce", "adadecode", "--model", folder, "--device", "cpu", "--out", tmp_path)
        assert_refused(outpace(*adadecode), "no trained exits", "outpace train exits")
        assert_refused(outpace(*adadecode, "--heads", "exits=/nowhere"), "/nowhere")


def test_no_questions(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no questions"):
        Lab(Decoder(tiny("Llama")), [], Scale(1, 8), tmp_path)
