"""Tokenizers of GGUF files, as several versions of transformers read them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outpace import ModelError, load
from outpace.grammar import words_of
from outpace.models.vocabulary import settle

from .ggufs import write
from .serving import bytewise

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{number:02X}>" for number in range(256)]
# In the order in which SentencePiece merges them; two spaces are a token of their own, before all others.
PIECES = ["▁▁", "▁t", "he", "▁the", "tw", "▁two", "o▁", *"▁thewoaé"]
WORDS = [*SPECIAL, *BYTES, *PIECES]
NUMBERS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "unk_token_id": 3}


def unigram() -> Any:
    """A tokenizer as transformers 5.17 makes it from a file of Gemma."""
    scores = [(word, -1000.0 if number < len(SPECIAL) else -float(number)) for number, word in enumerate(WORDS)]
    backend = Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_special_tokens_come_from_the_config() -> None:
    tokenizer = unigram()
    tokenizer.bos_token = tokenizer.eos_token = "<pad>"
    tokenizer.init_kwargs["eos_token_id"] = 0
    settle(tokenizer, SimpleNamespace(**{**NUMBERS, "pad_token_id": 1}), {})
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<eos>")
    assert "eos_token_id" not in tokenizer.init_kwargs
    assert tokenizer.init_kwargs["clean_up_tokenization_spaces"] is False


def test_byte_pairs_are_merged_in_sentencepieces_order(tmp_path: Path) -> None:
    tokenizer = unigram()
    settle(tokenizer, SimpleNamespace(**NUMBERS), {"tokenizer.ggml.model": "llama"})
    assert tokenizer.tokenize("a the  two é\n") == ["a", "▁the", "▁▁", "tw", "o▁", "é", "<0x0A>"]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode("a the  two é\n") == tokenizer.encode("a the  two é\n")
    assert again.decode(again.encode("a the  two é\n")) == "a the  two é\n"


def test_a_unigram_model_stays_one() -> None:
    tokenizer = unigram()
    settle(tokenizer, SimpleNamespace(**NUMBERS), {"tokenizer.ggml.model": "t5"})
    assert isinstance(tokenizer.backend_tokenizer.model, models.Unigram)


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_a_text_begins_and_ends_as_the_file_says(bos: bool | None, eos: bool | None, tmp_path: Path) -> None:
    given = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    metadata = {name: value for name, value in given.items() if value is not None}
    tokenizer = unigram()
    for _ in range(2):  # what the second one finds is right
        settle(tokenizer, SimpleNamespace(**NUMBERS), metadata)
        text = tokenizer.encode("the", add_special_tokens=False)
        assert tokenizer.encode("the") == [*([2] if bos else []), *text, *([1] if eos else [])]
    settle(tokenizer, SimpleNamespace(**NUMBERS), {"tokenizer.ggml.add_bos_token": False})
    assert tokenizer.encode("the") == [*text, *([1] if eos else [])]


@pytest.mark.parametrize("adds", [True, False])
def test_a_loaded_file_begins_a_raw_prompt_with_bos_if_it_says_so(adds: bool, tmp_path: Path) -> None:
    decoder = load(str(write(tmp_path / "tiny.gguf", "qwen2", bos=adds)))
    assert decoder.tokenizer.encode("w5")[:1] == [1][:adds]


def test_grammars_need_byte_level_tokens_to_be_decoded_as_such() -> None:
    pytest.importorskip("llguidance")
    tokenizer = copy.deepcopy(bytewise())
    replaced = decoders.Replace("\u2581", " ")
    several = [decoders.ByteFallback(), decoders.Fuse(), replaced, decoders.ByteLevel()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(several)  # as transformers 5.17 reads a GGUF file
    with pytest.raises(ModelError, match=r"llguidance reads '\{"):
        words_of(tokenizer, len(tokenizer), [0])
    settle(tokenizer, SimpleNamespace(), {})
    tokens = tokenizer.encode("a ü", add_special_tokens=False)
    assert words_of(tokenizer, len(tokenizer), [0]).decode_str(tokens) == tokenizer.decode(tokens) == "a ü"
