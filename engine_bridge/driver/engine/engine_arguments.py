"""Values of `--engine-arg` and its like, typed as vLLM's own command line types them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any, get_args

from engine_bridge.driver.vllm_api.argument_names import engine_arguments
from engine_bridge.protocol.errors import InvalidRequest


def typed(given: Mapping[str, str]) -> dict[str, Any]:
    """Return values for EngineArgs, by name. Takes a second or two, as vLLM describes all its arguments first; nothing without arguments.

    Raises:
        InvalidRequest: with a text for the operator, for a name that vLLM does not know and a value that it does not take.
    """
    if not given:
        return {}
    from engine_bridge.driver.vllm_api import EngineArgs, FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False, add_help=False))
    known = {field.name: field for field in dataclasses.fields(EngineArgs)}
    line: list[str] = []
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise InvalidRequest(f"vLLM has no engine argument {name!r}{hint}")
        values = _values(value) if engine_arguments()[name] == "values" else [value]
        line += _words(name, values, known[name].type)
    try:
        made, rest = parser.parse_known_args(line)
    except (Exception, SystemExit) as error:  # argparse exits for some mistakes whatever its settings are
        raise InvalidRequest(f"an engine argument of vLLM's: {error}") from error
    if rest:
        raise InvalidRequest(f"vLLM does not understand the engine argument {' '.join(rest)}")
    return {name: getattr(made, name) for name in given}


def _values(value: str) -> list[str]:
    """Return the entries of a JSON list, or the value alone."""
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(value)
        if isinstance(found, list) and found:
            return [str(entry) for entry in found]
    return [value]


def _words(name: str, values: list[str], kind: Any) -> list[str]:
    """Return an argument as it is written on vLLM's command line. A switch is --name or --no-name there. Raises InvalidRequest."""
    flag, is_true = name.replace("_", "-"), values[0].lower() in ("true", "1")
    if kind not in (bool, bool | None):
        return [f"--{flag}"] if is_true and bool in get_args(kind) else [f"--{flag}", *values]
    if not is_true and values[0].lower() not in ("false", "0"):
        raise InvalidRequest(f"the engine argument {name} is true or false, got {values[0]!r}")
    return [f"--{flag}" if is_true else f"--no-{flag}"]
