"""What is claimed, read from `claims.toml`, which says what each key means: the paper's figure, and where ours stand."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

BETTER = dict.fromkeys(("change", "ms", "s", "bytes", "count"), "lower") | dict.fromkeys(
    ("ratio", "share", "yes"), "higher"
)
"""Which direction is better for most claims of a unit."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number to be reached. `claims.toml` says what the fields mean."""

    group: str
    id: str
    what: str
    unit: str
    paper: float | tuple[float, float] | None = None
    source: str = ""
    sim: str = ""
    live: str = ""
    live_interval: str = ""
    aim: float | str | None = None
    bound: str = ""
    live_what: str = ""
    note: str = ""
    better: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "better", self.better or BETTER[self.unit])

    @property
    def paper_ends(self) -> tuple[float, ...]:
        """The paper's figure, or both ends of its range; empty if it has none."""
        if self.paper is None:
            return ()
        return self.paper if isinstance(self.paper, tuple) else (self.paper,)

    @property
    def goal(self) -> float | str | None:
        """The aim; where none is named, the paper's figure, of a range the end that is easier to reach."""
        if self.aim is not None or self.paper is None:
            return self.aim
        return max(self.paper_ends) if self.better == "lower" else min(self.paper_ends)


_TABLE = tomllib.loads((Path(__file__).parent / "claims.toml").read_text())

PAPERS: dict[str, str] = _TABLE["papers"]
GROUPS = (*PAPERS, "Overture")
MECHANISMS: dict[str, str] = _TABLE["mechanisms"]
WITHOUT_NUMBER: dict[str, str] = _TABLE["without_number"]
"""Mechanisms of which no number is claimed, with the file that says that they work, or why they are not built."""

CLAIMS = msgspec.convert(_TABLE["claim"], tuple[Claim, ...])
