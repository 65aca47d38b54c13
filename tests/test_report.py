"""The page: whole, small, on its own, and safe from what texts may hold. The browser's part is in scripts/look.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outpace import Decoder, InputError, Lookahead, report
from outpace.bench import results as bench_results
from outpace.chart import save_speeds
from outpace.draft import Draft
from outpace.methods.lookahead import _Drafter
from outpace.report import render, window_of, write_report

from .models import tiny

EVIL = "</script><script>alert(1)</script><!-- \u2028 é 日本"


GUESSES = {"autoregressive": "prompt", "lookahead": "window", "adadecode": "exit 2"}  # where they come from


def lane(label: str, steps: int = 3, rows: int = 4, equal: bool | None = True) -> dict[str, Any]:
    draft = {
        "tokens": list(range(rows)),
        "parents": [row - 1 for row in range(rows)],
        "candidates": rows,
        "sources": ["model", *[GUESSES[label]] * (rows - 1)],
        "rows": [0, 1],
    }
    texts = [EVIL, " b"]
    step = {"tokens": [1, 2], "texts": texts, "sources": ["prompt", "model"], "draft": draft}
    found = [{**step, "at": 0.1 * (number + 1)} for number in range(steps)]
    return {"label": label, "equal": equal, "differs_at": None, "gap": None, "steps": found}


def figures() -> dict[str, Any]:
    three = [0.9, 1.0, 1.1]
    counts = {"runs": 1, "tokens": 6, "steps": 3, "tokens_per_step": 2.0, "equal": 1, "compared": 1}
    steps = {"rows_per_step": 4.0, "guesses": {EVIL: [9, 3]}, "times_plain": three}
    return {**counts, **steps, "tokens_per_second": three, "speed": three, "speed_to_transformers": None}


def results(races: int = 1, **options: Any) -> dict[str, Any]:
    labels: dict[str, dict[str, Any]] = {
        "autoregressive": {},
        "lookahead": {"window": 3, "ngram": 3},
        "adadecode": {},
    }
    run = {"task": "code", "prompt": 0, "turn": 0, "repeat": 0, "equal": True, "differs_at": None, "gap": None}
    words = {str(number): EVIL for number in range(options.get("rows", 4))}
    names = ("about", "model", "device", "dtype", "runtime", "torch", "transformers", "outpace")
    return {
        "kind": "outpace bench",
        "version": 2,
        "date": "2026-01-01",
        "fingerprint": {"layers": 8},
        "about": dict.fromkeys(names, EVIL),
        "settings": {"max_new_tokens": 6, "data": "", "sampling": {"temperature": 0.0, "seed": 0}},
        "entries": [
            {"label": label, "name": label, "settings": settings, "lossless": True, "own": True}
            for label, settings in labels.items()
        ],
        "identical": True,
        "summary": [{"label": label, "all": figures(), "tasks": {"code": figures()}} for label in labels],
        "costs": {"rows": [1, 2, 4], "contexts": [128], "seconds": [[0.01, 0.01, 0.02]]},
        "races": [
            {
                "task": f"code{n}",
                "prompt": 0,
                "text": EVIL,
                "words": words,
                "lanes": [lane(la, **options) for la in labels],
            }
            for n in range(races)
        ],
        "skipped": [],
        "runs": [{**run, "label": label, "offered": [3, 3, 3], "accepted": [3, 1, 0]} for label in labels],
    }


def data_of(page: str) -> Any:
    """What the page's script reads."""
    text = next(line for line in page.split("\n") if line.startswith("const data = "))
    return json.loads(text.removeprefix("const data = ").removesuffix(";"))


def test_nothing_in_the_data_can_leave_its_place() -> None:
    page, _ = render(results())
    assert page.count("<script") == page.count("</script>") == 1
    data = data_of(page)
    assert data["races"][0]["lanes"][0]["steps"][0]["texts"][0] == EVIL
    assert data["depths"][1] == {"label": "lookahead", "offered": [3, 3, 3], "accepted": [3, 1, 0]}
    assert data["summary"][1]["all"]["guesses"] == {EVIL: [9, 3]}


def test_the_page_is_on_its_own() -> None:
    page, _ = render(results())
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    for word in ("fetch(", "import(", "XMLHttpRequest", "@import"):
        assert word not in page


