"""What every table is made of: its command, figures beside the paper's, runs on several cores, changes by seed, and where a curve leaves a limit."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.live.report import report


@dataclass(frozen=True, slots=True)
class Figure:
    """One number beside the paper's. values: by seed. is_less_better: which way falling short is. made_by: policy objects."""

    what: str
    values: tuple[float, ...]
    paper: float | None
    is_less_better: bool
    made_by: str
    unit: str = "change"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_compared(self) -> bool:
        return self.paper is not None

    @property
    def falls_short(self) -> bool:
        if self.paper is None:
            return False
        return self.median > self.paper if self.is_less_better else self.median < self.paper

    def text(self, value: float) -> str:
        return {
            "change": f"{value:+.1%}",
            "ratio": f"{value:.2f}×",
            "share": f"{value:.1%}",
            "s": f"{value:.3g} s",
            "per_s": f"{value:.2f}/s",
        }[self.unit]

    def row(self) -> tuple[str, str, str]:
        ours = f"{self.text(self.median)}  ({self.text(min(self.values))} … {self.text(max(self.values))})"
        paper = f"paper {self.text(self.paper)}" if self.paper is not None else "paper: no number"
        short = ", FALLS SHORT" if self.falls_short else ""
        return self.what, ours, f"{paper}{short}   [{self.made_by}]"

    def result(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "median": round(self.median, 4),
            "spread": [round(min(self.values), 4), round(max(self.values), 4)],
            "seeds": [round(value, 4) for value in self.values],
            "paper": self.paper,
            "falls_short": self.falls_short,
            "made_by": self.made_by,
        }


class Workers:
    """Runs of a job each, on so many cores; results in the order of asking. `with` it ends its processes."""

    def __init__(self, num: int) -> None:
        self._executor = ProcessPoolExecutor(num) if num > 1 else None

    def map(self, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
        if self._executor is None:
            return [function(*row) for row in zip(*columns, strict=True)]
        return list(self._executor.map(function, *columns))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._executor is not None:
            self._executor.shutdown()


def changes(ours: Sequence[Any], theirs: Sequence[Any], name: str) -> tuple[float, ...]:
    """Of one number of the outcomes against another arm's, seed by seed."""
    return tuple(getattr(a, name) / getattr(b, name) - 1 for a, b in zip(ours, theirs, strict=True))


def crossing(loads: Sequence[float], seconds: Sequence[float], limit_s: float) -> float | None:
    """The load at which seconds first leave the limit, on straight lines between logarithms; None if that is not between two of the loads."""
    for (low, under), (high, over) in pairwise(zip(loads, seconds, strict=True)):
        if under <= limit_s < over:
            return low + (high - low) * math.log(limit_s / under) / math.log(over / under)
        if under > limit_s:
            return None
    return None


# -- the command of a table ---------------------------------------------------------------------------------------------

QUICK_SEEDS = 2

Part = tuple[list[Figure], dict[str, Any]]
"""Of a table: figures, and what goes into its JSON. `made_by` there: policy objects, cost model and traffic of all of it."""


def parser_for(
    table: str, about: str | None, parts: Iterable[str], quick: str, default: str = "all"
) -> argparse.ArgumentParser:
    """Of a table that is called by itself, with the arguments that all have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.sim {table}",
        description=about,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_table_arguments(parser, parts, quick, default)
    return parser


def add_table_arguments(
    parser: argparse.ArgumentParser, parts: Iterable[str], quick: str, default: str = "all"
) -> None:
    """The arguments that all tables have. quick: what `--quick` leaves of it; two seeds in any case. default: the parts without `--part`."""
    parser.add_argument("--part", choices=tuple(parts), action="append", help=f"{default} by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--quick", action="store_true", help=f"{quick}, {QUICK_SEEDS} seeds")


def seeds_of(args: argparse.Namespace) -> tuple[int, ...]:
    return tuple(range(args.seed, args.seed + (QUICK_SEEDS if args.quick else args.seeds)))


def report_parts(
    title: str,
    table: str,
    seeds: Sequence[int],
    parts: Iterable[tuple[str, Part]],
    top: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Print each part as it is done to stderr, then all of them and, as the last line, JSON.

    top: what of the parts' JSON stands beside `parts`.
    """
    began = time.perf_counter()
    rows: list[tuple[str, str, str]] = []
    figures: list[Figure] = []
    found: dict[str, Any] = {}
    for name, (own, result) in parts:
        ordered = sorted(own, key=lambda figure: (not figure.falls_short, figure.paper is None))
        own_rows = [figure.row() for figure in ordered]
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        print(*map("  ".join, own_rows), sep="\n", file=sys.stderr, flush=True)
        rows += [(f"-- {name}", "", result.get("made_by", "")), *own_rows]
        figures += own
        found[name] = result | {"figures": [figure.result() for figure in own]}
    compared = [figure for figure in figures if figure.is_compared]
    num_short = sum(figure.falls_short for figure in compared)
    about = (
        f"{title} in virtual time ({num_short} of {len(compared)} compared figures fall short of the paper)"
    )
    result = {"bench": table, "seeds": list(seeds), "parts": found} | top(found)
    report(about, rows, result | {"took_s": round(time.perf_counter() - began, 1)})
