"""One page from the results of a bench: the race, the drafts step by step, and charts.

The page is a single file that contains its data as JSON. It loads nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import read_json, write_whole

KIND, VERSION = "outpace bench", 2  # the results that it reads: docs/results-schema.md
TEMPLATE = Path(__file__).with_name("page.html")
ROOM = 1_500_000  # bytes for races, so that the page stays below 2 MB
_MARK = "/*DATA*/null"


def check_page(path: Path | None) -> None:
    """Raise InputError for a file that browsers would not open as a page. Called before the work that it shows."""
    if path is not None and path.suffix not in (".html", ".htm"):
        raise InputError(f"{path}: a page must end in .html.")


def write_report(results: Path | Mapping[str, Any], page: Path) -> list[str]:
    """Write the page, and return the tasks whose races were left out because the page would grow too large."""
    html, left_out = render(read_json(results, KIND, VERSION) if isinstance(results, Path) else results)
    write_whole(page, html)
    return left_out


def render(results: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The page, and the tasks whose races are not in it."""
    windows = {
        entry["label"]: (entry["settings"]["window"], entry["settings"]["ngram"])
        for entry in results["entries"]
        if entry["name"] == "lookahead"
    }
    races, left_out = _races(results["races"], windows)
    data = {
        "layers": results["fingerprint"]["layers"],
        **{name: results[name] for name in ("date", "about", "settings", "entries", "identical", "summary", "costs")},
        "depths": _depths(results["entries"], results["runs"]),
        "differences": [_difference(run) for run in results["runs"] if run["equal"] is False][:50],
        "skipped": len(results["skipped"]),
        "races": races,
    }
    return TEMPLATE.read_text(encoding="utf-8").replace(_MARK, _embedded(data)), left_out


def _embedded(data: Any) -> str:
    """JSON for a script element: nothing in it can end the element, or hide its end."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _races(
    stored: Sequence[Mapping[str, Any]], windows: Mapping[str, tuple[int, int]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """As many races as there is room for; the first one always, if necessary without drafts."""
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    room = ROOM
    for race in stored:
        compact = _compact(race, windows)
        size = len(_embedded(compact).encode())
        if size > room and not found:
            compact = _compact(race, windows, drafts=False)
            size = len(_embedded(compact).encode())
        if size > room and found:
            left_out.append(str(race["task"]))
            continue
        room -= size
        found.append(compact)
    return found, left_out


def _compact(race: Mapping[str, Any], windows: Mapping[str, tuple[int, int]], drafts: bool = True) -> dict[str, Any]:
    """A race with its words and sources as two lists, which steps refer to by index."""
    sources: dict[str, int] = {"model": 0}
    words: dict[str, int] = {}
    lanes = []
    for lane in race["lanes"]:
        steps = [_compact_step(step, race["words"], words, sources, drafts) for step in lane["steps"]]
        if drafts and lane["label"] in windows:
            for place, (step, short) in enumerate(zip(lane["steps"], steps, strict=True)):
                short["window"] = window_of(step["draft"], *windows[lane["label"]], place)
        lanes.append({**lane, "steps": steps})
    names = {name: race[name] for name in ("task", "prompt", "text")}
    return {**names, "words": list(words), "sources": list(sources), "lanes": lanes}


def _compact_step(
    step: Mapping[str, Any],
    texts: Mapping[str, str],
    words: dict[str, int],
    sources: dict[str, int],
    drafts: bool,
) -> dict[str, Any]:
    def number(name: str, known: dict[str, int]) -> int:
        return known.setdefault(name, len(known))

    found = {
        "at": round(step["at"], 5),
        "texts": step["texts"],
        "sources": [number(source, sources) for source in step["sources"]],
    }
    if drafts and "draft" in step:
        draft = step["draft"]
        found |= {
            "words": [number(texts[str(token)], words) for token in draft["tokens"]],
            "parents": draft["parents"],
            "from": [number(source, sources) for source in draft["sources"]],
            "candidates": draft["candidates"],
            "rows": draft["rows"],
        }
    return found


def window_of(draft: Mapping[str, Any], window: int, ngram: int, step: int) -> list[list[int]]:
    """Lookahead's window as rows of the draft, level by level from the spine; [] if the step has none.

    Its rows follow the candidates: first the spine, then column by column. A column that is among the candidates has no
    rows of its own: it is -1 at each level.
    """
    parents, depths, paths = draft["parents"], [0], [[0]]
    for row, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1)
        paths.append([*paths[parent], row])
    ends = list[int]()  # the last rows of chains of new rows
    for row, source in enumerate(draft["sources"]):
        if source == "window":
            if ends and parents[row] == ends[-1] == row - 1:
                ends.pop()
            ends.append(row)
    spine = window - 1 + max(0, ngram - 2 - step)  # longer until all levels are filled
    below = min(step, ngram - 2)
    first = ends.pop(0) if spine and ends else 0
    if depths[first] != spine or not (first or ends):
        return []
    columns = {depths[end] - below: paths[end][-below:] for end in ends if below}
    levels = zip(*(columns.get(column, [-1] * below) for column in range(spine + 1)), strict=True)
    return [paths[first], *map(list, levels)]


def _depths(entries: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each entry, by depth from 1: how many steps had a draft token there, and how many accepted one."""
    found = []
    for entry in entries:
        mine = [run for run in runs if run["label"] == entry["label"]]
        deepest = max((len(run["offered"]) for run in mine), default=0)
        offered, accepted = (
            [sum(run[name][depth] for run in mine if len(run[name]) > depth) for depth in range(deepest)]
            for name in ("offered", "accepted")
        )
        if deepest:
            found.append({"label": entry["label"], "offered": offered, "accepted": accepted})
    return found


def _difference(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("label", "task", "prompt", "turn", "repeat", "differs_at", "gap")}
