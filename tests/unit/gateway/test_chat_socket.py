"""The chat socket on real loopback sockets, in front of a node without a model: docs/protocol.md, frame by frame."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct

import aiohttp
import pytest

from engine_bridge.protocol.errors import EngineUnavailable
from gateway.advisories.advisories import HINT_ACTION
from gateway.advisories.drafts import MAX_ACTIVE_OF_ONE, PAUSE_S
from gateway.sessions import SessionStore
from gateway.turns.turns import KEEP_FINISHED_S

from .fake_node import PATIENCE_S, FakeNode
from .front import Frame, Gateway, Gateways
from .parts import passes, settled

KEYS = ("ov-first-key-for-tests-only", "ov-second-key-for-tests-only")


# -- hello -----------------------------------------------------------------------------------------------------------


async def test_the_first_frame_must_be_hello(gateway: Gateway) -> None:
    async with gateway.socket() as socket:
        assert (await socket.ask("a"))["code"] == "bad_request"
        await socket.send(type="hello")
        ready = await socket.next()
        assert ready["type"] == "ready" and ready["protocol"] == 1 and ready["session"] is None
        assert [model["id"] for model in ready["models"][1:]] == ["shout", "pirate"]
        assert ready["server"]["max_message_bytes"] > 0
        assert (await socket.ask("a"))["type"] == "accepted", "the socket stays open after the error"


async def test_who_says_no_hello_is_closed_with_4400(gateway: Gateway) -> None:
    async with gateway.socket() as silent, gateway.socket() as chatty, gateway.socket(hello={}) as greeted:
        await chatty.send(type="ping")  # any other frame does not count
        await chatty.next()
        await passes(10.5)
        assert await silent.closed() == 4400
        assert await chatty.closed() == 4400
        await greeted.send(type="ping", t=1)
        assert await greeted.next() == {"type": "pong", "t": 1}


async def test_a_hello_opens_a_session_with_its_turns(gateway: Gateway) -> None:
    turn = await gateway.answered("a", "Yes.", owner="local")
    async with gateway.socket() as socket:
        await socket.send(type="hello", session_id=turn.session_id)
        session = (await socket.next())["session"]
        assert [(t["id"], t["answer"]) for t in session["turns"]] == [("a", "Yes.")]
        await socket.send(type="hello", session_id="nowhere")
        assert (await socket.next())["code"] == "not_found"


async def test_a_socket_keeps_the_key_of_its_first_good_hello(gateways: Gateways) -> None:
    """Later hellos open and resume without it, as the page's do; another key is refused, and the socket goes on with its own."""
    gateway = await gateways(api_keys=KEYS)
    async with gateway.socket(hello={"api_key": KEYS[0]}) as socket:
        accepted = await socket.ask("a")
        assert accepted["type"] == "accepted"
        await socket.send(type="hello", session_id=accepted["session_id"], resume=[{"id": "a", "seq": 0}])
        ready = await socket.next()
        assert [turn["id"] for turn in ready["session"]["turns"]] == ["a"]
        assert (await socket.next())["type"] == "accepted"
        await socket.send(type="hello", api_key=KEYS[1])
        assert (await socket.next())["code"] == "bad_request"
        assert (await socket.ask("a"))["type"] == "accepted"


async def test_a_key_that_is_withdrawn_ends_its_socket_at_the_next_hello(gateways: Gateways) -> None:
    gateway = await gateways(api_keys=KEYS)
    async with gateway.socket(hello={"api_key": KEYS[0]}) as socket:
        keys = gateway.server.services.keys
        keys.take_over(keys.read()[1:])
        await socket.send(type="hello")
        assert (await socket.next())["code"] == "unauthorized"
        assert await socket.closed() == 4401


async def test_a_hello_while_the_engine_starts_is_told_so_and_may_be_sent_again(gateway: Gateway) -> None:
    gateway.node.state = "starting"
    async with gateway.socket() as socket:
        await socket.send(type="hello")
        error = await socket.next()
        assert (error["code"], error["retryable"]) == ("starting", True)
        await passes(60)  # it has greeted: waiting is no offence
        gateway.node.state = "ready"
        await socket.send(type="hello")
        assert (await socket.next())["type"] == "ready"


