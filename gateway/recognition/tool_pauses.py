"""When a conversation comes back whose answer called tools: learned by tool and tenant, told to the node as an advisory. Source: spec E; Continuum.

An answer that ends with calls of tools says that the same conversation will ask again when they have answered. How long that takes is learned from
earlier pauses after the same tools. Before any were seen, the published figures of a trace of coding agents stand in: 86% are back within a second
and 95% within ten (vllm-project/router #285).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

# Upper ends of the classes that pauses are counted in, in seconds. Chosen: half as long again from class to class.
ENDS_S = tuple(0.02 * 1.5**step for step in range(28))
# The published shares, and how many observed pauses they count as. Chosen: ten pauses outweigh them.
PUBLISHED, NUM_ASSUMED = ((1.0, 0.8646), (10.0, 0.9512), (ENDS_S[-1], 1.0)), 4.0
# After this many pauses an old one counts half. Chosen: tools change with the task.
HALF_LIFE = 64
# Sets of tools that are kept for one tenant; the one unused for longest is forgotten first.
MAX_TOOL_SETS = 256
MAX_TENANTS = 1024


class Return(NamedTuple):
    """When a conversation is expected back, in seconds from the end of its answer.

    earliest_s: nine of ten are not back before. latest_s: nineteen of twenty are back by then.
    """

    earliest_s: float
    latest_s: float


class _Pauses:
    """Pauses after one set of tools, in classes of length, the older ones fading."""

    def __init__(self) -> None:
        self.counts = [0.0] * (len(ENDS_S) + 1)
        self.weight = 1.0

    def note(self, pause_s: float) -> None:
        """Count a pause; the ones before it count a little less from now on."""
        self.weight *= 2 ** (1 / HALF_LIFE)
        self.counts[bisect_left(ENDS_S, pause_s)] += self.weight
        if self.weight > 1e9:
            self.counts = [count / self.weight for count in self.counts]
            self.weight = 1.0

    def at(self, number: int) -> float:
        """Return how many pauses of this class there were, as of now."""
        return self.counts[number] / self.weight


def _published() -> list[float]:
    """Return the published shares by class of length; inside each of their ranges pauses are even on a scale of logarithms."""
    shares, begin_s, before = [0.0] * (len(ENDS_S) + 1), ENDS_S[0] / 1.5, 0.0
    for end_s, share in PUBLISHED:
        whole = math.log(end_s / begin_s)
        low_s = 0.0
        for number, high_s in enumerate(ENDS_S):
            low, high = max(low_s, begin_s), min(high_s, end_s)
            if high > low:
                shares[number] += (share - before) * math.log(high / low) / whole
            low_s = high_s
        begin_s, before = end_s, share
    return shares


class ToolPauses:
    """How long tools take, by tenant and by the names of the tools that an answer calls together."""

    def __init__(self) -> None:
        self._assumed = _published()
        self._tenants: OrderedDict[str, OrderedDict[frozenset[str], _Pauses]] = OrderedDict()

    def note(self, tenant: str, tools: Iterable[str], pause_s: float) -> None:
        """Note that a conversation came back this many seconds after an answer that called these tools."""
        own = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        key = frozenset(tools)
        own.setdefault(key, _Pauses()).note(pause_s)
        own.move_to_end(key)
        if len(own) > MAX_TOOL_SETS:
            own.popitem(last=False)

    def expected(self, tenant: str, tools: Iterable[str], waited_s: float = 0.0) -> Return:
        """Return when a conversation is expected that has been away for `waited_s` already: shorter pauses no longer count."""
        own = self._tenants.get(tenant)
        seen = own.get(frozenset(tools)) if own is not None else None
        weights = []
        for number, assumed in enumerate(self._assumed):
            weight = NUM_ASSUMED * assumed + (seen.at(number) if seen is not None else 0.0)
            over = number < len(ENDS_S) and ENDS_S[number] <= waited_s
            weights.append(0.0 if over else weight)
        if not sum(weights):
            return Return(waited_s, 2 * waited_s)
        return Return(self._quantile(weights, 0.1, lower=True), self._quantile(weights, 0.95, lower=False))

    def _quantile(self, weights: list[float], share: float, *, lower: bool) -> float:
        """Return an end of the class in which this share of the pauses is reached."""
        left = share * sum(weights)
        number = 0
        for number, weight in enumerate(weights):  # noqa: B007  # the class at which it stops counts
            left -= weight
            if left <= 0:
                break
        number = min(number, len(ENDS_S) - 1)
        if not lower:
            return ENDS_S[number]
        return ENDS_S[number - 1] if number else 0.0
