"""A store of KV blocks on a folder. What a block holds follows from its key, so that whatever comes back can be compared."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from kvtiers.blocks import Stage
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.files import Files
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import ByValue, EvictionPolicy
from kvtiers.store import KvStore

SETTLE_S = 10.0


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


class Stored:
    """The tiers of a node, without an engine."""

    def __init__(
        self,
        folder: Path,
        shape: BlockShape,
        host_blocks: int,
        disk_bytes: int,
        eviction: EvictionPolicy | None = None,
        files: Files | None = None,
    ) -> None:
        self.io, self.shape = IoThread("test-io"), shape
        opening = DiskLog.open(folder, "test", shape, disk_bytes, files=files) if disk_bytes else None
        disk = self.io.start(opening).result() if opening is not None else None
        self.store = KvStore(shape, host_blocks * shape.block_bytes, self.io, disk, eviction or ByValue())

    def content(self, key: bytes, layer: int) -> bytes:
        return hashlib.shake_128(key + bytes([layer])).digest(self.shape.layer_bytes)

    def save(self, group: str, keys: Sequence[bytes], *, tenant: str = "", spoil: bool = False) -> int:
        """Save what is not held yet, or begin to and give it up; returns how many blocks that were."""
        save = self.store.begin_save(group, [BlockKey(key) for key in keys], tenant=tenant)
        for position, slots in zip(save.positions, save.slots, strict=True):
            for layer, slot in enumerate(slots):
                data = bytes(self.shape.layer_bytes) if spoil else self.content(keys[position], layer)
                self.store.pool.slot(slot)[:] = data
        (self.store.abandon if spoil else self.store.commit)(save)
        return len(save.blocks)

    def check_content(self, stage: Stage, keys: Sequence[bytes], num_blocks: int) -> None:
        for key, slots in zip(keys, stage.slots[:num_blocks], strict=False):
            for layer, slot in enumerate(slots):
                assert bytes(self.store.pool.slot(slot)) == self.content(key, layer)

    def close(self) -> None:
        self.store.close()
        self.io.close()
