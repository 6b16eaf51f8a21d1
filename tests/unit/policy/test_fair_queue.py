"""Whose job is next on the tokenizer's thread."""

import pytest

from engine_bridge.policy.scheduling.fair_queue import FairQueue


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
