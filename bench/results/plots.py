"""The plots in docs/plots: the papers' figures beside ours, and Chameleon's TTFT over the load.

Readable where the reader's page is light or dark. Colours are Okabe and Ito's, which colour-blind readers can tell apart; marks differ in shape too.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from bench.results.claims import CLAIMS, PAPERS, Claim
from bench.results.lookup import Found, Row, rows_of, shown
from bench.results.page import NOT_MEASURED
from bench.results.runs import Run

AXES = {
    "change": "change against the baseline, %",
    "ratio": "times the baseline",
    "share": "share, %",
}

INK, MUTED, AXIS, GRID, GROUND = "#1f2328", "#59636e", "#818b98", "#d1d9e0", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#a04a7d"
DARK = {
    INK: "#f0f6fc",
    MUTED: "#9198a1",
    AXIS: "#656c76",
    GRID: "#2f353d",
    GROUND: "#0d1117",
    BLUE: "#56b4e9",
    ORANGE: "#e69f00",
    GREEN: "#3fc79a",
    PURPLE: "#e39ac4",
}
"""What takes each colour's place on a dark page."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "overture",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": AXIS,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": GROUND,
    "grid.color": GRID,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
}
WIDTH_IN = 9.6


def plots(runs: Mapping[str, Run]) -> dict[str, str]:
    """Return each file's name and text."""
    rows = [row for row in rows_of(CLAIMS, runs) if row.claim.paper is not None]
    with matplotlib.rc_context(STYLE):
        found = {
            f"{group.lower()}.svg": compared(group, [row for row in rows if row.claim.group == group])
            for group in PAPERS
        }
        return found | {"chameleon-ttft.svg": ttft_over_load(runs.get("emulated-chameleon"))}


def drawing_of(height_in: float, title: str) -> Drawing:
    """Return an empty drawing with its title. height_in: inches."""
    drawing = Drawing(figsize=(WIDTH_IN, height_in))
    drawing.text(0.012, 1 - 0.26 / height_in, title, fontsize=10.5, fontweight="bold")
    return drawing


def not_measured(title: str) -> str:
    """Return the file's text where there is no run to draw."""
    drawing = drawing_of(0.8, title)
    drawing.text(0.012, 0.2, NOT_MEASURED, color=MUTED)
    return written(drawing, title, NOT_MEASURED)


def written(drawing: Drawing, title: str, description: str) -> str:
    """Return the file's text, the same each time; a dark page gets the dark colours."""
    text = io.StringIO()
    about = {"Title": title, "Description": description, "Date": None, "Creator": None}
    drawing.savefig(text, format="svg", metadata=about)
    rules = "".join(
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}\n'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}}}</style>\n"
    return text.getvalue().replace("<defs>", f"{style} <defs>", 1)


# -- the papers' figures beside ours -----------------------------------------------------------------------------------

CHART = (0.35, 0.66)
"""Where charts begin and end, as shares of the width."""
COLUMNS = {"paper": (0.77, "▏", INK), "simulated": (0.88, "●", BLUE), "live": (0.985, "◆", ORANGE)}
"""Right edges of the columns of numbers, and the marks of the charts."""
OTHERWISE = "* measured otherwise than in the paper: bench/RESULTS.md says how"
HEAD_IN, ROW_IN, FOOT_IN, LABEL_CHARACTERS = 0.42, 0.42, 0.62, 48
LOG_FROM = 6.0
"""Ratios that differ by more than this are drawn by logarithm. Chosen."""


def compared(group: str, rows: Sequence[Row]) -> str:
    """Return claims in rows, a panel for each unit: the paper's figure as an upright bar, ours in virtual time as a dot, ours live as a diamond."""
    panels = {unit: [row for row in rows if row.claim.unit == unit] for unit in AXES}
    panels = {unit: own for unit, own in panels.items() if own}
    height_in = HEAD_IN + sum(ROW_IN * len(own) + FOOT_IN for own in panels.values()) + 0.2
    title = f"{group}: the paper's figures and ours"
    drawing = drawing_of(height_in, title)
    for name, (right, mark, color) in COLUMNS.items():
        drawing.text(right, 1 - 0.26 / height_in, f"{mark} {name}", color=color, ha="right")
    top_in = height_in - HEAD_IN
    for unit, own in panels.items():
        rows_in = ROW_IN * len(own)
        place = (CHART[0], (top_in - rows_in) / height_in, CHART[1] - CHART[0], rows_in / height_in)
        _panel(drawing.add_axes(place), unit, own)
        top_in -= rows_in + FOOT_IN
    if any(_is_other(row) for row in rows):
        drawing.text(COLUMNS["live"][0], 0.1 / height_in, OTHERWISE, color=MUTED, ha="right")
    return written(drawing, title, _in_words(rows))


def _in_words(rows: Sequence[Row]) -> str:
    return " ".join(
        f"{row.claim.what}: paper {_paper(row.claim)}, simulated {_ours(row, row.claim.sim, row.sim)}, "
        f"live {_ours(row, row.claim.live, row.live)}."
        for row in rows
    )


