"""Makes the copies of `engine_bridge/core/kv/link_probe.py` between two steps: a few blocks to host memory and back to where they were."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from engine_bridge.core.kv.link_probe import LinkProbe
from engine_bridge.driver.kv.kv_tiers import KvTiers
from kvtiers.keys import KEY_BYTES, BlockKey

log = logging.getLogger(__name__)

# Copies that run beside the host (on a GPU) are waited for no longer than that. Chosen: two hundred times what they should take.
TIMEOUT_S = 1.0


class LinkMeasuring:
    """Runs on the engine thread, and only while no request is there: what it copies back is what was there before.

    Args:
        tiers: their store is open. They are told what is found.
        num_device_blocks: of the engine's cache.
        count_requests: (running, waiting).
    """

    def __init__(
        self,
        tiers: KvTiers,
        num_device_blocks: int,
        count_requests: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert tiers.store is not None
        self._tiers, self._store = tiers, tiers.store
        self._count_requests, self._clock = count_requests, clock
        num_blocks = min(num_device_blocks, self._store.num_host_blocks)
        self._probe = LinkProbe(self._store.shape.block_bytes, num_blocks, clock())

    def has_work(self) -> bool:
        self._probe.looked(is_busy=sum(self._count_requests()) > 0, now=self._clock())
        return self.wait_s() == 0

    def wait_s(self) -> float | None:
        return self._probe.wait_s(self._clock())

    def advance(self) -> None:
        """One copy, if it is time."""
        if not self.has_work():
            return
        try:
            self._copy(self._probe.num_blocks)
        except Exception:
            log.exception("the link between host memory and device is not measured")
            self._probe.give_up()
        link = self._probe.link
        if link is not None:
            self._tiers.use_link(link)
            log.info("between host memory and device: %.1f GB/s, as measured", link.h2d_bytes_per_s / 1e9)

    def _copy(self, num_blocks: int) -> None:
        copier = self._tiers.copier
        num_slots = num_blocks * self._store.shape.num_layers
        if copier is None or self._store.pool.num_free < num_slots:
            self._probe.put_off(self._clock())  # memory is in better use
            return
        keys = [BlockKey(number.to_bytes(KEY_BYTES, "big")) for number in range(num_blocks)]
        save = self._store.begin_save("", keys)
        blocks = list(range(num_blocks))
        is_done = threading.Event()
        seconds = copier.out.seconds + copier.back.seconds
        try:
            for layer, slots in enumerate(zip(*save.slots, strict=True)):
                copier.to_host(layer, blocks[: len(slots)], slots)
                copier.to_device(layer, blocks[: len(slots)], slots)
            copier.end_step(is_done.set)
            if is_done.wait(TIMEOUT_S):
                self._probe.copied(
                    copier.out.seconds + copier.back.seconds - seconds
                )  # and not what the word that it is done takes
            else:
                self._probe.give_up()
        finally:
            self._store.abandon(save)
