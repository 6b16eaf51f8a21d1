"""Tool calls of every model: vLLM's parsers read the calls that models write by themselves; calls that a request demands are constrained JSON.

A request may demand a call (`tool_choice` "required", or one tool by name). vLLM has two ways to hold a model to that: the parser's own form as an
xgrammar structural tag, or the arguments as JSON by a schema. The second works with every model and with the bounded grammars of this server, so only
that is used here (docs/decisions/0016). A model without a parser gets a parser that reads no calls but demands them in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from engine_bridge.calls.tool_schemas import (
    LOOSE,
    at_most_one,
    held_calls,
    loosened,
    portable,
    with_definitions,
)
from engine_bridge.driver.apis.cut_calls import tell_unreadable_calls_in_a_line
from engine_bridge.driver.vllm_api import (
    ChatCompletionRequest,
    DeltaMessage,
    ExtractedToolCallInformation,
    ReasoningParserManager,
    StructuredOutputsParams,
    ToolParser,
    ToolParserManager,
)
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.settings.parser_choice import Choice

log = logging.getLogger(__name__)


class ParserRefused(BridgeError):
    """A parser that the operator has set cannot be used. The message is one line, fit to show."""


NO_FORM = "overture_json"
"""The parser of models whose own calls, if they write any, cannot be read: these stay text."""


class NoFormToolParser(ToolParser):
    """The parser of models without a form of tool calls: all that they write is text. For calls that are demanded see `demands_as_json`."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Return the whole output as text, without calls."""
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
        """Return the new piece of the output as text; None for an empty piece."""
        return DeltaMessage(content=delta_text) if delta_text else None


@cache
def demands_as_json(parser: type, holds_calls: bool = False) -> type:
    """Return a class of the same parser of vLLM's whose demanded calls are JSON by the tools' schemas, whatever the model's own form is.

    holds_calls: whether a call that the model makes by itself is held to the tools, too (`held_calls`); it then makes one call at a time.
    """

    class DemandsAsJson(parser):
        """The parser, with demanded calls as JSON."""

        demands_of = parser

        def get_structural_tag(self, request: Any, **options: Any) -> None:
            """Return None: vLLM would hand an xgrammar tag to the grammars, which cannot read it."""

        def adjust_request(self, request: Any) -> Any:
            """Put the grammar of its calls into a request that offers tools."""
            if not request.tools or request.tool_choice in (None, "none", "auto"):
                request = super().adjust_request(request)
                return _held(request) if holds_calls else request
            # A model that has hardly learned any form of calls does not know when to stop making them.
            return _demanded(self, request, makes_one_call=holds_calls or parser is NoFormToolParser)

    # This is not set in the class's body: vLLM resets it there for parsers that have structural tags.
    DemandsAsJson.supports_required_and_named = True
    DemandsAsJson.__name__ = DemandsAsJson.__qualname__ = parser.__name__
    return DemandsAsJson


def _demanded(parser: Any, request: Any, *, makes_one_call: bool) -> Any:
    """Put the schema of the demanded calls into the request, where vLLM reads it; with `makes_one_call`, a schema for a single call.

    The client's own settings in that place stay where vLLM puts nothing there (tools that are no functions).
    """
    asked = getattr(request, "structured_outputs", None), getattr(request, "text", None)
    definitions: dict[str, Any] = {}
    tools, request.tools = request.tools, [_portable(tool, definitions) for tool in request.tools]
    try:
        request = ToolParser.adjust_request(parser, request)
    finally:
        request.tools = tools  # as the model is told of them

    def schema_of(written: Any) -> Any:
        """Return vLLM's schema, complete."""
        whole = with_definitions(written, definitions)
        return at_most_one(whole) if makes_one_call else whole

    outputs, text = getattr(request, "structured_outputs", None), getattr(request, "text", None)
    if outputs is not None and outputs is not asked[0]:
        outputs.json = schema_of(outputs.json)
    if text is not None and text is not asked[1]:
        text.format.schema_ = schema_of(text.format.schema_)
    return request


def _portable(tool: Any, definitions: dict[str, Any]) -> Any:
    """Return a tool of any API whose arguments' schema can stand in one schema with others'. What that one needs is put into `definitions`."""
    if tool.type == "namespace":
        return tool.model_copy(update={"tools": [_portable(each, definitions) for each in tool.tools]})
    function = getattr(tool, "function", tool)
    if tool.type != "function" or not isinstance(function.parameters, dict):
        return tool
    schema = function.parameters if function.strict else loosened(function.parameters) | {"$comment": LOOSE}
    parameters, needed = portable(schema, f"arguments_{len(definitions)}")
    definitions |= needed
    changed = function.model_copy(update={"parameters": parameters})
    return changed if function is tool else tool.model_copy(update={"function": changed})


