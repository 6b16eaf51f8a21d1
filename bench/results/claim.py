"""What a claim is: the paper's figure, and where ours stand."""

from __future__ import annotations

from dataclasses import dataclass

LOWER, HIGHER = "lower", "higher"
CHANGE, RATIO, SHARE, MS, S, BYTES = "change", "ratio", "share", "ms", "s", "bytes"
COUNT, YES = "count", "yes"
"""Units: a signed fraction of the baseline, shown in %; times the baseline; a part of 1, shown in %; milliseconds; seconds; bytes; how many; true or
false."""
BETTER = {
    CHANGE: LOWER,
    RATIO: HIGHER,
    SHARE: HIGHER,
    MS: LOWER,
    S: LOWER,
    BYTES: LOWER,
    COUNT: LOWER,
    YES: HIGHER,
}
"""Which way most claims of a unit want it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Where a number stands. less: taken from it, 1 where a bench reports a ratio and the claim is a change. interval: where its interval of
    95% stands; if not given, under the number's own path in the run's `intervals`.
    """

    run: str
    path: str
    less: float = 0.0
    interval: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One number to be reached.

    paper: its figure, None if no paper has one; a range as (from, to). source: where the paper shows it. aim: what ours is held to: the paper's
    figure if not given (of a range, the end that is easier to reach), or a figure of ours. bound: what one that knows the future reaches on the same
    requests, in virtual time; where even that misses the aim, ours is held to a part of what it gains. live_what: what the live figure is, where it
    is not quite the same thing. better: which way, if not its unit's.
    """

    group: str
    id: str
    what: str
    unit: str
    paper: float | tuple[float, float] | None = None
    source: str = ""
    sim: Figure | None = None
    live: Figure | None = None
    aim: float | Figure | None = None
    bound: Figure | None = None
    live_what: str = ""
    note: str = ""
    better: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "better", self.better or BETTER[self.unit])

    @property
    def paper_ends(self) -> tuple[float, ...]:
        if self.paper is None:
            return ()
        return self.paper if isinstance(self.paper, tuple) else (self.paper,)

    @property
    def goal(self) -> float | Figure | None:
        if self.aim is not None:
            return self.aim
        if isinstance(self.paper, tuple):
            return max(self.paper) if self.better == LOWER else min(self.paper)
        return self.paper
