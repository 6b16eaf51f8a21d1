from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from engine_bridge.core.kv.link_probe import IDLE_S
from engine_bridge.driver.kv.link_measuring import LinkMeasuring
from engine_bridge.driver.memory.block_copy import CpuCopier
from kvtiers.keys import BlockKey

from .test_promoter import NUM_DEVICE_BLOCKS, Bench


class Measured(Bench):
    def __init__(self, num_host_blocks: int = 64) -> None:
        super().__init__(num_host_blocks=num_host_blocks)
        self.use(CpuCopier(self.device, self.store.pool.region))
        self.num_requests = 0
        asks = (lambda: (self.num_requests, 0), lambda: self.now)
        self.measuring = LinkMeasuring(self.tiers, NUM_DEVICE_BLOCKS, *asks)

    def use(self, copier: CpuCopier) -> None:
        self.tiers.copier = copier

    def run(self) -> int:
        """Copy while there is work; returns the number of copies."""
        num_copies = 0
        while self.measuring.has_work():
            self.measuring.advance()
            num_copies += 1
            assert num_copies < 50
        return num_copies


@pytest.fixture
def bench() -> Iterator[Measured]:
    with closing(Measured()) as bench:
        yield bench


def test_an_idle_engine_learns_its_link_and_keeps_its_kv(bench: Measured) -> None:
    for layer in bench.device:
        layer.random_(0, 255)
    before = [layer.clone() for layer in bench.device]
    assumed = bench.tiers.host_bytes_per_s()
    assert bench.run() == 0
    bench.now = IDLE_S
    assert bench.run() > 1
    assert bench.tiers.host_bytes_per_s() != assumed
    assert bench.measuring.wait_s() is None
    assert all(torch.equal(*layers) for layers in zip(before, bench.device, strict=True))
    assert bench.store.stats().host.bytes == 0


def test_it_waits_for_another_time_while_requests_are_there_or_host_memory_is_full() -> None:
    with closing(Measured(num_host_blocks=2)) as bench:
        bench.now, bench.num_requests = IDLE_S, 1
        assert bench.run() == 0
        bench.measuring.advance()
        bench.num_requests = 0
        assert bench.run() == 0 and bench.measuring.wait_s() == IDLE_S
        bench.store.commit(bench.store.begin_save("s", [BlockKey(bytes([number])) for number in range(2)]))
        bench.now += IDLE_S
        assert bench.run() == 1
        assert bench.store.stats().host.num_evicted == 0 and bench.measuring.wait_s() == IDLE_S