def _held(request: Any) -> Any:
    """Return the request with the grammar of `held_calls`, unless it asks for structured output or offers no function to call."""
    is_chat = isinstance(request, ChatCompletionRequest)
    form = request.response_format if is_chat else request.text and request.text.format
    if request.tool_choice == "none" or request.structured_outputs is not None or form is not None:
        return request
    functions = [getattr(tool, "function", tool) for tool in request.tools or () if tool.type == "function"]
    if functions:
        tools = {function.name: function.parameters or {} for function in functions}
        request.structured_outputs = StructuredOutputsParams(grammar=held_calls(tools))
    return request


def install_tool_parser(choice: Choice, tokenizer: Any) -> str:
    """Make vLLM's serving classes find the parser, and return the name under which they do. Imports and builds it: not for the event loop.

    Raises:
        ParserRefused: see `usable_parser`.
    """
    name = usable_parser(
        "tool", choice, lambda name: ToolParserManager.get_tool_parser(name)(tokenizer, None)
    )
    found = ToolParserManager.get_tool_parser(name) if name else NoFormToolParser
    found = getattr(found, "demands_of", found)  # a parser that was wrapped before
    tell_unreadable_calls_in_a_line(found)
    ToolParserManager.register_module(name=name or NO_FORM, module=demands_as_json(found, choice.holds_calls))
    if not name:
        log.info("tool calls: only those that a request demands, as JSON; what the model writes stays text")
    return name or NO_FORM


def check_reasoning_parser(choice: Choice, tokenizer: Any) -> str:
    """Return the parser's name, "" for none. Imports and builds it: not for the event loop. Raises ParserRefused: see `usable_parser`."""
    return usable_parser(
        "reasoning", choice, lambda name: ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    )


def refuses_calls(request: Any) -> bool:
    """Return whether a request of any API offers tools and asks that none is called."""
    choice = getattr(request, "tool_choice", None)
    return bool(getattr(request, "tools", None)) and getattr(choice, "type", choice) == "none"


def is_strict(request: Any) -> bool:
    """Return whether a request of any API demands calls, of which each tool says whether it is strict, or an answer in a form that is strict."""
    choice = getattr(request, "tool_choice", None)
    if getattr(request, "tools", None) and getattr(choice, "type", choice) not in (None, "auto", "none"):
        return True
    form = getattr(getattr(request, "response_format", None), "json_schema", None)
    form = form or getattr(getattr(request, "text", None), "format", None)
    return bool(getattr(form, "strict", False))


def ends_of_thought(name: str, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a thought without closing it, by vLLM's parser of this name: those by which a model begins a call.

    An answer that is held to a form would begin with such a token, and so never be in its form. Tokens that end the whole answer are not among them.
    """
    if not name:
        return frozenset()
    parser: Any = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    opens, closes = (
        tokenizer.encode(text, add_special_tokens=False) if text else []
        for text in (parser.reasoning_start_str, parser.reasoning_end_str)
    )
    others = set(tokenizer.get_added_vocab().values()) - {tokenizer.eos_token_id, *opens, *closes}
    return frozenset(each for each in others if parser.is_reasoning_end([*opens, each]))


def usable_parser(kind: Literal["tool", "reasoning"], choice: Choice, build: Callable[[str], Any]) -> str:
    """Return the name of the chosen parser if vLLM has it and it can be built with the model's tokenizer, else "".

    A parser that follows from the model's family and cannot be used is left out, with a warning.

    Raises:
        ParserRefused: the operator has named a parser that cannot be used.
    """
    if not choice.name:
        return ""
    manager = ToolParserManager if kind == "tool" else ReasoningParserManager
    known, problem = manager.list_registered(), ""
    if choice.name not in known:
        problem = f"there is no such parser. vLLM has {', '.join(known)}"
    else:
        try:
            build(choice.name)
        except Exception as error:
            problem = f"it does not fit this model's tokenizer: {error}"
    if not problem:
        log.info("%s parser: vLLM's %s, since %s", kind, choice.name, choice.why)
        return choice.name
    if choice.is_set:
        raise ParserRefused(f"--{kind}-parser {choice.name}: {problem}")
    log.warning("%s parser: not vLLM's %s, though %s: %s", kind, choice.name, choice.why, problem)
    return ""
