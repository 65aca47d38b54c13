"""Finished runs, appended to a file one by one, so that a killed benchmark can resume."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import check_version

KIND, VERSION = "outpace bench runs", 2


class Journal:
    """JSON lines: first what all runs have in common, then one run per line."""

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        self._path = path
        common = json.loads(json.dumps(common))  # as it is read from a file
        lines = self._read()
        if lines:
            self._check(lines[0], common)
        else:
            self._append({"kind": KIND, "version": VERSION, **common})
        self.runs: dict[str, dict[str, Any]] = {run["key"]: run for run in lines[1:] if "key" in run}

    def add(self, key: str, run: dict[str, Any]) -> dict[str, Any]:
        """Append a finished run, and flush it to disk."""
        self.runs[key] = {"key": key, **run}
        self._append(self.runs[key])
        return self.runs[key]

    def _read(self) -> list[dict[str, Any]]:
        """The complete lines: a kill may have truncated the last one, whose run is then not finished."""
        try:
            texts = self._path.read_text().split("\n") if self._path.exists() else []
        except (OSError, UnicodeError) as error:
            raise InputError(f"{self._path} could not be read: {error}.") from error
        found = []
        for text in texts:
            with suppress(ValueError):
                found.append(json.loads(text))
        if any(texts) and not (found and all(isinstance(line, dict) for line in found)):
            raise InputError(f"{self._path} is not a file of finished runs. Give another --out, or delete it.")
        return found

    def _check(self, stored: dict[str, Any], common: dict[str, Any]) -> None:
        check_version(self._path, stored, KIND, VERSION)
        for name, value in common.items():
            old = stored.get(name)
            if old != value:
                if isinstance(old, dict) and isinstance(value, dict):
                    name, old, value = next(
                        (key, old.get(key), value.get(key))
                        for key in {**old, **value}
                        if old.get(key) != value.get(key)
                    )
                raise InputError(
                    f"{self._path} has runs of another bench: {name} was {old!r:.80}, and is now {value!r:.80}. Give "
                    "another --out, or delete the file."
                )

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(("\n" if file.tell() else "") + json.dumps(line))
        except OSError as error:
            raise InputError(f"{self._path} could not be written: {error.strerror}.") from error
