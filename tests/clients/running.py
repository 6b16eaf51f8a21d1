"""Run one client's script and, where we have a hook for the framework, its example and its tests; every checked answer is a call."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.live.shared.report import ROOT
from tests.clients.catalog import HOOK_TESTS, Client
from tests.clients.environments import Environment

SCRIPT_TIMEOUT_S = 600.0
LAST_LINES = 12
# Takes the object that a line begins with: what a client prints may follow it.
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call. error and traceback are empty where it was answered as it should be."""

    name: str
    error: str = ""
    traceback: tuple[str, ...] = ()


@dataclass(slots=True)
class Result:
    """What became of one client."""

    client: Client
    version: str = ""
    calls: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        """The calls that were not answered as they should be."""
        return [call for call in self.calls if call.error]


def outcomes(lines: list[str], status: int, errors: str) -> list[Outcome]:
    """What a script reported, one JSON line for each call.

    A script that ends early, or that reports nothing, is one failed call more, with the end of what it wrote to stderr.
    """
    found = []
    for line in lines:
        # Python puts a blank behind the colon, JavaScript does not.
        if line.startswith('{"call":'):
            told: dict[str, Any]
            told, _ = _DECODER.raw_decode(line)
            found.append(Outcome(told["call"], told.get("error", ""), tuple(told.get("traceback", ()))))
    if status or not found:
        ended = f"the script ended with status {status}" if status else "the script reported no call"
        found.append(Outcome("the whole script", ended, tuple(errors.strip().splitlines()[-LAST_LINES:])))
    return found


def run_script(environment: Environment, base_url: str, model: str) -> list[Outcome]:
    """The calls of the client's own script."""
    client = environment.client
    command = [*environment.command(client.script), base_url, model, *client.arguments]
    path = os.pathsep.join([*map(str, environment.programs), os.environ.get("PATH", os.defpath)])
    return outcomes(*_finished(command, {"PATH": path}))


def run_hook(environment: Environment, base_url: str, model: str) -> list[Outcome]:
    """Two calls: our example for the framework against the real server, and the hook's own tests with the real framework."""
    python, hook = str(environment.python), environment.client.hook
    example = [python, f"demo/agents/{hook}_example.py", "--base-url", f"{base_url}/v1", "--model", model]
    # The conftests above are for the server's tests and import what no client has.
    flags = ["-q", "-p", "no:cacheprovider", f"--confcutdir={Path(HOOK_TESTS).parent}"]
    tests, ours = [python, "-m", "pytest", *flags, HOOK_TESTS, "-k", hook], {"PYTHONPATH": str(ROOT)}
    return [_example_outcome(*_finished(example, ours)), _tests_outcome(*_finished(tests, ours))]


def _example_outcome(lines: list[str], status: int, errors: str) -> Outcome:
    name = "the hook's example"
    tail = tuple(errors.strip().splitlines()[-LAST_LINES:])
    if status or not lines:
        return Outcome(name, f"it ended with status {status}", tail)
    report = json.loads(lines[-1])
    if report["num_hits"] < 1 or report["num_advisories_failed"]:
        return Outcome(name, f"no advisory came before its request, or some failed: {report}", tail)
    return Outcome(name)


def _tests_outcome(lines: list[str], status: int, errors: str) -> Outcome:
    name = "the hook's tests"
    summary = lines[-1] if lines else errors[-300:]
    if status or "skipped" in summary:
        return Outcome(name, summary, tuple(lines[-LAST_LINES:]))
    return Outcome(name)


def _finished(command: list[str], more: dict[str, str]) -> tuple[list[str], int, str]:
    """Run to the end in a process group of its own, so that nothing it started is left. Returns its lines, its status and its stderr."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    environment = clean | {"NO_PROXY": "127.0.0.1", "PYTHONUNBUFFERED": "1", "DO_NOT_TRACK": "1"} | more
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        out, errors = process.communicate(timeout=SCRIPT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        out, errors = process.communicate()
        errors += f"\nstopped after {SCRIPT_TIMEOUT_S:.0f} s"
    _kill_group(process)
    return out.splitlines(), process.returncode, errors


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
