"""Tool calls of every model: vLLM's parsers read what models write by themselves, and calls that a request demands are written as constrained JSON.

A request may demand a call (`tool_choice` "required", or one tool by name). vLLM has two ways to hold a model to that: the parser's own form as an
xgrammar structural tag, or the arguments as JSON by a schema. The second works with every model and with the bounded grammars of this server, so
it is the only one here (docs/decisions/0016). A model without a parser of its own gets one that reads no calls but demands them in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from engine_bridge.driver.vllm_api import (
    DeltaMessage,
    ExtractedToolCallInformation,
    ReasoningParserManager,
    ToolParser,
    ToolParserManager,
)
from engine_bridge.errors import BridgeError
from engine_bridge.parser_choice import Choice
from engine_bridge.tool_schemas import at_most_one, closed

log = logging.getLogger(__name__)


class ParserRefused(BridgeError):
    """A parser that the operator has set cannot be used. The message is one line, fit to show."""


NO_FORM = "overture_json"
"""The parser of models whose own calls, if they write any, cannot be read: theirs stay text."""


class NoFormToolParser(ToolParser):
    """For models that have no form of tool calls: what they write by themselves is text. See `demands_as_json` for calls that are demanded."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Any,
        current_token_ids: Any,
        delta_token_ids: Any,
        request: Any,
    ) -> Any:
        return DeltaMessage(content=delta_text) if delta_text else None


@cache
def demands_as_json(parser: type) -> type:
    """The same parser, but calls that a request demands are JSON by the tools' schemas, whatever the model's own form is."""

    class DemandsAsJson(parser):
        demands_of = parser

        def get_structural_tag(self, request: Any, **options: Any) -> None:
            """None: vLLM would hand an xgrammar tag to the grammars, which cannot read it."""

        def adjust_request(self, request: Any) -> Any:
            if not request.tools or request.tool_choice in (None, "none", "auto"):
                return super().adjust_request(request)
            adjusted = ToolParser.adjust_request(self, request)
            # A model that has learned no form of calls does not know when to stop making them.
            return _tightened(adjusted, at_most_one if parser is NoFormToolParser else _as_it_is)

    # Not in the class's body: vLLM resets it there for parsers that have structural tags.
    DemandsAsJson.supports_required_and_named = True
    DemandsAsJson.__name__ = DemandsAsJson.__qualname__ = parser.__name__
    return DemandsAsJson


def _as_it_is(schema: Any) -> Any:
    return schema


def _tightened(request: Any, bound: Callable[[Any], Any]) -> Any:
    """With the schema of the demanded calls closed and bounded, where `ToolParser.adjust_request` has put it."""
    outputs = getattr(request, "structured_outputs", None)
    if outputs is not None and isinstance(outputs.json, dict):
        outputs.json = bound(closed(outputs.json))
    text = getattr(request, "text", None)
    form: Any = getattr(text, "format", None)
    if isinstance(getattr(form, "schema_", None), dict):
        form.schema_ = bound(closed(form.schema_))
    return request


def install_tool_parser(choice: Choice, tokenizer: Any) -> str:
    """Have vLLM's serving classes find the parser, and return the name under which they do.

    A parser that was chosen by the model's family and does not fit its tokenizer is left out, with a line in the log.

    Raises:
        ParserRefused: the parser that was set is unknown, or does not fit the tokenizer.
    """
    name = choice.name
    if name and (problem := _problem(name, tokenizer)):
        if choice.why == "as set":
            raise ParserRefused(f"--tool-parser {name}: {problem}")
        log.warning("tool calls are not read by vLLM's parser %s: %s", name, problem)
        name = ""
    found = ToolParserManager.get_tool_parser(name) if name else NoFormToolParser
    found = getattr(found, "demands_of", found)  # it was put there before
    ToolParserManager.register_module(name=name or NO_FORM, module=demands_as_json(found))
    log.info(
        "tool calls: %s",
        f"read by vLLM's parser {name}, since {choice.why}"
        if name
        else f"those that a request demands, as JSON; the model's own stay text, since {choice.why}",
    )
    return name or NO_FORM


def _problem(name: str, tokenizer: Any) -> str:
    known = ToolParserManager.list_registered()
    if name not in known:
        return f"there is no such parser. vLLM has {', '.join(known)}"
    try:
        ToolParserManager.get_tool_parser(name)(tokenizer, None)
    except Exception as error:
        return f"it does not fit this model's tokenizer: {error}"
    return ""


def check_reasoning_parser(choice: Choice, tokenizer: Any) -> str:
    """The parser's name if it fits the model's tokenizer, else "" with a line in the log.

    Raises:
        ParserRefused: the parser that was set is unknown, or does not fit the tokenizer.
    """
    if not choice.name:
        return ""
    problem = ""
    known = ReasoningParserManager.list_registered()
    if choice.name not in known:
        problem = f"there is no such parser. vLLM has {', '.join(known)}"
    else:
        try:
            ReasoningParserManager.get_reasoning_parser(choice.name)(tokenizer)
        except Exception as error:
            problem = f"it does not fit this model's tokenizer: {error}"
    if not problem:
        log.info("reasoning: read by vLLM's parser %s, since %s", choice.name, choice.why)
        return choice.name
    if choice.why == "as set":
        raise ParserRefused(f"--reasoning-parser {choice.name}: {problem}")
    log.warning("reasoning is not read by vLLM's parser %s: %s", choice.name, problem)
    return ""


def use_reasoning_parser(engine: Any, name: str) -> None:
    """Grammars begin where the reasoning ends, not at the first token. name: "" for a model that does not reason. On the engine thread, while no
    request runs."""
    manager = engine.engine_core.engine_core.structured_output_manager
    manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser(name) if name else None
