"""The number of requests of each session, how many sessions go on after so many, and the usual pause between two requests."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

# Number of sessions that are remembered, with or without KV; the ones silent for longest are forgotten first. Chosen.
MAX_SESSIONS = 16_384
# Number of recent pauses that count. NUM_ASSUMED pauses of people that read and type (Mooncake's median) are assumed at first. Chosen.
NUM_PAUSES, NUM_ASSUMED, ASSUMED_PAUSE_S, ASSUMED_SPREAD = 256, 16, 123.0, 1.2
# Pauses are taken to differ by no less. Chosen: a few observed pauses are not believed too much.
LEAST_SPREAD, SHORTEST_PAUSE_S = 0.4, 0.01
# Requests of a session that are told apart; beyond them sessions go on alike. A session of u requests is at first taken to send another one with
# probability u / (u + 3): 27, 40, 56, 61, 69% for u = 1 ... 5 in Mooncake's trace. That counts for NUM_ASSUMED sessions. Chosen.
MOST_TOLD_APART, ASSUMED_REQUESTS, FEW = 12, 3, 8
# A session that has been silent for this many usual pauses counts as over, until it comes back. Chosen: of people's pauses, one in twelve
# is longer.
OVER_AFTER_PAUSES = 5
# Counts are halved whenever they have grown to this many requests. Chosen: some hours of a team's traffic.
MOST_COUNTED = 4096


@dataclass(slots=True)
class _Session:
    """The requests of one session. left_s: when its last request ended; None while a request is in the engine. is_over: it counts as over."""

    num_requests: int = 0
    left_s: float | None = None
    is_over: bool = False
    num_pauses: int = 0
    mean_log_pause: float = 0.0
    last_log_pause: float = 0.0


class Returns:
    """Counts requests and pauses; nothing is decided here."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._max_sessions = max_sessions
        assumed_log = [
            math.log(ASSUMED_PAUSE_S) + ASSUMED_SPREAD * (-1) ** number for number in range(NUM_ASSUMED)
        ]
        self._log_pauses = deque(assumed_log, maxlen=NUM_PAUSES)
        self.usual_pause_s, self.pause_spread = ASSUMED_PAUSE_S, ASSUMED_SPREAD
        """Of recent pauses, taken as log-normal: the median in seconds, and the standard deviation of the logarithm."""
        self._own_variances = deque([ASSUMED_SPREAD**2] * NUM_ASSUMED, maxlen=NUM_PAUSES)
        """Of each two pauses of a session that follow one another, the variance of the logarithm."""
        self._own_variance = (
            ASSUMED_SPREAD**2
        )  # the mean of these, which is asked for each session that might leave
        self._went_on, self._ended = [0.0] * MOST_TOLD_APART, [0.0] * MOST_TOLD_APART
        self._left: deque[tuple[float, Hashable, int]] = (
            deque()
        )  # when, which session, after how many requests

    def came(self, session: Hashable, now: float, *, is_one: bool = True) -> None:
        """Count a request of a session. is_one: whether it is one session, and not several that begin alike, whose pauses say nothing."""
        known = self._sessions.pop(session, None) or _Session()
        self._sessions[session] = known
        if known.is_over:
            self._count(known.num_requests, self._ended, -1.0)
            self._count(known.num_requests, self._went_on, 1.0)
        known.is_over = False
        known.num_requests += 1
        if known.left_s is not None and is_one:
            self._learn_pause(known, math.log(max(now - known.left_s, SHORTEST_PAUSE_S)))
        known.left_s = None
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        self._count_all(now)

    def left(self, session: Hashable, now: float) -> None:
        """Note that the session's last request has ended. A request that no client asked for changes nothing."""
        known = self._sessions.get(session)
        if known is not None and known.left_s is None:
            known.left_s = now
            self._left.append((now, session, known.num_requests))

    def pause_of(self, session: Hashable) -> tuple[float, float]:
        """Return the median pause to expect of a session in seconds, and the standard deviation of its logarithm.

        Its own pauses tell as much as sessions differ from one another more than from themselves: those of agents beside people much, those of
        people alone little. Source: the normal law with a normal prior (empirical Bayes).
        """
        known = self._sessions.get(session)
        own = self._own_variance
        between = self.pause_spread**2 - own
        if known is None or not known.num_pauses or between <= 0:
            return self.usual_pause_s, self.pause_spread
        weight = own / between + known.num_pauses
        of_all = math.log(self.usual_pause_s)
        log_pause = of_all + (known.mean_log_pause - of_all) * known.num_pauses / weight
        return math.exp(log_pause), max(math.sqrt(own * (1 + 1 / weight)), LEAST_SPREAD)

    def _learn_pause(self, known: _Session, log_pause: float) -> None:
        if known.num_pauses:
            self._own_variances.append((log_pause - known.last_log_pause) ** 2 / 2)
            self._own_variance = statistics.fmean(self._own_variances)
        known.last_log_pause = log_pause
        known.num_pauses += 1
        known.mean_log_pause += (log_pause - known.mean_log_pause) / known.num_pauses
        self._log_pauses.append(log_pause)
        self.usual_pause_s = math.exp(statistics.median(self._log_pauses))
        mean = statistics.fmean(self._log_pauses)
        variance = statistics.fmean((each - mean) ** 2 for each in self._log_pauses)
        self.pause_spread = max(math.sqrt(variance), LEAST_SPREAD)

    def goes_on(self, session: Hashable) -> float:
        """Return the probability that a session sends another request, by how many it has sent."""
        likely, known = 0.0, 0.0
        for at in range(min(max(self.num_requests(session), 1), MOST_TOLD_APART)):
            # Where few sessions have sent this many requests, the sessions with one request fewer are the best guess.
            assumed = (NUM_ASSUMED * (at + 1) / (at + 1 + ASSUMED_REQUESTS) + known * likely) / (
                NUM_ASSUMED + known
            )
            went_on, known = self._went_on[at], self._went_on[at] + self._ended[at]
            likely = (went_on + FEW * assumed) / (known + FEW)
        return likely

    def _count_all(self, now: float) -> None:
        """Count the sessions left long enough ago, as continued or as over. Earlier, only the continued ones would be counted."""
        while self._left and now - self._left[0][0] > OVER_AFTER_PAUSES * self.usual_pause_s:
            left_s, session, num_requests = self._left.popleft()
            known = self._sessions.get(session)
            if known is not None:
                known.is_over = known.left_s == left_s
                self._count(num_requests, self._ended if known.is_over else self._went_on, 1.0)

    def _count(self, num_requests: int, counts: list[float], more: float) -> None:
        at = min(num_requests, MOST_TOLD_APART) - 1
        counts[at] = max(counts[at] + more, 0.0)
        if self._went_on[at] + self._ended[at] > MOST_COUNTED:
            self._went_on[at], self._ended[at] = self._went_on[at] / 2, self._ended[at] / 2

    def num_requests(self, session: Hashable) -> int:
        """Return the number of requests of a session, as far as is remembered."""
        known = self._sessions.get(session)
        return known.num_requests if known is not None else 0
