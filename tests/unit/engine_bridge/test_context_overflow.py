"""What is left out of calls that are too long, setting by setting and API by API."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.calls.context_overflow import dropped_event, dropped_of, shorter
from engine_bridge.protocol.node import Dropped

TOOLS = [{"type": "function", "function": {"name": f"tool_{i}"}} for i in range(3)]


def say(role: str, text: str = "word " * 20, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def turns(num: int) -> list[dict[str, Any]]:
    return [
        message for i in range(num) for message in (say("user", f"{i} " * 40), say("assistant", f"{i} " * 40))
    ]


def test_nothing_is_left_out_where_the_setting_says_so() -> None:
    body = {"messages": turns(5), "tools": TOOLS}
    assert not list(shorter("error", "chat", body, calls_tools=False))


@pytest.mark.parametrize("choice", [None, "auto", "none", {"type": "auto"}])
def test_tools_that_the_model_cannot_call_go_first_and_all_at_once(choice: Any) -> None:
    body = {
        "messages": turns(1),
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": True,
        "top_p": 1,
    }
    assert list(shorter("drop-tools", "chat", body, calls_tools=False)) == [
        ({"messages": turns(1), "top_p": 1}, Dropped(tools=3))
    ]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "tool_0"}, {"type": "any"}, {"type": "tool"}]
)
def test_tools_that_are_demanded_stay(choice: Any) -> None:
    body = {"messages": turns(1), "tools": TOOLS, "tool_choice": choice}
    assert not list(shorter("drop-tools", "messages", body, calls_tools=False))


def test_tools_that_the_model_can_call_stay() -> None:
    versions = list(shorter("drop-oldest", "chat", {"messages": turns(3), "tools": TOOLS}, calls_tools=True))
    assert versions
    assert all(version["tools"] == TOOLS and dropped.tools == 0 for version, dropped in versions)


def test_tools_that_the_model_can_call_go_where_they_are_longer_than_the_conversation() -> None:
    long_tools = [tool | {"description": "does much " * 900} for tool in TOOLS]
    body = {"messages": turns(3), "tools": long_tools, "tool_choice": "auto"}
    assert list(shorter("drop-tools", "chat", body, calls_tools=True)) == [
        ({"messages": turns(3)}, Dropped(tools=3))
    ]
    assert not list(shorter("drop-tools", "chat", body | {"tool_choice": "required"}, calls_tools=True))


def test_the_oldest_turns_go_until_the_last_one_stands_alone() -> None:
    messages = [say("system"), *turns(8), say("user", "last")]
    versions = list(shorter("drop-oldest", "chat", {"messages": messages}, calls_tools=False))
    kept = [version["messages"] for version, _ in versions]
    assert kept[-1] == [messages[0], messages[-1]]
    for longer, after in zip([messages, *kept], kept, strict=False):
        assert after[0] == messages[0], "instructions stay"
        assert after[1:] == messages[-(len(after) - 1) :], "what stays is the end of the conversation"
        assert len(after) < len(longer)
    assert [dropped.messages for _, dropped in versions] == [len(messages) - len(each) for each in kept]


def test_a_conversation_many_times_too_long_takes_few_tries() -> None:
    versions = list(shorter("drop-oldest", "chat", {"messages": turns(2000)}, calls_tools=False))
    assert len(versions) <= 40


def test_a_tools_result_never_stands_without_its_call() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}]}
    messages = [say("user"), say("assistant", "calls"), result, say("assistant"), say("user", "last")]
    ((version, dropped),) = shorter("drop-oldest", "messages", {"messages": messages}, calls_tools=False)
    assert version["messages"] == [messages[-1]]
    assert dropped == Dropped(messages=4)


def test_responses_lose_the_oldest_items_of_their_input() -> None:
    items = [
        say("user"),
        {"type": "function_call", "name": "f"},
        {"type": "function_call_output"},
        say("user", "last"),
    ]
    ((version, dropped),) = shorter("drop-oldest", "responses", {"input": items}, calls_tools=False)
    assert version == {"input": [items[-1]]}
    assert dropped == Dropped(messages=3)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("responses", {"input": "one question"}),
        ("chat", {"messages": [say("user")]}),
        ("chat", {"messages": "none"}),
        ("chat", {"messages": ["not a message"]}),
        ("chat", ["not a body"]),
        ("completions", {"prompt": "text"}),
    ],
)
def test_what_has_no_older_turns_cannot_be_shortened(api: Any, body: Any) -> None:
    assert not list(shorter("drop-oldest", api, body, calls_tools=False))


@given(st.integers(0, 99), st.integers(0, 99))
def test_a_comment_says_what_was_left_out_and_is_read_back(tools: int, messages: int) -> None:
    dropped = Dropped(tools, messages)
    assert dropped_of(dropped_event(dropped).encode()) == dropped
    assert bool(dropped) == bool(tools or messages)


@pytest.mark.parametrize("event", [b"data: {}\n\n", b": keep-alive\n\n", b"", b"data: \xff\n\n"])
def test_other_events_say_nothing_of_it(event: bytes) -> None:
    assert not dropped_of(event)
