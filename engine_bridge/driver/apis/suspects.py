"""The parts of a body that may have made code fail: the fields that take any JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]

from engine_bridge.policy.limits.request_limits import measure

MALFORMED_MESSAGE: Final = "The request cannot be read: one of its fields has a form that does not fit. /openapi.json says which forms they take."
TEMPLATE_MESSAGE: Final = (
    "`chat_template_kwargs`: the chat template of this model cannot work with these arguments."
)
# Fields that hold several values and are examined separately, or on which no code fails: texts and switches.
_LISTS: Final = ("messages", "input", "documents", "queries", "items", "data_1", "data_2", "text_1", "text_2")
_LOOKED_AT: Final = frozenset({*_LISTS, "tools", "chat_template_kwargs"})
_HARMLESS: Final = frozenset({"stop", "stop_sequences", "stream_options", "metadata"})
# Small objects of a few words, which vLLM's request classes know in full.
_CHOICES: Final = frozenset({"tool_choice", "thinking", "reasoning"})
# Types of a message's blocks.
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
# The fields of a message that are mostly text.
_TEXTS: Final = ("role", "content", "name", "tool_call_id", "type", "id", "status")
# Libraries keep numbers in types that hold no larger number than this.
_LARGEST: Final = 2**31
_MOST_NAME_CHARS: Final = 100
# The most values of all tools together. Chosen: examining this many takes some milliseconds of the event loop.
_MOST_LOOKED_AT: Final = 500


class Suspect(NamedTuple):
    """A message for the client, and the field that it is about; None for no single one."""

    message: str
    param: str | None = None


def suspect_of(body: Any) -> Suspect | None:
    """Return the first part of a call's body on which code may fail; None for a body of plain texts and numbers."""
    if not isinstance(body, dict):
        return Suspect(MALFORMED_MESSAGE)
    if body.get("chat_template_kwargs"):
        return Suspect(TEMPLATE_MESSAGE, "chat_template_kwargs")
    if measure(body.get("tools"), _MOST_LOOKED_AT)[0] > _MOST_LOOKED_AT:
        return Suspect(MALFORMED_MESSAGE, "tools")
    for index, name, schema in _schemas(body.get("tools")):
        try:
            # Formats are not checked: one of them is a regular expression, and compiling a long one takes seconds.
            Draft202012Validator.check_schema(schema, format_checker=None)
        except SchemaError as error:
            return Suspect(_schema_message(name, error), f"tools[{index}]")
        except (RecursionError, TypeError, ValueError):
            return Suspect(MALFORMED_MESSAGE, f"tools[{index}]")
    is_plain = all(_is_plain_field(name, value) for name, value in body.items())
    is_plain = is_plain and all(map(_is_plain_message, _messages(body)))
    return None if is_plain else Suspect(MALFORMED_MESSAGE)


def _schemas(tools: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield (index, name, schema of the arguments) of each tool, in any of the three APIs' forms."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        inner = tool.get("function")
        function = inner if isinstance(inner, dict) else tool
        schema = function.get("parameters", function.get("input_schema"))
        if schema is not None:
            yield index, str(function.get("name", ""))[:_MOST_NAME_CHARS], schema


def _schema_message(name: str, error: SchemaError) -> str:
    place = ".".join(str(part) for part in error.absolute_path)[:_MOST_NAME_CHARS] or "its top"
    return f"The arguments of the tool `{name}` are described by something that is no JSON schema: look at `{place}`."


def _messages(body: dict[str, Any]) -> list[Any]:
    """Return the conversation, in any of the APIs' forms, or the texts of a call for embeddings or scores."""
    found = [body.get(name) for name in _LISTS]
    return [message for each in found if isinstance(each, list) for message in each]


def _is_plain_field(name: str, value: Any) -> bool:
    if name in _LOOKED_AT | _HARMLESS:
        return True
    if name in _CHOICES and isinstance(value, dict):
        return all(_is_plain_value(each) or _is_plain_name(each) for each in value.values())
    return _is_plain_text(value) if name == "system" else _is_plain_value(value)


def _is_plain_name(value: Any) -> bool:
    """Return whether this is a tool's name, as a choice in OpenAI's form has it."""
    return isinstance(value, dict) and value.keys() == {"name"} and isinstance(value["name"], str)


def _is_plain_text(value: Any) -> bool:
    """Return whether this is a text, or a list of blocks of text."""
    if not isinstance(value, list):
        return value is None or isinstance(value, str)
    return all(
        isinstance(block, dict) and block.get("type") in _TEXT_TYPES and isinstance(block.get("text"), str)
        for block in value
    )


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, int | float):
        return abs(value) < _LARGEST
    return value is None or isinstance(value, str)


def _is_plain_message(message: Any) -> bool:
    if not isinstance(message, dict):  # a text, a token id, or the ids of a text
        return all(map(_is_plain_value, message if isinstance(message, list) else [message]))
    return all(
        name in _TEXTS and (_is_plain_text(value) if name == "content" else isinstance(value, str))
        for name, value in message.items()
        if value is not None
    )
