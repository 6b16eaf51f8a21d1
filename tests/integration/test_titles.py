"""Titles by the model, on the real engine with the demo model, which is told to write them here though its titles say little."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from gateway.access.auth import tenant_of
from gateway.app import Server
from gateway.turns.titles import QUESTION, title_of
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, Done

from .conftest import MODEL, Gateways, SharedNode, engine_has

GREEDY = {"temperature": 0}
SAID = "My name is Quorin."


async def ask(chat: ChatClient, content: str, **options: Any) -> str:
    """The id of the session in which it was answered."""
    session_id = ""
    async for event in chat.ask(content, **options):
        if isinstance(event, Accepted | Done):
            session_id = event.session_id
    return session_id


async def expected(server: Server, session_id: str) -> str:
    """What the model answers when it is asked for the title directly."""
    turn = (await server.services.store.get_session("local", session_id)).turns[0]
    messages = [
        {"role": "user", "content": turn.content},
        {"role": "assistant", "content": turn.answer},
        {"role": "user", "content": QUESTION},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12} | GREEDY
    async with (
        aiohttp.ClientSession(server.url) as http,
        http.post("/v1/chat/completions", json=body) as reply,
    ):
        choice = (await reply.json())["choices"][0]
    title = title_of(choice["message"]["content"], is_cut=choice["finish_reason"] == "length")
    assert title is not None and title != SAID, "this conversation shows whether the title is the model's"
    return title


async def test_a_title_waits_until_no_answer_is_written(gateways: Gateways, node: SharedNode) -> None:
    server = await gateways(titles="model")
    async with ChatClient(server.url) as chat:
        long = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}
        other = asyncio.create_task(ask(chat, "Tell me a long story.", sampling=long))
        await engine_has(node, 1)  # or this one may be answered before that one has come to the engine
        session_id = await ask(chat, SAID, sampling=GREEDY)
        is_named = False
        assert not other.done()
        while not other.done():
            state = await node.engine_state(tenant_of("local"), 50)
            requests = [*state.waiting, *state.running]
            # Its client may not have read all of it yet when the engine is done with it.
            is_title = [request.request_id.startswith("title-") for request in requests]
            is_named |= any(is_title) and not all(is_title)
            await asyncio.sleep(0.02)
        await other
        assert not is_named, "beside an answer that is written no title is asked for"
        title = await expected(server, session_id)
        async with asyncio.timeout(60):
            while (await server.services.store.get_session("local", session_id)).title != title:
                await asyncio.sleep(0.05)


async def test_a_rename_wins_over_the_model(gateways: Gateways) -> None:
    server = await gateways(titles="model")
    store = server.services.store
    async with ChatClient(server.url) as chat, aiohttp.ClientSession(server.url) as http:
        renamed = await ask(chat, SAID, sampling=GREEDY)
        async with http.patch(f"/api/sessions/{renamed}", json={"title": "Mine"}) as reply:
            assert reply.status == 200
        named = await ask(chat, SAID, sampling=GREEDY)
        title = await expected(server, named)
        async with asyncio.timeout(60):
            while (await store.get_session("local", named)).title != title:
                await asyncio.sleep(0.05)
        assert (await store.get_session("local", renamed)).title == "Mine", "its turn came before the other's"
