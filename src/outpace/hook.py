"""The door from transformers: `model.generate(**inputs, custom_generate=outpace.Lookahead())`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from .errors import InputError
from .loop import decode
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
    """Decode with `method` under the conditions that transformers has prepared; returns prompt and answer."""
    _refuse_what_is_not_supported(input_ids, generation_config)
    # Mirrored for each call, because the user may change the model between two.
    engine = Engine(HFModel(model, check=model not in _checked))
    _checked.add(model)
    text: list[int] = input_ids[0].tolist()
    prompt = text
    processors: Sequence[Processor] = tuple(logits_processor or ())
    if attention_mask is not None and not attention_mask.all():
        prompt = input_ids[0][attention_mask[0].bool()].tolist()
        processors = [_with_padding(processor, input_ids, len(prompt)) for processor in processors]

    def stop(token: int) -> str | None:
        text.append(token)
        ids = torch.tensor([text], device=input_ids.device)
        return "stop" if stopping_criteria is not None and bool(stopping_criteria(ids, None).all()) else None

    for _step in decode(engine, method.prepare(engine.model), prompt, _sampling(generation_config, processors), stop):
        pass
    return torch.tensor([text], device=input_ids.device)


def _refuse_what_is_not_supported(input_ids: torch.Tensor, generation_config: Any) -> None:
    if (beams := getattr(generation_config, "num_beams", 1) or 1) > 1:
        raise InputError(f"num_beams={beams}: beam search is not supported; use num_beams=1.")
    if (copies := getattr(generation_config, "num_return_sequences", 1) or 1) > 1:
        raise InputError(f"num_return_sequences={copies} is not supported; call generate {copies} times.")
    if len(input_ids) != 1:
        raise InputError(f"a batch of {len(input_ids)} was given; Outpace takes one sequence at a time.")
    if input_ids.shape[1] == 0:
        raise InputError("there are no input_ids: Outpace needs the prompt's token ids, not inputs_embeds.")
    if getattr(generation_config, "return_dict_in_generate", False):
        raise InputError("return_dict_in_generate=True is not supported with Outpace: it returns the token ids.")


def _with_padding(processor: Processor, input_ids: torch.Tensor, prompt_length: int) -> Processor:
    """The processor as transformers would call it: with the prompt's padding still there."""

    def padded(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return processor(torch.cat([input_ids, ids[:, prompt_length:]], 1), scores)

    return padded


def _sampling(generation_config: Any, processors: Sequence[Processor]) -> Sampling:
    """transformers has put temperature, cuts and penalties into the processors; the seed comes from torch."""
    if not getattr(generation_config, "do_sample", False):
        return Sampling(processors=processors)
    return Sampling(temperature=1.0, processors=processors, seed=int(torch.randint(2**62, ())))
