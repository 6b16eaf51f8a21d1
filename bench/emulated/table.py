"""The harness of the benches in virtual time: plays each point with every seed, compares arms seed by seed, and prints figures beside the papers'.

A bench states its scenario: what a point is (a frozen dataclass with a field `seed`), `serve`, which plays one point, and parts, each of which asks a
`Bench` for outcomes and gives it figures. Everything else stands here: the command's options, processes, comparisons, intervals and the report.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.intervals import interval
from bench.live.shared.report import report

QUICK_SEEDS = 2
FORMS = {
    "change": "{:+.1%}",
    "ratio": "{:.2f}×",
    "share": "{:.1%}",
    "s": "{:.3g} s",
    "ms": "{:.4g} ms",
    "number": "{:.3g}",
}

Place = tuple[str, ...]
"""Keys that lead to a value of the JSON."""
_interval = cache(interval)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, perhaps beside an aim.

    Attributes:
        place: where its median stands in the JSON; in the table these keys are its name.
        paper: the paper's number, or an aim of ours beside which no paper has one; None without either.
        is_less_better: None where neither more nor less is better, so that the figure never falls short.
        unit: a key of `FORMS`.
    """

    place: Place
    values: tuple[float, ...]
    paper: float | None = None
    is_less_better: bool | None = True
    unit: str = "change"

    @property
    def median(self) -> float:
        """The median over seeds."""
        return statistics.median(self.values)

    @property
    def is_compared(self) -> bool:
        """Whether the paper has a number that ours may fall short of."""
        return self.paper is not None and self.is_less_better is not None

    @property
    def falls_short(self) -> bool:
        """Whether the median is on the wrong side of the paper's number."""
        if self.paper is None or self.is_less_better is None:
            return False
        return self.median > self.paper if self.is_less_better else self.median < self.paper

    def row(self) -> tuple[str, str, str]:
        """Return the figure's line of the table; the interval is that of the median over seeds, at 95%, by bootstrap."""
        text = FORMS[self.unit].format
        ends = _interval(self.values)
        ours = text(self.median) + (f"  ({text(ends[0])} … {text(ends[1])})" if ends else "")
        wanted = f"wanted {text(self.paper)}" if self.paper is not None else ""
        return ", ".join(self.place), ours, wanted + ", FALLS SHORT" * self.falls_short

    def result(self) -> dict[str, Any]:
        """Return what the JSON says of the figure beside its median."""
        return {
            "what": ", ".join(self.place),
            "median": round(self.median, 4),
            "interval": _interval(self.values),
            "spread": [round(min(self.values), 4), round(max(self.values), 4)],
            "seeds": [round(value, 4) for value in self.values],
            "paper": self.paper,
            "falls_short": self.falls_short,
        }


def median(values: Iterable[float]) -> float:
    """Return the rounded median, as the JSON has it."""
    return round(statistics.median(values), 4)


def crossing(loads: Sequence[float], seconds: Sequence[float], limit_s: float) -> float | None:
    """Return the load at which seconds first leave the limit, interpolated between the logarithms of seconds.

    None if they do not leave it between two of the loads.
    """
    for (low, under), (high, over) in pairwise(zip(loads, seconds, strict=True)):
        if under <= limit_s < over:
            return low + (high - low) * math.log(limit_s / under) / math.log(over / under)
        if under > limit_s:
            return None
    return None


