"""Nodes as people see and steer them: over REST, in metrics, and live on the chat socket."""

import asyncio
from typing import Any

import msgspec
import pytest

from engine_bridge.protocol.figures import LaneStats, SchedulingStats
from gateway.errors import GatewayError
from gateway.nodes.known_nodes import nodes_of
from gateway.nodes.maintenance import NodeMaintenance
from gateway.nodes.node_states import NodeList, listed, status_of
from gateway.turns.engine_feed import PUSH_EVERY_S
from kvtiers.stats import DiskTierStats, HostStats, PeerStats, TierStats

from .fake_node import FakeNode
from .front import Frame, Gateway, Gateways, Socket
from .nodes import routed
from .parts import passes, settled, until

OPERATOR, TENANT, OTHER = "ov-an-operators-key", "ov-a-tenants-key", "ov-another-tenants-key"
KEYS = {"api_keys": (TENANT, OTHER), "operator_keys": (OPERATOR,)}
LANES = LaneStats(boundaries=(0.5,), num_waiting=(2, 1), quota_tokens=(400, 600), used_tokens=(300, 0))
LOAD: dict[str, Any] = {"num_running": 4, "num_waiting": 3, "num_by_reason": {"lane_quota": 3}}
LOAD |= {"num_answer_tokens": 70, "num_kv_blocks": 60, "num_free_kv_blocks": 20, "block_size": 16}
SCHEDULING = SchedulingStats(policy="mlq", lanes=LANES, counts={}, seconds={}, length_errors=None, **LOAD)
TIERS = TierStats(
    host=HostStats(bytes=10, capacity_bytes=100, num_hits=7),
    disk=DiskTierStats(is_on=True, bytes=20, capacity_bytes=200, num_hits=3),
    peers=PeerStats(is_on=True, bytes_fetched=40, num_fetched=2),
)


def busy(gateway: Gateway) -> Gateway:
    gateway.node.scheduling, gateway.node.tiers = SCHEDULING, TIERS
    return gateway


async def test_one_node_is_told_of_with_its_load_its_tiers_and_its_adapters(gateway: Gateway) -> None:
    busy(gateway)
    first, again = [
        msgspec.convert((await gateway.call("GET", "/v1/nodes")).body, NodeList) for _ in range(2)
    ]
    (node,) = first.nodes
    assert (node.id, node.model, node.state, node.is_draining) == ("local", "fake-model", "ready", False)
    assert node.load is not None and node.load.lanes == LANES
    assert (node.load.num_running, node.load.num_free_kv_blocks, node.load.num_answer_tokens) == (4, 20, 70)
    assert node.kv is not None and node.kv.disk is not None
    assert (node.kv.host.bytes, node.kv.host.num_hits, node.kv.disk.capacity_bytes) == (10, 7, 200)
    assert node.adapters.num_by_place == {"disk": 2} and node.adapters.resident == []
    totals = first.totals
    assert (totals.num_open, totals.num_running, totals.num_kv_blocks) == (1, 4, 60)
    assert again.nodes[0].incarnation == node.incarnation != ""
    lines = (await gateway.call("GET", "/metrics")).body.splitlines()
    for line in (
        'state{node="local",state="ready"} 1.0',
        'state{node="local",state="draining"} 0.0',
        'running{node="local"} 4.0',
        'kv_free_blocks{node="local"} 20.0',
        'answer_tokens_total{node="local"} 70.0',
        'tier_bytes{node="local",tier="disk"} 20.0',
        'peer_bytes_total{direction="in",node="local"} 40.0',
    ):
        assert f"overture_node_{line}" in lines


def test_what_a_node_cannot_load_is_shown_to_operators() -> None:
    why = {f"adapter-{number:03}": "too large" for number in range(100)}
    node = status_of("node-2", FakeNode(), incarnation="x", failed_adapters=why)
    assert next(iter(node.adapters.failed.items())) == ("adapter-000", "too large")
    assert len(node.adapters.failed) == 64
    assert listed([node], to_operator=True).nodes[0].adapters == node.adapters
    (seen,) = listed([node], to_operator=False).nodes
    assert seen.adapters.failed == {} and seen.adapters.num_by_place == node.adapters.num_by_place


async def test_what_is_wrong_in_a_change_is_said(gateway: Gateway) -> None:
    wrong: list[tuple[str, Any, int]] = [
        ("nowhere/drain", None, 404),
        ("nowhere/restart", {"force": True}, 404),
        ("nowhere/reopen", None, 404),
        ("local/reopen", None, 409),
        ("local/drain", {"forced": True}, 400),
        ("local/drain", {"timeout_s": -1}, 400),
        ("local/drain", [], 400),
    ]
    for route, body, status in wrong:
        reply = await gateway.call("POST", f"/v1/nodes/{route}", body)
        assert reply.status == status and reply.body["error"]["message"], (route, reply)


