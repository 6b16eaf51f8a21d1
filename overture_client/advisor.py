"""Advises the gateway while a workflow's agents run: the part that all hooks share."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple, Self

from overture_client.call_graph import CallGraph
from overture_client.client import AdvisoryStatus, CallError, OvertureClient, Receipt

# A bound that moves less than this tells the gateway nothing new: it merges such advisories (gateway/advisories/advisories.py).
SAME_ARRIVAL_S = 0.5
# Chosen: half of what the gateway keeps an advisory at least.
RENEW_S = 30.0
MAX_RECEIPTS = 1024
REPORT_TIMEOUT_S = 5.0


class Advisor:
    """One run of a workflow.

    Tell it which agents start and end; it advises for the agents that are likely to come next. Its methods return at once, on any thread.

    As a context manager it calls `finish` at the end.

    Args:
        graph: shared by all runs of a workflow, so that each learns from those before; None begins a new one.
        run_id: names the run's sessions (`CallGraph.session_of`). Runs that continue the same conversations take the same id, a thread's, say;
            None makes up a new one.
        model: the model that the agents' requests name: one for all, or by agent.
        clock: in seconds, monotonic.
    """

    def __init__(
        self,
        client: OvertureClient,
        graph: CallGraph | None = None,
        run_id: str | None = None,
        *,
        model: str | Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.graph = graph if graph is not None else CallGraph()
        self.run_id = run_id or uuid.uuid4().hex
        self._model = model
        self._clock = clock
        self._lock = threading.Lock()
        self._num_started = 0
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, _Told] = {}
        """Advised agents that have not started since."""
        self._sent: deque[Future[Receipt | None]] = deque(maxlen=MAX_RECEIPTS)

    def agent_started(self, name: str) -> None:
        """Note that an agent begins to work, and advise about the agents that follow it."""
        now = self._clock()
        with self._lock:
            self._num_started += 1
            self._running[name] += 1
            self._waiting.pop(name, None)
            busy = set(self._running)
        self.graph.started(self.run_id, name, now)
        for expected in self.graph.upcoming(self.run_id, name, now):
            # Not those at work, where a loop leads back to them: the request that they are about to send would use up the advisory.
            if expected.agent not in busy:
                self._advise(expected.agent, expected.arrival_s if expected.is_measured else None)

    def agent_ended(self, name: str) -> None:
        """Note that an agent has done its work."""
        self._stopped(name)
        self.graph.ended(self.run_id, name, self._clock())

    def agent_failed(self, name: str) -> None:
        """Note that an agent broke off."""
        self._stopped(name)
        self.graph.failed(self.run_id, name)

    def will_act(self, name: str, in_s: float | None = 0.0) -> None:
        """Say that this agent certainly comes next, in `in_s` seconds at the earliest (None: unknown)."""
        self._advise(name, in_s)

    def session_of(self, name: str) -> str:
        """Return the session of an agent in this run."""
        return self.graph.session_of(self.run_id, name)

    def headers(self, name: str) -> dict[str, str]:
        """Return the headers that an agent's requests must carry to find the KV that was prepared for them."""
        return self.client.headers(self.session_of(name), name)

    def finish(self) -> None:
        """End the run: advisories whose request never came are cancelled, so that the gateway stops paying for them."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            # Where a framework breaks off, no end is told.
            self._running.clear()
        for told in waiting.values():
            told.receipt.add_done_callback(self._take_back)
        self.graph.forget(self.run_id)

    def report(self) -> dict[str, Any]:
        """Return the outcomes of the run's advisories, as a dictionary for JSON. It waits for the gateway: not for an event loop's thread.

        ``states`` counts the advisories by state. ``gone`` counts those that the gateway no longer knows.
        """
        receipts = [future.result(REPORT_TIMEOUT_S) for future in list(self._sent)]
        # An advisory that was merged into an earlier one has its id.
        ids = {receipt.id for receipt in receipts if receipt is not None}
        statuses = [_status_of(future) for future in [self.client.advisory_soon(each) for each in ids]]
        states = Counter(status.state if status is not None else "gone" for status in statuses)
        leads_ms = sorted(
            status.lead_ms for status in statuses if status is not None and status.lead_ms is not None
        )
        return {
            "run_id": self.run_id,
            "num_agents_run": self._num_started,
            "num_advisories_sent": len(receipts),
            "num_advisories_failed": receipts.count(None),
            "num_hits": states["hit"],
            "states": dict(states),
            "lead_ms_median": leads_ms[len(leads_ms) // 2] if leads_ms else None,
        }

    async def report_async(self) -> dict[str, Any]:
        """Return `report`, for callers in an event loop."""
        return await asyncio.to_thread(self.report)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish()

    def _stopped(self, name: str) -> None:
        with self._lock:
            self._running[name] -= 1
            if self._running[name] <= 0:
                del self._running[name]

    def _advise(self, name: str, in_s: float | None) -> None:
        """Send an advisory, unless the gateway expects this agent as early anyway."""
        now = self._clock()
        in_s = None if in_s is None else max(in_s, 0.0)
        arrival_s = now + (in_s or 0.0)
        with self._lock:
            told = self._waiting.get(name)
            if told is not None and now < told.at_s + RENEW_S and told.arrival_s < arrival_s + SAME_ARRIVAL_S:
                return
            receipt = self.client.advise_soon(
                self.session_of(name),
                model=self._model if isinstance(self._model, str | None) else self._model.get(name),
                expected_arrival_s=in_s,
                ordered=self.graph.is_ordered,
            )
            self._waiting[name] = _Told(now, arrival_s, receipt)
            self._sent.append(receipt)

    def _take_back(self, future: Future[Receipt | None]) -> None:
        receipt = future.result()
        if receipt is not None:
            self.client.cancel_soon(receipt.id)


class _Told(NamedTuple):
    """The last advisory about an agent, and when it was sent, on the advisor's clock."""

    at_s: float
    arrival_s: float
    receipt: Future[Receipt | None]


def _status_of(future: Future[AdvisoryStatus]) -> AdvisoryStatus | None:
    try:
        return future.result(REPORT_TIMEOUT_S)
    except CallError:
        return None
