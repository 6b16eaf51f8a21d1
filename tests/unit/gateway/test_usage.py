"""Tokens by person and day: what is counted, kept over a restart, refused and shown."""

import asyncio
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.protocol.node import CallFigures, JsonReply, KvSources
from gateway.access.auth import KeyRing
from gateway.access.key_file import owner_of
from gateway.errors import GatewayError, StartupError
from gateway.people.ledger import Day, Ledger, Spent
from gateway.people.usage import DAY_S, Usage, num_chars_of, spent_on

from .front import Gateway, Gateways
from .parts import KEY, OTHER, Clock
from .test_access import Counted, old_line

NOON = dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC).timestamp()


async def usage_in(folder: Path, keys: KeyRing | None = None, **options: Any) -> Usage:
    ledger = await asyncio.to_thread(Ledger.open, folder / "people.sqlite3")
    usage = Usage(ledger, keys or KeyRing([KEY]), Counted(), **options)
    await usage.load()
    return usage


async def test_tokens_of_a_day_are_limited_over_a_restart_and_the_next_day_is_new(tmp_path: Path) -> None:
    clock = Clock(NOON)
    usage = await usage_in(tmp_path, max_tokens_per_day=100, clock=clock)
    usage.add("ada", Spent(1, 40, 50))
    usage.check("ada")
    usage.add("ada", Spent(1, 20, 30))
    await usage.close()
    usage = await usage_in(tmp_path, max_tokens_per_day=100, clock=clock)
    usage.check("bob")
    with pytest.raises(
        GatewayError, match=r"used 140 tokens today, and 100 a day .* in 12 h 0 min"
    ) as caught:
        usage.check("ada")
    assert (caught.value.code, caught.value.retry_after_s) == ("quota_exceeded", DAY_S / 2)
    clock.now_s += DAY_S / 2
    usage.check("ada")
    usage.add("ada", Spent(1, 1, 2))
    assert await usage.days(usage.since(2), "ada") == [
        Day("ada", "2026-11-30", Spent(1, 1, 2)),
        Day("ada", "2026-11-29", Spent(2, 60, 80)),
    ]
    assert await usage.days(usage.since(1), None) == [Day("ada", "2026-11-30", Spent(1, 1, 2))]
    await usage.forget("ada")
    assert usage.today("ada") == Spent() and await usage.days(usage.since(9), None) == []
    await usage.close()


async def test_a_clock_that_jumps_forward_and_back_gives_nobody_a_second_day(tmp_path: Path) -> None:
    clock = Clock(NOON)
    usage = await usage_in(tmp_path, max_tokens_per_day=100, clock=clock)
    usage.add("ada", Spent(1, 40, 80))
    clock.now_s += 400 * DAY_S
    usage.check("ada")
    usage.add("ada", Spent(1, 1, 1))
    clock.now_s -= 400 * DAY_S
    with pytest.raises(GatewayError, match="used 120 tokens today"):
        usage.check("ada")
    await usage.close()
    usage = await usage_in(tmp_path, max_tokens_per_day=100, clock=clock)
    assert usage.today("ada") == Spent(1, 40, 80)
    await usage.forget("ada")
    assert usage.today("ada") == Spent()
    await usage.close()


async def test_whose_a_key_of_an_older_line_is_is_noted_when_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{old_line('ada', KEY)}\n{old_line('bob', OTHER)}\n")
    keys = await asyncio.to_thread(lambda: KeyRing(key_file=tmp_path / "keys"))
    usage = await usage_in(tmp_path, keys)
    keys.authenticate(KEY)
    await usage.close()
    ledger = await asyncio.to_thread(Ledger.open, tmp_path / "people.sqlite3")
    assert list((await asyncio.to_thread(ledger.key_owners)).values()) == [(owner_of(KEY), "ada")]
    ledger.close()


def test_a_damaged_record_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "people.sqlite3"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StartupError, match=r"usage and sign-ins .* is damaged .* Move it"):
        Ledger.open(path)


FIGURES = CallFigures(KvSources(device=1, host=2, disk=3, recomputed=4), 7)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"usage": {"prompt_tokens": 10, "completion_tokens": 20}}, (1, 10, 20)),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 20}, "figures": FIGURES}, (1, 10, 20)),
        ({"figures": FIGURES}, (1, 10, 7)),
        ({"figures": FIGURES, "num_choices": 3}, (1, 10, 21)),
        ({"num_events": 5, "num_prompt_chars": 400}, (1, 100, 5)),
        ({}, (1, 0, 0)),
    ],
    ids=["counted", "without its prompt", "by the node", "several answers", "its client left", "refused"],
)
def test_what_a_call_has_used(seen: dict[str, Any], expected: tuple[int, int, int]) -> None:
    given = {"usage": None, "figures": None, "num_choices": 0, "num_events": 0, "num_prompt_chars": 0}
    assert spent_on(**given | seen) == expected


