"""Which KV leaves the host tier when it is full. The disk has all of it, so a wrong choice costs a read, never a recomputation.

KV is judged by group (all blocks of one session), a band of layers at a time: a session that keeps its first layers in memory can start
while the others come from disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtiers.policy.returns import ASSUMED_PAUSE_S, ASSUMED_SPREAD

# An announced session is worth more than any other until its request is late by this time. Chosen: advisories are taken back long before.
LATE_AT_MOST_S = 300.0
# A session counts for the probability that it is asked for within this many usual pauses. Chosen.
HORIZON_PAUSES = 1.0
# A session with a smaller probability than this is weighed by its silence alone: the normal law has no numbers there.
LEAST_SOON = 1e-9
NUM_BANDS = 4
"""The number of bands of layers that leave one after another. Chosen: the start of a restore needs no finer steps."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One session's KV in the host tier. Between tenants `fairness.py` decides; a policy is asked about one tenant's sessions at a time.

    Attributes:
        expected_s: when an advisory expects its request, on the clock of `now`; None without an advisory.
        goes_on: the probability that it sends another request, by how many it has sent (`returns.py`).
        is_over: whether it was deleted.
        is_live: whether a request of it is in the engine; if that is preempted, it needs this KV for certain.
        is_waiting: whether one of these waits to start, so that it needs this KV soon, as far as the device has lost it.
        usual_pause_s, pause_spread: of sessions' pauses between two requests, the median, and the standard deviation of the logarithm.
    """

    group: str
    num_bytes: int
    last_used_s: float
    goes_on: float = 0.25
    is_over: bool = False
    is_live: bool = False
    is_waiting: bool = False
    expected_s: float | None = None
    usual_pause_s: float = ASSUMED_PAUSE_S
    pause_spread: float = ASSUMED_SPREAD


@dataclass(frozen=True, slots=True)
class Victim:
    """Take a group's layers from `keep_layers` on out of the host tier; 0 takes it out whole."""

    group: str
    keep_layers: int


class EvictionPolicy(Protocol):
    """Chooses which sessions' KV leaves host memory."""

    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        """Yield victims, the first to leave first. The caller stops when it has enough room, and skips blocks in use."""
        ...


@dataclass(frozen=True, slots=True)
class Lru:
    """Evicts the least recently used session first, whole. The baseline."""

    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        """Yield the sessions by their last use."""
        for facts in sorted(groups, key=lambda facts: (facts.last_used_s, facts.group)):
            yield Victim(facts.group, 0)


@dataclass(frozen=True, slots=True)
class ByValue:
    """Evicts the lowest value per byte first: the likelihood that the session comes back, times the seconds that its layers then save.

    Of one session the last layers go first, because reading them overlaps with computing the earlier ones; among equals the smallest KV goes first,
    since it is the cheapest to bring back.

    The likelihood that a session comes back soon is estimated from its number of requests and its silence, by the pauses of all sessions and by its
    own. All of that is learned (`returns.py`): pauses differ by four orders of magnitude between agents that call one
    another and people who read.

    Source: SYMPHONY §4.3 (latest layers first, then the smallest KV). Departs in weighing layers against likelihood: taking last layers of
    every live session before the first layer of any abandoned one makes each live session pay for the dead (bench.emulated host_tier:
    twice the stall).
    """

    band_weight: float = 0.02
    """Powers of two by which a band of layers is worth less than the one before it. Measured (`bench.emulated host_tier`): with 0.25, which is right
    where new texts are as long as histories, restores took 2 to 8% longer."""

    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        """Yield ended sessions, then bands of layers by their value."""
        for facts in groups:
            if facts.is_over:
                yield Victim(facts.group, 0)
        bands = [
            (self.likelihood(facts, now) - self.band_weight * band, facts.num_bytes, facts.group, band)
            for facts in groups
            if not facts.is_over
            for band in range(NUM_BANDS)
        ]
        for _, _, group, band in sorted(bands):
            yield Victim(group, first_layer(band, num_layers))

    def likelihood(self, facts: GroupFacts, now: float) -> float:
        """Return the likelihood of a request soon as a power of two: a logarithm, so that hours of idleness do not all round to 0."""
        if facts.is_waiting or (facts.expected_s is not None and now <= facts.expected_s + LATE_AT_MOST_S):
            return float(
                NUM_BANDS
            )  # asked for or announced: its last band outlives any other session's first
        if facts.is_live:
            return 0.0
        return self.worth(facts, max(now - facts.last_used_s, 0.0))

    def worth(self, facts: GroupFacts, idle_s: float) -> float:
        """Return the likelihood, below 0, for a session of which no request is in the engine or announced."""
        longer, later = (
            _longer_than(at_s, facts) for at_s in (idle_s, idle_s + HORIZON_PAUSES * facts.usual_pause_s)
        )
        soon = facts.goes_on * (longer - later) / max(1.0 - facts.goes_on * (1.0 - longer), 1e-300)
        return math.log2(soon) if soon > LEAST_SOON else math.log2(LEAST_SOON) - math.log2(1.0 + idle_s)


@dataclass(frozen=True, slots=True)
class LeastRecent(ByValue):
    """Evicts the session used longest ago, among the sessions that no request needs and no advisory expects."""

    def worth(self, facts: GroupFacts, idle_s: float) -> float:
        """Return a value that falls with the time since the session was used."""
        return -idle_s


def _longer_than(seconds: float, facts: GroupFacts) -> float:
    """Return the share of pauses that are longer."""
    deviations = math.log(max(seconds, 1e-3) / facts.usual_pause_s) / facts.pause_spread
    return 0.5 * math.erfc(deviations / math.sqrt(2))


def first_layer(band: int, num_layers: int) -> int:
    """Return the first layer of a band; bands differ by at most one layer."""
    return band * num_layers // NUM_BANDS
