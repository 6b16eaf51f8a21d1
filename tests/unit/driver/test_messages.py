import json
from collections.abc import AsyncIterator
from typing import Any

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


async def test_what_ends_a_stream_early_is_told_as_it_is() -> None:
    ambiguous = InvalidRequest("This grammar is too ambiguous.")
    for error, kind in ((engine_failed(), "overloaded_error"), (ambiguous, "invalid_request_error")):
        *before, last = await events_of(as_error_response(error))
        began = ["message_start", "content_block_start", "content_block_delta"]
        assert [event["type"] for event in before] == began
        assert last == {"type": "error", "error": {"type": kind, "message": str(error)}}
