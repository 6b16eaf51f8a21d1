"""What an engine cannot do now is told with when to try again."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from engine_bridge.protocol.api_errors import error_body
from engine_bridge.protocol.errors import ADAPTER_CHANGING, AdapterChanging
from engine_bridge.protocol.node import JsonReply
from gateway.errors import to_openai_body
from gateway.turns.turns import from_bridge
from tests.unit.gateway.conftest import Gateways


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/load_lora_adapter"])
async def test_a_reply_that_says_not_now_says_when(gateways: Gateways, path: str) -> None:
    gateway = await gateways(allow_adapter_loading=True)

    async def not_now(*args: Any) -> JsonReply:
        return JsonReply(503, msgspec.json.encode(error_body(503, ADAPTER_CHANGING)))

    gateway.node.serve = gateway.node.load_adapter = not_now  # type: ignore[method-assign,assignment]
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello!"}]}
    async with (
        aiohttp.ClientSession(gateway.server.url) as http,
        http.post(path, json=body) as reply,
    ):
        assert reply.status == 503 and int(reply.headers["Retry-After"]) >= 1
        error = (await reply.json())["error"]
    assert error["code"] == "adapter_changing"
    told = from_bridge(AdapterChanging())
    assert told.retryable and to_openai_body(told)["error"] == error
