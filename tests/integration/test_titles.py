"""Titles by the model, on the real engine with the demo model, which is told to write them here though its titles say little."""

from __future__ import annotations

import asyncio

import aiohttp

from gateway.access.auth import tenant_of
from gateway.app import Server
from gateway.turns.titles import QUESTION, title_of
from overture_client.chat import ChatClient

from .conftest import MODEL, Gateways, SharedNode, ask, engine_has, told

SAID = "My name is Quorin."


async def is_named_by_the_model(server: Server, http: aiohttp.ClientSession, session_id: str) -> None:
    """Wait until the session has the title that the model gives when it is asked for it directly."""
    store = server.services.store
    turn = (await store.get_session("local", session_id)).turns[0]
    said = (("user", turn.content), ("assistant", turn.answer), ("user", QUESTION))
    messages = [{"role": role, "content": content} for role, content in said]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    choice = (await told(http.post("/v1/chat/completions", json=body)))["choices"][0]
    title = title_of(choice["message"]["content"], is_cut=choice["finish_reason"] == "length")
    assert title is not None and title != SAID, "this conversation shows whether the title is the model's"
    async with asyncio.timeout(60):
        while (await store.get_session("local", session_id)).title != title:
            await asyncio.sleep(0.05)


async def test_a_title_waits_until_no_answer_is_written_and_a_rename_wins(
    gateways: Gateways, node: SharedNode
) -> None:
    server = await gateways(titles="model")
    async with ChatClient(server.url) as chat, aiohttp.ClientSession(server.url) as http:
        long = {"temperature": 0, "ignore_eos": True, "max_tokens": 200}
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
