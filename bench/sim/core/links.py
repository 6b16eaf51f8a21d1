"""A link that several transfers share: each gets an equal part of the bandwidth while it lasts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.core.clock import Clock, Event


@dataclass(slots=True, eq=False)
class Transfer:
    """One of those that share the link. ends_at_bytes: on the scale of `SharedLink._given_bytes`."""

    num_bytes: int
    done: Callable[[float], None] | None
    ends_at_bytes: float


class SharedLink:
    """PCIe in one direction, or a disk: `bytes_per_s` for all together, after `setup_s` for each.

    Keeps one count: the bytes that a transfer which had been there from the start would have been given. Each transfer ends when
    that count has risen by its size, so only the next end has to be looked at, however many share.
    """

    def __init__(self, clock: Clock, bytes_per_s: float, setup_s: float = 0.0) -> None:
        if bytes_per_s <= 0 or setup_s < 0:
            raise ValueError("a link has a bandwidth, and setting up takes no negative time")
        self.bytes_per_s = bytes_per_s
        self.setup_s = setup_s
        self.bytes_moved = 0
        self.busy_s = 0.0
        self._clock = clock
        self._given_bytes = 0.0
        self._as_of_s = 0.0
        self._heap: list[tuple[float, int, Transfer]] = []
        self._ids = itertools.count()
        self._num_setting_up = 0
        self._next: Event | None = None

    @property
    def num_transfers(self) -> int:
        """Under way, those that are being set up with them."""
        return len(self._heap) + self._num_setting_up

    def alone_s(self, num_bytes: int) -> float:
        """What a transfer takes that has the link to itself."""
        return self.setup_s + num_bytes / self.bytes_per_s

    def transfer(self, num_bytes: int, done: Callable[[float], None], *, is_set_up: bool = False) -> None:
        """Begin one now; `done` is called with the time at which it ends. is_set_up: it goes on where another has just ended."""
        if self.setup_s == 0 or is_set_up:
            self._start(num_bytes, done, self._clock.now)
            return
        self._num_setting_up += 1
        self._clock.at(self._clock.now + self.setup_s, lambda now: self._set_up(num_bytes, done, now))

    def _set_up(self, num_bytes: int, done: Callable[[float], None], now: float) -> None:
        self._num_setting_up -= 1
        self._start(num_bytes, done, now)

    def _start(self, num_bytes: int, done: Callable[[float], None], now: float) -> None:
        self._advance(now)
        transfer = Transfer(num_bytes, done, self._given_bytes + num_bytes)
        heapq.heappush(self._heap, (transfer.ends_at_bytes, next(self._ids), transfer))
        self._plan(now)

    def _advance(self, now: float) -> None:
        if self._heap:
            self._given_bytes += (now - self._as_of_s) * self.bytes_per_s / len(self._heap)
            self.busy_s += now - self._as_of_s
        self._as_of_s = now

    def _plan(self, now: float) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._heap:
            left_bytes = max(self._heap[0][0] - self._given_bytes, 0.0)
            self._next = self._clock.at(now + left_bytes * len(self._heap) / self.bytes_per_s, self._end)

    def _end(self, now: float) -> None:
        self._next = None
        self._advance(now)
        # This one ends now by construction, whatever rounding says.
        ends_at_bytes, _, transfer = heapq.heappop(self._heap)
        self._given_bytes = max(self._given_bytes, ends_at_bytes)
        self.bytes_moved += transfer.num_bytes
        self._plan(now)
        if transfer.done is not None:
            transfer.done(now)
