"""The config file of `vllm serve`, a YAML of its flags, as the words of a command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from gateway.settings.vllm_flags import FURTHER

_ENDINGS = (".yaml", ".yml")


class YamlRefusal(ValueError):
    """A file that is no YAML of flags. The text names it and says what is wrong, without its values, which may be keys."""


def with_lines_of_file(
    words: Sequence[str], arguments: Callable[[], Collection[str]] = tuple[str, ...]
) -> list[str]:
    """Return a command line with the flags of the YAML file that its --config names in the file's place, before all others, which win.

    A line without one is returned as it is: the server's own config file is TOML.

    Args:
        words: the command line.
        arguments: returns the names of vLLM's engine arguments, of which a list is one value; another flag is repeated for each entry.

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
            made = list[str]()
            for key, value in _read(path).items():
                name = _name(str(key))
                if {name, f"no-{name}"} & given:
                    continue
                try:
                    made += _flags(name, value, arguments())
                except (RecursionError, TypeError, ValueError) as error:
                    raise YamlRefusal(
                        f"--config: {path}: {name} has no value that a flag can have"
                    ) from error
            return [*line[:start], *made, *line[start:]]
    return line


def _read(path: str) -> dict[str, Any]:
    import yaml  # comes with vLLM

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise YamlRefusal(f"--config: cannot read {path}: {error.strerror}") from error
    except (RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        # The error's own text shows the line.
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise YamlRefusal(
            f"--config: {path} is no YAML{where}: {problem or 'it holds a date, or a number, that is none'}"
        ) from error
    if not isinstance(found, dict):
        raise YamlRefusal(f"--config: {path} holds no flags, such as `max-model-len: 4096`")
    return found


def _name(word: str) -> str:
    """Return a flag's name as the lines of a file have it, without the field of an object that it sets."""
    return word.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")


def _flags(name: str, value: Any, arguments: Collection[str]) -> Iterator[str]:
    """Yield one line of the file as flags, each joined to its value, so that none takes the word behind it.

    Raises RecursionError, TypeError or ValueError for a value that no flag has.
    """
    flag = f"--{name}"
    match value:
        case bool():
            yield flag if value else f"--no-{name}"
        case []:
            pass
        case list() if flag not in FURTHER and name.replace("-", "_") in arguments:
            yield f"{flag}={json.dumps(value)}"
        case list():
            for each in value:
                if each is None or isinstance(each, list):
                    raise ValueError("an entry that is none")
                yield f"{flag}={_text(each)}"
                flag = FURTHER.get(flag, flag)
        case _:
            yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
