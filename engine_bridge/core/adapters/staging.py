"""Which adapters are to be brought nearer: adapters that requests wait for, that may be asked for, or that are about to be."""

from __future__ import annotations

from engine_bridge.core.adapters.adapter_table import Version
from engine_bridge.policy.adapters.arrivals import Arrivals

# How much may be read ahead of its request, as a share of host memory and beside it, and how many seconds it is kept for a request that does not
# come. Chosen.
AHEAD_SHARE, AHEAD_FOR_S = 0.125, 10.0
# Seconds between two looks for adapters whose histogram says that a request is near, and the least number of seconds by which they are loaded
# ahead. Chosen.
LOOK_EVERY_S, MIN_LEAD_S = 1.0, 1.0
# Adapters are loaded whose request will have come by then with at least this probability. Chosen.
MIN_PROBABILITY = 0.5


class StagingWishes:
    """Adapters that are to be staged: first the ones that requests wait for, then guesses, both in the order in which they were first wanted."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Size of the wanted adapters that are not in host memory."""
        self._is_guess: dict[int, bool] = {}
        self._bytes: dict[int, int] = {}
        self._is_stuck = False

    def want(self, version: Version) -> None:
        """Note that a request waits for this version."""
        self._is_guess[version.id] = False
        self._note(version)

    def guess(self, version: Version) -> None:
        """Note that a request for this version may come."""
        self._is_guess.setdefault(version.id, True)
        self._note(version)

    def arrived(self, adapter_id: int) -> None:
        """Note that the adapter is in host memory."""
        self.num_bytes -= self._bytes.pop(adapter_id, 0)
        self._is_stuck = False

    def left_host(self, version: Version) -> None:
        """Note that the version left host memory, perhaps before its arrival there was noticed."""
        if version.id in self._is_guess:
            self._note(version)

    def drop(self, adapter_id: int) -> None:
        """Stop staging this adapter. An unknown id changes nothing."""
        self._is_guess.pop(adapter_id, None)
        self.num_bytes -= self._bytes.pop(adapter_id, 0)

    def _note(self, version: Version) -> None:
        self._is_stuck = False
        if version.host_bytes is None and version.id not in self._bytes:
            self._bytes[version.id] = version.num_bytes
            self.num_bytes += version.num_bytes

    def something_moved(self) -> None:
        """Note that adapters that could not be staged perhaps can be now."""
        self._is_stuck = False

    def begin_turn(self) -> list[tuple[int, bool]]:
        """Return (id, whether it is a guess) for every wanted adapter, to be tried.

        An adapter that cannot be staged now cannot be staged before `something_moved`.
        """
        self._is_stuck = True
        return sorted(self._is_guess.items(), key=lambda item: item[1])

    @property
    def is_worth_a_turn(self) -> bool:
        """Whether another turn could stage something: adapters are wanted, and something has changed since the last turn."""
        return bool(self._is_guess) and not self._is_stuck

    @property
    def ids(self) -> list[int]:
        """The ids of all wanted adapters."""
        return list(self._is_guess)

    @property
    def num_waited_for(self) -> int:
        """The number of adapters that requests wait for. May be read from any thread."""
        return sum(not is_guess for is_guess in list(self._is_guess.values()))


class ReadAhead:
    """Adapters that are read while their request is still on its way here: at least one, however large, and beyond that `max_bytes`."""

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._begun: dict[int, tuple[float, int]] = {}

    def begin(self, adapter_id: int, num_bytes: int, now: float) -> bool:
        """Return whether to read the adapter now: not if it is being read already, or if too many bytes are."""
        num_ahead_bytes = sum(size for _, size in self._begun.values())
        if adapter_id in self._begun or (self._begun and num_ahead_bytes + num_bytes > self._max_bytes):
            return False
        self._begun[adapter_id] = now, num_bytes
        return True

    def take(self, adapter_id: int) -> bool:
        """Note that the adapter's request is here, and return whether the adapter was read ahead."""
        return self._begun.pop(adapter_id, None) is not None

    def expire(self, now: float) -> list[int]:
        """Forget the adapters whose requests did not come within `AHEAD_FOR_S`, and return their ids."""
        old = [adapter_id for adapter_id, (at_s, _) in self._begun.items() if now - at_s > AHEAD_FOR_S]
        for adapter_id in old:
            del self._begun[adapter_id]
        return old


class NoPrefetch:
    """Loads no adapter before it is asked for. The base of what foretells which adapters will be asked for."""

    def arrived(self, adapter_id: int, now: float) -> None:
        """Note that a request for the adapter came."""

    def due(self, now: float) -> list[int]:
        """Return the adapters to load now."""
        return []

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until it is worth asking again; None: not before an event."""
        return None

    def forgotten(self, adapter_id: int) -> None:
        """Note that the adapter was unloaded for good."""


class HistoryPrefetch(NoPrefetch):
    """Predicts requests from the times between an adapter's last requests. Source: Serverless in the Wild §4.2, named by Chameleon §4.1."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._look_at_s: float | None = None

    def arrived(self, adapter_id: int, now: float) -> None:
        """Note the time of a request for the adapter."""
        self._arrivals.arrived(adapter_id, now)

    def due(self, now: float) -> list[int]:
        """Return the adapters to load now: those whose request probably comes soon. At most one look every `LOOK_EVERY_S`."""
        if self._look_at_s is not None and now < self._look_at_s:
            return []
        self._look_at_s = now + LOOK_EVERY_S
        found = self._arrivals.due(now, MIN_LEAD_S + LOOK_EVERY_S)
        return [adapter_id for adapter_id, probability in found if probability >= MIN_PROBABILITY]

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next look; None before the first one."""
        return None if self._look_at_s is None else max(self._look_at_s - now, 0.0)

    def forgotten(self, adapter_id: int) -> None:
        """Forget the adapter's history."""
        self._arrivals.forget(adapter_id)
