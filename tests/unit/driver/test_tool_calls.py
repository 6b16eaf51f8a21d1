import json
import sys
from pathlib import Path
from typing import Any

import pytest
import regex
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from engine_bridge.calls.tool_schemas import LOOSE, closed, opened, spaced, without_remarks
from engine_bridge.driver.apis import tool_calls
from engine_bridge.driver.apis.tool_calls import NO_FORM, NoFormToolParser, install_tool_parser
from engine_bridge.driver.engine.parser_plugins import load_plugins
from engine_bridge.settings.parser_choice import REASONING_FAMILIES, TOOL_FAMILIES, Choice

MODEL = Path(__file__).parents[3] / "demo" / "model"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HELD = SCHEMA | {"$comment": LOOSE}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer(str(MODEL))


def chat(tool_choice: object, **more: Any) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    return ChatCompletionRequest.model_validate(body | {"tool_choice": tool_choice} | more)


def bare(parser: type) -> Any:
    """One that was not given a tokenizer: most refuse the demo model's, which has none of their special tokens."""
    return tool_calls.demands_as_json(parser).__new__(tool_calls.demands_as_json(parser))


# `hf` has vLLM's own way to a reply as a whole, which asks no parser of tool calls.
@pytest.mark.parametrize("name", sorted(set(ToolParserManager.list_registered()) - {NO_FORM, "hf"}))
def test_demanded_calls_are_json_with_every_parser(name: str) -> None:
    found = ToolParserManager.get_tool_parser(name)
    parser = bare(getattr(found, "demands_of", found))

    def schema(*asked: object, **more: Any) -> Any:
        return parser.adjust_request(chat(*asked, **more)).structured_outputs.json

    assert parser.supports_required_and_named, "vLLM reads such calls as JSON"
    call = schema("required")["items"]["anyOf"][0]["properties"]
    assert (call["name"]["enum"], call["parameters"]) == (["get_weather"], HELD)
    assert "maxItems" not in schema("required") and schema(NAMED) == HELD
    assert "maxItems" in schema("required", parallel_tool_calls=False)


def referring(number: int, strict: bool = False) -> dict[str, Any]:
    """A tool as draft 7 writes it: what it defines has the name that all tools use for theirs."""
    unit = {"type": "object", "properties": {"v": {"const": number}}, "required": ["v"]}
    properties = {
        "a": {"$ref": "#/definitions/Unit"},
        "b": {"$ref": "#/properties/a"},
        "c": {"$ref": "#/$defs/Unit"},
    }
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
    }
    schema |= {
        "required": ["a"],
        "definitions": {"Unit": unit},
        "$defs": {"Unit": unit},
        "not": {"required": ["d"]},
    }
    return {"type": "function", "function": {"name": f"f{number}", "parameters": schema, "strict": strict}}


def test_each_tool_keeps_what_its_own_references_mean() -> None:
    """Where one of several tools had to be called, references were to the schema of all of them."""
    parser, tools = bare(NoFormToolParser), [referring(1), referring(2)]
    request = parser.adjust_request(chat("required", tools=tools))
    assert [tool.function.parameters for tool in request.tools] == [
        each["function"]["parameters"] for each in tools
    ]
    for choice, written in (
        ("required", '[{"name": "f2", "parameters": ARGUMENTS}]'),
        ({"type": "function", "function": {"name": "f2"}}, "ARGUMENTS"),
    ):
        schema = parser.adjust_request(chat(choice, tools=tools)).structured_outputs.json
        whole = spaced(closed(without_remarks(schema)))
        for fits, value in ((True, 2), (False, 1)):
            arguments = f'{{"a": {{"v": {value}}}, "b": {{"v": {value}}}, "c": {{"v": {value}}}}}'
            answer = written.replace("ARGUMENTS", arguments)
            assert is_written(whole, answer) == fits, (choice, answer)


def is_written(schema: Any, answer: str) -> bool:
    """Whether an answer of the demo model's tokens fits a schema as a whole."""
    words = (MODEL / "tokenizer.json").read_text()
    matcher = LLMatcher(
        LLTokenizer(words), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    ids = Tokenizer.from_str(words).encode(answer).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_what_no_grammar_can_hold_is_left_to_the_model_unless_the_tool_is_strict() -> None:
    parser = bare(NoFormToolParser)
    choice = {"type": "function", "function": {"name": "f1"}}
    for strict in (False, True):
        schema = parser.adjust_request(chat(choice, tools=[referring(1, strict)])).structured_outputs.json
        assert ("not" in schema["$defs"]["arguments_0"]) == strict
    tools = [referring(1, True), referring(2, False)]
    schema = parser.adjust_request(chat("required", tools=tools)).structured_outputs.json
    whole, anything = opened(schema), {"type": "object"}
    assert whole["$defs"] == {"arguments_0": schema["$defs"]["arguments_0"], "arguments_1": anything}
    assert opened(parser.adjust_request(chat(NAMED)).structured_outputs.json) == anything


def test_a_model_without_a_form_makes_one_call_and_its_own_stay_text() -> None:
    parser = bare(NoFormToolParser)
    assert parser.adjust_request(chat("required")).structured_outputs.json["maxItems"] == 1
    assert parser.adjust_request(chat("auto")).structured_outputs is None
    assert parser.extract_tool_calls("It is sunny.", chat("auto")).content == "It is sunny."
    # A format that the client asked for is left alone where no function is demanded.
    mine = {"type": "object", "properties": {"city": {"type": "string"}}}
    form, tool = {"type": "json_schema", "name": "mine", "schema": mine}, {"type": "web_search_preview"}
    body = {"input": "hi", "tools": [tool], "tool_choice": tool, "text": {"format": form}}
    request = parser.adjust_request(ResponsesRequest.model_validate(body))
    assert request.text.format.schema_ == mine


def test_every_family_s_parser_is_one_of_vllm_s() -> None:
    assert {family.parser for family in TOOL_FAMILIES} <= set(ToolParserManager.list_registered())
    assert {family.parser for family in REASONING_FAMILIES} <= set(ReasoningParserManager.list_registered())


def test_a_plugin_brings_a_parser_and_one_that_cannot_be_imported_is_said(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = tmp_path / "regex.py"  # as a library is called
    plugin.write_text(
        "from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager\n"
        "@ToolParserManager.register_module('odd_form')\n"
        "class Odd(ToolParser):\n    pass\n",
        encoding="utf-8",
    )
    load_plugins([str(plugin)])
    assert install_tool_parser(Choice("odd_form", "it was set", is_set=True), tokenizer) == "odd_form"
    assert sys.modules["regex"] is regex
    load_plugins(["no.such.module"])
    assert "No module named 'no'" in caplog.text


def test_a_parser_that_fits_is_found_by_its_name_and_twice_is_as_once(tokenizer: Any) -> None:
    for _ in range(2):
        assert install_tool_parser(Choice("hermes", "it was set", is_set=True), tokenizer) == "hermes"
    assert not hasattr(ToolParserManager.get_tool_parser("hermes").demands_of, "demands_of")
    assert install_tool_parser(Choice("", "it is switched off"), tokenizer) == NO_FORM
