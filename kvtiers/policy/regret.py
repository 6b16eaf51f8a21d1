"""Which of two ways to evict is better on the traffic of today: each is played beside the store, on paper, and what it would have read is counted.

A policy that learns is wrong where traffic changes, or is like nothing that it was made for; evicting what was used longest ago is never far from
right. So a policy decides while its own losses are the smaller ones. Source: learning from expert advice; here two experts who are told all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvtiers.policy.eviction import NUM_BANDS, EvictionPolicy, GroupFacts, LeastRecent, Victim
from kvtiers.policy.returns import MAX_SESSIONS

# After this many requests a loss counts half as much. Chosen: hours of a person's day, minutes of a busy team's.
HALF_LIFE_REQUESTS = 400
# The part of the memory that a play on paper empties at a time, so that ranking all sessions is paid for once per batch. Chosen.
BATCH = 1 / 64
# The policy decides while its losses are less than this part of the other's. Chosen: what changes sides leaves behind what the other would have kept.
CLEARLY = 0.98


class Paper:
    """The sessions that host memory would hold under one policy. Sizes are in blocks.

    Attributes:
        lost: blocks that requests would have had to read, or to compute again, faded.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy, self.lost = policy, 0.0
        self._held: dict[str, GroupFacts] = {}
        self._num_held = 0

    def asked(self, session: str, num_wanted: int) -> None:
        """Count a request: `num_wanted` blocks are lost if the play does not hold its session."""
        lacks = 0 if session in self._held else num_wanted
        self.lost = self.lost * 0.5 ** (1 / HALF_LIFE_REQUESTS) + lacks

    def hold(self, facts: GroupFacts, num_blocks: int, now: float) -> None:
        """Hold a session, whose size is `facts.num_bytes`, and have no more than `num_blocks` in all."""
        before = self._held.pop(facts.group, None)
        self._held[facts.group] = facts
        self._num_held += facts.num_bytes - (before.num_bytes if before is not None else 0)
        if self._num_held > num_blocks:
            self._evict(int(num_blocks * (1 - BATCH)), now)

    def _evict(self, goal: int, now: float) -> None:
        for victim in self.policy.order(list(self._held.values()), NUM_BANDS, now):
            if self._num_held <= goal:
                return
            if victim.keep_layers == 0:
                self._num_held -= self._held.pop(victim.group).num_bytes


class LessRegretted:
    """Evicts as the policy does while that loses clearly less than evicting the least recently used.

    Args:
        policy: evicts, while it is the better one.
        num_blocks: that host memory has room for.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self._ours, self._plain = self._papers = Paper(policy), Paper(LeastRecent())
        self._num_blocks = num_blocks
        self._sizes: OrderedDict[str, int] = OrderedDict()

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that chooses victims now."""
        return (self._ours if self._ours.lost < CLEARLY * self._plain.lost else self._plain).policy

    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        """Yield victims as the better policy does."""
        return self.policy.order(groups, num_layers, now)

    def asked(self, session: str, num_wanted: int) -> None:
        """Note that a request needs `num_wanted` blocks of its session that the tiers hold and the device lacks."""
        self._sizes[session] = max(self._sizes.pop(session, 0), num_wanted)
        for paper in self._papers:
            paper.asked(session, num_wanted)

    def saved(self, session: str, num_new: int) -> None:
        """Note that a session has grown by `num_new` blocks."""
        self._sizes[session] = self._sizes.pop(session, 0) + num_new
        if len(self._sizes) > MAX_SESSIONS:
            self._sizes.popitem(last=False)

    def left(self, facts: GroupFacts, now: float) -> None:
        """Note that a session's request has ended, and its KV may leave."""
        size = min(self._sizes.get(facts.group, 0), self._num_blocks)
        if size:
            for paper in self._papers:
                paper.hold(replace(facts, num_bytes=size), self._num_blocks, now)
