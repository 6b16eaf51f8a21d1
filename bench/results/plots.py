"""The plots in docs/plots: the papers' figures beside ours, and Chameleon's TTFT over the load."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.results.claims import (
    ADAPTIVELLM,
    CARASERVE,
    CHAMELEON,
    CHANGE,
    CLAIMS,
    RATIO,
    SHARE,
    SYMPHONY,
    Claim,
    Figure,
)
from bench.results.lookup import Found, Row, rows_of, shown
from bench.results.page import NOT_MEASURED
from bench.results.runs import Run
from bench.results.svg import Scale, Svg, width_of

AXES = {
    CHANGE: "change against the baseline, %",
    RATIO: "times the baseline",
    SHARE: "share, %",
}


def plots(runs: Mapping[str, Run], claims: Sequence[Claim] = CLAIMS) -> dict[str, str]:
    """Each file's name and text."""
    rows = [row for row in rows_of(claims, runs) if row.claim.paper is not None]
    found = {
        f"{group.lower()}.svg": compared(group, [row for row in rows if row.claim.group == group])
        for group in (SYMPHONY, CARASERVE, CHAMELEON, ADAPTIVELLM)
    }
    return found | {"chameleon-ttft.svg": ttft_over_load(runs.get("sim-chameleon"))}


# -- the papers' figures beside ours -----------------------------------------------------------------------------------

WIDTH, MARGIN = 940, 12
CHART = (330, 650)
COLUMNS = {"paper": 735, "simulated": 830, "live": 925}
"""Right edges of the columns of numbers."""
OTHERWISE = "* measured otherwise than in the paper: bench/RESULTS.md says how"
ROW_PX, LINE_PX, LABEL_CHARACTERS = 42, 15, 44
LOG_FROM = 6.0
"""Ratios that differ by more than this are drawn by logarithm. Chosen."""


def compared(group: str, rows: Sequence[Row]) -> str:
    """Claims in rows, a panel for each unit: the paper's figure as an upright bar, ours simulated as a dot, ours live as a diamond, and numbers."""
    svg = Svg(WIDTH, f"{group}: the paper's figures and ours", _in_words(rows))
    svg.text(MARGIN, 26, svg.title, "title")
    _heads(svg, 26)
    y = 42.0
    for unit in AXES:
        own = [row for row in rows if row.claim.unit == unit]
        if own:
            y = _panel(svg, unit, own, y)
    if any(_is_other(row) for row in rows):
        svg.text(COLUMNS["live"], y + 8, OTHERWISE, "muted", "end")
    return svg.written(y + 24)


def _in_words(rows: Sequence[Row]) -> str:
    return " ".join(
        f"{row.claim.what}: paper {_paper(row.claim)}, simulated {_ours(row, row.claim.sim, row.sim)}, "
        f"live {_ours(row, row.claim.live, row.live)}."
        for row in rows
    )


def _heads(svg: Svg, y: float) -> None:
    marks: dict[str, tuple[Callable[[float, float, str], None], str]] = {
        "paper": (svg.bar, "ink"),
        "simulated": (svg.dot, "blue"),
        "live": (svg.diamond, "orange"),
    }
    for name, right in COLUMNS.items():
        svg.text(right, y, name, anchor="end")
        mark, classes = marks[name]
        mark(right - width_of(name) - 8, y - 4, classes)


def _panel(svg: Svg, unit: str, rows: Sequence[Row], y: float) -> float:
    """Draws the panel from `y` on and returns where it ends."""
    scale = _scale(unit, rows)
    top, bottom = y + 24, y + 24 + ROW_PX * len(rows)
    svg.text(CHART[0], y + 14, AXES[unit] + (", by logarithm" if scale.is_log else ""), "muted")
    for tick in scale.ticks:
        is_zero = tick == (1 if unit == RATIO else 0)
        svg.line([(scale(tick), top), (scale(tick), bottom)], "axis" if is_zero else "grid")
        svg.text(scale(tick), bottom + 15, _tick(tick, unit), "muted", "middle")
    for number, row in enumerate(rows):
        _row(svg, scale, row, top + ROW_PX * (number + 0.5))
    return bottom + 34


def _scale(unit: str, rows: Sequence[Row]) -> Scale:
    values = [end for row in rows for end in row.claim.paper_ends]
    values += [found.value for row in rows for found in (row.sim, row.live) if found]
    values += [end for row in rows if row.sim and row.sim.spread for end in row.sim.spread]
    is_log = unit == RATIO and min(values) > 0 and max(values) > LOG_FROM * min(values)
    share = [0.8, 1.0] if max(values) > 0.5 else [0.0]
    always = {CHANGE: [0.0], RATIO: [1.0], SHARE: share}[unit]
    return Scale([*values, *always], *CHART, is_log=is_log)


def _row(svg: Svg, scale: Scale, row: Row, y: float) -> None:
    lines = textwrap.wrap(row.claim.what, LABEL_CHARACTERS)
    for number, line in enumerate(lines):
        svg.text(MARGIN, y + 4 + LINE_PX * (number - (len(lines) - 1) / 2), line)
    ends = [scale(end) for end in row.claim.paper_ends]
    svg.line([(ends[0], y), (ends[-1], y)], "ink line thin")
    for end in ends:
        svg.bar(end, y, "ink")
    if row.sim:
        if row.sim.spread:
            svg.line([(scale(end), y - 4) for end in row.sim.spread], "blue line")
        svg.dot(scale(row.sim.value), y - 4, "blue")
    if row.live:
        svg.diamond(scale(row.live.value), y + 4, "orange")
    svg.text(COLUMNS["paper"], y + 4, _paper(row.claim), anchor="end")
    _number(svg, COLUMNS["simulated"], y + 4, _ours(row, row.claim.sim, row.sim))
    _number(svg, COLUMNS["live"], y + 4, _ours(row, row.claim.live, row.live) + "*" * _is_other(row))


