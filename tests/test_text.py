"""Incremental detokenization."""

from __future__ import annotations

import types
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outpace.draft import Draft, Step
from outpace.text import decoding


class Changed(PreTrainedTokenizerFast):
    """As some models' tokenizers: text is changed after decoding."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


def made(kind: type[Any] = PreTrainedTokenizerFast, **options: Any) -> Any:
    backend = Tokenizer(models.WordLevel({"he": 0, "llo": 1, ",": 2, "<end>": 3}, unk_token="he"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return kind(tokenizer_object=backend, eos_token="<end>", **options)


@pytest.mark.parametrize(
    ("tokenizer", "direct"),
    [
        (made(), True),
        (made(clean_up_tokenization_spaces=True), False),
        (made(Changed), False),
        (types.SimpleNamespace(decode=lambda tokens, skip_special_tokens: f"{tokens}"), False),
    ],
)
def test_decoding_is_the_tokenizers_own(tokenizer: Any, direct: bool) -> None:
    decode = decoding(tokenizer)
    for tokens in ([], [0], [0, 1, 2, 3], [3, 2, 2]):
        assert decode(tokens) == tokenizer.decode(tokens, skip_special_tokens=True)
    called: Any = decode
    assert isinstance(getattr(called.func, "__self__", None), Tokenizer) == direct


def test_a_step_with_its_text_has_everything_else_too() -> None:
    step = Step((1,), ("model",), Draft((2,), (-1,), 1, ("model",)), (0,), "stop", {"a": 1.0}, "x", (1.0, 2.0), (), 3)
    assert vars(step.saying("y")) == {**vars(step), "text": "y"}
