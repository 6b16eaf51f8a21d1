"""Which adapters are kept in KV blocks that no request needs, and which of them make room for others.

Source: Chameleon §4.1 (adapters in idle memory).
"""

from __future__ import annotations

from collections import Counter

from engine_bridge.core.adapters.adapter_moves import DropCopy, WriteCopy
from engine_bridge.core.adapters.adapter_table import AdapterTable, Version
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.staging import StagingWishes
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts

# Time, in seconds, that writing adapters into free blocks may take of the engine's thread between two steps: for adapters that have just been used,
# for adapters that no request has asked for yet (both while there are requests), and while there are no requests. Chosen: the first two are a tenth
# and a fiftieth of a step of 15 ms.
USED_WRITE_S, AHEAD_WRITE_S, IDLE_WRITE_S = 0.0015, 0.0003, 0.010
# When there was no room for an adapter that no request has asked for yet, look for room again after this time if something changed. Chosen.
LOOK_EVERY_S = 1.0


class AdapterCopies:
    """Decides which adapters of one table have copies in KV blocks.

    A copy has no blocks until the caller has allocated some for it and says so (`begun`).

    Args:
        left: ids of adapters that left their slot; `take_left` empties the list and returns the adapters that may be kept.
        copies_ahead: whether adapters that no request has asked for yet are copied too, where memory lies idle.
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
        """Return a move for each adapter that has left its slot: write its copy if there is memory that KV does not need."""
        left = [self._table.get(adapter_id) for adapter_id in self._left]
        self._left.clear()
        return [
            WriteCopy(v.id) for v in left if v is not None and v.host_bytes is not None and v.slot is None
        ]

    def take_ahead(self, now: float) -> list[WriteCopy]:
        """Return at most one move: copy the most valuable adapter of those in host memory alone, before any request asks for it.

        This happens only where memory lies idle, and one adapter at a time.
        """
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
        """Return the seconds until memory is looked for again; None means not before something changes."""
        return max(self._look_at_s - now, 0.0) if self._may_find else None

    def something_changed(self) -> None:
        """Note that an adapter has come to host memory or a request has ended: there may now be an adapter to copy, and room for it."""
        self._may_find = self._copies_ahead

    def room_for(self, adapter_id: int, now: float) -> list[DropCopy]:
        """Return the copies to drop so that this adapter finds blocks when none are free.

        The list is empty if the adapter is worth less than the copies that it would displace.
        """
        others = self._whole()
        if not others:
            return []
        version = self._table[adapter_id]
        victims = self._worth.victims([*others, version], "cached", version.num_bytes, now)
        if adapter_id in victims:
            return []
        return [self._drop(self._versions[victim], "adapter") for victim in victims]

    def begun(self, adapter_id: int, is_ahead: bool = False) -> None:
        """Note that the adapter has blocks, into which its copy is being written. is_ahead: no request has asked for it yet."""
        version = self._table[adapter_id]
        if version.copy == "none":
            self._ahead_id = adapter_id if is_ahead else None
            self._counts["copied_ahead"] += is_ahead
            version.copy = "writing"
            self._versions[adapter_id] = version

    def done(self, adapter_id: int) -> None:
        """Note that the adapter's copy is written completely."""
        version = self._versions.get(adapter_id)
        if version is not None and version.copy == "writing":
            version.copy = "whole"
            self._wanted.something_moved()
            self._look_at_s = 0.0
            self.something_changed()

    # -- out ---------------------------------------------------------------------------------------------------------

    def write_s(self, is_busy: bool) -> float:
        """Return the seconds that writing copies may take between two steps. is_busy: whether requests run or wait."""
        if not is_busy:
            return IDLE_WRITE_S
        writing = [version.id for version in self._versions.values() if version.copy == "writing"]
        return AHEAD_WRITE_S if writing == [self._ahead_id] else USED_WRITE_S

    def lost(self, adapter_id: int) -> None:
        """Note that KV took the blocks of this adapter's copy."""
        version = self._versions.get(adapter_id)
        if version is not None:
            self._drop(version, "kv")
            self._wanted.something_moved()

    def give_up(self, version: Version) -> list[DropCopy]:
        """Drop the version's copy, however much it is worth."""
        version.copy = "none"
        return [DropCopy(version.id)] if self._versions.pop(version.id, None) is not None else []

    def may_displace(self, adapter_id: int, prefix: PrefixFacts, now: float) -> bool:
        """Return whether the adapter may take the place of these prefix blocks (E3)."""
        return self._worth.may_displace(self._table[adapter_id], self._whole(), prefix, now)

    def take_less_valuable_than_blocks(self, prefix: PrefixFacts, now: float) -> int | None:
        """Drop a copy that is worth no more, per byte, than these prefix blocks (E3).

        Returns:
            The id of the adapter whose copy was dropped; None if every copy is worth more.
        """
        victim = (
            self._worth.less_valuable_than_blocks(self._whole(), prefix, now)
            if prefix.reuse_per_s > 0
            else None
        )
        if victim is not None:
            self._drop(self._versions[victim], "value")
        return victim

    def take_first_to_go(self, now: float) -> int | None:
        """Drop the least valuable copy because KV needs the memory.

        A copy stays if requests need the adapter and it lies nowhere else: the adapter would have to be read from disk for them, or a step is about
        to compute with it.

        Returns:
            The id of the adapter whose copy was dropped; None if no copy may be dropped.
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
