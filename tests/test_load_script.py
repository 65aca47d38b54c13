"""scripts/load.py and its clients, on a tiny model: figures and verdicts, not speeds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from .serving import new_decoder

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    sys.modules.pop("load", None)
    import load

    return load


def test_loops_count_tokens_and_lost_requests(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = new_decoder()
    arguments = argparse.Namespace(times=1, clients=[2], seconds=0.3, tokens=12, beside=2)
    with load.serving(decoder, warm=False) as (_, clients):
        auto, plain = load.loops(clients, ["hello", "one two one two"], 2, arguments)
        bodies = [
            load.body_of("hello", 12, plain=True),
            {"messages": []},
            {**load.body_of("x", 900, True), "leave": 0.05},
        ]
        good, bad, left = sorted(clients.run(bodies, 3, "lost", count=3), key=lambda record: record[5] or "")
        own = load.own_cost(decoder, clients, ["hello", "x"], arguments)
    assert auto["requests"] >= 4
    assert auto["lost"] == plain["lost"] == 0
    assert (good[3], good[4], good[5]) == (13, 12, None)
    assert good[0] < good[1] <= good[2]
    assert bad[5].startswith("HTTP/1.1 400 Bad Request: messages")
    assert left[5] == "left"
    lines = [{**auto, "clients": 16, "first_token_ms": 151}, {**plain, "lost": 1, "tokens_per_second": 9.0}]
    assert not load.judged(lines, {**own, "cost": 0.01}, arguments)
    said = capsys.readouterr().out
    assert "MISSED 16 clients: first token after 151 ms, at most 150" in said
    assert "MISSED 1 requests lost, at most 0" in said
    assert "met    the server's own cost at 1 client: 1.0%, at most 3 %" in said


def test_speed_counts_what_came_between_two_times(load: Any) -> None:
    records = [[0, 1.0, 3.0, 5, 20, None], [0, 0.0, 1.0, 5, 99, None], [0, 1.0, 3.0, 5, 20, "left"]]
    assert load.speed(records, 1.0, 2.0) == 10


def test_memory_and_slots(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = new_decoder()
    arguments = argparse.Namespace(times=1, clients=[2], seconds=1.0, tokens=12, data=None, settled=0.0)
    load.memory(decoder, arguments)
    said = capsys.readouterr().out
    assert "met    0 slots lost" in said
    assert "met    0 requests lost" in said


def test_texts_under_load_are_those_of_each_request_alone(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = new_decoder()
    arguments = argparse.Namespace(times=1, clients=[4], seconds=0.2, tokens=12, data=None, requests=12)
    assert load.equal(decoder, arguments)
    assert "met    0 of 12 texts differ" in capsys.readouterr().out

    def with_a_fault(clients: Any, bodies: Any, several: int, key: str, **how: Any) -> Any:
        found = run(clients, bodies, several, key, **how)
        if key == "quiet":
            found[3][7][0][0] += "!"
        return found

    run = load.Clients.run
    monkeypatch.setattr(load.Clients, "run", with_a_fault)
    assert not load.equal(decoder, arguments)
    assert "MISSED 1 of 12 texts differ" in capsys.readouterr().out
