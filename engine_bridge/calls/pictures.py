"""The pictures in API calls: where they are, which are taken, and what else of media is refused. Pure: JSON in and out.

OpenAI's chat completions have a picture in a part `image_url`, its responses in one `input_image`, Anthropic's messages in a block `image`, also in a
tool's result. Each has a URL; vLLM decodes those that hold the picture itself (`data:`) and names a picture by its content.

vLLM reads some fields of a part whatever its type says. So a part keeps only the fields that its type is known by, and a part of another type may
hold no media at all: what is checked here and what vLLM reads must not be two things.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine_bridge.protocol.errors import InvalidRequest

# The most pixels of a call's pictures together, in units of the largest readable picture. Chosen: the decoded pictures of a call take 600 MB at most.
LARGEST_IN_A_CALL = 4

_MESSAGES = ("messages", "input")
# The fields of each kind of picture. Not vLLM's `uuid`: one name could stand for two pictures, and for another tenant's.
_FIELDS: Mapping[str, frozenset[str]] = {
    "image_url": frozenset(("type", "image_url")),
    "input_image": frozenset(("type", "image_url", "detail")),
    "image": frozenset(("type", "source", "cache_control")),
}
# Other media, and what a client would have computed of a picture by itself: of each only the operator could say whether it fits the model.
_REFUSED = (
    "audio_url input_audio audio video_url input_video video image_embeds audio_embeds video_embeds prompt_embeds image_pil image_url file input_file"
).split()
_FILES = ("file", "input_file")
# Arguments of the code that reads pictures: one call could make it work without end, for all.
_OPERATORS = ("mm_processor_kwargs", "media_io_kwargs")


def parts_of(body: Any) -> Iterator[dict[str, Any]]:
    """Return the parts of a call's messages, those of tools' results among them."""
    for message in _messages(body):
        yield from _parts_in(message.get("content"))
        yield from _parts_in(message.get("output"))


def _messages(body: Any) -> Iterator[dict[str, Any]]:
    for name in _MESSAGES:
        messages = body.get(name) if isinstance(body, dict) else None
        yield from (each for each in messages if isinstance(each, dict)) if isinstance(messages, list) else ()


def _parts_in(content: Any) -> Iterator[dict[str, Any]]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            yield part
            if part.get("type") == "tool_result":
                yield from _parts_in(part.get("content"))


def is_picture(part: Mapping[str, Any]) -> bool:
    """Return whether a part is a picture. vLLM also takes a picture without a type."""
    kind = part.get("type")
    return kind in _FIELDS if isinstance(kind, str) else kind is None and "image_url" in part


def url_of(part: Mapping[str, Any]) -> str:
    """Return the URL of a picture's part; "" where it has none."""
    if part.get("type") == "image":
        source = part.get("source")
        if not isinstance(source, dict):
            return ""
        if source.get("type") == "url":
            return _text(source.get("url"))
        return (
            f"data:{_text(source.get('media_type'))};base64,{data}"
            if (data := _text(source.get("data")))
            else ""
        )
    given = part.get("image_url")
    return _text(given.get("url") if isinstance(given, dict) else given)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def with_url(part: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return a picture's part with another URL. An Anthropic block gets the data of a `data:` URL."""
    if part.get("type") == "image":
        if not _holds_data(url):
            return {**part, "source": {"type": "url", "url": url}}
        head, _, data = url.partition(",")
        media_type = head[5:].partition(";")[0]
        return {**part, "source": {"type": "base64", "media_type": media_type, "data": data}}
    given = part.get("image_url")
    kept = {"detail": given["detail"]} if isinstance(given, dict) and "detail" in given else {}
    return {**part, "image_url": {"url": url, **kept} if isinstance(given, dict) else url}


def urls_of(body: Any) -> list[str]:
    """Return the URLs of a call's pictures, one of each mention."""
    return [url_of(part) for part in parts_of(body) if is_picture(part)]


def replace_urls(body: dict[str, Any], urls: Mapping[str, str]) -> None:
    """Put other URLs in the places of pictures' URLs, in the body itself."""
    for part in parts_of(body):
        if is_picture(part) and (url := urls.get(url_of(part))) is not None:
            part.update(with_url(part, url))


def num_chars(body: Any) -> int:
    """Return the characters of a body's pictures, which are no text of its prompt. Of an assistant's, vLLM reads Anthropic's blocks as text."""
    return sum(
        len(url_of(part))
        for message in _messages(body)
        for part in parts_of({"messages": [message]})
        if is_picture(part) and not (message.get("role") == "assistant" and part.get("type") == "image")
    )


def check_pictures(body: Any, max_images: int) -> None:
    """Check the media of a call, and leave of each picture's part in the body what the picture is read from.

    max_images: the most pictures in one call; 0: the model reads none. Raises InvalidRequest for what this server does not take.
    """
    num_images = 0
    for part in parts_of(body):
        if is_picture(part):
            num_images += 1
            _keep_picture(part)
        else:
            _check_other(part, where(body))
    if not num_images:
        return
    if not max_images:
        raise InvalidRequest("This server's model reads no pictures. Send text only.", param=where(body))
    if num_images > max_images:
        raise InvalidRequest(
            f"Pictures in one call: {num_images:,}; this server reads at most {max_images:,} (max_images).",
            param=where(body),
        )
    for url in urls_of(body):
        _check_url(url, where(body))
    for name in _OPERATORS:
        if body.get(name):
            raise InvalidRequest(
                f"{name!r} is the operator's to set (--engine-arg {name}=…): leave it out.", param=name
            )


def _keep_picture(part: dict[str, Any]) -> None:
    part.setdefault("type", "image_url")
    url = url_of(part)
    if url[:5].lower() == "data:":
        url = f"data:{url[5:]}"
    for name in part.keys() - _FIELDS[part["type"]]:
        del part[name]
    part.update(with_url(part, url))


def _check_other(part: dict[str, Any], param: str) -> None:
    part.pop("uuid", None)
    kind = part.get("type")
    refused = next((name for name in _REFUSED if kind == name or part.get(name) is not None), None)
    if refused in _FILES:
        raise InvalidRequest(
            f"This server reads text and pictures, and the text of a part of the type {refused!r} that comes with its data (`file_data`).",
            param=param,
        )
    if refused is not None:
        raise InvalidRequest(
            f"This server reads text and pictures; it takes no part of the type {kind!r} with {refused!r}."
            if kind != refused and kind is not None
            else f"This server reads text and pictures; it takes no part of the type {refused!r}.",
            param=param,
        )


def _holds_data(url: str) -> bool:
    return url.startswith("data:")


def _check_url(url: str, param: str) -> None:
    if _holds_data(url):
        return
    if url.lower().startswith(("http://", "https://")):
        raise InvalidRequest(
            "This server fetches no pictures from that host: send the picture itself, as `data:image/png;base64,…`,"
            " or have its operator allow the host (--allow-image-host).",
            param=param,
        )
    raise InvalidRequest(
        "A picture must come with its data, as `data:image/png;base64,…`: this server keeps no uploaded files.",
        param=param,
    )


def where(body: Mapping[str, Any]) -> str:
    """Return the field in which a call's messages are."""
    return next((name for name in _MESSAGES if name in body), "messages")
