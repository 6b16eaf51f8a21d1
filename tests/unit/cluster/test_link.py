"""A node behind a socket does what the node itself does; when the socket ends, everything under way ends once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from engine_bridge.cluster import wire
from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.server import NodeServer
from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest, NotSupported
from engine_bridge.protocol.node import (
    Advisory,
    AdvisoryReport,
    Api,
    ChatMessage,
    GenerateRequest,
    JsonReply,
    RequestId,
    SseReply,
)
from engine_bridge.protocol.request_context import NOBODY, RequestContext
from tests.unit.gateway.fake_node import FakeNode

PATIENCE_S = 10.0


class ServingNode(FakeNode):
    """Answers API calls: with what it was asked, or with events that the test sends."""

    def __init__(self) -> None:
        super().__init__()
        self.events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.are_closed = asyncio.Event()

    async def serve(
        self, api: Api, body: Any, headers: Mapping[str, str], context: RequestContext = NOBODY
    ) -> JsonReply | SseReply:
        if body.get("stream"):
            return SseReply(self._sent())
        return JsonReply(200, f"{api} {body['n']} {context.tenant} {dict(headers)}".encode())

    async def _sent(self) -> AsyncIterator[bytes]:
        try:
            while (event := await self.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.are_closed.set()


@asynccontextmanager
async def pair(
    node: FakeNode, *, token: bytes = b"", guess: bytes | None = None
) -> AsyncIterator[tuple[RemoteNode, NodeLink, NodeServer]]:
    """A node and a gateway that are connected; guess: what the gateway takes for the token."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    server = NodeServer(node, "n1", token)
    remote = RemoteNode("fake-model")
    _, _ = await loop.connect_accepted_socket(server.connection, theirs)
    transport, link = await loop.create_connection(
        lambda: NodeLink(token if guess is None else guess, remote.take_report, remote.detach), sock=ours
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await link.greeted
            remote.attach(link)
            yield remote, link, server
    finally:
        transport.abort()


def question(name: str = "r1") -> GenerateRequest:
    return GenerateRequest(request_id=RequestId(name), messages=(ChatMessage("user", "hi"),))


async def test_an_answer_comes_as_the_node_gives_it() -> None:
    node = FakeNode(["one ", "two"])
    async with pair(node) as (remote, _, _):
        deltas = [delta async for delta in remote.generate(question())]
    assert "".join(delta.text for delta in deltas) == "one two"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].usage is not None
    assert node.answers[0].request == question()


async def test_closing_an_answer_stops_it_on_the_node() -> None:
    node = FakeNode()
    async with pair(node) as (remote, _, _):
        async with aclosing(remote.generate(question())) as deltas:  # type: ignore[type-var]
            answer = await begun(node, deltas)
        await until(lambda: answer.is_closed)


async def test_cancelling_by_name_ends_the_answer_as_stopped() -> None:
    node = FakeNode()
    async with pair(node) as (remote, _, _):
        deltas = remote.generate(question())
        answer = await begun(node, deltas)
        assert await remote.cancel(RequestId("r1"))
        rest = [delta async for delta in deltas]
        assert rest[-1].finish_reason == "stopped"
        assert answer.is_cancelled
        assert not await remote.cancel(RequestId("r1"))


async def test_errors_of_the_node_are_raised_here() -> None:
    node = FakeNode()
    node.refusal = InvalidRequest("too long", code="prompt_too_long")
    node.advise_error = NotSupported("no tiers")
    async with pair(node) as (remote, _, _):
        with pytest.raises(InvalidRequest, match="too long"):
            _ = [delta async for delta in remote.generate(question())]
        with pytest.raises(NotSupported):
            await remote.advise(Advisory(advisory_id="a", session_id="s"), lambda report: None)


