"""Steps and copies of an emulated device that vary as a real engine's do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.sim.core.clock import Clock
from bench.sim.core.hardware import Gpu
from bench.sim.core.links import SharedLink
from engine_bridge.policy.costs.costs import Copied


class Replay:
    """What equal steps or copies of a real engine took over their median, one after the other, from somewhere on and round again.

    In their order, since what disturbs one step of a machine mostly disturbs the next one, too.
    """

    def __init__(self, ratios: Sequence[float], seed: object) -> None:
        self._ratios = ratios
        self._at = random.Random(f"noise {seed}").randrange(len(ratios))

    def __call__(self) -> float:
        self._at = (self._at + 1) % len(self._ratios)
        return self.last

    @property
    def last(self) -> float:
        """What the last one took over what it would have taken without."""
        return self._ratios[self._at]


@dataclass(frozen=True, slots=True)
class DeviceNoise:
    """Of one device. out, back: of copies to host memory and to the device."""

    step: Replay
    out: Replay
    back: Replay


class NoisyLink(SharedLink):
    """A link whose copies take longer or shorter by `noise`; one that goes on where another has just ended as long as that one.

    copies_each: of a layer, as which a transfer counts. copied: all of them so far.
    """

    def __init__(
        self, clock: Clock, bytes_per_s: float, setup_s: float, noise: Replay, copies_each: int = 1
    ) -> None:
        super().__init__(clock, bytes_per_s, setup_s)
        self.copied = Copied()
        self._noise, self._copies_each = noise, copies_each
        self._longer = 1.0

    def transfer(self, num_bytes: int, done: Callable[[float], None], *, is_set_up: bool = False) -> None:
        if not is_set_up:
            self._longer = self._noise()
        began_s = self._clock.now

        def ended(now: float) -> None:
            self.copied.num_bytes += num_bytes
            self.copied.num_copies += self._copies_each
            self.copied.seconds += now - began_s
            done(now)

        super().transfer(round(num_bytes * self._longer), ended, is_set_up=is_set_up)


def link_of(clock: Clock, gpu: Gpu, noise: DeviceNoise | None) -> SharedLink:
    """From host memory to the device."""
    speed = gpu.achieved_link_bytes_per_s, gpu.load_setup_s
    return SharedLink(clock, *speed) if noise is None else NoisyLink(clock, *speed, noise.back)
