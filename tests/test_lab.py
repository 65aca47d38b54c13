"""scripts/lab on a tiny model: the widened model, the tables of README's figures, and every command that docs name."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import AdaDecode, Amphista, Block, Decoder, Hydra, Medusa, Sampling
from outpace.heads import BlockSettings
from outpace.heads.storing import Stored
from outpace.methods.headed import Ready
from outpace.models.hf import HFModel
from outpace.models.loading import load

from .test_attention import DEVICE, lists, placed, random_tree
from .test_cli import folder
from .test_cli_bench import wide
from .test_heads import random_heads
from .test_readme import PAGES
from .test_reproduce import trained

assert folder  # fixtures
assert wide
assert trained

SCRIPTS = Path(__file__).parents[1] / "scripts"
KINDS = ("medusa", "hydra", "amphista", "exits")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "questions.jsonl"
    questions = [("chat", 1, "abc abc abc"), ("math_reasoning", 2, "one two one two"), ("math_reasoning", 3, "z")]
    rows = [{"category": task, "question_id": number, "turns": [text]} for task, number, text in questions]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def arguments_of(*words: Any) -> Any:
    from lab.commands import parse

    return parse([*map(str, words)])


@pytest.mark.parametrize("kind", [Medusa, Hydra, Amphista, AdaDecode])
def test_widened_heads_guess_the_same(folder: Path, trained: Path, kind: Any) -> None:
    from lab.models import found_heads, widen, widen_ready

    model = load(str(folder), device="cpu").model
    narrow, broad = Decoder(model, runtime="plain"), Decoder(widen(model, 2), runtime="plain")
    given: Any = {"control": "fixed", "gamma": 0.01} if kind is AdaDecode else {"rows": 8}
    name = "exits" if kind is AdaDecode else kind.name
    ready = found_heads(HFModel(model), {name: str(trained / name)})[name]
    expected = list(narrow.stream([7, 8, 7, 8, 9], method=kind(heads=ready, **given), max_new_tokens=16))
    wider = kind(heads=widen_ready(ready, 2), **given)
    found = list(broad.stream([7, 8, 7, 8, 9], method=wider, max_new_tokens=16))
    assert [step.tokens for step in found] == [step.tokens for step in expected]
    assert [step.draft.tokens for step in found] == [step.draft.tokens for step in expected]
    assert any(len(step.draft) > 1 for step in found)


def test_widened_block_heads_guess_the_same(folder: Path) -> None:
    from lab.models import widen, widen_ready

    model = load(str(folder), device="cpu").model
    narrow, broad = Decoder(model, runtime="plain"), Decoder(widen(model, 2), runtime="plain")
    ready = Ready(random_heads("block", model, BlockSettings(count=4, layers="1,2", rank=8)), Stored({}))
    expected = list(narrow.stream([7, 8, 7, 8, 9], method=Block(heads=ready, rows=8), max_new_tokens=16))
    wider = Block(heads=widen_ready(ready, 2), rows=8)
    found = list(broad.stream([7, 8, 7, 8, 9], method=wider, max_new_tokens=16))
    assert [step.draft.tokens for step in found] == [step.draft.tokens for step in expected]
    assert any(len(step.draft) > 1 for step in found)


def columns(table: Any) -> dict[str, list[str]]:
    """The cells of a table by the first one of their row."""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return {str(first): list(map(str, rest)) for first, *rest in rows}


def test_speeds(wide: Path, trained: Path, data: Path, tmp_path: Path) -> None:
    from lab.methods import named, usual
    from lab.models import set_up
    from lab.speeds import acceptance, measured, speed, speed_table, task_table

    heads = [f"medusa={trained / 'medusa'}"]
    arguments = arguments_of(
        *("speeds", "--model", wide, "--data", data, "--times", 2, "--tokens", 16, "--heads", *heads)
    )
    setup = set_up(arguments)
    methods = named(usual(setup, 2), ["lookahead (4", "medusa with lookup (16", "auto without"])
    assert [*methods] == ["plain", "lookahead (4, 3, 4)", "medusa with lookup (16 rows)", "auto without heads"]
    runs = measured(setup, methods, arguments, theirs=True, out=tmp_path / "runs.jsonl")
    assert len(runs) == 3 * 6
    assert all(run["equal"] for run in runs)
    again = measured(setup, methods, arguments, theirs=True, out=tmp_path / "runs.jsonl")
    assert again == runs  # nothing was run again
    shown = columns(speed_table(runs))
    assert [*shown] == [*methods, "transformers generate", "transformers prompt lookup"]
    assert shown["plain"][1] == shown["transformers generate"][2] == "1.00"
    assert shown["plain"][3] == "1.00"
    assert all(cells[-1] == "3 of 3" for cells in shown.values())
    lookahead = [run for run in runs if run["label"] == "lookahead (4, 3, 4)"]
    assert acceptance(lookahead) == sum(len(run["token_ids"]) for run in lookahead) / sum(
        run["steps"] for run in lookahead
    )
    tasks = task_table(runs, "plain = 1", speed, "plain")
    assert [column.header for column in tasks.columns][1:3] == ["chat", "math_reasoning"]
    assert columns(tasks)["plain"] == ["1.00"] * 4


def test_tables_count_all_tokens_over_all_seconds() -> None:
    from lab.speeds import acceptance, speed_table, task_table

    def run(label: str, task: str, tokens: int, seconds: float, steps: int, pace: float, same: bool) -> dict[str, Any]:
        common = {"label": label, "task": task, "prompt": 0, "equal": same, "counts": {"pace": pace}}
        return {**common, "token_ids": [0] * tokens, "seconds": seconds, "steps": steps}

    runs = [
        run("plain", "chat", 10, 1.0, 10, 10.0, True),
        run("plain", "code", 30, 3.0, 30, 10.0, True),
        run("fast", "chat", 10, 0.5, 5, 30.0, True),
        run("fast", "code", 30, 0.5, 5, 9.0, False),
        {**run("transformers generate", "chat", 10, 4.0, 10, 0.0, True), "counts": {}},
    ]
    shown = columns(speed_table(runs))
    assert shown["fast"] == ["40.0", "4.00", "8.00", "4.00", "100.00", "0.90 code 0", "1 of 2"]
    assert shown["transformers generate"][:3] == ["2.5", "0.25", "1.00"]
    assert columns(task_table(runs[:4], "tokens/step", acceptance))["fast"] == ["2.00", "6.00", "4.00", "4.00"]


def test_pace_leaves_the_first_tokens_out() -> None:
    from lab.speeds import pace

    slow = [{"tokens": [0] * 32, "at": 10.0 * number} for number in (1, 2)]
    assert pace(slow) == 0.0
    assert pace([*slow, {"tokens": [0] * 32, "at": 24.0}]) == 8.0


def test_every_method_has_the_same_output(
    wide: Path, trained: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from lab import speeds

    heads = [f"{kind}={trained / kind}" for kind in KINDS]
    given = ("--model", wide, "--data", data, "--tokens", 8, "--each", 1, "--heads", *heads)
    monkeypatch.setattr(speeds, "SEEDS", range(1))
    speeds.equal(arguments_of("equal", *given))
    said = capsys.readouterr().out
    for name in ("jacobi", "lookahead", "draft-model", "auto", "medusa", "hydra", "amphista", "adadecode"):
        assert re.search(rf"{name}\W+2 of 2\W+2 of 2", said), name
    assert re.search(r"transformers generate\W+2 of 2", said)


def test_replay_counts_the_steps_that_decoding_takes(wide: Path, trained: Path, data: Path, capsys: Any) -> None:
    from lab.methods import published
    from lab.models import set_up
    from lab.replaying import count_steps, replay, written

    heads = [f"{kind}={trained / kind}" for kind in ("medusa", "hydra", "amphista")]
    words = ("--data", data, "--tokens", 12, "--each", 1, "--only", "medusa,", "--heads", *heads)
    arguments = arguments_of("replay", "--model", wide, *words)
    setup = set_up(arguments)
    prompt = [7, 8, 7, 8, 9]
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        text, states = written(setup, prompt, sampling, 20)
        for kind in ("medusa", "hydra with lookup", "amphista"):
            method = setup.decoder.prepare(published(setup.heads)[kind])
            expected = setup.decoder.generate(prompt, method=method, max_new_tokens=20, sampling=sampling)
            assert text[5:] == expected.token_ids
            assert count_steps(setup, method, sampling, 5, text, states) == expected.steps
    replay(arguments)
    assert "medusa, not coupled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words", "shown"),
    [
        ("together", ["--only", "jacobi"], r"jacobi \(16\)\W+3\W"),
        ("modes", ["--only", "jacobi", "--repeats", 1], r"jacobi \(16\)\W+3\W.*3 of 3\W+3 of 3"),
        (
            "texts",
            ["--bits", "--only", "auto"],
            r"digest[^:]*: [0-9a-f]{64}(?s:.*)auto\W+3\W+3 of 3.*3 of 3.*3 of 3\W+3 of 3",
        ),
        ("sampling", [], r"greedy\W.*1\.000"),
        ("steps", ["--only", "jacobi"], r"jacobi(\W+\d\.\d\d){4}"),
        ("ablate", ["--only", "auto without", "the same, no rec"], r"auto without heads(\W+\d\.\d\d){4}"),
        ("prices", ["--runtime", "plain", "--rows", 1, 2, "--repeats", 1], r"float32, exact, plain(\W+\d+\.\d){2}"),
    ],
)
def test_commands_run(command: str, words: list[Any], shown: str, wide: Path, data: Path, capsys: Any) -> None:
    from lab.commands import COMMANDS

    given = ("--model", wide, "--data", data, "--tokens", 6, "--together", 1, 3)
    COMMANDS[command](arguments_of(command, *given, *words))
    assert re.search(shown, capsys.readouterr().out)


def test_accuracies_of_all_kinds_on_the_same_answers(wide: Path, trained: Path, data: Path, capsys: Any) -> None:
    from lab.papers import accuracies, accuracies_on_data

    heads = [f"{kind}={trained / kind}" for kind in KINDS]
    arguments = arguments_of("accuracies", "--model", wide, "--data", data, "--tokens", 24, "--heads", *heads)
    found = accuracies_on_data(arguments)
    assert [*found] == ["medusa", "hydra", "amphista"]
    for lines in found.values():
        assert all(0 <= sum(line) <= 1.0001 for line in lines)  # a share for each rank
        assert max(map(max, lines)) > 0
    accuracies(arguments)
    assert f"{found['hydra'][0][0]:.3f}" in capsys.readouterr().out


def test_start_says_where_the_main_thread_was(wide: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("triton")
    from lab import commands, starting

    monkeypatch.setattr(commands, "ON_GPUS", ())
    monkeypatch.setattr(starting, "PERIOD", 0.001)
    starting.start(arguments_of("start", "--model", wide, "--times", 2))
    shown = capsys.readouterr().out
    assert re.search(r"[a-z]+\.[a-z_]+ +│ (torch|outpace|transformers) ", shown)
    assert "loading included" in shown


def test_packed_products_are_timed_in_every_format(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from lab import quantized

    monkeypatch.setattr(quantized, "OUTPUTS", 64)
    quantized.packed(arguments_of("packed", "--repeats", 1))
    shown = capsys.readouterr().out
    assert "8 rows / 1" in shown
    assert [kind.name for kind in quantized.FORMATS if kind.name not in shown] == []
    assert all(quantized.layer(kind)(torch.ones(1, quantized.INPUTS)).isfinite().all() for kind in quantized.FORMATS)


@pytest.mark.filterwarnings("ignore:adadecode. these exits are predicted")
def test_reproduce(wide: Path, trained: Path, tmp_path: Path) -> None:
    from lab.papers import reproduce

    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}))
    heads = [*(f"{kind}={trained / kind}" for kind in KINDS), f"math={trained / 'exits'}"]
    words = ("--model", wide, "--data", tmp_path / "q.jsonl", "--papers", "adadecode", "amphista", "--heads", *heads)
    more = ("--each", 1, "--tokens", 6, "--times", 2, "--out", tmp_path / "out")
    reproduce(arguments_of("reproduce", *words, *more))
    adadecode, amphista = sorted((tmp_path / "out").glob("*.md"))
    assert adadecode.name == "adadecode-smollm2-135m-times-2-cpu.md"
    assert "trained on math" in adadecode.read_text()
    assert "trained on math" not in amphista.read_text()


def mentioned() -> list[str]:
    texts = [re.sub(r"(?: \\)?\s+", " ", page.read_text(encoding="utf-8")) for page in PAGES]  # continued lines too
    found = [call for text in texts for call in re.findall(r"python scripts/lab (.+?)(?=`| #| python|$)", text)]
    return sorted({call.strip().replace("PAPER", "lookahead") for call in found if not call.startswith("--help")})


@pytest.mark.parametrize("command", mentioned())
def test_commands_of_the_docs_are_known(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lab import commands

    (tmp_path / "spec_bench.jsonl").write_text("")
    (tmp_path / "HumanEval.jsonl.gz").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "ON_GPUS", ())
    assert commands.parse(shlex.split(command)).what in commands.COMMANDS


def test_what_needs_a_gpu_says_so(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        arguments_of("shape")
    assert "shape needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("fused", [True, False])
def test_a_dense_mask_shows_what_slot_lists_do(fused: bool) -> None:
    from lab.graphs import Dense

    rng = random.Random(5)
    pool, rows = placed(20, random_tree(70, rng), rng)
    given, slots = lists(pool, rows, 0, False), pool.capacity + 1
    query = torch.randn(1, 6, 70, 16, device=DEVICE)
    keys, values = torch.randn(2, 1, 2, slots, 16, device=DEVICE)
    dense = Dense(2, fused)
    expected = torch.ops.outpace.slot_attention(query, keys, values, *given, 0.25, 0.0)
    for _ in range(2):  # two layers, one mask
        torch.testing.assert_close(dense(query, keys, values, given, 0.25, 0.0), expected, rtol=1e-5, atol=1e-5)


def test_every_ablation_has_its_sources() -> None:
    from lab.methods import Parts, ablations
    from lab.models import Setup

    for method in ablations(Setup(None, None, {})).values():
        if isinstance(method, Parts):
            sources = method.plan(None).sources(2, torch.device(DEVICE))
            assert len(sources) == bool(method.window) + bool(method.history) + bool(method.ranks)
