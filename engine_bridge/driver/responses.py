"""Responses as vLLM serves them, but that a stream which was cut ends with the event by which its clients know that."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal

from engine_bridge.driver.vllm_api import OpenAIServingResponses, ResponseCompletedEvent


class IncompleteEvent(ResponseCompletedEvent):
    """The last event of a stream that ran out of tokens."""

    type: Literal["response.incomplete"]


class Responses(OpenAIServingResponses):
    """Use it as vLLM's class."""

    async def responses_stream_generator(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        """The events of a stream. vLLM says of each that it was completed."""
        events = super().responses_stream_generator(*args, **options)
        try:
            async for event in events:
                is_cut = event.type == "response.completed" and event.response.status == "incomplete"
                yield _incomplete(event) if is_cut else event
        finally:
            await events.aclose()


def _incomplete(event: Any) -> IncompleteEvent:
    return IncompleteEvent(
        type="response.incomplete", response=event.response, sequence_number=event.sequence_number
    )
