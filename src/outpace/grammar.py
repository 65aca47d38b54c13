"""Constraints on an answer: a JSON schema, a regular expression, or a grammar.

llguidance says which tokens may come next. Verification chooses tokens along the accepted path only and in order, so a
grammar sees committed tokens only: it never backtracks, and no draft can change what it allows. Tokens that it forces
are drafted like any others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .errors import InputError, InvalidLogits, ModelError

# Separators as in json.dumps: forced tokens are drafted for free, and a model cannot generate spaces forever.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST = 2**16  # characters of a grammar
_SAMPLE = '{"a": [1, "b c"]}'


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
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
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

    def rules(self) -> str:
        """What llguidance compiles. Raises InputError for grammars that are too long or of an unknown kind."""
        if len(self.source) > _LONGEST:
            raise InputError(f"the grammar has {len(self.source)} characters; at most {_LONGEST} are allowed.")
        matcher = _llguidance().LLMatcher
        makers = {
            "json_schema": partial(matcher.grammar_from_json_schema, overrides=_JSON),
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }
        if self.kind not in makers:
            raise InputError(f"unknown kind of grammar {self.kind!r}: use {', '.join(makers)}.")
        try:
            return str(makers[self.kind](self.source))
        except ValueError as error:  # of a schema that is nested too deeply
            raise InputError(f"the {self.kind.replace('_', ' ')} cannot be used: {error}") from error

    def compiled(self, words: Any) -> Any:
        """A matcher for the `words_of` a tokenizer. Raises InputError for invalid or unsupported grammars."""
        found = _llguidance().LLMatcher(words, self.rules(), log_level=0)
        if found.is_error():
            lines = str(found.get_error()).strip().split("\n")
            errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]  # of a regex
            reason = (errors or lines)[0].strip()
            if "coerce_one_of" in reason:  # an option that no user has; with it, answers might fit several alternatives
                reason = (
                    "the alternatives of a oneOf must differ in type or in the constant of a required property. "
                    "Use anyOf instead."
                )
            raise InputError(f"the {self.kind.replace('_', ' ')} cannot be used: {reason}")
        return found


class Constraint:
    """A grammar for one sequence: a logits processor, and a hint with the tokens that it forces."""

    name = "grammar"

    def __init__(self, grammar: Grammar, words: Any, ends: Collection[int], prompt_length: int) -> None:
        self._matcher = grammar.compiled(words)
        self._ends = [*ends]
        self._read_to = prompt_length
        self._taken = False

    def take(self) -> None:
        """Begin its sequence. Raises InputError for a second one, whose tokens it would take for those of the first."""
        if self._taken:
            raise InputError(
                "this constraint was made for another sequence. Pass the Grammar, or make a constraint for each with "
                "decoder.constraint(…)."
            )
        self._taken = True

    def copy(self, prompt_length: int) -> Constraint:
        """The same grammar, compiled once, for another sequence. Of a constraint that has read nothing."""
        found = copy(self)
        found._matcher, found._read_to, found._taken = self._matcher.deep_copy(), prompt_length, False
        return found

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
        words = guidance.hf.from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=list(ends))
        tokens = tokenizer.encode(_SAMPLE, add_special_tokens=False)
        said = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    except Exception as error:
        raise ModelError(f"this tokenizer does not support grammars: {error}") from error
    if words.decode_str(tokens).strip() != said.strip():
        raise ModelError(f"this tokenizer does not support grammars: llguidance reads {said!r} differently.")
    return words


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise InputError("grammars need llguidance: pip install 'outpace[serve]'.") from error
    return llguidance
