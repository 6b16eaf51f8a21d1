"""Which tenant's job comes next on a thread that all tenants share. Pure: seconds come in as arguments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")

PRIOR_S = 0.002
"""Seconds that a tenant's jobs are assumed to take before one has ended. Measured: a chat message of a few hundred tokens."""
NEWEST_WEIGHT = 0.2
"""The weight of the newest job in a tenant's mean. Chosen: five jobs make a new habit."""
MAX_FORGIVEN = 10_000
"""Tenants without jobs whose time is remembered. Chosen: beyond that all are forgiven, which costs others one job each."""


@dataclass(slots=True)
class _Tenant(Generic[Job]):
    used_s: float = 0.0  # in shares: seconds ÷ weight
    weight: float = 1.0
    mean_s: float = PRIOR_S
    num_running: int = 0
    jobs: deque[Job] = field(default_factory=deque)


class FairQueue(Generic[Job]):
    """Jobs in order of arrival within a tenant; between tenants, the tenant that has used the least of its share is next.

    The thread is never taken from a job, so a tenant that comes anew waits for the job that runs, and then for at most one job of each other tenant
    that waits: a tenant that was idle starts from the virtual time of the tenant served last (no credit for idleness), and is behind by no more
    than its own last job. Source: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), by measured time instead of packet lengths.
    """

    def __init__(self) -> None:
        self._busy: dict[str, _Tenant[Job]] = {}  # with jobs that wait or run
        self._idle: dict[str, _Tenant[Job]] = {}
        self._virtual_s = 0.0  # virtual time of the tenant served last, when it was served
        self.num_waiting = 0

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of this tenant's jobs that wait."""
        entry = self._busy.get(tenant)
        return len(entry.jobs) if entry is not None else 0

    def add(self, tenant: str, weight: float, job: Job) -> None:
        """Queue a job. weight: the tenant's share against others, from now on."""
        entry = self._busy.get(tenant)
        if entry is None:
            entry = self._idle.pop(tenant) if tenant in self._idle else _Tenant()
            self._busy[tenant] = entry
            entry.used_s = max(entry.used_s, self._virtual_s)
        entry.weight = weight
        entry.jobs.append(job)
        self.num_waiting += 1

    def take(self) -> tuple[str, Job] | None:
        """Return the tenant and the job that runs now, to be followed by `done`; None: no job waits."""
        waiting = [(entry.used_s, name) for name, entry in self._busy.items() if entry.jobs]
        if not waiting:
            return None
        used_s, name = min(waiting)
        entry = self._busy[name]
        self._virtual_s = max(self._virtual_s, used_s)
        entry.num_running += 1
        self.num_waiting -= 1
        return name, entry.jobs.popleft()

    def done(self, tenant: str, took_s: float | None) -> None:
        """Note that a job from `take` is over. took_s: its duration; None if it never ran."""
        entry = self._busy[tenant]
        entry.num_running -= 1
        if took_s is not None:
            entry.used_s += took_s / entry.weight
            entry.mean_s += NEWEST_WEIGHT * (took_s - entry.mean_s)
        if not entry.jobs and not entry.num_running:
            if len(self._idle) >= MAX_FORGIVEN:
                self._idle.clear()
            self._idle[tenant] = self._busy.pop(tenant)

    def wait_s(self, tenant: str) -> float:
        """Return an estimate of the seconds that a job of this tenant would wait, if it came now: behind its own, at its share of the thread."""
        entry = self._busy.get(tenant)
        if entry is None or not entry.jobs:
            return 0.0
        weights = sum(other.weight for other in self._busy.values() if other.jobs)
        return len(entry.jobs) * entry.mean_s * weights / entry.weight