def test_drafts_come_back_from_their_short_form() -> None:
    stored = results()
    race = data_of(render(stored)[0])["races"][0]
    step, short = stored["races"][0]["lanes"][0]["steps"][0], race["lanes"][0]["steps"][0]
    draft = step["draft"]
    assert [race["sources"][number] for number in short["sources"]] == step["sources"]
    assert [race["sources"][number] for number in short["from"]] == draft["sources"]
    assert [race["words"][number] for number in short["words"]] == [EVIL] * 4
    assert (short["parents"], short["rows"], short["candidates"]) == (draft["parents"], [0, 1], 4)


def watched_windows(monkeypatch: pytest.MonkeyPatch, **settings: int) -> tuple[list[Any], list[list[list[int]]]]:
    """The steps of a text by lookahead, and its window at each."""
    windows: list[list[list[int]]] = []
    draft = _Drafter.draft

    def watched(self: _Drafter, room: int) -> Draft:
        found = draft(self, room)
        windows.append([[found.tokens[0], *self.levels[0]], *map(list, self.levels[1:])] if self.tips else [])
        return found

    monkeypatch.setattr(_Drafter, "draft", watched)
    decoder = Decoder(tiny("Llama"), None, Lookahead(**settings))
    return list(decoder.stream([5, 9, 5, 9, 5, 9, 7], max_new_tokens=40)), windows


@pytest.mark.parametrize("settings", [(4, 4, 4), (1, 5, 3), (7, 3, 2), (15, 5, 15), (3, 2, 3)])
@pytest.mark.parametrize("others", [{}, {"published": True, "prompt_pool": False}])
def test_the_window_is_found_in_the_tree(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[int, int, int], others: dict[str, Any]
) -> None:
    window, ngram, guesses = settings
    steps, windows = watched_windows(monkeypatch, **others, window=window, ngram=ngram, guesses=guesses)
    found = 0
    for place, (step, expected) in enumerate(zip(steps, windows, strict=True)):
        draft = {"tokens": step.draft.tokens, "parents": step.draft.parents, "sources": step.draft.sources}
        levels = window_of(draft, window, ngram, place)
        if not levels:
            continue
        assert list(map(len, levels)) == list(map(len, expected))
        for rows, tokens in zip(levels, expected, strict=True):
            found += sum(row >= 0 for row in rows)
            assert all(row < 0 or step.draft.tokens[row] == token for row, token in zip(rows, tokens, strict=True))
    assert found > 0.6 * sum(map(len, (level for levels in windows for level in levels)))


def test_a_large_bench_makes_a_small_page() -> None:
    page, left_out = render(results(races=6, steps=128, rows=160))
    assert len(page.encode()) < 2_000_000
    assert left_out == [f"code{number}" for number in range(len(data_of(page)["races"]), 6)]
    assert left_out
    page, _ = render(results(races=1, steps=800, rows=300))  # one race alone is too large: it stays, without trees
    assert len(page.encode()) < 2_000_000
    assert "parents" not in data_of(page)["races"][0]["lanes"][0]["steps"][0]


def test_it_reads_what_the_bench_writes_and_nothing_older(tmp_path: Path) -> None:
    assert (report.KIND, report.VERSION) == (bench_results.KIND, bench_results.VERSION)
    path, page = tmp_path / "results.json", tmp_path / "report.html"
    path.write_text(json.dumps(results()))
    assert write_report(path, page) == []
    assert "<title>" in page.read_text()
    page.unlink()
    path.write_text(json.dumps({**results(), "version": 0}))
    with pytest.raises(InputError, match=r"version 0; this Outpace .* reads version 2"):
        write_report(path, page)
    assert not page.exists()


def test_speeds_as_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_speeds(results(), tmp_path / "speeds.svg")
    assert (tmp_path / "speeds.svg").stat().st_size > 1000
    nothing = {**figures(), "speed": None}
    summary = [{"label": "all left out", "all": nothing, "tasks": {"code": nothing}}]
    save_speeds({**results(), "summary": summary}, tmp_path / "speeds.png")


@pytest.mark.skipif(
    find_spec("playwright") is None or shutil.which("chromium") is None, reason="needs playwright and chromium"
)
def test_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(results(races=2, steps=9))[0], encoding="utf-8")
    script = Path(__file__).parents[1] / "scripts" / "look.py"
    done = subprocess.run([sys.executable, script, page, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("report-*.png"))) == 4
    assert len(list(tmp_path.glob("steps-lookahead-*.png"))) == len(list(tmp_path.glob("steps-adadecode-*.png"))) == 4


def test_without_races_and_costs() -> None:
    stored = {**results(), "races": [], "costs": None}
    assert data_of(render(stored)[0])["races"] == []
