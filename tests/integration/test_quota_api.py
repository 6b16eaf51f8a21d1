"""A key at its storage quota, on the chat socket and on the API: refused where it would be stored first, answered where it is stored last."""

from __future__ import annotations

import aiohttp
import pytest

from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError

from .conftest import MODEL, Gateways

MIB = 1 << 20


async def test_above_its_quota_a_key_is_answered_by_the_api_and_refused_by_the_chat(
    gateways: Gateways,
) -> None:
    """Neither leaves anything behind; deleting, and waiting until it cannot be restored, lets both in again."""
    server = await gateways(max_stored_mib=1)
    store = server.services.store
    await store.record_turn(
        "local", "old", "t", "x" * (MIB - 2000), answer="", makes_session=True, now=1_700_000_000.0
    )
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}

    async def call() -> None:
        async with http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": "api"}) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"]

    async def names() -> set[str]:
        return {summary.id for summary in (await store.list_sessions("local"))[0]}

    async with aiohttp.ClientSession(server.url) as http, ChatClient(server.url) as chat:
        await call()
        with pytest.raises(ChatError) as refused:
            async for _ in chat.ask("Hello!", session_id="old"):
                pass
        assert (refused.value.code, refused.value.retryable) == ("quota_exceeded", False)
        assert await names() == {"old"}
        await store.delete("local", "old", 1_700_000_000.0)  # longer ago than the window
        await call()
        assert await names() == {"api"}