async def test_when_the_node_goes_all_that_is_under_way_ends_once_and_can_be_tried_again() -> None:
    node = FakeNode()
    node.gate.clear()
    async with pair(node) as (remote, link, _):
        answer = asyncio.create_task(collect(remote))
        prefill = asyncio.create_task(remote.prefill(question("draft")))
        await node.asked()
        await node.prefilled()
        link.abort()
        for task in (answer, prefill):
            with pytest.raises(EngineUnavailable):
                await task
        with pytest.raises(EngineUnavailable):
            await collect(remote)
        assert remote.progress.state == "starting"
        assert [info.name for info in remote.adapters()] == ["shout", "pirate"]


async def test_when_the_gateway_goes_its_answers_stop() -> None:
    node = FakeNode()
    node.gate.clear()
    async with pair(node) as (remote, link, server):
        over = asyncio.Event()
        server.on_close = over.set
        tasks = [asyncio.create_task(collect(remote)), asyncio.create_task(remote.prefill(question("draft")))]
        answer = await node.asked()
        await node.prefilled()
        link.abort()
        await until(lambda: answer.is_closed and node.cancelled_prefills == 1)
        await over.wait()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_advisories_tell_how_they_stand_until_they_end() -> None:
    node = FakeNode()
    reports: list[AdvisoryReport] = []
    async with pair(node) as (remote, _, _):
        await remote.advise(Advisory(advisory_id="a", session_id="s"), reports.append)
        told = await node.told()
        told.report("host", num_tokens=64)
        remote.retract("a", is_expired=True)
        await until(lambda: len(reports) == 2)
        assert [report.state for report in reports] == ["host", "expired"]
        remote.end_session("t", "s")
        await until(lambda: node.ended_sessions == [("t", "s")])


async def test_an_advisory_of_a_node_that_went_is_over() -> None:
    reports: list[AdvisoryReport] = []
    async with pair(FakeNode()) as (remote, link, _):
        await remote.advise(Advisory(advisory_id="a", session_id="s"), reports.append)
        link.abort()
        await until(lambda: bool(reports))
    assert [report.state for report in reports] == ["expired"]


async def test_calls_of_the_apis_go_through_with_who_asks_and_without_keys() -> None:
    async with pair(ServingNode()) as (remote, _, _):
        headers = {"X-Request-Id": "r\udc80", "Authorization": "Bearer secret"}
        reply = await remote.serve("chat", {"n": 1}, headers, RequestContext(tenant="t"))
    assert reply == JsonReply(200, b"chat 1 t {'X-Request-Id': 'r?'}")


async def test_streamed_calls_give_their_events_and_then_their_error() -> None:
    node = ServingNode()
    for event in (b"a", b"b", EngineUnavailable("gone")):
        node.events.put_nowait(event)
    async with pair(node) as (remote, _, _):
        reply = await remote.serve("chat", {"stream": True}, {})
        assert isinstance(reply, SseReply)
        assert [await anext(reply.events), await anext(reply.events)] == [b"a", b"b"]
        with pytest.raises(EngineUnavailable, match="gone"):
            await anext(reply.events)


async def test_a_streamed_call_that_nobody_reads_is_stopped_by_closing_it() -> None:
    node = ServingNode()
    node.events.put_nowait(b"a")
    async with pair(node) as (remote, _, _):
        reply = await remote.serve("chat", {"stream": True}, {})
        assert isinstance(reply, SseReply)
        await reply.events.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(node.are_closed.wait(), PATIENCE_S)


async def test_what_is_read_at_once_follows_the_nodes_reports() -> None:
    node = FakeNode()
    async with pair(node) as (remote, _, _):
        assert (remote.model_name, remote.max_model_len, remote.progress.state) == (
            "fake-model",
            4096,
            "ready",
        )
        node.num_steps, node.adapter_names = 7, ["robot"]
        await until(lambda: remote.num_steps == 7)
        assert [info.name for info in remote.adapters()] == ["robot"]


async def test_a_node_that_has_no_figures_for_a_moment_is_heard_of_again() -> None:
    node = FakeNode()
    async with pair(node) as (remote, _, _):
        asked = asyncio.Event()

        def fail() -> None:
            asked.set()
            raise AttributeError("the engine is being closed")

        node.scheduling_stats = fail  # type: ignore[method-assign]
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        del node.scheduling_stats
        node.num_steps = 8
        await until(lambda: remote.num_steps == 8)


