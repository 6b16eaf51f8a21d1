"""The number of requests of each session, and the usual pause of sessions between two requests."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

# Number of sessions that are remembered, with or without KV; the ones silent for longest are forgotten first. Chosen.
MAX_SESSIONS = 16_384
# Number of recent pauses whose median counts. NUM_ASSUMED pauses of people that read and type (Mooncake's median) are assumed at first. Chosen.
NUM_PAUSES, NUM_ASSUMED, ASSUMED_PAUSE_S = 256, 16, 123.0


@dataclass(slots=True)
class _Session:
    """The requests of one session. left_s: when its last request ended; None while a request is in the engine."""

    num_requests: int = 0
    left_s: float | None = None


class Returns:
    """Counts requests and pauses; nothing is decided here."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._max_sessions = max_sessions
        self._pauses_s = deque([ASSUMED_PAUSE_S] * NUM_ASSUMED, maxlen=NUM_PAUSES)
        self.usual_pause_s = ASSUMED_PAUSE_S
        """The median of recent pauses, in seconds."""

    def came(self, session: Hashable, now: float, *, is_one: bool = True) -> None:
        """Count a request of a session. is_one: whether it is one session, and not several that begin alike, whose pauses say nothing."""
        known = self._sessions.pop(session, None) or _Session()
        self._sessions[session] = known
        known.num_requests += 1
        if known.left_s is not None and is_one:
            self._pauses_s.append(max(now - known.left_s, 0.0))
            self.usual_pause_s = statistics.median(self._pauses_s)
        known.left_s = None
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def left(self, session: Hashable, now: float) -> None:
        """Note that the session's last request has ended. A request that no client asked for changes nothing."""
        known = self._sessions.get(session)
        if known is not None and known.left_s is None:
            known.left_s = now

    def num_requests(self, session: Hashable) -> int:
        """Return the number of requests of a session, as far as is remembered."""
        known = self._sessions.get(session)
        return known.num_requests if known is not None else 0