def _number(svg: Svg, x: float, y: float, text: str) -> None:
    svg.text(x, y, text, "muted" if text in (NOT_MEASURED, "–") else "", "end")


def _paper(claim: Claim) -> str:
    ends = [shown(end, claim.unit) for end in claim.paper_ends]
    return " … ".join([*(end.rstrip("%×") for end in ends[:-1]), ends[-1]])


def _ours(row: Row, figure: Figure | None, found: Found | None) -> str:
    if found is None:
        return NOT_MEASURED if figure else "–"
    return shown(found.value, row.claim.unit)


def _is_other(row: Row) -> bool:
    return bool(row.live and row.claim.live_what)


def _tick(value: float, unit: str) -> str:
    text = f"{value:g}×" if unit == RATIO else f"{100 * value:g}%"
    return text.replace("-", "−")


# -- TTFT over the load ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """How an arm is drawn. shift_px: sideways, so that arms of the same figures stay apart."""

    name: str
    classes: str
    shift_px: float


ARMS = {
    "base": Arm("first come, first served, no cache (S-LoRA)", "ink line", -4.5),
    "sched": Arm("scheduler alone", "green line dashed", -1.5),
    "cache": Arm("cache alone", "orange line", 1.5),
    "full": Arm("both", "blue line dashed", 4.5),
}
PANELS = (("ttft_p99_s", "P99 TTFT, s", 70), ("ttft_p50_s", "P50 TTFT, s", 540))
PANEL_WIDTH, PANEL_TOP, PANEL_BOTTOM = 330, 96, 336


def ttft_over_load(run: Run | None) -> str:
    """Two panels, P99 and P50 TTFT over requests a second: medians over seeds as lines, least to most as upright strokes."""
    part = run.result.get("parts", {}).get("main", {}) if run else {}
    svg = Svg(WIDTH, "Chameleon in virtual time: time to first token over the load", _what(run))
    svg.text(MARGIN, 26, svg.title, "title")
    if "curve" not in part:
        svg.text(MARGIN, 56, NOT_MEASURED, "muted")
        return svg.written(76)
    _legend(svg, 56)
    for key, label, left in PANELS:
        limit_s = part.get("slo_s") if key == "ttft_p99_s" else None
        _curves(svg, part["curve"], key, label, left, limit_s)
    return svg.written(PANEL_BOTTOM + 48)


def _what(run: Run | None) -> str:
    if run is None:
        return NOT_MEASURED
    return f"Median over seeds, with the least and the most; {run.command}, commit {run.commit}."


def _legend(svg: Svg, y: float) -> None:
    x = 70.0
    for arm in ARMS.values():
        svg.line([(x, y - 4), (x + 28, y - 4)], arm.classes)
        svg.text(x + 34, y, arm.name)
        x += 34 + width_of(arm.name) + 22


def _curves(
    svg: Svg, curve: Mapping[str, Any], key: str, label: str, left: float, limit_s: float | None
) -> None:
    points = {
        name: [(float(load), found[key]) for load, found in curve[name].items()]
        for name in ARMS
        if name in curve
    }
    seconds = [value for arm in points.values() for _, values in arm for value in values]
    across = Scale([load for arm in points.values() for load, _ in arm], left, left + PANEL_WIDTH)
    up = Scale([*seconds, *([limit_s] if limit_s else [])], PANEL_BOTTOM, PANEL_TOP, is_log=True)
    _grid(svg, across, up, left)
    svg.text(left, PANEL_TOP - 12, label)
    if limit_s:
        svg.line([(left, up(limit_s)), (left + PANEL_WIDTH, up(limit_s))], "purple line thin")
        svg.text(left + PANEL_WIDTH + 6, up(limit_s) + 4, f"SLO {limit_s:.2g} s")
    for name, arm_points in points.items():
        _arm(svg, ARMS[name], [(across(load), list(map(up, values))) for load, values in arm_points])


def _grid(svg: Svg, across: Scale, up: Scale, left: float) -> None:
    for tick in up.ticks:
        svg.line([(left, up(tick)), (left + PANEL_WIDTH, up(tick))], "grid")
        svg.text(left - 8, up(tick) + 4, f"{tick:g}", "muted", "end")
    for tick in across.ticks:
        svg.line([(across(tick), PANEL_BOTTOM), (across(tick), PANEL_BOTTOM + 4)], "axis")
        svg.text(across(tick), PANEL_BOTTOM + 18, f"{tick:g}", "muted", "middle")
    svg.line([(left, PANEL_BOTTOM), (left + PANEL_WIDTH, PANEL_BOTTOM)], "axis")
    svg.text(left + PANEL_WIDTH / 2, PANEL_BOTTOM + 36, "load, requests/s", "muted", "middle")


def _arm(svg: Svg, arm: Arm, points: Sequence[tuple[float, Sequence[float]]]) -> None:
    """points: where each load and its seeds' values lie, in pixels."""
    color = arm.classes.split()[0]
    placed = [(x + arm.shift_px, median(ys)) for x, ys in points]
    svg.line(placed, arm.classes)
    for (x, _), (_, ys) in zip(placed, points, strict=True):
        svg.line([(x, min(ys)), (x, max(ys))], f"{color} line thin")
