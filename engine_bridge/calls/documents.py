"""The documents that API calls bring with their data: where they are, and the text in their place. Pure: JSON in and out.

OpenAI's chat completions have a document in a part `file`, its responses in one `input_file`, Anthropic's messages in a block `document`; the last
two also in a tool's result. vLLM reads none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from engine_bridge.calls.pictures import parts_of


class Document(NamedTuple):
    """A document in a call's body.

    Attributes:
        part: the part that holds it.
        media_type: as its sender names it, without parameters; "" where it is not named.
        data: its bytes in base64.
    """

    part: dict[str, Any]
    media_type: str
    data: str


def documents_of(body: Any) -> Iterator[Document]:
    """Yield the documents of a call that come with their data. Those named by an address or by the id of an upload are left for others to refuse."""
    for part in parts_of(body):
        kind = part.get("type")
        if kind == "document":
            source = part.get("source")
            if isinstance(source, dict) and source.get("type") == "base64":
                yield Document(part, _media_type(source.get("media_type")), _text(source.get("data")))
        elif kind in ("file", "input_file"):
            data = _text(_file_of(part).get("file_data"))
            head, comma, encoded = data.partition(",")
            if data:
                yield Document(part, _media_type(head[5:]) if comma else "", encoded if comma else data)


def put_text(part: dict[str, Any], text: str) -> None:
    """Put the text of a document in its place, behind its name if it has one."""
    if part["type"] == "document":
        part["source"] = {"type": "text", "media_type": "text/plain", "data": text}
        return
    named = "\n".join(filter(None, (_text(_file_of(part).get("filename")), text)))
    kind = "text" if part["type"] == "file" else "input_text"
    part.clear()
    part.update({"type": kind, "text": named})


def _file_of(part: dict[str, Any]) -> dict[str, Any]:
    file = part.get("file") if part["type"] == "file" else part
    return file if isinstance(file, dict) else {}


def _media_type(value: Any) -> str:
    return _text(value).partition(";")[0].strip().lower()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
