"""Adapters that are named one by one on the command line, in the two forms that vLLM's `--lora-modules` takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from engine_bridge.adapters.errors import quoted
from engine_bridge.adapters.names import problem_of

_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")


def is_of_hub(place: str) -> bool:
    """Return whether an adapter's place is a repository on a model hub, such as org/name, not a folder."""
    return _REPOSITORY.fullmatch(place) is not None


def parse_lora_modules(entries: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return (name, folder) of each "NAME=FOLDER" or `{"name": ..., "path": ...}`. A `~` is the user's home.

    What looks like a hub's repository, and is no folder here, stays as it is: see `is_of_hub`.

    Raises:
        ValueError: with a text for the operator, for another form, a name that no adapter may have, and a name given twice.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, path = _from_json(entry) if entry.lstrip().startswith("{") else _from_pair(entry)
        if not name or not path:
            raise ValueError(f"expected NAME=FOLDER, such as pirate=/models/pirate, got {entry!r}")
        if problem := problem_of(name):
            raise ValueError(f"no adapter may be called {quoted(name)}: the name {problem}")
        if found.setdefault(name, path) != path:
            raise ValueError(f"the adapter {name!r} is given twice")
    return tuple((name, _place_of(path)) for name, path in found.items())


def _place_of(path: str) -> str:
    folder = Path(path).expanduser().absolute()
    return path if is_of_hub(path) and not folder.is_dir() else str(folder)


def _from_pair(entry: str) -> tuple[str, str]:
    name, _, path = entry.partition("=")
    return name.strip(), path.strip()


def _from_json(entry: str) -> tuple[str, str]:
    try:
        value = json.loads(entry)
    except json.JSONDecodeError as error:
        raise ValueError(f"{entry!r} is no JSON object: {error}") from error
    return str(value.get("name", "")), str(value.get("path", ""))
