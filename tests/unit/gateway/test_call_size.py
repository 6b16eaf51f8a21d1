"""Calls that ask for too much are refused with the limit's name, others pass."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge.policy.limits.request_limits import check_prompt
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Api
from gateway.doors.api.call_size import check_call, check_shape

MESSAGE = {"role": "user", "content": "x" * 10}


def check(api: Api, body: Any) -> None:
    check_call(api, body, max_messages=8, max_sequences=4)
    check_prompt(api, body, 300)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", {"messages": [MESSAGE] * 8}),
        ("chat", {"messages": "malformed", "n": "two"}),
        ("chat", ["no object"]),
        ("chat", {"messages": [MESSAGE], "user": "u" * 1000}),
        ("completions", {"prompt": "x" * 300, "n": 4}),
        ("completions", {"prompt": ["x" * 300] * 4}),
        ("completions", {"prompt": list(range(50)), "n": 4}),
        ("responses", {"input": "x" * 300}),
        ("messages", {"messages": [MESSAGE], "system": "x" * 250}),
    ],
)
def test_calls_within_their_limits_pass(api: Api, body: Any) -> None:
    check(api, body)


@pytest.mark.parametrize(
    ("api", "body", "setting"),
    [
        ("chat", {"messages": [MESSAGE] * 9}, "max_messages"),
        ("responses", {"input": [MESSAGE] * 9}, "max_messages"),
        ("chat", {"messages": [MESSAGE], "n": 5}, "max_sequences"),
        ("completions", {"prompt": ["x"] * 3, "n": 2}, "max_sequences"),
        ("completions", {"prompt": ["x"] * 3, "n": "2"}, "max_sequences"),
        ("chat", {"messages": [MESSAGE], "n": 16384.0}, "max_sequences"),
        ("completions", {"prompt": [[1], [2], [3]], "n": 2}, "max_sequences"),
        ("completions", {"prompt": "x" * 301}, "max_prompt_chars"),
        ("completions", {"prompt": ["x", "x" * 301]}, "max_prompt_chars"),
        ("chat", {"messages": [{"content": [{"type": "text", "text": "x" * 301}]}]}, "max_prompt_chars"),
        ("chat", {"messages": [MESSAGE], "tools": [{"description": "x" * 301}]}, "max_prompt_chars"),
        ("messages", {"messages": [], "system": "x" * 301}, "max_prompt_chars"),
    ],
)
def test_calls_over_a_limit_are_refused_with_its_name(api: Api, body: Any, setting: str) -> None:
    with pytest.raises(InvalidRequest, match=setting):
        check(api, body)


def test_a_prompt_of_too_many_characters_has_the_code_of_one_of_too_many_tokens() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check("completions", {"prompt": "x" * 301})
    assert refused.value.code == "prompt_too_long"


def test_bodies_with_too_many_values_or_levels_are_refused() -> None:
    check_shape(10, 4, max_values=10, max_depth=4)
    with pytest.raises(InvalidRequest, match="max_json_values"):
        check_shape(11, 4, max_values=10, max_depth=4)
    with pytest.raises(InvalidRequest, match="max_json_depth"):
        check_shape(10, 5, max_values=10, max_depth=4)
