"""The plot of orders of starting: what each gains at the median, and what it costs at the tail, against vLLM's own queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from bench.results.plots import AXIS, BLUE, INK, ORANGE, STYLE, drawing_of, not_measured, ticks, written
from bench.results.runs import Run

TITLE = "Orders of starting in virtual time: TTFT against vLLM's own queue"
PANELS = (("without adapters", False, 0.07), ("50 adapters on 16 slots", True, 0.57))

LOOKS = {"bounded": (BLUE, "o"), "mlq": (ORANGE, "D")}
"""The colour and the mark of each order."""


def frontier(run: Run | None) -> str:
    """Return the plot's text: two panels, without and with adapters, the change of P50 across and of P99 upwards.

    Means over traces, loads and seeds are marks; a stroke ends at the worst P99.
    """
    with matplotlib.rc_context(STYLE):
        return _drawn(run)


def _drawn(run: Run | None) -> str:
    rows = run.result.get("at", []) if run else []
    if run is None or not rows:
        return not_measured(TITLE)
    drawing = drawing_of(3.9, TITLE)
    for label, has_adapters, left in PANELS:
        axes = drawing.add_axes((left, 0.13, 0.4, 0.66))
        axes.set_title(label, loc="left", fontsize=9)
        panel(axes, [row for row in rows if row["setting"].endswith("adapters") == has_adapters])
    about = f"Geometric means over traces, loads and seeds; the stroke goes up to the worst trace and load. {run.command}, commit {run.commit}."
    return written(drawing, TITLE, about)


def panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the marks of one panel, vLLM's own queue at the origin."""
    points = {order: _point([row[order] for row in rows]) for order in LOOKS}
    p50, p99, _ = points["bounded"]
    axes.plot([0, p50], [0, p99], color=BLUE, linewidth=1)
    axes.plot(0, 0, "s", color=INK, markersize=6)
    axes.annotate("vLLM", (0, 0), (6, -12), textcoords="offset points")
    for order, (p50, p99, worst) in points.items():
        color, mark = LOOKS[order]
        axes.plot([p50, p50], [p99, worst], color=color, linewidth=1)
        axes.plot(p50, p99, mark, color=color, markersize=6)
    for order, (p50, _, worst) in points.items():
        axes.annotate(order, (p50, worst), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    for line in (axes.axhline, axes.axvline):
        line(0, color=AXIS, linewidth=0.8, zorder=0)
    axes.set_xlabel("P50 TTFT, change")
    axes.set_ylabel("P99 TTFT, change", labelpad=1)
    for axis in (axes.xaxis, axes.yaxis):
        ticks(axis, False, lambda value, _: f"{100 * value:+g}%".replace("-", "−").replace("+0%", "0%"))
    axes.margins(0.16)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _point(changes: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    """Mean change of P50 and P99, and the worst of P99."""
    p50, p99 = (geometric_mean(1 + each[name] for each in changes) - 1 for name in ("ttft_p50", "ttft_p99"))
    return p50, p99, max(each["ttft_p99"] for each in changes)
