"""The server-sent events of one streamed API call, on their way from vLLM's generator to the gateway."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from engine_bridge.calls.context_overflow import dropped_event
from engine_bridge.driver.apis.bodies import (
    ANTHROPIC_ERROR_EVENT,
    ERROR_EVENT,
    as_error_response,
    error_reply,
    in_our_form,
    without_insides,
)
from engine_bridge.driver.serving.call import Call
from engine_bridge.protocol.node import Dropped, figures_event, token_ids_event

# Chosen: proxies cut a silent connection after 30 to 60 s; a comment is no event to any client.
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"


class ApiEvents:
    """One call's events as bytes: a comment on the dropped parts of its prompt, vLLM's events, and comments to the gateway (see `SseReply`).

    vLLM's serving classes ask the engine late, some only when their stream is read, and turn errors into events of a stream that looks fine. So
    `begin` waits until a request of the call was queued: until then, any failure can still become an HTTP status. An error that ends the stream
    later becomes its last event.

    Args:
        call: closed with the events, so that its requests leave the engine.
        source: vLLM's events.
        texts: makes one or more server-sent events of one of vLLM's.
        is_anthropic: whether errors have the form of Anthropic's API.

    Attributes:
        dropped: the parts left out of the prompt; set before the first event is read.
    """

    def __init__(
        self,
        call: Call,
        source: AsyncIterator[Any],
        texts: Callable[[Any], Iterable[str]],
        *,
        is_anthropic: bool,
    ) -> None:
        self._call, self._source, self._texts, self._is_anthropic = call, source, texts, is_anthropic
        # Some of vLLM's generators first ask the engine when they are read, which may be in another task than the call's: CALL has to be set there.
        self._context = copy_context()
        self._ready: deque[bytes] = deque()
        self._reading: asyncio.Task[Any] | None = None
        self._is_over = False
        self.dropped = Dropped()

    async def begin(self) -> None:
        """Return once a request of the call is queued, or all events are there. Raises an earlier failure, and closes the stream then."""
        is_known = asyncio.ensure_future(self._call.is_known.wait())
        try:
            for answer in list(self._call.answers)[:1]:
                await answer.begin()
            while not self._call.is_known.is_set() and not self._is_over:
                reading = self._read()
                await asyncio.wait({reading, is_known}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and self._call.failure is None:
                    await self._take()
            if self._call.failure is not None:
                raise self._call.failure
        except BaseException:
            await self.aclose()
            raise
        finally:
            is_known.cancel()
        if self.dropped:
            self._ready.appendleft(dropped_event(self.dropped).encode())

    def __aiter__(self) -> ApiEvents:
        return self

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._is_over:
                raise StopAsyncIteration
            done, _ = await asyncio.wait({self._read()}, timeout=KEEP_ALIVE_S)
            if not done:
                return KEEP_ALIVE
            try:
                await self._take()
            except Exception as error:
                await self.aclose()
                self._ready.append(self._error_event(error))
        return self._ready.popleft()

    def _read(self) -> asyncio.Task[Any]:
        if self._reading is None:
            self._reading = asyncio.create_task(_next_of(self._source), context=self._context)
        return self._reading

    async def _take(self) -> None:
        """Take over the event that has come, or the end. Raises errors of the source."""
        reading, self._reading = self._reading, None
        assert reading is not None
        try:
            event = reading.result()
        except StopAsyncIteration:
            await self.aclose()
            if (figures := self._call.figures) is not None:
                self._ready.append(figures_event(figures))
            if self._call.seen:
                self._ready.append(token_ids_event(self._call.seen))
            return
        self._ready.extend(self._in_form(text).encode() for text in self._texts(event))

    def _in_form(self, event: str) -> str:
        """Return an event; an error that vLLM's generators wrote gets the form of all our errors."""
        if self._is_anthropic and event.startswith(ANTHROPIC_ERROR_EVENT):
            return without_insides(event)
        return in_our_form(event) if event.startswith(ERROR_EVENT) else event

    def _error_event(self, error: Exception) -> bytes:
        body = error_reply(as_error_response(error), is_anthropic=self._is_anthropic).body.decode()
        return f"event: error\ndata: {body}\n\n".encode()

    async def aclose(self) -> None:
        """End the stream. Its requests leave the engine."""
        self._is_over = True
        reading, self._reading = self._reading, None
        try:
            if reading is not None:
                await ended(reading)
            await self._source.aclose()  # type: ignore[attr-defined]
        finally:
            self._call.close()


async def _next_of(source: AsyncIterator[Any]) -> Any:
    return await anext(source)


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task if it runs, and return once it has ended. Its errors are ignored.

    The task is not awaited itself: an error that is raised from it twice no longer says where it came from, by which it is judged (`failures`).
    """
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait({task})
    if task.done() and not task.cancelled():
        task.exception()  # otherwise asyncio logs the error as never retrieved
