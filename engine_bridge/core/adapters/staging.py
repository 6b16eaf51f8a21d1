"""Which adapters are to be brought nearer: those that requests wait for, those that may be asked for, those about to be."""

from __future__ import annotations

from typing import Protocol

from engine_bridge.core.adapters.adapter_table import Version
from engine_bridge.policy.adapters.arrivals import Arrivals

# What may be read ahead of its request, as a share of host memory and beside it, and how long it is kept for one that does not come. Chosen.
AHEAD_SHARE, AHEAD_FOR_S = 0.125, 10.0
# Adapters whose histogram says that a request is near are looked for this often, and loaded this long ahead at least. Chosen.
LOOK_EVERY_S, MIN_LEAD_S = 1.0, 1.0
# Adapters whose request is as likely to come by then as not are loaded. Chosen.
MIN_PROBABILITY = 0.5


class StagingWishes:
    """Adapters that are to be staged: those of requests before guesses, both in the order in which they were first wanted."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of those that are not in host memory."""
        self._is_guess: dict[int, bool] = {}
        self._bytes: dict[int, int] = {}
        self._is_stuck = False

    def want(self, version: Version) -> None:
        """A request waits for it."""
        self._is_guess[version.id] = False
        self._note(version)

    def guess(self, version: Version) -> None:
        """A request for it may come."""
        self._is_guess.setdefault(version.id, True)
        self._note(version)

    def arrived(self, adapter_id: int) -> None:
        """In host memory."""
        self.num_bytes -= self._bytes.pop(adapter_id, 0)
        self._is_stuck = False

    def left_host(self, version: Version) -> None:
        """It made room, perhaps before anybody saw that it had arrived."""
        if version.id in self._is_guess:
            self._note(version)

    def drop(self, adapter_id: int) -> None:
        self._is_guess.pop(adapter_id, None)
        self.num_bytes -= self._bytes.pop(adapter_id, 0)

    def _note(self, version: Version) -> None:
        self._is_stuck = False
        if version.host_bytes is None and version.id not in self._bytes:
            self._bytes[version.id] = version.num_bytes
            self.num_bytes += version.num_bytes

    def something_moved(self) -> None:
        """Those that could not be staged perhaps can be now."""
        self._is_stuck = False

    def begin_turn(self) -> list[tuple[int, bool]]:
        """(id, whether as a guess) of all, to be tried. What cannot be staged now cannot be until `something_moved`."""
        self._is_stuck = True
        return sorted(self._is_guess.items(), key=lambda item: item[1])

    @property
    def is_worth_a_turn(self) -> bool:
        """Whether asking again could bring something: a wish is waiting and the last one found room."""
        return bool(self._is_guess) and not self._is_stuck

    @property
    def ids(self) -> list[int]:
        return list(self._is_guess)

    @property
    def num_waited_for(self) -> int:
        """From any thread."""
        return sum(not is_guess for is_guess in list(self._is_guess.values()))


class ReadAhead:
    """Adapters that are read while their request is still on its way here. One at least, however large, beyond that `max_bytes`."""

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._begun: dict[int, tuple[float, int]] = {}

    def begin(self, adapter_id: int, num_bytes: int, now: float) -> bool:
        """Whether it is to be read; not if it is being read already, or too much is."""
        num_ahead_bytes = sum(size for _, size in self._begun.values())
        if adapter_id in self._begun or (self._begun and num_ahead_bytes + num_bytes > self._max_bytes):
            return False
        self._begun[adapter_id] = now, num_bytes
        return True

    def take(self, adapter_id: int) -> bool:
        """Its request is here. Whether it was read ahead."""
        return self._begun.pop(adapter_id, None) is not None

    def expire(self, now: float) -> list[int]:
        """Those whose requests did not come; they are forgotten."""
        old = [adapter_id for adapter_id, (at_s, _) in self._begun.items() if now - at_s > AHEAD_FOR_S]
        for adapter_id in old:
            del self._begun[adapter_id]
        return old


class Prefetch(Protocol):
    """Foretells which adapters will be asked for."""

    def arrived(self, adapter_id: int, now: float) -> None:
        """A request for it came."""
        ...

    def due(self, now: float) -> list[int]:
        """Adapters to load now."""
        ...

    def wait_s(self, now: float) -> float | None:
        """How long until it is worth asking again; None: until something comes."""
        ...

    def forgotten(self, adapter_id: int) -> None:
        """Unloaded for good."""
        ...


class NoPrefetch:
    """Nothing is loaded before it is asked for."""

    def arrived(self, adapter_id: int, now: float) -> None: ...

    def due(self, now: float) -> list[int]:
        return []

    def wait_s(self, now: float) -> float | None:
        return None

    def forgotten(self, adapter_id: int) -> None: ...


class HistoryPrefetch:
    """By the times between an adapter's last requests. Source: Serverless in the Wild §4.2, named by Chameleon §4.1."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._look_at_s: float | None = None

    def arrived(self, adapter_id: int, now: float) -> None:
        self._arrivals.arrived(adapter_id, now)

    def due(self, now: float) -> list[int]:
        if self._look_at_s is not None and now < self._look_at_s:
            return []
        self._look_at_s = now + LOOK_EVERY_S
        found = self._arrivals.due(now, MIN_LEAD_S + LOOK_EVERY_S)
        return [adapter_id for adapter_id, probability in found if probability >= MIN_PROBABILITY]

    def wait_s(self, now: float) -> float | None:
        return None if self._look_at_s is None else max(self._look_at_s - now, 0.0)

    def forgotten(self, adapter_id: int) -> None:
        self._arrivals.forget(adapter_id)