def _panel(axes: Axes, unit: str, rows: Sequence[Row]) -> None:
    values = _values(rows)
    is_log = unit == "ratio" and min(values) > 0 and max(values) > LOG_FROM * min(values)
    if is_log:
        axes.set_xscale("log")
    same = {"change": 0.0, "ratio": 1.0, "share": 1.0 if max(values) > 0.5 else 0.0}[unit]
    axes.axvline(same, color=AXIS, linewidth=1)
    for number, row in enumerate(rows):
        _row(axes, row, number)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(
        range(len(rows)),
        [textwrap.fill(row.claim.what, LABEL_CHARACTERS) for row in rows],
        x=(0.012 - CHART[0]) / (CHART[1] - CHART[0]),
        ha="left",
        color=INK,
    )
    axes.set_xlabel(AXES[unit] + (", by logarithm" if is_log else ""))
    ticks(axes.xaxis, is_log, lambda value, _: _tick(value, unit))
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _values(rows: Sequence[Row]) -> list[float]:
    found = [found for row in rows for found in (row.sim, row.live) if found]
    spreads = [end for row in rows if row.sim and row.sim.spread for end in row.sim.spread]
    return [end for row in rows for end in row.claim.paper_ends] + [one.value for one in found] + spreads


def _row(axes: Axes, row: Row, y: float) -> None:
    ends = row.claim.paper_ends
    axes.plot(ends, [y] * len(ends), "|-", color=INK, markersize=13, markeredgewidth=2.2, linewidth=1)
    if row.sim:
        if row.sim.spread:
            axes.plot(row.sim.spread, [y - 0.1] * 2, color=BLUE, linewidth=1.6)
        axes.plot(row.sim.value, y - 0.1, "o", color=BLUE, markersize=6)
    if row.live:
        axes.plot(row.live.value, y + 0.1, "D", color=ORANGE, markersize=5.5)
    simulated, live = _ours(row, row.claim.sim, row.sim), _ours(row, row.claim.live, row.live)
    texts = {"paper": _paper(row.claim), "simulated": simulated, "live": live + "*" * _is_other(row)}
    beside = blended_transform_factory(axes.get_figure().transFigure, axes.transData)
    for name, text in texts.items():
        color = MUTED if text in (NOT_MEASURED, "–") else INK
        axes.text(COLUMNS[name][0], y, text, color=color, ha="right", va="center", transform=beside)


def ticks(axis: Any, is_log: bool, form: Callable[[float, Any], str]) -> None:
    """Set few and round ticks."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if is_log else MaxNLocator(6, steps=(1, 2, 5, 10)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(form))


def _paper(claim: Claim) -> str:
    ends = [shown(end, claim.unit) for end in claim.paper_ends]
    return " … ".join([*(end.rstrip("%×") for end in ends[:-1]), ends[-1]])


def _ours(row: Row, place: str, found: Found | None) -> str:
    if found is None:
        return NOT_MEASURED if place else "–"
    return shown(found.value, row.claim.unit)


def _is_other(row: Row) -> bool:
    return bool(row.live and row.claim.live_what)


def _tick(value: float, unit: str) -> str:
    text = f"{value:g}×" if unit == "ratio" else f"{100 * value:g}%"
    return text.replace("-", "−")


# -- TTFT over the load ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """The look of an arm. shift: sideways, in shares of the load's range, so that arms of the same figures stay apart."""

    name: str
    color: str
    dashes: str
    shift: float


ARMS = {
    "base": Arm("first come, first served, no cache (S-LoRA)", INK, "-", -0.012),
    "sched": Arm("scheduler alone", GREEN, "--", -0.004),
    "cache": Arm("cache alone", ORANGE, "-", 0.004),
    "default": Arm("what serves by default", BLUE, "--", 0.012),
}
PANELS = (("ttft_p99_s", "P99 TTFT, s", 0.07), ("ttft_p50_s", "P50 TTFT, s", 0.57))


def ttft_over_load(run: Run | None) -> str:
    """Return two panels, P99 and P50 TTFT over requests a second: medians over seeds as lines, least to most as upright strokes."""
    part = run.result.get("parts", {}).get("main", {}) if run else {}
    title = "Chameleon in virtual time: time to first token over the load"
    if run is None or "curve" not in part:
        return not_measured(title)
    drawing = drawing_of(3.9, title)
    for key, label, left in PANELS:
        axes = drawing.add_axes((left, 0.13, 0.36, 0.62))
        axes.set_title(label, loc="left", fontsize=9)
        limit_s = part.get("slo_s") if key == "ttft_p99_s" else None
        _curves(axes, part["curve"], key, limit_s)
    drawing.legend(
        *axes.get_legend_handles_labels(), loc="upper left", ncols=4, frameon=False, bbox_to_anchor=(0, 0.93)
    )
    about = f"Median over seeds, with the least and the most; {run.command}, commit {run.commit}."
    return written(drawing, title, about)


def _curves(axes: Axes, curve: Mapping[str, Any], key: str, limit_s: float | None) -> None:
    axes.set_yscale("log")
    loads = [float(load) for load in next(iter(curve.values()))]
    for name, arm in ARMS.items():
        if name not in curve:
            continue
        across = [float(load) + arm.shift * (max(loads) - min(loads)) for load in curve[name]]
        seconds = [found[key] for found in curve[name].values()]
        axes.plot(across, [median(values) for values in seconds], arm.dashes, color=arm.color, label=arm.name)
        axes.vlines(
            across, [min(v) for v in seconds], [max(v) for v in seconds], color=arm.color, linewidth=1
        )
    if limit_s:
        axes.axhline(limit_s, color=PURPLE, linewidth=1)
        beside = blended_transform_factory(axes.transAxes, axes.transData)
        axes.text(1.02, limit_s, f"SLO {limit_s:.2g} s", va="center", transform=beside)
    axes.margins(y=0.15)
    axes.set_xlabel("load, requests/s")
    ticks(axes.xaxis, False, lambda value, _: f"{value:g}")
    ticks(axes.yaxis, True, lambda value, _: f"{value:g}")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
