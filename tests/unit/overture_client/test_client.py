"""The client against a real HTTP server: what it sends, and that advice never breaks, blocks or floods."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overture_client.client import CallError, OvertureClient

ROOT = Path(__file__).parents[3]


async def test_an_advisory_is_sent_with_what_was_said_and_no_more(server: Any) -> None:
    async with OvertureClient(server.url, "key-1") as client:
        receipt = await client.advise("s", model="pirate", expected_arrival_s=1.5, ordered=True, ttl_s=9.0)
        await client.advise("t", priority=0)
    assert receipt is not None
    told = (receipt.id, receipt.state, receipt.is_merged, receipt.expires_in_s)
    assert told == ("adv-0", "accepted", False, 30.0)
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
