"""Responses in the background: read once, stored once, and followed from where a client left them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import orjson

from engine_bridge.protocol.node import SseReply
from gateway.doors.api.openai_routes import _naming_previous
from gateway.doors.api.recording import Recording
from gateway.turns.background_responses import BackgroundResponse, BackgroundResponses


def event(number: int, kind: str) -> bytes:
    value = {"type": kind, "sequence_number": number, "response": {"id": "resp_1"}}
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


CREATED = event(0, "response.created")


class Call:
    """A response whose events and whose storing the test lets come."""

    def __init__(self) -> None:
        self.all = BackgroundResponses()
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.may_store = asyncio.Event()
        self.is_storing = asyncio.Event()
        self.stored: list[str] = []

    async def begin(self) -> BackgroundResponse:
        self.events.put_nowait(CREATED)
        return await self.all.start(
            "ann",
            SseReply(self._events()),
            is_streamed=True,
            scope=self._scope,
            record=self._record,
            ended=lambda: None,
        )

    async def _events(self) -> AsyncIterator[bytes]:
        while (event := await self.events.get()) is not None:
            yield event

    async def _scope(self, reading: Awaitable[None]) -> None:
        await reading

    async def _record(self, job: BackgroundResponse) -> None:
        self.is_storing.set()
        await self.may_store.wait()
        self.stored.append(job.status)


async def test_who_cancels_a_second_time_waits_for_what_is_stored() -> None:
    call = Call()
    job = await call.begin()
    first = asyncio.create_task(call.all.cancel(job))
    await call.is_storing.wait()
    second = asyncio.create_task(call.all.cancel(job))
    await asyncio.sleep(0)
    call.may_store.set()
    await asyncio.gather(first, second)
    assert call.stored == ["cancelled"] and job.is_over


async def test_one_that_is_being_stored_is_not_cancelled_any_more() -> None:
    """Neither by its client nor by the server's end: all is stored when they return."""
    call = Call()
    job = await call.begin()
    call.events.put_nowait(event(1, "response.completed"))
    call.events.put_nowait(None)
    await call.is_storing.wait()
    ends = [asyncio.create_task(each) for each in (call.all.cancel(job), call.all.drain(0.0))]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(end.done() for end in ends) and not job.is_over
    call.may_store.set()
    await asyncio.gather(*ends)
    assert call.stored == ["in_progress"] and job.reply()["id"] == "resp_1"


async def test_a_follower_goes_on_by_number_whatever_comments_stand_between() -> None:
    job = BackgroundResponse(is_streamed=True)
    waiting, later = b": keep-alive\n\n", b": left out\n\n"
    events = [waiting, CREATED, waiting, event(1, "x"), event(2, "y"), later, event(3, "z")]
    for each in events:
        job.add(each)
    job.end()
    assert [each async for each in job.follow()] == events
    assert [each async for each in job.follow(1)] == events[4:]
    assert [each async for each in job.follow(2)] == events[5:]
    assert [each async for each in job.follow(3)] == []


async def test_what_was_deleted_can_no_longer_be_followed() -> None:
    call = Call()
    job = await call.begin()
    call.may_store.set()
    await call.all.cancel(job)
    assert call.all.find("ann", "resp_1") is job
    call.all.forget("bob", "resp_1")
    assert call.all.find("ann", "resp_1") is job
    call.all.forget("ann", "resp_1")
    assert call.all.find("ann", "resp_1") is None


async def test_a_follow_up_that_is_closed_before_it_was_read_ends_in_the_engine() -> None:
    """A generator around its events would not pass that on."""

    class Events:
        is_closed = False

        def __aiter__(self) -> Events:
            return self

        async def __anext__(self) -> bytes:
            return CREATED

        async def aclose(self) -> None:
            self.is_closed = True

    events = Events()
    reply = _naming_previous(SseReply(events), Recording("ann", "s", "Hi", None, previous="resp_0"))
    await reply.events.aclose()  # type: ignore[attr-defined]
    assert events.is_closed
