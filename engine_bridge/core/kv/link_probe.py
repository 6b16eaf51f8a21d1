"""Measures the link between host memory and device while nobody wants it, where no profile tells its speed.

A pure state machine: the driver tells whether requests run and how long each copy took, and makes the copies that are due.
"""

from __future__ import annotations

import statistics

from engine_bridge.policy.costs.costs import Link

# Nobody has asked for anything for so long. Chosen: who talks to the server pauses for longer than that, and who has just started it for less.
IDLE_S = 2.0
# One copy there and back takes about so long at most; a request that comes meanwhile waits for no more than it. Chosen, as for promotions.
SLICE_S = 0.005
# Beyond so many bytes a copy only becomes longer. Chosen: larger than a processor's caches, where the speeds of copies differ.
MAX_BYTES = 8 << 20
# Copies of the largest size that fits; the median of them counts. Chosen.
NUM_SAMPLES = 5


class LinkProbe:
    """Copies of growing size, until `NUM_SAMPLES` of the largest that keeps to the slice have been timed."""

    def __init__(self, block_bytes: int, num_blocks: int, now: float) -> None:
        """num_blocks: that may take part."""
        self._block_bytes = block_bytes
        self._max_blocks = max(min(MAX_BYTES // block_bytes, num_blocks), 1)
        self._idle_since_s: float | None = now
        self._samples: list[float] = []  # bytes per second, of the size that is the next one's, too
        self.num_blocks = 1
        """Of the next copy."""
        self._is_over = False

    @property
    def link(self) -> Link | None:
        """What was found; None until then."""
        if len(self._samples) < NUM_SAMPLES:
            return None
        rate = statistics.median(self._samples)
        return Link(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)

    def looked(self, *, is_busy: bool, now: float) -> None:
        """Requests are there, or are not."""
        if is_busy:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now

    def wait_s(self, now: float) -> float | None:
        """How long until a copy is due, if nobody comes; None: there is nothing to wait for."""
        if self._is_over or self.link is not None or self._idle_since_s is None:
            return None
        return max(self._idle_since_s + IDLE_S - now, 0.0)

    def put_off(self, now: float) -> None:
        """It could not be made now: again after a while."""
        self._idle_since_s = now

    def give_up(self) -> None:
        self._is_over = True

    def copied(self, seconds: float) -> None:
        """`num_blocks` were copied to the host and back in so many seconds."""
        rate = 2 * self.num_blocks * self._block_bytes / max(seconds, 1e-9)
        size = int(min(2 * self.num_blocks, SLICE_S * rate / (2 * self._block_bytes), self._max_blocks))
        if size > self.num_blocks:
            self.num_blocks, self._samples = size, []
        else:
            self._samples.append(rate)
