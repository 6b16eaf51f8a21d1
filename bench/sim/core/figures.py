"""A number beside the paper's: what every table reports."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One number beside the paper's. values: by seed. is_less_better: which way falling short is. made_by: policy objects."""

    what: str
    values: tuple[float, ...]
    paper: float | None
    is_less_better: bool
    made_by: str
    unit: str = "change"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def falls_short(self) -> bool:
        if self.paper is None:
            return False
        return self.median > self.paper if self.is_less_better else self.median < self.paper

    def text(self, value: float) -> str:
        return {
            "change": f"{value:+.1%}",
            "ratio": f"{value:.2f}×",
            "share": f"{value:.1%}",
            "s": f"{value:.3g} s",
            "per_s": f"{value:.2f}/s",
        }[self.unit]

    def row(self) -> tuple[str, str, str]:
        ours = f"{self.text(self.median)}  ({self.text(min(self.values))} … {self.text(max(self.values))})"
        paper = f"paper {self.text(self.paper)}" if self.paper is not None else "paper: no number"
        short = ", FALLS SHORT" if self.falls_short else ""
        return self.what, ours, f"{paper}{short}   [{self.made_by}]"

    def result(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "median": round(self.median, 4),
            "spread": [round(min(self.values), 4), round(max(self.values), 4)],
            "seeds": [round(value, 4) for value in self.values],
            "paper": self.paper,
            "falls_short": self.falls_short,
            "made_by": self.made_by,
        }
