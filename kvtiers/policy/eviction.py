"""Which KV leaves the host tier when it is full. The disk has all of it, so a wrong choice costs a read, never a recomputation.

KV is judged by group (all blocks of one session), a band of layers at a time: a session that keeps its first layers in memory can start
while the others come from disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtiers.policy.returns import ASSUMED_PAUSE_S

# An announced session is worth more than any other until its request is late by this time. Chosen: advisories are taken back long before.
LATE_AT_MOST_S = 300.0
# The least half-life, however short pauses are. Chosen.
MIN_HALF_LIFE_S = 1.0
NUM_BANDS = 4
"""Bands of layers that leave one after another. Chosen: the start of a restore needs no finer steps."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One session's KV in the host tier. Between tenants `fairness.py` decides; a policy is asked about one tenant's sessions at a time.

    Attributes:
        expected_s: when an advisory expects its request, on the clock of `now`; None without an advisory.
        is_over: whether it was deleted.
        is_live: whether a request of it is in the engine; if that is preempted, it needs this KV for certain.
        is_waiting: whether one of these waits to start, so that it needs this KV soon, as far as the device has lost it.
        usual_pause_s: the usual pause of sessions between two requests.
    """

    group: str
    num_bytes: int
    last_used_s: float
    num_uses: int
    is_over: bool = False
    is_live: bool = False
    is_waiting: bool = False
    expected_s: float | None = None
    usual_pause_s: float = ASSUMED_PAUSE_S


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

    Each band of a session's layers counts 0.84 times as much as the one before it, because reading it overlaps with computing the earlier
    ones; among equals the smallest KV goes first, since it is the cheapest to bring back.

    A session that has been silent for longer than sessions usually are is likely to be over. How long that is differs by four orders of magnitude
    between agents that call one another and people who read, so it is learned (`returns.py`): with half-lives of minutes, host memory that holds a
    minute's KV kept ended sessions and evicted new ones (bench/LOG.md).

    Source: SYMPHONY §4.3 (latest layers first, then the smallest KV). Departs in weighing layers against likelihood: taking last layers of
    every live session before the first layer of any abandoned one makes each live session pay for the dead (bench.emulated host_tier:
    twice the stall).
    """

    half_life_pauses: float = 2.4
    """After a silence of so many usual pauses a session is half as likely to send another request. Measured: `bench.emulated host_tier`."""
    band_weight: float = 0.25
    """Powers of two by which a band of layers is worth less than the one before it."""
    num_prior_uses: int = 3
    """A session of u requests sends another with likelihood u / (u + 3); 27, 40, 56, 61, 69% for u = 1 … 5 in Mooncake's trace."""

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
        idle_s = max(now - facts.last_used_s, 0.0)
        num_uses = max(facts.num_uses, 1)
        half_life_s = max(self.half_life_pauses * facts.usual_pause_s, MIN_HALF_LIFE_S)
        return math.log2(num_uses / (num_uses + self.num_prior_uses)) - idle_s / half_life_s


def first_layer(band: int, num_layers: int) -> int:
    """Return the first layer of a band; bands differ by at most one layer."""
    return band * num_layers // NUM_BANDS
