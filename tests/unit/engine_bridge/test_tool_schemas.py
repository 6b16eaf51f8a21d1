import time
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from engine_bridge.calls.tool_schemas import (
    MAX_INTEGER,
    at_most_one,
    closed,
    held_calls,
    is_held,
    loosened,
    portable,
    with_definitions,
    without_remarks,
)

TOKENIZER = Path(__file__).parents[3] / "demo" / "model" / "tokenizer.json"

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_an_object_that_names_its_properties_has_no_others() -> None:
    assert closed(CITY) == CITY | {"additionalProperties": False}
    items = {"anyOf": [CITY, {"$ref": "#/$defs/x"}]}
    inside = closed({"type": "array", "items": items, "$defs": {"x": CITY}})
    for found in (inside["items"]["anyOf"][0], inside["$defs"]["x"]):
        assert found["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        CITY | {"additionalProperties": {"type": "string"}},
        CITY | {"patternProperties": {"^x-": {}}},
        CITY | {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"allOf": [CITY, {"properties": {"country": {}}}]},
        CITY | {"required": ["town"]},  # it must have what it does not name
        {"type": "integer", "minimum": 3},
        "text",
    ],
    ids=str,
)
def test_what_is_open_on_purpose_or_put_together_stays_as_it_is(schema: object) -> None:
    assert closed(schema) == schema


