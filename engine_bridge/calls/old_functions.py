"""Calls of functions in the form that OpenAI's API had before its tools (2023), as calls of tools, and their answers in that form. Pure.

Programs still send `functions` and `function_call`, and messages of the role `function`; vLLM passes over the fields, and chat templates do not know
the role. Source: OpenAI's API reference, "Chat", the deprecated fields.
"""

from __future__ import annotations

from typing import Any

# An id of calls, which had none: of nine letters and digits, as Mistral's templates want them.
_ID = "call{:05}"


def with_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat completion's body that offers its functions as tools. Only such a body keeps `functions`: the answer is to be in their form."""
    functions = body.get("functions")
    if not functions or not isinstance(functions, list) or "tools" in body:
        return {name: value for name, value in body.items() if name != "functions"}
    choice = body.get("function_call", "auto")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    tools = [{"type": "function", "function": each} for each in functions]
    return body | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def with_tool_messages(messages: Any) -> Any:
    """Return a conversation whose calls of functions, and their results, are those of tools. Anything but a list stays as it is."""
    if not isinstance(messages, list):
        return messages
    found, num_calls = [], 0
    for message in messages:
        if not isinstance(message, dict):
            found.append(message)
        elif isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):
            num_calls += 1
            call = {"id": _ID.format(num_calls), "type": "function", "function": message["function_call"]}
            rest = {name: value for name, value in message.items() if name != "function_call"}
            found.append(rest | {"tool_calls": [call]})
        elif message.get("role") == "function":
            found.append(message | {"role": "tool", "tool_call_id": _ID.format(num_calls)})
        else:
            found.append(message)
    return found


def end_of_call(finish_reason: str | None) -> str | None:
    """Return why an answer has ended, in the words of those who offer functions."""
    return "function_call" if finish_reason == "tool_calls" else finish_reason


def with_function_call(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return a chunk of a stream, which holds one thing, with a piece of the first call in the form of a function's. The chunk is changed."""
    for choice in chunk.get("choices") or []:
        choice["finish_reason"] = end_of_call(choice.get("finish_reason"))
        for call in choice["delta"].pop("tool_calls", ()):
            if call["index"] == 0:
                choice["delta"]["function_call"] = call["function"]
    return chunk
