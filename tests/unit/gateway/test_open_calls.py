"""Calls that end when their owner loses the key."""

from __future__ import annotations

import asyncio

import pytest

from gateway.access.open_calls import OpenCalls
from gateway.errors import GatewayError


async def call(calls: OpenCalls, owner: str, is_under_way: asyncio.Event, end: asyncio.Event) -> str:
    async with calls.of(owner):
        is_under_way.set()
        await end.wait()
        return owner


async def test_all_calls_of_one_owner_end_and_no_others() -> None:
    calls, end = OpenCalls(), asyncio.Event()
    started = [asyncio.Event() for _ in range(3)]
    tasks = [
        asyncio.create_task(call(calls, owner, event, end))
        for owner, event in zip(("a", "a", "b"), started, strict=True)
    ]
    for event in started:
        await event.wait()
    calls.cut_off("a")
    calls.cut_off("a")
    calls.cut_off("nobody")
    for task in tasks[:2]:
        with pytest.raises(GatewayError, match="withdrawn") as caught:
            await task
        assert caught.value.code == "unauthorized"
    assert not tasks[2].done()
    end.set()
    assert await tasks[2] == "b" and calls._open == {}


async def test_a_call_that_times_out_by_itself_says_so() -> None:
    calls = OpenCalls()
    with pytest.raises(TimeoutError):
        async with calls.of("a"):
            raise TimeoutError
    assert calls._open == {}


async def test_a_call_whose_client_leaves_is_cancelled_as_before() -> None:
    calls, is_under_way = OpenCalls(), asyncio.Event()
    task = asyncio.create_task(call(calls, "a", is_under_way, asyncio.Event()))
    await is_under_way.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls._open == {}


async def test_a_call_that_swallows_its_cancellation_ends_all_the_same() -> None:
    """As vLLM's serving classes do, which answer "Client disconnected"."""
    calls, is_under_way = OpenCalls(), asyncio.Event()

    async def answers_anyway() -> str:
        async with calls.of("a"):
            is_under_way.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "an answer"
        return "never"

    task = asyncio.create_task(answers_anyway())
    await is_under_way.wait()
    calls.cut_off("a")
    with pytest.raises(GatewayError, match="withdrawn"):
        await task
