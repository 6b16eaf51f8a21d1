"""People who talk to one emulated node: their sessions go on where they were, and what is announced is there in time."""

from dataclasses import replace

import pytest

from bench.emulated import symphony
from bench.emulated.sessions import Talked, talk_on_node
from bench.emulated.symphony import ARMS, Point, engine_of, serve, tiers_of
from bench.sim.core.conversations import Chats, LogNormal
from bench.sim.core.session_cluster import Habits
from bench.sim.core.steps import StepCost

COST = StepCost(symphony.SETTING.gpu, symphony.SETTING.model)
# Long sessions of short turns, so that little is computed.
CHATS = Chats(turns=LogNormal(20, 0.5), answers=LogNormal(60, 0.5))


def talked(arm: str, host_bytes: int | None = None) -> Talked:
    sizes = tiers_of() if ARMS[arm].has_tiers else None
    if sizes is not None and host_bytes is not None:
        sizes = replace(sizes, host_bytes=host_bytes)
    habits = Habits(chats=CHATS, has_advisories=ARMS[arm].has_advisories)
    return talk_on_node(COST, engine_of(ARMS[arm]), sizes, habits, 6, 1, span_s=60.0, warm_up_s=0.0)


def times(found: Talked) -> list[tuple[str, float, float]]:
    return [(job.arrival.request_id, job.first_token_s, job.ended_s) for job in found.jobs]


def test_a_session_that_was_announced_is_on_the_device_when_its_request_comes() -> None:
    found = talked("advised")
    assert found.advised["hit"] > 5
    assert found.advised.get("late", 0) <= found.advised["hit"] / 10


def test_sessions_that_are_played_twice_give_the_same_times() -> None:
    first = talked("advised", host_bytes=symphony.SETTING.host_bytes // 1000)
    assert times(first) == times(talked("advised", host_bytes=symphony.SETTING.host_bytes // 1000))
    assert len(first.jobs) > 5


def test_prompts_of_a_session_are_computed_again_only_where_nothing_is_kept() -> None:
    slow, fast = talked("recompute"), talked("prefix")
    assert sum(job.ttft_s for job in fast.jobs) < 0.8 * sum(job.ttft_s for job in slow.jobs)


def test_what_a_run_comes_to_is_of_those_it_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symphony, "WARM_UP_S", 0.0)
    outcome = serve(Point("on_demand", 4, 1, 40.0))
    assert outcome.num_requests > 0 and outcome.latency_s > 0 and not outcome.advised
