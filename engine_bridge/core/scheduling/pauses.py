"""Paused requests, which wait while urgent ones decode: since when each is paused, and how much longer. `policy.scheduling.pausing` decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_bridge.core.scheduling.pacer import Progress
from engine_bridge.policy.scheduling.pausing import (
    Batch,
    DecodeSeconds,
    Other,
    PauseDecision,
    decide,
    kept_from_starting,
)
from engine_bridge.protocol.urgency import is_urgent


class Stint(NamedTuple):
    """A request's priority, its arrival, and the time since which it runs; None: it waits."""

    priority: int
    arrived_s: float
    started_s: float | None


Stints = Callable[[str], Stint | None]
"""Returns a request's stint; None if it is unknown."""


@dataclass(slots=True)
class _Account:
    """How long one request ran and was paused, in seconds, before now.

    Attributes:
        since_s: when the pause under way began; None while the request is not paused.
        num_tokens: tokens that it held when that pause began.
    """

    ran_s: float = 0.0
    paused_s: float = 0.0
    since_s: float | None = None
    num_tokens: int = 0

    def pause(self, now: float) -> None:
        """Begin a pause, unless one is under way."""
        if self.since_s is None:
            self.since_s = now

    def go_on(self, now: float) -> None:
        """End the pause under way, if any."""
        if self.since_s is not None:
            self.paused_s += now - self.since_s
            self.since_s = None


class Pauses:
    """Knows urgent requests from their arrival, and others once they are paused: without urgent ones a step costs one look at `is_on`.

    Args:
        slo_s: seconds that a step may take while an urgent request decodes; 0: no request is paused.
    """

    def __init__(
        self, decode_s: DecodeSeconds = lambda num_requests, num_tokens: 0.0, slo_s: float = 0.0
    ) -> None:
        self.slo_s = slo_s
        self._decode_s = decode_s
        self._known_urgent: set[str] = set()
        self._urgent: set[str] = set()  # urgent requests that run
        self._standing: dict[str, Stint] = {}
        self._accounts: dict[str, _Account] = {}
        self._pausing: frozenset[str] = frozenset()
        self._batch = self._urgent_batch = Batch()  # of this step, without the requests paused in it
        self._urgent_decodes = False

    @property
    def is_on(self) -> bool:
        """Whether an urgent request waits or runs, or a request is paused."""
        return bool(self._known_urgent or self._standing)

    @property
    def bound_s(self) -> float:
        """The seconds that the step that was looked at last may take, with prompts."""
        return self.slo_s if self._urgent and self._urgent_decodes else math.inf

    def __len__(self) -> int:
        """Return the number of paused requests."""
        return len(self._standing)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._standing

    # -- life of a request -------------------------------------------------------------------------------------------

    def arrived(self, request_id: str, priority: int) -> None:
        """Note a request's arrival."""
        if self.slo_s and is_urgent(priority):
            self._known_urgent.add(request_id)

    def started(self, request_id: str, now: float) -> None:
        """Note that a request starts."""
        if request_id in self._known_urgent:
            self._urgent.add(request_id)
        elif self._accounts and (account := self._accounts.get(request_id)) is not None:
            account.go_on(now)

    def preempted(self, request_id: str, stint: Stint, num_tokens: int, now: float) -> bool:
        """Note that a request no longer runs. Return whether that is a pause, so that it waits until `look` resumes it."""
        self._urgent.discard(request_id)
        if request_id not in self._pausing:
            return False
        account = self._accounts.setdefault(request_id, _Account())
        account.ran_s += _since(stint, now)
        account.num_tokens = num_tokens
        account.pause(now)
        self._standing[request_id] = stint
        return True

    def ended(self, request_id: str) -> None:
        """Note that a request left. An unknown one is ignored."""
        self._known_urgent.discard(request_id)
        self._urgent.discard(request_id)
        self._standing.pop(request_id, None)
        self._accounts.pop(request_id, None)

    # -- a step ------------------------------------------------------------------------------------------------------

    def look(self, running: Sequence[Progress], stints: Stints, now: float) -> PauseDecision:
        """Return the requests to preempt and the requests to resume, before it is decided which requests start."""
        urgent = unknown = Batch()
        others = []
        self._urgent_decodes = False
        for request_id, num_tokens, num_computed in running:
            stint = stints(request_id)
            if request_id in self._urgent:
                urgent = urgent.plus(num_tokens)
                self._urgent_decodes |= num_tokens - num_computed <= 1
            elif stint is None:
                unknown = unknown.plus(num_tokens)
            else:
                others.append(self._other(request_id, stint, num_tokens, now))
        paused = [
            self._other(request_id, stint, self._accounts[request_id].num_tokens, now)
            for request_id, stint in self._standing.items()
        ]
        # Requests unknown to the dispatcher are counted but never paused.
        fixed = Batch(urgent.num_requests + unknown.num_requests, urgent.num_tokens + unknown.num_tokens)
        decision = decide(
            self._decode_s, self.slo_s, fixed if urgent.num_requests else urgent, others, paused
        )
        for request_id in decision.resume:
            del self._standing[request_id]
            self._accounts[request_id].go_on(now)
        self._pausing = frozenset(decision.pause)
        self._urgent_batch = self._batch = fixed
        for each in others:
            if each.request_id not in self._pausing:
                self._batch = self._batch.plus(each.num_tokens)
        return decision

    def kept_back(
        self, starting: Iterable[str], stints: Stints, num_tokens: Callable[[str], int], now: float
    ) -> frozenset[str]:
        """Return the requests that could start now but must not. Call it after `look`."""
        urgent, batch, others = self._urgent_batch, self._batch, []
        for request_id in starting:
            stint = stints(request_id)
            assert stint is not None, "what starts is known"
            size = num_tokens(request_id)
            if is_urgent(stint.priority):
                urgent, batch = urgent.plus(size), batch.plus(size)
            else:
                others.append(self._other(request_id, stint, size, now))
        if not urgent.num_requests:
            return frozenset()
        kept = kept_from_starting(self._decode_s, self.slo_s, urgent, batch, others)
        for request_id in kept:
            self._accounts.setdefault(request_id, _Account()).pause(now)
        return kept

    def _other(self, request_id: str, stint: Stint, num_tokens: int, now: float) -> Other:
        account = self._accounts.get(request_id) or _Account()
        since_s = account.since_s
        return Other(
            request_id=request_id,
            priority=stint.priority,
            arrived_s=stint.arrived_s,
            num_tokens=num_tokens,
            # While it is paused, the time that it ran before is in the account.
            ran_s=account.ran_s + (_since(stint, now) if since_s is None else 0.0),
            paused_s=account.paused_s + (now - since_s if since_s is not None else 0.0),
        )

    def check_invariants(self) -> None:
        """Check the accounts. Raises AssertionError: a request is urgent and paused, or paused without an account."""
        assert self._urgent <= self._known_urgent, "urgent and not known"
        assert not self._known_urgent & self._standing.keys(), "urgent and paused"
        assert self._standing.keys() <= self._accounts.keys(), "paused since nobody knows when"


def _since(stint: Stint, now: float) -> float:
    return now - stint.started_s if stint.started_s is not None else 0.0