def test_integers_are_those_that_readers_of_json_agree_on_and_the_schema_that_came_is_not_changed() -> None:
    integer = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    mine = {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert closed(mine)["properties"] == {"n": integer}
    assert mine == {"type": "object", "properties": {"n": {"type": "integer"}}}
    calls = {"type": "array", "minItems": 1, "items": {}}
    assert at_most_one(calls) == calls | {"maxItems": 1} and at_most_one(CITY) == CITY


def test_what_says_nothing_of_an_answer_is_left_out() -> None:
    text, date = {"type": "string", "format": "password"}, {"type": "string", "format": "date"}
    mine = {
        "properties": {"format": text, "uniqueItems": {"type": "array", "items": text, "uniqueItems": False}},
        "anyOf": [text, date, {"const": {"format": "x"}}],
        "additionalProperties": {"propertyNames": {"type": "string"}, "patternProperties": {"^a": text}},
    }
    plain = {"type": "string"}
    assert without_remarks(mine) == {
        "properties": {"format": plain, "uniqueItems": {"type": "array", "items": plain}},
        "anyOf": [plain, date, {"const": {"format": "x"}}],
        "additionalProperties": {"patternProperties": {"^a": plain}},
    }
    assert without_remarks({"items": {"required": None, "properties": None}}) == {"items": {}}
    assert without_remarks({"type": "object", "properties": [], "required": []}) == {
        "type": "object",
        "required": [],
    }
    kept: list[object] = [{"const": None}, {"properties": {"required": {"default": None}}}]
    kept += [{"propertyNames": {"pattern": "^a"}}, {"uniqueItems": True}, True, {"format": 7}, {"items": [1]}]
    assert [without_remarks(each) for each in kept] == kept
    grammar = held_calls({"f": {"properties": {"key": text}, "required": ["key"]}})
    assert accepts(grammar, '<tool_call>{"name": "f", "arguments": {"key": "x"}}</tool_call>')


def test_rules_beyond_grammars_are_left_out_of_tools_wherever_they_stand() -> None:
    text, code = {"type": "string"}, {"type": "string", "pattern": "^[a-z]+$"}
    mine = {
        "properties": {
            "not": text | {"not": {"const": "x"}},
            "list": {"type": "array", "items": text, "uniqueItems": True, "contains": text},
            "code": {
                "anyOf": [code, code | {"pattern": "^(?!x)a"}, {"type": "any"}, {"type": ["any", "null"]}]
            },
            "ours": {"type": "STRING", "pattern": r"/^[a-z]+$/i"},
            "maybe": {"type": ["str", "null"]},
            "unknown": {"type": "banana"},
        },
        "if": {},
        "then": {},
        "dependentRequired": {"a": ["b"]},
    }
    assert loosened(mine) == {
        "properties": {
            "not": text,
            "list": {"type": "array", "items": text},
            "code": {"anyOf": [code, text, {}, {}]},
            "ours": text,
            "maybe": {"type": ["string", "null"]},
            "unknown": {"type": "banana"},
        }
    }


def test_what_fits_a_tool_s_schema_fits_the_loosened_one() -> None:
    named = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    either = named | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    first = {"properties": {"x": either | {"anyOf": []}, "y": {"$ref": "#/properties/z/oneOf/0"}}}
    loose = {"properties": {"x": named | {"anyOf": []}, "y": {"$ref": "#/properties/z/anyOf/0"}}}
    assert loosened(first) == loose
    # Which property there may be under some condition is not said in one place.
    further = CITY | {"if": {}, "then": {"properties": {"town": {"type": "string"}}}}
    assert loosened(further) == CITY | {"additionalProperties": True}
    assert loosened(CITY | {"else": {"$ref": "#/$defs/x"}}) == CITY | {"additionalProperties": True}
    assert loosened(CITY | {"then": {"required": ["city"]}}) == CITY
    assert loosened(further | {"additionalProperties": False}) == CITY | {"additionalProperties": False}
    others = {
        "type": "object",
        "patternProperties": {"^(?!x)": {"type": "string"}},
        "additionalProperties": False,
    }
    words = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\bword\b"}}}
    for schema, arguments in (
        (either, '{"b": "x"}'),
        (further, '{"city": "x", "town": "y"}'),
        (words, '{"a": "x"}'),
        (others, '{"y": "x"}'),
    ):
        assert accepts(
            held_calls({"f": schema}), f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        )


def test_references_are_moved_and_values_that_look_like_some_are_not() -> None:
    value = {"$ref": "#/properties/a"}
    named = {
        "enum": {"$ref": "#/properties/$ref"},
        "$ref": {"const": value, "default": value, "enum": [value]},
    }
    absolute = {"$ref": "https://schemas.example/s#/properties/enum"}
    schema = {
        "$id": "https://schemas.example/s#",
        "properties": named | {"of": absolute, "all": {"$ref": "#"}},
    }
    assert portable(schema, "n") == (
        {"$ref": "#/$defs/n"},
        {
            "n": {
                "properties": {
                    "enum": {"$ref": "#/$defs/n/properties/$ref"},
                    "$ref": named["$ref"],
                    "of": {"$ref": "#/$defs/n/properties/enum"},
                    "all": {"$ref": "#/$defs/n"},
                }
            }
        },
    )


def test_many_tools_with_references_are_looked_through_once() -> None:
    """Each was looked for in the schema of all: fifteen thousand, on the event loop, held up everybody for ten seconds."""
    definitions = {f"n{number}": {"type": "object"} for number in range(20_000)}
    whole = {"anyOf": [{"$ref": f"#/$defs/{name}", "description": "x" * 50} for name in definitions]}
    began_s = time.process_time()
    assert with_definitions(whole, definitions | {"unused": {}}) == whole | {"$defs": definitions}
    assert time.process_time() - began_s < 2, "it takes some hundredths"


def accepts(grammar: str, answer: str) -> bool:
    """Whether an answer of the demo model's tokens fits the grammar as a whole."""
    matcher = LLMatcher(LLTokenizer(TOKENIZER.read_text()), LLMatcher.grammar_from_lark(grammar), log_level=0)
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(answer).ids
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALLS = {
    '{"name": "weather", "arguments": {"city": "Oslo"}}': True,
    '{"name": "inside", "arguments": {"of": {"city": "Oslo"}}}': True,
    '{"name": "now", "arguments": {}}': True,
    '{"name": "odd \\"name\\"", "arguments": {}}': True,
    '{"name": "wether", "arguments": {"city": "Oslo"}}': False,
    '{"name": "weather", "arguments": {"town": "Oslo"}}': False,
    '{"name": "weather", "arguments": {}}': False,
    '{"name": "inside", "arguments": {"of": {"city": 3}}}': False,
    '{"name": "now", "arguments": {"city": "Oslo"}}': False,
}


def test_an_answer_is_text_or_one_call_by_the_name_and_the_schema_of_a_tool() -> None:
    referring = {"type": "object", "properties": {"of": {"$ref": "#/$defs/X"}}, "required": ["of"]}
    tools = {"weather": CITY, "inside": referring | {"$defs": {"X": CITY}}, "now": {}, 'odd "name"': {}}
    grammar = held_calls(tools)
    assert is_held(grammar) and not is_held("start: /a/") and not is_held(None)
    assert {call: accepts(grammar, f"<tool_call>{call}</tool_call>") for call in CALLS} == CALLS
    assert accepts(grammar, "Hello! What is <b>your</b> name?") and accepts(grammar, "")
