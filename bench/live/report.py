"""What every live bench prints: a table for people, then one JSON line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any


class Progress:
    """Says what is under way, with the seconds since it began."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def say(self, what: str) -> None:
        print(f"[{self.elapsed_s:.0f} s] {what}", flush=True)


def spread(values: Sequence[float]) -> str:
    """Median and range of repeats."""
    return f"{statistics.median(values):.3g}  ({min(values):.3g} … {max(values):.3g}, n={len(values)})"


def machine() -> dict[str, Any]:
    """Where the numbers were taken. `load_1m` is the load average: above the number of cores somebody else was at work."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {"cpu": model, "cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2), "commit": commit}


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
