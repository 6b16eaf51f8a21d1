"""Schemas of demanded tool calls are tightened without refusing what a tool's author has allowed."""

from __future__ import annotations

import pytest

from engine_bridge.tool_schemas import MAX_INTEGER, at_most_one, closed

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_an_object_that_names_its_properties_has_no_others() -> None:
    assert closed(CITY) == CITY | {"additionalProperties": False}
    inside = closed(
        {"type": "array", "items": {"anyOf": [CITY, {"$ref": "#/$defs/x"}]}, "$defs": {"x": CITY}}
    )
    assert inside["items"]["anyOf"][0]["additionalProperties"] is False
    assert inside["$defs"]["x"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        CITY | {"additionalProperties": {"type": "string"}},
        CITY | {"patternProperties": {"^x-": {}}},
        CITY | {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"allOf": [CITY, {"properties": {"country": {}}}]},
        {"type": "integer", "minimum": 3},
        "text",
    ],
    ids=str,
)
def test_what_is_open_on_purpose_or_put_together_stays_as_it_is(schema: object) -> None:
    assert closed(schema) == schema


def test_an_integer_is_one_that_readers_of_json_agree_on() -> None:
    assert closed({"type": "integer"}) == {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}


def test_the_schema_of_who_asked_is_not_changed() -> None:
    mine = {"type": "object", "properties": {"n": {"type": "integer"}}}
    closed(mine)
    assert mine == {"type": "object", "properties": {"n": {"type": "integer"}}}


def test_a_list_of_calls_is_bounded_and_arguments_are_not() -> None:
    calls = {"type": "array", "minItems": 1, "items": {}}
    assert at_most_one(calls) == calls | {"maxItems": 1}
    assert at_most_one(CITY) == CITY
