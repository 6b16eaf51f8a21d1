"""Measures the link between host memory and device while no request uses it, where no profile states its speed.

A pure state machine: the driver tells whether requests run and how long each copy took, and makes the copies that are due.
"""

from __future__ import annotations

import statistics

from engine_bridge.policy.costs.costs import Link

# Seconds without any request before a copy is made. Chosen: a user pauses for longer than this between two messages, and sends the first one sooner
# than this after starting the server.
IDLE_S = 2.0
# One copy there and back takes at most about this many seconds; a request that comes meanwhile waits for no more than it. Chosen, as for
# promotions.
SLICE_S = 0.005
# Beyond this many bytes a copy only becomes longer. Chosen: larger than a processor's caches, where the speeds of copies differ.
MAX_BYTES = 8 << 20
# Number of copies of the largest size that fits; their median counts. Chosen.
NUM_SAMPLES = 5


class LinkProbe:
    """Copies of growing size, until `NUM_SAMPLES` of the largest that keeps to the slice have been timed."""

    def __init__(self, block_bytes: int, num_blocks: int, now: float) -> None:
        """Begin idle at `now`. num_blocks: number of blocks that may take part."""
        self._block_bytes = block_bytes
        self._max_blocks = max(min(MAX_BYTES // block_bytes, num_blocks), 1)
        self._idle_since_s: float | None = now
        self._samples: list[float] = []  # bytes per second, for copies of `num_blocks`
        self.num_blocks = 1
        """Size of the next copy."""
        self._is_over = False

    @property
    def link(self) -> Link | None:
        """The measured link; None until it is measured."""
        if len(self._samples) < NUM_SAMPLES:
            return None
        rate = statistics.median(self._samples)
        return Link(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)

    def looked(self, *, is_busy: bool, now: float) -> None:
        """Note whether requests are in the engine."""
        if is_busy:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a copy is due if no request comes; None: no copy will be due."""
        if self._is_over or self.link is not None or self._idle_since_s is None:
            return None
        return max(self._idle_since_s + IDLE_S - now, 0.0)

    def put_off(self, now: float) -> None:
        """Note that the copy could not be made now: it is tried again after `IDLE_S`."""
        self._idle_since_s = now

    def give_up(self) -> None:
        """Make no further copies."""
        self._is_over = True

    def copied(self, seconds: float) -> None:
        """Note that `num_blocks` were copied to the host and back in this many seconds."""
        rate = 2 * self.num_blocks * self._block_bytes / max(seconds, 1e-9)
        size = int(min(2 * self.num_blocks, SLICE_S * rate / (2 * self._block_bytes), self._max_blocks))
        if size > self.num_blocks:
            self.num_blocks, self._samples = size, []
        else:
            self._samples.append(rate)
