"""A trace: everything a run did, as one JSON object, to check or draw it later.

kind, version     "outpace trace", 1
model             the name to load it by
fingerprint       its sizes and some of its weights, to identify it
about             device and its kind (cpu, cuda), dtype, runtime, versions
method, settings  the drafting method
sampling          every field of Sampling except processors
max_new_tokens    the limit of the request
stop              stop strings
prompt            token ids
steps             each with tokens, sources (per token), draft (tokens, parents, sources: per row; candidates), rows
                  (the accepted path), finish ("stop", "length" or null), seconds (by part of the step)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .draft import Draft, Step
from .errors import InputError, UnsupportedModel
from .files import read_json, write_whole
from .heads.storing import fingerprint
from .methods import Method
from .models.adapter import Model
from .picking import Sampling
from .runtime.calibrate import about as about_engine
from .runtime.plain import Engine

if TYPE_CHECKING:
    from .decoder import Decoder

KIND, VERSION = "outpace trace", 1


@dataclass(frozen=True)
class Trace:
    """A run, from the prompt to the last step."""

    model: str
    fingerprint: dict[str, Any]
    about: dict[str, str]
    method: str
    settings: dict[str, Any]
    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...]
    prompt: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer."""
        return [token for step in self.steps for token in step.tokens]

    def to_json(self) -> dict[str, object]:
        """The trace as plain values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {"sampling": sampling_to_json(self.sampling), "steps": [step_to_json(step) for step in self.steps]}
        return {"kind": KIND, "version": VERSION, **values}

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_whole(path, json.dumps(self.to_json()))


def record(
    decoder: Decoder,
    method: Method,
    prompt: Sequence[int],
    steps: Sequence[Step],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    model: str | None = None,
    weights: str | None = None,
) -> Trace:
    """The trace of a finished run. `model` is the name to load the model by, if not its own, with these `weights`."""
    sampling_to_json(sampling)  # raises InputError for processors
    penalty = decoder.sampling_for(sampling, prompt, max_new_tokens).repetition_penalty
    with decoder.engine.turns:  # a model's first fingerprint may run it
        identity = fingerprint_of(decoder.model)
    return Trace(
        model=model or decoder.model.name,
        fingerprint=identity,
        about={**about(decoder.engine), **({} if weights is None else {"weights": weights})},
        method=method.name,
        settings=settings_of(method),
        sampling=dataclasses.replace(sampling, repetition_penalty=penalty),
        max_new_tokens=max_new_tokens,
        stop=tuple(stop),
        prompt=tuple(prompt),
        steps=tuple(steps),
    )


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises InputError for a file that is not a trace, is truncated, or has another version."""
    stored = read_json(path, KIND, VERSION)
    try:
        return Trace(
            model=_of(str, stored["model"]),
            fingerprint=dict(stored["fingerprint"]),
            about=dict(stored["about"]),
            method=_of(str, stored["method"]),
            settings=dict(stored["settings"]),
            sampling=_sampling(stored["sampling"]),
            max_new_tokens=_of(int, stored["max_new_tokens"]),
            stop=tuple(_of(str, text) for text in stored["stop"]),
            prompt=_numbers(stored["prompt"]),
            steps=tuple(map(_step, stored["steps"])),
        )
    except KeyError as error:
        raise InputError(f"{path} is not a complete trace: it has no {error}.") from error
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{path} is not a valid trace: {error}") from error


def about(engine: Engine) -> dict[str, str]:
    """The model, the machine and the versions."""
    return {**about_engine(engine), "kind": engine.model.device.type, "outpace": __version__}


def fingerprint_of(model: Model) -> dict[str, Any]:
    """What identifies a model; if its embedding is not accessible, its sizes only."""
    try:
        return fingerprint(model)
    except UnsupportedModel:
        return {"width": model.width, "vocabulary": model.vocabulary, "layers": model.layers, "sample": []}


def settings_of(method: Method) -> dict[str, Any]:
    """A method's settings by name, as plain values: a model and loaded heads by their names."""
    return {item.name: _plain(getattr(method, item.name)) for item in dataclasses.fields(method)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    return getattr(value, "name", None) or type(value).__name__


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """Every field but the processors, which are code."""
    if sampling.processors:
        raise InputError("logits processors are code and cannot be written to a trace. Leave them out.")
    names = [item.name for item in fields(Sampling) if item.name != "processors"]
    return {**{name: getattr(sampling, name) for name in names}, "logit_bias": dict(sampling.logit_bias)}


def step_to_json(step: Step) -> dict[str, Any]:
    """A step as plain values."""
    draft = step.draft
    return {
        "tokens": step.tokens,
        "sources": step.sources,
        "draft": {
            "tokens": draft.tokens,
            "parents": draft.parents,
            "candidates": draft.candidates,
            "sources": draft.sources,
        },
        "rows": step.rows,
        "finish": step.finish,
        "seconds": step.seconds,
    }


def _sampling(stored: Mapping[str, Any]) -> Sampling:
    bias = {int(token): value for token, value in stored["logit_bias"].items()}
    return Sampling(**{**stored, "logit_bias": bias})


def _step(stored: Mapping[str, Any]) -> Step:
    tree = stored["draft"]
    tokens, parents = _numbers(tree["tokens"]), _numbers(tree["parents"])
    draft = Draft(tokens, parents, _of(int, tree["candidates"]), tuple(tree["sources"]))
    if not (1 <= draft.candidates <= len(tokens) == len(parents) == len(draft.sources)):
        raise ValueError("a draft's lists differ in length.")
    if parents[0] != -1 or any(not 0 <= parent < row for row, parent in enumerate(parents) if row):
        raise ValueError("a draft's parents do not form a tree.")
    rows, written = _numbers(stored["rows"]), _numbers(stored["tokens"])
    return Step(written, tuple(stored["sources"]), draft, rows, stored["finish"], dict(stored["seconds"]))


def _numbers(stored: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_of(int, number) for number in stored)


def _of(kind: Callable[..., Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} must be {'a whole number' if kind is int else 'text'}.")
    return value
