"""Find claims' figures in kept runs, and say which fall short."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.results.claims import BYTES, CHANGE, LOWER, MS, RATIO, SHARE, YES, Claim, Figure, S
from bench.results.runs import Run

# A key, or the `[beginning]` of an entry's `what`.
STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
FORMS = {
    CHANGE: (100, "{:+.3g}%"),
    RATIO: (1, "{:.3g}×"),
    SHARE: (100, "{:.3g}%"),
    MS: (1, "{:.3g} ms"),
    S: (1, "{:.3g} s"),
    BYTES: (1, "{:,.0f} bytes"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """A number that a run holds. spread: least and most, None if the bench does not say."""

    value: float
    spread: tuple[float, float] | None
    run: Run


@dataclass(frozen=True, slots=True)
class Row:
    """A claim with what was found. aim: None if there is none, or it is a figure that was not measured."""

    claim: Claim
    sim: Found | None
    live: Found | None
    aim: float | None

    def is_short(self, found: Found | None) -> bool:
        if found is None or self.aim is None:
            return False
        return found.value > self.aim if self.claim.better == LOWER else found.value < self.aim

    @property
    def falls_short(self) -> bool:
        return self.is_short(self.sim) or self.is_short(self.live)

    @property
    def is_measured(self) -> bool:
        return self.sim is not None or self.live is not None

    @property
    def runs(self) -> list[Run]:
        return [found.run for found in (self.sim, self.live) if found is not None]


def rows_of(claims: Sequence[Claim], runs: Mapping[str, Run]) -> list[Row]:
    rows = []
    for claim in claims:
        goal = claim.goal
        aim = find(runs, goal) if isinstance(goal, Figure) else goal
        rows.append(
            Row(
                claim,
                find(runs, claim.sim),
                find(runs, claim.live),
                aim.value if isinstance(aim, Found) else aim,
            )
        )
    return rows


def find(runs: Mapping[str, Run], figure: Figure | None) -> Found | None:
    """The figure from the run of that name, else from the newest run of some of its parts that has it. None: not measured."""
    if figure is None:
        return None
    parts = [run for name, run in runs.items() if name.startswith(f"{figure.run}-")]
    whole = [runs[figure.run]] if figure.run in runs else []
    for run in (*whole, *sorted(parts, key=lambda run: run.date, reverse=True)):
        entry = _at(run.result, figure.path)
        if (value := _number(entry)) is not None:
            spread = _spread(entry, run.result, figure.path)
            return Found(
                value - figure.less,
                (spread[0] - figure.less, spread[1] - figure.less) if spread else None,
                run,
            )
    return None


def _at(entry: Any, path: str) -> Any:
    """What stands at the end of the path; None where a step leads nowhere."""
    for step in STEP.findall(path):
        if isinstance(entry, dict):
            entry = entry.get(step)
        elif isinstance(entry, list) and step.startswith("["):
            beginning = step[1:-1]
            entry = next((item for item in entry if str(item.get("what", "")).startswith(beginning)), None)
        else:
            return None
    return entry


def _number(entry: Any) -> float | None:
    """A number, true and false as 1 and 0, or the `median` of an entry that has one."""
    if isinstance(entry, dict):
        entry = entry.get("median")
    return float(entry) if isinstance(entry, bool | int | float) else None


def _spread(entry: Any, result: Mapping[str, Any], path: str) -> tuple[float, float] | None:
    """Of the entry itself, or under the same path in the result's `spread`."""
    pair = entry.get("spread") if isinstance(entry, dict) else _at(result.get("spread"), path)
    return (float(pair[0]), float(pair[1])) if isinstance(pair, list) and len(pair) == 2 else None


def shown(value: float, unit: str) -> str:
    """A number with its unit."""
    if unit == YES:
        return "yes" if value else "no"
    factor, form = FORMS[unit]
    return form.format(factor * value).replace("-", "−")
