"""Tools that other servers have built in, and their calls in a history, as tools and calls that any model reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_bridge.calls.body_forms import usual_form
from engine_bridge.protocol.errors import InvalidRequest

WEATHER = {"name": "get_weather", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def items(*given: Any) -> list[Any]:
    found = usual_form("responses", {"input": list(given)}, 4096)["input"]
    assert isinstance(found, list)
    return found


def messages(*content: Any) -> list[Any]:
    found = usual_form("messages", {"messages": [{"role": "assistant", "content": list(content)}]}, 4096)[
        "messages"
    ]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("call", "output", "name", "text"),
    [
        (
            {"type": "local_shell_call", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "output": "a.txt"},
            "local_shell",
            "a.txt",
        ),
        (
            {"type": "shell_call", "action": {"command": ["ls"]}},
            {"type": "shell_call_output", "output": [{"stdout": "a"}]},
            "shell",
            '[{"stdout": "a"}]',
        ),
        (
            {"type": "tool_search_call", "arguments": {"command": ["ls"]}},
            {"type": "tool_search_output", "tools": []},
            "tool_search",
            "[]",
        ),
    ],
)
def test_calls_that_a_client_runs_are_calls_of_functions(
    call: Any, output: Any, name: str, text: str
) -> None:
    called, found = items(call | {"call_id": "c"}, output | {"call_id": "c"})
    assert (called["type"], called["call_id"], called["name"]) == ("function_call", "c", name)
    assert json.loads(called["arguments"]) == {"command": ["ls"]}
    assert found == {"type": "function_call_output", "call_id": "c", "output": text}


def test_of_calls_that_a_server_ran_what_can_be_read_is_kept() -> None:
    tool = {
        "type": "mcp_call",
        "id": "m",
        "server_label": "s",
        "name": "look",
        "arguments": '{"a": 1}',
        "output": "o",
    }
    called, found = items(tool)
    assert (called["name"], called["arguments"], found["output"]) == ("look", '{"a": 1}', "o")
    code = {
        "type": "code_interpreter_call",
        "id": "c",
        "code": "1",
        "outputs": [{"type": "logs", "logs": "é"}],
    }
    called, found = items(code)
    assert json.loads(called["arguments"]) == {"input": "1"}
    assert "é" in found["output"]
    unread = [
        {"type": kind, "id": "x", "results": None}
        for kind in ("web_search_call", "file_search_call", "mcp_list_tools")
    ]
    assert items(*unread, {"type": "image_generation_call", "result": "aGk="}) == []


def test_a_grammar_of_a_custom_tool_is_said_to_the_model() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    tool = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": form}
    (found,) = usual_form("responses", {"input": "x", "tools": [tool]}, 4096)["tools"]
    assert found["format"] == {"type": "text"}
    assert found["description"].startswith("Patches.") and found["description"].endswith("start: /a+/")


def test_what_a_search_of_the_web_may_tell_is_not_asked_of_vllm() -> None:
    asked = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    assert usual_form("responses", {"input": "x", "include": asked}, 4096)["include"] == asked[:1]


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_tools_that_a_client_of_anthropics_runs_get_their_schemas(kind: str) -> None:
    body = {"messages": [], "tools": [{"type": kind, "name": "t"}]}
    (tool,) = usual_form("messages", body, 4096)["tools"]
    assert tool["name"] == "t" and "command" in tool["input_schema"]["properties"] and tool["description"]


def test_tools_that_anthropics_server_runs_are_left_out_beside_others() -> None:
    finding = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    body = {"messages": [], "tools": [WEATHER | {"defer_loading": True}, SEARCH, finding]}
    assert usual_form("messages", body, 4096)["tools"] == [WEATHER]
    for alone in (
        {"tools": [SEARCH]},
        {"tools": [WEATHER, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
    ):
        with pytest.raises(InvalidRequest, match="web_search_20250305"):
            usual_form("messages", {"messages": []} | alone, 4096)


def test_what_anthropics_server_has_run_is_a_call_with_its_result_behind_it() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    page = {"type": "web_search_result", "url": "http://x", "title": "X", "encrypted_content": "zzz"}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]}
    ran = {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": "b",
        "content": {"stdout": "1", "stderr": ""},
    }
    bash = {"type": "server_tool_use", "id": "b", "name": "bash", "input": {}}
    text = {"type": "text", "text": "Found."}
    first, results, last = messages(search, bash, found, ran, text)
    assert [block["type"] for block in first["content"]] == ["tool_use", "tool_use"]
    assert first["content"][0] == {
        "type": "tool_use",
        "id": "s",
        "name": "web_search",
        "input": {"query": "x"},
    }
    assert results["role"] == "user" and [block["tool_use_id"] for block in results["content"]] == ["s", "b"]
    assert (
        results["content"][0]["content"] == "X\nhttp://x" and results["content"][1]["content"].strip() == "1"
    )
    assert last == {"role": "assistant", "content": [text]}
    assert messages({"type": "compaction", "content": "So far."}, text)[0]["content"][0]["text"] == "So far."
    assert messages(text) == [last]
