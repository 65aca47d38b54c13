"""`--set`: settings by name, converted to the types of their fields, and checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TypeAlias, get_args, get_type_hints

from ..errors import InputError, UnknownNameError

Chosen: TypeAlias = tuple[str, dict[str, object]]
"""A method's name and the given settings."""

PLAIN = "autoregressive"
OF_METHOD = "METHOD.NAME=VALUE, as in --set lookahead.window=5"
OF_HEADS = "KIND.NAME=VALUE, as in --set amphista.stages=1"


def choose_method(name: str | None, settings: Iterable[str], device: str | None) -> Chosen:
    """The method for one command. Settings may be given as for several methods, METHOD.NAME=VALUE."""
    from ..methods import DEFAULT

    given: dict[str, str] = {}
    for setting in settings:
        key, value = _split(setting)
        owner, dot, short = key.partition(".")
        if dot and owner == (name or DEFAULT):
            key = short
        if key in given:
            raise InputError(f"--set {setting}: {key} was given before, as {key}={given[key]}. Give one of them.")
        given[key] = value
    return _chosen(name, given, device)


def choose_for_race(names: Sequence[str], settings: Iterable[str], device: str | None) -> list[Chosen]:
    """The methods of a race."""
    given = _grouped(names, settings, "method in this race", OF_METHOD)
    return [_chosen(name, _last(given[name]), device) for name in names]


def choose_for_bench(names: Sequence[str], settings: Iterable[str], device: str | None) -> list[tuple[str, Chosen]]:
    """The methods of a bench with their labels, one for each combination of settings. Plain decoding comes first."""
    names = [PLAIN, *(name for name in names if name != PLAIN)]
    given = _grouped(names, settings, "method in this bench", OF_METHOD)
    found = []
    for name in names:
        for values in product(*given[name].values()):
            chosen = dict(zip(given[name], values, strict=True))
            label = " ".join([name, *(f"{key}={value}" for key, value in chosen.items())])
            found.append((label, _chosen(name, chosen, device)))
    return found


def choose_heads(kinds: Sequence[str], settings: Iterable[str]) -> dict[str, dict[str, object]]:
    """The settings of each kind of heads to train."""
    from ..heads import TRAINABLE

    given = _grouped(kinds, settings, "kind of heads to train", OF_HEADS)
    found = {}
    for kind in kinds:
        if kind not in TRAINABLE:
            raise UnknownNameError("kind of heads", kind, TRAINABLE)
        found[kind] = _typed(kind, _last(given[kind]), TRAINABLE[kind].settings_type)
    return found


def _chosen(name: str | None, settings: Mapping[str, str], device: str | None) -> Chosen:
    from ..methods import DEFAULT, METHODS, make
    from ..models.loading import resolve_device

    cpu = resolve_device(device).type == "cpu"
    name = name or DEFAULT
    given = _typed(name, settings, METHODS.get(name))
    make(name, cpu=cpu, costs=None, **given)
    return name, given


def _grouped(owners: Sequence[str], settings: Iterable[str], what: str, form: str) -> dict[str, dict[str, list[str]]]:
    """Settings like OWNER.NAME=VALUE: for each owner, the values of each name in the order given."""
    given: dict[str, dict[str, list[str]]] = {owner: {} for owner in owners}
    for setting in settings:
        key, value = _split(setting)
        owner, dot, name = key.partition(".")
        if not (dot and name):
            raise InputError(f"--set {setting}: expected {form}.")
        if owner not in given:
            raise UnknownNameError(what, owner, given)
        given[owner].setdefault(name, []).append(value)
    return given


def _split(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not (name and equals):
        raise InputError(f"--set {setting}: expected NAME=VALUE, as in --set window=15.")
    return name.strip(), value.strip()


def _last(given: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """One value for each name: the last one given."""
    return {name: values[-1] for name, values in given.items()}


def _typed(owner: str, settings: Mapping[str, str], kind: type | None) -> dict[str, object]:
    """Settings, converted to the types of the fields of `kind`."""
    types = get_type_hints(kind) if kind is not None else {}
    return {name: _convert(owner, name, value, types.get(name)) for name, value in settings.items()}


def _convert(owner: str, name: str, value: str, kind: object) -> object:
    kinds = get_args(kind) or (kind,)  # `store` is a number or an object
    if bool in kinds:
        if value.lower() not in ("true", "false"):
            raise InputError(f"{owner}: {name}={value!r} must be true or false.")
        return value.lower() == "true"
    if int in kinds or float in kinds:
        try:
            return int(value) if int in kinds else float(value)
        except ValueError:
            wanted = "a whole number" if int in kinds else "a number"
            raise InputError(f"{owner}: {name}={value!r} must be {wanted}.") from None
    return value
