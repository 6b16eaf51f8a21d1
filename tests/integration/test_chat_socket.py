"""The chat socket on the real engine, with real sockets."""

from __future__ import annotations

import asyncio

import pytest

from gateway.access.auth import tenant_of
from gateway.app import Server
from gateway.turns.titles import QUESTION, title_of
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta, Done

from .conftest import Gateways, SharedNode, ask, connected, engine_has, engine_is_empty, settle, told
from .facts import CHAT, KEYS, MODEL, Http, Patch, bearer
from .test_connections import HELLO, peer_of

LONG = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
ENDLESS = LONG | {"max_tokens": 3000}
STORY = "Tell me a long story."


async def test_a_conversation_is_remembered_and_stored(chat: ChatClient, http: Http) -> None:
    _, first = await ask(chat, "My secret word is Fezin.")
    events = [event async for event in chat.ask("Hello, how are you?", session_id=first.session_id)]
    assert type(events[0]) is Accepted and type(events[-1]) is Done
    assert {type(event) for event in events} == {Accepted, Delta, Done}
    text, second = await ask(chat, "What is my secret word?", session_id=first.session_id)
    assert "Fezin" in text
    assert second.usage.cached_tokens > 0, "the first turns' KV should have been reused"
    assert second.timings.kv.device + second.timings.kv.recomputed == second.usage.prompt_tokens
    turns = (await told(http.get(f"/api/sessions/{first.session_id}")))["turns"]
    assert turns[2]["answer"] == text and turns[0]["content"] == "My secret word is Fezin."


async def test_ready_offers_the_adapters_and_the_first_frame_must_be_hello(server: Server) -> None:
    async with connected(server, hello=False) as socket:
        await socket.ask("x")
        assert (await socket.receive("error"))["code"] == "bad_request"
        await socket.send(type="ping", t=7)
        assert (await socket.receive("pong"))["t"] == 7
        await socket.send(type="hello")
        ready = await socket.receive("ready")
    assert ready["models"][0] == {"id": "overture-demo", "adapter": False}
    assert sorted(model["rank"] for model in ready["models"][1:]) == [8, 16, 32, 64, 128]
    assert ready["server"]["max_model_len"] > 0


async def test_an_adapter_changes_the_style(chat: ChatClient, server: Server) -> None:
    """The session keeps it until another is chosen; the base model may be named, too."""
    shouted, done = await ask(chat, "Hello, how are you?", adapter="shout")
    again, _ = await ask(chat, "What can you do?", session_id=done.session_id)
    assert shouted.isupper() and again.isupper()
    for adapter in (None, "overture-demo"):
        plain, _ = await ask(chat, "What can you do?", session_id=done.session_id, adapter=adapter)
        assert not plain.isupper()
    turns = (await server.services.store.get_session("local", done.session_id)).turns
    assert [turn.adapter for turn in turns] == ["shout", "shout", None, None]


async def test_stop_keeps_what_was_written_even_at_once(server: Server, http: Http, node: SharedNode) -> None:
    async with connected(server) as socket:
        await socket.ask("early", "Hello! " * 300, sampling=ENDLESS)
        await socket.send(type="stop", id="early")
        assert (await socket.receive("done"))["finish_reason"] == "stopped"
        await socket.ask("stopped", STORY, sampling=ENDLESS)
        first = (await socket.receive("delta"))["text"]
        await socket.send(type="stop", id="stopped")
        rest, done = await socket.rest()
    assert done["finish_reason"] == "stopped"
    turn = (await told(http.get(f"/api/sessions/{done['session_id']}")))["turns"][0]
    assert (turn["status"], turn["answer"]) == ("stopped", first + rest)
    await engine_is_empty(node)


async def test_a_dropped_socket_resumes_without_loss_or_repetition(server: Server, chat: ChatClient) -> None:
    whole, _ = await ask(chat, STORY, sampling=LONG)
    async with connected(server) as socket:
        await socket.ask("dropped", STORY, sampling=LONG)
        frame = await socket.receive("delta")  # no more of them: what follows may come in one
        parts, seq = [frame["text"]], frame["seq"]
        assert seq > 0
        socket.raw.transport.abort()  # no close handshake: as if the cable was cut
    async with connected(server, hello=False) as socket:
        await socket.send(type="hello", resume=[{"id": "dropped", "seq": seq}])
        while (frame := await socket.receive("delta", "done"))["type"] == "delta":
            assert frame["seq"] > seq
            seq = frame["seq"]
            parts.append(frame["text"])
        assert "".join(parts) == whole and frame["finish_reason"] == "length"
        await socket.send(type="hello", resume=[{"id": "dropped", "seq": 10_000}, {"id": "y"}])
        assert [(await socket.receive("error"))["code"] for _ in range(2)] == ["not_found"] * 2


