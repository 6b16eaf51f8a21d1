"""Chat completions as vLLM serves them, with five corrections.

Each chunk of a stream holds one thing, reasoning has both of its names, log probabilities cover only the text's tokens, a whole reply has the
calls and the reason of its end that the stream of the same answer has, and who offered functions gets the call of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine_bridge.calls.chat_chunks import ends_with_stop_token, split_event, thought_of
from engine_bridge.calls.old_functions import end_of_call
from engine_bridge.driver.apis.cut_calls import WholeChat
from engine_bridge.driver.vllm_api import OpenAIServingChat


class Chat(WholeChat, OpenAIServingChat):
    """vLLM's class for chat completions, used in the same way."""

    async def chat_completion_full_generator(self, request: Any, *args: Any, **options: Any) -> Any:
        """Return the whole reply, with both names of its reasoning, and without the log probability of a token that ended the answer."""
        reply = await super().chat_completion_full_generator(request, *args, **options)
        for choice in getattr(reply, "choices", ()):
            for name, thought in thought_of({"reasoning": choice.message.reasoning}).items():
                setattr(choice.message, name, thought)
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            is_stopped = ends_with_stop_token(choice.finish_reason, choice.stop_reason)
            if logprobs and is_stopped and not request.include_stop_str_in_output:
                logprobs.pop()
            if _offers_functions(request) and choice.message.tool_calls:
                choice.message.function_call = choice.message.tool_calls[0].function
                choice.message.tool_calls = []
                choice.finish_reason = end_of_call(choice.finish_reason)
        return reply


def chunks_of(request: Any, event: str) -> Iterable[str]:
    """Return the events to send for one event of vLLM's stream: a chunk that holds several things is sent as several chunks (`chat_chunks`)."""
    if '"finish_reason":null' in event and '"tool_calls":' not in event and '"reasoning":' not in event:
        return (event,)  # by far the most usual chunk, a piece of the text
    has_functions = _offers_functions(request)
    return split_event(event, has_stop_token=request.include_stop_str_in_output, has_functions=has_functions)


def _offers_functions(request: Any) -> bool:
    """Return whether the client has offered functions, which became tools (`old_functions`)."""
    return bool(getattr(request, "functions", None))
