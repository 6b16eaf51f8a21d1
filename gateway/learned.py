"""Learned advisories: agents that send none get them too, from who followed whom before. Source: spec E5.

Only requests that name their agent (`X-Agent-Name`) are learned from; a run may be named (`X-Workflow-Id`). A guess is acted on when what it
would save is worth more than what it costs if it is wrong, and while the bytes moved for nothing stay a bounded share of those that were of use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine_bridge.node import Node
from gateway.advisories import GRACE_S, MAX_TTL_S, Advisories, AdvisoryRequest, Record
from gateway.errors import GatewayError
from gateway.policy.followers import Arrival, Followers, Guess, WasteBudget, worth

log = logging.getLogger(__name__)

# A session's KV before one was seen, and the speed of copies to the device: priors of an estimate that only has to tell much from little. Chosen.
PRIOR_BYTES, COPY_BYTES_PER_S, PRIOR_DISK_BYTES_PER_S = 50e6, 4e9, 500e6
SMOOTHING = 0.1


class Learned:
    """Watches requests and advises about those that usually follow.

    Args:
        is_on: the operator's switch; off, nothing is kept.
    """

    def __init__(
        self,
        node: Node,
        advisories: Advisories,
        *,
        is_on: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._advisories = advisories
        self._is_on = is_on
        self._clock = clock
        self._followers = Followers()
        self._budget = WasteBudget()
        self._mean_bytes = PRIOR_BYTES

    def arrived(self, arrival: Arrival) -> None:
        """A request of an agent came. Never raises: what is learned is nobody's business but ours."""
        if not self._is_on or not arrival.agent:
            return
        try:
            now = self._clock()
            self._followers.note(arrival, now)
            for guess in self._followers.expected(arrival, now):
                self._advise(arrival.owner, guess, now)
        except Exception:
            log.exception("learning from a request failed")

    def ended(self, arrival: Arrival) -> None:
        """It was answered."""
        if self._is_on and arrival.agent:
            self._followers.ended(arrival, self._clock())

    def _advise(self, owner: str, guess: Guess, now: float) -> None:
        if not worth(guess.probability, self._saved_s(), self._mean_bytes / COPY_BYTES_PER_S):
            return
        num_bytes = int(self._mean_bytes)
        if len(guess.session_id) > 128 or not self._budget.start(num_bytes, now):
            return
        wanted = AdvisoryRequest(
            session_id=guess.session_id,
            model=guess.adapter,
            expected_arrival_s=min(guess.earliest_s, MAX_TTL_S),
            ttl_s=min(guess.latest_s + GRACE_S, MAX_TTL_S),
        )
        account = _Account(self, num_bytes)
        try:
            record = self._advisories.submit(owner, wanted, "learned", account)
        except GatewayError:
            self._budget.note("not_moved", num_bytes, now)
            return
        if record.source != "learned":  # somebody had said so already
            record.followers.discard(account)
            account.close("not_moved")

    def _saved_s(self) -> float:
        stats = self._node.kv_tiers()
        disk = (
            stats.disk.bytes_per_s if stats is not None and stats.disk.bytes_per_s else PRIOR_DISK_BYTES_PER_S
        )
        return self._mean_bytes / disk + self._mean_bytes / COPY_BYTES_PER_S


class _Account:
    """What became of the bytes that one guess was allowed."""

    def __init__(self, learned: Learned, num_bytes: int) -> None:
        self._learned = learned
        self._num_bytes = num_bytes
        self._is_open = True

    def __call__(self, record: Record) -> None:
        if not record.is_over or record.report is None:
            return
        moved = record.report.host_bytes + record.report.disk_bytes
        if moved:
            learned = self._learned
            learned._mean_bytes += SMOOTHING * (moved - learned._mean_bytes)
        is_used = record.report.state in ("hit", "late")
        self.close("not_moved" if not moved else "used" if is_used else "wasted")

    def close(self, outcome: str) -> None:
        if self._is_open:
            self._is_open = False
            self._learned._budget.note(outcome, self._num_bytes, self._learned._clock())  # type: ignore[arg-type]
