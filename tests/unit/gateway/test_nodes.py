"""Nodes as people see and steer them: over REST, in metrics, and live on the chat socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from engine_bridge.protocol.node import LaneStats, SchedulingStats
from gateway.errors import GatewayError
from gateway.nodes.known_nodes import OneNode, nodes_of
from gateway.nodes.maintenance import Steward
from gateway.nodes.node_states import NodeList, NodeStanding, listed, standing_of
from gateway.turns.engine_feed import PUSH_EVERY_S
from kvtiers.stats import DiskTierStats, HostStats, PeerStats, TierStats

from .fake_node import PATIENCE_S, FakeNode
from .front import Frame, Gateway, Gateways, Socket
from .nodes import routed
from .parts import passes, settled

OPERATOR, TENANT, OTHER = (
    "ov-an-operators-key-for-tests",
    "ov-a-tenants-key-for-tests",
    "ov-another-tenants-key",
)
KEYS = {"api_keys": (TENANT, OTHER), "operator_keys": (OPERATOR,)}
LANES = LaneStats(boundaries=(0.5,), num_waiting=(2, 1), quota_tokens=(400, 600), used_tokens=(300, 0))
SCHEDULING = SchedulingStats(
    policy="mlq",
    num_running=4,
    num_waiting=3,
    num_by_reason={"lane_quota": 3},
    lanes=LANES,
    counts={},
    seconds={},
    length_errors=None,
    num_answer_tokens=70,
    num_kv_blocks=60,
    num_free_kv_blocks=20,
    block_size=16,
)
TIERS = TierStats(
    host=HostStats(bytes=10, capacity_bytes=100, num_hits=7),
    disk=DiskTierStats(is_on=True, bytes=20, capacity_bytes=200, num_hits=3),
    peers=PeerStats(is_on=True, bytes_fetched=40, num_fetched=2),
)


def busy(gateway: Gateway) -> Gateway:
    gateway.node.scheduling, gateway.node.tiers = SCHEDULING, TIERS
    return gateway


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(gateway.server.url) as session:
        yield session


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def list_of(gateway: Gateway, key: str | None = None) -> NodeList:
    async with (
        aiohttp.ClientSession(gateway.server.url, headers=bearer(key)) as http,
        http.get("/v1/nodes") as reply,
    ):
        assert reply.status == 200, await reply.text()
        return msgspec.json.decode(await reply.read(), type=NodeList)


# -- the list ----------------------------------------------------------------------------------------------------------


async def test_one_node_is_told_of_with_its_load_its_tiers_and_its_adapters(gateway: Gateway) -> None:
    listed = await list_of(busy(gateway))
    (node,) = listed.nodes
    assert (node.id, node.model, node.state, node.is_draining) == ("local", "fake-model", "ready", False)
    assert node.load is not None and node.load.lanes == LANES
    assert (node.load.num_running, node.load.num_free_kv_blocks, node.load.num_answer_tokens) == (4, 20, 70)
    assert node.kv is not None and node.kv.disk is not None
    assert (node.kv.host.bytes, node.kv.host.num_hits, node.kv.disk.capacity_bytes) == (10, 7, 200)
    assert node.adapters.num_by_place == {"disk": 2} and node.adapters.resident == []
    assert (listed.totals.num_open, listed.totals.num_running, listed.totals.num_kv_blocks) == (1, 4, 60)
    assert (await list_of(gateway)).nodes[0].incarnation == node.incarnation != ""


async def test_a_node_without_an_engine_has_no_load_yet(gateway: Gateway) -> None:
    gateway.node.state = "starting"
    listed = await list_of(gateway)
    assert (listed.nodes[0].state, listed.nodes[0].load, listed.nodes[0].kv) == ("starting", None, None)
    assert (listed.totals.num_nodes, listed.totals.num_open, listed.totals.num_running) == (1, 0, 0)


async def test_everybodys_kv_and_what_failed_are_for_operators(gateways: Gateways) -> None:
    gateway = busy(await gateways(**KEYS))
    assert (await list_of(gateway, OPERATOR)).nodes[0].kv is not None
    seen = (await list_of(gateway, TENANT)).nodes[0]
    assert seen.kv is None and seen.load is not None
    async with (
        aiohttp.ClientSession(gateway.server.url) as nobody,
        nobody.get("/v1/nodes") as reply,
    ):
        assert reply.status == 401


def test_what_a_node_cannot_load_is_shown_to_operators() -> None:
    why = {f"adapter-{number:03}": "too large" for number in range(100)}
    node = standing_of("node-2", FakeNode(), incarnation="x", failed_adapters=why)
    assert next(iter(node.adapters.failed.items())) == ("adapter-000", "too large")
    assert len(node.adapters.failed) == 64
    assert listed([node], to_operator=True).nodes[0].adapters == node.adapters
    (seen,) = listed([node], to_operator=False).nodes
    assert seen.adapters.failed == {} and seen.adapters.num_by_place == node.adapters.num_by_place


# -- draining and restarting -------------------------------------------------------------------------------------------


async def told(
    http: aiohttp.ClientSession, path: str, body: Any = None, key: str | None = None
) -> tuple[int, Any]:
    async with http.post(path, json=body, headers=bearer(key)) as reply:
        return reply.status, await reply.json()


async def test_the_only_node_is_drained_by_force_alone(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    status, body = await told(http, "/v1/nodes/local/drain")
    assert (status, body["error"]["code"], body["error"]["param"]) == (409, "conflict", "force")
    assert gateway.node.state == "ready"
    status, body = await told(http, "/v1/nodes/local/drain", {"force": True, "timeout_s": 5})
    assert (status, body["state"], body["is_draining"]) == (202, "draining", True)
    async with http.get("/readyz") as reply:
        assert reply.status == 503


async def test_an_engine_of_the_servers_own_process_is_not_started_again(
    gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    status, body = await told(http, "/v1/nodes/local/restart", {"force": True})
    assert (status, body["error"]["code"]) == (409, "conflict") and "--engine process" in body["error"][
        "message"
    ]
    assert gateway.node.state == "ready"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/nodes/nowhere/drain", None, 404),
        ("/v1/nodes/nowhere/restart", {"force": True}, 404),
        ("/v1/nodes/nowhere/reopen", None, 404),
        ("/v1/nodes/local/reopen", None, 409),
        ("/v1/nodes/local/drain", {"forced": True}, 400),
        ("/v1/nodes/local/drain", {"timeout_s": -1}, 400),
        ("/v1/nodes/local/drain", [], 400),
    ],
)
async def test_what_is_wrong_with_a_change_is_said(
    http: aiohttp.ClientSession, path: str, body: Any, status: int
) -> None:
    found, reply = await told(http, path, body)
    assert found == status and reply["error"]["message"], reply


async def test_nodes_are_changed_by_operators(gateways: Gateways) -> None:
    gateway = await gateways(**KEYS)
    async with aiohttp.ClientSession(gateway.server.url) as http:
        assert (await told(http, "/v1/nodes/local/drain", {"force": True}, TENANT))[0] == 403
        assert (await told(http, "/v1/nodes/local/drain", {"force": True}))[0] == 401
        assert gateway.node.state == "ready"
        assert (await told(http, "/v1/nodes/local/drain", {"force": True}, OPERATOR))[0] == 202


class TwoNodes:
    """Nodes whose changes a test ends."""

    def __init__(self) -> None:
        self.nodes = {"a": FakeNode(), "b": FakeNode()}
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.asked: list[tuple[str, str, float]] = []

    def states(self) -> list[NodeStanding]:
        return [standing_of(name, node, incarnation="1") for name, node in self.nodes.items()]

    async def drain(self, node_id: str, timeout_s: float, *, is_forced: bool) -> bool:
        self.asked.append(("drain", node_id, timeout_s))
        await self.nodes[node_id].drain(timeout_s)
        await self._end()
        del self.nodes[node_id]
        return True

    async def restart(self, node_id: str, timeout_s: float, *, is_forced: bool) -> None:
        self.asked.append(("restart", node_id, timeout_s))
        await self._end()

    def reopen(self, node_id: str) -> None:
        self.nodes[node_id].state = "ready"

    async def _end(self) -> None:
        if (error := await self.ends.get()) is not None:
            raise error


async def test_one_of_two_nodes_is_drained_without_force_and_may_leave() -> None:
    nodes = TwoNodes()
    steward = Steward(nodes, 30.0)
    nodes.ends.put_nowait(None)
    before = await steward.drain("a", None, is_forced=False)
    assert (before.id, before.state, before.is_draining) == ("a", "closed", True)
    assert [node.id for node in steward.states()] == ["b"] and nodes.asked == [("drain", "a", 30.0)]
    with pytest.raises(GatewayError, match="only node"):
        await steward.restart("b", 1.0, is_forced=False)


async def test_a_change_goes_on_behind_its_reply_and_another_one_has_to_wait() -> None:
    nodes = TwoNodes()
    steward = Steward(nodes, 30.0)
    assert (await steward.restart("a", 5.0, is_forced=False)).id == "a"
    assert (await steward.restart("a", 9.0, is_forced=False)).id == "a", "it is under way: nothing to do"
    with pytest.raises(GatewayError, match="restart of this node is under way"):
        await steward.drain("a", 5.0, is_forced=True)
    assert nodes.asked == [("restart", "a", 5.0)]
    nodes.ends.put_nowait(GatewayError("engine_failed", "It would not start."))
    await settled()
    assert [node.error for node in steward.states()] == ["It would not start.", None]
    nodes.ends.put_nowait(None)
    await steward.restart("a", 5.0, is_forced=False)
    assert [node.error for node in steward.states()] == [None, None]


async def test_what_a_bug_says_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    nodes = TwoNodes()
    steward = Steward(nodes, 30.0)
    await steward.restart("a", 5.0, is_forced=False)
    nodes.ends.put_nowait(ValueError("/secret/path"))
    await settled()
    assert "secret" not in str(steward.states()) and "secret" in caplog.text
    await steward.close()


async def test_the_one_node_of_a_server_says_what_the_node_says() -> None:
    node = FakeNode()
    assert [standing.state for standing in OneNode(node).states()] == ["ready"]
    node.state = "rebuilding"
    assert [standing.is_open for standing in OneNode(node).states()] == [False]


async def test_nodes_behind_a_router_are_told_of_drained_restarted_and_reopened() -> None:
    async with routed("a", "b") as (router, placement):
        steward = Steward(nodes_of(router), 5.0)
        first, second = steward.states()
        assert (first.id, first.state, second.id) == ("a", "ready", "b") and first.incarnation != ""
        assert (await steward.drain("a", None, is_forced=False)).is_draining
        assert [node.state for node in steward.states()] == ["draining", "ready"]
        with pytest.raises(GatewayError, match="only node"):
            await steward.drain("b", None, is_forced=False)
        assert steward.reopen("a").is_open
        await steward.restart("a", None, is_forced=False)
        async with asyncio.timeout(PATIENCE_S):
            while not steward.states()[0].is_open:
                await asyncio.sleep(0.01)
        assert placement.restarted == ["a"] and steward.states()[0].incarnation != first.incarnation
        await steward.drain("a", None, is_forced=True)
        assert (await steward.drain("b", None, is_forced=True)).is_draining, "by force"
        placement.kill("b")
        await settled()
        assert not steward.states()[1].is_open and steward.states()[1].incarnation == ""


# -- metrics -----------------------------------------------------------------------------------------------------------


async def test_metrics_tell_of_each_node(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    busy(gateway)
    async with http.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    metrics = {
        name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if "node=" in line)
    }
    assert metrics['overture_node_state{node="local",state="ready"}'] == 1
    assert metrics['overture_node_state{node="local",state="draining"}'] == 0
    assert metrics['overture_node_running{node="local"}'] == 4
    assert metrics['overture_node_kv_free_blocks{node="local"}'] == 20
    assert metrics['overture_node_answer_tokens_total{node="local"}'] == 70
    assert metrics['overture_node_tier_bytes{node="local",tier="disk"}'] == 20
    assert metrics['overture_node_peer_bytes_total{direction="in",node="local"}'] == 40


# -- live on the socket ------------------------------------------------------------------------------------------------


async def picture(socket: Socket) -> Frame:
    frame = await socket.next()
    assert frame["type"] == "engine", frame
    return frame


async def test_who_watches_sees_the_nodes_at_once_and_again(gateway: Gateway) -> None:
    busy(gateway)
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="watch_engine")
        first = await picture(socket)
        assert first["nodes"][0]["load"]["num_running"] == 4 and first["totals"]["num_nodes"] == 1
        assert first["advisories"] == [] and first["advisory_counts"] == {"live": 0}
        gateway.node.state = "rebuilding"
        await passes(PUSH_EVERY_S)
        second = await picture(socket)
        assert second["nodes"][0]["state"] == "rebuilding" and second["at_s"] >= first["at_s"]


async def test_nothing_is_shown_to_who_does_not_watch(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="watch_engine")
        await picture(socket)
        await socket.send(type="watch_engine", on=False)
        await socket.send(type="ping", t=1)
        assert (await socket.next())["type"] == "pong"
        assert not any(
            task.get_name() == "engine room" and not task.cancelling() for task in asyncio.all_tasks()
        )
        await passes(3 * PUSH_EVERY_S)
        await socket.send(type="ping", t=2)
        assert await socket.next() == {"type": "pong", "t": 2}


async def test_a_socket_that_goes_watches_no_longer(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="watch_engine")
        await picture(socket)
    async with asyncio.timeout(PATIENCE_S):
        while any(task.get_name() == "engine room" for task in asyncio.all_tasks()):
            await asyncio.sleep(0)


async def test_watching_comes_after_hello(gateway: Gateway) -> None:
    async with gateway.socket() as socket:
        await socket.send(type="watch_engine")
        assert (await socket.next())["code"] == "bad_request"


async def test_the_last_advisories_are_shown_with_the_states_that_they_went_through(gateway: Gateway) -> None:
    turn = await gateway.answered("a", "Yes.", owner="local")
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="typing", session_id=turn.session_id)
        advisory = await gateway.node.told()
        advisory.report("staging")
        advisory.report("warm", num_tokens=32, device_tokens=32)
        advisory.report("hit", num_tokens=32, device_tokens=32, lead_s=0.5)
        for _ in range(3):
            assert (await socket.next())["type"] == "advisory"
        await socket.send(type="watch_engine")
        shown = await picture(socket)
    (trail,) = shown["advisories"]
    assert (trail["session_id"], trail["source"]) == (turn.session_id, "typing")
    assert [each["state"] for each in trail["states"]] == ["staging", "warm", "hit"]
    assert trail["outcome"]["lead_ms"] == 500.0 and trail["outcome"]["device_tokens"] == 32
    assert shown["advisory_counts"] == {"live": 0, "hit": 1}


async def test_a_tenant_sees_its_own_advisories_and_no_sums_of_others(gateways: Gateways) -> None:
    gateway = busy(await gateways(**KEYS))
    async with (
        gateway.socket(key=TENANT, hello={}) as mine,
        gateway.socket(key=OTHER, hello={}) as other,
        gateway.socket(key=OPERATOR, hello={}) as operator,
    ):
        await mine.send(type="typing", session_id="lisbon")
        (await gateway.node.told()).report("staging")
        await mine.next()
        shown = {}
        for name, socket in (("mine", mine), ("other", other), ("operator", operator)):
            await socket.send(type="watch_engine")
            shown[name] = await picture(socket)
    assert [each["session_id"] for each in shown["mine"]["advisories"]] == ["lisbon"]
    assert shown["other"]["advisories"] == shown["operator"]["advisories"] == []
    assert shown["operator"]["advisory_counts"] == {"live": 1}
    assert shown["mine"]["advisory_counts"] is shown["other"]["advisory_counts"] is None
    assert shown["mine"]["nodes"][0]["kv"] is None and shown["operator"]["nodes"][0]["kv"] is not None


async def test_who_has_not_taken_the_last_picture_gets_no_further_one(gateway: Gateway) -> None:
    """A peer that reads nothing costs what its socket holds, however long it watches."""
    gateway.node.adapter_names = [f"{number}-{'x' * 40_000}" for number in range(64)]
    gateway.node.adapter_place = "host"
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="watch_engine")
        await picture(socket)
        (connection,) = gateway.server.services.connections
        socket.raw.transport.pause_reading()
        async with asyncio.timeout(PATIENCE_S):
            while connection.blocked_since is None:
                await passes(PUSH_EVERY_S)
        for _ in range(5):
            await passes(PUSH_EVERY_S)
        assert connection._outbox == [], "its peer would be shown what is long past"  # type: ignore[attr-defined]
        socket.raw.transport.abort()
