"""The bench: what it runs and in which order, what it compares, and that a killed one goes on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import Autoregressive, Decoder, InputError, Jacobi, Lookahead, PromptLookup, Sampling, load
from outpace.bench.data import Question
from outpace.bench.entries import Entry, Ours, Run, Task, Transformers
from outpace.bench.harness import Measured, Settings, measure
from outpace.bench.results import assemble, read_results, summarize
from outpace.methods import Method
from outpace.race import first_difference
from outpace.runtime import program
from outpace.runtime.graphs import PROGRAMS, GraphEngine

from .test_cli import CONTEXT, folder

assert folder  # a fixture
QUESTIONS = [Question("chat", 0, ("one", "two")), Question("chat", 1, ("three",)), Question("math", 0, ("1 + 1",))]
SHORT = Settings(max_new_tokens=8, digest="x")


class Watched(Ours):
    """Notes its runs, and may be killed at one."""

    def __init__(self, decoder: Decoder, method: Method, log: list[str], killed_at: int = 0) -> None:
        super().__init__(decoder, method)
        self._log = log
        self._left = killed_at

    def run(self, task: Task) -> Run:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        self._log.append(self.label)
        return super().run(task)


class Liar(Ours):
    """Changes its fourth token."""

    def run(self, task: Task) -> Run:
        run = super().run(task)
        tokens = list(run.token_ids)
        if len(tokens) > 3:
            tokens[3] = (tokens[3] + 1) % 256
        return replace(run, token_ids=tokens)


@pytest.fixture
def pair(folder: Path) -> tuple[Decoder, Any]:
    from outpace.models.loading import load as load_model

    loaded = load_model(str(folder), device="cpu")
    return Decoder(loaded.model, loaded.tokenizer), loaded.model


def entries(decoder: Decoder, model: Any) -> list[Entry]:
    ours = [Ours(decoder, method) for method in (Autoregressive(), Jacobi(window=3), Lookahead(window=3, ngram=3))]
    return [*ours, Transformers(decoder, model), Transformers(decoder, model, lookup=True)]


def run(pair: tuple[Decoder, Any], path: Path, settings: Settings = SHORT) -> Measured:
    return measure(pair[0], entries(*pair), QUESTIONS, settings, path / "runs.jsonl")


def test_transformers_may_answer_fewer_questions(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    measured = run(pair, tmp_path, replace(SHORT, every=2))
    counts = Counter(found["label"] for found in measured.runs)
    assert sorted(counts.values()) == [3, 3, 4, 4, 4]  # theirs without the second question of a task
    figures = {found["label"]: found["all"] for found in summarize(measured.runs, list(counts))}
    assert {figures[label]["runs"] for label in counts} == {3, 4}
    with pytest.raises(InputError, match="every=0 must be 1 or more"):
        Settings(every=0)


def test_all_write_the_same(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    measured = run(pair, tmp_path, replace(SHORT, repeats=2))
    assert len(measured.runs) == 2 * 4 * 5  # repeats, prompts with their turns, entries
    assert all(found["equal"] is True for found in measured.runs)
    assert Counter((found["task"], found["prompt"], found["turn"]) for found in measured.runs) == {
        ("chat", 0, 0): 10,
        ("chat", 0, 1): 10,
        ("chat", 1, 0): 10,
        ("math", 0, 0): 10,
    }
    for found in measured.runs:
        assert found["seconds"] > 0
        assert 1 <= found["steps"] <= len(found["token_ids"]) <= 8
        if not found["label"].startswith("transformers"):
            assert sum(found["accepted_per_step"]) == sum(found["sources"].values()) == len(found["token_ids"])
            assert found["rows"] >= found["steps"] == len(found["accepted_per_step"])
            assert all(took <= had for took, had in zip(found["accepted"], found["offered"], strict=True))
            assert found["rows"] == found["steps"] + sum(found["guesses"].values())


def test_the_second_turn_follows_plain_decodings_answer(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    first, second = (
        next(found for found in run(pair, tmp_path).runs if (found["prompt"], found["turn"]) == (0, turn))
        for turn in (0, 1)
    )
    answer = pair[0].tokenizer.decode(first["token_ids"], skip_special_tokens=True)
    assert second["prompt_tokens"] == len(pair[0].encode("[one][" + answer + "][two]", raw=True))


def test_sampled_texts_of_ours_are_equal_and_transformers_is_not_compared(
    pair: tuple[Decoder, Any], tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    measured = run(pair, tmp_path, replace(SHORT, sampling=Sampling(temperature=0.8, top_p=0.9, seed=4)))
    assert {(found["label"].startswith("transformers"), found["equal"]) for found in measured.runs} == {
        (False, True),
        (True, None),
    }
    assert torch.equal(state, torch.random.get_rng_state())  # nobody else's noise is touched


def test_entries_take_turns_at_being_first(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    log: list[str] = []
    chosen = [Watched(pair[0], method, log) for method in (Autoregressive(), Jacobi(window=3))]
    measure(pair[0], chosen, QUESTIONS, SHORT, tmp_path / "runs.jsonl")
    a, j = "autoregressive", "jacobi"
    assert log == [*(a, j), *(a, j), *(j, a), *(a, j), *(j, a)]  # the first two warm up


def test_a_bench_of_many_methods_makes_each_program_once(
    pair: tuple[Decoder, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, _ = pair
    decoder.engine = GraphEngine(decoder.model, compiled=False, capacity=1024)
    made: list[Any] = []
    begin = program.Program.__init__

    def count(self: Any, *given: Any) -> None:
        made.append(self)
        begin(self, *given)

    monkeypatch.setattr(program.Program, "__init__", count)
    methods = [Autoregressive(), *(PromptLookup(rows=rows) for rows in range(2, 3 + PROGRAMS))]
    entries = [Ours(decoder, method, str(number)) for number, method in enumerate(methods)]
    found = measure(decoder, entries, QUESTIONS[1:], replace(SHORT, max_new_tokens=3), tmp_path / "runs")
    assert all(run["equal"] for run in found.runs)
    assert len(made) == len(entries)


@pytest.mark.parametrize("killed_at", range(2, 8))
def test_a_killed_bench_goes_on_and_repeats_nothing(pair: tuple[Decoder, Any], tmp_path: Path, killed_at: int) -> None:
    path = tmp_path / "runs.jsonl"
    log: list[str] = []
    methods = [Autoregressive(), Jacobi(window=3), Lookahead(window=3, ngram=3)]
    plain, *others = (Watched(pair[0], method, log) for method in methods)
    killed = Watched(pair[0], methods[1], log, killed_at=min(killed_at, 5))
    with pytest.raises(KeyboardInterrupt):
        measure(pair[0], [plain, killed, others[1]], QUESTIONS, SHORT, path)
    if killed_at > 5:
        path.write_text(path.read_text()[:-30])  # the last line was cut in the middle
    finished = len(path.read_text().split("\n")) - (2 if killed_at > 5 else 1)
    del log[:]
    measured = measure(pair[0], [plain, *others], QUESTIONS, SHORT, path)
    assert len(log) == 12 - finished + 3  # what was left, and the warm-up
    assert measured.resumed == finished
    assert len(measured.runs) == 12
    assert all(found["equal"] for found in measured.runs)
    del log[:]
    assert measure(pair[0], [plain, *others], QUESTIONS, SHORT, path).runs == json.loads(json.dumps(measured.runs))
    assert log == []


def test_more_work_is_added_to_finished_work(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    log: list[str] = []
    measure(pair[0], [Watched(pair[0], Autoregressive(), log)], QUESTIONS[:1], SHORT, path)
    del log[:]
    two = [Watched(pair[0], method, log) for method in (Autoregressive(), Jacobi(window=3))]
    measure(pair[0], two, QUESTIONS[:2], replace(SHORT, repeats=2), path)
    assert Counter(log) == {"autoregressive": 1 + 4, "jacobi": 1 + 6}
    del log[:]
    three = [two[0], Watched(pair[0], Jacobi(window=4), log)]  # other settings are another run
    measure(pair[0], three, QUESTIONS[:1], SHORT, path)
    assert Counter(log) == {"autoregressive": 1, "jacobi": 1 + 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens was 8, and is now 9"),
        ({"sampling": Sampling(seed=1)}, "sampling was"),
        ({"raw": True}, "raw was False"),
        ({"digest": "y"}, "digest was 'x', and is now 'y'"),
    ],
)
def test_runs_of_another_bench_are_not_mixed_in(
    pair: tuple[Decoder, Any], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run(pair, tmp_path)
    with pytest.raises(InputError, match=words):
        run(pair, tmp_path, replace(SHORT, **change))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no journal", "is not a file of finished runs"),
        ("[1]", "is not a file of finished runs"),
        ('{"kind": "outpace bench runs", "version": 0}', "has version 0; this Outpace .* reads version 2"),
        ('{"kind": "other"}', "is not an outpace bench runs file"),
    ],
)
def test_a_file_that_is_no_journal(pair: tuple[Decoder, Any], tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "runs.jsonl").write_text(content)
    with pytest.raises(InputError, match=words):
        run(pair, tmp_path)
    assert (tmp_path / "runs.jsonl").read_text() == content


def test_a_difference_is_named_with_its_gap(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    decoder = pair[0]
    chosen = [Ours(decoder, Autoregressive()), Liar(decoder, Jacobi(window=3))]
    measured = measure(decoder, chosen, QUESTIONS[1:2], SHORT, tmp_path / "runs.jsonl")
    plain, lie = measured.runs
    assert first_difference(plain["token_ids"], lie["token_ids"]) == 4
    assert (plain["equal"], lie["equal"], lie["differs_at"]) == (True, False, 4)
    text = torch.tensor([[*decoder.encode("three"), *plain["token_ids"][:3]]])
    with torch.no_grad():
        best = pair[1](text).logits[0, -1].topk(2).values
    assert lie["gap"] == pytest.approx(float(best[0] - best[1]), abs=1e-3)
    results = assemble(decoder, chosen, QUESTIONS, SHORT, measured)
    assert results["identical"] is False
    assert results["summary"][1]["all"]["equal"] == 0


def test_prompts_that_do_not_fit_are_left_out_and_listed(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    questions = [Question("chat", 0, ("x" * CONTEXT, "two")), QUESTIONS[1]]
    chosen = [Ours(pair[0], Autoregressive())]
    measured = measure(pair[0], chosen, questions, SHORT, tmp_path / "runs.jsonl")
    assert [found["prompt"] for found in measured.runs] == [1]
    assert [(left["turn"], left["prompt_tokens"]) for left in measured.skipped] == [(0, CONTEXT + 2), (1, None)]


def test_results(pair: tuple[Decoder, Any], tmp_path: Path) -> None:
    decoder = pair[0]
    chosen = entries(*pair)
    measured = measure(decoder, chosen, QUESTIONS, SHORT, tmp_path / "runs.jsonl")
    path = tmp_path / "results.json"
    path.write_text(json.dumps(assemble(decoder, chosen, QUESTIONS, SHORT, measured)))
    results = read_results(path)
    assert results["identical"] is True
    assert results["costs"] is None
    assert len(results["runs"]) == 20
    assert not any("lane" in found for found in results["runs"])
    assert [(race["task"], race["prompt"], race["text"]) for race in results["races"]] == [
        ("chat", 0, "one"),
        ("math", 0, "1 + 1"),
    ]
    for race in results["races"]:
        assert [lane["label"] for lane in race["lanes"]] == [entry.label for entry in chosen]
        answers = set()
        for lane in race["lanes"]:
            times = [step["at"] for step in lane["steps"]]
            assert times == sorted(times)
            answers.add(tuple(token for step in lane["steps"] for token in step["tokens"]))
            for step in lane["steps"]:
                assert len(step["tokens"]) == len(step["texts"]) == len(step["sources"])
                for token in step.get("draft", {"tokens": []})["tokens"]:
                    assert str(token) in race["words"]
        assert len(answers) == 1
    stored = json.loads(path.read_text())
    for version in (1, 3, None):
        path.write_text(json.dumps({**stored, "version": version}))
        with pytest.raises(InputError, match=r"this Outpace .* reads version 2"):
            read_results(path)
    path.write_text(json.dumps(stored)[:-5])
    with pytest.raises(InputError, match="not complete JSON"):
        read_results(path)


def test_summary() -> None:
    def one(
        label: str, prompt: int, seconds: float, steps: int, equal: bool | None = True, **more: Any
    ) -> dict[str, Any]:
        where = {"label": label, "task": "math", "prompt": prompt, "turn": 0, "repeat": 0}
        guessed = {"rows": 0, "guesses": {}, "sources": {}, "times_plain": None, **more}
        return {**where, "seconds": seconds, "steps": steps, "token_ids": [1, 2, 3, 4], "equal": equal, **guessed}

    first = {"rows": 8, "guesses": {"lookup": 4, "heads": 2}, "sources": {"model": 3, "lookup": 1}, "times_plain": 1.5}
    second = {"rows": 4, "guesses": {"lookup": 3}, "sources": {"model": 2, "lookup": 2}}
    runs = [
        *(one("plain", 0, 4.0, 4), one("plain", 1, 8.0, 4)),
        *(one("quick", 0, 2.0, 2, **first), one("quick", 1, 2.0, 1, equal=False, **second)),
        *(one("transformers generate", 0, 8.0, 4, None), one("transformers generate", 1, 8.0, 4, None)),
    ]
    _, quick, other = (found["all"] for found in summarize(runs, ["plain", "quick", "transformers generate"]))
    assert quick["speed"] == [2.5, 3.0, 3.5]
    assert quick["speed_to_transformers"] == [4.0, 4.0, 4.0]
    assert quick["tokens_per_step"] == 8 / 3
    assert quick["tokens_per_second"] == [2.0, 2.0, 2.0]
    assert (quick["equal"], quick["compared"]) == (1, 2)
    assert (quick["rows_per_step"], quick["times_plain"]) == (4.0, [1.5, 1.5, 1.5])
    assert quick["guesses"] == {"lookup": [7, 3], "heads": [2, 0]}
    assert (other["equal"], other["compared"]) == (0, 0)
    assert (other["rows_per_step"], other["times_plain"], other["guesses"]) == (None, None, {})


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="max_new_tokens=0"):
        Settings(max_new_tokens=0)
    with pytest.raises(InputError, match="'keyed'"):
        Settings(sampling=Sampling(temperature=1.0, rule="rejection"))


def test_a_decoder_without_a_tokenizer_records_too(folder: Path) -> None:
    decoder = Decoder(load(str(folder), device="cpu").engine.model)
    found = Ours(decoder, Jacobi(window=3)).run(Task([1, 2, 3], Sampling(), 5, record=True))
    assert found.lane is not None
    assert "".join(text for step in found.lane for text in step["texts"]).split() == list(map(str, found.token_ids))
