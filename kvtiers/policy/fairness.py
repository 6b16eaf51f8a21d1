"""How much room each tenant gives when a tier is full: weighted max-min shares. Pure.

A tenant may take whatever nobody else wants. When room is short it is taken from those who hold most for their weight, down to one common level:
nobody below its share gives anything while another is above its own.

Source: max-min fairness by filling up (Bertsekas and Gallager, Data Networks, §6.5.2), read from above.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from kvtiers.policy.eviction import GroupFacts

Tenant = TypeVar("Tenant", bound=Hashable)

# A session that was silent for so long claims no share: its KV goes before any that was used since, whoever holds how much. Chosen.
ABANDONED_S = 1800.0


def is_abandoned(facts: GroupFacts, now: float) -> bool:
    """Whether a session's KV claims nothing: it is over, or nobody has asked for it for long and none of its requests is here or announced."""
    if facts.is_over:
        return True
    is_wanted = facts.is_live or (facts.expected_s is not None and now <= facts.expected_s + ABANDONED_S)
    return not is_wanted and now - facts.last_used_s > ABANDONED_S


def floors(held: Mapping[Tenant, int], weights: Mapping[Tenant, float], to_free: int) -> dict[Tenant, int]:
    """What each tenant that must give may keep, so that `to_free` comes together; who is not in the result keeps all.

    held: of each tenant, in one unit, what it asks for included. weights: 1 where none is given. All give everything if that does not suffice.
    """
    if to_free <= 0:
        return {}
    level = fair_level(held, weights, sum(held.values()) - to_free)
    return {
        tenant: kept
        for tenant, amount in held.items()
        if (kept := min(math.floor(level * weights.get(tenant, 1.0)), amount)) < amount
    }


def choose_victim(
    segments: Sequence[tuple[int, Mapping[Tenant, int]]], givers: Collection[Tenant]
) -> int | None:
    """Which segment of a log to write off: the oldest half of which or more may go, else the one of which most may; None without segments.

    segments: (blocks that it has room for, blocks alive in it by tenant), oldest first. givers: who must give; all others' blocks are to be
    carried forward, and what was overwritten or forgotten may go.
    """
    best, best_share = None, -1.0
    for place, (num_blocks, alive) in enumerate(segments):
        num_kept = sum(count for tenant, count in alive.items() if tenant not in givers)
        share = 1 - num_kept / max(num_blocks, 1)
        if share >= 0.5:
            return place
        if share > best_share:
            best, best_share = place, share
    return best


def fair_level(held: Mapping[Tenant, int], weights: Mapping[Tenant, float], capacity: int) -> float:
    """The level, per unit of weight, to which holdings are cut so that they fit `capacity`; infinite where they fit as they are."""
    if capacity <= 0:
        return 0.0
    by_level = sorted(
        ((amount / weights.get(tenant, 1.0), tenant) for tenant, amount in held.items()),
        key=lambda pair: pair[0],
    )
    left, weight_left = float(capacity), sum(weights.get(tenant, 1.0) for tenant in held)
    for level, tenant in by_level:
        # All that is left is shared by those who hold at least this much.
        if level * weight_left > left:
            return left / weight_left
        left -= held[tenant]
        weight_left -= weights.get(tenant, 1.0)
    return math.inf
