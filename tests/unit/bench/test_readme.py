"""The figures that README.md gives are those of the kept runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def kept(name: str) -> Any:
    """What a kept run found."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["result"]


def test_readme_gives_the_figures_of_the_kept_runs() -> None:
    restore, medians = kept("live-restore"), kept("live-advisory")["ttft_p50_ms"]
    ours, stock = (run["ttft_s"]["2048"] for run in (restore, restore["peers"]["stock"]))
    adapters, scheduling = kept("live-adapters"), kept("live-scheduling")
    fcfs, bounded = (scheduling["arms"][f"high, {arm}"] for arm in ("peer fcfs", "bounded"))
    memory = kept("live-scheduling-memory")["tight_memory"]
    figures = [
        f"{stock['recompute'] * 1e3:,.0f} ms",
        f"{ours['host'] * 1e3:.0f} ms from host memory, {ours['disk_cold'] * 1e3:.0f} ms from disk",
        *(f"{medians[arm] / 1e3:.{digits}f} s" for arm, digits in (("stock", 1), ("ours", 2))),
        *(f"{adapters[what]:.0f} ms" for what in ("stock_stall_ms", "stall_ms")),
        f"{scheduling['loads_per_s']['high']:.1f} requests a second",
        *(
            f"{arm['ttft_p50_ms'] / 1e3:.1f} s and {arm['ttft_p99_ms'] / 1e3:.1f} s"
            for arm in (fcfs, bounded)
        ),
        f"{bounded['tpot_p50_ms'] / fcfs['tpot_p50_ms']:.1f} times as slow",
        *(f"| {memory[arm]['tokens_per_s']:.0f} |" for arm in ("stock", "bounded cheaper")),
    ]
    section = (ROOT / "README.md").read_text().partition("## Against stock vLLM")[2].partition("\n## ")[0]
    missing = [figure for figure in figures if figure not in section]
    assert not missing, f"README.md: the kept runs have {missing}"
