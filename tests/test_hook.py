"""Inside transformers' own generate."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import outpace
from outpace import hook
from outpace.runtime.graphs import GraphEngine

from .models import tiny
from .test_cli import folder  # noqa: F401 (a fixture)
from .test_decoder import LetterTokenizer

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 5, 6]])
METHODS = [outpace.Lookahead(window=4, ngram=3), outpace.PromptLookup(), outpace.Jacobi(window=3)]


def generate(**options: Any) -> list[int]:
    model = tiny("Qwen2")
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)[0].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_greedy(method: outpace.Method) -> None:
    options = {"max_new_tokens": 30, "do_sample": False}
    assert generate(custom_generate=method, **options) == generate(**options)


def test_a_class_in_place_of_a_method_is_named() -> None:
    with pytest.raises(outpace.InputError, match=r"Give a method: outpace.Lookahead\(\)"):
        generate(custom_generate=outpace.Lookahead, max_new_tokens=3)


@pytest.mark.parametrize("method", METHODS)
def test_processors_and_ends(method: outpace.Method) -> None:
    plain = generate(max_new_tokens=30, do_sample=False)
    options = {"max_new_tokens": 30, "do_sample": False, "repetition_penalty": 1.2, "eos_token_id": [plain[15], 3]}
    assert generate(custom_generate=method, **options) == generate(**options)


@pytest.mark.parametrize("method", METHODS)
def test_a_users_criterion_stops_inside_a_block(method: outpace.Method) -> None:
    class Thirteen(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 13)

    options = {"max_new_tokens": 30, "do_sample": False, "stopping_criteria": [Thirteen()]}
    found = generate(custom_generate=method, **options)
    assert found == generate(**options)
    assert len(found) == 13


def test_sampling_follows_torchs_seed() -> None:
    texts = []
    for method in [outpace.Autoregressive(), *METHODS]:
        torch.manual_seed(11)
        texts.append(generate(custom_generate=method, max_new_tokens=20, do_sample=True, temperature=0.9, top_k=20))
    assert all(text == texts[0] for text in texts)
    assert generate(custom_generate=METHODS[0], max_new_tokens=20, do_sample=True) != texts[0]


def test_padding_is_left_out() -> None:
    model = tiny("Qwen2")
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS], 1)
    mask = (torch.arange(13) >= 3)[None].long()
    options = {"max_new_tokens": 12, "do_sample": False, "custom_generate": METHODS[0]}
    found = model.generate(padded, attention_mask=mask, **options)[0].tolist()
    assert found[:13] == padded[0].tolist()
    assert found[13:] == generate(max_new_tokens=12, do_sample=False)[10:]


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(outpace.InputError, match="num_beams=2"):
        generate(custom_generate=METHODS[0], max_new_tokens=3, num_beams=2, do_sample=False)
    with pytest.raises(outpace.InputError, match="return_dict_in_generate"):
        generate(custom_generate=METHODS[0], max_new_tokens=3, return_dict_in_generate=True, do_sample=False)


def test_nothing_is_hung_on_the_model() -> None:
    model = tiny("Qwen2")
    before = set(vars(model))
    generate(custom_generate=METHODS[0], max_new_tokens=3, do_sample=False)
    assert set(vars(model)) == before


def test_changes_to_the_model_are_seen() -> None:
    model = copy.deepcopy(tiny("Qwen2"))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False}
    first = model.generate(IDS, custom_generate=METHODS[0], **options)
    with torch.no_grad():
        model.set_output_embeddings(torch.nn.Linear(32, 97))
    second = model.generate(IDS, custom_generate=METHODS[0], **options)
    assert torch.equal(second, model.generate(IDS, **options))
    assert not torch.equal(first, second)
    model.to(torch.float64)
    assert torch.equal(model.generate(IDS, custom_generate=METHODS[0], **options), model.generate(IDS, **options))


def test_processors_see_the_padding_as_in_transformers() -> None:
    model = tiny("Qwen2")
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS], 1)
    mask = (torch.arange(13) >= 3)[None].long()
    options = {"max_new_tokens": 12, "do_sample": False, "forced_eos_token_id": 9, "attention_mask": mask}
    expected = model.generate(padded, **options)
    assert torch.equal(model.generate(padded, custom_generate=METHODS[0], **options), expected)


def padded_batch(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of these lengths, padded on the left."""
    longest = max(lengths)
    rows = [
        [0] * (longest - length) + [*IDS[0].tolist() * 2][place : place + length]
        for place, length in enumerate(lengths)
    ]
    masks = [[0] * (longest - length) + [1] * length for length in lengths]
    return torch.tensor(rows), torch.tensor(masks)


