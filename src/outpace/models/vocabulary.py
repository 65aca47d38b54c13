"""The tokenizer of a GGUF file: as transformers reads it, mended where some of its versions misread the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing


def settle(tokenizer: Any, config: Any, metadata: Mapping[str, Any]) -> None:
    """Mend it in place. `metadata`: of the file.

    - Of special tokens, the model's config is right.
    - SentencePiece's byte pairs are not a unigram model, as transformers 5.17 has it for Gemma.
    - For byte-level tokens some versions add SentencePiece's decoders, by which llguidance would take all tokens for
      SentencePiece's.
    - The file says whether a text begins with the bos token and ends with the eos token.
    """
    backend = tokenizer.backend_tokenizer
    if metadata.get("tokenizer.ggml.model") == "llama" and isinstance(backend.model, models.Unigram):
        backend.model = _byte_pairs(backend)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        backend.decoder = decoders.ByteLevel()
    for role in ("bos", "eos", "pad", "unk"):
        token_id = getattr(config, f"{role}_token_id", None)
        if token_id is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
            tokenizer.init_kwargs.pop(f"{role}_token_id", None)
    # Detokenization must not clean up spaces.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    _add_ends(tokenizer, metadata)


def _byte_pairs(backend: Tokenizer) -> models.BPE:
    """A model of byte pairs with the pieces of a unigram model, which have their ids in the order of merges."""
    unigram = json.loads(backend.to_str())["model"]
    pieces = [piece for piece, _ in unigram["vocab"]]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    unknown = pieces[unigram["unk_id"]]
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=unigram["byte_fallback"])


def _add_ends(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Let texts begin with the bos token and end with the eos token if the file says so, or not if it says that."""
    given = {role: metadata.get(f"tokenizer.ggml.add_{role}_token") for role in ("bos", "eos")}
    bare = tokenizer.encode("a", add_special_tokens=False)
    there = tokenizer.encode("a")
    ids = {role: getattr(tokenizer, f"{role}_token_id") for role in given}
    found = {"bos": there[:1] == [ids["bos"]] != bare[:1], "eos": there[-1:] == [ids["eos"]] != bare[-1:]}
    wanted = {role: found[role] if said is None else said and ids[role] is not None for role, said in given.items()}
    if wanted == found:
        return
    bos, eos = ([getattr(tokenizer, f"{role}_token")] if wanted[role] else [] for role in ("bos", "eos"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *bos, "$B:1", *eos],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in (*bos, *eos)],
    )
