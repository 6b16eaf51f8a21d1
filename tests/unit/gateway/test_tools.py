"""Tools of MCP servers in chat turns: a real server of the SDK's, a gateway on a port, and a node that calls what a test tells it to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from engine_bridge.protocol.engine_request import CalledTool
from engine_bridge.protocol.node import pack_token_ids
from gateway.sessions import SettingsPatch
from gateway.tools.toolbox import FRESH_S, RETRY_S, Toolbox
from gateway.turns.answer_rounds import ASK_S, MAX_CALLS
from tests.tool_servers import EVIL, HUGE, ToolHost, raw_server

from .front import Frame, Gateway, Gateways, Socket
from .parts import NOW, Clock, passes, until

WEATHER = "files__get_weather"


@pytest.fixture(scope="module")
def host() -> Iterator[ToolHost]:
    host = ToolHost()
    with host.open():
        yield host


@pytest.fixture
async def tooled(gateways: Gateways, host: ToolHost) -> Gateway:
    host.calls.clear()
    host.going.clear()
    return await gateways(mcp_servers=(f"files={host.url}",))


async def session_with(gateway: Gateway, *servers: str, allowed: list[str] | None = None) -> str:
    wanted = SettingsPatch(tools=list(servers), allowed_tools=allowed or [])
    return (await gateway.store.create_session("local", settings=wanted, now=NOW)).id


def weather(city: str = "Rome", call_id: str = "c1") -> CalledTool:
    return CalledTool(call_id, WEATHER, f'{{"city": "{city}"}}')


class Follow:
    """What one socket was told of a turn."""

    def __init__(self, gateway: Gateway, socket: Socket, session_id: str, name: str = "a") -> None:
        self.gateway, self.socket, self.session_id, self.name = gateway, socket, session_id, name
        self.text, self.end = "", None
        self.calls: dict[str, Frame] = {}
        self.states: list[str] = []

    async def until(self, state: str) -> Frame:
        """The call that gets into this state; or the last frame, for `over`."""
        while self.end is None:
            frame = await self.socket.next()
            if frame["type"] == "delta":
                self.text += frame["text"]
                for call in frame.get("calls", ()):
                    self.calls[call["id"]] = call
                    self.states.append(call["state"])
                    if call["state"] == state:
                        return call
            elif frame["type"] in ("done", "error"):
                self.end = frame
        assert state == "over"
        return self.end

    async def turn(self) -> Any:
        """What is stored of the last turn of its session."""
        return (await self.gateway.store.get_session("local", self.session_id)).turns[-1]

    async def ends(self, number: int, text: str) -> Frame:
        """The last frame, once the answer of this number has said its text."""
        (await self.gateway.node.asked(number)).finish(text)
        return await self.until("over")

    async def allow(self, call: Frame, answer: str) -> None:
        await self.socket.send(type="allow", id=self.name, call=call["id"], answer=answer)


@contextlib.asynccontextmanager
async def asked(
    gateway: Gateway, session_id: str = "", name: str = "a", number: int = 0
) -> AsyncIterator[tuple[Follow, Any]]:
    """A turn of this session, or of a new one with the tools of files; and the answer of this number, its first."""
    session_id = session_id or await session_with(gateway, "files")
    async with gateway.socket(hello={}) as socket:
        assert (await socket.ask(name, "What is the weather?", session_id=session_id))["type"] == "accepted"
        yield Follow(gateway, socket, session_id, name), await gateway.node.asked(number)


async def test_a_tool_is_called_once_allowed_and_its_result_goes_into_the_next_round(
    tooled: Gateway, host: ToolHost
) -> None:
    async with asked(tooled) as (follow, first):
        offered = {tool.name: tool for tool in first.request.tools}
        assert offered[WEATHER].parameters["required"] == ["city"] and first.request.turn == "begins"
        first.say("Let me look.")
        first.call(weather())
        call = await follow.until("asking")
        assert (call["server"], call["tool"], call["arguments"]) == (
            "files",
            "get_weather",
            '{"city": "Rome"}',
        )
        assert host.calls == [], "nothing is called before the person says so"
        await follow.allow(call, "once")
        done = await follow.until("done")
        assert done["result"] == "sunny, 24 degrees in Rome" and host.calls == [("get_weather", "Rome")]
        second = await tooled.node.asked(1)
        assert second.request.turn == "continues" and second.request.history_token_ids
        assert [m.role for m in second.request.messages] == ["user", "assistant", "tool"]
        _, said, result = second.request.messages
        assert (said.content, said.calls, result.call_id) == ("Let me look.", (weather(),), "c1")
        second.finish("It is sunny.")
        assert (await follow.until("over"))["type"] == "done"
        assert follow.text == "Let me look.\n\nIt is sunny."
    turn = await follow.turn()
    assert [(each.state, each.at, each.round) for each in turn.calls] == [("done", 12, 0)]
    later = await tooled.ask("b", session_id=follow.session_id, owner="local")
    third = await tooled.node.asked(2)
    assert [m.role for m in third.request.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert third.request.messages[3].content == "It is sunny.", "as the model wrote it"
    third.finish("Yes.")
    await tooled.follow(later).over()
    assert tooled.count("overture_tool_calls_total", server="files", outcome="done") == 1


async def test_while_a_tool_runs_the_conversation_with_its_answer_so_far_is_announced(
    tooled: Gateway, host: ToolHost
) -> None:
    """What became of that is not what the typing before the turn was worth."""
    async with asked(tooled) as (follow, first):
        first.say("Hm.")
        first.call(CalledTool("c1", "files__wait", '{"text": "x"}'))
        call = await follow.until("asking")
        assert tooled.node.advisories == [], "a person takes as long as a person takes"
        await follow.allow(call, "once")
        told = await tooled.node.told()
        assert told.advisory.session_id == follow.session_id
        assert told.advisory.token_ids == pack_token_ids([7, 8, 9, 1])
        assert told.advisory.expected_arrival_s is not None and told.advisory.lifetime_s <= 30
        host.going.set()
        second = await tooled.node.asked(1)
        told.report("hit", num_tokens=4, device_tokens=4, lead_s=0.1)
        second.finish("At last.")
        assert (await follow.until("over"))["advisory"] is None
    assert tooled.count("overture_advisories_total", source="tool_pause") == 1


async def test_always_holds_for_the_conversation_and_once_for_one_call(
    tooled: Gateway, host: ToolHost
) -> None:
    async with asked(tooled) as (follow, first):
        first.call(weather("Rome", "c1"), weather("Oslo", "c1"))
        await follow.allow(await follow.until("asking"), "once")
        second = await follow.until("asking")
        assert second["id"] == "c1_2", "calls have ids of their own, whatever the model gives them"
        await follow.allow(second, "always")
        (await tooled.node.asked(1)).call(weather("Bonn", "c2"))
        await follow.ends(2, "Done.")
    assert follow.states.count("asking") == 2 and [city for _, city in host.calls] == ["Rome", "Oslo", "Bonn"]
    settings = (await tooled.store.get_session("local", follow.session_id)).settings
    assert [key.split("#")[0] for key in settings.allowed_tools or ()] == ["files/get_weather"]
    async with asked(tooled, follow.session_id, "b", 3) as (follow, answer):
        answer.call(weather("Lima", "c3"))
        await follow.ends(4, "Done.")
        assert "running" in follow.states and host.calls[-1] == ("get_weather", "Lima")


@pytest.mark.virtual_time
@pytest.mark.parametrize("how", ["never", "silence"])
async def test_what_is_not_allowed_is_not_called_and_the_model_is_told(
    tooled: Gateway, host: ToolHost, how: str
) -> None:
    async with asked(tooled) as (follow, first):
        first.call(weather())
        call = await follow.until("asking")
        if how == "never":
            await follow.allow(call, "never")
        else:
            await passes(ASK_S)
        refused = await follow.until("refused")
        second = await tooled.node.asked(1)
        assert second.request.messages[-1].content == refused["result"] and "not" in refused["result"]
        second.finish("Then I cannot say.")
        await follow.until("over")
    assert host.calls == []


async def test_another_page_sees_the_question_and_may_answer_it(tooled: Gateway) -> None:
    async with asked(tooled) as (follow, first):
        first.say("Hm. ")
        first.call(weather())
        await follow.until("asking")
        async with tooled.socket() as raw:
            await raw.send(type="hello", session_id=follow.session_id, resume=[{"id": "a", "seq": 0}])
            assert (await raw.next())["type"] == "ready"
            assert (await raw.next())["type"] == "accepted"
            other = Follow(tooled, raw, follow.session_id)
            call = await other.until("asking")
            await other.allow(call, "once")
            await other.allow(call, "never")  # too late: it stays as it is
            assert (await follow.until("done"))["result"] == (await other.until("done"))["result"]
            (await tooled.node.asked(1)).finish("Sunny.")
            await other.until("over")
            assert other.text == "Hm. \n\nSunny."


@pytest.mark.parametrize("when", ["asked", "called"])
async def test_stop_ends_an_answer_that_waits_for_a_person_or_a_tool(
    tooled: Gateway, host: ToolHost, when: str
) -> None:
    async with asked(tooled) as (follow, first):
        first.say("Wait.")
        first.call(CalledTool("c1", "files__wait", '{"text": "x"}'), weather("Rome", "c2"))
        call = await follow.until("asking")
        if when == "called":
            await follow.allow(call, "once")
            await until(lambda: host.calls == [("wait", "x")])
        await follow.socket.send(type="stop", id="a")
        end = await follow.until("over")
        assert (end["type"], end["finish_reason"]) == ("done", "stopped")
    turn = await follow.turn()
    assert (turn.status, turn.answer, [call.state for call in turn.calls]) == (
        "stopped",
        "Wait.",
        ["stopped", "stopped"],
    )
    assert not turn.can_go_on, "there is no text behind the calls to go on from"
    host.going.set()


async def test_whatever_a_tool_does_its_call_ends_and_the_answer_goes_on(
    tooled: Gateway, host: ToolHost
) -> None:
    """Errors, results that are too long, arguments that are none, tools that there are not: each is a sentence and an error result."""
    cases = {
        "files__fail": '{"text": "x"}',
        "files__huge": '{"text": "x"}',
        "files__evil": '{"text": "x"}',
        WEATHER: "[1]",
        "nobody__knows": "{}",
    }
    async with asked(tooled) as (follow, first):
        first.call(*(CalledTool(f"c{number}", *case) for number, case in enumerate(cases.items())))
        for _ in range(3):
            await follow.allow(await follow.until("asking"), "once")
        second = await tooled.node.asked(1)
        second.finish("So be it.")
        await follow.until("over")
    fail, huge, evil, bad, unknown = (follow.calls[f"c{number}"] for number in range(5))
    assert (fail["state"], evil["state"], bad["state"], unknown["state"]) == (
        "failed",
        "done",
        "failed",
        "failed",
    )
    assert "Error executing tool" in fail["result"] and evil["result"] == EVIL
    assert huge["result"].startswith("xxx") and f"has {HUGE:,} bytes" in huge["result"]
    assert len(huge["result"]) < 5000, "it leaves room in the model's context"
    assert "no JSON object" in bad["result"] and bad["arguments"] == "{}"
    assert "no tool of this name" in unknown["result"]
    results = [m.content for m in second.request.messages if m.role == "tool"]
    assert results == [call["result"] for call in (fail, huge, evil, bad, unknown)]


@pytest.mark.virtual_time
@pytest.mark.parametrize("trouble", ["down", "stalled", "redirect", "garbage"])
async def test_a_server_that_cannot_be_asked_is_named_to_the_person_and_the_answer_comes_without_it(
    gateways: Gateways, trouble: str
) -> None:
    redirect = (
        b"HTTP/1.1 307 T\r\nLocation: http://10.0.0.1/mcp\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    replies = {"stalled": None, "redirect": redirect, "garbage": b"nonsense\r\n\r\n"}
    with contextlib.ExitStack() as stack:
        url = "http://127.0.0.1:9/mcp"
        if trouble in replies:
            url = stack.enter_context(raw_server(replies[trouble]))
        gateway = await gateways(mcp_servers=(f"files={url}",))
        session_id = await session_with(gateway, "files", "taken-away")
        async with gateway.socket(hello={}) as socket:
            await socket.ask("a", session_id=session_id)
            if trouble == "stalled":
                await until(lambda: bool(gateway.node.answers), step_s=0.5)
            answer = await gateway.node.asked()
            assert answer.request.tools == ()
            answer.finish("Hello.")
            follow = Follow(gateway, socket, session_id)
            assert (await follow.until("over"))["type"] == "done"
        (notice,) = (await follow.turn()).calls
        assert (notice.state, notice.server) == ("missing", "files") and notice.result.startswith("files ")
        assert "10.0.0.1" not in notice.result and "127.0.0.1" not in notice.result
        later = await gateway.ask("b", session_id=session_id, owner="local")
        second = await gateway.node.asked(1)
        assert [m.role for m in second.request.messages] == ["user", "assistant", "user"]
        second.finish("Yes.")
        await gateway.follow(later).over()


async def test_a_server_that_goes_away_between_two_turns_ends_calls_with_a_sentence(
    gateways: Gateways,
) -> None:
    host = ToolHost()
    with host.open() as url:
        gateway = await gateways(mcp_servers=(f"files={url}",))
        await gateway.turns.toolbox.listing("files")
    async with asked(gateway) as (follow, first):
        first.call(weather())
        await follow.allow(await follow.until("asking"), "once")
        assert (await follow.until("failed"))["result"] == "files cannot be reached."
        await follow.ends(1, "Then not.")


async def test_a_turn_waits_for_no_list_where_it_knows_an_older_one(gateways: Gateways) -> None:
    """Nor does a server that is down for a moment lose its place."""
    clock, host = Clock(), ToolHost()
    with host.open() as url:
        gateway = await gateways()
        box = Toolbox({"files": url}, gateway.metrics, clock=clock)
        assert WEATHER in (await box.offer(["files"], gateway.node)).tools
    clock.now_s += FRESH_S
    made = await box.offer(["files"], gateway.node)
    assert WEATHER in made.tools and made.missing == {}
    listing = await box.listing("files")
    assert listing.problem == "files cannot be reached." and listing.tools
    assert (await box.offer(["files"], gateway.node)).missing == {"files": "files cannot be reached."}
    clock.now_s += RETRY_S
    assert WEATHER in (await box.offer(["files"], gateway.node)).tools


@pytest.mark.parametrize(("num_blocks", "is_stream"), [(20_000, False), (20_000, True), (1_000_000, True)])
async def test_a_reply_that_would_take_long_to_decode_is_not_read(
    gateways: Gateways, num_blocks: int, is_stream: bool
) -> None:
    """Of four megabytes a list of empty texts would hold up all requests for seconds.

    The server answers one request after another, so it answers none while it sends what nobody reads.
    """
    blocks = b'{"jsonrpc":"2.0","id":1,"result":{"content":[' + b'{"type":"text"},' * num_blocks
    if is_stream:
        blocks = b': "\n\nevent: message\ndata: ' + blocks
    kind = b"text/event-stream" if is_stream else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    with raw_server(head % (kind, len(blocks)) + blocks) as url:
        gateway = await gateways(mcp_servers=(f"files={url}",))
        problem = (await gateway.turns.toolbox.listing("files")).problem
    assert (
        problem
        == "files gave an answer of more than 20,000 values, which was not read. Its tools are missing."
    )


@pytest.mark.virtual_time
async def test_a_slow_tool_is_given_up(gateways: Gateways, host: ToolHost) -> None:
    host.going.clear()
    gateway = await gateways(mcp_servers=(f"files={host.url}",), mcp_timeout_s=30.0)
    host.calls.clear()
    async with asked(gateway) as (follow, first):
        first.call(CalledTool("c1", "files__wait", '{"text": "x"}'))
        await follow.allow(await follow.until("asking"), "once")
        await until(lambda: host.calls == [("wait", "x")])
        await passes(30.0)
        assert "30 seconds" in (await follow.until("failed"))["result"]
        await follow.ends(1, "Then not.")
    host.going.set()


async def test_an_answer_that_calls_tools_for_ever_ends(gateways: Gateways, host: ToolHost) -> None:
    gateway = await gateways(mcp_servers=(f"files={host.url}",), mcp_rounds=2)
    tool = (await gateway.turns.toolbox.offer(["files"], gateway.node)).tools[WEATHER]
    session_id = await session_with(gateway, "files", allowed=[tool.key])
    host.calls.clear()
    async with asked(gateway, session_id) as (follow, first):
        first.call(*(weather(str(number), f"c{number}") for number in range(MAX_CALLS + 1)))
        (await gateway.node.asked(1)).call(weather("x", "d"))
        (await gateway.node.asked(2)).call(weather("y", "e"))
        assert (await follow.until("over"))["finish_reason"] == "stop"
    assert len(host.calls) == MAX_CALLS + 1
    assert follow.calls["e"]["state"] == "failed" and "2 times" in follow.calls["e"]["result"]
    assert "at once" in follow.calls[f"c{MAX_CALLS}"]["result"]


async def test_tools_are_off_unless_the_conversation_has_them_and_the_model_can_call_them(
    tooled: Gateway,
) -> None:
    session_id = await session_with(tooled)
    turn = await tooled.ask("a", session_id=session_id, owner="local")
    assert (await tooled.node.asked()).request.tools == ()
    tooled.node.answers[0].finish("Hello.")
    await tooled.follow(turn).over()
    changed = await tooled.call("PATCH", f"/api/sessions/{session_id}", {"settings": {"tools": ["files"]}})
    assert changed.status == 200
    tooled.node.can_use_tools = False
    reply = await tooled.call("GET", "/api/tools")
    assert reply.body["off"] == "This model is not known to call tools, so none are offered (--tool-parser)."
    await tooled.ask("b", session_id=session_id, owner="local")
    assert (await tooled.node.asked(1)).request.tools == ()
    tooled.node.can_use_tools = True
    (server,) = (await tooled.call("GET", "/api/tools")).body["servers"]
    assert (server["name"], server["problem"]) == ("files", None)
    assert {"name": "get_weather", "description": "The weather of a city."} in server["tools"]


async def test_a_turn_that_failed_keeps_its_calls_and_begins_anew_when_asked_again(
    tooled: Gateway, host: ToolHost
) -> None:
    async with asked(tooled) as (follow, first):
        first.call(weather())
        await follow.allow(await follow.until("asking"), "once")
        (await tooled.node.asked(1)).fail(RuntimeError("the engine is gone"))
        assert (await follow.until("over"))["code"] == "internal"
    turn = await follow.turn()
    assert (turn.status, turn.calls[0].result) == ("failed", "sunny, 24 degrees in Rome")
    again = await tooled.ask("a", "What is the weather?", session_id=follow.session_id, owner="local")
    answer = await tooled.node.asked(2)
    assert [m.role for m in answer.request.messages] == ["user"]
    answer.finish("Hello.")
    await tooled.follow(again).over()
    assert (await follow.turn()).calls == []


async def test_exports_have_calls_and_imports_take_them_but_switch_nothing_on(tooled: Gateway) -> None:
    async with asked(tooled) as (follow, first):
        first.call(CalledTool("c1", "files__evil", '{"text": "x"}'))
        await follow.allow(await follow.until("asking"), "always")
        await follow.ends(1, "Well.")
    archive = (await tooled.call("GET", f"/api/sessions/{follow.session_id}/export")).body
    assert archive["turns"][0]["calls"][0]["result"] == EVIL
    made = await tooled.call("POST", "/api/sessions/import", archive)
    assert made.status == 201 and made.body["turns"][0]["calls"] == archive["turns"][0]["calls"]
    assert (made.body["settings"]["tools"], made.body["settings"]["allowed_tools"]) == (None, None)
    text = (await tooled.call("GET", f"/api/sessions/{follow.session_id}/export?format=markdown")).body
    assert "<summary>files: evil (done)</summary>" in text and f"```\n{EVIL}\n```" in text
