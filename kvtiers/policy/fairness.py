"""How much room each tenant gives when a tier is full: weighted max-min shares. Pure.

A tenant may take all room that no other tenant wants. When room is short, the tenants that hold most for their weight give it, down to one common
level: no tenant below its share gives room while another is above its own.

Source: max-min fairness by filling up (Bertsekas and Gallager, Data Networks, §6.5.2), read from above.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from kvtiers.policy.eviction import GroupFacts

Tenant = TypeVar("Tenant", bound=Hashable)

# A session that was silent for this time claims no share: its KV leaves before any that was used since, whatever tenants hold. Chosen.
ABANDONED_S = 1800.0


def is_abandoned(facts: GroupFacts, now: float) -> bool:
    """Return whether a session's KV claims no share: it is over, or was silent for long and none of its requests is here or announced."""
    if facts.is_over:
        return True
    is_wanted = facts.is_live or (facts.expected_s is not None and now <= facts.expected_s + ABANDONED_S)
    return not is_wanted and now - facts.last_used_s > ABANDONED_S


def floors(held: Mapping[Tenant, int], weights: Mapping[Tenant, float], to_free: int) -> dict[Tenant, int]:
    """Return what each giving tenant may keep, so that `to_free` comes together; tenants that are not in the result keep all.

    All tenants give everything if that does not suffice.

    Args:
        held: the room of each tenant, with the room that it asks for.
        weights: the tenants' weights; 1 where none is given.
        to_free: the room to free, in the unit of `held`.
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
    """Return which segment of a log to remove: the oldest of which at least half may go, else the one of which the most may go; None without any.

    Overwritten and forgotten blocks may go, too; blocks of other tenants than the givers are carried forward.

    Args:
        segments: the number of blocks that each has room for, and its live blocks by tenant, oldest first.
        givers: the tenants that must give room.
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
    """Return the level, per unit of weight, to which holdings are cut to fit `capacity`; infinite where they fit as they are."""
    if capacity <= 0:
        return 0.0
    by_level = sorted(
        ((amount / weights.get(tenant, 1.0), tenant) for tenant, amount in held.items()),
        key=lambda pair: pair[0],
    )
    left, weight_left = float(capacity), sum(weights.get(tenant, 1.0) for tenant in held)
    for level, tenant in by_level:
        # The rest is shared by the tenants that hold at least this much.
        if level * weight_left > left:
            return left / weight_left
        left -= held[tenant]
        weight_left -= weights.get(tenant, 1.0)
    return math.inf
