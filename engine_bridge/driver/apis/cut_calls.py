"""Calls of tools that were cut short, in whole replies: they are what the stream of the same answer has of them.

vLLM's parsers read finished calls in a whole reply. Of a call that a limit or a stop string has cut, nothing is left then, or its markup as text.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from engine_bridge.calls.chat_chunks import merged_calls
from engine_bridge.driver.vllm_api import DelegatingParser, FunctionCall


def with_cut_calls(parser: type) -> type:
    """Return a class of the same parser of whole replies (vLLM's `Parser`) that has the calls of an answer that was cut, too."""
    if not issubclass(parser, DelegatingParser):
        return parser  # such a parser reads whole answers as it reads streams

    class WithCutCalls(parser):
        """The parser, with calls that were cut, and with the tokens of a whole thought counted in a stream, too."""

        def parse_delta(self, *args: Any, finished: bool, **options: Any) -> Any:
            """Return the next piece of a stream, as vLLM's parser does."""
            delta = super().parse_delta(*args, finished=finished, **options)
            if finished and hasattr(self.reasoning_parser, "_streaming_count_valid"):
                # vLLM's count lacks the last piece of a thought with which the answer ends.
                self.reasoning_parser._streaming_count_valid = False
            return delta

        def _extract_tool_calls(
            self, content: str | None, request: Any, *args: Any, **options: Any
        ) -> tuple[Any, Any]:
            calls, text = super()._extract_tool_calls(content, request, *args, **options)
            if calls or not content or not _may_hold_a_call(self.tool_parser, content, request):
                return calls, text
            delta, _ = self._extract_tool_calls_streaming("", content, content, (), (), (), request)
            cut = [entry.model_dump() for entry in (delta.tool_calls if delta is not None else None) or ()]
            if not cut:
                # The markup of a call that has hardly begun is no text; a call that came whole and cannot be read stays as it was written.
                return (
                    (calls, delta.content if delta is not None else None)
                    if _is_open(self.tool_parser, content)
                    else (calls, text)
                )
            found = [
                FunctionCall(
                    id=call.get("id"), name=call["function"]["name"], arguments=call["function"]["arguments"]
                )
                for call in merged_calls(cut)
            ]
            return found, delta.content or None

    WithCutCalls.__name__ = WithCutCalls.__qualname__ = parser.__name__
    return WithCutCalls


class WholeChat:
    """What vLLM's classes for chat completions and messages say in whole replies of calls that were cut: what they say in streams."""

    parser_cls: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser_cls = with_cut_calls(self.parser_cls)

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **options: Any
    ) -> Any:
        """Return the whole reply, which ends for tool calls only where it has some and was not cut by its limit."""
        reasons: dict[int, str | None] = {}
        results = _noting(result_generator, reasons)
        serving: Any = super()
        reply = await serving.chat_completion_full_generator(request, results, *args, **options)
        for choice in getattr(reply, "choices", ()):
            reason = reasons.get(choice.index) or "stop"
            if choice.finish_reason == "tool_calls" and (reason == "length" or not choice.message.tool_calls):
                choice.finish_reason = reason
        return reply


async def _noting(results: Any, reasons: dict[int, str | None]) -> AsyncGenerator[Any, None]:
    """Yield an answer's outputs, and note why each of its choices has ended."""
    try:
        async for result in results:
            reasons |= {output.index: output.finish_reason for output in result.outputs}
            yield result
    finally:
        await results.aclose()


def _may_hold_a_call(tool_parser: Any, content: str, request: Any) -> bool:
    """Return whether an answer in which no finished call was found may hold one that was cut."""
    if tool_parser is None or request.tool_choice == "none" or not request.tools:
        return False
    mark = getattr(tool_parser, "tool_call_start_token", None)
    return request.tool_choice == "required" or (isinstance(mark, str) and bool(mark) and mark in content)


def _is_open(tool_parser: Any, content: str) -> bool:
    """Return whether an answer ends within the markup of a call."""
    opens, closes = (
        str(getattr(tool_parser, f"tool_call_{end}_token", None) or "") for end in ("start", "end")
    )
    return bool(opens and closes) and content.rfind(opens) > content.rfind(closes)


def tell_unreadable_calls_in_a_line(parser: type) -> None:
    """Make a parser of tool calls say in one line of the log that it cannot read a call, as of an answer that was cut: no fault of the server's."""
    logging.getLogger(parser.__module__).addFilter(_without_trace)


def _without_trace(record: logging.LogRecord) -> bool:
    if record.exc_info:
        record.exc_info, record.args = None, ()
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        record.msg = "a call that the model wrote cannot be read, or is not whole"
    return True
