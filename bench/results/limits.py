"""Where a mechanism stops paying, for those who must decide whether to switch it on: sweeps of kept runs, one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.results.runs import Run

ADVISORIES = "A1 advisories: mean TTFT ÷ without them"
BY_COST = "D3 the cheaper by predicted cost: throughput ÷ always recomputing"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of one property. key: under the run's `limits`. unit: divides values for the reader."""

    mechanism: str
    run: str
    key: str
    changed: str
    unit: float = 1.0

    def ratio(self, figures: Mapping[str, Any]) -> float:
        """Return the ratio at a value."""
        return float(1.0 - figures["saved_ttft"] if "saved_ttft" in figures else figures["cost"])

    def pays(self, figures: Mapping[str, Any]) -> bool:
        """Return whether the mechanism pays: the bench's own word if it has one, since it knows more than this figure."""
        return bool(figures.get("pays", self.ratio(figures) > 1))


_OF_ADVISORIES, _OF_SWAPPING = (ADVISORIES, "emulated-symphony"), (BY_COST, "emulated-adaptivellm-limits")
SWEEPS = (
    Sweep(*_OF_ADVISORIES, "lead_share", "when they come: share of the time that people type"),
    Sweep(*_OF_ADVISORIES, "link_share", "share of the device's PCIe link that copies get"),
    Sweep(*_OF_ADVISORIES, "disk_bytes_per_s", "disk, GB/s for each device", 1e9),
    Sweep(*_OF_ADVISORIES, "mean_turns", "turns of a conversation, mean"),
    Sweep(*_OF_ADVISORIES, "host_bytes", "host memory for KV, GB for each device", 1e9),
    Sweep(*_OF_ADVISORIES, "device_bytes", "device memory, GB", 1e9),
    Sweep(*_OF_SWAPPING, "link_gb_per_s", "link between device and host, GB/s"),
    Sweep(*_OF_SWAPPING, "host_blocks", "host memory for KV, blocks of 16 tokens"),
    Sweep(*_OF_SWAPPING, "prompt_tokens", "prompt, tokens, mean"),
    Sweep(*_OF_SWAPPING, "prompt_tokens_at_3.1_gb_per_s", "prompt, tokens, mean, with a link of 3.1 GB/s"),
)
HEAD = ("mechanism", "what is changed", "ratio at each value")


def rows(runs: Mapping[str, Run]) -> Iterator[tuple[str, ...]]:
    """Return the rows of the table, without sweeps that no kept run has. Bold: does not pay."""
    for sweep in SWEEPS:
        run = runs.get(sweep.run)
        found = run.result.get("limits", {}).get(sweep.key) if run is not None else None
        if found:
            ratios = "; ".join(_ratio(sweep, value, figures) for value, figures in found.items())
            yield f"[{sweep.mechanism}](results/{sweep.run}.json)", sweep.changed, ratios


def _ratio(sweep: Sweep, value: str, figures: Mapping[str, Any]) -> str:
    text = f"{float(value) / sweep.unit:.3g}: {sweep.ratio(figures):.3g}×"
    return text if sweep.pays(figures) else f"**{text}**"
