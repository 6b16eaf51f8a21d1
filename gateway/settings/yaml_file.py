"""The config file of `vllm serve`, a YAML of its flags, as the words of a command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ENDINGS = (".yaml", ".yml")


class YamlRefusal(ValueError):
    """A file that is no YAML of flags. The text names it and says what is wrong."""


def with_lines_of_file(words: Sequence[str]) -> list[str]:
    """Return a command line with the flags of the YAML file that its --config names in the file's place, before all others, which win.

    A line without one is returned as it is: the server's own config file is TOML.

    Raises:
        YamlRefusal: the file cannot be read, or holds something else.
    """
    line = list(words)
    for index, word in enumerate(line):
        name, is_joined, path = word.partition("=")
        if name == "--config" and not is_joined:
            path = line[index + 1] if index + 1 < len(line) else ""
        if name == "--config" and path.endswith(_ENDINGS):
            del line[index : index + (1 if is_joined else 2)]
            # Behind a model that stands as a word before all flags.
            start = 1 if line and not line[0].startswith("-") else 0
            given = {_name(word) for word in line if word.startswith("-")} | ({"model"} if start else set())
            return [*line[:start], *_flags(_read(path), given), *line[start:]]
    return line


def _read(path: str) -> dict[str, Any]:
    import yaml  # comes with vLLM

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise YamlRefusal(f"--config: cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise YamlRefusal(f"--config: {path} holds no flags, such as `max-model-len: 4096`")
    return found


def _name(word: str) -> str:
    """Return a flag's name as the lines of a file have it, without the field of an object that it sets."""
    return word.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")


def _flags(values: dict[str, Any], given: set[str]) -> Iterator[str]:
    """Yield the file's flags, but for those that the command line gives."""
    for key, value in values.items():
        name = _name(str(key))
        if {name, f"no-{name}"} & given:
            continue
        match value:
            case bool():
                yield f"--{name}" if value else f"--no-{name}"
            case []:
                pass
            case list():
                yield f"--{name}"
                yield from (json.dumps(each) if isinstance(each, dict) else str(each) for each in value)
            case dict():
                yield from (f"--{name}", json.dumps(value))
            case _:
                yield f"--{name}={value}"
