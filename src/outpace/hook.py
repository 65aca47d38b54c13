"""The entry point for transformers: `model.generate(**inputs, custom_generate=outpace.Lookahead())`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .batch import Request, Writing
from .errors import InputError, OutpaceWarning
from .methods.base import Method
from .models.hf import HFModel
from .picking import Processor, Sampling
from .runtime import calibrate
from .runtime.choose import engine_for
from .runtime.costs import load as load_costs
from .runtime.plain import Engine

# By model, its state when the engine was made, and the engine, which is freed with the model.
_engines: WeakKeyDictionary[Any, tuple[list[object], Engine]] = WeakKeyDictionary()
_building = Lock()


def generate(
    method: Method,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    attention_mask: torch.Tensor | None = None,
    stop_strings: str | Sequence[str] | None = None,
    **_: Any,
) -> torch.Tensor:
    """Decode with `method`, with the processors and criteria that transformers has prepared.

    Returns prompts with answers. As in transformers, sequences that end early are padded.
    """
    _refuse_what_is_not_supported(input_ids, generation_config, stop_strings)
    engine = engine_of(model)
    with engine.turns:
        prepared = method.prepare(engine.model)
    texts = [_Text(row, input_ids, attention_mask, stopping_criteria) for row in range(len(input_ids))]
    padding = int(getattr(generation_config, "_pad_token_tensor", None) or 0)
    streamer = _Streamer(_streamer_of_caller(), texts, padding)
    with Writing() as writing:
        for text in texts:
            processors = [text.wrapped(processor) for processor in logits_processor or ()]
            how = _sampling(generation_config, processors)
            most = _most(generation_config, input_ids, text.prompt, engine)
            writing.add(Request(engine, prepared, text.prompt, how, text.stop, most))
        while writing:
            with engine.turns:
                events = writing.step()
            for number, item in events:
                if isinstance(item, Exception):
                    raise item
                texts[number].ended |= item.finish is not None
            streamer.show()
    streamer.end()
    longest = max(len(text.tokens) for text in texts)
    filled = [text.tokens + [padding] * (longest - len(text.tokens)) for text in texts]
    return torch.tensor(filled, device=input_ids.device)


def engine_of(model: Any) -> Engine:
    """The engine that a Decoder of this model would have, except that weights are not fused.

    It is kept for the next call, as long as the model does not change.
    """
    with _building:
        seen = _look(model)
        known = _engines.get(model)
        if known is not None and known[0] == seen:
            return known[1]
        known = _engines.pop(model, None)  # free its memory first
        engine = engine_for(HFModel(model), "auto", join=False)
        engine.costs = load_costs(calibrate.folder(), calibrate.about(engine))
        _engines[model] = seen, engine
        return engine


def _look(model: Any) -> list[object]:
    """What an engine depends on: the model's modules, simple settings, and the storage and dtype of its weights.

    An engine holds the weights themselves: their ids stay unique, and it sees values that change in place.
    """
    seen: list[object] = [str(model.config.to_dict())]
    for module in model.modules():
        seen.append(type(module))
        own = vars(module)
        seen += [(name, repr(own[name])) for name in own if name not in _TORCHS and _is_plain(own[name])]
        for weight in (*module._parameters.values(), *module._buffers.values()):
            if weight is not None:
                place = weight.data_ptr() if type(weight) in (nn.Parameter, torch.Tensor) else None  # others have none
                seen.append((id(weight), weight.dtype, weight.device, place))
    return seen


_TORCHS = {*vars(nn.Module()), "_is_hf_initialized"}  # attributes of every module, which do not matter
_PLAIN = (bool, int, float, str, type(None))


def _is_plain(value: object) -> bool:
    """Whether a module's attribute is a setting that may change, like the active adapters."""
    if isinstance(value, dict):
        value = [*value.values()]
    parts = value if isinstance(value, list | tuple | set) else [value]
    return all(isinstance(part, _PLAIN) for part in parts)


