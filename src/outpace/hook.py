"""The door from transformers: `model.generate(**inputs, custom_generate=outpace.Lookahead())`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from .batch import Request, Writing
from .errors import InputError
from .methods.base import Method
from .models.hf import HFModel
from .picking import Processor, Sampling
from .runtime.plain import Engine

_checked: WeakSet[Any] = WeakSet()  # models that passed the check; nothing is hung on them


def generate(
    method: Method,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Decode with `method` under the conditions that transformers has prepared; returns prompts and answers.

    As with transformers' own, a text that ends before the others is filled up with the padding token.
    """
    _refuse_what_is_not_supported(input_ids, generation_config)
    # Mirrored for each call, because the user may change the model between two.
    engine = Engine(HFModel(model, check=model not in _checked))
    _checked.add(model)
    prepared = method.prepare(engine.model)
    texts = [_Text(row, input_ids, attention_mask, stopping_criteria) for row in range(len(input_ids))]
    with Writing() as writing:
        for text in texts:
            processors = [text.wrapped(processor) for processor in logits_processor or ()]
            writing.add(Request(engine, prepared, text.prompt, _sampling(generation_config, processors), text.stop))
        while writing:
            with engine.turns:
                events = writing.step()
            for _number, item in events:
                if isinstance(item, Exception):
                    raise item
    longest = max(len(text.tokens) for text in texts)
    padding = getattr(generation_config, "_pad_token_tensor", None)
    filled = [text.tokens + [int(padding or 0)] * (longest - len(text.tokens)) for text in texts]
    return torch.tensor(filled, device=input_ids.device)


class _Text:
    """One text of the batch, as transformers' processors and criteria see it: padded, and in its own row."""

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

    def stop(self, token: int) -> str | None:
        """Told each new token; says whether transformers' criteria end the text with it."""
        self.tokens.append(token)
        if self.criteria is None:
            return None
        ids = torch.tensor([self.tokens], device=self.ids.device)
        return "stop" if bool(self.criteria(ids.expand(self.rows, -1), None).expand(self.rows)[self.row]) else None

    def wrapped(self, processor: Processor) -> Processor:
        """The processor as transformers would call it. Some want to know in which row a text is."""

        def padded(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ids = torch.cat([self.ids, ids[:, len(self.prompt) :]], 1)
            found = processor(ids.expand(self.rows, -1), scores.repeat(self.rows, 1))
            return found[self.row : self.row + 1]

        return padded


def _refuse_what_is_not_supported(input_ids: torch.Tensor, generation_config: Any) -> None:
    if (beams := getattr(generation_config, "num_beams", 1) or 1) > 1:
        raise InputError(f"num_beams={beams}: beam search is not supported; use num_beams=1.")
    if input_ids.shape[1] == 0:
        raise InputError("there are no input_ids: Outpace needs the prompt's token ids, not inputs_embeds.")
    if getattr(generation_config, "return_dict_in_generate", False):
        raise InputError("return_dict_in_generate=True is not supported with Outpace: it returns the token ids.")


def _sampling(generation_config: Any, processors: Sequence[Processor]) -> Sampling:
    """transformers has put temperature, cuts and penalties into the processors; the seed comes from torch."""
    if not getattr(generation_config, "do_sample", False):
        return Sampling(processors=processors)
    return Sampling(temperature=1.0, processors=processors, seed=int(torch.randint(2**62, ())))
