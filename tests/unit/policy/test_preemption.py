"""Who gives up device memory, and how each gets it back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.preemption import (
    POLICIES,
    Preemption,
    RunningFacts,
)
from engine_bridge.policy.ways_back import Way


def running(request_id: str, **fields: Any) -> RunningFacts:
    defaults: dict[str, Any] = {
        "fairness": 0.1,
        "started_s": 0.0,
        "num_blocks": 4,
        "recompute_s": 0.2,
        "swap_s": 0.1,
        "num_host_blocks": 4,
    }
    return RunningFacts(request_id=request_id, **(defaults | fields))


def ids(plan: Any) -> list[str]:
    return [victim.request_id for victim in plan.victims]


batches = st.lists(
    st.builds(
        running,
        st.integers(0, 10_000).map(str),
        fairness=st.floats(0, 10),
        started_s=st.floats(0, 100),
        num_blocks=st.integers(0, 40),
        recompute_s=st.floats(0, 10),
        swap_s=st.none() | st.floats(0, 10),
        split_s=st.none() | st.floats(0, 10),
        num_host_blocks=st.integers(0, 40),
        urgency=st.integers(-2, 2),
    ),
    max_size=12,
    unique_by=lambda request: request.request_id,
)
policies = st.sampled_from(list(POLICIES.values()))


# -- victims -----------------------------------------------------------------------------------------------------------


@given(batches, policies, st.integers(0, 200), st.integers(0, 100))
def test_victims_suffice_and_none_is_spare(
    batch: list[RunningFacts], policy: Preemption, num_needed: int, num_host: int
) -> None:
    plan = policy.plan(batch, num_needed, num_host)
    blocks = {request.request_id: request.num_blocks for request in batch}
    if not plan.is_enough:
        assert sum(blocks.values()) < num_needed and not plan.victims
        return
    assert plan.num_freed_blocks == sum(blocks[name] for name in ids(plan)) >= num_needed
    assert len(set(ids(plan))) == len(plan.victims)
    for victim in plan.victims:
        assert plan.num_freed_blocks - victim.num_blocks < num_needed


@given(batches, policies, st.integers(0, 200), st.integers(0, 100))
def test_host_memory_is_never_overdrawn(
    batch: list[RunningFacts], policy: Preemption, num_needed: int, num_host: int
) -> None:
    plan = policy.plan(batch, num_needed, num_host)
    assert sum(victim.num_host_blocks for victim in plan.victims) <= num_host
    by_id = {request.request_id: request for request in batch}
    for victim in plan.victims:
        expected = 0 if victim.way is Way.RECOMPUTE else by_id[victim.request_id].num_host_blocks
        assert victim.num_host_blocks == expected


@given(batches, policies, st.integers(0, 200), st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_the_list(
    batch: list[RunningFacts], policy: Preemption, num_needed: int, rng: random.Random
) -> None:
    shuffled = batch.copy()
    rng.shuffle(shuffled)
    assert policy.plan(shuffled, num_needed, 50) == policy.plan(batch, num_needed, 50)


@given(batches, st.integers(0, 200))
def test_with_host_memory_for_all_each_victim_gets_its_cheapest_way(
    batch: list[RunningFacts], num_needed: int
) -> None:
    by_id = {request.request_id: request for request in batch}
    for victim in POLICIES["cost_aware"].plan(batch, num_needed, 10**6).victims:
        request = by_id[victim.request_id]
        ways = [s for s in (request.swap_s, request.split_s, request.recompute_s) if s is not None]
        assert victim.expected_s == min(ways)


def test_the_lowest_priority_goes_first_and_no_more_than_needed() -> None:
    batch = [running("old", fairness=0.9), running("new", fairness=0.1), running("mid", fairness=0.5)]
    plan = POLICIES["cost_aware"].plan(batch, 6, 100)
    assert ids(plan) == ["new", "mid"]
    assert plan.expected_s == pytest.approx(0.2)


def test_of_equals_the_one_that_began_last_goes_first() -> None:
    batch = [running("before", started_s=1.0), running("last", started_s=2.0)]
    assert ids(POLICIES["cost_aware"].plan(batch, 1, 100)) == ["last"]


@pytest.mark.parametrize("policy", ["cost_aware", "cheapest"])
def test_an_urgent_request_stays_whatever_its_fairness(policy: str) -> None:
    batch = [running("urgent", fairness=0.0, swap_s=0.01, urgency=-1), running("usual", fairness=5.0)]
    assert ids(POLICIES[policy].plan(batch, 1, 100)) == ["usual"]


def test_of_those_made_spare_the_one_that_would_go_last_is_let_off_first() -> None:
    sizes = {"first": 2, "second": 2, "large": 8}
    batch = [running(name, fairness=at / 10, num_blocks=sizes[name]) for at, name in enumerate(sizes)]
    assert ids(POLICIES["cost_aware"].plan(batch, 10, 100)) == ["first", "large"]


def test_a_large_victim_makes_the_small_one_before_it_spare() -> None:
    batch = [running("small", fairness=0.1, num_blocks=2), running("large", fairness=0.2, num_blocks=10)]
    assert ids(POLICIES["cost_aware"].plan(batch, 9, 100)) == ["large"]


@pytest.mark.parametrize(
    ("fields", "num_host", "way"),
    [
        ({}, 4, Way.SWAP),
        ({}, 3, Way.RECOMPUTE),  # no room in host memory: Algorithm 1, line 13
        ({"swap_s": 0.3}, 4, Way.RECOMPUTE),
        ({"swap_s": 0.2}, 4, Way.RECOMPUTE),  # swapping must be faster, not as fast: line 7
        ({"swap_s": None}, 4, Way.RECOMPUTE),
        ({"split_s": 0.05}, 4, Way.SPLIT),
    ],
)
def test_swap_or_recompute_as_in_algorithm_1(fields: dict[str, Any], num_host: int, way: Way) -> None:
    (victim,) = POLICIES["cost_aware"].plan([running("a", **fields)], 1, num_host).victims
    assert victim.way is way


def test_a_swapped_victim_leaves_less_host_memory_to_the_next() -> None:
    batch = [running("a", fairness=0.1), running("b", fairness=0.2)]
    plan = POLICIES["cost_aware"].plan(batch, 8, 6)
    assert [victim.way for victim in plan.victims] == [Way.SWAP, Way.RECOMPUTE]


def test_vllm_takes_who_began_last_and_recomputes() -> None:
    batch = [running("first", started_s=1.0, fairness=0.0), running("last", started_s=2.0, fairness=9.0)]
    (victim,) = POLICIES["vllm"].plan(batch, 1, 100).victims
    assert (victim.request_id, victim.way, victim.expected_s) == ("last", Way.RECOMPUTE, 0.2)
    (victim,) = POLICIES["vllm_swap"].plan(batch, 1, 100).victims
    assert (victim.request_id, victim.way) == ("last", Way.SWAP)


def test_always_swap_recomputes_only_where_host_memory_is_full() -> None:
    slow = running("a", swap_s=9.0)
    assert POLICIES["fair_swap"].plan([slow], 1, 4).victims[0].way is Way.SWAP
    assert POLICIES["fair_swap"].plan([slow], 1, 3).victims[0].way is Way.RECOMPUTE


def test_the_cheapest_per_block_frees_most_for_least() -> None:
    batch = [
        running("dear", num_blocks=2, swap_s=0.1),
        running("cheap", num_blocks=20, swap_s=0.2),
        running("empty", num_blocks=0, swap_s=0.0),
    ]
    assert ids(POLICIES["cheapest"].plan(batch, 2, 100)) == ["cheap"]
    alike = [running("fair", fairness=0.9), running("less", fairness=0.1)]
    assert ids(POLICIES["cheapest"].plan(alike, 1, 100)) == ["less"]
    # By the cheapest of its ways.
    dear_way = [running("a", swap_s=0.3, recompute_s=0.01), running("b", swap_s=0.1, recompute_s=0.1)]
    assert ids(POLICIES["cheapest"].plan(dear_way, 1, 100)) == ["a"]


def test_nobody_is_preempted_for_nothing() -> None:
    assert POLICIES["cost_aware"].plan([running("a")], 0, 100).victims == ()
    assert not POLICIES["cost_aware"].plan([running("a")], 5, 100).is_enough
