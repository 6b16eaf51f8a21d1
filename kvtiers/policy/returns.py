"""What sessions' own requests tell of those to come: how many each has sent, and how long sessions usually pause in between."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

# Sessions that are remembered, whether or not anything of them is left; those that were not heard of for longest go. Chosen.
MAX_SESSIONS = 16_384
# Pauses of which the median counts. Before as many as NUM_ASSUMED were seen, sessions are taken to pause as people do who read and type: Mooncake's
# median. Chosen.
NUM_PAUSES, NUM_ASSUMED, ASSUMED_PAUSE_S = 256, 16, 123.0


@dataclass(slots=True)
class _Session:
    """left_s: when its last request ended; None while one is there."""

    num_requests: int = 0
    left_s: float | None = None


class Returns:
    """Requests come and leave; nothing is decided here."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._max_sessions = max_sessions
        self._pauses_s = deque([ASSUMED_PAUSE_S] * NUM_ASSUMED, maxlen=NUM_PAUSES)
        self.usual_pause_s = ASSUMED_PAUSE_S
        """The median of what was seen lately, in seconds."""

    def came(self, session: Hashable, now: float, *, is_one: bool = True) -> None:
        """A request of it. is_one: it is a session; not where many that know nothing of one another begin alike, whose pauses tell nothing."""
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
        """Its last request that was there has ended. Nothing changes where none had come since: what ended was asked by nobody."""
        known = self._sessions.get(session)
        if known is not None and known.left_s is None:
            known.left_s = now

    def num_requests(self, session: Hashable) -> int:
        """It has sent so many, as far as is remembered."""
        known = self._sessions.get(session)
        return known.num_requests if known is not None else 0
