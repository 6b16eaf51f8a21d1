"""The link between host memory and device is measured while nobody wants it, and leaves everything as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from engine_bridge.core.kv.link_probe import IDLE_S
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.driver.kv.link_measuring import LinkMeasuring
from engine_bridge.driver.memory.block_copy import CpuCopier
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import ByValue
from kvtiers.store import KvStore

NUM_BLOCKS, NUM_LAYERS, LAYER_BYTES = 16, 2, 4096


class Bench:
    def __init__(self, io: IoThread, host_bytes: int) -> None:
        self.tiers = KvTiers(TiersConfig(host_bytes=host_bytes))
        self.store = KvStore(BlockShape(NUM_LAYERS, LAYER_BYTES), host_bytes, io, None, ByValue())
        self.tiers.store = self.store
        self.device = [
            torch.randint(0, 255, (NUM_BLOCKS, LAYER_BYTES), dtype=torch.uint8) for _ in range(NUM_LAYERS)
        ]
        self.tiers.copier = CpuCopier(self.device, self.store.pool.region)
        self.now, self.num_requests = 0.0, 0
        self.measuring = LinkMeasuring(
            self.tiers, NUM_BLOCKS, lambda: (self.num_requests, 0), lambda: self.now
        )

    def run(self) -> int:
        num_copies = 0
        while self.measuring.has_work():
            self.measuring.advance()
            num_copies += 1
            assert num_copies < 50
        return num_copies


@pytest.fixture
def io() -> Iterator[IoThread]:
    io = IoThread()
    yield io
    io.close()


def test_an_idle_engine_learns_its_link_and_keeps_its_kv(io: IoThread) -> None:
    bench = Bench(io, 1 << 20)
    before = [layer.clone() for layer in bench.device]
    assumed = bench.tiers.host_bytes_per_s()
    assert bench.run() == 0
    bench.now = IDLE_S
    assert bench.run() > 1
    assert bench.tiers.host_bytes_per_s() != assumed
    assert bench.measuring.wait_s() is None
    assert all(torch.equal(*layers) for layers in zip(before, bench.device, strict=True))
    assert bench.store.stats().host.bytes == 0
    bench.store.check_invariants()


class Counted(CpuCopier):
    """Says of each copy that it took a second for each 10 GB."""

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        super().to_host(layer, blocks, slots)
        for copied in (self.out, self.back):
            copied.seconds = copied.num_bytes / 10e9

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        super().to_device(layer, blocks, slots)
        for copied in (self.out, self.back):
            copied.seconds = copied.num_bytes / 10e9

    def end_step(self, then: Callable[[], None]) -> None:
        threading.Thread(target=then).start()


def test_what_counts_is_the_copying_and_not_the_word_that_it_is_done(io: IoThread) -> None:
    bench = Bench(io, 1 << 20)
    bench.tiers.copier = Counted(bench.device, bench.store.pool.region)
    bench.now = IDLE_S
    assert bench.run() > 1
    assert bench.tiers.link is not None
    assert bench.tiers.link.h2d_bytes_per_s == pytest.approx(10e9)


def test_while_requests_are_there_nothing_is_measured(io: IoThread) -> None:
    bench = Bench(io, 1 << 20)
    bench.now, bench.num_requests = IDLE_S, 1
    assert bench.run() == 0
    bench.measuring.advance()
    bench.num_requests = 0
    assert bench.run() == 0
    assert bench.measuring.wait_s() == IDLE_S


def test_where_host_memory_is_full_of_kv_it_waits_for_another_time(io: IoThread) -> None:
    bench = Bench(io, 2 * NUM_LAYERS * LAYER_BYTES)
    save = bench.store.begin_save("s", [BlockKey(bytes([number])) for number in range(2)])
    bench.store.commit(save)
    bench.now = IDLE_S
    assert bench.run() == 1
    assert bench.store.stats().host.num_evicted == 0
    assert bench.measuring.wait_s() == IDLE_S


def test_a_copy_that_fails_ends_the_measuring_and_nothing_else(
    io: IoThread, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(io, 1 << 20)
    bench.tiers.copier = CpuCopier(bench.device[:1], bench.store.pool.region)  # the second layer is not there
    bench.now = IDLE_S
    assert bench.run() == 1
    assert "is not measured" in caplog.text
    assert bench.measuring.wait_s() is None
    assert bench.store.stats().host.bytes == 0
