"""The call graph and the advisor between a workflow and the gateway: what they learn, bound and tell."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from overture_client.advisor import RENEW_S, Advisor
from overture_client.call_graph import (
    MAX_AGENTS,
    MAX_RUNS,
    MAX_SESSION_ID_CHARS,
    MAX_TARGETS,
    WINDOW,
    CallGraph,
)
from overture_client.client import OvertureClient
from tests.unit.gateway.parts import Clock


def act(graph: CallGraph, run_id: str, agent: str, start_s: float, end_s: float) -> None:
    graph.started(run_id, agent, start_s)
    graph.ended(run_id, agent, end_s)


def arrivals(graph: CallGraph, run_id: str, agent: str, now: float) -> dict[str, float]:
    return {expected.agent: expected.arrival_s for expected in graph.upcoming(run_id, agent, now)}


def test_a_failed_agent_is_not_measured_and_nobody_follows_it() -> None:
    graph = CallGraph()
    graph.started("a", "plan", 0.0)
    graph.failed("a", "plan")
    act(graph, "a", "rescue", 1.0, 2.0)
    assert graph.lower_bound_s("plan") is None
    assert graph.upcoming("b", "plan", 0.0) == []


def test_floods_of_names_and_runs_are_forgotten_but_given_agents_stay() -> None:
    graph = CallGraph([("plan", "code")])
    act(graph, "a", "plan", 0.0, 2.0)
    for index in range(max(MAX_AGENTS, MAX_RUNS) + MAX_TARGETS):
        act(graph, f"run {index}", f"agent {index}", 0.0, 1.0)
        act(graph, "one run", f"agent {index}", 0.0, 1.0)
        act(graph, "hub", "hub", 0.0, 1.0)
        act(graph, "hub", f"spoke {index}", 1.0, 2.0)
    graph.check_invariants()
    assert arrivals(graph, "new", "plan", 0.0) == {"code": 2.0}


@given(st.text(), st.text())
def test_sessions_have_names_that_the_gateway_takes(run_id: str, agent: str) -> None:
    name = CallGraph().session_of(run_id, agent)
    assert 1 <= len(name) <= MAX_SESSION_ID_CHARS
    assert all("!" <= char <= "~" for char in name)


AGENTS = st.sampled_from("abcdef")
RUNS = st.sampled_from(["r1", "r2"])


class GraphMachine(RuleBasedStateMachine):
    """Any order of starts, ends and failures, against a list of what each agent really took."""

    @initialize(edges=st.lists(st.tuples(AGENTS, AGENTS), max_size=8), is_ordered=st.booleans())
    def begin(self, edges: list[tuple[str, str]], is_ordered: bool) -> None:
        self.graph = CallGraph(edges, is_ordered=is_ordered)
        self.now = 0.0
        self.running: dict[tuple[str, str], list[float]] = {}
        self.runtimes: dict[str, list[float]] = {}
        self.acted: dict[str, set[str]] = {"r1": set(), "r2": set()}

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(run_id=RUNS, agent=AGENTS)
    def start(self, run_id: str, agent: str) -> None:
        self.graph.started(run_id, agent, self.now)
        self.running.setdefault((run_id, agent), []).append(self.now)

    @rule(run_id=RUNS, agent=AGENTS, is_latest=st.booleans())
    def end(self, run_id: str, agent: str, is_latest: bool) -> None:
        self.graph.ended(run_id, agent, self.now)
        if starts := self.running.get((run_id, agent)):
            # Which of several is over, the graph cannot know.
            started_s = starts.pop(-1 if is_latest else 0)
            self.runtimes.setdefault(agent, []).append(self.now - started_s)
            self.acted[run_id].add(agent)

    @rule(run_id=RUNS)
    def forget(self, run_id: str) -> None:
        self.graph.forget(run_id)
        self.acted[run_id] = set()
        self.running = {key: starts for key, starts in self.running.items() if key[0] != run_id}

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "graph"):
            self.graph.check_invariants()

    @invariant()
    def bounds_are_not_above_what_was_observed(self) -> None:
        for agent, runtimes in getattr(self, "runtimes", {}).items():
            bound = self.graph.lower_bound_s(agent)
            assert bound is not None
            assert 0.0 <= bound <= min(runtimes[-WINDOW:]) + 1e-9

    @rule(run_id=RUNS, agent=AGENTS)
    def look(self, run_id: str, agent: str) -> None:
        upcoming = self.graph.upcoming(run_id, agent, self.now)
        names = [expected.agent for expected in upcoming]
        assert len(names) == len(set(names))
        assert [expected.arrival_s for expected in upcoming] == sorted(e.arrival_s for e in upcoming)
        for expected in upcoming:
            assert expected.arrival_s >= 0.0
            assert 0.0 < expected.probability <= 1.0
        if self.graph.is_ordered:
            assert self.acted[run_id].isdisjoint(names)


GraphMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestGraphMachine = GraphMachine.TestCase


def told(server: Any) -> list[tuple[str, float | None]]:
    return [(body["session_id"], body.get("expected_arrival_s")) for body in server.advisories]


def test_those_who_follow_are_advised_with_bounds_once_these_are_known(server: Any) -> None:
    clock, graph = Clock(), CallGraph([("plan", "code"), ("code", "test")])
    with OvertureClient(server.url, max_in_flight=1000) as client:
        first = Advisor(client, graph, "r1", model="pirate", clock=clock)
        for agent, runtime_s in (("plan", 4.0), ("code", 2.0)):
            first.agent_started(agent)
            clock.now_s += runtime_s
            first.agent_ended(agent)
        Advisor(client, graph, "r2", model={"test": "robot"}, clock=clock).agent_started("plan")
        first.report()
    sent = {body["session_id"]: body for body in server.advisories}
    assert sent["r1:code"] == {"session_id": "r1:code", "model": "pirate"}, "nothing measured yet"
    assert sent["r2:code"] == {"session_id": "r2:code", "expected_arrival_s": 4.0}
    assert sent["r2:test"] == {"session_id": "r2:test", "expected_arrival_s": 6.0, "model": "robot"}


def test_an_agent_that_is_expected_as_early_is_not_advised_again(server: Any) -> None:
    clock = Clock()
    with OvertureClient(server.url) as client:
        advisor = Advisor(client, run_id="r", clock=clock)
        advisor.will_act("code", 9.0)
        clock.now_s += 1.0
        advisor.will_act("code", 8.1)  # the same moment, near enough
        advisor.will_act("code", 20.0)  # later does not matter
        advisor.report()
        assert told(server) == [("r:code", 9.0)]
        advisor.will_act("code", 3.0)  # sooner
        advisor.report()
        advisor.agent_started("code")
        advisor.will_act("code", 7.0)  # once more
        advisor.report()
        clock.now_s += RENEW_S
        advisor.will_act("code", 5.0)  # the gateway may have forgotten the last one
        advisor.report()
    assert told(server) == [("r:code", 9.0), ("r:code", 3.0), ("r:code", 7.0), ("r:code", 5.0)]


async def test_the_report_counts_hits_as_the_gateway_tells(server: Any) -> None:
    async with OvertureClient(server.url) as client:
        advisor = Advisor(client, CallGraph([("plan", "code"), ("plan", "idle")]), "r")
        advisor.agent_started("plan")
        advisor.agent_ended("plan")
        await advisor.report_async()
        advisor.agent_started("code")
        headers = advisor.headers("code")
        assert headers == {"X-Session-Id": "r:code", "X-Agent-Name": "code"}
        await client.chat([], model="base", session_id=headers["X-Session-Id"])
        assert await advisor.report_async() == {
            "run_id": "r",
            "num_agents_run": 2,
            "num_advisories_sent": 2,
            "num_advisories_failed": 0,
            "num_hits": 1,
            "states": {"hit": 1, "accepted": 1},
            "lead_ms_median": 12.5,
        }


def test_a_gateway_that_is_down_does_not_disturb_the_run() -> None:
    with (
        OvertureClient("http://127.0.0.1:1") as client,
        Advisor(client, CallGraph([("plan", "code")]), "r") as advisor,
    ):
        advisor.agent_started("plan")
        report = advisor.report()
    assert (report["num_advisories_sent"], report["num_advisories_failed"], report["num_hits"]) == (1, 1, 0)
