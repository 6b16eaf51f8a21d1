"""Makes the copies of `engine_bridge/core/kv/link_probe.py` between two steps: a few blocks to host memory and back to the same device blocks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from engine_bridge.core.kv.link_probe import LinkProbe
from engine_bridge.driver.kv.kv_tiers import KvTiers
from kvtiers.keys import KEY_BYTES, BlockKey

log = logging.getLogger(__name__)


class LinkMeasuring:
    """The measurement of the link between host memory and device, on the engine thread and only while there are no requests.

    It writes the same bytes back to the device blocks that it has read.

    Args:
        tiers: their store is open. They are told the result.
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
        """Return whether a copy is due now."""
        self._probe.looked(is_busy=sum(self._count_requests()) > 0, now=self._clock())
        return self.wait_s() == 0

    def wait_s(self) -> float | None:
        """Return the seconds until the next copy is due; None when there is none."""
        return self._probe.wait_s(self._clock())

    def advance(self) -> None:
        """Make one copy, if it is due."""
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
        copier, held = self._tiers.copier, self._tiers.held
        num_slots = num_blocks * self._store.shape.num_layers
        if copier is None or held is None or self._store.pool.num_free < num_slots:
            self._probe.put_off(self._clock())  # memory is in better use
            return
        keys = [BlockKey(number.to_bytes(KEY_BYTES, "big")) for number in range(num_blocks)]
        save = self._store.begin_save("", keys)
        blocks = list(range(num_blocks))
        end = held.hold(blocks)
        seconds = copier.out.seconds + copier.back.seconds
        try:
            for layer, slots in enumerate(zip(*save.slots, strict=True)):
                copier.to_host(layer, blocks[: len(slots)], slots)
                copier.to_device(layer, blocks[: len(slots)], slots)
            copier.end_step(functools.partial(end, True), functools.partial(end, False))
            self._tiers.finish_copies()
            if held.num_open:
                self._probe.give_up()
            else:  # without the time that the notice of its end takes
                self._probe.copied(copier.out.seconds + copier.back.seconds - seconds)
        except BaseException:
            end(False)
            raise
        finally:
            self._store.abandon(save)
