"""Find claims' figures in kept runs, and say which fall short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.results.claims import Claim
from bench.results.runs import Run

FORMS = {
    "change": (100, "{:+.3g}%"),
    "ratio": (1, "{:.3g}×"),
    "share": (100, "{:.3g}%"),
    "ms": (1, "{:.3g} ms"),
    "s": (1, "{:.3g} s"),
    "bytes": (1, "{:,.0f} bytes"),
    "count": (1, "{:,.0f}"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """A number that a run holds. spread: least and most, None if the bench does not say; is_interval: of its median, with 95% confidence."""

    value: float
    spread: tuple[float, float] | None
    run: Run
    is_interval: bool = False

    def spans(self, aim: float | None) -> bool:
        """Return whether the number may lie on either side of the aim."""
        if not self.is_interval or self.spread is None or aim is None:
            return False
        return self.spread[0] <= aim <= self.spread[1]


@dataclass(frozen=True, slots=True)
class Row:
    """A claim with its figures. aim: None if there is none, or it is a figure that was not measured. bound: None if it was not measured."""

    claim: Claim
    sim: Found | None
    live: Found | None
    aim: float | None
    bound: Found | None = None

    def is_short(self, found: Found | None) -> bool:
        """Return whether a figure is on the wrong side of the aim, its whole interval included."""
        if found is None or self.aim is None or found.spans(self.aim):
            return False
        return found.value > self.aim if self.claim.better == "lower" else found.value < self.aim

    @property
    def falls_short(self) -> bool:
        """Whether either figure falls short."""
        return self.is_short(self.sim) or self.is_short(self.live)

    @property
    def is_undecided(self) -> bool:
        """Whether either figure's interval spans the aim."""
        return any(found is not None and found.spans(self.aim) for found in (self.sim, self.live))

    @property
    def is_measured(self) -> bool:
        """Whether there is any figure."""
        return self.sim is not None or self.live is not None


def rows_of(claims: Sequence[Claim], runs: Mapping[str, Run]) -> list[Row]:
    """Return the claims with the figures that the runs hold."""
    rows = []
    for claim in claims:
        goal = claim.goal
        aim = find(runs, goal) if isinstance(goal, str) else goal
        sim = find(runs, claim.sim, claim.paper_ends)
        live = find(runs, claim.live, claim.paper_ends, claim.live_interval)
        bound = find(runs, claim.bound)
        rows.append(Row(claim, sim, live, aim.value if isinstance(aim, Found) else aim, bound))
    return rows


def find(
    runs: Mapping[str, Run], place: str, papers: Sequence[float] = (), interval: str = ""
) -> Found | None:
    """Return the figure from the run of that name, else from the newest run of some of its parts that has it; None: not measured.

    place: "RUN:KEY.KEY", with " - 1" where one is taken from the number. papers: the paper's numbers that the bench compares it with; its spread is
    found by them. interval: path of the number's interval of 95%; the number's own path in the run's `intervals` if empty.
    """
    place, _, less = place.partition(" - ")
    name, _, path = place.partition(":")
    parts = [run for other, run in runs.items() if other.startswith(f"{name}-")]
    whole = [runs[name]] if name in runs else []
    for run in (*whole, *sorted(parts, key=lambda run: run.date, reverse=True)):
        value = _at(run.result, path)
        if isinstance(value, bool | int | float):
            own = interval or f"intervals.{path}"
            ends = _at(run.result, own) or _at(run.result, f"confidence.{own}")
            pair = ends or _at(run.result.get("spread"), path) or _spread(run.result, value, papers)
            spread = (pair[0] - float(less or 0), pair[1] - float(less or 0)) if pair else None
            return Found(value - float(less or 0), spread, run, bool(ends))
    return None


def _at(entry: Any, path: str) -> Any:
    for key in path.split("."):
        entry = entry.get(key) if isinstance(entry, dict) else None
    return entry


def _spread(result: Mapping[str, Any], value: float, papers: Sequence[float]) -> Sequence[float] | None:
    """Return the spread that the tables list with a figure (`parts`, `figures`): that of the one with this median and one of the paper's numbers.

    None if there is none, or there are several that differ.
    """
    listed = [figure for part in result.get("parts", {}).values() for figure in part.get("figures", ())]
    spreads = {
        tuple(figure["spread"])
        for figure in listed
        if figure["median"] == round(value, 4) and figure["paper"] in papers
    }
    return spreads.pop() if len(spreads) == 1 else None


def shown(value: float, unit: str) -> str:
    """Return a number with its unit."""
    if unit == "yes":
        return "yes" if value else "no"
    factor, form = FORMS[unit]
    return form.format(factor * value).replace("-", "−")
