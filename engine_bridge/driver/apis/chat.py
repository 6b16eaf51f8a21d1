"""Chat completions as vLLM serves them, but that each chunk of a stream holds one thing, and that log probabilities are those of the text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from engine_bridge.calls.chat_chunks import ends_with_stop_token, split_event
from engine_bridge.driver.vllm_api import OpenAIServingChat


class Chat(OpenAIServingChat):
    """Use it as vLLM's class."""

    async def chat_completion_stream_generator(
        self, request: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[str, None]:
        """The events of a stream. A chunk of vLLM's that holds several things is sent as several chunks (`chat_chunks`)."""
        events = super().chat_completion_stream_generator(request, *args, **options)
        try:
            async for event in events:
                if '"finish_reason":null' in event and '"tool_calls":' not in event:
                    yield event  # the most usual chunk by far, a piece of the text
                    continue
                for chunk in split_event(event, has_stop_token=request.include_stop_str_in_output):
                    yield chunk
        finally:
            await events.aclose()

    async def chat_completion_full_generator(self, request: Any, *args: Any, **options: Any) -> Any:
        """The whole reply."""
        reply = await super().chat_completion_full_generator(request, *args, **options)
        for choice in getattr(reply, "choices", ()):
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            is_stopped = ends_with_stop_token(choice.finish_reason, choice.stop_reason)
            if logprobs and is_stopped and not request.include_stop_str_in_output:
                logprobs.pop()
        return reply
