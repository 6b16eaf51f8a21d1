"""What every live bench prints: a table for people, then one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def options(doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """A bench's command line, its module's text as the help. quick: what `--quick` comes to; "" where there is none."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def last_line(
    *command: str, timeout_s: float | None = None, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command and return its last line as JSON. Raises RuntimeError if it fails. env: variables beside this process's."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | (env or {}),
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class Progress:
    """Prints which part runs, with the seconds since the start."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started_s

    def say(self, what: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{self.elapsed_s:.0f} s] {what}", flush=True)


def spread(values: Sequence[float]) -> str:
    """Median and range of repeats."""
    return f"{statistics.median(values):.3g}  ({min(values):.3g} … {max(values):.3g}, n={len(values)})"


def spread_ms(seconds: Iterable[float]) -> str:
    """Median and range of repeats in ms, of seconds."""
    return spread([each * 1e3 for each in seconds])


def machine() -> dict[str, Any]:
    """Return the machine on which the numbers were taken. A `load_1m` above the number of cores means that other work was running."""
    from engine_bridge.settings.machine import processor_name  # not needed to read results

    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "commit": _commit(),
    }


def _commit() -> str:
    """Return the short hash of the commit that is checked out here; "" where there is none, or no git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def figures(result: Mapping[str, Any], aims: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Figures as they are, with what each is to come to."""
    return [(name, str(value), aims.get(name, "")) for name, value in result.items()]


def report(title: str, rows: Sequence[tuple[str, str, str]], result: dict[str, Any]) -> None:
    """Print rows of (what, measured, aim) and the result as the last line."""
    where = machine()
    print(
        f"\n{title}: {where['cpu']}, {where['cores']} cores, load {where['load_1m']}, commit {where['commit']}"
    )
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for what, measured, aim in rows:
        print(f"  {what:<{widths[0]}}  {measured:<{widths[1]}}  {aim}")
    print(json.dumps(result | {"machine": where}), flush=True)
