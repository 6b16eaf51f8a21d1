import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from engine_bridge.driver.apis.suspects import suspect_of

TEXT = {"type": "text", "text": "Hello!", "cache_control": {"type": "ephemeral"}}
HELLO = [{"role": "user", "content": [TEXT]}]


def with_tool(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"messages": HELLO, "tools": [tool]}


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


def test_a_long_pattern_of_a_tool_is_not_compiled() -> None:
    for place in ("pattern", "patternProperties"):
        schemas = [
            {"required": 5, place: pattern if place == "pattern" else {pattern: {}}}
            for pattern in ("a", "a|b", "(a|b)*" * 2000)  # the first one for what is made once
        ]
        _, short, long = (num_calls(partial(suspect_of, with_tool(schema))) for schema in schemas)
        assert long <= 2 * short


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_only_what_holds_any_json_is_suspected() -> None:
    usual = (
        {"system": [{"type": "text", "text": "Be kind."}]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 4000},
        {"reasoning": {"effort": "low"}},
    )
    any_json = (
        {"system": [{"type": "image"}]},
        {"tool_choice": {"type": "function", "function": {"name": {}}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"logit_bias": {"5": 1}},
    )
    named = suspect_of(with_tool({"type": "object", "required": 5}))
    assert named is not None and named.param == "tools[0]" and "required" in named.message
    for fields in (*usual, *any_json):
        assert (suspect_of(with_tool(SCHEMA) | fields) is not None) is (fields in any_json)
