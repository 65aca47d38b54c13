"""`outpace verify`, `bench` and `report` on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import Result

from .test_cli import assert_refused, folder, generate, heads, outpace

assert folder  # fixtures: a tiny Llama whose tokens are bytes
assert heads  # and heads for it


@pytest.fixture(scope="session")
def wide(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a context that our prompts fit in, letter by letter."""
    copy = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    return copy


class TestVerify:
    @pytest.fixture
    def trace(self, folder: Path, tmp_path: Path) -> Path:
        path = tmp_path / "trace.json"
        result = generate(folder, "--max-new-tokens", 12, "--temperature", 0.8, "--seed", 5, "--trace", path)
        assert result.exit_code == 0
        assert f"outpace verify {path}" in result.stderr
        return path

    def test_a_trace_changes_nothing_on_standard_output(self, folder: Path, tmp_path: Path) -> None:
        options = ("--max-new-tokens", 12, "--stop", "q")
        plain, traced = (
            generate(folder, *options, *more) for more in ((), ("--trace", tmp_path / "deep" / "trace.json"))
        )
        assert traced.stdout == plain.stdout
        as_json = generate(folder, *options, "--json", "--trace", tmp_path / "trace.json")
        assert json.loads(as_json.stdout)["text"] + "\n" == plain.stdout
        assert as_json.stderr == ""
        assert outpace("verify", tmp_path / "trace.json", "--device", "cpu").exit_code == 0

    def test_pass(self, trace: Path) -> None:
        result = outpace("verify", trace, "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[-1].startswith("pass: 12 of 12 tokens chosen again")
        found = json.loads(outpace("verify", trace, "--device", "cpu", "--json").stdout)
        assert found["passed"] is True
        assert len(found["margins"]) == 12
        five = sorted(range(12), key=lambda place: found["margins"][place])[:5]
        shown = [words[0] for line in result.stdout.splitlines() if (words := line.split()) and words[0].isdigit()]
        assert shown == [str(place + 1) for place in sorted(five)], result.stdout

    def test_the_weights_of_the_run_are_loaded_again(self, folder: Path, tmp_path: Path) -> None:
        generate(folder, "--weights", "q8", "--max-new-tokens", 6, "--trace", tmp_path / "trace.json")
        result = outpace("verify", tmp_path / "trace.json", "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert outpace("verify", tmp_path / "trace.json", "--device", "cpu", "--weights", "q4").exit_code == 1
        refused = outpace("verify", tmp_path / "trace.json", "--device", "cpu", "--weights", "float32")
        assert_refused(refused, "packed weights")

    def test_fail(self, trace: Path) -> None:
        stored = json.loads(trace.read_text())
        stored["sampling"]["seed"] = 6
        trace.write_text(json.dumps(stored))
        result = outpace("verify", trace, "--device", "cpu")
        assert result.exit_code == 1
        assert result.stdout.splitlines()[-1].startswith("fail: token ")
        assert json.loads(outpace("verify", trace, "--device", "cpu", "--json").stdout)["wrong"] is not None

    def test_refused(self, trace: Path, tmp_path: Path) -> None:
        assert_refused(outpace("verify", tmp_path / "none.json"), "none.json could not be read")
        assert_refused(outpace("verify", trace, "--model", "/nowhere"), "/nowhere")
        trace.write_text(trace.read_text()[:100])
        assert_refused(outpace("verify", trace), "truncated")


def test_heads_can_be_raced_traced_measured_and_verified(folder: Path, heads: Path, tmp_path: Path) -> None:
    options = ("--model", folder, "--device", "cpu", "--max-new-tokens", 10)
    given = ("--set", f"medusa.heads={heads / 'medusa'}")
    raced = outpace("race", "hello", *options, "--methods", "autoregressive,medusa", *given, "--json")
    assert json.loads(raced.stdout)["identical"] is True
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "1?", "answer": "1"}))
    files = ("--data", tmp_path / "questions.jsonl", "--out", tmp_path / "results.json", "--traces", tmp_path / "t")
    result = outpace("bench", *options, "--methods", "medusa", *given, *files, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["entries"][1]["settings"]["heads"] == str(heads / "medusa")
    for trace in (tmp_path / "t").iterdir():
        assert outpace("verify", trace, "--device", "cpu").exit_code == 0


SMALL = ("--tasks", "math", "--each", 2, "--max-new-tokens", 10, "--device", "cpu", "--raw")


def bench(folder: Path, out: Path, *options: object) -> Result:
    return outpace("bench", "--model", folder, "--out", out, *SMALL, *options)


class TestBench:
    def test_table(self, wide: Path, tmp_path: Path) -> None:
        result = bench(wide, tmp_path / "results.json")
        assert result.exit_code == 0, result.output
        for word in ("autoregressive", "prompt-lookup", "lookahead", "transformers generate", "2 of 2"):
            assert word in result.stdout
        assert "outpace report" in result.stderr

    def test_json_is_all_of_standard_output(self, wide: Path, tmp_path: Path) -> None:
        out = tmp_path / "results.json"
        sets = ("--set", "jacobi.window=3", "--set", "jacobi.window=5")
        result = bench(wide, out, "--methods", "jacobi", *sets, "--no-transformers", "--json")
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\n") == 1
        found = json.loads(result.stdout)
        labels = ["autoregressive", "jacobi window=3", "jacobi window=5"]
        assert [entry["label"] for entry in found["entries"]] == labels
        assert found["entries"][1]["settings"]["window"] == 3
        assert found["identical"] is True
        stored = json.loads(out.read_text())
        assert stored["summary"] == found["summary"]
        assert len(stored["runs"]) == 6

    def test_every_run_of_ours_can_be_verified(self, wide: Path, tmp_path: Path) -> None:
        sampled = ("--temperature", 0.7, "--seed", 3, "--set", "lookahead.window=3")
        assert bench(wide, tmp_path / "results.json", *sampled, "--traces", tmp_path / "traces").exit_code == 0
        traces = sorted((tmp_path / "traces").iterdir())
        assert len(traces) == 8
        assert traces[2].name == "math-0-0-0-lookahead_window=3.json"
        for trace in traces:
            assert outpace("verify", trace, "--device", "cpu").exit_code == 0

    def test_a_second_call_repeats_nothing(self, wide: Path, tmp_path: Path) -> None:
        out = tmp_path / "results.json"
        assert bench(wide, out).exit_code == 0
        runs = json.loads(out.read_text())["runs"]
        again = bench(wide, out)
        assert "12 runs were finished before" in again.stderr
        assert json.loads(out.read_text())["runs"] == runs
        assert_refused(bench(wide, out, "--max-new-tokens", 11), "another bench", "max_new_tokens was 10")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--tasks", "maths"), ("unknown task 'maths'", "Did you mean 'math'")),
            (("--methods", "lookahed"), ("Did you mean 'lookahead'",)),
            (("--set", "jacobi.window=3"), ("unknown method in this bench 'jacobi'",)),
            (("--set", "window=3"), ("METHOD.NAME=VALUE",)),
            (("--set", "lookahead.window=x"), ("must be a whole number",)),
            (("--repeats", 0), ("repeats=0 must be 1 or more",)),
            (("--out", "results.txt"), ("must end in .json",)),
            (("--data", "/nowhere"), ("/nowhere could not be read",)),
            (("--runtime", "grahps"), ("Did you mean 'graphs'",)),
            (("--methods", "lookahead,lookahead"), ("two entries of the bench are the same",)),
        ],
    )
    def test_mistakes(self, wide: Path, tmp_path: Path, options: tuple[object, ...], words: tuple[str, ...]) -> None:
        assert_refused(bench(wide, tmp_path / "results.json", *options), *words)