async def test_a_change_goes_on_behind_its_reply_and_another_one_has_to_wait() -> None:
    ends: asyncio.Queue[Exception | None] = asyncio.Queue()
    asked: list[str] = []

    async def restart(node_id: str) -> None:
        asked.append(node_id)
        if (error := await ends.get()) is not None:
            raise error

    async with routed("a", "b") as (router, placement):
        placement.restart = restart  # type: ignore[method-assign]
        maintenance = NodeMaintenance(nodes_of(router), 30.0)
        assert (await maintenance.restart("a", 5.0, is_forced=False)).id == "a"
        assert (await maintenance.restart("a", 9.0, is_forced=False)).id == "a", "under way: nothing to do"
        with pytest.raises(GatewayError, match="restart of this node is under way"):
            await maintenance.drain("a", 5.0, is_forced=True)
        assert asked == ["a"]
        ends.put_nowait(GatewayError("engine_failed", "It would not start."))
        await settled()
        assert [node.error for node in maintenance.states()] == ["It would not start.", None]
        ends.put_nowait(None)
        await maintenance.restart("a", 5.0, is_forced=False)
        assert [node.error for node in maintenance.states()] == [None, None]
        await maintenance.close()


async def test_nodes_behind_a_router_are_told_of_drained_restarted_and_reopened() -> None:
    async with routed("a", "b") as (router, placement):
        placement.inner["b"].scheduling, placement.inner["b"].tiers = SCHEDULING, TIERS
        maintenance = NodeMaintenance(nodes_of(router), 5.0)
        first, second = maintenance.states()
        assert (first.id, first.state, second.id) == ("a", "ready", "b") and first.incarnation != ""
        assert (await maintenance.drain("a", None, is_forced=False)).is_draining
        assert [node.state for node in maintenance.states()] == ["draining", "ready"]
        with pytest.raises(GatewayError, match="only node"):
            await maintenance.drain("b", None, is_forced=False)
        assert maintenance.reopen("a").is_open
        await maintenance.restart("a", None, is_forced=False)
        await until(lambda: maintenance.states()[0].is_open)
        assert placement.restarted == ["a"] and maintenance.states()[0].incarnation != first.incarnation
        await maintenance.drain("a", None, is_forced=True)
        assert (await maintenance.drain("b", None, is_forced=True)).is_draining, "by force"
        await until(lambda: maintenance.states()[1].load is not None)
        placement.kill("b")
        await settled()
        dead = maintenance.states()[1]
        assert not dead.is_open and dead.incarnation == ""
        assert (dead.load, dead.kv, dead.adapters.num_by_place) == (None, None, {}), (
            "what it had has ended with it"
        )


async def picture(socket: Socket) -> Frame:
    """What a socket that begins to watch is shown."""
    await socket.send(type="watch_engine")
    frame = await socket.next()
    assert frame["type"] == "engine", frame
    return frame


async def test_a_tenant_sees_its_own_advisories_and_agents_and_no_sums_of_others(gateways: Gateways) -> None:
    gateway = busy(await gateways(**KEYS))
    async with (
        gateway.socket(key=TENANT, hello={}) as mine,
        gateway.socket(key=OTHER, hello={}) as other,
        gateway.socket(key=OPERATOR, hello={}) as operator,
    ):
        await mine.send(type="typing", session_id="lisbon")
        services = gateway.server.services
        runs, owner = services.recognition.runs, services.keys.authenticate(TENANT).owner
        runs.asked(owner, "porto", 0.0, offers_tools=True)
        runs.answered(owner, "porto", 0.0, None, calls_tools=True)
        told = await gateway.node.told()
        for state in ("staging", "staging", "warm", "hit"):  # each is told once
            told.report(state, num_tokens=32, device_tokens=32 * (state != "staging"))
        heard = [await mine.next() for _ in range(3)]
        tiers = {"staging": "host", "warm": "device", "hit": "device"}
        assert {each["state"]: each["tier"] for each in heard} == tiers
        to_me, to_other, to_operator = [await picture(socket) for socket in (mine, other, operator)]
    (trail,) = to_me["advisories"]
    assert (trail["session_id"], trail["source"]) == ("lisbon", "typing")
    assert [each["state"] for each in trail["states"]] == ["staging", "warm", "hit"]
    assert to_other["advisories"] == to_operator["advisories"] == []
    assert [(each["session_id"], each["state"]) for each in to_me["runs"]] == [("porto", "tools")]
    assert to_other["runs"] == to_operator["runs"] == []
    assert to_operator["advisory_counts"] == {"live": 0, "hit": 1}
    assert to_me["advisory_counts"] is to_other["advisory_counts"] is None
    assert to_me["nodes"][0]["kv"] is None and to_operator["nodes"][0]["kv"] is not None


@pytest.mark.virtual_time
async def test_who_has_not_taken_the_last_picture_gets_no_further_one(gateway: Gateway) -> None:
    """A peer that reads nothing costs what its socket holds, however long it watches."""
    gateway.node.adapter_names = [f"{number}-{'x' * 40_000}" for number in range(64)]
    gateway.node.adapter_place = "host"
    async with gateway.socket(hello={}) as socket:
        await picture(socket)
        (connection,) = gateway.server.services.connections
        socket.raw.transport.pause_reading()
        await until(lambda: connection.blocked_since is not None, PUSH_EVERY_S)
        for _ in range(40):
            await passes(PUSH_EVERY_S)
        await socket.send(type="watch_engine", on=False)
        await socket.send(type="ping")
        socket.raw.transport.resume_reading()
        num_shown = 0
        while (await socket.next())["type"] == "engine":
            num_shown += 1
        assert num_shown < 20, "what its socket held, and none of the forty that came later"
