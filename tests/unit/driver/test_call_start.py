"""What is wrong with a request shows before its stream begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from engine_bridge.driver.serving.call_start import CallStart, ClosingEvents, Entrance, StartedStream


class Source:
    """A stream of events that notes that it was closed, and does something before each event."""

    def __init__(self, *steps: object) -> None:
        self._steps = iter(steps)
        self.is_closed = False

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> str:
        for step in self._steps:
            if isinstance(step, str):
                return step
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif callable(step):
                step()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.is_closed = True


async def all_of(stream: StartedStream) -> list[str]:
    return [event async for event in stream.events()]


async def test_events_before_and_after_the_start_come_in_their_order() -> None:
    start = CallStart()
    source = Source("created", start.queued, "a", "b")
    stream = StartedStream(source)
    await stream.begin(start)
    assert await all_of(stream) == ["created", "a", "b"]
    assert source.is_closed


async def test_a_stream_begins_as_soon_as_its_request_is_queued_though_no_event_has_come() -> None:
    start, goes_on = CallStart(), asyncio.Event()
    stream = StartedStream(Source(start.queued, goes_on, "late"))
    await stream.begin(start)
    goes_on.set()
    assert await all_of(stream) == ["late"]


async def test_a_failure_before_the_start_is_raised_and_closes_the_stream() -> None:
    start = CallStart()
    source = Source("created", lambda: start.failed(ValueError("bad grammar")), asyncio.Event())
    with pytest.raises(ValueError, match="bad grammar"):
        await StartedStream(source).begin(start)
    assert source.is_closed


async def test_what_the_source_raises_before_the_start_is_raised_and_closes_the_stream() -> None:
    source = Source(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        await StartedStream(source).begin(CallStart())
    assert source.is_closed


async def test_what_the_source_raises_after_the_start_comes_behind_its_events() -> None:
    start = CallStart()
    stream = StartedStream(Source(start.queued, "a", RuntimeError("gone")))
    await stream.begin(start)
    with pytest.raises(RuntimeError, match="gone"):
        await all_of(stream)


async def test_a_failure_after_the_start_changes_nothing() -> None:
    start = CallStart()
    start.queued()
    start.failed(ValueError("too late"))
    assert start.failure is None


async def test_a_stream_that_ends_without_a_request_begins_with_what_it_had() -> None:
    stream = StartedStream(Source("error"))
    await stream.begin(CallStart())
    assert await all_of(stream) == ["error"]


async def test_cancelling_the_wait_for_the_start_closes_the_stream() -> None:
    source = Source(asyncio.Event())
    waiting = asyncio.create_task(StartedStream(source).begin(CallStart()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert source.is_closed


async def test_a_reply_that_was_never_read_closes_its_stream() -> None:
    start, source = CallStart(), Source(lambda: start.queued(), "a")
    stream = StartedStream(source)
    await stream.begin(start)

    async def encoded() -> AsyncGenerator[bytes, None]:
        async for event in stream.events():
            yield event.encode()

    await ClosingEvents(encoded(), stream).aclose()
    assert source.is_closed


async def test_a_call_that_waits_for_ever_is_ended_by_the_failure_of_its_request() -> None:
    start, ended = CallStart(), asyncio.Event()

    async def call() -> None:
        try:
            start.failed(ValueError("bad grammar"))
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ValueError, match="bad grammar"):
        await start.result_of(call())
    assert ended.is_set()


async def test_a_call_that_was_queued_returns_its_result() -> None:
    start = CallStart()

    async def call() -> str:
        start.queued()
        return "answer"

    assert await start.result_of(call()) == "answer"


async def test_cancelling_a_call_cancels_what_it_does() -> None:
    start, ended = CallStart(), asyncio.Event()

    async def call() -> AsyncIterator[str] | None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return None

    waiting = asyncio.create_task(start.result_of(call()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_a_few_calls_of_a_tenant_are_made_ready_at_a_time_and_others_come_when_they_have_left() -> None:
    entrance = Entrance(num_at_once=2)
    first, second = [await entrance.enter("a") for _ in range(2)]
    third = asyncio.create_task(entrance.enter("a"))
    await asyncio.sleep(0)
    assert not third.done()
    first()
    first()  # a second time gives no second place
    leave = await third
    fourth = asyncio.create_task(entrance.enter("a"))
    await asyncio.sleep(0)
    assert not fourth.done()
    leave()
    second()
    (await fourth)()


async def test_a_tenants_calls_do_not_keep_anothers_waiting() -> None:
    entrance = Entrance(num_at_once=1)
    await entrance.enter("a")
    waiting = asyncio.create_task(entrance.enter("a"))
    (await entrance.enter("b"))()
    assert not waiting.done()
    waiting.cancel()


async def test_a_call_that_stops_waiting_takes_no_place_and_nobody_is_remembered() -> None:
    entrance = Entrance(num_at_once=1)
    leave = await entrance.enter("a")
    waiting = asyncio.create_task(entrance.enter("a"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    leave()
    (await entrance.enter("a"))()
    assert not entrance._tenants


async def test_a_call_leaves_the_entrance_as_soon_as_its_request_is_queued_or_has_failed() -> None:
    entrance = Entrance(num_at_once=1)
    CallStart(await entrance.enter("a")).queued()
    CallStart(await entrance.enter("a")).failed(ValueError("bad"))
    assert not entrance._tenants
