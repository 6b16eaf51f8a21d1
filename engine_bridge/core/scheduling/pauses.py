"""Requests that stand while urgent ones decode: who is paused, since when, and how long each may be yet. `policy.pausing` decides."""

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
    """Of a request: its priority, when it came, and since when it runs; None: it waits."""

    priority: int
    arrived_s: float
    started_s: float | None


Stints = Callable[[str], Stint | None]
"""Of a request; None: nobody knows it."""


@dataclass(slots=True)
class _Account:
    """ran_s, paused_s: before now. since_s: when the pause under way began; None: there is none. num_tokens: that it had then."""

    ran_s: float = 0.0
    paused_s: float = 0.0
    since_s: float | None = None
    num_tokens: int = 0

    def pause(self, now: float) -> None:
        if self.since_s is None:
            self.since_s = now

    def go_on(self, now: float) -> None:
        if self.since_s is not None:
            self.paused_s += now - self.since_s
            self.since_s = None


class Pauses:
    """Knows urgent requests from when they come, and others once they are paused: while nobody is urgent it costs a look at `is_on`.

    Args:
        decode_s: what steps are predicted to take.
        slo_s: what a step may take while an urgent request decodes; 0: nobody is paused.
    """

    def __init__(
        self, decode_s: DecodeSeconds = lambda num_requests, num_tokens: 0.0, slo_s: float = 0.0
    ) -> None:
        self.slo_s = slo_s
        self._decode_s = decode_s
        self._known_urgent: set[str] = set()
        self._urgent: set[str] = set()  # that run
        self._standing: dict[str, Stint] = {}
        self._accounts: dict[str, _Account] = {}
        self._pausing: frozenset[str] = frozenset()
        self._batch = self._urgent_batch = Batch()  # of this step, without those that are paused in it
        self._urgent_decodes = False

    @property
    def is_on(self) -> bool:
        """An urgent request waits or runs, or somebody is paused."""
        return bool(self._known_urgent or self._standing)

    @property
    def bound_s(self) -> float:
        """Of the step that was looked at last: what it may take, with prompts."""
        return self.slo_s if self._urgent and self._urgent_decodes else math.inf

    def __len__(self) -> int:
        """How many are paused."""
        return len(self._standing)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._standing

    # -- life of a request -------------------------------------------------------------------------------------------

    def arrived(self, request_id: str, priority: int) -> None:
        if self.slo_s and is_urgent(priority):
            self._known_urgent.add(request_id)

    def started(self, request_id: str, now: float) -> None:
        if request_id in self._known_urgent:
            self._urgent.add(request_id)
        elif self._accounts and (account := self._accounts.get(request_id)) is not None:
            account.go_on(now)

    def preempted(self, request_id: str, stint: Stint, num_tokens: int, now: float) -> bool:
        """It runs no more. Whether that is a pause, so that it waits until `look` has it go on."""
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
        self._known_urgent.discard(request_id)
        self._urgent.discard(request_id)
        self._standing.pop(request_id, None)
        self._accounts.pop(request_id, None)

    # -- a step ------------------------------------------------------------------------------------------------------

    def look(self, running: Sequence[Progress], stints: Stints, now: float) -> PauseDecision:
        """Whom to preempt and whom to let go on, before it is decided who starts."""
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
        # What nobody knows here cannot be paused.
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
        """Who of those that could start now is not to. To be asked after `look`."""
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
            # While it stands, what it ran before is in the account.
            ran_s=account.ran_s + (_since(stint, now) if since_s is None else 0.0),
            paused_s=account.paused_s + (now - since_s if since_s is not None else 0.0),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if somebody is urgent and paused, or paused without an account."""
        assert self._urgent <= self._known_urgent, "urgent and not known"
        assert not self._known_urgent & self._standing.keys(), "urgent and paused"
        assert self._standing.keys() <= self._accounts.keys(), "paused since nobody knows when"


def _since(stint: Stint, now: float) -> float:
    return now - stint.started_s if stint.started_s is not None else 0.0
