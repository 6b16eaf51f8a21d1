"""Runs that were kept: one JSON file each, with the command, the commit, the date, the machine and the bench's last line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.live.shared.report import machine

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
NAME = re.compile(r"(emulated|live)-[a-z0-9]+(-[a-z0-9]+)*")
# The folders of an absolute path, alone or behind an option's "=".
ABSOLUTE = re.compile(r"(?<![^=])/(?:[^/]+/)*(?=[^/])")
# What runs write themselves: a second run in a row is not one on changed code.
WRITTEN = ("bench/results/*.json", "bench/RESULTS.md", "docs/plots")


class RunError(Exception):
    """A run that cannot be kept, or a file that does not hold one. The text is for the person who ran it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One command that was run.

    commit: short hash, `+changes` where the tree had more. date: UTC, to the minute or, transcribed, the day. machine: as the bench's report says it.
    wall_s: None where it was not recorded. result: the bench's last line. source: "" for a kept run, else where the figures were copied from.
    note: what the reader must know beside the figures.
    """

    name: str
    command: str
    commit: str
    date: str
    machine: dict[str, Any]
    wall_s: float | None
    result: dict[str, Any]
    source: str = ""
    note: str = ""

    def text(self) -> str:
        """The file's content: everything but the name, which is the file's."""
        facts = {key: value for key, value in asdict(self).items() if key != "name" and value != ""}
        return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def load(folder: Path = FOLDER) -> dict[str, Run]:
    """Return all kept runs by name. Raises RunError for a file that is none."""
    runs = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        try:
            runs[path.stem] = Run(name=path.stem, **json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise RunError(f"{path.name} is not a kept run: {error}") from error
    return runs


def keep(name: str, command: Sequence[str], folder: Path = FOLDER) -> Run:
    """Run the command, pass its output through, and write its last line with the facts beside it into `folder`.

    `python` is the interpreter that runs this. Raises RunError, and writes nothing, if the command fails, its last line is no JSON object, or
    it says with `is_recorded` that it had to do without recorded data.
    """
    if not NAME.fullmatch(name):
        raise RunError(f"{name!r}: a name is emulated-TABLE or live-BENCH, for some of its parts with -PART")
    commit, where = commit_of(ROOT), machine()
    del where["commit"]
    date, began = f"{datetime.now(UTC):%Y-%m-%d %H:%M}", time.perf_counter()
    result = last_line(command)
    if result.get("is_recorded") is False:
        raise RunError("recorded data were missing, see above; nothing is kept")
    run = Run(name, shown(command), commit, date, where, round(time.perf_counter() - began, 1), result)
    (folder / f"{name}.json").write_text(run.text())
    return run


def last_line(command: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that a command prints last. Raises RunError."""
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    last = ""
    with subprocess.Popen([program, *command[1:]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if line.strip() else last
    if process.returncode:
        raise RunError(f"{shown(command)}: exit status {process.returncode}; nothing is kept")
    try:
        result = json.loads(last)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise RunError(f"{shown(command)}: the last line is no JSON object; nothing is kept")
    return result


def shown(command: Sequence[str]) -> str:
    """Return the command as a reader can type it: of absolute paths, which are one machine's, the last part."""
    return shlex.join(ABSOLUTE.sub("", word) for word in command)


def commit_of(root: Path) -> str:
    """Return the commit that is checked out, `+changes` if any file of the tree differs from it, but for what runs write."""
    commit = _git(root, "rev-parse", "--short", "HEAD").strip()
    others = [f":(exclude){path}" for path in WRITTEN]
    return commit + "+changes" * bool(_git(root, "status", "--porcelain", "--", ".", *others))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout
