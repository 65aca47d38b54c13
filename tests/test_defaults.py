"""What a model's generation_config asks for: the text is the one of transformers' generate(do_sample=False)."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outpace import (
    Autoregressive,
    Decoder,
    InputError,
    Lookahead,
    OutpaceWarning,
    PromptLookup,
    Sampling,
    receipt,
    trace,
)
from outpace.bench.entries import Ours, Task, Transformers
from outpace.parallel import ParallelDecoder, Ranks

from .models import tiny
from .ranks import in_threads
from .test_cli import folder, outpace  # noqa: F401 (a fixture)

PROMPT = [17, 72, 8, 32, 15, 63, 57, 60, 83, 48, 11, 5, 11, 11]
METHODS = [Autoregressive(), Lookahead(window=4, ngram=3), PromptLookup()]
NEW = 20


def model_with(**wishes: Any) -> Any:
    """A model with a generation_config of its own."""
    model = copy.copy(tiny("Qwen2"))
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, **wishes)
    return model


def theirs(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(ids, **given)[0, len(prompt) :].tolist()


PLAIN = theirs(model_with(), PROMPT)
WISHES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": PLAIN[2:4]},
    {"begin_suppress_tokens": PLAIN[:1]},
    {"bad_words_ids": [PLAIN[3:5], PLAIN[8:9]]},
    {"sequence_bias": [[PLAIN[1:3], -9.0]], "repetition_penalty": 1.3},
    {"eos_token_id": PLAIN[4], "min_new_tokens": 9},
    {"eos_token_id": PLAIN[4], "min_length": 20},
    {"eos_token_id": PLAIN[4], "exponential_decay_length_penalty": (3, 1.5)},
    {"forced_eos_token_id": 9},
    {"encoder_repetition_penalty": 1.4},
    {"encoder_no_repeat_ngram_size": 2},
    {"guidance_scale": 1.5},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "renormalize_logits": True, "top_k": 3, "temperature": 0.2},
]


@pytest.mark.parametrize("wishes", WISHES, ids=lambda wishes: "+".join(wishes))
def test_the_text_is_transformers_own(wishes: dict[str, Any]) -> None:
    model = model_with(**wishes)
    expected = theirs(model, PROMPT)
    assert expected != PLAIN
    decoder = Decoder(model)
    for method in (METHODS[0], METHODS[2]):
        assert decoder.generate(PROMPT, method=method, max_new_tokens=NEW).token_ids == expected
    others = [PROMPT[:1], PROMPT[:4]]
    found = decoder.generate([PROMPT, *others], method=METHODS[1], max_new_tokens=NEW)
    assert [result.token_ids for result in found] == [expected, *(theirs(model, prompt) for prompt in others)]


def test_what_is_given_wins_and_the_rest_is_the_models() -> None:
    model = model_with(repetition_penalty=1.3, suppress_tokens=PLAIN[2:3])
    decoder = Decoder(model)
    found = decoder.generate(PROMPT, sampling=Sampling(repetition_penalty=1.0), max_new_tokens=NEW).token_ids
    assert found == theirs(model, PROMPT, repetition_penalty=1.0) != theirs(model, PROMPT)
    used = decoder.sampling_for(Sampling(temperature=0.5), PROMPT, NEW)
    assert (used.temperature, used.repetition_penalty, len(used.processors)) == (0.5, 1.3, 1)
    mine = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    found = decoder.generate(PROMPT, sampling=Sampling(processors=[mine]), max_new_tokens=NEW).token_ids
    assert found == theirs(model, PROMPT, logits_processor=[mine])


@pytest.mark.parametrize(
    ("wishes", "times"), [({}, 1), ({"repetition_penalty": 1.3}, 1), ({"suppress_tokens": [3]}, 4)]
)
def test_transformers_is_asked_once_if_it_has_nothing_to_add(
    wishes: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies the prompt to the device, which takes time before every sequence."""
    model, asked = model_with(**wishes), []
    real = model._get_logits_processor
    monkeypatch.setattr(model, "_get_logits_processor", lambda *given, **more: asked.append(1) or real(*given, **more))
    decoder = Decoder(model)
    for _ in range(3):
        decoder.generate(PROMPT, max_new_tokens=2)
    assert len(asked) == times


