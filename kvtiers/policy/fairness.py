"""How much room each tenant gives when a tier is full: weighted max-min shares. Pure.

A tenant may take whatever nobody else wants. When room is short it is taken from those who hold most for their weight, down to one common level:
nobody below its share gives anything while another is above its own.

Source: max-min fairness by filling up (Bertsekas and Gallager, Data Networks, §6.5.2), read from above.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

from kvtiers.policy.eviction import GroupFacts

Tenant = TypeVar("Tenant", bound=Hashable)

# A session that was silent for so long claims no share: its KV goes before any that was used since, whoever holds how much. Chosen: six
# half-lives of `ByValue`.
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
