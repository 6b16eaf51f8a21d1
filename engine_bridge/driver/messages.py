"""Anthropic's Messages API as vLLM serves it, but for tool calls that were cut short and for requests that offer no tools."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from engine_bridge.driver.vllm_api import AnthropicServingMessages
from engine_bridge.errors import InvalidRequest


class Messages(AnthropicServingMessages):
    """Use it as vLLM's class."""

    @classmethod
    def to_chat_completion_request(cls, anthropic_request: Any, **options: Any) -> Any:
        """The chat request that answers `anthropic_request`. Without tools its answer is text, whatever the model writes.

        Raises:
            InvalidRequest: a tool call is demanded and no tool is offered.
        """
        request = super().to_chat_completion_request(anthropic_request, **options)
        if not request.tools:
            if request.tool_choice not in (None, "auto", "none"):
                raise InvalidRequest("`tool_choice` demands a tool call: offer `tools`.", param="tool_choice")
            request.tool_choice = "none"
        return request

    def messages_full_converter(self, generator: Any) -> Any:
        """The reply that a finished chat completion (`generator`) makes.

        A call whose arguments were cut has as input what can be read of them, which is what Anthropic's SDKs have at the end of a stream, and the
        reply's `stop_reason` says what cut them. Source: Anthropic's "Handling stop reasons".
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
    """What can be read of a call's arguments that were cut short: a value that is not complete is left out."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
