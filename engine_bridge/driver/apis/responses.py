"""Responses as vLLM serves them, except for the last event of a stream that was cut, which tells its clients so, and for log probabilities.

Log probabilities cover only the tokens of the text, a form that the client did not ask for is not told, thoughts are told in the form that clients
give back where they ask for it, a whole reply has the calls that its stream has, and usage has no empty lists.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal

from pydantic import BaseModel

from engine_bridge.calls.carried_thoughts import ASKED, packed
from engine_bridge.calls.chat_chunks import ends_with_stop_token
from engine_bridge.driver.apis.cut_calls import with_cut_calls
from engine_bridge.driver.vllm_api import ErrorResponse, OpenAIServingResponses, ResponseCompletedEvent

# What vLLM calls the form of a call that is demanded. Source: vLLM 0.32, `ToolParser.adjust_request`.
DEMANDED = "tool_calling_response"


class IncompleteEvent(ResponseCompletedEvent):
    """The last event of a stream that ran out of tokens."""

    type: Literal["response.incomplete"]


class InputTokens(BaseModel):
    """How many tokens the prompt of a response would have. Source: OpenAI's API reference, "Get input token counts"."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesServing(OpenAIServingResponses):
    """vLLM's class for the Responses API, used in the same way."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser: Any = with_cut_calls(self.parser)

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        """Return the events of a stream, or the whole reply."""
        return _as_asked(request, await super().create_responses(request, raw_request))

    async def count_tokens(self, request: Any, raw_request: Any = None) -> Any:
        """Return how many tokens the request's prompt has, or an ErrorResponse."""
        found = await self.online_renderer.render_responses(request)
        if isinstance(found, ErrorResponse):
            return found
        return InputTokens(input_tokens=self._extract_prompt_len(found.engine_input))

    def responses_stream_generator(
        self, request: Any, sampling_params: Any, result_generator: Any, *args: Any, **options: Any
    ) -> Any:
        """Return the events of a stream."""
        results = _of_the_text(result_generator)
        return super().responses_stream_generator(request, sampling_params, results, *args, **options)

    def _make_response_output_items(self, request: Any, final_output: Any, *args: Any, **options: Any) -> Any:
        _drop_stop_token(final_output)
        return super()._make_response_output_items(request, final_output, *args, **options)

    def _create_response_logprobs(self, token_ids: Any, logprobs: Any, *args: Any, **options: Any) -> Any:
        """Return vLLM's log probabilities, for as many tokens as there are."""
        return super()._create_response_logprobs(token_ids[: len(logprobs)], logprobs, *args, **options)


def sse_text(request: Any, event: Any) -> tuple[str]:
    """Return an event of vLLM's stream as server-sent events have it.

    vLLM calls every stream completed; here a stream that was cut off is called incomplete.
    """
    if event.type == "response.completed" and event.response.status == "incomplete":
        event = IncompleteEvent(
            type="response.incomplete", response=event.response, sequence_number=event.sequence_number
        )
    if (response := getattr(event, "response", None)) is not None:
        _as_asked(request, response)
    elif event.type == "response.output_item.done":
        _carry(request, event.item)
    return (f"event: {event.type}\ndata: {event.model_dump_json(indent=None, by_alias=True)}\n\n",)


def _as_asked(request: Any, reply: Any) -> Any:
    """Return a response with thoughts that can be carried, and without the form by which this server has demanded a call of it.

    Its client did not ask for that form.
    """
    for item in getattr(reply, "output", ()):
        _carry(request, item)
    _drop_empty_lists(getattr(reply, "usage", None))
    form = getattr(getattr(reply, "text", None), "format", None)
    if form is not None and getattr(form, "name", "") == DEMANDED:
        reply.text = None
    return reply


def _drop_empty_lists(usage: Any) -> None:
    """Leave out the lists of vLLM's own that say nothing: the OpenAI Agents SDK for JavaScript takes numbers alone there, and ends the stream."""
    for details in (getattr(usage, f"{kind}_tokens_details", None) for kind in ("input", "output")):
        for name in [name for name, value in vars(details).items() if value == []] if details else ():
            delattr(details, name)


def _carry(request: Any, item: Any) -> None:
    """Give an item that is a thought the form in which its client carries it, if it asked for that."""
    if item.type == "reasoning" and item.content and ASKED in (request.include or ()):
        item.encrypted_content = packed("".join(part.text for part in item.content))


async def _of_the_text(results: Any) -> AsyncGenerator[Any, None]:
    """Yield contexts, each with the last piece of an answer, without the token that ended it. vLLM has summed up the contexts before."""
    try:
        async for context in results:
            output = getattr(context, "last_output", None)
            for each in getattr(output, "outputs", ()):
                _drop_stop_token(each)
            yield context
    finally:
        await results.aclose()


def _drop_stop_token(output: Any) -> None:
    """Leave out the log probability of the token that ended an answer, which its text does not have either."""
    if output.logprobs and ends_with_stop_token(output.finish_reason, output.stop_reason):
        output.logprobs = output.logprobs[:-1]
