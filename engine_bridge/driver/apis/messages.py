"""Anthropic's Messages API as vLLM serves it, with six corrections.

They concern instructions in the midst of a conversation, tool calls that were cut short, requests that offer no tools, answers that the client has
begun, the tokens that are counted as cached, and streams that end early.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from pydantic_core import from_json

from engine_bridge.driver.apis.bodies import ANTHROPIC_ERROR_EVENT, ERROR_EVENT, error_reply
from engine_bridge.driver.apis.cut_calls import WholeChat
from engine_bridge.driver.serving.call import Call, current_call
from engine_bridge.driver.vllm_api import AnthropicServingMessages, ErrorResponse, HfRenderer
from engine_bridge.protocol.errors import InvalidRequest

_DATA = "data: "


class Messages(WholeChat, AnthropicServingMessages):
    """vLLM's class for Anthropic's Messages API, used in the same way."""

    @classmethod
    def _should_merge_inline_system(cls, online_renderer: Any) -> bool:
        """Return whether later instructions go to the beginning: where there is a template, `follow_template` has found them a place."""
        is_templated = isinstance(online_renderer.renderer, HfRenderer)
        return not is_templated and super()._should_merge_inline_system(online_renderer)

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
        for tool in request.tools or ():
            kind = (tool.function.parameters or {}).get("type")
            if isinstance(kind, str) and kind.lower() != "object":
                tool.function.parameters = {
                    "type": "object"
                }  # as the input of every call is, to Anthropic's clients
        if _is_begun(request.messages):
            # Source: Anthropic's "Prefill Claude's response".
            request.add_generation_prompt, request.continue_final_message = False, True
        return request

    async def message_stream_converter(self, generator: Any) -> AsyncGenerator[str, None]:
        """Yield Anthropic's events of a chat completion's stream: of its events as vLLM 0.32 has them, or of its chunks as vLLM 0.33 has them.

        The first event counts the prompt's tokens as the last one does, and both as the whole reply does: see `_cached_tokens`. An error that ends
        the stream early is its last event: vLLM 0.32 takes it for a chunk, and fails on it.
        """
        chunks = _Chunks(generator, current_call())
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
        if (first := current_call().first) is not None and generator.usage is not None:
            details = _cached_tokens(current_call(), first)
            generator.usage = type(generator.usage)(
                **generator.usage.model_dump() | {"prompt_tokens_details": details}
            )
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
    """A chat completion's events, or its chunks, up to the first event that is an error. error: the event that is an error; "" if none came."""

    def __init__(self, events: Any, call: Call) -> None:
        self._events, self._call = events, call
        self._is_first = True
        self.error = ""

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> Any:
        if self.error:
            raise StopAsyncIteration
        event = await anext(self._events)
        if isinstance(event, str) and event.startswith(ERROR_EVENT):
            self.error = event
            raise StopAsyncIteration
        is_first, self._is_first = self._is_first, False
        is_last = '"choices":[]' in event if isinstance(event, str) else not getattr(event, "choices", True)
        if (is_first or is_last) and self._call.first is not None:
            return _with_details(event, _cached_tokens(self._call, self._call.first))
        return event

    async def aclose(self) -> None:
        """End the chat completion."""
        await self._events.aclose()


def _error_event(event: str) -> str:
    """Return an error that ends a chat completion's stream in the form of Anthropic's streams."""
    response = ErrorResponse.model_validate_json(event.removeprefix(_DATA))
    return f"{ANTHROPIC_ERROR_EVENT}data: {error_reply(response, is_anthropic=True).body.decode()}\n\n"


def _cached_tokens(call: Call, first: Any) -> dict[str, int]:
    """Return how many of the prompt's tokens were in a cache, and how many went into one, as far as the client has marked any to be kept.

    Without a mark none are told as written, though they are: then Anthropic's clients find them in `input_tokens`. vLLM counts them by the blocks
    that the prompt has in the device's cache at its first token. first: the first output of the call.
    """
    created = first.num_cache_creation_tokens if call.request.is_marked else 0
    return {"cached_tokens": first.num_cached_tokens or 0, "created_cache_tokens": created or 0}


def _with_details(event: Any, details: dict[str, int]) -> Any:
    """Return an event or a chunk whose usage has these details of the prompt's tokens. vLLM has some at the end only."""
    if not isinstance(event, str):
        if (counted := getattr(event, "usage", None)) is not None:
            event.usage = type(counted)(**counted.model_dump() | {"prompt_tokens_details": details})
        return event
    if not event.startswith(_DATA + '{"id":'):
        return event
    chunk = msgspec.json.decode(event[len(_DATA) :])
    if (usage := chunk.get("usage")) is None:
        return event
    usage["prompt_tokens_details"] = details
    return f"{_DATA}{msgspec.json.encode(chunk).decode()}\n\n"
