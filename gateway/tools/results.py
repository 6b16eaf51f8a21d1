"""Results of tools as the model and the person read them: text within a bound, from anywhere, and never more than text. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

NOTHING = "(The tool returned nothing.)"


class ToolResult(NamedTuple):
    """What became of a call. is_error: the tool says so itself, or it could not be asked, which the text says in a sentence of ours."""

    text: str
    is_error: bool = False


def text_of(result: Mapping[str, Any]) -> str:
    """Return the text of a result, as MCP's `CallToolResult` in JSON has it. Other contents are named in brackets."""
    parts = [_part(block) for block in result.get("content") or ()]
    structured = result.get("structuredContent")
    if not parts and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    return "\n".join(parts) or NOTHING


def _part(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    resource = block.get("resource")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(resource, Mapping) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    if kind == "resource_link":
        return f"[A link to a resource: {block.get('uri', '')}]"
    return f"[A result of the kind {kind} is left out.]"


def cut(text: str, max_bytes: int) -> str:
    """Return a text of at most `max_bytes` bytes of UTF-8, and behind it, where it was longer, a note that says so."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    kept = data[:max_bytes].decode("utf-8", "ignore")
    return f"{kept}\n[Cut here: the result has {len(data):,} bytes, and the first {max_bytes:,} are kept.]"


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call as its model wrote them; None where they are no JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