def _streamer_of_caller() -> Any:
    """The `streamer` that `generate` was called with.

    transformers does not pass it on to custom_generate, so its reader would wait forever. It is taken from the
    arguments of the calling `generate`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if {"custom_generate", "streamer"} <= {*frame.f_code.co_varnames[: frame.f_code.co_argcount]}:
            return frame.f_locals["streamer"]
        frame = frame.f_back
    return None


class _Streamer:
    """Feeds a streamer new tokens as transformers does, one of each sequence at a time. It has the prompts already."""

    def __init__(self, streamer: Any, texts: Sequence[_Text], padding: int) -> None:
        self._streamer = streamer
        self._texts = texts
        self._padding = padding
        self._shown = len(texts[0].tokens)

    def show(self) -> None:
        while self._streamer is not None and self._is_ready():
            tokens = [[*text.tokens[self._shown :], self._padding][0] for text in self._texts]
            self._streamer.put(torch.tensor(tokens))
            self._shown += 1

    def _is_ready(self) -> bool:
        there = [len(text.tokens) > self._shown for text in self._texts]
        return any(there) and all(more or text.ended for more, text in zip(there, self._texts, strict=True))

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


class _Text:
    """One sequence of the batch, as transformers' processors and criteria see it: padded, in its own row."""

    def __init__(self, row: int, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, criteria: Any) -> None:
        self.row = row
        self.rows = len(input_ids)
        self.ids = input_ids[row : row + 1]
        self.tokens: list[int] = self.ids[0].tolist()
        there = torch.ones_like(self.ids[0]) if attention_mask is None else attention_mask[row]
        self.prompt: list[int] = self.ids[0][there.bool()].tolist()
        if not self.prompt:
            raise InputError(f"row {row} of the batch is empty: its attention_mask is all zero.")
        self.criteria = criteria
        self.ended = False

    def stop(self, token: int) -> str | None:
        """Add a new token; the finish reason if transformers' criteria end the sequence with it."""
        self.tokens.append(token)
        if self.criteria is None:
            return None
        ids = torch.tensor([self.tokens], device=self.ids.device)
        self.ended = bool(self.criteria(ids.expand(self.rows, -1), None).expand(self.rows)[self.row])
        return "stop" if self.ended else None

    def wrapped(self, processor: Processor) -> Processor:
        """The processor as transformers would call it. Some depend on the sequence's row."""

        def padded(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ids = torch.cat([self.ids, ids[:, len(self.prompt) :]], 1)
            found = processor(ids.expand(self.rows, -1), scores.repeat(self.rows, 1))
            return found[self.row : self.row + 1]

        return padded


def _refuse_what_is_not_supported(input_ids: torch.Tensor, generation_config: Any, stop_strings: Any) -> None:
    if stop_strings is not None:
        raise InputError(
            f"stop_strings={stop_strings!r}: custom_generate does not get the tokenizer that they need. "
            f"Give stopping_criteria=[transformers.StopStringCriteria(tokenizer, {stop_strings!r})] instead."
        )
    if (beams := getattr(generation_config, "num_beams", 1) or 1) > 1:
        raise InputError(f"num_beams={beams}: beam search is not supported; use num_beams=1.")
    if input_ids.shape[1] == 0:
        raise InputError("there are no input_ids. Give the prompt's token ids; inputs_embeds are not supported.")
    if getattr(generation_config, "return_dict_in_generate", False):
        raise InputError("return_dict_in_generate=True is not supported: Outpace returns token ids. Leave it out.")


def _most(generation_config: Any, input_ids: torch.Tensor, prompt: Sequence[int], engine: Engine) -> int | None:
    """The most new tokens by transformers' criteria; None if they set no limit.

    transformers goes on beyond the context, with a warning. CUDA graphs cannot.
    """
    longest, context = getattr(generation_config, "max_length", None), engine.model.context
    most = longest - input_ids.shape[1] if isinstance(longest, int) and longest > input_ids.shape[1] else None
    left = context - len(prompt)
    if not engine.sizes or (most is not None and most <= left):
        return most
    if left < 1:
        raise InputError(f"the prompt has {len(prompt)} tokens, and the model a context of {context}. Shorten it.")
    warnings.warn(
        f"the prompt has {len(prompt)} tokens, and the model a context of {context}: at most {left} new tokens are "
        "generated.",
        OutpaceWarning,
        stacklevel=2,
    )
    return left


def _sampling(generation_config: Any, processors: Sequence[Processor]) -> Sampling:
    """transformers has put temperature, top-k/p and penalties into the processors; the seed comes from torch."""
    if not getattr(generation_config, "do_sample", False):
        return Sampling(processors=processors)
    return Sampling(temperature=1.0, processors=processors, seed=int(torch.randint(2**62, ())))
