"""Whose job is next on the tokenizer's thread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling.fair_queue import MAX_FORGIVEN, FairQueue


def served(queue: FairQueue[str], took_s: float = 1.0) -> list[str]:
    """Run all that waits, each job for `took_s`."""
    order = []
    while (taken := queue.take()) is not None:
        order.append(taken[1])
        queue.done(taken[0], took_s)
    return order


def filled(**jobs: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for tenant, number in jobs.items():
        for index in range(number):
            queue.add(tenant, 1.0, f"{tenant}{index}")
    return queue


def test_tenants_take_turns() -> None:
    assert served(filled(a=4, b=2)) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_newcomer_waits_for_the_running_job_alone() -> None:
    queue = filled(a=100)
    for _ in range(10):
        queue.done(queue.take()[0], 5.0)
    tenant, _ = queue.take()
    queue.add("b", 1.0, "small")
    queue.done(tenant, 5.0)
    assert queue.take() == ("b", "small")


def test_time_counts_not_the_number_of_jobs() -> None:
    queue = filled(heavy=2, light=12)
    order = []
    while (taken := queue.take()) is not None:
        order.append(taken[1])
        queue.done(taken[0], 5.0 if taken[0] == "heavy" else 1.0)
    assert order[:7] == ["heavy0", "light0", "light1", "light2", "light3", "light4", "heavy1"]


def test_idleness_earns_no_credit() -> None:
    """Who was silent while another used the thread for a hundred jobs is ahead by the last of these alone."""
    queue = filled(a=100, b=1)
    served(queue)
    for index in range(5):
        queue.add("a", 1.0, f"a{index}")
        queue.add("b", 1.0, f"b{index}")
    assert served(queue)[:6] == ["b0", "a0", "b1", "a1", "b2", "a2"]


def test_shares_follow_weights() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(12):
        queue.add("double", 2.0, f"d{index}")
        queue.add("single", 1.0, f"s{index}")
    assert [job[0] for job in served(queue)[:9]].count("d") == 6


def test_a_job_that_never_ran_costs_nothing() -> None:
    queue = filled(a=3, b=1)
    tenant, job = queue.take()
    assert (tenant, job) == ("a", "a0")
    queue.done(tenant, None)
    assert served(queue) == ["a1", "b0", "a2"]


def test_the_wait_is_told_from_the_tenants_own_jobs_and_its_share() -> None:
    queue = filled(a=1)
    assert queue.wait_s("nobody") == 0.0
    for index in range(200):
        queue.add("a", 1.0, f"x{index}")
        queue.done(queue.take()[0], 2.0)
    assert queue.num_waiting_of("a") == 1 and queue.wait_s("a") == pytest.approx(2.0, rel=0.01)
    queue.add("b", 3.0, "b0")
    assert queue.wait_s("a") == pytest.approx(8.0, rel=0.01)


def test_tenants_that_left_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(MAX_FORGIVEN + 10):
        queue.add(f"t{index}", 1.0, "x")
        queue.done(queue.take()[0], 0.001)
    assert len(queue._idle) <= MAX_FORGIVEN and queue._busy == {}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abcd"), st.floats(0.25, 4)),
            st.tuples(st.just("run"), st.floats(0, 3), st.booleans()),
        ),
        max_size=200,
    )
)
def test_nothing_is_lost_or_doubled_and_each_tenants_jobs_keep_their_order(events: list[tuple]) -> None:
    queue: FairQueue[int] = FairQueue()
    added: dict[str, list[int]] = {}
    ran: dict[str, list[int]] = {}
    for number, event in enumerate(events):
        if event[0] == "add":
            queue.add(event[1], event[2], number)
            added.setdefault(event[1], []).append(number)
        elif (taken := queue.take()) is not None:
            ran.setdefault(taken[0], []).append(taken[1])
            queue.done(taken[0], event[1] if event[2] else None)
        assert queue.num_waiting == sum(map(len, added.values())) - sum(map(len, ran.values()))
    while (taken := queue.take()) is not None:
        ran.setdefault(taken[0], []).append(taken[1])
        queue.done(taken[0], 1.0)
    assert ran == added


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.integers(1, 4))
def test_a_waiting_job_sees_at_most_one_job_of_each_other_tenant(
    durations: list[float], num_others: int
) -> None:
    """However long their jobs are, and however many they have."""
    queue: FairQueue[str] = FairQueue()
    for other in range(num_others):
        for _ in range(40):
            queue.add(f"o{other}", 1.0, f"o{other}")
    for took_s in durations:
        queue.done(queue.take()[0], took_s)
    queue.add("me", 1.0, "me")
    before = []
    while (taken := queue.take())[1] != "me":
        before.append(taken[1])
        queue.done(taken[0], durations[len(before) % len(durations)])
    assert len(before) == len(set(before))
