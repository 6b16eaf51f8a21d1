"""Anthropic's Messages API as vLLM serves it, with five corrections.

They concern tool calls that were cut short, requests that offer no tools, answers that the client has begun, the tokens that a stream's first event
counts, and streams that end early.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
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

    async def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[str, None]:
        """Yield the chat completion's events.

        The first one counts the prompt's tokens as the last one does: tokens from a cache are counted separately.
        """
        found: list[Any] = []
        events = super().chat_completion_stream_generator(
            request, _noting_first(result_generator, found), *args, **options
        )
        is_first = True
        try:
            async for event in events:
                yield _with_cached_tokens(event, found[0]) if is_first and found else event
                is_first = False
        finally:
            await events.aclose()

    async def message_stream_converter(self, generator: Any) -> AsyncGenerator[str, None]:
        """Yield Anthropic's events of a chat completion's stream.

        An error that ends the stream early is its last event: vLLM takes it for a chunk, and fails on it.
        """
        errors: list[str] = []
        chunks = _until_error(generator, errors)
        events = super().message_stream_converter(chunks)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()
            await chunks.aclose()
        for error in errors:
            yield _error_event(error)

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


async def _until_error(events: Any, errors: list[str]) -> AsyncGenerator[str, None]:
    """Yield `events` up to the first error, which is put into `errors`."""
    try:
        async for event in events:
            if event.startswith(ERROR_EVENT):
                errors.append(event)
                return
            yield event
    finally:
        await events.aclose()


def _error_event(event: str) -> str:
    """Return an error that ends a chat completion's stream in the form of Anthropic's streams."""
    response = ErrorResponse.model_validate_json(event.removeprefix(_DATA))
    return f"{ANTHROPIC_ERROR_EVENT}data: {error_reply(response, is_anthropic=True).body.decode()}\n\n"


async def _noting_first(results: Any, found: list[Any]) -> AsyncGenerator[Any, None]:
    """Yield `results`, and put the first one into `found`."""
    async for result in results:
        if not found:
            found.append(result)
        yield result


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
