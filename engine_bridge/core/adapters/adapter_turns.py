"""Which adapters start no further request, so that an adapter that has waited for room gets its turn."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine_bridge.core.adapters.adapter_table import AdapterTable, Version

# Chosen: how long an adapter without room waits before others make room for it, in seconds. A person hardly notices it beside a load; at 0 a burst
# of adapters would hold everybody back.
PATIENCE_S = 0.25
# Chosen: the time between two looks over all adapters for a blocked one, in seconds. A step asks about each request that waits.
LOOK_EVERY_S = 0.01


class AdapterTurns:
    """Gives an adapter that waits for room its turn.

    Without this, adapters whose requests overlap without a pause would keep their memory, and one more adapter would never get any.

    The oldest waiting adapter has its turn first: some of the running adapters start no further request until it runs. Their running requests
    continue, as do all other requests. So the waiting adapter waits for `PATIENCE_S`, for the longest answer that one of those adapters is giving,
    and for its own load.

    Args:
        step_room, host_bytes: as in `Rules`.
    """

    def __init__(self, table: AdapterTable, step_room: int | None, host_bytes: int) -> None:
        self._table, self._step_room, self._host_bytes = table, step_room, host_bytes
        self._waiting: int | None = None
        self._look_s = float("-inf")
        self.last: frozenset[int] = frozenset()
        """The last result of `held_back`. May be read from any thread."""

    def holds_back(self, adapter_id: int, running: Callable[[], Collection[int]], now: float) -> bool:
        """Return whether this adapter starts no further request, as of a look that is at most `LOOK_EVERY_S` old. running: as for `held_back`."""
        if now >= self._look_s:
            self._look_s = now + LOOK_EVERY_S
            self.held_back(running(), now)
        return adapter_id in self.last

    def held_back(self, running: Collection[int], now: float) -> frozenset[int]:
        """Return the adapters of which no further request may start in this step. running: adapters that requests run with."""
        waiting = self._table.get(self._waiting) if self._waiting is not None else None
        if waiting is not None and waiting.requests and waiting.id not in running:
            return self.last
        by_age = sorted(
            (version.oldest_request_s, version.id)
            for version in self._table
            if version.requests and version.id not in running and now - version.oldest_request_s >= PATIENCE_S
        )
        waiting_long = (self._table[adapter_id] for _, adapter_id in by_age)
        oldest = next((version for version in waiting_long if self._lacks_room(version, running)), None)
        if oldest is not None:
            self._waiting, self.last = oldest.id, self._who_makes_room(oldest, running)
        else:
            self._waiting, self.last = None, frozenset()
        return self.last

    def _lacks_room(self, version: Version, running: Collection[int]) -> bool:
        own = [self._table[adapter_id] for adapter_id in running]
        if len(own) >= len(self._table.slots):
            return True
        room = sum(each.room for each in own) + version.room
        if self._step_room is not None and own and room > self._step_room:
            return True
        in_host = sum(each.host_bytes or 0 for each in own) + version.num_bytes
        return version.host_bytes is None and not version.is_loading and in_host > self._host_bytes

    def _who_makes_room(self, version: Version, running: Collection[int]) -> frozenset[int]:
        """Return the adapters that are held back so that this one finds room.

        Adapters with few requests are taken first: they end soonest and have the least to lose.
        """
        left = sorted(running, key=lambda each: (len(self._table[each].requests), each))
        gone: list[int] = []
        while left and self._lacks_room(version, left):
            gone.append(left.pop(0))
        return frozenset(gone)
