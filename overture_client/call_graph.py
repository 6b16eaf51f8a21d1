"""The order in which agents of a workflow act, and how soon at the earliest: learned online, or given.

Pure: callers pass the time. One graph serves many runs of the same workflow, from any thread.
"""

from __future__ import annotations

import hashlib
import heapq
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

# Runtimes kept of each agent; its bound is the least of them. The least rather than a low quantile, because the two mistakes do not cost the
# same: KV that is warm too early holds memory a little longer, KV that is warm too late gave nothing. A window rather than all time, so that one
# freak of a run is forgotten. Chosen: two to three dozen runs are one working session of a developer.
WINDOW = 32
# All chosen: far above any workflow known to us; they bound memory, whatever names come in.
MAX_AGENTS = 256
MAX_TARGETS = 32
MAX_RUNS = 1024
MAX_UPCOMING = 16
# Chosen: counts are halved here, so that a workflow that changes is learned anew within some hundred runs.
MAX_COUNT = 256
# Chosen: below it four of five advisories would move bytes for nothing.
MIN_PROBABILITY = 0.2
# Chosen: KV that is wanted later than this is better fetched by a later advisory.
HORIZON_S = 120.0
MAX_SESSION_ID_CHARS = 128

_VISIBLE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")


class Expected(NamedTuple):
    """An agent that will act. Ordered by time.

    arrival_s: from now, at the earliest. is_measured: every runtime on the way has been seen; if not, `arrival_s` is a bound that says little.
    """

    arrival_s: float
    agent: str
    probability: float
    is_measured: bool


_Heap: TypeAlias = list[Expected]


@dataclass(slots=True)
class _Agent:
    runtimes_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num_ended: int = 0
    num_followed: dict[str, int] = field(default_factory=dict)
    """How often each agent acted after this one."""
    given: set[str] = field(default_factory=set)
    """Agents that are said to act after this one."""

    def probability_of(self, target: str) -> float:
        """Return the share of this agent's ends after which `target` acted. A given edge counts as seen once, so it begins at 1."""
        prior = target in self.given
        num_trials = self.num_ended + prior
        return min(1.0, (self.num_followed.get(target, 0) + prior) / num_trials) if num_trials else 1.0

    def targets(self) -> set[str]:
        """Return the agents that may act after this one."""
        return self.given | self.num_followed.keys()


