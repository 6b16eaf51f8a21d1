import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from engine_bridge.cluster import wire
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.server import NodeServer
from engine_bridge.protocol.engine_request import (
    CalledTool,
    ChatMessage,
    EngineRequest,
    OfferedTool,
    RequestId,
)
from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest
from engine_bridge.protocol.figures import SchedulingStats
from engine_bridge.protocol.node import Advisory, AdvisoryReport, JsonReply, SessionHint, SseReply
from kvtiers.stats import DiskTierStats, HostStats, TierStats
from tests.unit.cluster.catalog_node import PATIENCE_S, connected, until
from tests.unit.gateway.fake_node import FakeNode
from tests.unit.gateway.nodes import PlacedNode


def question(name: str = "r1") -> EngineRequest:
    return EngineRequest(request_id=RequestId(name), messages=(ChatMessage("user", "hi"),))


@pytest.mark.parametrize("is_by_name", [False, True])
async def test_an_answer_is_stopped_by_closing_it_or_by_its_name(is_by_name: bool) -> None:
    node = FakeNode()
    async with connected(node) as (remote, _):
        async with aclosing(remote.generate(question())) as deltas:  # type: ignore[type-var]
            answer = await begun(node, deltas)
            if is_by_name:
                assert await remote.cancel(RequestId("r1"))
                assert [delta async for delta in deltas][-1].finish_reason == "stopped"
                assert answer.is_cancelled
        await until(lambda: answer.is_cancelled if is_by_name else answer.is_closed)
        assert not await remote.cancel(RequestId("r1"))


async def test_tools_go_to_the_node_and_calls_of_them_come_back() -> None:
    node = FakeNode()
    called = CalledTool("c1", "files__read", '{"path": "a"}')
    tool = OfferedTool(
        "files__read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}}
    )
    said = (ChatMessage("assistant", "", calls=(called,)), ChatMessage("tool", "the text", call_id="c1"))
    request = EngineRequest(request_id=RequestId("r1"), messages=said, tools=(tool,), turn="continues")
    async with connected(node) as (remote, _):
        assert remote.can_use_tools
        async with aclosing(remote.generate(request)) as deltas:  # type: ignore[type-var]
            answer = await begun(node, deltas)
            assert (answer.request.messages, answer.request.tools) == (said, (tool,))
            answer.call(called)
            assert [delta.calls for delta in [each async for each in deltas]][-1] == (called,)


async def test_when_the_line_is_cut_all_that_is_under_way_ends_at_both_ends_and_can_be_tried_again() -> None:
    node, over = FakeNode(), asyncio.Event()
    node.gate.clear()
    async with connected(node, on_close=over.set) as (remote, link):
        tasks = [asyncio.create_task(collect(remote)), asyncio.create_task(remote.prefill(question("draft")))]
        answer = await node.asked()
        await node.prefilled()
        link.abort()
        for end in (*tasks, collect(remote)):
            with pytest.raises(EngineUnavailable):
                await end
        assert remote.progress.state == "starting"
        assert [info.name for info in remote.adapters()] == ["shout", "pirate"]
        await until(lambda: answer.is_closed and node.cancelled_prefills == 1)
        await asyncio.wait_for(over.wait(), PATIENCE_S)


async def test_calls_of_the_apis_go_through_with_who_asks_and_without_keys() -> None:
    async with connected(PlacedNode("n1")) as (remote, _):
        headers = {"X-Request-Id": "r\udc80", "Authorization": "Bearer secret"}
        reply = await remote.serve("chat", {"n": 1}, headers, EngineRequest(tenant="t"))
    assert reply == JsonReply(200, b"chat 1 t {'X-Request-Id': 'r?'}")


@pytest.mark.parametrize("is_read", [False, True])
async def test_streamed_calls_give_events_and_their_error_or_are_stopped(is_read: bool) -> None:
    node = PlacedNode("n1")
    async with connected(node) as (remote, _):
        reply = await remote.serve("chat", {"stream": True}, {})
        call = await node.called()
        for event in (b"a", b"b", *([EngineUnavailable("gone")] if is_read else ())):
            call.events.put_nowait(event)
        assert isinstance(reply, SseReply)
        if is_read:
            assert [await anext(reply.events), await anext(reply.events)] == [b"a", b"b"]
            with pytest.raises(EngineUnavailable, match="gone"):
                await anext(reply.events)
        else:
            await reply.events.aclose()  # type: ignore[attr-defined]
        await until(lambda: call.is_closed)


async def test_what_is_read_at_once_follows_the_nodes_reports() -> None:
    """Also once it has had no figures for a moment."""
    node = FakeNode()
    async with connected(node) as (remote, _):
        read = (remote.model_names, remote.max_model_len, remote.progress.state)
        assert read == (("fake-model",), 4096, "ready")
        asked = asyncio.Event()

        def fail() -> None:
            asked.set()
            raise AttributeError("the engine is being closed")

        node.figures = fail  # type: ignore[method-assign]
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        del node.figures
        node.num_steps, node.adapter_names = 8, ["robot"]
        await until(lambda: remote.figures().num_steps == 8)
        assert [info.name for info in remote.adapters()] == ["robot"]


