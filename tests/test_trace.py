"""Traces, and the receipt: what was written passes, what was changed does not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch

from outpace import (
    Autoregressive,
    Decoder,
    DraftModel,
    InputError,
    InvalidLogits,
    Jacobi,
    Lookahead,
    Medusa,
    Method,
    ModelError,
    PromptLookup,
    Sampling,
)
from outpace.models.toy import Bigram
from outpace.receipt import Receipt, check
from outpace.trace import Trace, read_trace, record, settings_of

from .models import CONTEXT, tiny, tiny_chain

METHODS = [Autoregressive(), Jacobi(window=4), PromptLookup(), Lookahead(window=4, ngram=3, guesses=4)]
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
SAMPLED = Sampling(
    temperature=0.9,
    top_k=30,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={3: -2.0},
    seed=11,
)


def write(decoder: Decoder, method: Method, sampling: Sampling | None = None, length: int = 24) -> Trace:
    options: dict[str, Any] = {"sampling": sampling or Sampling(), "max_new_tokens": length}
    steps = list(decoder.stream(PROMPT, method=method, **options))
    return record(decoder, method, PROMPT, steps, **options)


def reread(trace: Trace, path: Path, change: Callable[[dict[str, Any]], None] = lambda stored: None) -> Trace:
    """The trace from its file, which somebody changed."""
    trace.save(path)
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    return read_trace(path)


def changed(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sampling: Sampling | None = None, length: int = 24
) -> Receipt:
    decoder = Decoder(tiny("Llama"))
    trace = write(decoder, Lookahead(window=4, ngram=3, guesses=4), sampling, length)
    return check(decoder, reread(trace, tmp_path / "trace.json", change))


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(temperature=1.3, seed=2)])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_what_was_written_passes(tmp_path: Path, method: Method, sampling: Sampling) -> None:
    decoder = Decoder(tiny("Llama"))
    trace = reread(write(decoder, method, sampling), tmp_path / "trace.json")
    receipt = check(decoder, trace)
    assert receipt.passed, receipt.verdict
    assert [mark.picked for mark in receipt.marks] == [mark.token for mark in receipt.marks] == trace.tokens
    assert all(mark.behind == 0 for mark in receipt.marks)
    assert receipt.verdict.startswith("pass: 24 of 24 tokens chosen again")
    assert decoder.engine.pool.held == 0


@pytest.mark.parametrize("name", ["Gemma2", "GPT2", "Mixtral"])
def test_other_architectures(name: str) -> None:
    decoder = Decoder(tiny(name))
    assert check(decoder, write(decoder, PromptLookup())).passed


def test_a_model_of_chains() -> None:
    decoder = Decoder(tiny_chain("Bloom"), method=Autoregressive())
    assert check(decoder, write(decoder, PromptLookup(tree=False))).passed


def test_a_long_answer_in_several_forwards() -> None:
    decoder = Decoder(tiny("Llama"))
    trace = write(decoder, PromptLookup(), length=1000)
    assert len(trace.tokens) == CONTEXT - len(PROMPT) > 128
    assert check(decoder, trace).passed


def test_margins_are_gaps_of_logits() -> None:
    decoder = Decoder(tiny("Llama"))
    trace = write(decoder, Autoregressive())
    with torch.no_grad():
        logits = tiny("Llama")(torch.tensor([[*PROMPT, *trace.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.topk(2).values
    margins = [mark.margin for mark in check(decoder, trace).marks]
    assert margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-3)


def test_a_near_tie_is_named_and_passes() -> None:
    table = torch.eye(4).roll(1, 1)
    table[2, 1] = 1 - 1e-4  # after 2, token 1 is nearly as good as 3
    decoder = Decoder(Bigram(table))
    trace = write_bigram(decoder, 6)
    assert trace.tokens == [1, 2, 3, 0, 1, 2]
    receipt = check(decoder, trace)
    assert receipt.near_ties == [3]
    assert receipt.passed
    decoder.engine.model.table[2, 1] = 1 + 1e-4  # type: ignore[attr-defined] # another machine rounds the other way
    receipt = check(decoder, trace)
    assert receipt.passed
    assert receipt.verdict == "pass: 5 of 6 tokens chosen again, 1 near-ties"
    assert not check(decoder, trace, tolerance=1e-5).passed


def write_bigram(decoder: Decoder, length: int) -> Trace:
    steps = list(decoder.stream([0], method=Autoregressive(), max_new_tokens=length))
    return record(decoder, Autoregressive(), [0], steps, sampling=Sampling(), max_new_tokens=length)


def test_a_changed_token_fails(tmp_path: Path) -> None:
    def change(stored: dict[str, Any]) -> None:
        tokens = stored["steps"][3]["tokens"]
        tokens[-1] = (tokens[-1] + 1) % 97

    receipt = changed(tmp_path, change)
    assert not receipt.passed
    place = sum(mark.token == mark.picked for mark in receipt.marks[: receipt.wrong])
    assert receipt.wrong == place + 1
    assert f"token {receipt.wrong} is" in receipt.verdict


def test_a_changed_seed_fails(tmp_path: Path) -> None:
    receipt = changed(tmp_path, lambda stored: stored["sampling"].update(seed=12), SAMPLED)
    assert receipt.wrong is not None


def test_a_changed_prompt_fails(tmp_path: Path) -> None:
    assert not changed(tmp_path, lambda stored: stored["prompt"].__setitem__(0, 9)).passed


def test_missing_steps_fail(tmp_path: Path) -> None:
    def cut(stored: dict[str, Any]) -> None:
        del stored["steps"][-2:]

    assert "steps are missing" in changed(tmp_path, cut).verdict

    def cut_and_mend(stored: dict[str, Any]) -> None:
        cut(stored)
        stored["steps"][-1]["finish"] = "stop"

    assert "the trace's finish reason is 'stop'" in changed(tmp_path, cut_and_mend).verdict


def test_changed_steps_fail(tmp_path: Path) -> None:
    def claim(stored: dict[str, Any]) -> None:
        stored["steps"][2]["sources"] = ["pool"] * len(stored["steps"][2]["sources"])

    assert "step 3 did not accept" in changed(tmp_path, claim).verdict

    def root(stored: dict[str, Any]) -> None:
        stored["steps"][1]["draft"]["tokens"][0] = 96

    assert "step 2 drafts after token 96" in changed(tmp_path, root).verdict

    def longer(stored: dict[str, Any]) -> None:
        stored["max_new_tokens"] = 20

    assert "continues after its end (length) at token 20" in changed(tmp_path, longer).verdict


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stored: stored.update(version=2), "has version 2; this Outpace .* reads version 1"),
        (lambda stored: stored.update(kind="outpace bench"), "is not an outpace trace file"),
        (lambda stored: stored.pop("prompt"), "has no 'prompt'"),
        (lambda stored: stored["steps"][0].pop("draft"), "has no 'draft'"),
        (lambda stored: stored["prompt"].append("x"), "'x' must be a whole number"),
        (lambda stored: stored["steps"][0]["draft"]["parents"].__setitem__(0, 5), "do not form a tree"),
        (lambda stored: stored["steps"][0]["draft"]["tokens"].append(5), "differ in length"),
        (lambda stored: stored["sampling"].update(temperature=-1), "temperature=-1"),
        (lambda stored: stored["sampling"].update(warmth=1), "warmth"),
        (lambda stored: stored["prompt"].append(9999), "token id 9999"),
        (lambda stored: stored.update(prompt=[]), "0 tokens of prompt"),
        (lambda stored: stored["sampling"].update(rule="rejection", temperature=1.0), "the rule 'rejection'"),
    ],
)
def test_broken_traces_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        changed(tmp_path, change)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(Decoder(tiny("Llama")), Autoregressive()).save(path)
    path.write_text(path.read_text()[:-200])
    with pytest.raises(InputError, match="truncated"):
        read_trace(path)
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.json")


def test_another_model_is_refused() -> None:
    trace = write(Decoder(tiny("Llama")), Autoregressive())
    with pytest.raises(ModelError, match="other weights"):
        check(Decoder(tiny("Llama", seed=1)), trace)
    with pytest.raises(ModelError, match="layers 4, not 3"):
        check(Decoder(tiny("Llama", num_hidden_layers=3)), trace)


def test_processors_cannot_be_written() -> None:
    decoder = Decoder(tiny("Llama"))
    with pytest.raises(InputError, match="processors are code"):
        write(decoder, Autoregressive(), Sampling(processors=[lambda ids, scores: scores]))


def test_settings_are_plain_values() -> None:
    class Loaded(NamedTuple):
        heads: torch.nn.Module
        name: str

    method = replace(Medusa(tree=((0,), (0, 0))), heads=Loaded(torch.nn.Linear(2, 2), "mine/medusa"))
    found = settings_of(method)
    assert found["heads"] == "mine/medusa"
    assert found["tree"] == [[0], [0, 0]]
    assert json.loads(json.dumps(found)) == found
    assert settings_of(DraftModel(model=Bigram(torch.eye(3))))["model"] == "bigram"


def test_nan_and_bad_tolerances() -> None:
    decoder = Decoder(Bigram(torch.eye(3).roll(1, 1)))
    trace = write_bigram(decoder, 4)
    with pytest.raises(InputError, match="tolerance=-1"):
        check(decoder, trace, tolerance=-1)
    decoder.engine.model.table[2] = math.nan  # type: ignore[attr-defined]
    with pytest.raises(InvalidLogits, match="at new token 3"):
        check(decoder, trace)


def test_a_trace_waits_while_another_thread_has_the_model() -> None:
    decoder = Decoder(tiny("Llama"))
    made = Thread(
        target=record,
        args=(decoder, Autoregressive(), PROMPT, []),
        kwargs={"sampling": Sampling(), "max_new_tokens": 4},
        daemon=True,
    )
    with decoder.engine.turns:
        made.start()
        made.join(0.2)
        assert made.is_alive()
    made.join()
