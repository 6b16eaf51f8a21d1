"""The pictures in the bodies of the three APIs."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge.calls import pictures
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import (
    SeenPicture,
    num_token_ids,
    pack_token_ids,
    seen_pictures,
    unpack_token_ids,
)

URL = "data:image/png;base64,QUJD"
FAR = "https://example.com/a.png"


def chat(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def responses(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def anthropic(url: str) -> dict[str, Any]:
    if url == URL:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    return {"type": "image", "source": {"type": "url", "url": url}}


def bodies(form: Any, url: str) -> list[dict[str, Any]]:
    message = {"role": "user", "content": [{"type": "text", "text": "hm"}, form(url)]}
    if form is responses:
        return [{"input": [message]}, {"input": [{"type": "function_call_output", "output": [form(url)]}]}]
    result = {"role": "user", "content": [{"type": "tool_result", "content": [form(url)]}]}
    return [{"messages": ["x", message]}, *([{"messages": [result]}] if form is anthropic else [])]


@pytest.mark.parametrize("form", (chat, responses, anthropic))
def test_pictures_are_found_counted_and_replaced_in_every_form(form: Any) -> None:
    for body, wanted in zip(bodies(form, FAR), bodies(form, URL), strict=True):
        assert pictures.num_chars(body) == len(FAR)
        with pytest.raises(InvalidRequest, match="allow-image-host"):
            pictures.check_pictures(body, 1)
        pictures.replace_urls(body, {FAR: URL})
        assert body == wanted
        pictures.check_pictures(body, 1)
        with pytest.raises(InvalidRequest, match="reads no pictures"):
            pictures.check_pictures(body, 0)


def test_a_clients_name_stands_for_no_picture() -> None:
    """Two pictures of one name, or another tenant's, would share KV and what was read of them. vLLM takes names from parts of any type."""
    text, untyped = {"type": "text", "text": "a"}, {"image_url": {"url": "DATA:image/png;base64,QUJD"}}
    parts = [each | {"uuid": "x"} for each in (chat(URL), responses(URL), anthropic(URL), text, untyped)]
    pictures.check_pictures({"messages": [{"content": parts}]}, 4)
    known = {"type": "image_url", "image_url": {"url": URL}}
    assert parts == [chat(URL), responses(URL), anthropic(URL), text, known]
    for named in ({"type": "image_url", "uuid": "x"}, {"image_url": None, "uuid": "x"}):
        with pytest.raises(InvalidRequest, match="with its data"):
            pictures.check_pictures({"messages": [{"content": [named]}]}, 1)


@pytest.mark.parametrize(
    "part",
    (
        {"type": "input_audio", "input_audio": {"data": ""}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": ""}},
        {"type": "input_file", "file_data": "", "filename": "a.pdf"},
        {"video_url": {"url": URL}},
        {"type": "image_embeds", "image_embeds": "A", "uuid": "x"},
        {"type": "tool_result", "content": [{"type": "image_pil", "image_pil": "x"}]},
        # vLLM reads these fields whatever the type says.
        {"type": "text", "text": "a", "image_url": URL, "uuid": "x"},
        {"type": "refusal", "image_embeds": "AAAA"},
        {"type": 3, "image_url": FAR},
    ),
)
def test_other_media_are_refused_by_name(part: dict[str, Any]) -> None:
    for name in ("messages", "input"):
        with pytest.raises(InvalidRequest, match="reads text and pictures") as refused:
            pictures.check_pictures({name: [{"content": [part]}]}, 9)
        assert refused.value.param == name


def test_a_picture_is_what_its_type_says() -> None:
    """What was checked must be what is read."""
    decoy = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    with pytest.raises(InvalidRequest, match="fetches no pictures"):
        part = {"type": "image_url", "image_url": {"url": FAR}, "source": decoy}
        pictures.check_pictures({"messages": [{"content": [part]}]}, 1)
    part = {"type": "image", "image_url": FAR, "source": decoy, "image_embeds": "A"}
    pictures.check_pictures({"messages": [{"content": [part]}]}, 1)
    assert part == {"type": "image", "source": decoy}
    odd = {"type": "image", "source": {"type": "base64", "media_type": ["x"] * 99, "data": {"a": 1}}}
    assert pictures.num_chars({"messages": [{"content": [odd]}]}) == 0
    said = {"role": "assistant", "content": [anthropic(URL)]}
    assert pictures.num_chars({"messages": [said]}) == 0, "vLLM reads it as text"
    said = {"role": "assistant", "content": [chat(URL)]}
    assert pictures.num_chars({"messages": [said]}) == len(URL)


@pytest.mark.parametrize(
    "body",
    (
        None,
        [],
        {},
        {"messages": 3},
        {"messages": [{"content": "a"}, 3]},
        {"input": "a"},
        {"messages": [{"content": [{"type": "text", "text": "a", "image_url": None}]}]},
    ),
)
def test_bodies_without_parts_pass(body: Any) -> None:
    pictures.check_pictures(body, 0)
    assert pictures.num_chars(body) == 0


@pytest.mark.parametrize("ids", ([], [1], list(range(50))))
def test_pictures_travel_behind_the_ids_of_their_prompt(ids: list[int]) -> None:
    """Of one with pictures the beginning is the ids' own bytes, which is what turns of a session have in common."""
    for seen in ([], [SeenPicture(3, 16, "ab")], [SeenPicture(3, 16, "ab"), SeenPicture(40, 4, "c" * 64)]):
        packed = pack_token_ids(ids, seen)
        assert unpack_token_ids(packed) == tuple(ids) and num_token_ids(packed) == len(ids)
        assert seen_pictures(packed) == seen
        assert packed.startswith(pack_token_ids(ids)) and len(packed) % 4 == 0