async def test_the_load_of_a_node_that_is_away_is_none_and_its_counts_stay() -> None:
    node, load = FakeNode(), {"num_running": 4, "num_waiting": 3, "num_by_reason": {"queued": 3}}
    figures: dict[str, Any] = {"policy": "bounded", "lanes": None, "seconds": {}, "length_errors": None}
    node.scheduling = SchedulingStats(**figures, **load, counts={"admitted": 9}, num_kv_blocks=60)
    node.tiers = TierStats(
        host=HostStats(bytes=10, num_hits=7), disk=DiskTierStats(bytes=20, num_unwritten=2)
    )
    node.num_steps = 8
    async with connected(node) as (remote, link):
        assert remote.figures().scheduling_stats == node.scheduling
        link.abort()
        await until(lambda: not remote.is_up)
        left = remote.figures()
    none = {"num_running": 0, "num_waiting": 0, "num_by_reason": {}}
    assert left.scheduling_stats == SchedulingStats(**figures, **none, counts={"admitted": 9})
    assert left.kv_tiers == TierStats(host=HostStats(num_hits=7), disk=DiskTierStats(bytes=20))
    assert left.num_steps == 8


@pytest.mark.parametrize(("token", "guess"), [(b"token", b"another"), (b"token", b""), (b"", b"token")])
async def test_without_the_token_there_is_no_word_but_a_challenge(token: bytes, guess: bytes) -> None:
    node = FakeNode(["secret"])
    with pytest.raises(ConnectionError):
        async with connected(node, token=token, guess=guess):
            pass
    assert node.answers == []


MESSAGES = b"\x93\xa6notice\xa2\xff\xfe\xc0", b"\x93\xa4call\xa5drain" + b"\x91" * 4000
NONSENSE = [(len(each) + 4).to_bytes(4, "little") + bytes(4) + each for each in MESSAGES]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", *NONSENSE], ids=["HTTP", "no UTF-8", "brackets"])
async def test_a_gateway_that_talks_nonsense_is_cut(caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    node = FakeNode(["still here"])
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(NodeServer(node, "n1").connection, theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(said)
    async with asyncio.timeout(PATIENCE_S):
        (frame,) = wire.Frames(wire.ToGateway).feed(await reader.read())
    assert isinstance(frame.message, wire.Challenge)
    writer.close()
    assert "Traceback" not in caplog.text and "the connection to a gateway is cut" in caplog.text
    async with connected(node) as (remote, _):
        assert (await collect(remote))[0].text == "still here"


async def test_a_follower_that_raises_keeps_nobody_else_from_hearing() -> None:
    """Who looks after the node starts it again when it hears that it is lost."""

    def raises(report: AdvisoryReport) -> None:
        raise ValueError("a follower of somebody's")

    node = FakeNode()
    reports: list[AdvisoryReport] = []
    ends: list[AdvisoryReport] = []
    async with connected(node) as (remote, link):
        await remote.advise(Advisory(advisory_id="a", session_id="s"), raises)
        await remote.advise(Advisory(advisory_id="b", session_id="s"), reports.append)
        for number in range(2):
            (await node.told(number)).report("host", num_tokens=64)
        await until(lambda: len(reports) == 1)
        await remote.advise(Advisory(advisory_id="c", session_id="s"), ends.append)
        remote.retract("c", is_expired=True)
        await until(lambda: [report.state for report in ends] == ["expired"])
        assert link.is_up
        link.abort()
        await until(lambda: len(reports) == 2)
        assert reports[-1].state == "expired" and not remote.is_up
        with pytest.raises(EngineUnavailable):
            await remote.models()


async def test_a_notice_that_fails_and_a_reply_that_no_frame_holds_end_nothing() -> None:
    heard = asyncio.Event()

    class Failing(FakeNode):
        def end_session(self, tenant: str, session_id: str) -> None:
            heard.set()
            raise RuntimeError("the store is being closed")

        async def models(self) -> JsonReply:
            return JsonReply(200, "half a pair: \ud800")  # type: ignore[arg-type]

    node = Failing()
    node.gate.clear()
    async with connected(node) as (remote, link):
        prefill = asyncio.create_task(remote.prefill(question("draft")))
        await node.prefilled()
        remote.end_session("t", "s")
        await heard.wait()
        remote.hint_session(hint := SessionHint(session_id="s", tenant="t", keep_s=60.0, is_idle=True))
        await until(lambda: node.session_hints == [hint])
        with pytest.raises(InvalidRequest):
            await remote.models()
        node.gate.set()
        assert await prefill == 16 and link.is_up


async def collect(remote: RemoteNode) -> list[Any]:
    return [delta async for delta in remote.generate(question())]


async def begun(node: FakeNode, deltas: AsyncIterator[Any]) -> Any:
    """The node's answer, after a first word of it was read."""
    first = asyncio.ensure_future(anext(deltas))
    answer = await node.asked()
    answer.say("one")
    assert (await first).text == "one"
    return answer
