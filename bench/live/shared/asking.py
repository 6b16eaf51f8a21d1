"""One streamed answer over HTTP, as a client sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from msgspec import Struct


class Streamed(Struct, frozen=True):
    """One answer.

    Attributes:
        ttft_s: seconds from sending the request until the first text, or the first token ids; 0 if none came.
        end_s: seconds from sending the request until the stream ended.
        text: all text of the first choice.
        num_cached: prompt tokens whose KV was reused, where the request asks for usage.
    """

    ttft_s: float
    end_s: float
    text: str
    token_ids: list[int]
    num_cached: int


async def streamed(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}
) -> Streamed:
    """Send a body to a door for chats or completions and read its stream to the end.

    Raises:
        RuntimeError: if the server refuses the request, or an error comes in the stream.
    """
    began_s, ttft_s, text, token_ids, num_cached = time.perf_counter(), 0.0, "", list[int](), 0
    async with http.post(url, json={**body, "stream": True}, headers=headers) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{url}: {reply.status} {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            if event["choices"]:
                choice = event["choices"][0]
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                more = choice.get("token_ids") or []
                if piece or more:
                    ttft_s = ttft_s or time.perf_counter() - began_s
                text, token_ids = text + piece, token_ids + more
            if event.get("usage"):
                num_cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Streamed(ttft_s, time.perf_counter() - began_s, text, token_ids, num_cached)