@dataclass(slots=True)
class _Run:
    running: dict[str, list[float]] = field(default_factory=dict)
    """When each agent that runs now was started; several times if it runs several times at once."""
    done: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Ended since the last start: whoever starts next acts after these."""
    sources: frozenset[str] = frozenset()
    """What `ended` was at the last start that found any: agents that start side by side have the same sources."""


class CallGraph:
    """Agents, edges, and a lower bound of each agent's runtime.

    Source: SYMPHONY §1 and §3.1 (advisories to downstream agents with a lower bound of their arrival); departs in measuring the bound while
    serving, where the paper profiles beforehand, and in learning edges.

    Args:
        edges: known pairs of (agent, agent that acts after it). Others are learned from the order in which agents act.
        is_ordered: each agent acts once in a run, as in a pipeline: agents that have acted are not expected again.

    Raises:
        ValueError: `edges` has more than ``MAX_AGENTS`` agents.
    """

    def __init__(self, edges: Iterable[tuple[str, str]] = (), *, is_ordered: bool = False) -> None:
        self.is_ordered = is_ordered
        # Hooks of some frameworks come from a pool of threads.
        self._lock = threading.Lock()
        self._agents: OrderedDict[str, _Agent] = OrderedDict()
        self._given: set[str] = set()
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        for source, target in edges:
            self.add_edge(source, target)

    def add_edge(self, source: str, target: str) -> None:
        """Say that `target` may act after `source`. Raises ValueError if this would be agent ``MAX_AGENTS`` + 1."""
        with self._lock:
            given = self._given | {source, target}
            if len(given) > MAX_AGENTS:
                raise ValueError(f"a call graph may have {MAX_AGENTS} agents at most")
            self._given = given
            self._agent(target)
            self._agent(source).given.add(target)

    def started(self, run_id: str, agent: str, now: float) -> None:
        """Note that an agent begins to work. It is taken to act after the agents that ended since the last start."""
        with self._lock:
            run = self._run(run_id)
            if run.ended:
                run.sources, run.ended = frozenset(run.ended), set()
            elif not run.running:
                # It runs beside no other agent: all agents before it failed.
                run.sources = frozenset()
            for source in run.sources:
                self._learn(source, agent)
            starts = run.running.setdefault(agent, [])
            starts.append(now)
            # Forgetting the earliest starts errs towards shorter runtimes, as a lower bound may.
            del starts[:-WINDOW]
            if len(run.running) > MAX_AGENTS:
                del run.running[next(iter(run.running))]

    def ended(self, run_id: str, agent: str, now: float) -> None:
        """Note that an agent has done its work, and count its runtime. Ignored if it was not seen to start."""
        with self._lock:
            started_s = self._pop_start(run_id, agent)
            if started_s is None:
                return
            record = self._agent(agent)
            record.runtimes_s.append(max(0.0, now - started_s))
            record.num_ended += 1
            if record.num_ended > MAX_COUNT:
                record.num_ended //= 2
                record.num_followed = {name: n // 2 for name, n in record.num_followed.items() if n > 1}
            run = self._run(run_id)
            if len(run.done) < MAX_AGENTS:
                run.done.add(agent)
                run.ended.add(agent)

    def failed(self, run_id: str, agent: str) -> None:
        """Note that an agent broke off: its runtime tells nothing, and no agent acts after it."""
        with self._lock:
            self._pop_start(run_id, agent)

    def forget(self, run_id: str) -> None:
        """Forget a run that is over. Runs that are never forgotten are dropped when many newer ones have come."""
        with self._lock:
            self._runs.pop(run_id, None)

    def upcoming(self, run_id: str, agent: str, now: float) -> list[Expected]:
        """Return the agents that will act after `agent`, directly or through others, soonest first.

        Args:
            run_id: names the run.
            agent: an agent that runs; if it was not seen to start, it is taken to start now.
            now: in seconds, on the clock of `started`.

        Returns:
            At most ``MAX_UPCOMING`` agents, each once. `agent` itself is among them if a loop leads back to it. Agents behind one whose runtime
                was never measured are left out.
        """
        with self._lock:
            run = self._runs.get(run_id) or _Run()
            excluded = (run.done | run.running.keys()) if self.is_ordered else set()
            here = Expected(self._left_s(run, agent, now), agent, 1.0, self._bound_s(agent) is not None)
            found: dict[str, Expected] = {}
            # Dijkstra's shortest paths: several ways lead to an agent, and the earliest is its bound.
            heap: _Heap = self._after(here, excluded)
            while heap and len(found) < MAX_UPCOMING:
                expected = heapq.heappop(heap)
                if expected.agent in found:
                    continue
                found[expected.agent] = expected
                runtime_s = self._bound_s(expected.agent)
                if expected.agent != agent and expected.is_measured and runtime_s is not None:
                    done = expected._replace(arrival_s=expected.arrival_s + runtime_s)
                    for following in self._after(done, excluded):
                        heapq.heappush(heap, following)
            return list(found.values())

    def lower_bound_s(self, agent: str) -> float | None:
        """Return the least runtime among the agent's last ``WINDOW``; None if none was seen."""
        with self._lock:
            return self._bound_s(agent)

    def session_of(self, run_id: str, agent: str) -> str:
        """Return the session in which `agent` talks to the model in this run: ``run_id:agent``, in the characters that the gateway takes.

        Source of the limits: gateway/sessions/text.py (1 to 128 visible ASCII characters). Longer names keep their beginning and get a checksum.
        """
        name = quote(f"{run_id}:{agent}", safe=_VISIBLE)
        if len(name) <= MAX_SESSION_ID_CHARS:
            return name
        checksum = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        return f"{name[: MAX_SESSION_ID_CHARS - len(checksum) - 1]}~{checksum}"

    def check_invariants(self) -> None:
        """Check, for tests, that memory is bounded. Raises AssertionError."""
        with self._lock:
            assert len(self._agents) <= MAX_AGENTS
            assert len(self._runs) <= MAX_RUNS
            for agent in self._agents.values():
                assert len(agent.num_followed) <= MAX_TARGETS
                assert agent.num_ended <= MAX_COUNT
                assert len(agent.runtimes_s) <= WINDOW
            for run in self._runs.values():
                assert len(run.running) <= MAX_AGENTS
                assert len(run.done) <= MAX_AGENTS
                assert run.ended <= run.done
                assert all(0 < len(starts) <= WINDOW for starts in run.running.values())

    # The rest is called with the lock held.

    def _agent(self, name: str) -> _Agent:
        """Return the agent's record, made if need be: the learned agent that was silent for longest makes room."""
        record = self._agents.setdefault(name, _Agent())
        self._agents.move_to_end(name)
        if len(self._agents) > MAX_AGENTS:
            oldest = next((each for each in self._agents if each not in self._given), name)
            del self._agents[oldest]
        return record

    def _run(self, run_id: str) -> _Run:
        run = self._runs.setdefault(run_id, _Run())
        self._runs.move_to_end(run_id)
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        return run

    def _learn(self, source: str, target: str) -> None:
        counts = self._agent(source).num_followed
        counts[target] = counts.get(target, 0) + 1
        if len(counts) > MAX_TARGETS:
            # Keep the newest target, or a full table would never learn another.
            del counts[min((name for name in counts if name != target), key=counts.__getitem__)]

    def _pop_start(self, run_id: str, agent: str) -> float | None:
        """Take the agent's latest start. Which of several starts an end belongs to is unknown: the latest gives the least runtime."""
        run = self._runs.get(run_id)
        starts = run.running.get(agent) if run is not None else None
        if run is None or not starts:
            return None
        started_s = starts.pop()
        if not starts:
            del run.running[agent]
        return started_s

    def _bound_s(self, agent: str) -> float | None:
        record = self._agents.get(agent)
        return min(record.runtimes_s) if record is not None and record.runtimes_s else None

    def _left_s(self, run: _Run, agent: str, now: float) -> float:
        """Return the seconds until the agent ends, at the earliest. Of several calls of the agent under way, the first counts."""
        started_s = run.running.get(agent, [now])[0]
        return max(0.0, (self._bound_s(agent) or 0.0) - max(0.0, now - started_s))

    def _after(self, done: Expected, excluded: set[str]) -> _Heap:
        """Push the agents that may act once `done.agent` has ended, at `done.arrival_s`, on a heap."""
        record = self._agents.get(done.agent)
        if record is None or done.arrival_s > HORIZON_S:
            return []
        heap = [
            Expected(done.arrival_s, target, probability, done.is_measured)
            for target in record.targets() - excluded
            if (probability := done.probability * record.probability_of(target)) >= MIN_PROBABILITY
        ]
        heapq.heapify(heap)
        return heap
