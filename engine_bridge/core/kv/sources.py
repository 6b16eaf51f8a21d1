"""The tiers that a prompt's KV came from, and what of it did not come after all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_bridge.core.kv.cache_moves import NULL_BLOCK_ID
from engine_bridge.core.kv.restoring import Restore
from engine_bridge.policy.kv.kv_layout import KvLayout


@dataclass(slots=True)
class Sources:
    """The tiers that the KV of a request's prompt came from, in tokens; the other tokens were computed."""

    device: int
    host: int = 0
    disk: int = 0
    peer: int = 0

    def load(self, restore: Restore, num_blocks: int, block_size: int) -> None:
        """Count the blocks that a step loads. Blocks that a restore brought to the device in pieces count for the tier where they were."""
        skipped = restore.num_skipped
        if restore.whole is not None:
            shares = Counter(restore.origins)
            parts = {each: shares[each] * restore.whole.num_tokens // shares.total() for each in shares}
            self.disk, self.peer = parts.get("disk", 0), parts.get("peer", 0)
            self.host = restore.whole.num_tokens - self.disk - self.peer
            return
        carried = restore.carried_before(restore.first + skipped)[: self.device // block_size]
        found = Counter(carried + restore.origins[skipped : skipped + num_blocks])
        self.device -= len(carried) * block_size
        self.host, self.disk, self.peer = (found[each] * block_size for each in ("host", "disk", "peer"))

    def cut(self, num_tokens: int) -> None:
        """Note that only the first `num_tokens` of them came."""
        loaded = max(num_tokens - self.device, 0)
        self.host = min(self.host, loaded)
        self.disk = min(self.disk, loaded - self.host)
        self.peer = min(self.peer, loaded - self.host - self.disk)


def spoiled_blocks(
    invalid: set[int],
    ran: Mapping[str, Sequence[Sequence[int]]],
    sources: Mapping[str, Sources],
    layout: KvLayout,
) -> set[int]:
    """Return the device's blocks whose KV cannot be trusted after `invalid` ones did not load, and count in `sources` only what came.

    ran: of each request that has run, its blocks, a list for each group of layers.
    """
    spoiled = set(invalid)
    assert NULL_BLOCK_ID not in spoiled, "KV was loaded into a block that stands for none"
    for request_id, groups in ran.items():
        of_groups = list(zip(layout.groups, groups, strict=True))
        starts = [
            index * group.block_tokens
            for group, block_ids in of_groups
            for index, block_id in enumerate(block_ids)
            if block_id in invalid
        ]
        if starts:
            for group, block_ids in of_groups:
                spoiled.update(block_ids[min(starts) // group.block_tokens :])
            if request_id in sources:
                sources[request_id].cut(min(starts))
    return spoiled - {NULL_BLOCK_ID}