class TestReport:
    def test_page(self, wide: Path, tmp_path: Path) -> None:
        out = tmp_path / "results.json"
        bench(wide, out)
        result = outpace("report", out, "-o", tmp_path / "deep" / "race.html")
        assert result.exit_code == 0, result.output
        assert result.stdout == ""
        assert "file://" in result.stderr
        page = (tmp_path / "deep" / "race.html").read_text()
        assert "transformers prompt lookup" in page
        assert len(page) < 2_000_000

    @pytest.mark.parametrize("as_json", [(), ("--json",)])
    def test_a_race_as_a_page(self, folder: Path, tmp_path: Path, as_json: tuple[str, ...]) -> None:
        options = ("--model", folder, "--device", "cpu", "--max-new-tokens", 12)
        result = outpace("race", "hello", *options, "--page", tmp_path / "race.html", *as_json)
        assert result.exit_code == 0, result.output
        assert "race.html" in result.stderr
        page = (tmp_path / "race.html").read_text()
        for name in ("autoregressive", "jacobi", "prompt-lookup", "lookahead"):
            assert f'"label":"{name}"' in page
        assert_refused(outpace("race", "hello", *options, "--page", "race.pdf"), "must end in .html")

    def test_mistakes(self, tmp_path: Path) -> None:
        assert_refused(outpace("report", tmp_path / "none.json"), "none.json could not be read")
        (tmp_path / "other.json").write_text("{}")
        assert_refused(outpace("report", tmp_path / "other.json"), "is not an outpace bench file")
        assert_refused(outpace("report", tmp_path / "other.json", "-o", "page.pdf"), "a page must end in .html")
        assert_refused(outpace("report", tmp_path / "other.json", "--plot", "a.doc"), "must end in .png or .svg")
