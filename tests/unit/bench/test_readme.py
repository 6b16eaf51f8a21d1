"""The figures that README.md gives are those of the kept runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def kept(name: str) -> Any:
    """What a kept run found."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["result"]


def restore() -> list[str]:
    """2,048 tokens, by vLLM and by us."""
    run = kept("live-restore")
    ours, stock = run["ttft_s"]["2048"], run["peers"]["stock"]["ttft_s"]["2048"]
    return [
        f"{stock['recompute'] * 1e3:,.0f} ms",
        f"{ours['host'] * 1e3:.0f} ms from host memory, {ours['disk_cold'] * 1e3:.0f} ms from disk",
    ]


def advisory() -> list[str]:
    """Medians."""
    medians = kept("live-advisory")["ttft_p50_ms"]
    return [f"{medians['stock'] / 1e3:.1f} s", f"{medians['ours'] / 1e3:.2f} s"]


def adapters() -> list[str]:
    """A cold adapter's stall."""
    run = kept("live-adapters")
    return [f"{run['stock_stall_ms']:.0f} ms", f"{run['stall_ms']:.0f} ms"]


def loads() -> list[str]:
    """Rate, then median and P99 at high load, and how much slower our streams are there."""
    run = kept("live-scheduling")
    stock, ours = (run["arms"][f"high, {arm}"] for arm in ("peer fcfs", "bounded"))
    pairs = [
        f"{arm['ttft_p50_ms'] / 1e3:.1f} s and {arm['ttft_p99_ms'] / 1e3:.1f} s" for arm in (stock, ours)
    ]
    slower = ours["tpot_p50_ms"] / stock["tpot_p50_ms"]
    return [f"{run['loads_per_s']['high']:.1f} requests a second", *pairs, f"{slower:.1f} times as slow"]


def memory() -> list[str]:
    """Tokens a second."""
    arms = kept("live-scheduling-memory")["tight_memory"]
    return [f"{arms[arm]['tokens_per_s']:.0f}" for arm in ("stock", "bounded cheaper")]


@pytest.mark.parametrize(
    "figures", [restore, advisory, adapters, loads, memory], ids=lambda find: find.__name__
)
def test_readme_gives_the_figures_of_the_kept_runs(figures: Any) -> None:
    section = (ROOT / "README.md").read_text().partition("## Against stock vLLM")[2].partition("\n## ")[0]
    missing = [figure for figure in figures() if figure not in section]
    assert not missing, f"README.md: the kept run has {missing}"
