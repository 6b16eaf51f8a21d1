"""Where a mechanism stops paying, for those who must decide whether to switch it on: sweeps of kept runs, one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.results.runs import Run

ADVISORIES = "A1 advisories: mean TTFT ÷ the best without them"
SWAPPING = "D3 always swapping: throughput ÷ always recomputing"
BY_COST = "D3 the cheaper by predicted cost: throughput ÷ always recomputing"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of one thing. key: under the run's `limits`. figure: of each value. unit: what values are divided by for the reader."""

    mechanism: str
    run: str
    key: str
    changed: str
    figure: str
    unit: float = 1.0

    def ratio(self, figures: Mapping[str, Any]) -> float:
        value = float(figures[self.figure])
        return 1.0 - value if self.figure.startswith("saved") else value

    def pays(self, figures: Mapping[str, Any]) -> bool:
        """The bench's own word goes first: it knows of more than this figure."""
        return bool(figures.get("pays", self.ratio(figures) > 1))


def _advisories(key: str, changed: str, unit: float = 1.0) -> Sweep:
    return Sweep(ADVISORIES, "sim-symphony-limits", key, changed, "saved_ttft", unit)


def _swapping(key: str, changed: str) -> tuple[Sweep, Sweep]:
    first = Sweep(SWAPPING, "emulated-adaptivellm-limits", key, changed, "swap")
    return first, Sweep(BY_COST, "emulated-adaptivellm-limits", key, changed, "cost")


SWEEPS = (
    _advisories("lead_share", "when they come: share of the time that people type"),
    _advisories("link_share", "share of the device's PCIe link that copies get"),
    _advisories("network_bytes_per_s", "network between machines, GB/s", 1e9),
    _advisories("disk_bytes_per_s", "disk, GB/s", 1e9),
    _advisories("mean_turns", "turns of a conversation, mean, or a recorded trace"),
    _advisories("host_bytes", "host memory for KV, GB", 1e9),
    _advisories("device_bytes", "device memory, GB", 1e9),
    *_swapping("link_gb_per_s", "link between device and host, GB/s"),
    *_swapping("host_blocks", "host memory for KV, blocks of 16 tokens"),
    *_swapping("prompt_tokens", "prompt, tokens, mean"),
    *_swapping("prompt_tokens_at_3.1_gb_per_s", "prompt, tokens, mean, with a link of 3.1 GB/s"),
)
HEAD = ("mechanism", "what is changed", "ratio at each value", "run, commit")


def rows(runs: Mapping[str, Run]) -> Iterator[tuple[str, ...]]:
    """Of a table; sweeps that no run has are left out. Bold: does not pay."""
    for sweep in SWEEPS:
        run = runs.get(sweep.run)
        found = run.result.get("limits", {}).get(sweep.key) if run is not None else None
        if run is not None and found:
            ratios = "; ".join(_ratio(sweep, value, figures) for value, figures in found.items())
            yield (
                sweep.mechanism,
                sweep.changed,
                ratios,
                f"[{run.name}](results/{run.name}.json) {run.commit}",
            )


def _ratio(sweep: Sweep, value: str, figures: Mapping[str, Any]) -> str:
    try:
        value = f"{float(value) / sweep.unit:.3g}"
    except ValueError:
        pass  # the name of a trace
    text = f"{value}: {sweep.ratio(figures):.3g}×"
    return text if sweep.pays(figures) else f"**{text}**"
