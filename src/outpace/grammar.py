"""Constraints on an answer: a JSON schema, a regular expression, or a grammar.

llguidance says which tokens may come next. Verification chooses tokens along the accepted path only and in order, so a
grammar sees committed tokens only: it never backtracks, and no draft can change what it allows. Tokens that it forces
are drafted like any others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .errors import InputError, InvalidLogits, ModelError

# Separators as in json.dumps: forced tokens are drafted for free, and a model cannot generate spaces forever.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST = 2**16  # characters of a grammar


@dataclass(frozen=True)
class Grammar:
    """What an answer must match, for `generate(grammar=...)`. Needs llguidance: `pip install 'outpace[serve]'`.

    >>> Grammar.regex("[0-9]{3}").kind
    'regex'
    """

    kind: str  # json_schema, regex or lark
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits a schema."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InputError(f"the JSON schema is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise InputError("the JSON schema must be an object.")
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """Text that matches a context-free grammar, in llguidance's syntax."""
        return cls("lark", rules)

    def compiled(self, words: Any) -> Any:
        """A matcher for the `words_of` a tokenizer. Raises InputError for invalid or unsupported grammars."""
        guidance = _llguidance()
        if len(self.source) > _LONGEST:
            raise InputError(f"the grammar has {len(self.source)} characters; at most {_LONGEST} are allowed.")
        matcher, kind = guidance.LLMatcher, self.kind.replace("_", " ")
        makers = {
            "json_schema": partial(matcher.grammar_from_json_schema, overrides=_JSON),
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }
        if self.kind not in makers:
            raise InputError(f"unknown kind of grammar {self.kind!r}: use {', '.join(makers)}.")
        try:
            found = matcher(words, makers[self.kind](self.source), log_level=0)
        except ValueError as error:  # of a schema that is nested too deeply
            raise InputError(f"the {kind} cannot be used: {error}") from error
        if found.is_error():
            lines = str(found.get_error()).strip().split("\n")
            reason = lines[-1 if self.kind == "regex" else 0].strip()  # of a regex's, the first lines are a drawing
            if "coerce_one_of" in reason:  # an option that no user has; with it, answers might fit several alternatives
                reason = (
                    "the alternatives of a oneOf must differ in type or in the constant of a required property. "
                    "Use anyOf instead."
                )
            raise InputError(f"the {kind} cannot be used: {reason}")
        return found


class Constraint:
    """A grammar for one sequence: a logits processor, and a hint with the tokens that it forces."""

    name = "grammar"

    def __init__(self, grammar: Grammar, words: Any, ends: Collection[int], prompt_length: int) -> None:
        self._matcher = grammar.compiled(words)
        self._ends = [*ends]
        self._read_to = prompt_length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Rule out every token that may not come next."""
        self._read(ids[0, self._read_to :].tolist())
        allowed = np.zeros(scores.shape[1], dtype=np.bool_)
        if self._matcher.is_stopped():
            allowed[self._ends] = True
        else:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            count = min(len(bits), len(allowed))
            allowed[:count] = bits[:count]
        self._check()
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), float("-inf"))

    def after(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The tokens that must come next."""
        self._read(tokens[self._read_to :])
        forced: list[int] = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        return forced[:most]

    def _read(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        self._read_to += len(tokens)
        if tokens:
            self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        """Raise an error if the matcher has one: a limit of llguidance's, unless the output does not match."""
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).split("\n")[0].removeprefix("Parser Error: ")
            strange = "satisfy the grammar" in reason
            what = (
                "the output no longer matches its grammar" if strange else "the grammar or schema is too large to go on"
            )
            raise InvalidLogits(f"{what}: {reason}")


def words_of(tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> Any:
    """A tokenizer for llguidance. For a large one this takes a second, so keep the result."""
    guidance = _llguidance()
    try:
        return guidance.hf.from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=list(ends))
    except Exception as error:
        raise ModelError(f"this tokenizer does not support grammars: {error}") from error


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise InputError("grammars need llguidance: pip install 'outpace[serve]'.") from error
    return llguidance
