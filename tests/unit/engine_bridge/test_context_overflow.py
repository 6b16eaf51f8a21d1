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
    return [say(role, f"{i} " * 40) for i in range(num) for role in ("user", "assistant")]


DEMANDS = ("required", {"type": "function", "name": "tool_0"}, {"type": "any"}, {"type": "tool"})


@pytest.mark.parametrize("choice", [None, "auto", "none", {"type": "auto"}, *DEMANDS])
def test_tools_that_the_model_cannot_call_go_all_at_once_unless_demanded(choice: Any) -> None:
    others = {"parallel_tool_calls": True, "top_p": 1}
    body = {"messages": turns(1), "tools": TOOLS, "tool_choice": choice, **others}
    found = [] if choice in DEMANDS else [({"messages": turns(1), "top_p": 1}, Dropped(tools=3))]
    for api in ("chat", "messages"):
        assert list(shorter("drop-tools", api, body, calls_tools=False)) == found


def test_tools_that_the_model_can_call_go_where_they_are_longer_than_the_conversation() -> None:
    long_tools = [tool | {"description": "does much " * 900} for tool in TOOLS]
    body = {"messages": turns(3), "tools": long_tools, "tool_choice": "auto"}
    found = list(shorter("drop-tools", "chat", body, calls_tools=True))
    assert found == [({"messages": turns(3)}, Dropped(tools=3))]
    assert not list(shorter("drop-tools", "chat", body | {"tool_choice": "required"}, calls_tools=True))


def test_the_oldest_turns_go_until_the_last_one_stands_alone() -> None:
    messages = [say("system"), *turns(8), say("user", "last")]
    body = {"messages": messages, "tools": TOOLS}
    versions = list(shorter("drop-oldest", "chat", body, calls_tools=True))
    assert all(version["tools"] == TOOLS and dropped.tools == 0 for version, dropped in versions)
    kept = [version["messages"] for version, _ in versions]
    assert kept[-1] == [messages[0], messages[-1]]
    for longer, after in zip([messages, *kept], kept, strict=False):
        assert after[0] == messages[0], "instructions stay"
        assert after[1:] == messages[-(len(after) - 1) :], "what stays is the end of the conversation"
        assert len(after) < len(longer)
    assert [dropped.messages for _, dropped in versions] == [len(messages) - len(each) for each in kept]
    assert len(list(shorter("drop-oldest", "chat", {"messages": turns(2000)}, calls_tools=False))) <= 40


RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}]}


@pytest.mark.parametrize(
    ("api", "field", "older"),
    [
        ("messages", "messages", [say("user"), say("assistant", "calls"), RESULT, say("assistant")]),
        ("responses", "input", [say("user"), {"type": "function_call"}, {"type": "function_call_output"}]),
    ],
)
def test_a_tools_result_never_stands_without_call(api: Any, field: str, older: list[dict[str, Any]]) -> None:
    last = say("user", "last")
    found = list(shorter("drop-oldest", api, {field: [*older, last]}, calls_tools=False))
    assert found == [({field: [last]}, Dropped(messages=len(older)))]


@pytest.mark.parametrize(
    ("setting", "api", "body"),
    [
        ("error", "chat", {"messages": turns(5), "tools": TOOLS}),
        ("drop-oldest", "responses", {"input": "one question"}),
        ("drop-oldest", "chat", {"messages": [say("user")]}),
        ("drop-oldest", "chat", {"messages": "none"}),
        ("drop-oldest", "chat", {"messages": ["not a message"]}),
        ("drop-oldest", "chat", ["not a body"]),
        ("drop-oldest", "completions", {"prompt": "text"}),
    ],
)
def test_what_has_no_older_turns_or_may_lose_none_stays_as_it_is(setting: Any, api: Any, body: Any) -> None:
    assert not list(shorter(setting, api, body, calls_tools=False))


@given(st.integers(0, 99), st.integers(0, 99))
def test_a_comment_says_what_was_left_out_and_is_read_back(tools: int, messages: int) -> None:
    dropped = Dropped(tools, messages)
    assert dropped_of(dropped_event(dropped).encode()) == dropped
    assert bool(dropped) == bool(tools or messages)
    for other in (b"data: {}\n\n", b": keep-alive\n\n", b"", b"data: \xff\n\n"):
        assert not dropped_of(other)