@pytest.mark.parametrize("method", [outpace.Autoregressive(), *METHODS])
def test_batches_with_padding(method: outpace.Method) -> None:
    model = tiny("Qwen2")
    ids, mask = padded_batch([6, 10, 3])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=method, **options), plain)
    options["eos_token_id"] = next(token for token in plain[2, 10:].tolist() if token not in plain[1, 10:])
    theirs = model.generate(ids, **options)
    assert (theirs[:, -1] == 0).any()  # some row ended early, and is filled up
    assert torch.equal(model.generate(ids, custom_generate=method, **options), theirs)
    options["repetition_penalty"] = 1.1
    assert torch.equal(model.generate(ids, custom_generate=method, **options), model.generate(ids, **options))


def test_processors_and_criteria_know_their_row() -> None:
    model = tiny("Qwen2")
    ids, mask = padded_batch([6, 10])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    options["prefix_allowed_tokens_fn"] = lambda row, _: [row + 20, row + 30]
    found = model.generate(ids, custom_generate=METHODS[1], **options)
    assert torch.equal(found, model.generate(ids, **options))


def test_several_answers_to_a_prompt() -> None:
    options = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}
    model = tiny("Qwen2")
    found = []
    for method in (outpace.Autoregressive(), METHODS[0]):
        torch.manual_seed(3)
        found.append(model.generate(IDS, attention_mask=torch.ones_like(IDS), custom_generate=method, **options))
    assert found[0].shape == (3, 22)
    assert len({tuple(row) for row in found[0].tolist()}) == 3
    assert torch.equal(*found)


def test_an_empty_row_is_named() -> None:
    ids, mask = padded_batch([6, 10])
    mask[0] = 0
    with pytest.raises(outpace.InputError, match="row 0 of the batch is empty"):
        tiny("Qwen2").generate(ids, attention_mask=mask, custom_generate=METHODS[0], max_new_tokens=3, do_sample=False)


