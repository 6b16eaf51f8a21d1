"""What a live bench reads from a stream: times, text, token ids and cached tokens; and what it raises."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.live.shared.asking import Streamed, streamed

USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}


async def asked(*events: dict[str, Any], status: int = 200) -> Streamed:
    """Read a stream of these events from a server that was asked for a stream."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is True and request.headers["X-Session-Id"] == "s"
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        return await streamed(http, str(server.make_url("/v1/completions")), {}, {"X-Session-Id": "s"})


async def test_chats_and_completions_are_read_alike() -> None:
    role, chat = {"role": "assistant", "content": ""}, {"content": "Ada"}
    found = await asked({"choices": [{"delta": role}]}, {"choices": [{"delta": chat}]}, USAGE)
    assert (found.text, found.token_ids, found.num_cached) == ("Ada", [], 32)
    assert 0 < found.ttft_s <= found.end_s
    found = await asked({"choices": [{"text": "A", "token_ids": [1]}]}, {"choices": [{"text": "da"}]})
    assert (found.text, found.token_ids, found.num_cached) == ("Ada", [1], 0)


async def test_refusals_and_errors_in_the_stream_are_raised() -> None:
    with pytest.raises(RuntimeError, match="503"):
        await asked(status=503)
    with pytest.raises(RuntimeError, match="engine"):
        await asked({"choices": [{"text": "A"}]}, {"error": {"code": "engine_failed"}})
