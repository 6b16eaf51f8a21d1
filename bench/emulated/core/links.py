"""Links that several transfers share, each with an equal part of the bandwidth while it lasts, and the noise of a real device's steps and copies."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.emulated.core.clock import Clock, Event
from bench.emulated.core.hardware import Gpu
from engine_bridge.policy.costs.costs import Copied


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
        self._clock = clock
        self._given_bytes = 0.0
        self._as_of_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[float], None]]] = []
        """Of each transfer: the count of bytes at which it ends, its number, its bytes, and what is called then."""
        self._ids = itertools.count()
        self._next: Event | None = None

    def alone_s(self, num_bytes: int) -> float:
        """Return the seconds of a transfer that has the link to itself."""
        return self.setup_s + num_bytes / self.bytes_per_s

    def transfer(self, num_bytes: int, done: Callable[[float], None], *, is_set_up: bool = False) -> None:
        """Begin a transfer now. done: called with the time of its end. is_set_up: it continues a transfer that just ended, without a new set-up."""
        if self.setup_s == 0 or is_set_up:
            self._start(num_bytes, done, self._clock.now)
            return
        self._clock.at(self._clock.now + self.setup_s, lambda now: self._start(num_bytes, done, now))

    def _start(self, num_bytes: int, done: Callable[[float], None], now: float) -> None:
        self._advance(now)
        heapq.heappush(self._heap, (self._given_bytes + num_bytes, next(self._ids), num_bytes, done))
        self._plan(now)

    def _advance(self, now: float) -> None:
        if self._heap:
            self._given_bytes += (now - self._as_of_s) * self.bytes_per_s / len(self._heap)
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
        ends_at_bytes, _, num_bytes, done = heapq.heappop(self._heap)
        self._given_bytes = max(self._given_bytes, ends_at_bytes)
        self.bytes_moved += num_bytes
        self._plan(now)
        done(now)


class Replay:
    """Ratios of equal steps' or copies' times to their median, as a real engine had them, from a random place on and round again.

    They keep their order, since what disturbs one step of a machine mostly disturbs the next one, too.
    """

    def __init__(self, ratios: Sequence[float], seed: object) -> None:
        self._ratios = ratios
        self._at = random.Random(f"noise {seed}").randrange(len(ratios))

    def __call__(self) -> float:
        """Return the speed of this moment."""
        self._at = (self._at + 1) % len(self._ratios)
        return self.last

    @property
    def last(self) -> float:
        """The ratio that was given last."""
        return self._ratios[self._at]


@dataclass(frozen=True, slots=True)
class DeviceNoise:
    """The noise of one device. out, back: of copies to host memory and to the device."""

    step: Replay
    out: Replay
    back: Replay


class NoisyLink(SharedLink):
    """A link whose copies take longer or shorter by `noise`; a copy that continues another one has the same ratio.

    copies_each: copies of a layer that one transfer counts as. copied: all of them since the start.
    """

    def __init__(
        self, clock: Clock, bytes_per_s: float, setup_s: float, noise: Replay, copies_each: int = 1
    ) -> None:
        super().__init__(clock, bytes_per_s, setup_s)
        self.copied = Copied()
        self._noise, self._copies_each = noise, copies_each
        self._longer = 1.0

    def transfer(self, num_bytes: int, done: Callable[[float], None], *, is_set_up: bool = False) -> None:
        """Begin a transfer now, as `SharedLink` does."""
        if not is_set_up:
            self._longer = self._noise()
        began_s = self._clock.now

        def ended(now: float) -> None:
            """Count the copy, and say that it has ended."""
            self.copied.num_bytes += num_bytes
            self.copied.num_copies += self._copies_each
            self.copied.seconds += now - began_s
            done(now)

        super().transfer(round(num_bytes * self._longer), ended, is_set_up=is_set_up)


class InTurn:
    """Copies that a device makes one after another, as it does those of one stream."""

    def __init__(self, link: SharedLink) -> None:
        self._link = link
        self._waiting: deque[tuple[int, Callable[[float], None]]] = deque()

    def transfer(self, num_bytes: int, done: Callable[[float], None]) -> None:
        """Begin a transfer when those before it have ended. done: called at its end with the time."""
        self._waiting.append((num_bytes, done))
        if len(self._waiting) == 1:
            self._begin()

    def _begin(self) -> None:
        num_bytes, done = self._waiting[0]

        def ended(now: float) -> None:
            """Begin the next one."""
            self._waiting.popleft()
            if self._waiting:
                self._begin()
            done(now)

        self._link.transfer(num_bytes, ended)


def link_of(clock: Clock, gpu: Gpu, noise: DeviceNoise | None) -> SharedLink:
    """Return the link from host memory to the device."""
    speed = gpu.achieved_link_bytes_per_s, gpu.load_setup_s
    return SharedLink(clock, *speed) if noise is None else NoisyLink(clock, *speed, noise.back)