async def test_a_repeated_message_is_answered_once(server: Server, http: Http) -> None:
    """From two sockets, at once, while it is answered and long after."""
    async with connected(server) as first, connected(server) as second:
        await asyncio.gather(*(socket.ask("twin", sampling=LONG) for socket in (first, second)))
        sessions = {(await socket.receive("accepted"))["session_id"] for socket in (first, second)}
        (texts, ends) = zip(*[await socket.rest() for socket in (first, second)], strict=True)
        assert texts[0] == texts[1] != "" and ends[0]["finish_reason"] == ends[1]["finish_reason"] == "length"
        (session_id,) = sessions
        await second.ask("twin", session_id=session_id)  # long over now: the stored answer comes again
        text, done = await second.rest()
        assert (text, done["finish_reason"]) == (texts[0], "length")
        await second.ask("twin", "Something else", session_id=session_id)
        assert (await second.receive("error"))["code"] == "conflict"
    turns = (await told(http.get(f"/api/sessions/{session_id}")))["turns"]
    assert [turn["id"] for turn in turns] == ["twin"]
    assert len((await told(http.get("/api/sessions")))["sessions"]) == 1


async def test_keys_keep_sessions_apart(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with connected(server, hello=False) as socket:
        await socket.send(type="hello", api_key="ov-wrong-key-of-enough-length")
        assert (await socket.receive("error"))["code"] == "unauthorized"
        assert await socket.closed() == 4401
    async with (
        ChatClient(server.url, api_key=KEYS[0]) as mine,
        ChatClient(server.url, api_key=KEYS[1]) as theirs,
    ):
        _, done = await ask(mine, "Hello!")
        with pytest.raises(ChatError) as raised:
            await ask(theirs, "Hello!", session_id=done.session_id)
        assert raised.value.code == "not_found"
    async with Http(server.url) as http:
        url = f"/api/sessions/{done.session_id}"
        for key, status in ((KEYS[0], 200), (KEYS[1], 404), ("nope", 401)):
            await told(http.get(url, headers=bearer(key)), status)
        assert (await told(http.get(url), 401))["error"]["type"] == "authentication_error"


async def test_deleting_a_session_ends_its_turn(server: Server, http: Http, node: SharedNode) -> None:
    async with connected(server) as socket:
        await socket.ask("gone", sampling=ENDLESS)
        session_id = (await socket.receive("accepted"))["session_id"]
        await socket.receive("delta")
        await told(http.delete(f"/api/sessions/{session_id}"), 204)
        assert (await socket.receive("error"))["code"] == "not_found"
    await engine_is_empty(node)
    restored = await told(http.post(f"/api/sessions/{session_id}/restore"))
    assert restored["turns"][0]["status"] == "stopped"


async def test_a_half_open_socket_is_noticed(server: Server, monkeypatch: Patch) -> None:
    """The client reads on but never answers a ping, as one does whose machine is gone."""
    monkeypatch.setattr("gateway.doors.chat.socket.HEARTBEAT_S", 0.2)
    peer = await peer_of(server)
    await peer.upgrade()
    await peer.rest(HELLO)
    assert not server.services.connections
    peer.cut()


# -- titles by the model, which is told to write them here though its titles say little ------------------------------

SAID = "My name is Quorin."


async def is_named_by_the_model(server: Server, http: Http, session_id: str) -> None:
    """Wait until the session has the title that the model gives when it is asked for it directly."""
    store = server.services.store
    turn = (await store.get_session("local", session_id)).turns[0]
    said = (("user", turn.content), ("assistant", turn.answer), ("user", QUESTION))
    messages = [{"role": role, "content": content} for role, content in said]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    choice = (await told(http.post(CHAT, json=body)))["choices"][0]
    title = title_of(choice["message"]["content"], is_cut=choice["finish_reason"] == "length")
    assert title is not None and title != SAID, "this conversation shows whether the title is the model's"

    async def is_named() -> bool:
        return (await store.get_session("local", session_id)).title == title

    await settle(is_named)


async def test_a_title_waits_for_answers_and_a_rename_wins(
    gateways: Gateways, node: SharedNode, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("gateway.turns.titles.LOOK_EVERY_S", 0.05)
    server = await gateways(titles="model")
    async with ChatClient(server.url) as chat, Http(server.url) as http:
        long = {"temperature": 0, "ignore_eos": True, "max_tokens": 300}
        other = asyncio.create_task(ask(chat, "Tell me a long story.", sampling=long))
        await engine_has(node, 1)  # or this one may be answered before that one has come to the engine
        _, renamed = await ask(chat, SAID)
        await told(http.patch(f"/api/sessions/{renamed.session_id}", json={"title": "Mine"}))
        _, named = await ask(chat, SAID)
        is_named = False
        assert not other.done()
        while not other.done():
            state = await node.engine_state(tenant_of("local"), 50)
            # Its client may not have read all of it yet when the engine is done with it.
            is_title = [each.request_id.startswith("title-") for each in (*state.waiting, *state.running)]
            is_named |= any(is_title) and not all(is_title)
            await asyncio.sleep(0.02)
        assert not is_named, "beside an answer that is written no title is asked for"
        await is_named_by_the_model(server, http, named.session_id)
        # Whose turn came before the other's.
        assert (await server.services.store.get_session("local", renamed.session_id)).title == "Mine"
