"""Prompts with pictures: messages as the chat template takes them, and where pictures stand in a rendered prompt."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from engine_bridge.protocol.engine_request import ChatMessage, Picture
from engine_bridge.protocol.node import SeenPicture

_IMAGE = "image"  # vLLM's name of the only kind of media that this server reads


def as_dicts(messages: Sequence[ChatMessage]) -> Any:
    """Return messages as chat completions have them. A message's pictures stand before its text."""
    return [_as_dict(message) for message in messages]


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.call_id:
        found["tool_call_id"] = message.call_id
    return found


def _content(message: ChatMessage) -> Any:
    if not message.pictures:
        return message.content
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _data_url(picture)}} for picture in message.pictures
    ]
    return parts + ([{"type": "text", "text": message.content}] if message.content else [])


def _data_url(picture: Picture) -> str:
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"


def num_chars(messages: Sequence[Any]) -> int:
    """Return the characters of the texts in messages that `as_dicts` made."""
    contents = (message["content"] for message in messages)
    return sum(
        len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
        for content in contents
    )


def pictures_in(engine_input: Any) -> list[SeenPicture]:
    """Return the pictures of a rendered prompt, in their order."""
    places = engine_input.get("mm_placeholders", {}).get(_IMAGE, ())
    names = engine_input.get("mm_hashes", {}).get(_IMAGE, ())
    return [SeenPicture(place.offset, place.length, name) for place, name in zip(places, names, strict=True)]


def picture_end(pictures: Sequence[SeenPicture], num_tokens: int) -> int:
    """Return a number of tokens that ends within none of these pictures: the given one, or the end of the picture that it lies in."""
    ends = (each.offset + each.num_tokens for each in pictures if each.offset < num_tokens)
    return max(num_tokens, *ends, 0)


def beginning(engine_input: Any, num_tokens: int) -> Any:
    """Return the first tokens of a rendered prompt with the pictures among them, as vLLM's engine takes it.

    Where the end would lie within a picture, the result ends before the picture.
    """
    found = pictures_in(engine_input)
    whole = [each for each in found if each.offset + each.num_tokens <= num_tokens]
    cut = [each.offset for each in found if each.offset < num_tokens < each.offset + each.num_tokens]
    ids = list(engine_input["prompt_token_ids"][: min([num_tokens, *cut])])
    if not whole:
        return {"prompt_token_ids": ids}
    kept = {
        name: type(engine_input[name])({_IMAGE: engine_input[name][_IMAGE][: len(whole)]})
        for name in ("mm_kwargs", "mm_hashes", "mm_placeholders")
    }
    return {"type": "multimodal", "prompt_token_ids": ids, **kept}
