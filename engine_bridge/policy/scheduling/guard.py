"""How long a request would wait in order of arrival, and how much others may overtake it, so that waits stay what they are in that order. Pure.

All seconds of work are seconds of the engine (`EngineWork`), times the seconds that one of them has taken lately.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque

# A request may wait as long as this share of the recent ones would have waited at most in order of arrival, and that many are recent. Chosen: P99.
WAIT_SHARE, NUM_RECENT = 0.99, 500
# Starts whose measured left-over work counts as much as the estimate from the requests' lengths. Chosen.
PRIOR_STARTS = 20.0
# Overtaking pays only where waits are longer than this share of a full device's remaining work: shorter ones are noise of when requests end. Chosen:
# with none, P99 of single plays rises by up to 22% at loads where P50 has nothing to gain (bench/LOG.md).
LEAST_SHARE = 0.4
# A request whose work is at most this share of that wait may overtake however long others wait: each delays them by next to nothing, and all of them
# take from the share of the started work that may overtake. Chosen: of 0.005 to 0.02 the least gains most for what P99 loses (bench/LOG.md).
TINY_SHARE = 0.005
# Share of each sum that a further request leaves. Chosen: 350 requests are half of the mean.
KEPT_SHARE = 0.998
# Seconds that count as measured before any are. Chosen: a busy minute outweighs them.
PRIOR_S = 30.0
# A request that overtakes counts as this much work at least, so that no number of those that are predicted to take nothing passes others for ever.
# Chosen: a step of a fast device.
LEAST_WORK_S = 0.001
# Predicted to run for less than this, a request still holds its place for a step. Chosen.
LEAST_RUN_S = 0.01


class WorkLeft:
    """The work that running requests have still to do, by their predicted ends."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, str]] = []
        self._running: dict[str, tuple[float, float, float]] = {}
        """Of requests before their predicted end: that end, and the two numbers that they add to the sums below."""
        self._at_zero = self._per_s = 0.0
        """The work left is the first minus the time times the second."""

    def started(self, request_id: str, work_s: float, duration_s: float, now: float) -> None:
        """Note that a request begins, with this work, for this time."""
        duration_s = max(duration_s, LEAST_RUN_S)
        end_s, per_s = now + duration_s, work_s / duration_s
        self._running[request_id] = (end_s, end_s * per_s, per_s)
        heapq.heappush(self._ends, (end_s, request_id))
        self._at_zero += end_s * per_s
        self._per_s += per_s

    def ended(self, request_id: str) -> None:
        """Note that a request has left. A request past its predicted end, or an unknown one, is ignored."""
        found = self._running.pop(request_id, None)
        if found is not None:
            self._at_zero -= found[1]
            self._per_s -= found[2]
        if not self._running:  # no rest of rounding
            self._ends.clear()
            self._at_zero = self._per_s = 0.0

    def left_s(self, now: float) -> float:
        """Return the seconds of work that are left."""
        while self._ends and self._ends[0][0] <= now:
            end_s, request_id = heapq.heappop(self._ends)
            if request_id in self._running and self._running[request_id][0] == end_s:
                self.ended(request_id)
        return max(self._at_zero - now * self._per_s, 0.0)


class Guard:
    """Knows what requests of one tenant and priority would wait in order of arrival, and keeps the time.

    A request that comes waits there for the work that waits before it and for what running requests have still to do, less the work left when
    its turn has come. Both are the same in any order that keeps the device busy, so this tells that order's wait without playing it. A request may
    then wait for as long as the P99 of these waits. The work left when a turn comes is measured at starts in order of arrival.

    Overtaking requests take at most `overtaking_share` of the started work while others wait. Otherwise long ones would be held back until their time
    is up, then fill the device all at once, and end all at once: no request starts in between.

    Source: ours. Letting later jobs start before earlier ones as long as these keep their times is backfilling (Lifka, 1995), with a slack as in
    Talby and Feitelson (IPPS 1999).
    """

    def __init__(self, overtaking_share: float) -> None:
        self.now = 0.0
        self.num_waiting = 0
        self.running = WorkLeft()
        self._repaid = overtaking_share / (1 - overtaking_share)
        self.share = overtaking_share
        self.owed_s = 0.0
        """Work that has overtaken beyond its share. While it is positive, nobody overtakes."""
        self._elapsed_s = self._worked_s = PRIOR_S
        self._work_s = self._work_runs_s = 0.0
        self._num_starts = self._left_sum_s = 0.0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def tick(self, now: float) -> None:
        """Note the time."""
        if self.num_waiting:
            self._elapsed_s += max(now - self.now, 0.0)
        self.now = now

    def came(self, engine_s: float, duration_s: float, waiting_s: float) -> float:
        """Note that a request came behind this much work that waits, and return its own work in seconds."""
        work_s = engine_s * self._elapsed_s / self._worked_s
        wait_s = 0.0
        if self.num_waiting:
            wait_s = max(waiting_s + self.running.left_s(self.now) - self._left_s, 0.0)
        insort(self._sorted, wait_s)
        self._recent.append(wait_s)
        if len(self._recent) > NUM_RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._work_s = KEPT_SHARE * self._work_s + work_s
        self._work_runs_s = KEPT_SHARE * self._work_runs_s + work_s * duration_s
        self.num_waiting += 1
        return work_s

    def started(
        self, request_id: str, engine_s: float, work_s: float, duration_s: float, is_first: bool
    ) -> None:
        """Note that a request starts, and whether no other had come before it."""
        self.num_waiting -= 1
        self._elapsed_s *= KEPT_SHARE
        self._worked_s *= KEPT_SHARE
        if self.num_waiting:
            self._worked_s += engine_s
            if is_first:
                self._num_starts = KEPT_SHARE * self._num_starts + 1.0
                self._left_sum_s = KEPT_SHARE * self._left_sum_s + self.running.left_s(self.now)
        self.owed_s = self.owed(self.owed_s, work_s, is_first)
        self.running.started(request_id, work_s, duration_s, self.now)

    def left(self) -> None:
        """Note that a waiting request has left without a start."""
        self.num_waiting -= 1

    def owed(self, owed_s: float, work_s: float, is_first: bool) -> float:
        """Return the overtaking debt after one more start. At most the share of a full device's remaining work can be saved up."""
        if not is_first:
            return owed_s + max(work_s, LEAST_WORK_S)
        return max(owed_s - self._repaid * work_s, -self.share * self._usual_left_s)

    def most_waited_s(self) -> float:
        """Return P99 of the recent waits in order of arrival, in seconds."""
        if not self._sorted:
            return 0.0
        return self._sorted[math.ceil(WAIT_SHARE * len(self._sorted)) - 1]

    def pays(self, most_waited_s: float) -> bool:
        """Return whether waits are long enough for overtaking."""
        return self.share > 0 and most_waited_s >= LEAST_SHARE * self._usual_left_s

    def delay_s(self, now: float) -> float:
        """Return by how much longer running requests hold the device than in order of arrival."""
        return max(self.running.left_s(now) - self._left_s, 0.0)

    @property
    def _usual_left_s(self) -> float:
        """The work that a device full of requests like the recent ones has still to do: half of each, and long ones are there for longer."""
        return self._work_runs_s / self._work_s / 2 if self._work_s else 0.0

    @property
    def _left_s(self) -> float:
        """The work that running requests have still to do when the next one starts in order of arrival: as measured at such starts."""
        measured = self._left_sum_s + PRIOR_STARTS * self._usual_left_s
        return measured / (self._num_starts + PRIOR_STARTS)
