"""The pictures in API calls: where they are, which are taken, and what else of media is refused. Pure: JSON in and out.

OpenAI's chat completions have a picture in a part `image_url`, its responses in one `input_image`, Anthropic's messages in a block `image`, also in a
tool's result. Each has a URL; vLLM decodes those that hold the picture itself (`data:`) and names a picture by its content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine_bridge.protocol.errors import InvalidRequest

_MESSAGES = ("messages", "input")
_KINDS = ("image_url", "input_image", "image")
# Media of other kinds, and what a client would have computed of a picture by itself: of each only the operator could say whether it fits the model.
_REFUSED = (
    "audio_url input_audio audio video_url input_video video image_embeds audio_embeds video_embeds prompt_embeds image_pil"
).split()
# Arguments of the code that reads pictures: one call could make it work without end, for all.
_OPERATORS = ("mm_processor_kwargs", "media_io_kwargs")


def parts_of(body: Any) -> Iterator[dict[str, Any]]:
    """Return the parts of a call's messages, those of tools' results among them."""
    for name in _MESSAGES:
        messages = body.get(name) if isinstance(body, dict) else None
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                yield from _parts_in(message.get("content"))
                yield from _parts_in(message.get("output"))


def _parts_in(content: Any) -> Iterator[dict[str, Any]]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            yield part
            if part.get("type") == "tool_result":
                yield from _parts_in(part.get("content"))


def is_picture(part: Mapping[str, Any]) -> bool:
    """Return whether a part is a picture. vLLM also takes one that does not say its type."""
    kind = part.get("type")
    return kind in _KINDS or (kind is None and "image_url" in part)


def url_of(part: Mapping[str, Any]) -> str:
    """Return the URL of a picture's part; "" where it has none."""
    source = part.get("source")
    if isinstance(source, dict):
        if source.get("type") == "base64":
            return f"data:{source.get('media_type')};base64,{source.get('data')}"
        found = source.get("url")
    else:
        found = part.get("image_url")
        found = found.get("url") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""


def with_url(part: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return a picture's part with another URL. An Anthropic block gets the data of a `data:` URL."""
    if "source" in part:
        head, _, data = url.partition(",")
        media_type = head.removeprefix("data:").partition(";")[0]
        return {**part, "source": {"type": "base64", "media_type": media_type, "data": data}}
    given = part.get("image_url")
    return {**part, "image_url": {**given, "url": url} if isinstance(given, dict) else url}


def replace_urls(body: dict[str, Any], urls: Mapping[str, str]) -> None:
    """Put other URLs in the places of pictures' URLs, in the body itself."""
    for part in parts_of(body):
        if is_picture(part) and (url := urls.get(url_of(part))) is not None:
            part.update(with_url(part, url))


def num_chars(body: Any) -> int:
    """Return the characters of a body's pictures, which are no text of its prompt."""
    return sum(len(url_of(part)) for part in parts_of(body) if is_picture(part))


def check_pictures(body: Any, max_images: int) -> None:
    """Check the media of a call, and take out names that clients give to pictures: one name could stand for two pictures, and for another tenant's.

    Args:
        body: the call's body, whose parts are changed.
        max_images: the most pictures in one call; 0: the model reads none.

    Raises:
        InvalidRequest: for what this server does not take.
    """
    if not isinstance(body, dict):
        return
    num_images = 0
    for part in parts_of(body):
        kind = part.get("type")
        refused = next((name for name in _REFUSED if kind == name or (kind is None and name in part)), None)
        if refused is not None:
            raise InvalidRequest(
                f"This server reads text and pictures; it takes no part of the type {refused!r}.",
                param=where(body),
            )
        if is_picture(part):
            num_images += 1
            part.pop("uuid", None)
            _check_url(url_of(part), where(body))
    if num_images and not max_images:
        raise InvalidRequest("This server's model reads no pictures. Send text only.", param=where(body))
    if num_images > max_images:
        raise InvalidRequest(
            f"Pictures in one call: {num_images:,}; this server reads at most {max_images:,} (max_images).",
            param=where(body),
        )
    for name in _OPERATORS if num_images else ():
        if body.get(name):
            raise InvalidRequest(
                f"{name!r} is the operator's to set (--engine-arg {name}=…): leave it out.", param=name
            )


def _check_url(url: str, param: str) -> None:
    if not url.startswith("data:"):
        raise InvalidRequest(
            "A picture must come with its data, as `data:image/png;base64,…`."
            if not url.startswith(("http://", "https://"))
            else "This server fetches no pictures from that host: send the picture itself, as `data:image/png;base64,…`,"
            " or have its operator allow the host (--allow-image-host).",
            param=param,
        )


def where(body: Mapping[str, Any]) -> str:
    """Return the field in which a call's messages are."""
    return next((name for name in _MESSAGES if name in body), "messages")
