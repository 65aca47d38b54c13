"""`outpace verify`, `bench` and `report` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_cli import assert_refused, folder, generate, outpace

assert folder  # the fixture: a tiny Llama whose tokens are bytes


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
        assert result.stdout.splitlines()[-1].startswith("pass: 12 of 12 tokens picked again")
        found = json.loads(outpace("verify", trace, "--device", "cpu", "--json").stdout)
        assert found["passed"] is True
        assert len(found["margins"]) == 12

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
        assert_refused(outpace("verify", trace), "cut short")
