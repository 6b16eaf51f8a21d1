"""Where sessions are and what is on its way: two doors, what reports cannot tell yet, and failures, which only ever cost time."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from engine_bridge.policy.nodes import routing
from engine_bridge.policy.nodes.routing import CachedKv, Relieve, RequestEstimate, Route, Sticky
from engine_bridge.policy.nodes.session_locations import Doors, Homes, Sent, doors_of
from engine_bridge.protocol.node_facts import UNKNOWN, NodeFacts, PerfModel, Ranks

DOORS = Doors(routing.LOAD_BALANCE, Sticky(), routing.LOAD_BALANCE)
KEY = ("t", "s")


def facts(num_running: int = 0, **fields: Any) -> NodeFacts:
    defaults: dict[str, Any] = {"num_tokens": 0, "queued_tokens": 0, "free_tokens": 10_000}
    return NodeFacts(node_id="", running=Ranks(num_running), queued=Ranks(), **(defaults | fields))


def ask(name: str = "r", **fields: Any) -> RequestEstimate:
    defaults: dict[str, Any] = {"num_prompt_tokens": 100, "num_answer_tokens": 10}
    return RequestEstimate(request_id=name, **(defaults | fields))


def homes(*loads: int, doors: Doors = DOORS, **options: Any) -> Homes:
    """Nodes n0, n1, … with so many running requests."""
    made = Homes(doors, **options)
    for at, num_running in enumerate(loads):
        made.reported(f"n{at}", facts(num_running), 0.0)
    return made


class Heard:
    """A policy that remembers what it was told, and sends everything to the first node."""

    name = "heard"

    def __init__(self) -> None:
        self.asks: list[RequestEstimate] = []
        self.nodes: list[list[NodeFacts]] = []

    def route(self, ask: RequestEstimate, nodes: Any) -> Route:
        self.asks.append(ask)
        self.nodes.append(list(nodes))
        return Route(node_id=nodes[0].node_id)


@pytest.mark.parametrize(("num_queued", "goes_to"), [(0, "n0"), (24, "n1")])
def test_an_unannounced_request_leaves_only_an_overloaded_home(num_queued: int, goes_to: str) -> None:
    own = homes()
    told = facts(4, perf=structs.replace(UNKNOWN, kv_fetch_token_s=1e-5))
    own.reported("n1", structs.replace(told, running=Ranks()), 0.0)
    own.reported("n0", structs.replace(told, queued=Ranks(num_queued), queued_tokens=num_queued * 500), 0.0)
    own.doors = doors_of("overture", own.facts())
    own.placed(KEY, "n0", 1000)
    assert own.requested(KEY, ask(num_prompt_tokens=1050), 1.0).node_id == goes_to
    assert own.home(KEY) == goes_to


def test_an_advisory_that_says_nothing_of_its_length_goes_on_from_what_the_session_was() -> None:
    heard = Heard()
    own = homes(0, 0, doors=Doors(heard, heard, heard))
    own.placed(KEY, "n1", 64)
    own.advised(KEY, "a", ask(num_prompt_tokens=0))
    assert (heard.asks[0].num_prompt_tokens, heard.asks[0].kv) == (64, {"n1": CachedKv(64)})
    node_id = own.requested(KEY, ask(num_prompt_tokens=100), 1.0).node_id
    own.ended("r", num_tokens=128)
    own.advised(KEY, "b", ask(num_prompt_tokens=0))
    assert heard.asks[-1].kv == {node_id: CachedKv(128)}


def test_where_a_session_has_moved_from_is_told_once_its_kv_is_elsewhere() -> None:
    own = homes(5, 0)
    own.placed(KEY, "n0", 64)
    own.advised(KEY, "a", ask())
    own.requested(KEY, ask("moves"), 1.0)
    assert own.ended("moves", num_tokens=96) == "n0"
    own.requested(KEY, ask("stays"), 2.0)
    assert own.ended("stays", num_tokens=128) == ""
    assert own.ended("stays", num_tokens=128) == "", "it is over already"


def test_an_announced_request_goes_elsewhere_after_all_only_where_its_kv_is_near() -> None:
    # A token's KV takes 10 µs to the device and 100 µs over the network; 40 ms are at most waited for.
    perf = structs.replace(UNKNOWN, kv_token_s=1e-5, kv_fetch_token_s=1e-4)
    for num_tokens, stores, expected in (
        (300, ("", "", ""), "n2"),  # 33 ms
        (400, ("", "", ""), "n0"),  # 44 ms
        (400, ("one", "one", ""), "n1"),  # 4 ms where it shares host memory, though another is emptier
        (5_000, ("one", "one", "one"), "n0"),  # 50 ms
    ):
        settings = routing.settings_of([facts(perf=perf)])
        own = Homes(replace(DOORS, second=routing.relief(settings)))
        for at, store in enumerate(stores):
            own.reported(f"n{at}", facts(perf=perf, store=store), 0.0)
        own.placed(KEY, "n0", num_tokens)
        own.advised(KEY, "a", ask(num_prompt_tokens=num_tokens))
        for at, (num_running, store) in enumerate(zip((3, 2, 1), stores, strict=True)):
            own.reported(f"n{at}", facts(num_running, perf=perf, store=store), 1.0)
        sent = own.requested(KEY, ask(num_prompt_tokens=num_tokens + 20), 1.0)
        assert sent.node_id == expected, (num_tokens, stores)
        assert sent.over == (("n0", "a") if expected != "n0" else None)


def test_requests_count_at_their_node_until_its_report_can_tell_of_them() -> None:
    own = homes(0)
    own.requested(KEY, ask(num_prompt_tokens=100, rank=8, is_urgent=True), 1.0)
    (seen,) = own.facts()
    assert (seen.queued, seen.num_tokens, seen.queued_tokens) == (Ranks(1, 8, 8), 100, 100)
    assert (seen.free_tokens, seen.num_urgent) == (9_890, 1)
    own.reported("n0", facts(0), 1.05)
    assert own.facts()[0].queued.num == 1, "it was sent only just before"
    own.reported("n0", facts(1), 1.1)
    assert (own.facts()[0].running.num, own.facts()[0].queued.num) == (1, 0)
    assert own.facts()[0].num_urgent == 1


def test_a_node_that_has_not_measured_how_fast_it_is_is_taken_for_a_usual_one() -> None:
    measured = UNKNOWN
    guessed = structs.replace(UNKNOWN, decode=PerfModel("mbgmv", 0.0, 0.5), error=1.0)
    own = Homes(DOORS)
    for name, perf in (("n0", measured), ("n1", guessed)):
        own.reported(name, facts(perf=perf), 0.0)
    own.doors = doors_of("auto", own.facts())
    placed = [own.requested(("t", f"{at}"), ask(f"{at}"), 1.0).node_id for at in range(4)]
    assert placed == ["n0", "n1", "n0", "n1"]
    own.reported("n1", facts(perf=structs.replace(guessed, error=0.1)), 2.0)
    assert own.facts()[1].perf is not None


def test_a_request_that_failed_goes_elsewhere_and_its_session_is_where_it_was_before() -> None:
    own = homes(0, 1, 2)
    own.placed(KEY, "n2", 64)
    own.advised(KEY, "a", ask())
    assert own.requested(KEY, ask("first"), 1.0) == Sent("n0", "n2")
    own.ended("first", is_cut=True)
    assert own.home(KEY) == "n2"
    again = own.requested(KEY, ask("again"), 1.0, avoid={"n0"})
    assert (again.node_id, again.kv_at) == ("n2", "")


NODES = st.sampled_from(["n0", "n1", "n2"])
SESSIONS = st.sampled_from([("t", "a"), ("t", "b"), ("u", "a"), ("t", "c"), ("t", "")])


class Machine(RuleBasedStateMachine):
    """Any order of events against what is simple to say of them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Homes(Doors(Relieve(), Sticky(), routing.LOAD_BALANCE), max_sessions=3)
        self.now = 0.0
        self.num = 0
        self.open: dict[str, bool] = {}
        self.reported: set[str] = set()
        self.under_way: dict[str, str] = {}
        self.advisories: list[str] = []

    def can_serve(self) -> set[str]:
        return {name for name in self.reported if self.open.get(name, True)}

    def check(self, sent: Sent) -> None:
        able = self.can_serve()
        assert sent.node_id in able if able else sent.node_id is None
        assert not sent.kv_at or sent.kv_at != sent.node_id

    @rule(node=NODES, num=st.integers(0, 5))
    def report(self, node: str, num: int) -> None:
        self.now += 0.06
        self.own.reported(node, facts(num), self.now)
        self.reported.add(node)

    @rule(node=NODES, is_open=st.booleans())
    def opens(self, node: str, is_open: bool) -> None:
        self.own.set_open(node, is_open)
        self.open[node] = is_open

    @rule(node=NODES)
    def loses(self, node: str) -> None:
        self.own.lost(node)
        self.reported.discard(node)

    @precondition(lambda self: self.reported)
    @rule(data=st.data())
    def removes(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.reported)))
        self.own.removed(node)
        self.reported.discard(node)
        self.open.pop(node, None)

    @rule(key=SESSIONS, urgent=st.booleans(), rank=st.integers(0, 2))
    def advise(self, key: tuple[str, str], urgent: bool, rank: int) -> None:
        self.num += 1
        self.advisories.append(f"a{self.num}")
        self.check(self.own.advised(key, f"a{self.num}", ask(is_urgent=urgent, rank=rank)))

    @rule(data=st.data())
    @precondition(lambda self: self.advisories)
    def retract(self, data: st.DataObject) -> None:
        self.own.retracted(data.draw(st.sampled_from(self.advisories)))

    @rule(key=SESSIONS, urgent=st.booleans(), is_ahead=st.booleans())
    def ask(self, key: tuple[str, str], urgent: bool, is_ahead: bool) -> None:
        self.num += 1
        self.now += 0.01
        asked = ask(f"r{self.num}", is_urgent=urgent)
        sent = (self.own.prepared if is_ahead else self.own.requested)(key, asked, self.now)
        self.check(sent)
        if sent.node_id is not None:
            self.under_way[asked.request_id] = sent.node_id
            assert self.own.home(key) == (sent.node_id if key[1] else "")

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_cut=st.booleans())
    def end(self, data: st.DataObject, is_cut: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.under_way)))
        del self.under_way[request_id]
        self.own.ended(request_id, num_tokens=50, is_cut=is_cut)

    @rule(key=SESSIONS)
    def forget(self, key: tuple[str, str]) -> None:
        self.own.forgotten(key)
        assert self.own.home(key) == ""

    @rule(key=SESSIONS, node=NODES)
    def place(self, key: tuple[str, str], node: str) -> None:
        self.own.placed(key, node)

    @invariant()
    def sums_are_right(self) -> None:
        self.own.check_invariants()
        for seen in self.own.facts():
            assert seen.is_open == self.open.get(seen.node_id, True)
            assert seen.num_urgent >= 0 and seen.queued.num >= 0 and seen.free_tokens >= 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