@dataclass(slots=True)
class Bench:
    """The plays of one table, each of which is made once, and their findings.

    Attributes:
        serve: plays one point and returns its outcome, whose numbers `values` and what is made of them take by their names.
        map: as the built-in one, perhaps by several processes.
        size: how large each play is: seconds of traffic or requests, as the table has it.
        files: the user's data.
        found: the JSON so far.
    """

    serve: Callable[[Any], Any]
    seeds: tuple[int, ...]
    size: float = 0.0
    map: Callable[..., Iterable[Any]] = map
    is_quick: bool = False
    files: tuple[Path, ...] = ()
    outcomes: dict[Any, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def play(self, points: Iterable[Any]) -> None:
        """Play these points with every seed, unless they have been played. Long plays first leave no core idle at the end."""
        wanted = dict.fromkeys(replace(point, seed=seed) for point in points for seed in self.seeds)
        new = [point for point in wanted if point not in self.outcomes]
        self.outcomes.update(zip(new, self.map(self.serve, new), strict=True))

    def of(self, point: Any) -> list[Any]:
        """Return a point's outcomes, one for each seed."""
        self.play([point])
        return [self.outcomes[replace(point, seed=seed)] for seed in self.seeds]

    def values(self, point: Any, measure: str) -> list[Any]:
        """Return one number of a point's outcomes, one for each seed."""
        return [outcome[measure] for outcome in self.of(point)]

    def ratios(self, ours: Any, theirs: Any, measure: str) -> tuple[float, ...]:
        """Return a number of one point over that of another one, seed by seed."""
        pairs = zip(self.values(ours, measure), self.values(theirs, measure), strict=True)
        return tuple(own / other for own, other in pairs)

    def changes(self, ours: Any, theirs: Any, measure: str) -> tuple[float, ...]:
        """Return the change of a number of one point against another one's, seed by seed: -0.3 is 30% less."""
        return tuple(ratio - 1 for ratio in self.ratios(ours, theirs, measure))

    def note(self, place: Place, value: Any) -> None:
        """Put a value into the JSON."""
        tree = self.found
        for key in place[:-1]:
            tree = tree.setdefault(key, {})
        tree[place[-1]] = value

    def figure(
        self,
        place: Place,
        values: Iterable[float],
        paper: float | None = None,
        is_less_better: bool | None = True,
        unit: str = "change",
    ) -> float:
        """Put a figure into the table and its median into the JSON; return the median. The arguments are those of `Figure`."""
        figure = Figure(place, tuple(values), paper, is_less_better, unit)
        self.figures.append(figure)
        self.note(place, round(figure.median, 4))
        return figure.median


Part = Callable[[Bench], None]


@dataclass(frozen=True, slots=True)
class Table:
    """One command: its scenario and its options.

    Attributes:
        name: of the bench, as its JSON and its kept run have it.
        sizes: the size of each play, usually and with `--quick`; see `Bench.size`.
        quick_parts: the parts that `--quick` plays; all of them where it is empty.
        first_seed: the seed of the first play unless another one is asked for.
        is_timed: wall time is measured, and so one play runs at a time.
        files: names the option by which a user adds files of data, and describes their content; see `Bench.files`.
    """

    name: str
    title: str
    serve: Callable[[Any], Any]
    parts: Mapping[str, Part]
    sizes: tuple[float, float]
    quick: str
    seeds: int = 5
    quick_seeds: int = QUICK_SEEDS
    quick_parts: Sequence[str] = ()
    first_seed: int = 1
    is_timed: bool = False
    files: tuple[str, str] | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the command."""
        parser.add_argument("--part", choices=tuple(self.parts), action="append", help="all by default")
        parser.add_argument(
            "--seeds", type=int, help=f"{self.seeds} by default, {self.quick_seeds} with --quick"
        )
        parser.add_argument("--seed", type=int, default=self.first_seed, help="the first one")
        parser.add_argument(
            "--jobs", type=int, default=1 if self.is_timed else os.cpu_count(), help="processes"
        )
        parser.add_argument("--quick", action="store_true", help=self.quick)
        parser.set_defaults(files=[])
        if self.files is not None:
            option, about = self.files
            parser.add_argument(option, type=Path, action="append", dest="files", help=about)

    def run(self, args: argparse.Namespace) -> None:
        """Play the parts that are asked for and print the table."""
        num_seeds = args.seeds or (min(self.quick_seeds, self.seeds) if args.quick else self.seeds)
        seeds = tuple(range(args.seed, args.seed + num_seeds))
        bench = Bench(self.serve, seeds, self.sizes[args.quick], map, args.quick, tuple(args.files))
        parts = args.part or (self.quick_parts if args.quick else ()) or tuple(self.parts)
        if args.jobs <= 1:
            self.report(bench, parts)
            return
        with ProcessPoolExecutor(args.jobs) as processes:
            self.report(replace(bench, map=processes.map), parts)

    def report(self, bench: Bench, names: Sequence[str]) -> None:
        """Print each part as it is done to stderr, then all of them, figures that fall short first, and the JSON as the last line."""
        began = time.perf_counter()
        rows: list[tuple[str, str, str]] = []
        for name in names:
            num_before = len(bench.figures)
            self.parts[name](bench)
            own = bench.figures[num_before:]
            bench.note(("parts", name, "figures"), [figure.result() for figure in own])
            ordered = sorted(own, key=lambda figure: (not figure.falls_short, figure.paper is None))
            own_rows = [(f"-- {name}", "", ""), *(figure.row() for figure in ordered)]
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            print(*map("  ".join, own_rows), sep="\n", file=sys.stderr, flush=True)
            rows += own_rows
        num_compared, num_short = (
            sum(getattr(figure, name) for figure in bench.figures) for name in ("is_compared", "falls_short")
        )
        about = f"{self.title} in virtual time ({num_short} of {num_compared} compared figures fall short)"
        took_s = round(time.perf_counter() - began, 1)
        report(
            about, rows, {"bench": self.name, "seeds": list(bench.seeds)} | bench.found | {"took_s": took_s}
        )