class Recorder(transformers.generation.BaseStreamer):
    """Notes all that it is shown."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((value.device.type, value.tolist()))

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("method", METHODS)
def test_streamers_see_what_transformers_shows_them(method: outpace.Method) -> None:
    model = tiny("Qwen2")
    ids, mask = padded_batch([6, 10, 3])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    options["eos_token_id"] = next(token for token in plain[2, 10:].tolist() if token not in plain[1, 10:])
    ours, theirs = Recorder(), Recorder()
    model.generate(ids, custom_generate=method, streamer=ours, **options)
    model.generate(ids, streamer=theirs, **options)
    assert ours.seen == theirs.seen
    assert len(ours.seen) == 16


def test_a_text_can_be_read_from_another_thread() -> None:
    tokenizer = LetterTokenizer()
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=300)  # type: ignore[arg-type]
    options = {"max_new_tokens": 12, "do_sample": False, "custom_generate": METHODS[0], "streamer": streamer}
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(generate, **options)
        text = "".join(streamer)
    assert text == tokenizer.decode(future.result()[10:])


def test_stop_strings_are_refused_with_what_works(folder: Path) -> None:  # noqa: F811
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("hello", return_tensors="pt")
    options = {**inputs, "max_new_tokens": 30, "do_sample": False}
    stop = tokenizer.decode(model.generate(**options)[0, -12:-10])
    with pytest.raises(outpace.InputError, match=r"stopping_criteria=\[transformers.StopStringCriteria\(tokenizer"):
        model.generate(**options, custom_generate=METHODS[0], stop_strings=[stop], tokenizer=tokenizer)
    theirs = model.generate(**options, stop_strings=[stop], tokenizer=tokenizer)
    options["stopping_criteria"] = [transformers.StopStringCriteria(tokenizer, [stop])]
    assert torch.equal(model.generate(**options, custom_generate=METHODS[0]), theirs)
    assert theirs.shape[1] < inputs["input_ids"].shape[1] + 30


def test_the_engine_is_kept_while_the_model_is_what_it_was() -> None:
    model = copy.deepcopy(tiny("Qwen2"))
    engine = hook.engine_of(model)
    assert type(engine) is type(outpace.Decoder(tiny("Qwen2")).engine)
    model.generate(IDS, attention_mask=torch.ones_like(IDS), custom_generate=METHODS[0], max_new_tokens=3)
    model.train()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert hook.engine_of(model) is engine
    assert engine.pool.held == 0

    def to_bfloat16() -> None:
        model.to(torch.bfloat16)

    def new_weight() -> None:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())

    def new_place() -> None:
        model.lm_head.weight.data = model.lm_head.weight.data.clone()

    def new_module() -> None:
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()

    def new_setting() -> None:
        model.model.layers[0].self_attn.scaling = 0.5

    def new_config() -> None:
        model.config.rms_norm_eps = 0.1

    for change in (to_bfloat16, new_weight, new_place, new_module, new_setting, new_config):
        change()
        changed = hook.engine_of(model)
        assert changed is not engine, change.__name__
        assert hook.engine_of(model) is changed
        engine = changed


def test_the_engine_goes_with_the_model() -> None:
    model = copy.deepcopy(tiny("Qwen2"))
    model.generate(IDS, attention_mask=torch.ones_like(IDS), custom_generate=METHODS[0], max_new_tokens=3)
    seen = weakref.ref(hook.engine_of(model))
    del model
    gc.collect()
    assert seen() is None


def test_threads_may_generate_with_one_model() -> None:
    model = copy.deepcopy(tiny("Qwen2"))
    prompts = [IDS, IDS[:, 3:], IDS[:, :4]]
    options: dict[str, Any] = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}

    def write(ids: torch.Tensor, **more: Any) -> list[int]:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)[0].tolist()

    expected = [write(ids) for ids in prompts]
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(lambda ids: write(ids, custom_generate=METHODS[0]), prompts)] == expected


def beyond(length: int, context: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    """transformers' text and ours, by programs, of a prompt near the end of the context."""
    model = copy.deepcopy(tiny("Llama"))
    monkeypatch.setattr(model.config, "max_position_embeddings", context)
    monkeypatch.setattr(
        hook, "engine_for", lambda adapted, *_, **__: GraphEngine(adapted, compiled=False, capacity=1024)
    )
    ids = torch.arange(length)[None] % 50
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, **options}
    expected = model.generate(ids, **options)[0].tolist()
    return expected, model.generate(ids, custom_generate=outpace.PromptLookup(), **options)[0].tolist()


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}])
def test_programs_end_with_the_context(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = beyond(155, 160, monkeypatch, **options)
    assert found == expected
    with pytest.warns(outpace.OutpaceWarning, match="at most 2 new tokens"):
        expected, found = beyond(158, 160, monkeypatch, **options)
    assert found == expected[:160]


@pytest.mark.parametrize("length", [160, 161, 170])
def test_programs_refuse_prompts_as_long_as_the_context(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(outpace.InputError, match=f"has {length} tokens, and the model a context of 160"):
        beyond(length, 160, monkeypatch)
