"""What an expected request is worth: the seconds that it would wait if nothing were moved, and how likely it still comes."""

from __future__ import annotations

from collections.abc import Callable

from engine_bridge.core.kv.expected import ExpectedSession
from engine_bridge.core.kv.tier_store import TierStore
from engine_bridge.policy.kv.guesses import GuessFacts
from engine_bridge.policy.kv.still_comes import StillComes


class GuessWorth:
    """Learns after which time announced requests come, and measures what moving their KV takes.

    Args:
        host_bytes_per_s: returns the measured speed of copies from host memory to the device.
        is_divisible: whether a part of a prefix is of use.
    """

    def __init__(
        self, store: TierStore, host_bytes_per_s: Callable[[], float], *, is_divisible: bool
    ) -> None:
        self._store, self._host_bytes_per_s, self._is_divisible = store, host_bytes_per_s, is_divisible
        self._announced, self._timed = StillComes(), StillComes()  # without a time, and with one

    def came(self, guess: ExpectedSession, now: float) -> None:
        """Learn from a request that has come."""
        self._waits_of(guess).came(guess.waited_s(now))

    def facts(self, guess: ExpectedSession, now: float) -> GuessFacts:
        """Return the facts that rank a guess. It is read from where it lay at first: a guess that is half done is worth no less."""
        advisory, (copy_s, read_s) = guess.advisory, self.seconds_of(guess.limit)
        prior = advisory.probability
        still = self._waits_of(guess).probability(prior, guess.waited_s(now))
        return GuessFacts(
            name=advisory.advisory_id,
            tenant=advisory.tenant,
            num_blocks=guess.limit,
            probability=prior,
            left=1.0 if advisory.is_pin or not prior else still / prior,
            priority=guess.priority,
            is_ordered=advisory.is_ordered,
            is_divisible=self._is_divisible,
            is_pin=advisory.is_pin,
            arrival_s=guess.arrival_s,
            issued_s=guess.issued_s,
            saved_s=copy_s + read_s * guess.is_far,
            copy_s=copy_s,
        )

    def seconds_of(self, num_blocks: int) -> tuple[float, float]:
        """Return the seconds to copy this many blocks to the device, and the seconds to read them from disk."""
        num_bytes = num_blocks * self._store.shape.block_bytes
        return num_bytes / self._host_bytes_per_s(), num_bytes / self._store.disk_bytes_per_s()

    def _waits_of(self, guess: ExpectedSession) -> StillComes:
        return self._announced if guess.arrival_s is None else self._timed
