"""Adapters kept in free KV blocks of the device: carries out what `engine_bridge.core.adapters.adapter_copies` decides. All on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine_bridge.core.adapters.residency import AdapterPlaces
from engine_bridge.driver.adapters.blocks import AdapterBlocks, NoBlocks
from engine_bridge.driver.adapters.weights import AdapterWeights
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts


class DeviceCopies:
    """The copies of unused adapters on the device, where KV leaves room for them.

    Args:
        core: decides which adapters are copied.
        prefix_facts: returns the facts of the oldest cached prefix blocks, given their number.
    """

    def __init__(
        self,
        core: AdapterPlaces,
        device: torch.device,
        prefix_facts: Callable[[int], PrefixFacts],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks: AdapterBlocks = NoBlocks()
        self._core, self._device = core, device
        self._prefix_facts = prefix_facts
        self._clock = clock
        self._writing: set[int] = set()
        self._num_written_bytes = 0

    def counts(self) -> dict[str, int]:
        """Return the bytes written so far, for `AdapterStats.counts`."""
        return {"cache_bytes": self._num_written_bytes}

    # -- moves -------------------------------------------------------------------------------------------------------

    def begin(self, adapter_id: int, weights: AdapterWeights, *, is_ahead: bool) -> bool:
        """Begin to write an adapter. False if there is no memory that it may have."""
        if not self.blocks.put(adapter_id, weights):
            return False
        self._core.copies.begun(adapter_id, is_ahead)
        self._writing.add(adapter_id)
        return True

    def write(self, is_busy: bool) -> None:
        """Continue the copies that were begun, for as long as is allowed now."""
        if not self.blocks.is_writing():
            return
        slice_s = self._core.copies.write_s(is_busy)
        now, started_s = self._clock(), time.perf_counter()
        rate = self._core.worth.copy_rate
        num_bytes = self.blocks.write(int(slice_s * rate.at(now)))
        rate.note(num_bytes, time.perf_counter() - started_s, now)
        self._num_written_bytes += num_bytes
        for adapter_id in [i for i in self._writing if self.blocks.holds(i)]:
            self._writing.discard(adapter_id)
            self._core.copies.done(adapter_id)

    def drop(self, adapter_id: int) -> None:
        """Give up an adapter's copy, complete or not."""
        self._writing.discard(adapter_id)
        self.blocks.drop(adapter_id)

    def read(self, adapter_id: int) -> AdapterWeights:
        """Copy a complete adapter out of its blocks, within the device."""
        entry = self.blocks.entry(adapter_id)
        weights = entry.read(torch.empty(entry.size_bytes, dtype=torch.uint8, device=self._device))
        assert weights is not None
        self.blocks.used(adapter_id)
        return weights

    def touch(self, adapter_id: int) -> None:
        """Note that an adapter was used: its blocks, if it has any, are evicted last."""
        if self.blocks.holds(adapter_id):
            self.blocks.used(adapter_id)

    # -- what the blocks ask -----------------------------------------------------------------------------------------

    def lost(self, adapter_id: int) -> None:
        """Note that KV took a cached adapter's blocks."""
        self._writing.discard(adapter_id)
        self._core.copies.lost(adapter_id)

    def may_displace(self, adapter_id: int, num_blocks: int) -> bool:
        """Return whether a cached adapter may take the place of the `num_blocks` oldest prefix blocks (E3)."""
        return self._core.copies.may_displace(adapter_id, self._prefix_facts(num_blocks), self._clock())

    def less_valuable_than_blocks(self, num_blocks: int) -> int | None:
        """Return a cached adapter worth no more, by the byte, than the `num_blocks` oldest prefix blocks (E3). Its blocks are then the caller's."""
        return self._core.copies.take_less_valuable_than_blocks(self._prefix_facts(num_blocks), self._clock())

    def first_to_go(self) -> int | None:
        """Return the cached adapter of least worth whose blocks no request needs. Its blocks are then the caller's."""
        return self._core.copies.take_first_to_go(self._clock())