@pytest.mark.parametrize("key", [None, "ov-a-key-that-nobody-has"])
async def test_without_a_good_key_the_socket_is_closed_with_4401(gateways: Gateways, key: str | None) -> None:
    gateway = await gateways(api_keys=KEYS)
    async with gateway.socket(key=key) as socket:
        await socket.send(type="hello")
        assert (await socket.next())["code"] == "unauthorized"
        assert await socket.closed() == 4401


async def test_a_key_may_come_in_the_hello_and_a_socket_belongs_to_one_key(gateways: Gateways) -> None:
    gateway = await gateways(api_keys=KEYS)
    async with gateway.socket(hello={"api_key": KEYS[0]}) as socket:
        await socket.send(type="hello", api_key=KEYS[1])
        assert (await socket.next())["code"] == "bad_request"
        assert (await socket.ask("a"))["type"] == "accepted"


async def test_keys_do_not_see_each_others_turns(gateways: Gateways) -> None:
    gateway = await gateways(api_keys=KEYS)
    async with (
        gateway.socket(key=KEYS[0], hello={}) as mine,
        gateway.socket(key=KEYS[1], hello={}) as other,
    ):
        session_id = (await mine.ask("a"))["session_id"]
        await other.send(type="stop", id="a")
        assert (await other.next())["code"] == "not_found"
        await other.send(type="hello", resume=[{"id": "a"}])
        assert [(await other.next())["type"] for _ in range(2)] == ["ready", "error"]
        assert (await other.ask("b", session_id=session_id))["code"] == "not_found"
        assert not (await gateway.node.asked()).is_cancelled


async def test_one_socket_too_many_is_closed_with_4429(gateways: Gateways) -> None:
    gateway = await gateways(max_sockets=1)
    async with gateway.socket(hello={}) as first, gateway.socket() as second:
        assert await second.closed() == 4429
        await first.send(type="ping")
        assert (await first.next())["type"] == "pong"


# -- a turn ----------------------------------------------------------------------------------------------------------


