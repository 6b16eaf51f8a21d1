"""Who starts, who waits and why, and that nobody waits without bound."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_bridge.policy.scheduling.baselines import Fair, Fcfs, PriorityOrder, Sjf
from engine_bridge.policy.scheduling.fairness import fair_priority, starts_swapped
from engine_bridge.policy.scheduling.lanes import Lanes
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.mlq_decision import MlqSettings, earliest_start_s
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.policy.scheduling.queue_policy import (
    Decision,
    LanedPolicy,
    QueuePolicy,
    Running,
    StepRoom,
    Waiting,
)
from tests.unit.facts import running_facts, waiting_facts

TWO_LANES = Lanes.around([0.2, 0.8])
FOUR_LANES = Lanes.around([0.1, 0.3, 0.6, 0.9])
NOW = 100.0
MAX_OVERCHARGED_TOKENS = 300
AMPLE = StepRoom(free_blocks=10_000, num_slots=100, num_tokens=10_000)


request = partial(waiting_facts, arrived_s=NOW - MlqSettings().aging_s / 2)
runs = partial(running_facts, predicted_end_s=NOW + 5)


def room(**fields: Any) -> StepRoom:
    return msgspec.structs.replace(AMPLE, **fields)


def mlq(lanes: Lanes = TWO_LANES, quotas: tuple[int, ...] = (500, 500), **fields: Any) -> Mlq:
    """With a past of admissions, so that squashes are within the budget."""
    policy = Mlq(sum(quotas), MlqSettings(**fields))
    for at in range(100):
        policy.arrived(request(f"past{at}"), NOW)
        policy.admitted(f"past{at}", NOW)
        policy.ended(f"past{at}")
    refit(policy, lanes, quotas)
    return policy


def refit(
    policy: LanedPolicy, lanes: Lanes, quotas: Sequence[int], sizes: Mapping[str, float] | None = None
) -> None:
    """All at once."""
    policy.begin_refit(lanes, quotas, sizes)
    policy.advance_refit(sum(policy.num_waiting()))


def decide(
    policy: QueuePolicy,
    waiting: Iterable[Waiting],
    space: StepRoom = AMPLE,
    running: Iterable[Running] = (),
    now: float = NOW,
) -> Decision:
    """After all of them have arrived."""
    known = {facts.request_id: facts for facts in waiting}
    for facts in known.values():
        policy.arrived(facts, now)
    return policy.decide(known, {each.request_id: each for each in running}, space, now)


# -- one order ---------------------------------------------------------------------------------------------------------


def test_policies_go_by_their_names() -> None:
    assert {name: make(1000).name for name, make in POLICIES.items()} == {name: name for name in POLICIES}


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Fcfs(), ["long", "urgent", "short"]),
        (Sjf(), ["short", "urgent", "long"]),
        (PriorityOrder(), ["urgent", "long", "short"]),
    ],
)
def test_baselines_start_in_their_order(policy: QueuePolicy, order: list[str]) -> None:
    waiting = [
        request("short", arrived_s=3.0, duration_s=1.0),
        request("urgent", arrived_s=2.0, duration_s=2.0, priority=-1),
        request("long", arrived_s=1.0, duration_s=9.0),
    ]
    assert list(decide(policy, waiting).request_ids) == order


@pytest.mark.parametrize("name", ["fcfs", "sjf", "priority"])
def test_in_one_order_whoever_does_not_fit_blocks_all_behind(name: str) -> None:
    waiting = [
        request("first", arrived_s=1.0),
        request("big", arrived_s=2.0, num_blocks=20),
        request("last", arrived_s=3.0),
    ]
    decision = decide(POLICIES[name](1000), waiting, room(free_blocks=25))
    assert decision.request_ids == ("first",)
    assert decision.deferred == {"big": "no_blocks"}
    assert decision.reason("last") == "behind_head"


def test_it_says_what_is_missing() -> None:
    def why(space: StepRoom, **fields: Any) -> str:
        return decide(Fcfs(), [request("a", **fields)], space).reason("a")

    assert why(room(num_slots=0)) == "no_slot"
    assert why(room(free_blocks=9)) == "no_blocks"
    assert why(room(free_blocks=14), adapter_blocks=5, adapter_id=1) == "adapter_memory"


def test_an_adapter_that_two_bring_is_counted_once() -> None:
    both = [request(name, adapter_id=1, adapter_blocks=5) for name in "ab"]
    assert decide(Fcfs(), both, room(free_blocks=25)).request_ids == ("a", "b")
    others = [request(name, adapter_id=at, adapter_blocks=5) for at, name in enumerate("ab")]
    assert decide(Fcfs(), others, room(free_blocks=25)).request_ids == ("a",)
    unnamed = [request(name, adapter_blocks=5) for name in "ab"]
    assert decide(Fcfs(), unnamed, room(free_blocks=25)).request_ids == ("a",)


# -- waiting time over length ------------------------------------------------------------------------------------------


def test_fair_starts_by_waiting_time_over_length() -> None:
    waiting = [
        request("long", arrived_s=NOW - 10, size_tokens=1000),
        request("short", arrived_s=NOW - 5, size_tokens=100),
        request("new", arrived_s=NOW - 1, size_tokens=50),
    ]
    assert decide(Fair(), waiting).request_ids == ("short", "new", "long")


@given(st.lists(st.tuples(st.floats(0, 99), st.integers(1, 5000)), max_size=20))
def test_fair_is_out_of_order_by_less_than_a_factor_of_two(facts: list[tuple[float, int]]) -> None:
    waiting = {
        str(at): request(str(at), arrived_s=arrived_s, size_tokens=tokens)
        for at, (arrived_s, tokens) in enumerate(facts)
    }
    order = decide(Fair(), waiting.values()).request_ids
    assert sorted(order) == sorted(waiting)
    urgencies = [fair_priority(NOW - waiting[name].arrived_s, waiting[name].size_tokens) for name in order]
    for at, here in enumerate(urgencies):
        assert all(2 * here >= later for later in urgencies[at:])


@pytest.mark.parametrize(("swapped_wait_s", "first"), [(20.0, "swapped"), (10.0, "swapped"), (5.0, "fresh")])
def test_fair_starts_the_set_that_is_more_urgent_on_average(swapped_wait_s: float, first: str) -> None:
    waiting = [
        request("swapped", arrived_s=NOW - swapped_wait_s, is_swapped=True),
        request("fresh", arrived_s=NOW - 10),
    ]
    assert decide(Fair(), waiting).request_ids == (first,)


def test_only_what_fits_counts_in_the_mean() -> None:
    waiting = [
        request("swapped", arrived_s=NOW - 5, is_swapped=True),
        request("fresh", arrived_s=NOW - 10, num_blocks=99),
    ]
    assert decide(Fair(), waiting, room(free_blocks=50)).request_ids == ("swapped",)
    assert starts_swapped([1.0], [])
    assert not starts_swapped([], [1.0])
    assert not starts_swapped([], [])


def test_priority_is_waiting_time_over_length() -> None:
    assert fair_priority(10.0, 100) == pytest.approx(0.1)
    assert fair_priority(10.0, 10) > fair_priority(10.0, 100)
    assert fair_priority(10.0, 100, weight=3.0) == pytest.approx(0.3)
    assert fair_priority(-1.0, 0) == 0.0


# -- lanes and quotas --------------------------------------------------------------------------------------------------


def test_small_ones_start_beside_a_large_one_that_does_not_fit() -> None:
    waiting = [
        request("large", weighted_size=0.9, arrived_s=1.0, num_blocks=500),
        request("small", weighted_size=0.1),
    ]
    decision = decide(mlq(max_wait_s=1e9), waiting, room(free_blocks=100))
    assert decision.request_ids == ("small",)
    assert decision.deferred == {"large": "no_blocks"}


def test_a_lane_starts_the_smallest_first_within_its_quota() -> None:
    waiting = [
        request(name, weighted_size=weighted_size, size_tokens=200)
        for name, weighted_size in zip("cab", (0.3, 0.1, 0.2), strict=True)
    ]
    waiting.append(request("large", weighted_size=0.9, size_tokens=450))
    decision = decide(mlq(), waiting)
    assert decision.request_ids == ("a", "b", "large")
    assert decision.deferred == {"c": "lane_quota"}


def test_unused_quota_is_offered_from_the_top_lane_down() -> None:
    waiting = [request(f"s{at}", size_tokens=200, weighted_size=0.1 + at / 100) for at in range(4)]
    decision = decide(mlq(FOUR_LANES, (200, 200, 200, 200)), waiting)
    assert decision.request_ids == ("s0", "s1", "s2", "s3")


def test_a_lane_whose_head_can_use_its_quota_does_not_lend_it() -> None:
    policy = mlq()
    running = request("running", weighted_size=0.8, size_tokens=300)
    policy.arrived(running, NOW)
    policy.admitted("running", NOW)
    waiting = [
        request("large", weighted_size=0.9, size_tokens=400),
        request("small", weighted_size=0.1, size_tokens=600),
    ]
    decision = decide(policy, waiting)
    assert decision.request_ids == ("large",)
    assert decision.deferred == {"small": "lane_quota"}, (
        "there were 700 tokens, 200 of them the other lane's own"
    )


def test_heads_larger_than_their_quotas_do_not_lock_each_other_out() -> None:
    waiting = [
        request("one", weighted_size=0.1, size_tokens=600),
        request("other", weighted_size=0.9, size_tokens=600),
    ]
    assert decide(mlq(), waiting).request_ids == ("one",)


def test_one_larger_than_the_room_of_now_runs_alone() -> None:
    assert decide(mlq(), [request("giant", size_tokens=800)], room(num_tokens=600)).request_ids == ("giant",)
    overdue = request("giant", size_tokens=800, arrived_s=0.0)
    assert decide(mlq(), [overdue], room(num_tokens=600)).request_ids == ("giant",)


def test_one_larger_than_all_there_is_runs_alone() -> None:
    policy = mlq()
    assert decide(policy, [request("giant", size_tokens=10**6)]).request_ids == ("giant",)
    policy.admitted("giant", NOW)
    assert policy.ledger.num_used == 1000
    assert decide(policy, [request("next", size_tokens=1)]).request_ids == ()
    policy.ended("giant")
    assert policy.ledger.num_used == 0


def test_what_ran_before_a_new_fit_comes_back_after_it() -> None:
    policy = mlq()
    decide(policy, [request("a", weighted_size=0.9, size_tokens=300), request("b", weighted_size=0.6)])
    policy.admitted("a", NOW)
    refit(policy, FOUR_LANES, (250, 250, 250, 250), {"b": 0.35})
    assert (policy.lane_of("a"), policy.lane_of("b"), policy.lane_of("nobody")) == (3, 1, None)
    assert policy.ledger.used == (0, 0, 0, 300)
    assert policy.num_waiting() == (0, 1, 0, 0)
    policy.ended("a")
    policy.ended("b")
    policy.check_invariants()
    assert policy.ledger.num_used == sum(policy.num_waiting()) == 0
    with pytest.raises(ValueError, match="quota"):
        refit(policy, FOUR_LANES, (1, 2))


class EverySecond(Mapping[str, float]):
    """A size for each name that is an even number, worked out on demand."""

    def __init__(self, factor: int = 37) -> None:
        self.factor, self.num_looked_up = factor, 0

    def __getitem__(self, name: str) -> float:
        self.num_looked_up += 1
        if not name.isdigit() or int(name) % 2:
            raise KeyError(name)
        return int(name) * self.factor % 100 / 100

    def __iter__(self) -> Any:
        raise AssertionError("sizes are looked up one by one")

    def __len__(self) -> int:
        raise AssertionError("sizes are looked up one by one")


def test_a_refit_moves_no_more_at_a_time_than_it_may() -> None:
    policy, sizes = mlq(), EverySecond()
    for at in range(100):
        policy.arrived(request(str(at)), NOW)
    policy.begin_refit(FOUR_LANES, (250, 250, 250, 250), sizes)
    assert sizes.num_looked_up == 0
    for step in range(9):
        assert not policy.advance_refit(11)
        assert sizes.num_looked_up == 11 * (step + 1)
        assert policy.lanes == TWO_LANES
        assert policy.ledger.quotas == (500, 500)
    assert policy.advance_refit(11)
    assert policy.lanes == FOUR_LANES
    assert policy.ledger.quotas == (250, 250, 250, 250)
    assert policy.advance_refit(11), "there is nothing left to do"
    lanes = [FOUR_LANES.lane_of(at * 37 % 100 / 100 if at % 2 == 0 else 0.1) for at in range(100)]
    assert [policy.lane_of(str(at)) for at in range(100)] == lanes
    assert policy.num_waiting() == tuple(lanes.count(lane) for lane in range(4))


def test_a_refit_takes_the_place_of_one_that_is_not_done() -> None:
    policy = mlq()
    for at in range(10):
        policy.arrived(request(str(at)), NOW)
    policy.begin_refit(Lanes.around([0.5]), (1000,))
    assert not policy.advance_refit(5)
    policy.begin_refit(FOUR_LANES, (250, 250, 250, 250))
    assert not policy.advance_refit(9)
    assert policy.advance_refit(1)
    assert policy.lanes == FOUR_LANES
    with pytest.raises(ValueError, match="quota"):
        policy.begin_refit(FOUR_LANES, (1, 2))


def test_one_that_outgrows_its_guess_holds_what_it_holds() -> None:
    policy = mlq()
    decide(policy, [request("wrong", size_tokens=50)])
    policy.admitted("wrong", NOW)
    policy.outgrew("wrong", 990)
    policy.outgrew("nobody", 990)
    assert policy.ledger.num_used == 990
    assert decide(policy, [request("next", size_tokens=50)]).deferred == {"next": "lane_quota"}


def test_tokens_that_are_never_held_at_one_time_are_lent() -> None:
    policy = mlq()
    decide(policy, [request("runs", size_tokens=900)])
    policy.admitted("runs", NOW)
    following = request("next", size_tokens=250)
    assert decide(policy, [following], room(overcharged_tokens=149)).deferred == {"next": "lane_quota"}
    assert policy.decide({"next": following}, {}, room(overcharged_tokens=150), NOW).request_ids == ("next",)


# -- order in a lane ---------------------------------------------------------------------------------------------------


def test_a_lower_priority_number_goes_first_in_and_between_lanes() -> None:
    waiting = [
        request("small", weighted_size=0.1),
        request("first", weighted_size=0.2, priority=-1),
        request("large", weighted_size=0.9, priority=-2),
    ]
    assert decide(mlq(), waiting).request_ids == ("large", "first", "small")
    assert decide(mlq(), waiting, room(num_slots=1)).request_ids == ("large",)


def test_a_flood_of_one_tenant_goes_behind_the_first_of_another() -> None:
    flood = [request(f"flood{at}", weighted_size=0.01, tenant="loud") for at in range(50)]
    decision = decide(mlq(), [*flood, request("modest", tenant="quiet")], room(num_slots=2))
    assert "modest" in decision.request_ids


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_get_tokens_by_their_weights(weight: float) -> None:
    policy = mlq(quotas=(10**9, 1), max_wait_s=1e9)
    waiting = {}
    for at in range(200):
        for facts in (request(f"a{at}", tenant="a", weight=weight), request(f"b{at}", tenant="b")):
            policy.arrived(facts, NOW)
            waiting[facts.request_id] = facts
    served = {"a": 0, "b": 0}
    for _ in range(100):  # one at a time: what was given before counts
        (name,) = policy.decide(waiting, {}, room(num_slots=1, num_tokens=10**9), NOW).request_ids
        policy.admitted(name, NOW)
        served[name[0]] += 1
    assert served["a"] / served["b"] == pytest.approx(weight, rel=0.1)
    together = policy.decide(waiting, {}, room(num_slots=40, num_tokens=10**9), NOW).request_ids
    num_a = sum(name[0] == "a" for name in together)
    assert num_a / (40 - num_a) == pytest.approx(weight, rel=0.15)


def test_of_a_tenant_that_waits_nothing_is_taken() -> None:
    policy = mlq(FOUR_LANES, (10**9, 1, 1, 1))
    waiting = {"big": request("big", weighted_size=0.9, tenant="modest", num_blocks=20_000)}
    policy.arrived(waiting["big"], NOW)
    for at in range(20):
        policy.arrived(request(f"loud{at}", tenant="loud"), NOW)
        policy.admitted(f"loud{at}", NOW)
    # Its level is nothing still, since it has been waiting all the time: it has as much before it as the other was given.
    for at in range(20):
        for facts in (
            request(f"m{at}", weighted_size=0.15, tenant="modest"),
            request(f"l{at}", tenant="loud"),
        ):
            waiting[facts.request_id] = facts
            policy.arrived(facts, NOW)
    chosen = policy.decide(waiting, {}, room(num_slots=19, num_tokens=10**9), NOW).request_ids
    assert {name[0] for name in chosen} == {"m"}


facts_of_many = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 40), st.sampled_from([0.5, 1.0, 100.0])),
    max_size=25,
)


@given(
    facts_of_many,
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), max_size=10),
    st.integers(0, 12),
)
def test_tenants_take_turns_by_what_they_were_given(
    fields: list[tuple[int, int, int, float]], past: list[tuple[int, int]], num_slots: int
) -> None:
    """Against the rule in its plainest words. All sizes differ, all in one lane."""
    policy = Mlq(10**9)
    given = dict.fromkeys(map(str, range(6)), 0.0)
    waiting = {
        str(at): request(
            str(at),
            weighted_size=size + at / 100,
            size_tokens=size,
            priority=priority,
            tenant=str(tenant),
            weight=weight,
        )
        for at, (priority, tenant, size, weight) in enumerate(fields)
    }
    for facts in waiting.values():
        policy.arrived(facts, NOW)
    tenants = {facts.tenant for facts in waiting.values()}
    for at, (tenant, tokens) in enumerate(past):
        if str(tenant) in tenants:
            policy.arrived(request(f"past{at}", tenant=str(tenant), size_tokens=tokens), NOW)
            policy.admitted(f"past{at}", NOW)
            policy.ended(f"past{at}")
            given[str(tenant)] += tokens
    expected: list[str] = []
    left = dict(waiting)
    while left and len(expected) < num_slots:
        first = min(
            left.values(),
            key=lambda facts: (facts.priority, given[facts.tenant], facts.tenant, facts.weighted_size),
        )
        given[first.tenant] += first.size_tokens / first.weight
        expected.append(left.pop(first.request_id).request_id)
    space = room(num_slots=num_slots, num_tokens=10**9, free_blocks=10**9)
    assert list(policy.decide(waiting, {}, space, NOW).request_ids) == expected
    policy.check_invariants()


def test_idling_saves_nothing_up() -> None:
    policy = mlq(quotas=(10**9, 1))
    busy = {f"b{at}": request(f"b{at}", tenant="busy") for at in range(100)}
    for name, facts in busy.items():
        policy.arrived(facts, NOW)
        if name != "b99":
            policy.admitted(name, NOW)
    late = {f"l{at}": request(f"l{at}", tenant="late") for at in range(10)}
    for facts in late.values():
        policy.arrived(facts, NOW)
    chosen = policy.decide(busy | late, {}, room(num_slots=3, num_tokens=10**9), NOW).request_ids
    assert "b99" in chosen


def test_one_that_has_waited_for_long_goes_before_smaller_ones() -> None:
    waiting = [
        request("small", weighted_size=0.1, size_tokens=10),
        request("old", weighted_size=0.3, size_tokens=400, arrived_s=NOW - 15),
        request("older", weighted_size=0.3, size_tokens=3200, arrived_s=NOW - 20),
    ]
    policy = mlq(quotas=(5000, 5000))
    assert decide(policy, waiting).request_ids == ("old", "older", "small")


def test_long_is_from_the_very_second_on() -> None:
    waiting = [
        request("small", weighted_size=0.1),
        request("old", weighted_size=0.3, arrived_s=NOW - MlqSettings().aging_s),
    ]
    assert decide(mlq(), waiting).request_ids == ("old", "small")
    overdue = request("overdue", weighted_size=0.9, arrived_s=NOW - 60, priority=9)
    assert decide(mlq(), [*waiting, overdue]).request_ids == ("overdue", "old", "small")


def test_one_that_was_swapped_out_goes_first() -> None:
    waiting = [request("small", weighted_size=0.05), request("half done", weighted_size=0.3, is_swapped=True)]
    assert decide(mlq(), waiting).request_ids == ("half done", "small")


def test_warm_ones_go_first_only_where_all_start() -> None:
    waiting = [request("small", weighted_size=0.05), request("warm", weighted_size=0.2, is_warm=True)]
    assert decide(mlq(), waiting).request_ids == ("warm", "small")
    assert decide(mlq(), waiting, room(num_slots=1)).request_ids == ("small",)
    urgent = [request("urgent", priority=-1), request("warm", is_warm=True)]
    assert decide(mlq(), urgent).request_ids == ("urgent", "warm")


def test_without_a_slot_all_wait_for_one() -> None:
    decision = decide(mlq(), [request("a"), request("b")], room(num_slots=0))
    assert (decision.reason("a"), decision.reason("b")) == ("no_slot", "no_slot")


plain = st.builds(
    request,
    request_id=st.uuids().map(str),
    weighted_size=st.floats(0, 1),
    size_tokens=st.integers(1, 400),
    num_blocks=st.integers(1, 40),
    is_swapped=st.booleans(),
)


@given(st.lists(plain, max_size=20, unique_by=lambda facts: facts.request_id), st.integers(0, 150))
def test_a_lane_skips_nobody_but_in_a_bypass(waiting: list[Waiting], free_blocks: int) -> None:
    decision = decide(mlq(), waiting, room(free_blocks=free_blocks))
    for lane in (0, 1):
        own = [facts for facts in waiting if TWO_LANES.lane_of(facts.weighted_size) == lane]
        own.sort(key=lambda facts: (not facts.is_swapped, facts.weighted_size, facts.request_id))
        started = [name for name in decision.request_ids if name not in decision.bypassed]
        started = [name for name in started if name in {facts.request_id for facts in own}]
        assert started == [facts.request_id for facts in own[: len(started)]]


# -- nobody waits for ever ---------------------------------------------------------------------------------------------


def test_overdue_ones_start_in_order_of_arrival_before_all_others() -> None:
    waiting = [
        request("urgent", priority=-9, weighted_size=0.01),
        request("second", weighted_size=0.1, arrived_s=NOW - 60, priority=5),
        request("first", weighted_size=0.9, arrived_s=NOW - 61, priority=9),
    ]
    assert decide(mlq(), waiting).request_ids == ("first", "second", "urgent")


def test_among_overdue_ones_being_warm_counts_for_nothing() -> None:
    waiting = [request("first", arrived_s=1.0), request("warm", arrived_s=2.0, is_warm=True)]
    assert decide(mlq(), waiting).request_ids == ("first", "warm")


def test_a_late_bypasser_makes_room_for_an_overdue_one() -> None:
    overdue = request("overdue", arrived_s=0.0, num_blocks=50)
    assert decide(mlq(), [overdue], room(free_blocks=25), [LATE]).squash == ("late",)


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (room(free_blocks=15), "no_blocks"),
        (room(num_tokens=150), "lane_quota"),
        (room(num_slots=0), "no_slot"),
    ],
)
def test_nothing_passes_an_overdue_one(space: StepRoom, reason: str) -> None:
    policy = mlq()
    policy.arrived(request("running"), NOW)
    policy.admitted("running", NOW)
    overdue = request("overdue", arrived_s=0.0, num_blocks=20)
    small = request("small", size_tokens=1, num_blocks=1, duration_s=0.1, is_warm=True)
    decision = decide(policy, [overdue, small], space, [runs("running", predicted_end_s=NOW + 100)])
    assert decision.request_ids == ()
    assert decision.deferred == {"overdue": reason}


# -- bypass ------------------------------------------------------------------------------------------------------------

HEAD = request("head", weighted_size=0.1, num_blocks=20, adapter_id=1, adapter_blocks=30)
SOON = runs("soon", num_blocks=40, predicted_end_s=NOW + 5)


def passing(policy: Mlq, head: Waiting = HEAD, **fields: Any) -> Decision:
    follower = request("follower", **({"weighted_size": 0.2, "duration_s": 4.0} | fields))
    return decide(policy, [head, follower], room(free_blocks=25), [SOON])


def test_one_that_will_be_gone_in_time_passes_a_head_without_memory() -> None:
    decision = passing(mlq())
    assert decision.request_ids == ("follower",)
    assert decision.bypassed == {"follower": "head"}
    assert decision.deferred == {"head": "adapter_memory"}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"duration_s": 5.1}, id="it would still run"),
        pytest.param({"num_blocks": 26}, id="it does not fit"),
        pytest.param({"size_tokens": 501}, id="beyond the lane's quota"),
        pytest.param({"times_squashed": 1}, id="its prediction failed before"),
    ],
)
def test_others_do_not_pass(fields: dict[str, Any]) -> None:
    assert passing(mlq(), **fields).request_ids == ()


def test_a_head_is_passed_so_many_times_at_most() -> None:
    passed = msgspec.structs.replace(HEAD, times_bypassed=16)
    assert passing(mlq(), passed).request_ids == ()
    assert passing(mlq(max_bypassed=17), passed).request_ids == ("follower",)
    once = msgspec.structs.replace(HEAD, times_bypassed=15)
    small = [request(name, weighted_size=0.2, num_blocks=5) for name in "ab"]
    assert decide(mlq(), [once, *small], room(free_blocks=25), [SOON]).bypassed == {"a": "head"}


def test_nobody_passes_while_no_squash_is_left_to_mend_it() -> None:
    policy = mlq()
    for _ in range(5):
        assert passing_again(policy)
        policy.squashed("late")
    assert not passing_again(policy)


def passing_again(policy: Mlq) -> bool:
    decision = passing(policy)
    for name in ("head", "follower"):
        policy.ended(name)
    return bool(decision.request_ids)


def test_a_head_without_quota_is_not_passed() -> None:
    policy = mlq()
    head, follower = request("head", size_tokens=1001), request("follower", weighted_size=0.2)
    policy.arrived(request("running", weighted_size=0.9), NOW)
    policy.admitted("running", NOW)
    assert decide(policy, [head, follower], running=[SOON]).request_ids == ()


def test_warm_ones_are_asked_first_to_pass() -> None:
    cold = request("cold", weighted_size=0.2, num_blocks=20)
    warm = request("warm", weighted_size=0.3, num_blocks=20, is_warm=True)
    decision = decide(mlq(), [HEAD, cold, warm], room(free_blocks=25), [SOON])
    assert decision.bypassed == {"warm": "head"}
    urgent = [msgspec.structs.replace(each, priority=-1) for each in (HEAD, cold)]
    decision = decide(mlq(), [*urgent, warm], room(free_blocks=25), [SOON])
    assert decision.bypassed == {"cold": "head"}, "priority counts for more"


def test_one_that_was_swapped_out_long_ago_is_counted_once() -> None:
    waiting = [
        msgspec.structs.replace(HEAD, is_swapped=True, arrived_s=NOW - 20),
        request("old", weighted_size=0.2, is_swapped=True, arrived_s=NOW - 20),
        request("new", weighted_size=0.3, num_blocks=15),
    ]
    decision = decide(mlq(), waiting, room(free_blocks=25), [SOON])
    assert decision.bypassed == {"old": "head", "new": "head"}


def test_a_head_that_was_passed_goes_before_the_heads_of_other_lanes() -> None:
    large = request("large", weighted_size=0.9, num_blocks=20, times_bypassed=1)
    small = request("small", num_blocks=20)
    assert decide(mlq(), [large, small], room(free_blocks=25)).request_ids == ("large",)


def test_when_a_head_could_start() -> None:
    ends = [
        runs("a", predicted_end_s=NOW - 3),
        runs("b", predicted_end_s=NOW + 2),
        runs("c", predicted_end_s=NOW + 4),
    ]
    assert [earliest_start_s(missing, ends, NOW) for missing in (0, 10, 11, 30, 99)] == [
        NOW,
        NOW,
        NOW + 2,
        NOW + 4,
        NOW + 4,
    ]


# -- squash ------------------------------------------------------------------------------------------------------------

LATE = runs("late", is_bypasser=True, predicted_end_s=NOW - 1, num_blocks=30)


def squashes(policy: Mlq, *running: Running, free_blocks: int = 25) -> tuple[str, ...]:
    return decide(policy, [HEAD], room(free_blocks=free_blocks), running).squash


def test_a_bypasser_that_is_late_is_squashed_where_that_lets_the_head_start() -> None:
    assert squashes(mlq(), LATE) == ("late",)
    assert squashes(mlq(), LATE, free_blocks=10) == (), "it would not help"
    assert squashes(mlq(), LATE, free_blocks=50) == (), "the head starts anyway"
    assert squashes(mlq(), msgspec.structs.replace(LATE, is_bypasser=False)) == ()
    assert squashes(mlq(), msgspec.structs.replace(LATE, predicted_end_s=NOW)) == ()


def test_a_bypasser_whose_end_was_put_off_is_late_all_the_same() -> None:
    put_off = msgspec.structs.replace(LATE, predicted_end_s=NOW + 5, promised_end_s=NOW - 1)
    assert squashes(mlq(), put_off) == ("late",)
    assert squashes(mlq(), msgspec.structs.replace(put_off, promised_end_s=NOW)) == ()


def test_no_more_are_squashed_than_needed() -> None:
    more = [msgspec.structs.replace(LATE, request_id=f"late{at}", num_blocks=5) for at in range(3)]
    assert squashes(mlq(), *more, LATE) == ("late",)


def test_of_two_heads_the_one_that_needs_less_is_helped() -> None:
    large = request("large", weighted_size=0.9, num_blocks=90)
    assert decide(mlq(), [HEAD, large], room(free_blocks=25), [LATE]).squash == ("late",)


def test_nobody_is_squashed_where_the_share_does_not_suffice_for_the_head() -> None:
    halves = [msgspec.structs.replace(LATE, request_id=name, num_blocks=15) for name in "ab"]
    policy = mlq()
    assert squashes(policy, *halves) == ("a", "b")
    policy.ended("head")
    for _ in range(4):
        policy.squashed("earlier")
    assert squashes(policy, *halves) == ()


def test_squashes_of_long_ago_count_for_less() -> None:
    policy = mlq()  # 100 admitted
    for _ in range(50):
        policy.squashed("late")
    for at in range(1900):
        policy.arrived(request(str(at)), NOW)
        policy.admitted(str(at), NOW)
        policy.ended(str(at))
    # Counted as 25 of 1,000 now.
    for _ in range(25):
        assert squashes(policy, LATE) == ("late",)
        policy.squashed("late")
        policy.ended("head")
    assert squashes(policy, LATE) == ()


def test_squashes_stay_within_their_share() -> None:
    assert squashes(Mlq(1000), LATE) == (), "nothing has been admitted yet"
    policy = mlq()  # 100 admitted
    for _ in range(5):
        assert squashes(policy, LATE) == ("late",)
        policy.squashed("late")
        policy.ended("head")
    assert squashes(policy, LATE) == ()


# -- hooks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_left_is_forgotten_and_comes_but_once(name: str) -> None:
    policy = POLICIES[name](1000)
    policy.arrived(request("a"), NOW)
    with pytest.raises(ValueError, match="waits"):
        policy.arrived(request("a"), NOW)
    policy.ended("a")
    policy.ended("a")
    policy.outgrew("a", 10)
    with pytest.raises(KeyError):
        policy.admitted("a", NOW)
    assert policy.decide({}, {}, AMPLE, NOW) == Decision()
    assert decide(policy, [request("a")]).request_ids == ("a",)


def test_mlq_refuses_what_runs_and_weights_of_nothing() -> None:
    policy = mlq()
    for wrong in (request("a", weight=0.0), request("running")):
        if wrong.request_id == "running":
            policy.arrived(wrong, NOW)
            policy.admitted("running", NOW)
        with pytest.raises(ValueError, match="weight"):
            policy.arrived(wrong, NOW)


def test_tenants_that_come_and_go_are_forgotten() -> None:
    policy = mlq(quotas=(10**9, 1))
    for at in range(5000):
        policy.arrived(request(str(at), tenant=str(at)), NOW)
        policy.admitted(str(at), NOW)
        policy.ended(str(at))
    assert len(policy._service._given) <= 1025


# -- any calls ---------------------------------------------------------------------------------------------------------

some_requests = st.builds(
    dict,
    arrived_s=st.floats(0, 50),
    weighted_size=st.floats(0, 1),
    size_tokens=st.integers(0, 1500),
    num_blocks=st.integers(0, 60),
    duration_s=st.floats(0, 30),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from("ab"),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    adapter_id=st.none() | st.integers(0, 2),
    adapter_blocks=st.integers(0, 10),
    is_warm=st.booleans(),
    is_swapped=st.booleans(),
)


class MlqMachine(RuleBasedStateMachine):
    """Any order of calls that a driver may make, also one that starts fewer than were decided.

    Its twin is told the same, but gets new lanes at once, when the first has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = mlq(FOUR_LANES, (250, 250, 250, 250))
        self.twin = mlq(FOUR_LANES, (250, 250, 250, 250))
        self.fitted: tuple[Lanes, tuple[int, ...], EverySecond] | None = None
        self.now = 50.0
        self.count = 0
        self.waiting: dict[str, Waiting] = {}
        self.running: dict[str, Running] = {}
        self.facts: dict[str, Waiting] = {}
        self.outgrown = 0

    @rule(fields=some_requests)
    def arrive(self, fields: dict[str, Any]) -> None:
        self.count += 1
        self.enqueue(request(str(self.count), **fields))

    def tell(self, hook: str, *args: Any) -> None:
        for policy in (self.policy, self.twin):
            getattr(policy, hook)(*args)

    def enqueue(self, facts: Waiting) -> None:
        self.tell("arrived", facts, self.now)
        self.waiting[facts.request_id] = self.facts[facts.request_id] = facts

    @rule(
        passed_s=st.floats(0, 20),
        free_blocks=st.integers(0, 150),
        num_slots=st.integers(0, 6),
        num_tokens=st.sampled_from([600, 1000, 2000]),
        num_started=st.integers(0, 6),
        overcharged_tokens=st.sampled_from([0, MAX_OVERCHARGED_TOKENS]),
    )
    def step(self, passed_s: float, num_started: int, **space_fields: int) -> None:
        self.now += passed_s
        space = StepRoom(**space_fields)
        decision = self.policy.decide(self.waiting, self.running, space, self.now)
        assert decision == self.policy.decide(self.waiting, self.running, space, self.now), "state changed"
        assert decision == self.twin.decide(self.waiting, self.running, space, self.now), (
            "half of a refit counts"
        )
        self.check(decision, space)
        for name in decision.squash:
            facts = msgspec.structs.replace(
                self.facts[name], times_squashed=self.facts[name].times_squashed + 1
            )
            self.tell("squashed", name)
            self.leave(name)
            self.enqueue(facts)
        for name in decision.request_ids[:num_started]:
            self.start(self.waiting.pop(name), name in decision.bypassed)

    def check(self, decision: Decision, space: StepRoom) -> None:
        chosen = [self.waiting[name] for name in decision.request_ids]
        assert len({facts.request_id for facts in chosen}) == len(chosen) <= space.num_slots
        assert not set(decision.request_ids) & set(decision.deferred)
        adapters = {
            facts.adapter_id: facts.adapter_blocks
            for facts in reversed(chosen)
            if facts.adapter_id is not None
        }
        least = sum(facts.num_blocks for facts in chosen)
        least += sum(facts.adapter_blocks for facts in chosen if facts.adapter_id is None)
        least += sum(
            min(facts.adapter_blocks for facts in chosen if facts.adapter_id == adapter_id)
            for adapter_id in adapters
        )
        assert not chosen or least <= space.free_blocks
        tokens = sum(min(facts.size_tokens, 1000, space.num_tokens) for facts in chosen)
        assert not tokens or self.policy.ledger.num_used + tokens <= (
            min(1000, space.num_tokens) + space.overcharged_tokens
        )
        assert set(decision.bypassed) <= set(decision.request_ids)
        assert set(decision.squash) <= {name for name, each in self.running.items() if each.is_bypasser}
        overdue = sorted(
            (facts.arrived_s, name)
            for name, facts in self.waiting.items()
            if self.now - facts.arrived_s >= 60
        )
        if [name for _, name in overdue] != list(decision.request_ids[: len(overdue)]):
            assert list(decision.request_ids) == [name for _, name in overdue][: len(chosen)], (
                "one was passed"
            )

    def start(self, facts: Waiting, is_bypasser: bool) -> None:
        self.tell("admitted", facts.request_id, self.now)
        self.running[facts.request_id] = runs(
            facts.request_id,
            num_blocks=facts.num_blocks,
            predicted_end_s=self.now + facts.duration_s,
            is_bypasser=is_bypasser,
        )

    def leave(self, name: str) -> None:
        self.tell("ended", name)
        self.waiting.pop(name, None)
        self.running.pop(name, None)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), is_preempted=st.booleans())
    def end(self, data: st.DataObject, is_preempted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting | self.running)))
        was_running = name in self.running
        self.leave(name)
        if is_preempted and was_running:
            self.enqueue(msgspec.structs.replace(self.facts[name], is_swapped=True))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size_tokens=st.integers(0, 3000))
    def outgrow(self, data: st.DataObject, size_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        before = self.policy.ledger.num_used
        self.tell("outgrew", name, size_tokens)
        self.outgrown += self.policy.ledger.num_used - before

    @rule(lanes=st.sampled_from([FOUR_LANES, TWO_LANES, Lanes.around([0.5])]))
    def refit(self, lanes: Lanes) -> None:
        self.fitted = (lanes, (1000 // lanes.num_lanes,) * lanes.num_lanes, EverySecond(self.count + 1))
        self.policy.begin_refit(*self.fitted)

    @precondition(lambda self: self.fitted)
    @rule(num=st.integers(0, 4))
    def place(self, num: int) -> None:
        if self.policy.advance_refit(num) and self.fitted:
            refit(self.twin, *self.fitted)
            self.fitted = None

    @invariant()
    def nothing_is_lost_or_leaked(self) -> None:
        self.policy.check_invariants()
        assert sum(self.policy.num_waiting()) == len(self.waiting)
        assert len(self.policy.ledger) == len(self.running)
        assert self.policy.ledger.num_used <= 1000 + MAX_OVERCHARGED_TOKENS + self.outgrown

    def teardown(self) -> None:
        for name in [*self.waiting, *self.running]:
            self.tell("ended", name)
        self.policy.check_invariants()
        assert self.policy.ledger.num_used == sum(self.policy.num_waiting()) == 0


TestMlq = MlqMachine.TestCase
TestMlq.settings = settings(max_examples=80, stateful_step_count=40)


# -- simulated traffic -------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """What comes, and how wrong its prediction is. wrong: prediction over truth, of output and duration."""

    name: str
    arrived_s: float
    input_tokens: int
    output_tokens: int
    wrong: float
    weighted_size: float
    priority: int = 0
    tenant: str = ""
    done_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None
    times_bypassed: int = 0
    times_squashed: int = 0

    @property
    def duration_s(self) -> float:
        return self.output_tokens / 50

    @property
    def held_tokens(self) -> int:
        share = min(self.done_s / self.duration_s, 1.0)
        return self.input_tokens + int(self.output_tokens * share)

    @property
    def guess_tokens(self) -> int:
        return self.input_tokens + max(int(self.output_tokens * self.wrong), 1)

    @property
    def most_tokens(self) -> int:
        """That it may ever be charged."""
        return max(self.guess_tokens, 2 * (self.input_tokens + self.output_tokens))


BLOCK = 16
STEP_S = 0.25


@dataclass
class Engine:
    """Runs jobs step by step as a policy decides; preempts the one that started last when memory runs out."""

    policy: QueuePolicy
    num_blocks: int
    num_slots: int
    num_tokens: int
    now: float = 0.0
    waiting: dict[str, Job] = field(default_factory=dict)
    facts: dict[str, Waiting] = field(default_factory=dict)
    running: dict[str, tuple[Job, Running]] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    num_interrupted: int = 0
    num_squashed: int = 0
    num_started: int = 0

    def blocks_of(self, job: Job) -> int:
        return -(-job.held_tokens // BLOCK)

    def facts_of(self, job: Job) -> Waiting:
        return Waiting(
            request_id=job.name,
            arrived_s=job.arrived_s,
            weighted_size=job.weighted_size,
            size_tokens=job.guess_tokens,
            num_blocks=self.blocks_of(job),
            duration_s=job.duration_s * job.wrong,
            priority=job.priority,
            tenant=job.tenant,
            is_swapped=job.done_s > 0,
            times_bypassed=job.times_bypassed,
            times_squashed=job.times_squashed,
        )

    def tell(self, hook: str, *args: Any) -> None:
        self.log.append((hook, args, None))
        getattr(self.policy, hook)(*args)

    def arrive(self, job: Job) -> None:
        self.waiting[job.name] = job
        self.facts[job.name] = self.facts_of(job)
        self.tell("arrived", self.facts[job.name], self.now)

    def interrupt(self, job: Job) -> None:
        del self.running[job.name]
        self.tell("ended", job.name)
        self.arrive(job)
        self.num_interrupted += 1

    def work(self) -> None:
        """One step's time passes for what runs."""
        for job, _ in list(self.running.values()):
            job.done_s += STEP_S
            if job.done_s >= job.duration_s:
                job.ended_s = self.now
                del self.running[job.name]
                self.tell("ended", job.name)
            elif job.held_tokens > job.guess_tokens:
                self.tell("outgrew", job.name, min(2 * job.held_tokens, job.most_tokens))
        while self.free_blocks() < 0:
            self.interrupt(next(reversed(self.running.values()))[0])

    def free_blocks(self) -> int:
        return self.num_blocks - sum(self.blocks_of(job) for job, _ in self.running.values())

    def step(self) -> None:
        running = {name: each for name, (_, each) in self.running.items()}
        space = StepRoom(
            free_blocks=self.free_blocks(),
            num_slots=self.num_slots - len(running),
            num_tokens=self.num_tokens,
        )
        waiting = self.facts.copy()
        decision = self.policy.decide(waiting, running, space, self.now)
        self.log.append(("decide", (waiting, running, space, self.now), decision))
        for name in decision.squash:
            job, _ = self.running[name]
            job.times_squashed += 1
            job.done_s = 0.0
            self.tell("squashed", name)
            self.num_squashed += 1
            self.interrupt(job)
        for name in decision.request_ids:
            del self.facts[name]
            self.start(self.waiting.pop(name), decision)

    def start(self, job: Job, decision: Decision) -> None:
        self.tell("admitted", job.name, self.now)
        self.num_started += 1
        job.started_s = self.now if job.started_s is None else job.started_s
        if job.name in decision.bypassed:
            head = self.waiting[decision.bypassed[job.name]]
            head.times_bypassed += 1
            self.facts[head.name] = self.facts_of(head)
        each = Running(
            request_id=job.name,
            num_blocks=self.blocks_of(job),
            predicted_end_s=self.now + job.duration_s * job.wrong,
            is_bypasser=job.name in decision.bypassed,
        )
        self.running[job.name] = (job, each)


def run(engine: Engine, jobs: list[Job], max_wait_s: float | None = None) -> dict[str, float]:
    """Until all have ended. Returns by when each job that waited for max_wait_s has to start, by the bound for engines that preempt."""
    todo = sorted(jobs, key=lambda job: job.arrived_s)
    deadlines: dict[str, float] = {}
    longest_s = max(job.duration_s for job in jobs) + 2 * STEP_S
    for _ in range(40_000):
        while todo and todo[0].arrived_s <= engine.now:
            engine.arrive(todo.pop(0))
        for name, job in engine.waiting.items():
            if max_wait_s is not None and name not in deadlines and engine.now - job.arrived_s >= max_wait_s:
                older = sum(other.arrived_s <= job.arrived_s for other in engine.waiting.values()) - 1
                deadlines[name] = engine.now + (older + len(engine.running)) * longest_s + STEP_S
        engine.step()
        engine.work()
        engine.now += STEP_S
        if not (todo or engine.waiting or engine.running):
            return deadlines
    raise AssertionError(f"{len(engine.waiting)} wait and {len(engine.running)} run for ever")


@st.composite
def traffic(draw: st.DrawFn) -> list[Job]:
    """Bursts, in which predictions are wrong by up to ten times either way."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    num, burst_s = draw(st.integers(1, 40)), draw(st.sampled_from([0.0, 5.0, 30.0]))
    jobs = []
    for at in range(num):
        output = rng.choice([5, 20, 100, 400])
        wrong = 10 ** rng.uniform(-1, 1)
        jobs.append(
            Job(
                name=f"j{at}",
                arrived_s=rng.uniform(0, burst_s),
                input_tokens=rng.choice([10, 100, 600]),
                output_tokens=output,
                wrong=wrong,
                weighted_size=min(output * wrong / 1000, 1.0),
                priority=rng.choice([0, 0, 0, 1, -1]),
                tenant=rng.choice("ab"),
            )
        )
    return jobs


def tight(policy: QueuePolicy) -> Engine:
    """Memory for little more than the largest job (1,000 tokens, 63 blocks)."""
    return Engine(policy, num_blocks=80, num_slots=8, num_tokens=1280)


def new_mlq() -> Mlq:
    policy = Mlq(1280, MlqSettings(max_wait_s=5.0, aging_s=2.0, squash_share=0.5))
    refit(policy, FOUR_LANES, (320, 320, 320, 320))
    return policy


@settings(max_examples=60)
@given(traffic())
def test_nobody_waits_beyond_the_bound_where_the_engine_preempts(jobs: list[Job]) -> None:
    policy = new_mlq()
    engine = tight(policy)
    deadlines = run(engine, jobs, max_wait_s=5.0)
    for job in jobs:
        assert job.started_s is not None
        assert job.ended_s is not None
        if job.name in deadlines:
            assert job.started_s <= deadlines[job.name]
        else:
            assert job.started_s - job.arrived_s < 5.0 + STEP_S
    assert policy.ledger.num_used == 0
    assert all(job.times_squashed <= 1 for job in jobs)
    assert engine.num_squashed <= 0.5 * engine.num_started


def groups_ahead(job: Job, jobs: list[Job], start_s: float, num_slots: int, num_tokens: int) -> int:
    """How many times the room is filled by those who came before it and had not started by then, and itself."""
    older = [
        other
        for other in jobs
        if (other.arrived_s, other.name) <= (job.arrived_s, job.name)
        and (other.started_s is None or other.started_s >= start_s)
    ]
    num_groups, slots, tokens = 1, num_slots, num_tokens
    for other in sorted(older, key=lambda each: (each.arrived_s, each.name)):
        needed = min(other.most_tokens, num_tokens)
        if slots < 1 or tokens < needed:
            num_groups, slots, tokens = num_groups + 1, num_slots, num_tokens
        slots, tokens = slots - 1, tokens - needed
    return num_groups


@settings(max_examples=60)
@given(traffic())
def test_nobody_waits_beyond_the_bound_where_memory_is_ample(jobs: list[Job]) -> None:
    run(Engine(new_mlq(), num_blocks=10_000, num_slots=4, num_tokens=1280), jobs)
    longest_s = max(job.duration_s for job in jobs) + 2 * STEP_S
    for job in jobs:
        overdue_s = job.arrived_s + 5.0
        num_groups = groups_ahead(job, jobs, overdue_s, 4, 1280)
        assert job.started_s is not None
        assert job.started_s <= overdue_s + STEP_S + num_groups * longest_s


def stream(wrong: float) -> list[Job]:
    """One large job of low priority, and more small ones than the engine can take, for a minute."""
    small = [
        Job(f"s{at}", at / 10, 50, 50, wrong, weighted_size=0.05, priority=-1, tenant="s")
        for at in range(600)
    ]
    return [Job("large", 1.0, 600, 400, 1 / wrong, weighted_size=0.9, priority=1, tenant="t"), *small]


@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("lanes", [FOUR_LANES, Lanes.around([0.5])])
def test_a_stream_of_small_ones_does_not_starve_a_large_one(wrong: float, lanes: Lanes) -> None:
    policy = Mlq(1280, MlqSettings(max_wait_s=20.0, aging_s=5.0))
    refit(policy, lanes, (1280 // lanes.num_lanes,) * lanes.num_lanes)
    jobs = stream(wrong)
    run(tight(policy), jobs)
    assert jobs[0].started_s is not None
    # All that runs when it is overdue ends within a second; those before it, who came in its first second, started long ago.
    assert jobs[0].started_s - jobs[0].arrived_s <= 20.0 + 1.0 + 4 * STEP_S


def test_the_same_stream_starves_it_in_the_baseline() -> None:
    """Or else the test before shows nothing."""
    jobs = stream(1.0)
    run(tight(Sjf()), jobs)
    assert jobs[0].started_s is not None
    assert jobs[0].started_s > 50


@settings(max_examples=15)
@given(traffic(), st.sampled_from(sorted(POLICIES)))
def test_every_request_ends_under_every_policy(jobs: list[Job], name: str) -> None:
    run(tight(POLICIES[name](1280)), jobs)
    assert all(job.ended_s is not None for job in jobs)


@settings(max_examples=15)
@given(traffic(), st.sampled_from(sorted(POLICIES)))
def test_a_recorded_sequence_gives_the_same_decisions_again(jobs: list[Job], name: str) -> None:
    def make() -> QueuePolicy:
        return new_mlq() if name == "mlq" else POLICIES[name](1280)

    engine = tight(make())
    run(engine, jobs)
    again = make()
    for hook, args, decision in engine.log:
        assert getattr(again, hook)(*args) == decision


def test_the_simulation_preempts_passes_and_squashes() -> None:
    """Or else the bound was never put to the test."""
    rng = random.Random(5)
    seen = {"preempted": 0, "bypassed": 0, "squashed": 0}
    for _ in range(30):
        jobs = [
            Job(
                f"j{at}",
                rng.uniform(0, 10),
                rng.choice([10, 100, 600]),
                rng.choice([5, 20, 100, 400]),
                10 ** rng.uniform(-1, 1),
                weighted_size=rng.random(),
            )
            for at in range(40)
        ]
        engine = tight(new_mlq())
        run(engine, jobs)
        seen["preempted"] += engine.num_interrupted - engine.num_squashed
        seen["bypassed"] += sum(job.times_bypassed for job in jobs)
        seen["squashed"] += engine.num_squashed
    assert min(seen.values()) > 0, seen


# -- cost --------------------------------------------------------------------------------------------------------------


class CountingFacts(Mapping[str, Waiting]):
    """Facts that are worked out on demand, as a driver's."""

    def __init__(self, facts: dict[str, Waiting]) -> None:
        self._facts = facts
        self.num_looked_up = 0

    def __getitem__(self, name: str) -> Waiting:
        self.num_looked_up += 1
        return self._facts[name]

    def __iter__(self) -> Any:
        raise AssertionError("a decision does not go through all that wait")

    def __len__(self) -> int:
        return len(self._facts)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_decision_looks_at_few_of_those_who_wait(name: str) -> None:
    rng = random.Random(1)
    policy = POLICIES[name](10_000)
    if isinstance(policy, Mlq):
        refit(policy, FOUR_LANES, (2500,) * 4)
    waiting = {}
    for at in range(1000):
        facts = request(
            str(at),
            arrived_s=rng.uniform(60, 100),
            weighted_size=rng.random(),
            num_blocks=rng.randint(1, 100),
        )
        waiting[facts.request_id] = facts
        policy.arrived(facts, NOW)
        if isinstance(policy, Mlq) and at < 100:
            policy.admitted(str(at), NOW)
            policy.ended(str(at))
    facts_on_demand = CountingFacts(waiting)
    running = {str(at): runs(str(at)) for at in range(64)}
    space = StepRoom(free_blocks=50, num_slots=16, num_tokens=10_000)
    times_s = []
    for _ in range(50):
        begin_s = time.perf_counter()
        policy.decide(facts_on_demand, running, space, NOW)
        times_s.append(time.perf_counter() - begin_s)
    assert facts_on_demand.num_looked_up / 50 <= 16 + 4 * (1 + 16)
    assert min(times_s) < 0.001, "the aim for 1,000 who wait; 0.2 ms where it was measured"


# -- steps that are kept short, and adapters with memory of their own --------------------------------------------------


def mlq_with(*waiting: Waiting, lanes: Lanes = TWO_LANES) -> tuple[Mlq, dict[str, Waiting]]:
    policy = Mlq(10_000)
    refit(policy, lanes, [10_000 // lanes.num_lanes] * lanes.num_lanes)
    for each in waiting:
        policy.arrived(each, NOW)
    return policy, {each.request_id: each for each in waiting}


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_begins_no_more_prompts_than_it_has_time_for(name: str) -> None:
    policy = POLICIES[name](10_000)
    asked = [request(f"r{n}", num_prefill_tokens=100, arrived_s=NOW - 10 + n) for n in range(5)]
    for each in asked:
        policy.arrived(each, NOW)
    room = msgspec.structs.replace(AMPLE, prefill_tokens=250)
    decision = policy.decide({each.request_id: each for each in asked}, {}, room, NOW)
    assert decision.request_ids == ("r0", "r1")
    assert decision.reason("r2") == "step_full"


def test_a_prompt_longer_than_any_step_begins_when_no_other_one_is_computed() -> None:
    policy, waiting = mlq_with(request("long", num_prefill_tokens=5000))
    busy = msgspec.structs.replace(AMPLE, prefill_tokens=100, is_prefilling=True)
    assert policy.decide(waiting, {}, busy, NOW).reason("long") == "step_full"
    idle = msgspec.structs.replace(AMPLE, prefill_tokens=100)
    assert policy.decide(waiting, {}, idle, NOW).request_ids == ("long",)


def test_nobody_passes_a_prompt_that_has_been_deferred_once() -> None:
    room = msgspec.structs.replace(AMPLE, prefill_tokens=100, is_prefilling=True)
    small = request("small", weighted_size=0.1, num_prefill_tokens=10)
    large = request("large", weighted_size=0.9, num_prefill_tokens=200)
    policy, waiting = mlq_with(small, large)
    first = policy.decide(waiting, {}, room, NOW)
    assert first.request_ids == ("small",) and first.reason("large") == "step_full"
    waiting["large"] = msgspec.structs.replace(large, times_deferred=1)
    assert policy.decide(waiting, {}, room, NOW).request_ids == ()
    free = msgspec.structs.replace(room, is_prefilling=False)
    assert policy.decide(waiting, {}, free, NOW).request_ids == ("large",)


def test_adapters_with_memory_of_their_own_take_no_blocks() -> None:
    room = msgspec.structs.replace(AMPLE, adapter_bytes=100)
    asked = [
        request("a", weighted_size=0.1, adapter_id=1, adapter_bytes=60),
        request("b", weighted_size=0.11, adapter_id=1, adapter_bytes=60),  # the same adapter: needed once
        request("c", weighted_size=0.12, adapter_id=2, adapter_bytes=60),
        request("d", weighted_size=0.9),
    ]
    policy, waiting = mlq_with(*asked)
    decision = policy.decide(waiting, {}, room, NOW)
    assert decision.request_ids == ("a", "b", "d")
    assert decision.reason("c") == "adapter_memory"


@pytest.mark.parametrize("waited_s", [1.0, MlqSettings().max_wait_s])
def test_a_head_that_lacks_adapter_memory_stops_nobody(waited_s: float) -> None:
    """Those behind it take nothing that it waits for: its adapter's turn is made elsewhere."""
    room = msgspec.structs.replace(AMPLE, adapter_bytes=10)
    head = request("head", arrived_s=NOW - waited_s, weighted_size=0.01, adapter_id=2, adapter_bytes=60)
    small, large = request("small", weighted_size=0.02), request("large", weighted_size=0.9)
    policy, waiting = mlq_with(head, small, large)
    decision = policy.decide(waiting, {}, room, NOW)
    assert decision.request_ids == ("small", "large") and not decision.bypassed
    assert decision.reason("head") == "adapter_memory"
    ample = msgspec.structs.replace(AMPLE, adapter_bytes=60)
    assert "head" in policy.decide(waiting, {}, ample, NOW).request_ids