def test_a_decoder_takes_the_settings_as_they_are_now() -> None:
    model = model_with(repetition_penalty=1.3)
    expected = theirs(model, PROMPT)
    decoder = Decoder(model)
    model.generation_config.repetition_penalty = 1.0
    assert decoder.generate(PROMPT, max_new_tokens=NEW).token_ids == expected
    assert model.generation_config.max_length is None


def test_a_model_that_asks_to_be_sampled_is_answered_once() -> None:
    decoder = Decoder(model_with(do_sample=True, temperature=0.6, top_p=0.9))
    decoder.generate(PROMPT, sampling=Sampling(temperature=0.6), max_new_tokens=2)
    with pytest.warns(OutpaceWarning, match="greedily unless it is given a Sampling"):
        assert decoder.generate(PROMPT, max_new_tokens=NEW).token_ids == PLAIN
    decoder.generate(PROMPT, max_new_tokens=2)


def test_what_is_not_taken_over_is_named() -> None:
    with pytest.warns(OutpaceWarning, match="has num_beams, stop_strings, which"):
        Decoder(model_with(num_beams=3, stop_strings=["x"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(model_with(num_beams=1))


@pytest.mark.parametrize("wishes", [WISHES[0], WISHES[1], WISHES[5]], ids=str)
def test_traces_and_benches_know_the_settings(wishes: dict[str, Any], tmp_path: Path) -> None:
    model = model_with(**wishes)
    decoder = Decoder(model)
    task = Task(PROMPT, Sampling(), NEW, trace=tmp_path / "trace.json")
    run = Ours(decoder, METHODS[1]).run(task)
    assert run.token_ids == Transformers(decoder, model).run(task).token_ids
    stored = trace.read_trace(tmp_path / "trace.json")
    assert receipt.check(decoder, stored).passed
    if wishes == WISHES[0]:
        assert receipt.check(Decoder(model_with()), stored).passed  # the file has the penalty


def test_on_the_command_line(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    file = place / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.5, "do_sample": True}))

    def written(*options: object) -> list[int]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            shown = outpace("generate", "hello", "--model", place, "--device", "cpu", "--json", *options)
        assert ("do_sample=True" in shown.stderr) == ("--repetition-penalty" not in options)  # that is a Sampling
        return json.loads(shown.stdout)["token_ids"]

    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    prompt = Decoder(model, transformers.AutoTokenizer.from_pretrained(place)).encode("hello")
    assert written("--max-new-tokens", NEW) == theirs(model, prompt)
    plain = theirs(model, prompt, repetition_penalty=1.0)
    assert written("--max-new-tokens", NEW, "--repetition-penalty", 1.0) == plain != theirs(model, prompt)
    written("--trace", tmp_path / "trace.json")
    assert json.loads(outpace("verify", tmp_path / "trace.json", "--device", "cpu", "--json").stdout)["passed"]


def test_ranks_take_a_penalty_and_refuse_processors() -> None:
    model = model_with(repetition_penalty=1.3)

    def work(ranks: Ranks) -> Any:
        decoder = ParallelDecoder(Decoder(model), ranks)
        return decoder.generate(PROMPT, method=METHODS[1], max_new_tokens=NEW).token_ids

    assert in_threads(2, work) == [theirs(model, PROMPT)] * 2

    def refused(ranks: Ranks) -> None:
        decoder = ParallelDecoder(Decoder(model_with(no_repeat_ngram_size=2)), ranks)
        with pytest.raises(InputError, match=r"NoRepeatNGramLogitsProcessor.*generation_config"):
            decoder.generate(PROMPT, method=METHODS[1])

    in_threads(2, refused)
