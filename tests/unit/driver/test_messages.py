"""Streams of Anthropic's Messages API that end early."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine_bridge.driver.apis.bodies import as_error_response
from engine_bridge.driver.apis.messages import Messages
from engine_bridge.driver.serving.stream_failures import engine_failed
from engine_bridge.driver.vllm_api import ErrorResponse
from engine_bridge.protocol.errors import InvalidRequest


def chunk(delta: dict[str, Any]) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    return f"data: {json.dumps({'id': 'x', 'model': 'm', 'choices': [choice], 'usage': usage})}\n\n"


async def events_of(error: ErrorResponse) -> list[Any]:
    """The events of an answer that an error ends after its first word."""

    async def chunks() -> AsyncIterator[str]:
        yield chunk({"role": "assistant", "content": ""})
        yield chunk({"content": "Hello"})
        yield f"data: {error.model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    events = [event async for event in Messages.__new__(Messages).message_stream_converter(chunks())]
    return [json.loads(event.partition("data: ")[2]) for event in events]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (engine_failed(), "overloaded_error"),
        (InvalidRequest("This grammar is too ambiguous."), "invalid_request_error"),
    ],
)
async def test_what_ends_a_stream_early_is_told_as_it_is(error: Exception, kind: str) -> None:
    *before, last = await events_of(as_error_response(error))
    assert [event["type"] for event in before] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
    ]
    assert last == {"type": "error", "error": {"type": kind, "message": str(error)}}
