"""What of a request's KV is copied to host memory: what each step has finished, and once more what the device is about to lose. Pure.

What is written when it is computed need not stay: as long as the device has it, host memory has better uses for its room. So what the device has,
too, leaves a full host memory first, and is saved again when the device's blocks come near to having another use. Source: vLLM's
SimpleCPUOffload has such a second look as its only one (`lazy`); here what is lost to a crash or asked for elsewhere is mostly written already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from engine_bridge.core.kv.asked import NewRequest
from engine_bridge.core.kv.cache_moves import NULL_BLOCK_ID
from engine_bridge.core.kv.step_moves import SaveJob
from engine_bridge.core.kv.tier_store import TierStore, block_key
from engine_bridge.policy.kv.kv_layout import GROUP_BYTES, BlockAt, Entry, KvLayout
from kvtiers.keys import BlockKey


class OnDevice(NamedTuple):
    """A block of the device as it was last known: the entry that it holds, its key, and the tenant and group that it is kept under."""

    block_id: int
    entry: Entry
    key: BlockKey
    tenant: str
    group: str


class Saves:
    """The blocks of the device whose KV the tiers keep or have kept, and the saves of them."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._on_device: dict[int, OnDevice] = {}
        self._block_of: dict[BlockKey, int] = {}

    def save(self, request: NewRequest, sources: Mapping[BlockAt, int], store: TierStore) -> SaveJob | None:
        """Save these blocks of a request as far as the tiers lack them, and were not asked to before.

        sources: the device's number of each that it has.
        """
        blocks = [at for at, block_id in sources.items() if block_id != NULL_BLOCK_ID]
        entries = self._layout.entries(request.keys, blocks)
        found = []
        for at, entry in zip(blocks, entries, strict=True):
            known = self._on_device.get(sources[at])
            noted = self.note(sources[at], entry, request.tenant, request.group)
            if known is None or known.entry != entry:
                found.append(noted)
        save = store.begin_save(request.group, [each.key for each in found], tenant=request.tenant)
        return _job(SaveJob(save, [], []), found)

    def note(self, block_id: int, entry: Entry, tenant: str, group: str) -> OnDevice:
        """Note that a block of the device holds, or will hold when the step under way has ended, what this entry names."""
        before = self._on_device.get(block_id)
        if before is not None and before.entry == entry:
            if before.group == group and before.tenant == tenant:
                return before
        elif before is not None and self._block_of.get(before.key) == block_id:
            del self._block_of[before.key]
        key = before.key if before is not None and before.entry == entry else block_key(entry)
        found = self._on_device[block_id] = OnDevice(block_id, entry, key, tenant, group)
        self._block_of[key] = block_id
        return found

    def forget(self, block_ids: Iterable[int]) -> None:
        """Forget what these blocks of the device were to hold: it is to be saved when they hold it."""
        for block_id in block_ids:
            before = self._on_device.pop(block_id, None)
            if before is not None and self._block_of.get(before.key) == block_id:
                del self._block_of[before.key]

    def find(self, key: BlockKey) -> OnDevice | None:
        """Return the block that has last held a key's content; None where there was none. It may hold other content by now."""
        block_id = self._block_of.get(key)
        return self._on_device[block_id] if block_id is not None else None

    def save_again(self, leaving: Iterable[tuple[int, Entry]], store: TierStore) -> Iterator[SaveJob]:
        """Save blocks that the device is about to lose, as far as no tier has them. Each save is begun when its turn comes.

        leaving: their numbers and content, the first to go first; of each conversation the device loses the end first.
        """
        # By key, as several blocks of the device may hold the same.
        groups: dict[tuple[str, str], dict[BlockKey, OnDevice]] = defaultdict(dict)
        for block_id, entry in leaving:
            known = self._on_device.get(block_id)
            if known is not None and known.entry == entry:
                groups[known.tenant, known.group][known.key] = known
        for (tenant, group), by_key in groups.items():
            found = list(reversed(by_key.values()))
            save = store.begin_save(group, [each.key for each in found], tenant=tenant, again=True)
            if (job := _job(SaveJob(save, [], []), found)) is not None:
                yield job


def _job(job: SaveJob, found: list[OnDevice]) -> SaveJob | None:
    """Return a save's job with the blocks that it is from; None for one of no blocks."""
    for position in job.save.positions:
        job.block_ids.append(found[position].block_id)
        job.groups.append(int.from_bytes(found[position].entry[-GROUP_BYTES:], "big"))
    return job if job.block_ids else None
