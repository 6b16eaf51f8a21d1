"""Values of `--engine-arg`, typed as vLLM's own command line types them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

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
            raise InvalidRequest(f"--engine-arg: vLLM has no engine argument {name!r}{hint}")
        line += _words(name, value, takes_value=known[name].type not in (bool, bool | None))
    try:
        made, rest = parser.parse_known_args(line)
    except (Exception, SystemExit) as error:  # argparse exits for some mistakes whatever its settings are
        raise InvalidRequest(f"--engine-arg: {error}") from error
    if rest:
        raise InvalidRequest(f"--engine-arg: vLLM does not understand {' '.join(rest)}")
    return {name: getattr(made, name) for name in given}


def _words(name: str, value: str, *, takes_value: bool) -> list[str]:
    """Return an argument as it is written on vLLM's command line. A switch is --name or --no-name there. Raises InvalidRequest."""
    flag = name.replace("_", "-")
    if takes_value:
        return [f"--{flag}", value]
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"--engine-arg: {name} is true or false, got {value!r}")
    return [f"--{flag}" if value.lower() in ("true", "1") else f"--no-{flag}"]
