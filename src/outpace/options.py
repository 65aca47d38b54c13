"""The options of `Decoder.generate`, `stream` and `Batch.add`, checked by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypedDict

from .errors import InputError, UnknownNameError
from .grammar import Constraint, Grammar
from .limits import warn_if_greedy
from .methods import DEFAULT, METHODS, Method, make
from .methods.base import settings
from .picking import Sampling


class _Shared(TypedDict, total=False):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    raw: bool
    logprobs: int | None
    grammar: Grammar | Constraint | None
    prediction: str | Sequence[int] | None
    salt: str


class Options(_Shared, total=False):
    """Options of one request.

    Attributes:
        max_new_tokens: the most tokens to generate, at most as many as the context has room for; 128 by default.
        sampling: an outpace.Sampling. Without one, and without a temperature, decoding is greedy.
        method: a drafting method, by name or as an object, instead of the decoder's. Pass one that loads a model
            through `Decoder.prepare` first.
        temperature: 0 is greedy. This and the following, up to `seed`, are fields of Sampling.
        top_k: sample from the K most likely tokens.
        top_p: sample from the fewest tokens with this total probability.
        min_p: drop tokens less likely than this fraction of the best one.
        repetition_penalty: above 1 discourages tokens of prompt and answer; None: the model's own.
        presence_penalty: subtracted once from the logit of each token that is in the answer.
        frequency_penalty: subtracted from a token's logit once per occurrence in the answer.
        logit_bias: added to logits, by token id.
        seed: the same seed gives the same text with every method (with the default rule).
        stop: strings that end the output; they are not part of it.
        raw: use a string as it is, without the chat template.
        logprobs: the log probability of each token, and of this many alternatives.
        grammar: an outpace.Grammar that the answer must match.
        prediction: an expected answer to draft from; it affects speed only (with the default rule).
        salt: sequences share KV cache only with others of the same salt.
    """

    max_new_tokens: int
    sampling: Sampling | None
    method: str | Method | None


class BatchOptions(_Shared, total=False):
    """Options of a batch: those of one request; three of them may be lists with a value for each prompt."""

    max_new_tokens: int | Sequence[int]
    sampling: Sampling | Sequence[Sampling | None] | None
    method: str | Method | Sequence[str | Method | None] | None


NAMES = frozenset(Options.__annotations__) | frozenset(_Shared.__annotations__)
CHANCE = tuple(name for name in _Shared.__annotations__ if name in Sampling.__dataclass_fields__)  # Sampling's own

# Names in other libraries, and what to use instead.
_REMEDIES = {
    "do_sample": "Set temperature=… to sample; without it decoding is greedy.",
    "max_tokens": "Use max_new_tokens.",
    "max_completion_tokens": "Use max_new_tokens.",
    "max_length": "Use max_new_tokens, which does not count the prompt.",
    "min_new_tokens": "Set it in the model's generation_config.",
    "num_return_sequences": "Use n.",
    "num_beams": "Beam search is not supported. Leave it out.",
    "stop_strings": "Use stop.",
    "stop_sequences": "Use stop.",
    "eos_token_id": "Set decoder.ends to the end-of-sequence ids.",
    "pad_token_id": "Leave it out: nothing is padded.",
    "logits_processor": "Use sampling=outpace.Sampling(processors=[…]).",
    "processors": "Use sampling=outpace.Sampling(processors=[…]).",
    "rule": "Use sampling=outpace.Sampling(rule=…).",
    "stopping_criteria": "Use stop, or leave the loop over decoder.stream(…).",
    "streamer": "Iterate over decoder.stream(…), whose steps have the new text.",
    "stream": "Iterate over decoder.stream(…), whose steps have the new text.",
    "output_scores": "Use logprobs.",
    "return_dict_in_generate": "Leave it out: a Result has everything.",
    "use_cache": "Leave it out: there always is a KV cache.",
    "assistant_model": 'Use method=outpace.DraftModel(model=…), or method="auto" without one.',
    "prompt_lookup_num_tokens": 'Use method="prompt-lookup".',
    "add_generation_prompt": "Leave it out: the chat template is applied unless raw=True.",
    "system": 'Give messages: [{"role": "system", "content": …}, {"role": "user", "content": …}].',
    "messages": "Pass them as the first argument.",
    "response_format": "Use grammar=outpace.Grammar.json_schema(…).",
    "guided_json": "Use grammar=outpace.Grammar.json_schema(…).",
}


# The same for `outpace.load`.
_AT_LOAD = {
    "torch_dtype": "Use dtype.",
    "device_map": "Use device: the whole model must be on one.",
    "load_in_8bit": 'Use weights="q8", on a CPU.',
    "load_in_4bit": 'Use weights="q4", on a CPU.',
    **dict.fromkeys(
        ("trust_remote_code", "revision", "token", "cache_dir", "quantization_config", "attn_implementation"),
        "Load the model with transformers, and pass it and its tokenizer to outpace.load.",
    ),
}


_OF_LOAD = ("tokenizer", "method", "dtype", "device", "weights", "runtime", "exact", "memory")


def check_settings(method: str | Method | None, given: Mapping[str, Any]) -> None:
    """Raise InputError for settings that `load` cannot pass on, before it loads anything."""
    for name in given:
        if name in _AT_LOAD:
            raise InputError(f"unknown option {name!r}. {_AT_LOAD[name]}")
        if name in NAMES or name in _REMEDIES:
            raise InputError(f"{name!r} is not an option of load. Give it to generate or stream.")
        near = get_close_matches(name, _OF_LOAD, n=1)
        if near and not any(name in settings(kind) for kind in METHODS.values()):
            raise InputError(f"unknown option {name!r}. Did you mean {near[0]!r}?")
    if method is None or isinstance(method, str):
        make(method or DEFAULT, **given)


def _of_method(name: str, method: object) -> str:
    """What to do with an option that is a setting of some methods; empty if it is not."""
    owners = [kind for kind in METHODS.values() if name in settings(kind)]
    if not owners:
        return ""
    owner = next((kind for kind in owners if kind.name == method), owners[0])
    return f"{name!r} is a setting of a method. Give it there: method=outpace.{owner.__name__}({name}=…)."


def settled(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with one `sampling` instead of its fields. Raises InputError for unknown names."""
    for name in options:
        if name in NAMES:
            continue
        if name in _REMEDIES:
            raise InputError(f"unknown option {name!r}. {_REMEDIES[name]}")
        if hint := _of_method(name, options.get("method")):
            raise InputError(hint)
        raise UnknownNameError("option", name, NAMES)
    given = {name: value for name, value in options.items() if name not in CHANCE}
    chance = {name: options[name] for name in CHANCE if name in options}
    if chance:
        if options.get("sampling") is not None:
            raise InputError(
                f"sampling was given, and {', '.join(chance)} beside it. Put everything into one: "
                f"outpace.Sampling({', '.join(f'{name}=…' for name in chance)})."
            )
        given["sampling"] = Sampling(**chance)
        warn_if_greedy(chance)
    return given
