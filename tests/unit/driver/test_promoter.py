"""What promotions carry out, in vLLM's own block pool, from a real host tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from engine_bridge.core.kv.kv_transfers import NewRequest, Restores
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.driver.kv.promoter import Promoter
from engine_bridge.driver.memory.block_copy import CpuCopier
from engine_bridge.protocol.node import Advisory
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import ByValue
from kvtiers.store import KvStore
from tests.unit.core.shelf import LoadsAll

BLOCK_TOKENS, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 16, 32, 8
SHAPE = BlockShape(num_layers=2, layer_bytes=64)


class LateCopier(CpuCopier):
    """As a GPU: a copy reads its source when the device comes to it, long after the call."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.waiting: list[Callable[[], None]] = []
        self.has_failed = False

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.waiting.append(lambda: super(LateCopier, self).to_device(layer, blocks, slots))

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        self.waiting.append((failed or then) if self.has_failed else then)

    def catch_up(self) -> None:
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act()


class Bench:
    """A device and a host tier. What a block holds is told by its key."""

    def __init__(self, io: IoThread, folder: Path | None = None) -> None:
        self.pool = BlockPool(NUM_DEVICE_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.tiers = KvTiers(TiersConfig(host_bytes=NUM_HOST_BLOCKS * SHAPE.block_bytes), policy=LoadsAll())
        disk = io.start(DiskLog.open(folder, "test", SHAPE, 1 << 20)).result() if folder else None
        self.store = KvStore(SHAPE, NUM_HOST_BLOCKS * SHAPE.block_bytes, io, disk, ByValue())
        self.tiers.store = self.store
        self.device = [
            torch.zeros(NUM_DEVICE_BLOCKS, SHAPE.layer_bytes, dtype=torch.uint8)
            for _ in range(SHAPE.num_layers)
        ]
        self.copier = LateCopier(self.device, self.store.pool.region)
        self.tiers.copier = self.copier
        self.now = 0.0
        self.promoter = Promoter(self.pool, self.tiers, BLOCK_TOKENS, lambda: (0, 0), lambda: self.now)
        self.tiers.listener = self.promoter
        self.restores = self.tiers.restores = Restores(self.tiers, BLOCK_TOKENS)

    def save(self, session: str, keys: Sequence[bytes]) -> int:
        save = self.store.begin_save(session, [BlockKey(key) for key in keys])
        for block in save.blocks:
            for slot in block.slots:
                self.store.pool.slot(slot)[:] = content(block.key)
        self.store.commit(save)
        return len(save.blocks)

    def expect(self, session: str, keys: Sequence[bytes]) -> None:
        left = SimpleNamespace(session_id=session, cache_salt=None, block_hashes=keys)
        self.promoter.remember(left)  # type: ignore[arg-type]  # all that it looks at
        self.promoter.advise(Advisory(advisory_id=session, session_id=session), (), None, lambda report: None)

    def on_device(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        """What lies, layer by layer, in the blocks that the engine would take for these."""
        found = [self.pool.get_cached_block(key, [0]) for key in keys]
        assert all(found)
        return [[bytes(layer[block[0].block_id].tolist()) for layer in self.device] for block in found]


def keys_of(name: str, num: int) -> list[bytes]:
    return [f"{name}-{at}".encode().ljust(32, b"-") for at in range(num)]


def content(key: bytes) -> bytes:
    return key.ljust(SHAPE.layer_bytes, b".")


@pytest.fixture
def bench() -> Iterator[Bench]:
    io = IoThread("test-io")
    bench = Bench(io)
    yield bench
    bench.store.close()
    io.close()


class Waiting:
    """A request that waits for its KV, which is on disk and larger than host memory."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.keys = bench, keys_of("r", 2 * NUM_HOST_BLOCKS)
        for start in range(0, len(self.keys), 4):
            bench.save("r", self.keys[start : start + 4])
            bench.store.flush()
        bench.store.drop_host()
        bench.restores.enter(NewRequest("r", self.keys, session="r"))

    @property
    def num_on_device(self) -> int:
        found = (self.bench.pool.get_cached_block(key, [0]) is not None for key in self.keys)
        return next((at for at, is_there in enumerate(found) if not is_there), len(self.keys))

    def match(self) -> int | None:
        """Blocks that the next step can load."""
        num_tokens, num_there = BLOCK_TOKENS * len(self.keys) + 2, BLOCK_TOKENS * self.num_on_device
        found = self.bench.restores.match("r", num_there, num_tokens, is_resumed=False)
        return found // BLOCK_TOKENS if found is not None else None

    def look(self) -> int | None:
        """The same, and what is done behind a step."""
        found = self.match()
        self.bench.promoter.advance()
        return found


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    io = IoThread("test-io")
    waiting = Waiting(Bench(io, tmp_path))
    yield waiting
    waiting.bench.restores.close()
    waiting.bench.store.check_invariants()
    waiting.bench.store.close()
    io.close()


def test_what_is_larger_than_host_memory_comes_to_the_device_in_pieces(waiting: Waiting) -> None:
    bench, num_looks = waiting.bench, 0
    while (num_loaded := waiting.look()) is None:
        assert bench.promoter.has_work() is bool(bench.copier.waiting), "the engine is not to sleep then"
        bench.copier.catch_up()
        bench.store.wait_for_reads(10)
        num_looks += 1
        assert num_looks < 100
    num = waiting.num_on_device
    assert num + num_loaded == len(waiting.keys) and bench.tiers.num_carried == num
    assert bench.on_device(waiting.keys[:num]) == [
        [content(key)] * SHAPE.num_layers for key in waiting.keys[:num]
    ]
    assert bench.pool.get_num_free_blocks() == NUM_DEVICE_BLOCKS - 1, "they are anybody's"


def test_a_piece_whose_place_a_step_has_taken_is_not_copied(waiting: Waiting) -> None:
    bench = waiting.bench
    waiting.match()
    bench.store.wait_for_reads(10)
    assert waiting.match() is None
    taken = bench.pool.get_new_blocks(bench.pool.get_num_free_blocks())
    bench.promoter.advance()
    assert waiting.num_on_device == 0 and not bench.copier.waiting
    bench.pool.free_blocks(taken)
    for _ in range(3):
        waiting.look()
        bench.copier.catch_up()
    assert waiting.num_on_device > 0


def test_a_request_whose_pieces_cannot_be_copied_goes_on_without(waiting: Waiting) -> None:
    bench = waiting.bench

    def fail(*args: object) -> None:
        raise RuntimeError("no such address")

    bench.copier.to_device = fail  # type: ignore[method-assign]
    num_looks = 0
    while (num_loaded := waiting.look()) is None:
        bench.store.wait_for_reads(10)
        num_looks += 1
        assert num_looks < 100
    assert num_loaded == NUM_HOST_BLOCKS, "what host memory can hold at once"
    assert bench.pool.get_num_free_blocks() == NUM_DEVICE_BLOCKS - 1


def test_what_a_device_copies_later_stays_in_host_memory_until_then(bench: Bench) -> None:
    keys = keys_of("a", 4)
    bench.save("a", keys)
    bench.expect("a", keys)
    while bench.promoter.has_work():
        bench.promoter.advance()
    bench.promoter.retract("a", is_expired=False)
    assert bench.save("b", keys_of("b", 8)) == 4, "the rest of host memory"
    bench.copier.catch_up()
    assert bench.on_device(keys) == [[content(key)] * SHAPE.num_layers for key in keys]
    assert bench.save("c", keys_of("c", 8)) == 8, "nothing is held any more"
    bench.store.check_invariants()