def test_the_texts_of_a_prompt_are_measured_and_nothing_else() -> None:
    parts = [
        {"type": "text", "text": "12345"},
        {"type": "image_url", "image_url": {"url": "data:" + "x" * 999}},
    ]
    body = {
        "model": "m" * 50,
        "system": "12",
        "messages": [{"role": "user", "content": parts}],
        "user": "u" * 9,
    }
    assert num_chars_of(body) == 7
    assert num_chars_of({"prompt": [[1, 2, 3], "12"]}) == 14
    assert num_chars_of(None) == 0


def replying(gateway: Gateway, body: Any) -> None:
    """Let the node answer each call of an API with this."""

    async def serve(*call: Any) -> JsonReply:
        return JsonReply(200, json.dumps(body).encode())

    gateway.node.serve = serve  # type: ignore[method-assign]


async def test_turns_and_calls_are_counted_refused_in_each_protocols_form_and_shown(
    gateways: Gateways,
) -> None:
    """The fake node counts three tokens of a prompt, and one for each piece of an answer."""
    gateway = await gateways(
        api_keys=(KEY,), operator_keys=(OTHER,), max_tokens_per_day=20, metrics_by_user=True
    )
    async with gateway.socket(key=KEY, hello={}) as socket:
        await socket.ask("a", "Hello!")
        (await gateway.node.asked(0)).finish("Hi", " there")
        assert (await socket.rest())[1]["type"] == "done"
        usage = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
        body = {"id": "x", "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]}
        replying(gateway, body | {"usage": usage})
        message = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}
        assert (await gateway.call("POST", "/v1/chat/completions", message, key=KEY)).status == 200
        mine = await gateway.call("GET", "/v1/usage", key=KEY)
        (me,) = mine.body["people"]
        assert (me["owner"], me["tokens_today"], me["num_sessions"]) == (owner_of(KEY), 21, 1)
        assert [(day["num_requests"], day["prompt_tokens"], day["answer_tokens"]) for day in me["days"]] == [
            (2, 13, 8)
        ]
        assert mine.body["max_tokens_per_day"] == 20 and me["num_stored_bytes"] > 0
        refused = await socket.ask("b", "More?")
        assert (refused["type"], refused["code"], refused["id"]) == ("error", "quota_exceeded", "b")
        assert refused["retry_after_s"] > 0 and "21 tokens today, and 20 a day" in refused["message"]
    for path, kind in (
        ("/v1/chat/completions", "insufficient_quota"),
        ("/v1/completions", "insufficient_quota"),
        ("/v1/responses", "insufficient_quota"),
        ("/v1/messages", "rate_limit_error"),
    ):
        reply = await gateway.call("POST", path, message, key=KEY)
        assert (reply.status, reply.body["error"]["type"]) == (429, kind), path
        assert 0 < int(reply.headers["Retry-After"]) <= DAY_S
        assert "20 a day" in reply.body["error"]["message"]
    everybody = (await gateway.call("GET", "/v1/usage?days=2", key=OTHER)).body["people"]
    assert [(each["owner"], each["tokens_today"]) for each in everybody] == [
        (owner_of(OTHER), 0),
        (owner_of(KEY), 21),
    ]
    assert gateway.count("overture_tokens_total", user=f"key-{owner_of(KEY)[2:10]}", kind="answer") == 8
    assert (await gateway.call("GET", "/v1/usage?days=0", key=KEY)).status == 400
    assert (await gateway.call("GET", "/v1/usage")).status == 401


@pytest.mark.parametrize("route", ["/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_counting_uses_nothing_and_is_never_refused(gateways: Gateways, route: str) -> None:
    gateway = await gateways(max_tokens_per_day=5)
    gateway.usage.add("local", Spent(1, 3, 3))
    replying(gateway, {"count": 3, "input_tokens": 3})
    assert (await gateway.call("POST", route, {"prompt": "Hello!", "messages": []})).status == 200
    assert gateway.usage.today("local").num_tokens == 6


async def test_who_is_cancelled_while_saving_counts_nothing_twice(tmp_path: Path) -> None:
    usage = await usage_in(tmp_path)
    usage.add("ada", Spent(1, 2, 3))
    saving = asyncio.create_task(usage.save())
    await asyncio.sleep(0)
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)
    assert saving.cancelled()
    await usage.save()
    assert await usage.days(usage.since(1), None) == [Day("ada", usage.day(), Spent(1, 2, 3))]
    await usage.close()
