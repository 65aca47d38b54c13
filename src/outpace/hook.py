"""The door from transformers: `model.generate(**inputs, custom_generate=outpace.Lookahead())`."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from .errors import InputError
from .loop import decode
from .methods.base import Method
from .models.hf import HFModel
from .picking import Sampling
from .runtime.plain import Engine

_engines: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()  # nothing is hung on the user's model


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
    if (beams := getattr(generation_config, "num_beams", 1) or 1) > 1:
        raise InputError(f"num_beams={beams}: beam search is not supported; use num_beams=1.")
    if len(input_ids) != 1:
        raise InputError(f"a batch of {len(input_ids)} was given; Outpace takes one sequence at a time.")
    if getattr(generation_config, "return_dict_in_generate", False):
        raise InputError("return_dict_in_generate=True is not supported with Outpace: it returns the token ids.")
    engine = _engines.get(model)
    if engine is None:
        engine = _engines[model] = Engine(HFModel(model))
    prompt = input_ids[0] if attention_mask is None else input_ids[0][attention_mask[0].bool()]
    text: list[int] = input_ids[0].tolist()

    def stop(token: int) -> str | None:
        text.append(token)
        ids = torch.tensor([text], device=input_ids.device)
        return "stop" if stopping_criteria is not None and bool(stopping_criteria(ids, None).all()) else None

    ready = method.prepare(engine.model)
    for _step in decode(engine, ready, prompt.tolist(), _sampling(generation_config, logits_processor), stop):
        pass
    return torch.tensor([text], device=input_ids.device)


def _sampling(generation_config: Any, logits_processor: Any) -> Sampling:
    """transformers has put temperature, cuts and penalties into the processors; the seed comes from torch."""
    processors = tuple(logits_processor or ())
    if not getattr(generation_config, "do_sample", False):
        return Sampling(processors=processors)
    return Sampling(temperature=1.0, processors=processors, seed=int(torch.randint(2**62, ())))
