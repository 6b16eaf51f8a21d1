"""Who gives up device memory, how each gets it back, and who starts when there is room."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.costs import Way
from engine_bridge.policy.preemption import (
    POLICIES,
    KeepsRoom,
    MeanPriority,
    Preemption,
    Queued,
    RunningFacts,
    Source,
    fair_priority,
    fitting,
)


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


def queued(request_id: str, fairness: float, num_blocks: int = 1, urgency: int = 0) -> Queued:
    return Queued(request_id=request_id, fairness=fairness, num_blocks=num_blocks, urgency=urgency)


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


# -- starts ------------------------------------------------------------------------------------------------------------


def test_priority_is_waiting_time_over_length() -> None:
    assert fair_priority(10.0, 100) == pytest.approx(0.1)
    assert fair_priority(10.0, 10) > fair_priority(10.0, 100)
    assert fair_priority(10.0, 100, weight=3.0) == pytest.approx(0.3)
    assert fair_priority(-1.0, 0) == 0.0


def test_the_set_with_the_higher_mean_starts() -> None:
    swapped, waiting = [queued("s", 0.3)], [queued("w1", 0.5), queued("w2", 0.3)]
    decision = MeanPriority().choose(swapped, waiting, 10, 10)
    assert (decision.source, decision.request_ids) == (Source.WAITING, ("w1", "w2"))
    assert (decision.swapped_priority, decision.waiting_priority) == pytest.approx((0.3, 0.4))


def test_only_what_fits_counts_in_the_mean() -> None:
    swapped, waiting = [queued("s", 0.3)], [queued("w1", 0.5, num_blocks=11), queued("w2", 0.1)]
    decision = MeanPriority().choose(swapped, waiting, 10, 10)
    assert (decision.source, decision.request_ids) == (Source.SWAPPED, ("s",))


def test_the_swapped_win_a_tie_even_at_nothing() -> None:
    decision = MeanPriority().choose([queued("s", 0.0)], [queued("w", 0.0)], 10, 10)
    assert decision.source is Source.SWAPPED
    assert MeanPriority().choose([], [queued("w", 0.0)], 10, 10).source is Source.WAITING


def test_nobody_starts_where_nothing_fits() -> None:
    decision = MeanPriority().choose([queued("s", 1.0, 20)], [queued("w", 1.0, 20)], 10, 10)
    assert (decision.source, decision.request_ids, decision.reason) == (Source.NOBODY, (), "nothing fits")
    for swapped, waiting in (([queued("s", 1.0)], []), ([], [queued("w", 1.0)])):
        decision = MeanPriority().choose(swapped, waiting, 10, 0)
        assert (decision.source, decision.reason) == (Source.NOBODY, "nothing fits")
    assert MeanPriority().choose([], [], 10, 10).reason == "nobody waits"


def test_small_ones_fill_the_gap_in_the_paper_and_leave_it_to_a_stuck_one_with_us() -> None:
    stuck, small = queued("stuck", 0.9, num_blocks=50), queued("small", 0.2)
    assert MeanPriority().choose([stuck], [small], 10, 10).request_ids == ("small",)
    decision = KeepsRoom().choose([stuck], [small], 10, 10)
    assert (decision.source, decision.reason) == (Source.NOBODY, "room is kept for stuck")
    assert (decision.swapped_priority, decision.waiting_priority) == (0.9, 0.2)
    for fairness in (0.1, 0.2):
        early = queued("stuck", fairness, num_blocks=50)
        assert KeepsRoom().choose([early], [small], 10, 10).request_ids == ("small",)
    # The first in line is who counts, not who was named first.
    other = queued("other", 0.1, num_blocks=60)
    assert KeepsRoom().choose([other, stuck], [small], 10, 10).reason == "room is kept for stuck"


line = st.lists(
    st.builds(
        queued,
        st.integers(0, 10_000).map(str),
        fairness=st.floats(0, 10),
        num_blocks=st.integers(0, 30),
        urgency=st.integers(-1, 1),
    ),
    max_size=10,
    unique_by=lambda request: request.request_id,
)


@given(line, line, st.integers(0, 60), st.integers(0, 6))
def test_what_starts_fits_and_comes_from_one_set(
    swapped: list[Queued], waiting: list[Queued], num_blocks: int, num_slots: int
) -> None:
    for rule in (MeanPriority(), KeepsRoom()):
        decision = rule.choose(swapped, waiting, num_blocks, num_slots)
        chosen_from = {Source.SWAPPED: swapped, Source.WAITING: waiting, Source.NOBODY: []}[decision.source]
        by_id = {request.request_id: request for request in chosen_from}
        assert bool(decision.request_ids) == (decision.source is not Source.NOBODY)
        assert len(decision.request_ids) <= num_slots
        assert sum(by_id[name].num_blocks for name in decision.request_ids) <= num_blocks


@given(line, st.integers(0, 60), st.integers(0, 6))
def test_nobody_is_passed_by(requests: list[Queued], num_blocks: int, num_slots: int) -> None:
    chosen = fitting(requests, num_blocks, num_slots)
    left = [request for request in requests if request not in chosen]
    for ahead in chosen:
        for behind in left:
            assert (ahead.urgency, -ahead.fairness) <= (behind.urgency, -behind.fairness)
    if left and len(chosen) < num_slots:
        first = min(left, key=lambda r: (r.urgency, -r.fairness, r.request_id))
        assert first.num_blocks > num_blocks - sum(request.num_blocks for request in chosen)
