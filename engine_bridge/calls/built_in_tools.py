"""Tools that other servers have built in, and their calls in a history, as tools and calls that any model reads. Pure: JSON in and out.

Some of them the client runs (a shell, an editor): their calls are calls of functions. Others their server runs (a search of the web), which no server
of vLLM's does: they are left out where other tools are offered, and what they have found earlier is the result of a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# -- OpenAI: items of responses -------------------------------------------------------------------------------------------

# Calls that the client ran: the function that they are here, and the field with what it was given.
_RUN_BY_CLIENTS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
}
_THEIR_OUTPUTS = (
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "tool_search_output",
)
# Calls that a server ran, with the fields of what it was given and of what it found, as far as that can be read.
_RUN_BY_SERVERS = {
    "web_search_call": ("action", ""),
    "image_generation_call": ("", ""),
    "mcp_list_tools": ("", ""),
    "file_search_call": ("queries", "results"),
    "code_interpreter_call": ("code", "outputs"),
    "mcp_call": ("arguments", "output"),
}


def as_functions(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an item of a response's input: a call of a built-in tool, or its output, as that of a function; nothing for one without any text."""
    kind = str(item.get("type"))
    call_id = item.get("call_id") or item.get("id") or ""
    if kind in _RUN_BY_CLIENTS:
        name, given = _RUN_BY_CLIENTS[kind]
        return [_call(call_id, name, item.get(given))]
    if kind in _THEIR_OUTPUTS:
        return [_output(call_id, item.get("output", item.get("tools")))]
    if kind not in _RUN_BY_SERVERS:
        return [item]
    given, found = _RUN_BY_SERVERS[kind]
    if item.get(found) is None:
        return []
    name = item.get("name") or kind.removesuffix("_call")
    return [_call(call_id, name, item.get(given)), _output(call_id, item[found])]


def _call(call_id: str, name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, str) or not given.startswith("{"):
        given = json.dumps(given if isinstance(given, dict) else {"input": given}, ensure_ascii=False)
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": given}


def _output(call_id: str, found: Any) -> dict[str, Any]:
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def with_plain_input(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a custom tool whose input is any text: the grammar that it has to follow is said in its description, because vLLM takes none."""
    form = tool.get("format")
    if tool.get("type") != "custom" or not isinstance(form, dict) or form.get("type") != "grammar":
        return tool
    grammar = f"Its input follows this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    description = "\n\n".join(filter(None, (tool.get("description"), grammar)))
    return tool | {"description": description, "format": {"type": "text"}}


# -- Anthropic -------------------------------------------------------------------------------------------------------------

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _NUMBER}


def _schema(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _files_schema(*commands: str, required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    editing: dict[str, Any] = dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT)
    editing |= {"insert_line": _NUMBER, "view_range": _RANGE} | properties
    return _schema(*required, command={"type": "string", "enum": list(commands)}, **editing)


_EDITING = _files_schema("view", "create", "str_replace", "insert", required=("command", "path"))
_REMEMBERING = _files_schema(
    *("view", "create", "str_replace", "insert", "delete", "rename"),
    required=("command",),
    old_path=_TEXT,
    new_path=_TEXT,
)
# Tools that Anthropic's models know without being told, by the beginning of their types: what they do, and their schemas. Source: Anthropic's
# "Bash tool", "Text editor tool", "Memory tool".
_KNOWN = {
    "bash_": (
        "Run a command in a shell that keeps its state.",
        _schema(command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor_": ("View, create and edit files.", _EDITING),
    "memory_": ("Keep files in a folder of memories, /memories, and read them later.", _REMEMBERING),
}
# Fields of results with something to read.
_TEXTS = (
    "title",
    "url",
    "text",
    "stdout",
    "stderr",
    "error_code",
    "tool_name",
    "tool_references",
    "source",
    "content",
)
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")


def with_schema(tool: Any) -> Any:
    """Return a tool of Anthropic's API with its description and schema, which tools that a client runs may leave to the model's own knowledge."""
    kind = _kind(tool)
    for beginning, (description, schema) in _KNOWN.items():
        if kind.startswith(beginning) and "input_schema" not in tool:
            return {"description": description, "input_schema": schema} | tool
    return tool


def without_hosted(tools: list[Any], choice: Any) -> list[Any]:
    """Return the tools of a call without those that Anthropic's server runs; all of them if none would be left, or the call demands one of them."""
    hosted = [tool for tool in tools if _kind(tool).startswith(_HOSTED) and "input_schema" not in tool]
    demanded = choice.get("name") if isinstance(choice, dict) else None
    if (
        not hosted
        or len(hosted) == len(tools)
        or any(tool.get("name") == demanded for tool in hosted if demanded)
    ):
        return tools
    kept = [tool for tool in tools if tool not in hosted]
    if any(_kind(tool).startswith("tool_search_tool_") for tool in hosted):
        # Nothing finds them later.
        kept = [
            {name: value for name, value in tool.items() if name != "defer_loading"}
            if isinstance(tool, dict)
            else tool
            for tool in kept
        ]
    return kept


def _kind(tool: Any) -> str:
    return str(tool.get("type") or "") if isinstance(tool, dict) else ""


def in_rounds(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer of Anthropic's API as messages in which a tool that its server has run is called as any other, with its result behind it."""
    content = message.get("content")
    blocks: list[Any] = content if isinstance(content, list) else []
    if message.get("role") != "assistant" or not any(map(_is_of_a_server, blocks)):
        yield message
        return
    said: list[Any] = []
    found: list[Any] = []
    for block in blocks:
        if _kind(block).endswith("_tool_result"):
            text = "\n".join(_readable(block.get("content")))
            found.append({"type": "tool_result", "tool_use_id": block.get("tool_use_id"), "content": text})
            continue
        if found:
            yield from _round(said, found)
            said, found = [], []
        said.append(_usual_block(block))
    yield from _round(said, found)


def _round(said: list[Any], found: list[Any]) -> Iterator[dict[str, Any]]:
    if said:
        yield {"role": "assistant", "content": said}
    if found:
        yield {"role": "user", "content": found}


def _usual_block(block: Any) -> Any:
    kind = _kind(block)
    if kind in ("server_tool_use", "mcp_tool_use"):
        return {"type": "tool_use"} | {name: block.get(name) for name in ("id", "name", "input")}
    return {"type": "text", "text": block.get("content") or ""} if kind == "compaction" else block


def _is_of_a_server(block: Any) -> bool:
    kind = _kind(block)
    return kind in ("server_tool_use", "mcp_tool_use", "compaction") or kind.endswith("_tool_result")


def _readable(value: Any) -> Iterator[str]:
    """Yield the texts of a result, of which others are encrypted or pictures."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _readable(each)
    elif isinstance(value, dict):
        names = (*_TEXTS, "data") if value.get("type") == "text" else _TEXTS
        for name in names:
            yield from _readable(value.get(name))
