"""Conversations as files: what is written is read again, and what cannot be one is refused with its place."""

from copy import deepcopy
from typing import Any

import msgspec
import pytest

from gateway.errors import GatewayError
from gateway.sessions.archive import MAX_CALLS, MAX_PICTURES, MAX_TURNS, Archive, as_markdown, read_archive

from .front import Gateway

KV = {"device": 1, "host": 0, "disk": 0, "recomputed": 4}
TIMINGS = {"queue_ms": 0.5, "ttft_ms": 9.0, "tpot_ms": None, "e2e_ms": 12.0, "kv": KV}


def turn(name: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": name, "parent": parent, "content": f"ask {name}", "answer": f"re: {name}"} | more


def call(name: str, **more: Any) -> dict[str, Any]:
    texts = {"server": "tides", "tool": "height", "name": "tides__height", "arguments": "{}"}
    return {"id": name, "round": 0, "at": 0, "state": "done"} | texts | more


PICTURE = {"media_type": "image/png", "data": "AAAA"}


WHOLE: dict[str, Any] = {
    "format": "overture-conversation",
    "version": 1,
    "title": "Harbours",
    "adapter": "pirate",
    "created_at": 1_700_000_000.0,
    "settings": {"system_prompt": "Be brief.", "temperature": 0.5},
    "turns": [
        turn("a", is_chosen=False, usage={"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}, timings=TIMINGS),
        turn("b", "a", reasoning="hm", status="failed", finish_reason=None),
        turn("c", adapter="pirate", finish_reason="stop", created_at=1_700_000_001.0),
        turn("d", "c", is_chosen=False),
        turn("e", "c", status="stopped"),
    ],
}  # fmt: skip


def without_names(archive: dict[str, Any]) -> dict[str, Any]:
    """With numbers for ids, and without when it was used last."""
    numbers = {each["id"]: number for number, each in enumerate(archive["turns"])}
    turns = [
        each | {"id": numbers[each["id"]], "parent": numbers.get(each["parent"])} for each in archive["turns"]
    ]
    return archive | {"turns": turns, "updated_at": 0}


async def test_what_was_imported_is_exported_as_it_was(gateway: Gateway) -> None:
    ids, exports, given = [], [], WHOLE
    for _ in range(2):
        reply = await gateway.call("POST", "/api/sessions/import", given)
        assert reply.status == 201, reply.body
        session = reply.body
        assert [each["content"] for each in session["turns"]] == ["ask c", "ask e"]
        assert session["settings"]["system_prompt"] == "Be brief."
        ids.append(session["id"])
        reply = await gateway.call("GET", f"/api/sessions/{session['id']}/export")
        assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json; charset=utf-8")
        assert 'filename="Harbours.json"' in reply.headers["Content-Disposition"]
        given = reply.body
        exports.append(without_names(given))
    assert exports[0] == exports[1] and ids[0] != ids[1]
    wanted = without_names(msgspec.to_builtins(read_archive(WHOLE)))
    times = {each.pop("created_at") for each in (*exports[0]["turns"], *wanted["turns"])}
    assert 1_700_000_001.0 in times
    assert exports[0] | {"adapter": "pirate"} == wanted, "all but an adapter that this server does not have"
    found = (await gateway.call("GET", "/api/sessions?q=ask a")).body["sessions"]
    assert {each["id"] for each in found} == set(ids)


async def test_a_conversation_goes_on_where_an_import_ends(gateway: Gateway) -> None:
    texts = {"system": "Be brief.", "user": "Where is Lisbon?", "assistant": "In Portugal."}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    reply = await gateway.call("POST", "/api/sessions/import", {"messages": messages})
    assert (reply.status, reply.body["title"]) == (201, "Where is Lisbon?")
    await gateway.answered("next", "Answer.", owner="local", session_id=reply.body["id"])
    turns = (await gateway.call("GET", f"/api/sessions/{reply.body['id']}")).body["turns"]
    assert [each["content"] for each in turns] == ["Where is Lisbon?", "Hello!"]
    asked = gateway.node.answers[-1].request.messages
    assert [each.content for each in asked] == ["Be brief.", "Where is Lisbon?", "In Portugal.", "Hello!"]


def changed(**changes: Any) -> dict[str, Any]:
    return deepcopy(WHOLE) | changes


def with_turn(number: int, **changes: Any) -> dict[str, Any]:
    archive = deepcopy(WHOLE)
    archive["turns"][number] |= changes
    return archive


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([], "not a JSON object"),
        ({}, "format"),
        (changed(format="other"), "format"),
        (changed(version=2), "reads version 1"),
        (changed(turns="many"), "turns"),
        (changed(turns=[turn("a"), turn("a")]), "twice"),
        (changed(turns=[turn("a", "b"), turn("b", "a")]), "parent"),
        (changed(turns=[turn("a", "a")]), "parent"),
        (changed(turns=[turn("a"), turn("b")]), "another version"),
        (changed(turns=[turn("a", is_chosen=False)]), "no version is chosen"),
        (changed(turns=[turn("a b")]), "id"),
        (changed(title="x" * 201), "title"),
        (changed(settings={"temperature": 9}), "temperature"),
        (changed(settings={"unknown": 9}), "unknown"),
        (with_turn(0, status="running"), "status"),
        (with_turn(0, timings={"kv": "device"}), "timings"),
        (with_turn(0, usage={"prompt_tokens": "5"}), "usage"),
        (with_turn(0, content=7), "content"),
        (changed(turns=[turn("a", pictures=[PICTURE] * 64)] + [turn(f"{number}", f"{number - 1}" if number else "a", pictures=[PICTURE] * 64)
            for number in range(MAX_PICTURES // 64)]), "10048 pictures, and 10000 are the most"),
        (with_turn(1, calls=[call("a"), call("a")]), "Two calls of turns[1] have the same id"),
        (with_turn(1, calls=[call("a", arguments="no JSON")]), "arguments of a call of turns[1]"),
        (with_turn(1, calls=[call("a", arguments="[" * 100_000)]), "arguments of a call of turns[1]"),
        (with_turn(1, calls=[call(f"{number}") for number in range(MAX_CALLS + 1)]), "turns[1] has 1001 calls"),
        ({"messages": [{"role": "assistant", "content": "first"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "x"}] * (MAX_TURNS + 1)}, "most"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_conversation_is_refused_with_the_place(body: object, why: str) -> None:
    with pytest.raises(GatewayError, match="cannot be imported") as refused:
        read_archive(body)
    assert refused.value.code == "bad_request" and why in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        changed(version="x" * 100_000),
        changed(settings={"x" * 100_000: 1}),
        with_turn(0, status="x" * 100_000),
    ],
)
def test_a_refusal_repeats_little_of_a_file(body: object) -> None:
    with pytest.raises(GatewayError, match="cannot be imported") as refused:
        read_archive(body)
    assert len(refused.value.message) < 500


async def test_a_message_of_an_archive_has_no_more_pictures_than_one_that_is_sent(gateway: Gateway) -> None:
    """The model's own bound may be lower, because another one may have read them, or higher."""
    for num_pictures, max_images, said in (
        (65, 1, "turns[1] has 65 pictures, and 64 are"),
        (66, 65, "65 are"),
    ):
        gateway.node.max_images = max_images
        body = with_turn(1, pictures=[PICTURE] * num_pictures)
        reply = await gateway.call("POST", "/api/sessions/import", body)
        assert reply.status == 400 and said in reply.body["error"]["message"]


def test_calls_of_an_archive_are_over() -> None:
    """Otherwise a page would ask its person about them."""
    calls = [
        call("a", state="asking"),
        call("b", state="running"),
        call("c"),
        call("d", state="missing", arguments=""),
    ]
    found = read_archive(with_turn(1, calls=calls)).turns[1].calls
    assert [each.state for each in found] == ["stopped", "stopped", "done", "missing"]


def test_markdown_holds_what_is_shown() -> None:
    text = as_markdown(read_archive(WHOLE), "some-model")
    assert text.startswith(
        "# Harbours\n\n*2023-11-14 · pirate*\n\n## System prompt\n\nBe brief.\n\n## You\n\nask c\n\n## pirate\n\nre: c"
    )
    assert "ask a" not in text and "ask d" not in text
    assert text.endswith("## some-model\n\nre: e\n\n*(stopped)*\n")
    hostile = Archive(
        turns=read_archive({"messages": [{"role": "user", "content": "hi"}]}).turns, title="a\n# b"
    )
    thought = msgspec.structs.replace(hostile.turns[0], reasoning="</Details><script>")
    text = as_markdown(msgspec.structs.replace(hostile, turns=[thought]), "m")
    assert text.startswith("# a # b\n") and "&lt;/Details>" in text and "*(no answer)*" in text
