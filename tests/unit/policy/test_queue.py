"""Who starts, who waits and why, and that nobody waits without bound."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling.baselines import Fair
from engine_bridge.policy.scheduling.lanes import Lanes
from engine_bridge.policy.scheduling.mlq import Mlq, MlqSettings
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.policy.scheduling.queue_policy import Decision, QueuePolicy, Running, StepRoom, Waiting
from tests.unit.facts import running_facts, waiting_facts

TWO_LANES = Lanes.around([0.2, 0.8])
NOW = 100.0
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


def refit(policy: Mlq, lanes: Lanes, quotas: Sequence[int], sizes: Mapping[str, float] | None = None) -> None:
    """All at once."""
    policy.begin_refit(lanes, quotas, sizes)
    policy.advance_refit(sum(policy.num_waiting()))


def decide(
    policy: QueuePolicy, waiting: list[Waiting], room: StepRoom = AMPLE, running: Any = ()
) -> Decision:
    """After all of them have arrived."""
    known = {facts.request_id: facts for facts in waiting}
    for facts in known.values():
        policy.arrived(facts, NOW)
    return policy.decide(known, {each.request_id: each for each in running}, room, NOW)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["long", "urgent", "short"]),
        ("sjf", ["short", "urgent", "long"]),
        ("priority", ["urgent", "long", "short"]),
    ],
)
def test_baselines_start_in_their_order(policy: str, order: list[str]) -> None:
    waiting = [
        request("short", arrived_s=3.0, duration_s=1.0),
        request("urgent", arrived_s=2.0, duration_s=2.0, priority=-1),
        request("long", arrived_s=1.0, duration_s=9.0),
    ]
    assert list(decide(POLICIES[policy](1000), waiting).request_ids) == order


@pytest.mark.parametrize(("swapped_wait_s", "first"), [(20.0, "swapped"), (10.0, "swapped"), (5.0, "fresh")])
def test_fair_starts_the_set_that_is_more_urgent_on_average(swapped_wait_s: float, first: str) -> None:
    swapped = request("swapped", arrived_s=NOW - swapped_wait_s, is_swapped=True)
    waiting = [swapped, request("fresh", arrived_s=NOW - 10)]
    assert decide(Fair(), waiting).request_ids == (first,)


def test_a_lane_whose_head_can_use_its_quota_does_not_lend_it() -> None:
    policy = mlq()
    running = request("running", weighted_size=0.8, size_tokens=300)
    policy.arrived(running, NOW)
    policy.admitted("running", NOW)
    large = request("large", weighted_size=0.9, size_tokens=400)
    waiting = [large, request("small", weighted_size=0.1, size_tokens=600)]
    decision = decide(policy, waiting)
    assert decision.request_ids == ("large",)
    # There were 700 tokens, 200 of them the other lane's own.
    assert decision.deferred == {"small": "lane_quota"}


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
    waiting: dict[str, Waiting] = {}
    for at, (priority, tenant, size, weight) in enumerate(fields):
        told = {"priority": priority, "tenant": str(tenant), "weight": weight, "size_tokens": size}
        waiting[str(at)] = request(str(at), weighted_size=size + at / 100, **told)
        policy.arrived(waiting[str(at)], NOW)
    tenants = {facts.tenant for facts in waiting.values()}
    for at, (tenant, tokens) in enumerate(past):
        if str(tenant) in tenants:
            policy.arrived(request(f"past{at}", tenant=str(tenant), size_tokens=tokens), NOW)
            policy.admitted(f"past{at}", NOW)
            policy.ended(f"past{at}")
            given[str(tenant)] += tokens
    expected: list[str] = []
    left = dict(waiting)

    def place(facts: Waiting) -> tuple[float | str, ...]:
        return facts.priority, given[facts.tenant], facts.tenant, facts.weighted_size

    while left and len(expected) < num_slots:
        first = min(left.values(), key=place)
        given[first.tenant] += first.size_tokens / first.weight
        expected.append(left.pop(first.request_id).request_id)
    space = room(num_slots=num_slots, num_tokens=10**9, free_blocks=10**9)
    assert list(policy.decide(waiting, {}, space, NOW).request_ids) == expected
    policy.check_invariants()


def test_long_is_from_the_very_second_on() -> None:
    old = request("old", weighted_size=0.3, arrived_s=NOW - MlqSettings().aging_s)
    waiting = [request("small", weighted_size=0.1), old]
    assert decide(mlq(), waiting).request_ids == ("old", "small")
    overdue = request("overdue", weighted_size=0.9, arrived_s=NOW - 60, priority=9)
    assert decide(mlq(), [*waiting, overdue]).request_ids == ("overdue", "old", "small")


def test_warm_ones_go_first_only_where_all_start() -> None:
    waiting = [request("small", weighted_size=0.05), request("warm", weighted_size=0.2, is_warm=True)]
    assert decide(mlq(), waiting).request_ids == ("warm", "small")
    assert decide(mlq(), waiting, room(num_slots=1)).request_ids == ("small",)
    urgent = [request("urgent", priority=-1), request("warm", is_warm=True)]
    assert decide(mlq(), urgent).request_ids == ("urgent", "warm")


HEAD = request("head", weighted_size=0.1, num_blocks=50)
SOON = runs("soon", num_blocks=40, predicted_end_s=NOW + 5)


def passing(policy: Mlq, head: Waiting = HEAD, **fields: Any) -> Decision:
    follower = request("follower", **({"weighted_size": 0.2, "duration_s": 4.0} | fields))
    return decide(policy, [head, follower], room(free_blocks=25), [SOON])


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


LATE = runs("late", is_bypasser=True, predicted_end_s=NOW - 1, num_blocks=30)


def squashes(policy: Mlq, *running: Running, free_blocks: int = 25) -> tuple[str, ...]:
    return decide(policy, [HEAD], room(free_blocks=free_blocks), running).squash


def test_a_bypasser_that_is_late_is_squashed_where_that_lets_the_head_start() -> None:
    assert squashes(mlq(), LATE) == ("late",)
    assert squashes(mlq(), LATE, free_blocks=10) == (), "it would not help"
    assert squashes(mlq(), LATE, free_blocks=50) == (), "the head starts anyway"
    assert squashes(mlq(), msgspec.structs.replace(LATE, is_bypasser=False)) == ()
    assert squashes(mlq(), msgspec.structs.replace(LATE, predicted_end_s=NOW)) == ()


def mlq_with(*waiting: Waiting, lanes: Lanes = TWO_LANES) -> tuple[Mlq, dict[str, Waiting]]:
    policy = Mlq(10_000)
    refit(policy, lanes, [10_000 // lanes.num_lanes] * lanes.num_lanes)
    for each in waiting:
        policy.arrived(each, NOW)
    return policy, {each.request_id: each for each in waiting}


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