@pytest.mark.parametrize(("token", "guess"), [(b"token", b"another"), (b"token", b""), (b"", b"token")])
async def test_without_the_token_there_is_no_word_but_a_challenge(token: bytes, guess: bytes) -> None:
    node = FakeNode(["secret"])
    with pytest.raises(ConnectionError):
        async with pair(node, token=token, guess=guess):
            pass
    assert node.answers == []


async def test_a_gateway_that_breaks_the_protocol_is_cut_off_alone() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    node = FakeNode(["still here"])
    server = NodeServer(node, "n1")
    await loop.connect_accepted_socket(server.connection, theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        challenge = await reader.read()
    (frame,) = wire.Frames(wire.ToGateway).feed(challenge)
    assert isinstance(frame.message, wire.Challenge)
    writer.close()
    async with pair(node) as (remote, _, _):
        assert (await collect(remote))[0].text == "still here"


@pytest.mark.parametrize(
    "message", [b"\x93\xa6notice\xa2\xff\xfe\xc0", b"\x93\xa4call\xa5drain" + b"\x91" * 4000]
)
async def test_bytes_that_are_no_text_are_refused_as_other_nonsense_is(
    caplog: pytest.LogCaptureFixture, message: bytes
) -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(NodeServer(FakeNode(), "n1").connection, theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write((len(message) + 4).to_bytes(4, "little") + bytes(4) + message)
    async with asyncio.timeout(PATIENCE_S):
        await reader.read()
    writer.close()
    assert "Traceback" not in caplog.text and "no message of ours" in caplog.text


async def test_a_follower_that_raises_keeps_neither_others_nor_who_looks_after_the_node_from_hearing() -> (
    None
):
    """Who looks after the node starts it again when it hears that it is lost."""

    def raises(report: AdvisoryReport) -> None:
        raise ValueError("a follower of somebody's")

    node = FakeNode()
    reports: list[AdvisoryReport] = []
    async with pair(node) as (remote, link, _):
        await remote.advise(Advisory(advisory_id="a", session_id="s"), raises)
        await remote.advise(Advisory(advisory_id="b", session_id="s"), reports.append)
        for number in range(2):
            (await node.told(number)).report("host", num_tokens=64)
        await until(lambda: len(reports) == 1)
        assert link.is_up
        link.abort()
        await until(lambda: len(reports) == 2)
        assert reports[-1].state == "expired" and not remote.is_up
        with pytest.raises(EngineUnavailable):
            remote._up()
        assert remote._link is None, "it was detached"


async def test_a_notice_that_fails_ends_nothing() -> None:
    heard = asyncio.Event()

    class Failing(FakeNode):
        def end_session(self, tenant: str, session_id: str) -> None:
            heard.set()
            raise RuntimeError("the store is being closed")

    node = Failing()
    node.gate.clear()
    async with pair(node) as (remote, link, _):
        prefill = asyncio.create_task(remote.prefill(question("draft")))
        await node.prefilled()
        remote.end_session("t", "s")
        await heard.wait()
        await asyncio.sleep(0)
        node.gate.set()
        assert await prefill == 16 and link.is_up


async def test_a_reply_that_no_frame_holds_is_an_error_and_no_silence() -> None:
    class Odd(FakeNode):
        async def models(self) -> JsonReply:
            return JsonReply(200, "half a pair: \ud800")  # type: ignore[arg-type]

    async with pair(Odd()) as (remote, link, _):
        with pytest.raises(InvalidRequest):
            await remote.models()
        assert link.is_up


# -- helpers -----------------------------------------------------------------------------------------------------------


async def collect(remote: RemoteNode) -> list[Any]:
    return [delta async for delta in remote.generate(question())]


async def begun(node: FakeNode, deltas: AsyncIterator[Any]) -> Any:
    """The node's answer, after a first word of it was read."""
    first = asyncio.ensure_future(anext(deltas))
    answer = await node.asked()
    answer.say("one")
    assert (await first).text == "one"
    return answer


async def until(is_so: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.005)
