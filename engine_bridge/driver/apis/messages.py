"""Anthropic's Messages API as vLLM serves it, with five corrections.

They concern tool calls that were cut short, requests that offer no tools, answers that the client has begun, the tokens that a stream's first event
counts, and streams that end early.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from pydantic_core import from_json

from engine_bridge.driver.apis.bodies import ANTHROPIC_ERROR_EVENT, ERROR_EVENT, error_reply
from engine_bridge.driver.vllm_api import AnthropicServingMessages, ErrorResponse
from engine_bridge.protocol.errors import InvalidRequest

_DATA = "data: "


class Messages(AnthropicServingMessages):
    """vLLM's class for Anthropic's Messages API, used in the same way."""

    @classmethod
    def to_chat_completion_request(cls, anthropic_request: Any, **options: Any) -> Any:
        """Return the chat request that answers `anthropic_request`. Without tools its answer is text, whatever the model writes.

        Raises:
            InvalidRequest: a tool call is demanded and no tool is offered.
        """
        request = super().to_chat_completion_request(anthropic_request, **options)
        if not request.tools:
            if request.tool_choice not in (None, "auto", "none"):
                raise InvalidRequest("`tool_choice` demands a tool call: offer `tools`.", param="tool_choice")
            request.tool_choice = "none"
        if _is_begun(request.messages):
            # Source: Anthropic's "Prefill Claude's response".
            request.add_generation_prompt, request.continue_final_message = False, True
        return request

    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **options: Any
    ) -> AsyncIterator[str]:
        """Return the chat completion's events.

        The first one counts the prompt's tokens as the last one does: tokens from a cache are counted separately.
        """
        events = super().chat_completion_stream_generator(request, result_generator, *args, **options)
        return _Chunks(events, result_generator)

    async def message_stream_converter(self, generator: Any) -> AsyncGenerator[str, None]:
        """Yield Anthropic's events of a chat completion's stream.

        An error that ends the stream early is its last event: vLLM takes it for a chunk, and fails on it.
        """
        chunks = generator if isinstance(generator, _Chunks) else _Chunks(generator)
        events = super().message_stream_converter(chunks)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()
            await chunks.aclose()
        if chunks.error:
            yield _error_event(chunks.error)

    def messages_full_converter(self, generator: Any) -> Any:
        """Return the reply that a finished chat completion (`generator`) makes.

        A call whose arguments were cut has as input the readable part of them, as Anthropic's SDKs have at the end of a stream, and the reply's
        `stop_reason` says what cut them. Source: Anthropic's "Handling stop reasons".
        """
        choice, is_cut = generator.choices[0], False
        for call in choice.message.tool_calls:
            try:
                json.loads(call.function.arguments)
            except ValueError:
                is_cut = True
                call.function.arguments = json.dumps(readable(call.function.arguments))
        reply = super().messages_full_converter(generator)
        if is_cut and isinstance(choice.stop_reason, str):
            reply.stop_reason, reply.stop_sequence = "stop_sequence", choice.stop_reason
        return reply


def readable(arguments: str) -> dict[str, Any]:
    """Return the readable part of a call's arguments that were cut short: an incomplete value is left out."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_begun(messages: Any) -> bool:
    """Return whether the last message is the beginning of the answer that is asked for."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


class _Chunks:
    """A chat completion's events up to the first error.

    Args:
        events: vLLM's.
        answer: the answer that they are made of; None where its tokens need not be counted.

    Attributes:
        error: the event that is an error; "" if none came.
    """

    def __init__(self, events: Any, answer: Any = None) -> None:
        self._events, self._answer = events, answer
        self.error = ""

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> str:
        if self.error:
            raise StopAsyncIteration
        event: str = await anext(self._events)
        if event.startswith(ERROR_EVENT):
            self.error = event
            raise StopAsyncIteration
        if self._answer is not None:
            answer, self._answer = self._answer, None
            return _with_cached_tokens(event, answer.first)
        return event

    async def aclose(self) -> None:
        """End the chat completion."""
        await self._events.aclose()


def _error_event(event: str) -> str:
    """Return an error that ends a chat completion's stream in the form of Anthropic's streams."""
    response = ErrorResponse.model_validate_json(event.removeprefix(_DATA))
    return f"{ANTHROPIC_ERROR_EVENT}data: {error_reply(response, is_anthropic=True).body.decode()}\n\n"


def _with_cached_tokens(event: str, result: Any) -> str:
    """Return a chunk whose usage says how many of the prompt's tokens were in a cache. vLLM says it at the end only."""
    if not event.startswith(_DATA + '{"id":'):
        return event
    chunk = msgspec.json.decode(event[len(_DATA) :])
    if (usage := chunk.get("usage")) is None:
        return event
    usage["prompt_tokens_details"] = {
        "cached_tokens": result.num_cached_tokens,
        "created_cache_tokens": result.num_cache_creation_tokens,
    }
    return f"{_DATA}{msgspec.json.encode(chunk).decode()}\n\n"
