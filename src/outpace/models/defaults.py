"""A model's `generation_config`: greedy output equals that of transformers' own `generate(do_sample=False)`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from ..errors import OutpaceWarning
from ..picking import Sampling
from ..sending import move

# What transformers applies before the penalty; our own penalty comes first.
_BEFORE_PENALTY = ("guidance_scale", "sequence_bias", "encoder_repetition_penalty")
_OTHER_WAYS = ("num_beams", "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "token_healing")
_OTHER_ENDS = ("stop_strings", "max_time")


class Defaults:
    """The settings of one model that affect its greedy output. Warns once about unsupported ones."""

    def __init__(self, model: Any, ends: Sequence[int], device: torch.device) -> None:
        self._model = model
        self._device = device
        self._config: Any = copy.deepcopy(getattr(model, "generation_config", None))
        if self._config is None:
            return
        left = [name for name in (*_OTHER_WAYS, *_OTHER_ENDS) if getattr(self._config, name, None) not in (None, False)]
        left = [name for name in left if (name, getattr(self._config, name)) != ("num_beams", 1)]
        if left:
            _warn(
                f"the model's generation_config has {', '.join(left)}, which Outpace does not support: it decodes "
                "greedily or samples, and stops at end-of-sequence tokens, max_new_tokens and `stop`."
            )
        self._samples = bool(self._config.do_sample)
        self._config.do_sample = False
        self._config.use_cache = True  # for the guidance processor, which runs the model itself
        self._config._eos_token_tensor = torch.tensor(list(ends), device=device) if ends else None

    def apply(self, given: Sampling | None, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        """The sampling of a sequence. What the user gives takes precedence over the model's."""
        sampling = given or Sampling()
        if self._config is None:
            return sampling
        if given is None and self._samples:
            self._samples = False
            _warn(
                "the model's generation_config asks for sampling (do_sample=True); Outpace decodes greedily unless it "
                "is given a Sampling, such as outpace.Sampling(temperature=0.7)."
            )
        own, penalty = sampling.repetition_penalty, self._config.repetition_penalty
        if own is None and not self._in_order(sampling):
            own = penalty
        penalty = None if own is not None else penalty
        processors = sampling.processors
        if self._has_more or penalty is not None:
            processors = self._processors(prompt, max_new_tokens, penalty, processors)
        return replace(sampling, repetition_penalty=own, processors=processors)

    @cached_property
    def _has_more(self) -> bool:
        """Whether there are processors other than a repetition penalty."""
        return bool(self._processors([0], 1, None, ()))

    def _processors(
        self, prompt: Sequence[int], max_new_tokens: int, penalty: float | None, given: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Transformers' processors for a sequence, and the user's."""
        config = copy.copy(self._config)
        config.max_length, config.repetition_penalty = len(prompt) + max_new_tokens, penalty
        found = self._model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=move(torch.tensor([list(prompt)]), self._device),
            logits_processor=list(given),
            device=self._device,
        )
        return tuple(found)

    def _in_order(self, sampling: Sampling) -> bool:
        """Whether the penalty must stay among transformers' processors: after others, or replaced by the user's."""
        return any(getattr(self._config, name, None) not in (None, 1) for name in _BEFORE_PENALTY) or any(
            type(item) is RepetitionPenaltyLogitsProcessor for item in sampling.processors
        )


def _warn(message: str) -> None:
    warnings.warn(message, OutpaceWarning, stacklevel=2)
