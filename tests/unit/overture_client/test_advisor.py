"""The advisor between a workflow and the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from overture_client.advisor import RENEW_S, Advisor
from overture_client.call_graph import CallGraph
from overture_client.client import OvertureClient


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def told(server: Any) -> list[tuple[str, float | None]]:
    return [(body["session_id"], body.get("expected_arrival_s")) for body in server.advisories]


def test_those_who_follow_are_advised_with_bounds_once_these_are_known(server: Any) -> None:
    clock, graph = Clock(), CallGraph([("plan", "code"), ("code", "test")])
    with OvertureClient(server.url, max_in_flight=1000) as client:
        first = Advisor(client, graph, "r1", model="pirate", clock=clock)
        for agent, runtime_s in (("plan", 4.0), ("code", 2.0)):
            first.agent_started(agent)
            clock.now += runtime_s
            first.agent_ended(agent)
        Advisor(client, graph, "r2", model={"test": "robot"}, clock=clock).agent_started("plan")
        first.report()
    sent = {body["session_id"]: body for body in server.advisories}
    assert sent["r1:code"] == {"session_id": "r1:code", "model": "pirate"}, "nothing measured yet"
    assert sent["r2:code"] == {"session_id": "r2:code", "expected_arrival_s": 4.0}
    assert sent["r2:test"] == {"session_id": "r2:test", "expected_arrival_s": 6.0, "model": "robot"}


def test_an_agent_that_is_expected_as_early_is_not_advised_again(server: Any) -> None:
    clock = Clock()
    with OvertureClient(server.url) as client:
        advisor = Advisor(client, run_id="r", clock=clock)
        advisor.will_act("code", 9.0)
        clock.now = 1.0
        advisor.will_act("code", 8.1)  # the same moment, near enough
        advisor.will_act("code", 20.0)  # later does not matter
        advisor.report()
        assert told(server) == [("r:code", 9.0)]
        advisor.will_act("code", 3.0)  # sooner
        advisor.report()
        advisor.agent_started("code")
        advisor.will_act("code", 7.0)  # once more
        advisor.report()
        clock.now += RENEW_S
        advisor.will_act("code", 5.0)  # the gateway may have forgotten the last one
        advisor.report()
    assert told(server) == [("r:code", 9.0), ("r:code", 3.0), ("r:code", 7.0), ("r:code", 5.0)]


def test_agents_at_work_are_not_advised_for_their_next_turn(server: Any) -> None:
    graph = CallGraph([("code", "test"), ("test", "code"), ("test", "test")])
    with OvertureClient(server.url) as client:
        advisor = Advisor(client, graph, "r")
        for agent in ("code", "test"):
            advisor.agent_started(agent)
            advisor.agent_ended(agent)
            advisor.report()
        advisor.agent_started("code")
        advisor.report()
    assert [session_id for session_id, _ in told(server)] == ["r:test", "r:code", "r:test"]


async def test_the_report_counts_hits_as_the_gateway_tells(server: Any) -> None:
    async with OvertureClient(server.url) as client:
        advisor = Advisor(client, CallGraph([("plan", "code"), ("plan", "idle")]), "r")
        advisor.agent_started("plan")
        advisor.agent_ended("plan")
        await advisor.report_async()
        advisor.agent_started("code")
        headers = advisor.headers("code")
        assert headers == {"X-Session-Id": "r:code", "X-Agent-Name": "code"}
        await client.chat([], model="base", session_id=headers["X-Session-Id"])
        assert await advisor.report_async() == {
            "run_id": "r",
            "num_agents_run": 2,
            "num_advisories_sent": 2,
            "num_advisories_failed": 0,
            "num_hits": 1,
            "states": {"hit": 1, "accepted": 1},
            "lead_ms_median": 12.5,
        }


def test_at_the_end_advice_that_was_not_followed_is_taken_back(server: Any) -> None:
    with (
        OvertureClient(server.url) as client,
        Advisor(client, CallGraph([("plan", "code"), ("plan", "idle")]), "r") as advisor,
    ):
        advisor.agent_started("plan")
        advisor.report()
        advisor.agent_started("code")
    assert server.cancelled == ["r:idle"]


@pytest.mark.parametrize("num_runs", [1, 2])
def test_runs_without_a_name_get_sessions_of_their_own(num_runs: int) -> None:
    client = OvertureClient("http://127.0.0.1:1")
    sessions = {Advisor(client).session_of("code") for _ in range(num_runs)}
    assert len(sessions) == num_runs


def test_a_gateway_that_is_down_does_not_disturb_the_run() -> None:
    with (
        OvertureClient("http://127.0.0.1:1") as client,
        Advisor(client, CallGraph([("plan", "code")]), "r") as advisor,
    ):
        advisor.agent_started("plan")
        report = advisor.report()
    assert (report["num_advisories_sent"], report["num_advisories_failed"], report["num_hits"]) == (1, 1, 0)
