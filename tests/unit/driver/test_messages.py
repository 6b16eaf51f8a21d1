import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse

from engine_bridge.driver.apis.bodies import as_error_response
from engine_bridge.driver.apis.messages import Messages
from engine_bridge.driver.serving.call import called_by, current_call
from engine_bridge.driver.serving.stream_failures import engine_failed
from engine_bridge.driver.vllm_api import AnthropicServingMessages, ErrorResponse
from engine_bridge.protocol.engine_request import ANONYMOUS
from engine_bridge.protocol.errors import InvalidRequest

# vLLM 0.32 gives the converter the events of the chat completion, vLLM 0.33 its chunks.
TAKES_EVENTS = not hasattr(AnthropicServingMessages, "chat_completion_stream_generator_raw")


def chunk(delta: dict[str, Any]) -> Any:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    said = {"id": "x", "model": "m", "choices": [choice], "usage": usage}
    return in_form(ChatCompletionStreamResponse.model_validate(said))


def in_form(said: Any) -> Any:
    return f"data: {said.model_dump_json(exclude_unset=True)}\n\n" if TAKES_EVENTS else said


async def events_of(error: ErrorResponse | None) -> list[Any]:
    """The events of an answer of one word, which an error may end."""

    async def chunks() -> AsyncIterator[Any]:
        yield chunk({"role": "assistant", "content": ""})
        yield chunk({"content": "Hello"})
        if error is not None:
            yield in_form(error)
        if TAKES_EVENTS:
            yield "data: [DONE]\n\n"

    events = [event async for event in Messages.__new__(Messages).message_stream_converter(chunks())]
    return [json.loads(event.partition("data: ")[2]) for event in events]


async def test_the_first_event_counts_the_tokens_that_were_in_a_cache_apart() -> None:
    with called_by(ANONYMOUS):
        first: Any = SimpleNamespace(num_cached_tokens=2, num_cache_creation_tokens=None)
        current_call().first = first
        usage = (await events_of(None))[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 2)


async def test_what_ends_a_stream_early_is_told_as_it_is() -> None:
    ambiguous = InvalidRequest("This grammar is too ambiguous.")
    for error, kind in ((engine_failed(), "overloaded_error"), (ambiguous, "invalid_request_error")):
        *before, last = await events_of(as_error_response(error))
        began = ["message_start", "content_block_start", "content_block_delta"]
        ended = [] if TAKES_EVENTS else ["content_block_stop"]
        assert [event["type"] for event in before] == began + ended
        assert last == {"type": "error", "error": {"type": kind, "message": str(error)}}
