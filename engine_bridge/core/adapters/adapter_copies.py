"""Adapters kept in KV blocks that nobody needs: which, and in whose place.

Source: Chameleon §4.1 (adapters in idle memory).
"""

from __future__ import annotations

from collections import Counter

from engine_bridge.core.adapters.adapter_moves import DropCopy, WriteCopy
from engine_bridge.core.adapters.adapter_table import AdapterTable, Version
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.staging import StagingWishes
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts

# Writing adapters into free blocks takes so much of the engine's thread between two steps while there are requests: of what has just been used,
# and of what nobody asked for yet. Chosen: a tenth and a fiftieth of a step of 15 ms. And while there are none.
USED_WRITE_S, AHEAD_WRITE_S, IDLE_WRITE_S = 0.0015, 0.0003, 0.010
# Where there was no room for an adapter that nobody asked for yet, it is looked for again this much later, if something changed. Chosen.
LOOK_EVERY_S = 1.0


class AdapterCopies:
    """Decides for the copies of one table. Blocks are free until whoever carries this out has got some (`begun`).

    Args:
        left: ids of adapters that left their slot; those that may be kept are taken out.
        copies_ahead: also those that nobody asked for yet, where memory lies idle.
    """

    def __init__(
        self,
        table: AdapterTable,
        worth: Worth,
        wanted: StagingWishes,
        counts: Counter[str],
        left: list[int],
        copies_ahead: bool,
    ) -> None:
        self._table = table
        self._worth = worth
        self._wanted = wanted
        self._counts = counts
        self._left = left
        self._versions: dict[int, Version] = {}
        self._copies_ahead = copies_ahead
        self._may_find = False
        self._look_at_s = 0.0
        self._ahead_id: int | None = None

    # -- in ----------------------------------------------------------------------------------------------------------

    def take_left(self) -> list[WriteCopy]:
        """What left its slot is kept, if there is memory that KV does not need."""
        left = [self._table.get(adapter_id) for adapter_id in self._left]
        self._left.clear()
        return [
            WriteCopy(v.id) for v in left if v is not None and v.host_bytes is not None and v.slot is None
        ]

    def take_ahead(self, now: float) -> list[WriteCopy]:
        """Where memory lies idle: of the adapters in host memory alone the one that is worth the most, before anybody asks for it. One at a time."""
        if self.wait_s(now) != 0:
            return []
        self._may_find, self._look_at_s = False, now + LOOK_EVERY_S
        versions = list(self._table)
        if any(version.copy == "writing" for version in versions):
            return []
        candidates = [version for version in versions if _may_go_ahead(version)]
        order = self._worth.order(candidates, "cached", now)
        return [WriteCopy(adapter_id, is_ahead=True) for adapter_id in order[-1:]]

    def wait_s(self, now: float) -> float | None:
        """How long until memory is looked for; None: until something comes."""
        return max(self._look_at_s - now, 0.0) if self._may_find else None

    def something_changed(self) -> None:
        """An adapter has come to host memory, or a request has ended: perhaps there is one to be copied now, and room for it."""
        self._may_find = self._copies_ahead

    def room_for(self, adapter_id: int, now: float) -> list[DropCopy]:
        """There are no free blocks for it: who gives up theirs. Nobody if it is not worth the place of those that are there."""
        others = self._whole()
        if not others:
            return []
        version = self._table[adapter_id]
        victims = self._worth.victims([*others, version], "cached", version.num_bytes, now)
        if adapter_id in victims:
            return []
        return [self._drop(self._versions[victim], "adapter") for victim in victims]

    def begun(self, adapter_id: int, is_ahead: bool = False) -> None:
        """It has blocks, and is being written."""
        version = self._table[adapter_id]
        if version.copy == "none":
            self._ahead_id = adapter_id if is_ahead else None
            self._counts["copied_ahead"] += is_ahead
            version.copy = "writing"
            self._versions[adapter_id] = version

    def done(self, adapter_id: int) -> None:
        """All of it is written."""
        version = self._versions.get(adapter_id)
        if version is not None and version.copy == "writing":
            version.copy = "whole"
            self._wanted.something_moved()
            self._look_at_s = 0.0
            self.something_changed()

    # -- out ---------------------------------------------------------------------------------------------------------

    def write_s(self, is_busy: bool) -> float:
        """How long writing may take between two steps. is_busy: requests run or wait."""
        if not is_busy:
            return IDLE_WRITE_S
        writing = [version.id for version in self._versions.values() if version.copy == "writing"]
        return AHEAD_WRITE_S if writing == [self._ahead_id] else USED_WRITE_S

    def lost(self, adapter_id: int) -> None:
        """KV took its blocks."""
        version = self._versions.get(adapter_id)
        if version is not None:
            self._drop(version, "kv")
            self._wanted.something_moved()

    def give_up(self, version: Version) -> list[DropCopy]:
        """Whatever it is worth."""
        version.copy = "none"
        return [DropCopy(version.id)] if self._versions.pop(version.id, None) is not None else []

    def may_displace(self, adapter_id: int, prefix: PrefixFacts, now: float) -> bool:
        """E3: may it take the place of these prefix blocks?"""
        return self._worth.may_displace(self._table[adapter_id], self._whole(), prefix, now)

    def take_less_valuable_than_blocks(self, prefix: PrefixFacts, now: float) -> int | None:
        """E3: one that is worth no more, by the byte, than these prefix blocks: it has gone. None: all are worth more."""
        victim = (
            self._worth.less_valuable_than_blocks(self._whole(), prefix, now)
            if prefix.reuse_per_s > 0
            else None
        )
        if victim is not None:
            self._drop(self._versions[victim], "value")
        return victim

    def take_first_to_go(self, now: float) -> int | None:
        """KV needs memory that some adapter lies in: the one that is worth the least has gone. None: there is none that may go in another's place.

        One that requests need and that lies nowhere else may not: it would have to be read from disk for them, or is about to be computed with.
        """
        spare = [version for version in self._whole() if not (version.requests and version.place == "cached")]
        order = self._worth.order(spare, "cached", now)
        if not order:
            return None
        self._drop(self._versions[order[0]], "kv")
        self._wanted.something_moved()
        return order[0]

    def _whole(self) -> list[Version]:
        return [version for version in self._versions.values() if version.copy == "whole"]

    def _drop(self, version: Version, reason: str) -> DropCopy:
        version.copy = "none"
        del self._versions[version.id]
        self._worth.left(version.id, "cached")
        self._counts[f"evicted:cached:{reason}"] += 1
        return DropCopy(version.id)


def _may_go_ahead(version: Version) -> bool:
    return (
        version.host_bytes is not None
        and version.copy == "none"
        and version.slot is None
        and not (version.requests or version.is_removed or version.is_put_back)
    )
