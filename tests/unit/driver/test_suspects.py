"""Which part of a body code may have tripped over, and that looking for it takes little of the event loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine_bridge.driver.apis.suspects import suspect_of

HELLO = [
    {"role": "user", "content": [{"type": "text", "text": "Hello!", "cache_control": {"type": "ephemeral"}}]}
]


def with_tool(schema: Any) -> dict[str, Any]:
    return {
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
    }


def num_calls(work: Callable[[], Any]) -> int:
    """How many functions of Python's are called, which says on any machine how long something takes."""
    num = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal num
        num += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.parametrize("place", ["pattern", "patternProperties"])
def test_a_long_pattern_of_a_tool_is_not_compiled(place: str) -> None:
    def schema(pattern: str) -> dict[str, Any]:
        return {"required": 5, place: pattern if place == "pattern" else {pattern: {}}}

    suspect_of(with_tool(schema("a")))  # what is made once
    short = num_calls(lambda: suspect_of(with_tool(schema("a|b"))))
    long = num_calls(lambda: suspect_of(with_tool(schema("(a|b)*" * 2000))))
    assert long <= 2 * short


def test_a_tool_without_a_schema_is_named() -> None:
    suspect = suspect_of(with_tool({"type": "object", "required": 5}))
    assert suspect is not None and suspect.param == "tools[0]" and "required" in suspect.message


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [{"type": "text", "text": "Be kind."}]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 4000},
        {"reasoning": {"effort": "low"}},
    ],
)
def test_what_agents_send_with_every_call_is_not_suspected(fields: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert suspect_of(with_tool(schema) | fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [{"type": "image"}]},
        {"tool_choice": {"type": "function", "function": {"name": {}}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"logit_bias": {"5": 1}},
    ],
)
def test_what_holds_any_json_is_suspected(fields: dict[str, Any]) -> None:
    assert suspect_of({"messages": HELLO} | fields) is not None
