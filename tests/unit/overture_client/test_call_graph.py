"""The call graph: what it learns, what it bounds, and that it stays small."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from overture_client.call_graph import (
    MAX_AGENTS,
    MAX_RUNS,
    MAX_SESSION_ID_CHARS,
    MAX_TARGETS,
    WINDOW,
    CallGraph,
)


def act(graph: CallGraph, run_id: str, agent: str, start_s: float, end_s: float) -> None:
    graph.started(run_id, agent, start_s)
    graph.ended(run_id, agent, end_s)


def arrivals(graph: CallGraph, run_id: str, agent: str, now: float) -> dict[str, float]:
    return {expected.agent: expected.arrival_s for expected in graph.upcoming(run_id, agent, now)}


def test_bounds_add_up_along_the_edges_and_shrink_as_time_goes() -> None:
    graph = CallGraph([("architect", "engineer"), ("engineer", "tester")])
    act(graph, "a", "architect", 0.0, 5.0)
    act(graph, "a", "engineer", 5.0, 8.0)
    graph.started("b", "architect", 100.0)
    assert arrivals(graph, "b", "architect", 100.0) == {"engineer": 5.0, "tester": 8.0}
    assert arrivals(graph, "b", "architect", 104.0) == {"engineer": 1.0, "tester": 4.0}
    assert arrivals(graph, "b", "architect", 110.0) == {"engineer": 0.0, "tester": 3.0}, (
        "overdue, not negative"
    )


def test_the_earliest_of_several_ways_counts() -> None:
    graph = CallGraph([("plan", "slow"), ("plan", "quick"), ("slow", "join"), ("quick", "join")])
    for agent, runtime_s in (("plan", 1.0), ("slow", 9.0), ("quick", 2.0)):
        act(graph, agent, agent, 0.0, runtime_s)
    assert arrivals(graph, "run", "plan", 0.0)["join"] == 3.0


def test_nothing_is_said_behind_an_agent_that_was_never_measured() -> None:
    graph = CallGraph([("first", "second"), ("second", "third")])
    (expected,) = graph.upcoming("run", "first", 0.0)
    assert (expected.agent, expected.is_measured) == ("second", False)


def test_edges_are_learned_from_the_order_with_agents_side_by_side() -> None:
    graph = CallGraph()
    act(graph, "a", "architect", 0.0, 1.0)
    graph.started("a", "engineer-1", 1.0)
    graph.started("a", "engineer-2", 1.1)
    graph.ended("a", "engineer-1", 3.0)
    graph.ended("a", "engineer-2", 4.0)
    act(graph, "a", "tester", 4.0, 5.0)
    graph.started("b", "architect", 10.0)
    assert arrivals(graph, "b", "architect", 10.0).keys() == {"engineer-1", "engineer-2", "tester"}
    direct = {expected.agent for expected in graph.upcoming("b", "engineer-2", 10.0)}
    assert direct == {"tester"}


def test_a_loop_leads_back_to_the_agent_itself() -> None:
    graph = CallGraph([("engineer", "tester"), ("tester", "engineer")])
    act(graph, "a", "engineer", 0.0, 4.0)
    act(graph, "a", "tester", 4.0, 6.0)
    graph.started("a", "engineer", 6.0)
    assert arrivals(graph, "a", "engineer", 6.0) == {"tester": 4.0, "engineer": 6.0}


def test_an_ordered_graph_does_not_expect_who_has_acted() -> None:
    edges = [("plan", "code"), ("code", "test"), ("code", "plan")]
    ordered, loose = CallGraph(edges, is_ordered=True), CallGraph(edges)
    for graph in (ordered, loose):
        act(graph, "a", "plan", 0.0, 1.0)
        graph.started("a", "code", 1.0)
    assert arrivals(ordered, "a", "code", 1.0).keys() == {"test"}
    assert arrivals(loose, "a", "code", 1.0).keys() == {"test", "plan"}


def test_an_edge_that_is_never_taken_is_given_up() -> None:
    graph = CallGraph([("plan", "code"), ("plan", "ask")])
    for index in range(10):
        act(graph, f"{index}", "plan", 0.0, 1.0)
        act(graph, f"{index}", "code", 1.0, 2.0)
        graph.forget(f"{index}")
    assert arrivals(graph, "new", "plan", 0.0).keys() == {"code"}


def test_the_bound_forgets_a_freak_of_a_run() -> None:
    graph = CallGraph([("plan", "code")])
    act(graph, "freak", "plan", 0.0, 0.01)
    for index in range(WINDOW):
        act(graph, f"{index}", "plan", 0.0, 5.0)
    assert graph.lower_bound_s("plan") == 5.0


def test_a_failed_agent_is_not_measured_and_nobody_follows_it() -> None:
    graph = CallGraph()
    graph.started("a", "plan", 0.0)
    graph.failed("a", "plan")
    act(graph, "a", "rescue", 1.0, 2.0)
    assert graph.lower_bound_s("plan") is None
    assert graph.upcoming("b", "plan", 0.0) == []


def test_starting_over_after_a_failure_is_no_edge() -> None:
    graph = CallGraph([("plan", "code")])
    act(graph, "a", "plan", 0.0, 1.0)
    graph.started("a", "code", 1.0)
    graph.failed("a", "code")
    graph.started("a", "plan", 2.0)
    assert arrivals(graph, "a", "plan", 2.0).keys() == {"code"}


def test_an_end_without_a_start_is_ignored() -> None:
    graph = CallGraph()
    graph.ended("a", "plan", 3.0)
    assert graph.lower_bound_s("plan") is None


def test_too_many_given_agents_are_refused() -> None:
    with pytest.raises(ValueError, match="agents at most"):
        CallGraph((f"{index}", f"{index + 1}") for index in range(MAX_AGENTS))


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


@given(st.text(), st.text(), st.text())
def test_agents_of_a_run_have_different_sessions(run_id: str, one: str, other: str) -> None:
    graph = CallGraph()
    assert (graph.session_of(run_id, one) == graph.session_of(run_id, other)) == (one == other)


def test_a_plain_name_is_not_changed() -> None:
    assert CallGraph().session_of("run-1", "engineer") == "run-1:engineer"


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


GraphMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestGraphMachine = GraphMachine.TestCase


@given(st.lists(st.floats(0.01, 30.0), min_size=2, max_size=6), st.data())
def test_in_a_chain_no_arrival_is_later_than_the_fastest_that_was_observed(
    runtimes: list[float], data: st.DataObject
) -> None:
    agents = [f"agent {index}" for index in range(len(runtimes))]
    graph = CallGraph(itertools.pairwise(agents))
    fastest = list(runtimes)
    for run in range(3):
        now = 0.0
        for index, agent in enumerate(agents):
            runtime_s = runtimes[index] * data.draw(st.floats(1.0, 3.0))
            fastest[index] = runtime_s if run == 0 else min(fastest[index], runtime_s)
            act(graph, f"{run}", agent, now, now + runtime_s)
            now += runtime_s
    graph.started("new", agents[0], 0.0)
    for agent, arrival_s in arrivals(graph, "new", agents[0], 0.0).items():
        assert arrival_s <= sum(fastest[: agents.index(agent)]) + 1e-6
