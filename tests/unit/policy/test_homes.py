"""Where sessions are and what is on its way: two doors, what reports cannot tell yet, and failures, which only ever cost time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from engine_bridge.policy.nodes.routing import (
    POLICIES,
    CachedKv,
    LoadBalance,
    Relieve,
    RequestEstimate,
    Route,
    Sticky,
    relief,
    settings_of,
)
from engine_bridge.policy.nodes.session_locations import Doors, Homes, Sent, doors_of
from engine_bridge.protocol.node_facts import UNKNOWN, NodeFacts, PerfModel, Ranks

DOORS = Doors(LoadBalance(), Sticky(), LoadBalance())
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


# -- two doors ---------------------------------------------------------------------------------------------------------


def test_a_request_goes_where_its_advisory_went_and_is_told_where_the_kv_was() -> None:
    own = homes(5, 0)
    own.placed(KEY, "n0", 64)
    assert own.advised(KEY, "a", ask()) == Sent("n1", "n0", None, Route(node_id="n1"))
    own.reported("n1", facts(50), 1.0)
    assert own.requested(KEY, ask(), 1.0) == Sent("n1", "n0")
    assert own.home(KEY) == "n1"


def test_an_unannounced_request_stays_with_its_session_and_a_new_one_goes_by_load() -> None:
    own = homes(5, 0)
    own.placed(KEY, "n0")
    assert own.requested(KEY, ask("a"), 1.0).node_id == "n0"
    assert own.requested(("t", "new"), ask("b"), 1.0).node_id == "n1"
    assert own.home(("t", "new")) == "n1"


@pytest.mark.parametrize(("num_queued", "goes_to"), [(0, "n0"), (24, "n1")])
def test_an_unannounced_request_leaves_its_kv_only_where_that_node_is_overloaded(
    num_queued: int, goes_to: str
) -> None:
    own = homes()
    told = facts(4, perf=structs.replace(UNKNOWN, kv_fetch_token_s=1e-5))
    own.reported("n1", structs.replace(told, running=Ranks()), 0.0)
    own.reported("n0", structs.replace(told, queued=Ranks(num_queued), queued_tokens=num_queued * 500), 0.0)
    own.doors = doors_of("overture", own.facts())
    own.placed(KEY, "n0", 1000)
    assert own.requested(KEY, ask(num_prompt_tokens=1050), 1.0).node_id == goes_to
    assert own.home(KEY) == goes_to


def test_sessions_of_other_tenants_are_other_sessions() -> None:
    own = homes(0, 5)
    own.placed(("one", "s"), "n1")
    assert own.requested(("other", "s"), ask(), 1.0) == Sent("n0", "", None, Route(node_id="n0"))


def test_the_policy_is_told_where_the_session_is_and_how_much_of_the_prompt_has_kv_there() -> None:
    heard = Heard()
    own = homes(0, 0, doors=Doors(heard, heard, heard))
    own.placed(KEY, "n1", 64)
    own.advised(KEY, "a", ask(num_prompt_tokens=80))
    assert (heard.asks[0].home, heard.asks[0].kv) == ("n1", {"n1": CachedKv(64)})


def test_an_advisory_that_says_nothing_of_its_length_goes_on_from_what_the_session_was() -> None:
    heard = Heard()
    own = homes(0, 0, doors=Doors(heard, heard, heard))
    own.placed(KEY, "n1", 64)
    own.advised(KEY, "a", ask(num_prompt_tokens=0))
    assert (heard.asks[0].num_prompt_tokens, heard.asks[0].kv) == (64, {"n1": CachedKv(64)})


def test_an_advisory_of_which_nothing_came_moves_no_session() -> None:
    own = homes(5, 0)
    own.placed(KEY, "n0")
    own.advised(KEY, "a", ask())
    own.retracted("a")
    assert own.requested(KEY, ask(), 1.0).node_id == "n0"


def test_a_new_advisory_takes_the_place_of_the_sessions_last() -> None:
    own = homes(0, 1)
    assert own.advised(KEY, "a", ask()).node_id == "n0"
    own.reported("n0", facts(9), 1.0)
    second = own.advised(KEY, "b", ask())
    assert (second.node_id, second.over) == ("n1", ("n0", "a"))
    own.retracted("a")
    assert own.requested(KEY, ask(), 1.0).node_id == "n1"


def test_where_a_session_has_moved_from_is_told_once_its_kv_is_elsewhere() -> None:
    own = homes(5, 0)
    own.placed(KEY, "n0", 64)
    own.advised(KEY, "a", ask())
    own.requested(KEY, ask("moves"), 1.0)
    assert own.ended("moves", num_tokens=96) == "n0"
    own.requested(KEY, ask("stays"), 2.0)
    assert own.ended("stays", num_tokens=128) == ""
    assert own.ended("stays", num_tokens=128) == "", "it is over already"


@pytest.mark.parametrize("how", [{"is_cut": True}, {"num_tokens": 0}])
def test_what_is_left_behind_is_kept_where_nothing_is_known_to_be_elsewhere(how: dict[str, Any]) -> None:
    own = homes(5, 0)
    own.placed(KEY, "n0", 64)
    own.advised(KEY, "a", ask())
    own.requested(KEY, ask("moves"), 1.0)
    assert own.ended("moves", **how) == ""


def test_a_second_look_is_told_only_of_requests_that_are_there() -> None:
    heard = Heard()
    own = homes(0, 5, doors=Doors(LoadBalance(), Sticky(), Sticky(), heard))
    own.placed(KEY, "n1")
    own.advised(("t", "other"), "x", ask())
    own.advised(KEY, "a", ask())
    sent = own.requested(KEY, ask(), 1.0)
    assert [each.queued.num for each in heard.nodes[0]] == [0, 0]
    assert heard.asks[0].home == "n0", "its KV has moved there"
    assert (sent.node_id, sent.over) == ("n0", None)


def test_an_announced_request_goes_elsewhere_after_all_only_where_its_kv_is_near() -> None:
    # A token's KV takes 10 µs to the device and 100 µs over the network; 40 ms are at most waited for.
    perf = structs.replace(UNKNOWN, kv_token_s=1e-5, kv_fetch_token_s=1e-4)
    for num_tokens, stores, expected in (
        (300, ("", "", ""), "n2"),  # 33 ms
        (400, ("", "", ""), "n0"),  # 44 ms
        (400, ("one", "one", ""), "n1"),  # 4 ms where it shares host memory, though another is emptier
        (5_000, ("one", "one", "one"), "n0"),  # 50 ms
    ):
        own = Homes(Doors(LoadBalance(), Sticky(), LoadBalance(), relief(settings_of([facts(perf=perf)]))))
        for at, store in enumerate(stores):
            own.reported(f"n{at}", facts(perf=perf, store=store), 0.0)
        own.placed(KEY, "n0", num_tokens)
        own.advised(KEY, "a", ask(num_prompt_tokens=num_tokens))
        for at, (num_running, store) in enumerate(zip((3, 2, 1), stores, strict=True)):
            own.reported(f"n{at}", facts(num_running, perf=perf, store=store), 1.0)
        sent = own.requested(KEY, ask(num_prompt_tokens=num_tokens + 20), 1.0)
        assert sent.node_id == expected, (num_tokens, stores)
        assert sent.over == (("n0", "a") if expected != "n0" else None)


def test_slow_nodes_and_nodes_with_slow_disks_are_not_evened_out_by_numbers() -> None:
    perf = structs.replace(UNKNOWN, kv_token_s=1e-6, kv_fetch_token_s=1e-6)
    slow = structs.replace(perf, decode=PerfModel("mbgmv", 0.0, 0.09))
    busy_disk = structs.replace(perf, kv_disk_token_s=2 * perf.prompt_token_s)
    for there, other, expected in ((perf, perf, "n1"), (perf, slow, "n0"), (busy_disk, busy_disk, "n0")):
        own = Homes(Doors(LoadBalance(), Sticky(), LoadBalance(), relief(settings_of([facts(perf=perf)]))))
        own.reported("n0", facts(perf=there), 0.0)
        own.reported("n1", facts(perf=other), 0.0)
        own.placed(KEY, "n0", 100)
        own.advised(KEY, "a", ask())
        own.reported("n0", facts(4, perf=there), 1.0)
        own.reported("n1", facts(2, perf=other), 1.0)
        assert own.requested(KEY, ask(), 1.0).node_id == expected


def test_what_is_computed_ahead_goes_where_the_request_is_expected_or_at_home() -> None:
    own = homes(0, 5)
    own.placed(KEY, "n1")
    assert own.prepared(KEY, ask("a"), 1.0).node_id == "n1"
    own.advised(KEY, "adv", ask())
    assert own.prepared(KEY, ask("b"), 1.0) == Sent("n0", "n1")
    assert own.requested(KEY, ask("c"), 1.0) == Sent("n0"), "the advisory still stands, and all KV is there"


def test_a_request_of_no_session_leaves_nothing_behind() -> None:
    own = homes(0)
    own.advised(("t", ""), "a", ask("a"))
    own.requested(("t", ""), ask("b"), 1.0)
    assert (own.home(("t", "")), own.num_sessions("n0"), own.num_requests("n0")) == ("", 0, 1)
    own.check_invariants()


def test_by_itself_the_policy_that_reckons_with_speeds_takes_over_once_a_node_knows_its_own() -> None:
    unknown = doors_of("auto", [facts(), facts()])
    assert (unknown.announced.name, unknown.new.name) == ("relieve", "load_balance")
    known = doors_of("auto", [facts(), facts(perf=UNKNOWN)])
    assert {known.announced.name, known.unannounced.name, known.new.name} == {"overture"}
    assert unknown.unannounced.name == "sticky", "what moving costs is unknown at first"
    assert unknown.second is None and known.second is not None, "what KV takes is unknown at first"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_had_by_name_before_any_node_has_said_a_word(name: str) -> None:
    own = Homes(doors_of(name, ()))
    own.reported("n0", facts(), 0.0)
    assert own.advised(KEY, "a", ask()).node_id == "n0"
    assert own.doors.new.name == name


def test_what_its_kv_takes_to_the_device_is_told_of_its_home_and_of_nodes_that_fetch_it() -> None:
    perf = structs.replace(UNKNOWN, kv_token_s=1e-5, kv_disk_token_s=3e-5, kv_fetch_token_s=1e-4)
    for can_fetch in (True, False):
        heard = Heard()
        own = homes(0, 0, doors=Doors(heard, heard, heard))
        told = perf if can_fetch else structs.replace(perf, kv_fetch_token_s=None)
        own.reported("n1", facts(perf=told), 0.0)
        own.placed(KEY, "n1", 64)
        own.advised(KEY, "a", ask())
        (asked,) = heard.asks
        assert asked.kv["n1"].load_s == pytest.approx(64e-5)
        assert asked.kv_elsewhere.num_tokens == 64 * can_fetch
        # Over the network, to the device, and to disk once more.
        assert asked.kv_elsewhere.load_s == pytest.approx((64e-5 + 64e-4 + 64 * 3e-5) * can_fetch)


def test_of_what_is_on_its_way_only_what_has_no_kv_there_is_to_be_computed() -> None:
    own = homes(0, 0)
    own.placed(KEY, "n0", 64)
    own.requested(KEY, ask(), 1.0)
    own.requested(("t", "new"), ask("new"), 1.0)
    first, second = own.facts()
    assert (first.num_tokens, first.queued_tokens, first.queued.num) == (100, 36, 1)
    assert (second.num_tokens, second.queued_tokens) == (100, 100)


def test_what_a_node_says_of_its_speed_and_of_answers_stays_with_what_is_sent_to_it() -> None:
    own = homes(0)
    own.reported("n0", facts(perf=UNKNOWN, answer_tokens=50), 0.0)
    own.advised(KEY, "a", ask())
    own.requested(("t", "other"), ask("other"), 1.0)
    (seen,) = own.facts()
    assert (seen.perf, seen.answer_tokens, seen.queued.num) == (UNKNOWN, 50 + 10 + 10, 2)


# -- what reports cannot tell yet --------------------------------------------------------------------------------------


def test_requests_count_at_their_node_until_its_report_can_tell_of_them() -> None:
    own = homes(0, settle_s=0.1)
    own.requested(KEY, ask(num_prompt_tokens=100, rank=8, is_urgent=True), 1.0)
    (seen,) = own.facts()
    assert (seen.queued, seen.num_tokens, seen.queued_tokens) == (Ranks(1, 8, 8), 100, 100)
    assert (seen.free_tokens, seen.num_urgent) == (9_890, 1)
    own.reported("n0", facts(0), 1.05)
    assert own.facts()[0].queued.num == 1, "it was sent only just before"
    own.reported("n0", facts(1), 1.1)
    assert (own.facts()[0].running.num, own.facts()[0].queued.num) == (1, 0)
    assert own.facts()[0].num_urgent == 1


def test_a_burst_between_two_reports_is_spread() -> None:
    own = homes(0, 0, 0)
    placed = Counter(own.requested(("t", f"{at}"), ask(f"{at}"), 1.0).node_id for at in range(9))
    assert placed == {"n0": 3, "n1": 3, "n2": 3}


def test_announced_requests_count_where_they_are_expected() -> None:
    own = homes(0, 0)
    placed = Counter(own.advised(("t", f"{at}"), f"{at}", ask(rank=at)).node_id for at in range(4))
    assert placed == {"n0": 2, "n1": 2}
    assert [each.queued for each in own.facts()] == [Ranks(2, 2, 2), Ranks(2, 4, 3)]
    assert [each.queued.num for each in own.facts(with_expected=False)] == [0, 0]


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


def test_what_a_node_says_of_its_speed_is_passed_on_and_answers_to_come_are_counted() -> None:
    own = Homes(DOORS)
    own.reported("n0", facts(perf=UNKNOWN, answer_tokens=5), 0.0)
    own.requested(KEY, ask(), 1.0)
    assert (own.facts()[0].perf, own.facts()[0].answer_tokens) == (UNKNOWN, 15)


def test_a_request_that_has_ended_counts_no_more() -> None:
    own = homes(0)
    own.requested(KEY, ask(), 1.0)
    own.ended("r", num_tokens=110)
    own.ended("r")
    assert own.facts()[0].queued.num == own.num_requests("n0") == 0
    heard = Heard()
    own.doors = Doors(heard, heard, heard)
    own.requested(KEY, ask("next", num_prompt_tokens=200), 2.0)
    assert heard.asks[0].kv == {"n0": CachedKv(110)}


# -- nodes that come and go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["draining", "closed", "lost", "removed"])
def test_nothing_is_sent_to_a_node_that_takes_nothing(how: str) -> None:
    own = homes(0, 5)
    own.placed(KEY, "n0", 64)
    own.advised(KEY, "a", ask())
    match how:
        case "draining":
            own.set_open("n0", False)
        case "closed":
            own.reported("n0", facts(is_open=False), 1.0)
        case "lost":
            own.lost("n0")
        case "removed":
            own.removed("n0")
    sent = own.requested(KEY, ask(), 1.0)
    assert (sent.node_id, sent.kv_at) == ("n1", "n0")
    assert own.requested(("t", "new"), ask("new"), 1.0).node_id == "n1"
    own.check_invariants()


def test_a_lost_node_that_comes_back_has_its_sessions_and_nothing_that_was_expected() -> None:
    own = homes(0, 5)
    own.placed(KEY, "n0")
    own.advised(KEY, "a", ask())
    own.requested(("t", "x"), ask("x"), 1.0)
    own.lost("n0")
    assert [each.node_id for each in own.facts()] == ["n1"]
    own.reported("n0", facts(), 2.0)
    assert own.facts()[0].queued.num == 0
    assert own.requested(KEY, ask(), 2.0).node_id == "n0"


def test_a_request_that_failed_goes_elsewhere_and_its_session_is_where_it_was_before() -> None:
    own = homes(0, 1, 2)
    own.placed(KEY, "n2", 64)
    own.advised(KEY, "a", ask())
    assert own.requested(KEY, ask("first"), 1.0) == Sent("n0", "n2")
    own.ended("first", is_cut=True)
    assert own.home(KEY) == "n2"
    again = own.requested(KEY, ask("again"), 1.0, avoid={"n0"})
    assert (again.node_id, again.kv_at) == ("n2", "")


def test_where_nobody_can_serve_nothing_is_under_way() -> None:
    own = homes(0)
    adapter = ask(usual_load_s=None, adapter_load_s={})
    assert own.requested(KEY, adapter, 1.0).node_id is None
    assert own.advised(KEY, "a", adapter).node_id is None
    assert own.requested(KEY, ask(), 1.0, avoid={"n0"}).node_id is None
    assert own.prepared(KEY, adapter, 1.0).node_id is None
    assert Homes(DOORS).requested(KEY, ask(), 1.0).node_id is None
    own.check_invariants()


def test_only_nodes_with_the_adapter_are_asked_even_where_the_session_is_elsewhere() -> None:
    own = homes(0, 5)
    own.placed(KEY, "n0")
    sent = own.requested(KEY, ask(usual_load_s=None, adapter_load_s={"n1": 0.1}), 1.0)
    assert (sent.node_id, sent.kv_at) == ("n1", "n0")


def test_sessions_that_were_not_heard_of_for_longest_are_forgotten() -> None:
    own = homes(0, max_sessions=2)
    for name in ("a", "b"):
        own.placed(("t", name), "n0")
    own.advised(("t", "a"), "adv", ask())
    own.placed(("t", "c"), "n0")
    assert [own.home(("t", name)) for name in "abc"] == ["n0", "", "n0"]
    own.placed(("t", "d"), "n0")
    assert own.facts()[0].queued.num == 0, "with the session its advisory went"
    assert own.num_sessions("n0") == 2
    own.check_invariants()


# -- whatever happens --------------------------------------------------------------------------------------------------

NODES = st.sampled_from(["n0", "n1", "n2"])
SESSIONS = st.sampled_from([("t", "a"), ("t", "b"), ("u", "a"), ("t", "c"), ("t", "")])


class Machine(RuleBasedStateMachine):
    """Any order of events against what is simple to say of them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Homes(Doors(Relieve(), Sticky(), LoadBalance()), max_sessions=3)
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
