"""What every client's script uses: it makes calls, checks the answers and prints one line of JSON for each.

It runs in the client's own environment, so it imports the standard library alone. A script is called with the server's address, the model
and what else the catalog names for the client.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

BASE_URL, MODEL, *ARGUMENTS = sys.argv[1:] or ["http://127.0.0.1:8000", "overture-demo"]
V1_URL = f"{BASE_URL}/v1"
KEY = "none"
SESSION_HEADER = "x-overture-session"
# Long enough to fill whole KV blocks, which are what a cache holds.
LONG = (
    "The keeper of the lighthouse writes down each ship that passes, its name, its cargo and the wind. " * 8
)
QUESTION = "What is the weather like in Paris?"
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
# In the form of chat completions.
_WEATHER = {"name": "get_weather", "description": "Today's weather in a city.", "parameters": WEATHER_SCHEMA}
WEATHER_TOOL = {"type": "function", "function": _WEATHER}
SHOWN_LINES = 12
# A busy machine needs a minute and a half for a coding agent's prompt of 30,000 tokens.
COMMAND_TIMEOUT_S = 240
SERVER_START_TIMEOUT_S = 240
# One loop for all calls: clients keep connections that belong to it.
_loop = asyncio.Runner()


def call(name: str, function: Callable[[], Any]) -> Any:
    """Run `function`, await what it returns where that can be awaited, and report the call under `name`.

    The function checks the answer with `assert`: whatever it raises counts as a failed call. Returns what the function returned, None where it
    failed.
    """
    line: dict[str, Any] = {"call": name, "ok": True}
    value = None
    try:
        value = function()
        if inspect.isawaitable(value):
            value = _loop.run(_awaited(value))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = "".join(traceback.format_exception(error.with_traceback(_past_us(error)))).splitlines()
        line |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
        line |= {"traceback": lines[:SHOWN_LINES]}
    # At once, and on a line of its own: clients print from threads of theirs, without an end of line.
    sys.stdout.write(f"\n{json.dumps(line)}\n")
    sys.stdout.flush()
    return value


def call_all() -> None:
    """`call` each function of the script that takes nothing, in their order and under their names. Not those whose name begins with a "_"."""
    for name, function in list(vars(sys.modules["__main__"]).items()):
        is_own = inspect.isfunction(function) and function.__module__ == "__main__"
        if is_own and not name.startswith("_") and not inspect.signature(function).parameters:
            call(name.replace("_", " "), function)


def raises(expected: type[BaseException], function: Callable[[], Any]) -> BaseException:
    """The exception of this type that `function` raises. Raises AssertionError where it raises none."""
    try:
        function()
    except expected as error:
        return error
    raise AssertionError(f"{expected.__name__} was not raised")


@contextmanager
def empty_home() -> Iterator[Path]:
    """A folder that commands take for the user's own while the block lasts, and in which they run: they find no settings there but ours."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        others = {
            f"XDG_{kind}_HOME": str(Path(name, ".xdg", kind)) for kind in ("CONFIG", "DATA", "STATE", "CACHE")
        }
        # Nobody listens on port 9 of loopback: what would ask the network for news or report to it finds no way out.
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9") | {
            "NO_PROXY": "127.0.0.1,localhost"
        }
        os.environ |= {"HOME": name, "PWD": name} | others | proxies
        os.chdir(name)
        yield Path(name)
        os.chdir("/")


def run_command(*arguments: str, status: int = 0) -> str:
    """What a command prints to stdout. Raises AssertionError where it ends with another exit status, or takes too long."""
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    said = f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    assert done.returncode == status, f"{arguments[0]} ended with status {done.returncode}: {said}"
    return done.stdout.strip()


@contextmanager
def server_of_the_client(*command: str, folder: Path, ready_path: str, **settings: str) -> Iterator[str]:
    """The address of a server that is part of the client, once it answers at `ready_path`.

    It runs in `folder`, with `settings` in its environment. Raises RuntimeError, with the end of its log, where it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program, *flags = command
    started = [
        str(Path(sys.executable).with_name(program)),
        *flags,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(started, cwd=folder, env=os.environ | settings, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url + ready_path, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SERVER_START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"it did not start: {log.read_text(errors='replace')[-1500:]}")


def json_lines(text: str) -> list[Any]:
    """What the lines of `text` that are JSON objects say."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def has_city(arguments: str | dict[str, Any]) -> bool:
    """Whether a tool call's arguments are what WEATHER_SCHEMA asks for."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return list(given) == ["city"] and isinstance(given["city"], str)


def _past_us(error: BaseException) -> TracebackType | None:
    """The error's traceback from the client's script on."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.endswith("_calls.py"):
        trace = trace.tb_next
    return trace or error.__traceback__


async def _awaited(value: Any) -> Any:
    return await value
