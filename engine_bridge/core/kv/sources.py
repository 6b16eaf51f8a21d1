"""The tiers that a prompt's KV came from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine_bridge.core.kv.restoring import Restore


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
