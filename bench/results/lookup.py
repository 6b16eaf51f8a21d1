"""Find claims' figures in kept runs, and say which fall short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.results.claim import BYTES, CHANGE, COUNT, LOWER, MS, RATIO, SHARE, YES, Claim, Figure, S
from bench.results.runs import Run

FORMS = {
    CHANGE: (100, "{:+.3g}%"),
    RATIO: (1, "{:.3g}×"),
    SHARE: (100, "{:.3g}%"),
    MS: (1, "{:.3g} ms"),
    S: (1, "{:.3g} s"),
    BYTES: (1, "{:,.0f} bytes"),
    COUNT: (1, "{:,.0f}"),
}


OF_BOUND = 0.9
"""Of what one that knows the future gains, ours is to gain this part; of what it cannot avoid, ours may have no more than one divided by this."""


@dataclass(frozen=True, slots=True)
class Found:
    """A number that a run holds. spread: least and most, None if the bench does not say; is_interval: of its median, with 95% confidence."""

    value: float
    spread: tuple[float, float] | None
    run: Run
    is_interval: bool = False

    def spans(self, aim: float | None) -> bool:
        """Whether it may lie on either side of the aim."""
        if not self.is_interval or self.spread is None or aim is None:
            return False
        return self.spread[0] <= aim <= self.spread[1]


@dataclass(frozen=True, slots=True)
class Row:
    """A claim with what was found. aim: None if there is none, or it is a figure that was not measured. bound: None if it was not measured."""

    claim: Claim
    sim: Found | None
    live: Found | None
    aim: float | None
    bound: Found | None = None

    def is_short(self, found: Found | None) -> bool:
        if found is None or self.aim is None or found.spans(self.aim):
            return False
        return found.value > self.aim if self.claim.better == LOWER else found.value < self.aim

    @property
    def falls_short(self) -> bool:
        return self.is_short(self.sim) or self.is_short(self.live)

    @property
    def is_undecided(self) -> bool:
        return any(found is not None and found.spans(self.aim) for found in (self.sim, self.live))

    @property
    def is_near_bound(self) -> bool:
        """Is the aim out of reach of what knows the future, and is ours nearly as good as that?"""
        if (
            self.sim is None
            or self.bound is None
            or not self.is_short(self.bound)
            or self.is_short(self.live)
        ):
            return False
        nothing = 1.0 if self.claim.unit == RATIO else 0.0
        own, most = self.sim.value - nothing, self.bound.value - nothing
        if self.claim.better == LOWER and most > 0:  # an error, or a cost, that nobody is rid of
            return OF_BOUND * own <= most
        return own <= OF_BOUND * most if self.claim.better == LOWER else own >= OF_BOUND * most

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
        sim, live = (find(runs, figure, claim.paper_ends) for figure in (claim.sim, claim.live))
        bound = find(runs, claim.bound)
        rows.append(Row(claim, sim, live, aim.value if isinstance(aim, Found) else aim, bound))
    return rows


def find(runs: Mapping[str, Run], figure: Figure | None, papers: Sequence[float] = ()) -> Found | None:
    """The figure from the run of that name, else from the newest run of some of its parts that has it; None: not measured.

    papers: the paper's numbers that the bench compares it with; its spread is found by them.
    """
    if figure is None:
        return None
    parts = [run for name, run in runs.items() if name.startswith(f"{figure.run}-")]
    whole = [runs[figure.run]] if figure.run in runs else []
    for run in (*whole, *sorted(parts, key=lambda run: run.date, reverse=True)):
        value = _at(run.result, figure.path)
        if isinstance(value, bool | int | float):
            path = figure.interval or f"intervals.{figure.path}"
            interval = _at(run.result, path) or _at(run.result, f"confidence.{path}")
            pair = (
                interval or _at(run.result.get("spread"), figure.path) or _spread(run.result, value, papers)
            )
            spread = (pair[0] - figure.less, pair[1] - figure.less) if pair else None
            return Found(value - figure.less, spread, run, bool(interval))
    return None


def _at(entry: Any, path: str) -> Any:
    """What stands at the end of the path; None where a step leads nowhere."""
    for key in path.split("."):
        entry = entry.get(key) if isinstance(entry, dict) else None
    return entry


def _spread(result: Mapping[str, Any], value: float, papers: Sequence[float]) -> Sequence[float] | None:
    """The spread that the simulated tables list with a figure (`parts`, `figures`): of the one with this median and one of the paper's numbers.

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
    """A number with its unit."""
    if unit == YES:
        return "yes" if value else "no"
    factor, form = FORMS[unit]
    return form.format(factor * value).replace("-", "−")
