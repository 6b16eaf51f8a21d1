"""The client against a real HTTP server: what it sends, and that advice never breaks, blocks or floods."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from overture_client.client import CallError, OvertureClient, api_root, refusal

ROOT = Path(__file__).parents[3]


async def test_an_advisory_is_sent_with_what_was_said_and_no_more(server: Any) -> None:
    async with OvertureClient(server.url, "key-1") as client:
        receipt = await client.advise("s", model="pirate", expected_arrival_s=1.5, ordered=True, ttl_s=9.0)
        await client.advise("t", priority=0)
    assert receipt is not None
    assert (receipt.id, receipt.state, receipt.is_merged, receipt.expires_in_s) == (
        "adv-0",
        "accepted",
        False,
        30.0,
    )
    assert server.advisories == [
        {"session_id": "s", "model": "pirate", "expected_arrival_s": 1.5, "ordered": True, "ttl_s": 9.0},
        {"session_id": "t", "priority": 0},
    ]
    assert server.authorizations == {"Bearer key-1"}


async def test_an_advisory_can_be_looked_at_and_taken_back_once(server: Any) -> None:
    async with OvertureClient(server.url) as client:
        receipt = await client.advise("s")
        assert receipt is not None
        await client.chat([{"role": "user", "content": "hi"}], model="base", session_id="s")
        status = await client.advisory(receipt.id)
        assert (status.state, status.tier, status.num_tokens, status.lead_ms) == ("hit", "device", 96, 12.5)
        assert await client.cancel(receipt.id) is True
        assert await client.cancel(receipt.id) is False
        with pytest.raises(CallError, match=r"No such advisory\.") as caught:
            await client.advisory(receipt.id)
    assert (caught.value.code, caught.value.http_status) == ("not_found", 404)


async def test_a_chat_call_names_its_session_and_agent(server: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with OvertureClient(server.url + "/v1/") as client:
        answer = await client.chat(messages, model="base", session_id="s", agent="Prüfer", max_tokens=5)
    assert answer["choices"][0]["message"]["content"].endswith("answer 1")
    body = {"model": "base", "messages": messages, "max_tokens": 5}
    assert server.requests == [("s", "Pr%C3%BCfer", body)]


async def test_a_chat_call_that_fails_says_why(server: Any) -> None:
    async with OvertureClient(server.url) as client:
        with pytest.raises(CallError, match="does not exist") as caught:
            await client.chat([], model="nobody")
        with pytest.raises(ValueError, match="does not stream"):
            await client.chat([], model="base", stream=True)
    assert (caught.value.code, caught.value.http_status) == ("model_not_found", 404)


async def test_refused_advice_is_none_and_logged_once(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.refuses = True
    with caplog.at_level(logging.WARNING, "overture_client.client"):
        async with OvertureClient(server.url) as client:
            assert [await client.advise("s") for _ in range(3)] == [None, None, None]
            assert client.counts.num_failed == 3
    assert [record.message for record in caplog.records] == [
        "an advisory failed (rate_limited): Too many advisories.. The work goes on without it."
    ]


async def test_a_server_that_is_down_costs_nothing_but_the_advice(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        async with OvertureClient(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
            assert await client.advise("s") is None
            assert await client.cancel("adv-s") is False
            with pytest.raises(CallError) as caught:
                await client.chat([], model="base")
    assert caught.value.code == "unreachable"


async def test_a_server_that_does_not_answer_is_given_up(server: Any) -> None:
    server.is_holding.set()
    async with OvertureClient(server.url, timeout_s=0.05) as client:
        begun = time.monotonic()
        assert await client.advise("s") is None
        assert 0.04 < time.monotonic() - begun < 10
        server.is_holding.clear()
        assert await client.advise("s") is not None


async def test_a_flood_is_bounded_dropped_and_counted(server: Any) -> None:
    server.is_holding.set()
    async with OvertureClient(server.url, max_in_flight=4) as client:
        futures = [client.advise_soon(f"s{index}") for index in range(100)]
        assert sum(future.done() for future in futures) == 96, "what is dropped is over at once"
        while server.num_held < 4:
            await asyncio.sleep(0.005)
        server.is_holding.clear()
        receipts = await asyncio.gather(*map(asyncio.wrap_future, futures))
        counts = client.counts
    assert sum(receipt is not None for receipt in receipts) == 4
    assert (counts.num_accepted, counts.num_dropped, counts.num_failed) == (4, 96, 0)
    assert server.max_held == 4


async def test_advice_that_is_no_json_fails_quietly(server: Any) -> None:
    strange: Any = object()
    async with OvertureClient(server.url) as client:
        assert await client.advise("s", priority=strange) is None
        assert await client.advise("s") is not None


def test_threads_without_a_loop_can_advise(server: Any) -> None:
    with OvertureClient(server.url) as client:
        threads = [threading.Thread(target=client.advise_soon, args=(f"s{index}",)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Closing waits for what is under way.
    assert {body["session_id"] for body in server.advisories} == {f"s{index}" for index in range(8)}


def test_one_client_outlives_several_event_loops(server: Any) -> None:
    with OvertureClient(server.url) as client:
        assert asyncio.run(client.advise("s")) is not None
        assert asyncio.run(client.advise("t")) is not None


async def test_a_closed_client_gives_no_advice_and_refuses_calls(server: Any) -> None:
    client = OvertureClient(server.url)
    assert await client.advise("s") is not None
    await asyncio.to_thread(client.close)
    client.close()
    assert await client.advise("t") is None
    with pytest.raises(CallError, match="closed"):
        await client.chat([], model="base")


async def test_closing_gives_up_what_hangs_without_cancelling_the_caller(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overture_client.client.CLOSE_S", 0.05)
    server.is_holding.set()
    client = OvertureClient(server.url, timeout_s=30.0)
    waiting = asyncio.create_task(client.advise("s"))
    while not server.num_held:
        await asyncio.sleep(0.005)
    await asyncio.to_thread(client.close)
    assert await waiting is None


async def test_a_caller_that_is_cancelled_is_cancelled_and_makes_room(server: Any) -> None:
    server.is_holding.set()
    async with OvertureClient(server.url, timeout_s=30.0, max_in_flight=1) as client:
        waiting = asyncio.create_task(client.advise("s"))
        while not server.num_held:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        server.is_holding.clear()
        while await client.advise("t") is None:
            await asyncio.sleep(0.005)


def test_a_script_that_ends_without_closing_still_sends_its_advice(server: Any) -> None:
    code = f"from overture_client.client import OvertureClient as C; C({server.url!r}).advise_soon('last')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert server.advisories == [{"session_id": "last"}]


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_is_taken_with_or_without_v1(url: str) -> None:
    assert api_root(url) == "http://h:1/v1"


@pytest.mark.parametrize("url", ["", "localhost:8000", "ws://h:1", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address"):
        OvertureClient(url)


@pytest.mark.parametrize("raw", [b"", b"<html>", b"[]", b'{"error": "x"}', b'{"error": {}}'])
def test_an_error_of_another_shape_is_told_by_its_status(raw: bytes) -> None:
    assert refusal(502, raw).code == "502"