async def test_a_turn_is_accepted_told_and_done(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        accepted = await socket.ask("a", "Hello there!")
        assert accepted["type"] == "accepted" and accepted["title"] == "Hello there!"
        assert accepted["versions"] == ["a"]
        answer = await gateway.node.asked()
        answer.say("Good ", "day")
        delta = await socket.next()
        assert (delta["type"], delta["id"], delta["text"], delta["seq"]) == ("delta", "a", "Good day", 2)
        answer.finish(".")
        text, done = await socket.rest(seq=delta["seq"])
        assert text == "." and done["seq"] == 3
        assert (done["id"], done["session_id"]) == ("a", accepted["session_id"])
        assert done["finish_reason"] == "stop" and done["usage"]["completion_tokens"] == 3
        assert done["timings"]["kv"]["recomputed"] == 3 and done["advisory"] is None


async def test_many_turns_on_one_socket_do_not_mix(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        for name in "abc":
            assert (await socket.ask(name))["type"] == "accepted"
        answers = [await gateway.node.asked(n) for n in range(3)]
        texts, ended = {"a": "", "b": "", "c": ""}, set()
        for n, answer in enumerate(reversed(answers)):
            answer.finish(*"xyz"[: n + 1])
        while len(ended) < 3:
            frame = await socket.next()
            if frame["type"] == "delta":
                texts[frame["id"]] += frame["text"]
            else:
                assert frame["type"] == "done"
                ended.add(frame["id"])
        assert texts == {"a": "xyz", "b": "xy", "c": "x"}


async def test_two_sockets_that_follow_one_turn_get_the_same_words(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as first, gateway.socket(hello={}) as second:
        await first.ask("a")
        answer = await gateway.node.asked()
        answer.say("One ", "two ")
        assert (await first.next())["text"] == "One two "
        assert (await second.ask("a"))["type"] == "accepted"
        answer.finish("three.")
        assert (await first.rest(seq=2))[0] == "three."
        text, done = await second.rest()
        assert text == "One two three." and done["type"] == "done"
    assert len(gateway.node.answers) == 1


async def test_a_message_repeated_on_the_same_socket_repeats_no_text(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        answer = await gateway.node.asked()
        answer.say("One ")
        first = await socket.next()
        assert (await socket.ask("a"))["type"] == "accepted"
        answer.finish("two.")
        assert (await socket.rest(seq=first["seq"]))[0] == "two."


@pytest.mark.parametrize("seen", [0, 1, 2, 3])
async def test_a_dropped_socket_comes_back_where_it_was(gateway: Gateway, seen: int) -> None:
    async with gateway.socket(hello={}) as socket:
        session_id = (await socket.ask("a"))["session_id"]
        answer = await gateway.node.asked()
        answer.say("a", "b", "c")
        await socket.next()
        socket.raw.transport.abort()
    async with gateway.socket() as socket:
        await socket.send(type="hello", resume=[{"id": "a", "seq": seen}, {"id": "unheard of", "seq": 1}])
        assert (await socket.next())["type"] == "ready"
        again = await socket.next()
        assert (again["type"], again["session_id"]) == ("accepted", session_id)
        unknown = await socket.next()
        if unknown["type"] == "delta":  # what was missed may come before what is unknown
            assert unknown["text"] == "abc"[seen:]
            unknown, missed = await socket.next(), unknown["text"]
        else:
            missed = ""
        assert (unknown["code"], unknown["id"]) == ("not_found", "unheard of")
        answer.finish("d")
        text, done = await socket.rest(seq=seen)
        assert "abc"[:seen] + missed + text == "abcd" and done["type"] == "done"


async def test_resuming_from_where_the_turn_never_was_is_not_found(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        (await gateway.node.asked()).finish("Yes.")
        await socket.rest()
    async with gateway.socket() as socket:
        await socket.send(type="hello", resume=[{"id": "a", "seq": 2}])
        assert [(await socket.next())["type"] for _ in range(2)] == ["ready", "error"]


async def test_a_finished_answer_is_read_back_whole_and_can_be_resumed_from_there(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        (await gateway.node.asked()).finish("One ", "two ", "three.")
        await socket.rest()
    await passes(KEEP_FINISHED_S + 1)
    async with gateway.socket(hello={}) as socket:
        assert (await socket.ask("a"))["type"] == "accepted"
        delta, done = await socket.next(), await socket.next()
        assert delta["text"] == "One two three." and done["type"] == "done"
        assert done["seq"] == delta["seq"]
        await socket.send(type="hello", resume=[{"id": "a", "seq": delta["seq"]}])
        assert [(await socket.next())["type"] for _ in range(3)] == ["ready", "accepted", "done"]
        await socket.send(type="hello", resume=[{"id": "a", "seq": 2}])
        assert [(await socket.next())["type"] for _ in range(2)] == ["ready", "error"]


async def test_stop_ends_the_turn_with_what_was_written(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        (await gateway.node.asked()).say("Once upon")
        await socket.next()
        await socket.send(type="stop", id="a")
        _, done = await socket.rest(seq=1)
        assert done["finish_reason"] == "stopped"
        await socket.send(type="stop", id="unheard of")
        error = await socket.next()
        assert (error["code"], error["id"]) == ("not_found", "unheard of")


async def test_an_engine_that_fails_ends_the_turn_and_not_the_socket(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        answer = await gateway.node.asked()
        answer.say("Once")
        answer.fail(EngineUnavailable("The engine is being rebuilt."))
        text, error = await socket.rest()
        assert text == "Once"
        assert (error["type"], error["id"], error["code"]) == ("error", "a", "engine_failed")
        assert error["retryable"]
        assert (await socket.ask("a"))["type"] == "accepted"
        (await gateway.node.asked(1)).finish("Twice")
        assert (await socket.rest())[0] == "Twice"


# -- frames that are wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ("not JSON", "bad_request", None),
        ("[1]", "bad_request", None),
        ('{"type":"nobody knows"}', "bad_request", None),
        ('{"type":"message","id":"x","content":7}', "bad_request", "x"),
        ('{"type":"message","id":"x","content":""}', "bad_request", "x"),
        ('{"type":"message","id":7,"content":"a"}', "bad_request", None),
        ('{"type":"message","id":"x","content":"a","sampling":{"temperature":9}}', "bad_request", "x"),
        ('{"type":"message","id":"x","content":"a","sampling":{"made_up":1}}', "bad_request", "x"),
        ('{"type":"message","id":"x","content":"a","priority":-5}', "bad_request", "x"),
        ('{"type":"message","id":"x","content":"a","adapter":"nobody"}', "unknown_model", "x"),
        ('{"type":"message","id":"x","content":"a","session_id":"nowhere"}', "not_found", "x"),
        ('{"type":"message","id":"x y","content":"a"}', "bad_request", "x y"),
        ('{"type":"stop"}', "bad_request", None),
    ],
)
async def test_a_wrong_frame_is_named_and_the_socket_goes_on(
    gateway: Gateway, text: str, code: str, name: str | None
) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.raw.send(text)
        error = await socket.next()
        assert (error["type"], error["code"], error.get("id")) == ("error", code, name)
        await socket.send(type="ping", t="still here")
        assert (await socket.next())["t"] == "still here"
    assert not gateway.node.answers


async def test_binary_frames_are_refused(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.raw.send(b'{"type":"ping"}')
        assert (await socket.next())["code"] == "bad_request"


async def test_a_message_over_the_operators_limit_is_refused_and_not_stored(gateways: Gateways) -> None:
    gateway = await gateways(max_frame_bytes=2048)
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="message", id="a", content="x" * 4096)
        assert (await socket.next())["code"] == "frame_too_large"
        assert (await socket.ask("b", "x" * 1024))["type"] == "accepted"
    sessions, _ = await gateway.store.list_sessions("local")
    assert len(sessions) == 1


# -- slow and gone ---------------------------------------------------------------------------------------------------


async def unread_socket(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A greeted socket by hand, whose replies nobody reads."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port, limit=1024)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    writer.write(masked({"type": "hello"}))
    return reader, writer


def masked(frame: Frame) -> bytes:
    """A client's text frame with a mask of zeros."""
    data = json.dumps(frame).encode()
    head = struct.pack(">BBH", 0x81, 0x80 | 126, len(data)) if len(data) < 65536 else b""
    assert head, "longer frames are not needed here"
    return head + bytes(4) + data


async def test_who_takes_nothing_is_not_read_from_either_and_costs_others_nothing(gateway: Gateway) -> None:
    _, writer = await unread_socket(gateway)
    ping = masked({"type": "ping", "t": "x" * 60_000})
    # Far more than the sockets of both sides, the transport and the server's own queue hold.
    writing = asyncio.ensure_future(flood(writer, ping, 1000))
    async with gateway.socket(hello={}) as other:
        await other.ask("a")
        (await gateway.node.asked()).finish("Quickly.")
        assert (await other.rest())[0] == "Quickly."
        async with asyncio.timeout(PATIENCE_S):
            while all(c.blocked_since is None for c in gateway.server.services.connections):
                await asyncio.sleep(0)
            turns = 0
            while (
                turns < 100 and not writing.done()
            ):  # what is on its way when the server stops reading still leaves, and the server rests for a moment between frames
                await asyncio.sleep(0.001)
                turns = turns + 1 if writer.transport.get_write_buffer_size() > 0 else 0
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert writer.transport.get_write_buffer_size() > 0, "the server reads no more of who does not read"
    writer.transport.abort()


async def flood(writer: asyncio.StreamWriter, frame: bytes, number: int) -> None:
    for _ in range(number):
        writer.write(frame)
        await writer.drain()


async def test_a_slow_reader_is_closed_and_may_resume(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.chat.socket.SLOW_READER_S", 0.0)
    _, writer = await unread_socket(gateway)
    writer.write(masked({"type": "message", "id": "a", "content": "Hello!"}))
    answer = await gateway.node.asked()
    piece = "x" * 100_000
    answer.say(*[piece] * 200)
    async with asyncio.timeout(PATIENCE_S):
        while not gateway.count("overture_slow_readers_total"):
            await passes(1.0)
            await asyncio.sleep(0.001)  # the kernel's buffers fill up
    async with gateway.socket() as socket:
        await socket.send(type="hello", resume=[{"id": "a", "seq": 0}])
        assert [(await socket.next())["type"] for _ in range(2)] == ["ready", "accepted"]
        answer.finish("end")
        text, done = await socket.rest()
        assert done["type"] == "done" and text == piece * 200 + "end"
    writer.transport.abort()


async def test_a_socket_that_vanishes_leaves_nothing_behind(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        answer = await gateway.node.asked()
        answer.say("Once")
        await socket.next()
        socket.raw.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        while gateway.server.services.connections:
            await asyncio.sleep(0)
    turn = gateway.turns.find("local", "a")
    assert turn is not None and not turn.followers
    assert gateway.count("overture_sockets") == 0
    answer.finish(" upon")
    await gateway.follow(turn).over()
    session = await gateway.store.get_session("local", turn.session_id)
    assert session.turns[0].answer == "Once upon"


async def test_a_server_that_goes_down_says_so_to_every_socket(
    gateways: Gateways, store: SessionStore
) -> None:
    gateway = await gateways()
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        (await gateway.node.asked()).say("For ever")
        await socket.next()
        closing = asyncio.ensure_future(gateway.server.__aexit__(None, None, None))
        await settled()
        await passes(1.1)  # as long as it waits for answers here
        assert await socket.closed() == 1001
        await closing


# -- typing ----------------------------------------------------------------------------------------------------------


async def test_typing_tells_each_new_state_once_and_done_says_what_it_was_worth(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        session_id = (await socket.ask("a"))["session_id"]
        (await gateway.node.asked()).finish("Yes.")
        await socket.rest()
        await socket.send(type="typing", session_id=session_id)
        told = await gateway.node.told()
        told.report("staging", num_tokens=32)
        told.report("staging", num_tokens=32)
        told.report("warm", num_tokens=32, device_tokens=32)
        frames = [await socket.next() for _ in range(2)]
        assert [(f["type"], f["state"], f["tier"]) for f in frames] == [
            ("advisory", "staging", "host"),
            ("advisory", "warm", "device"),
        ]
        assert (await socket.ask("b", session_id=session_id))["type"] == "accepted"
        told.report("hit", num_tokens=32, device_tokens=32, lead_s=1.5)
        assert (await socket.next())["state"] == "hit"
        (await gateway.node.asked(1)).finish("Yes again.")
        _, done = await socket.rest()
        assert done["advisory"]["state"] == "hit" and done["advisory"]["lead_ms"] == 1500


async def test_typing_is_never_an_error(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="typing", session_id="s", adapter="nobody")
        assert (await socket.next())["state"] == "unknown"
        await socket.send(type="typing")
        await socket.send(type="typing", draft="only the operator may allow this")
        await socket.send(type="ping")
        assert (await socket.next())["type"] == "pong"
    assert not gateway.node.prefills


async def test_a_server_without_tiers_says_that_it_acts_on_no_advisory(gateways: Gateways) -> None:
    gateway = await gateways(kv_host_gib=0.0)
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="typing", session_id="s")
        assert await socket.next() == {"type": "advisory", "session_id": "s", "state": "off"}


async def test_of_all_who_type_without_keys_nobody_stops_anothers_draft(gateways: Gateways) -> None:
    gateway = await gateways(draft_prefill=True)
    gateway.node.gate.clear()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(MAX_ACTIVE_OF_ONE + 3):
            socket = await stack.enter_async_context(gateway.socket(hello={}))
            await socket.send(type="typing", draft=f"draft {number} of a new chat ")
            await socket.send(type="typing", session_id=f"s{number}", draft=f"draft {number} of a session ")
            await socket.send(type="ping")
            while (await socket.next())["type"] != "pong":
                pass
        await passes(PAUSE_S + 0.01)
        await gateway.node.prefilled(2 * (MAX_ACTIVE_OF_ONE + 3) - 1)
        assert gateway.node.cancelled_prefills == 0
        for number in range(
            MAX_ACTIVE_OF_ONE
        ):  # the last one has two already: it stops its own, and those only
            await socket.send(type="typing", session_id=f"more {number}", draft="and another one ")
        await gateway.node.until(lambda: gateway.node.cancelled_prefills == 2)


async def test_advisories_of_one_address_without_keys_leave_a_pages_alone(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket, aiohttp.ClientSession(gateway.server.url) as http:
        await socket.send(type="typing", session_id="mine")
        advised = await gateway.node.told()
        statuses = []
        for round_ in range(5):
            payloads = [{"session_id": f"{round_}-{number}"} for number in range(64)]
            actions = [
                {"action_id": "a", "action_type": HINT_ACTION, "action_version": "1", "payload": payload}
                for payload in payloads
            ]
            body = {"protocol_version": "1", "message_id": "m", "actions": actions}
            async with http.post("/v1/advisories", json=body) as reply:
                statuses.append(reply.status)
        assert statuses[0] == 202 and statuses[-1] == 429, "the address has had its share"
        await socket.send(type="typing", session_id="mine, too")
        told = gateway.node.advisories
        await gateway.node.until(lambda: any(each.advisory.session_id == "mine, too" for each in told))
        assert not advised.is_over


async def test_a_draft_of_a_new_chat_is_computed_and_stopped_by_its_question(gateways: Gateways) -> None:
    gateway = await gateways(draft_prefill=True)
    gateway.node.gate.clear()
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="typing", draft="What is the capital of ")
        await socket.send(type="ping")
        await socket.next()
        await passes(1.0)
        request = await gateway.node.prefilled()
        assert request.messages[-1].content == "What is the capital of"
        await socket.ask("a", "What is the capital of France?")
        await gateway.node.until(lambda: gateway.node.cancelled_prefills == 1)


def test_the_fake_has_all_that_the_protocol_asks_for() -> None:
    from engine_bridge.protocol.node import Node

    names = [name for name in vars(Node) if not name.startswith("_")]
    assert len(names) > 15
    fake = FakeNode()
    assert not [name for name in names if not hasattr(fake, name)]


async def test_other_pages_of_a_conversation_hear_of_a_new_turn(gateways: Gateways) -> None:
    """Those that have read it; not the one that asked, other owners' or pages that show something else."""
    gateway = await gateways()
    turn = await gateway.answered("a", "Hi.", owner="local")
    session = turn.session_id
    async with (
        gateway.socket(hello={"session_id": session}) as asking,
        gateway.socket(hello={"session_id": session}) as reading,
        gateway.socket(hello={}) as elsewhere,
    ):
        await asking.send(type="message", id="b", session_id=session, content="Hello!")
        assert (await asking.next())["type"] == "accepted"
        assert await reading.next() == {"type": "shown", "session_id": session, "turn_id": "b"}
        await reading.send(type="hello", session_id=session, resume=[{"id": "b", "seq": 0}])
        assert [turn["id"] for turn in (await reading.next())["session"]["turns"]] == ["a", "b"]
        assert (await reading.next())["type"] == "accepted"
        (await gateway.node.asked(1)).finish("Again.")
        for socket in (asking, reading):
            assert [(await socket.next())["type"] for _ in range(2)] == ["delta", "done"]
        await elsewhere.send(type="ping", t=1)
        assert (await elsewhere.next())["type"] == "pong"
