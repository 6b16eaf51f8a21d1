"""The start of an API call: until its request is in the engine's queue, any failure can still become an HTTP status.

vLLM's serving classes ask the engine late, some only when their stream is read, and turn errors into events of a stream that looks fine. So the
engine's client notes here whether the request was queued or why not, and a stream is read ahead until that is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class CallStart:
    """Whether a call's first request has come into the engine's queue, or why it never will (`failure`).

    Attributes:
        num_logprobs: how many log probabilities its answers have brought so far, all at once at their end.
        is_over: set when the start is waited for no more.
    """

    def __init__(self, when_known: Callable[[], None] = lambda: None) -> None:
        self.num_logprobs = 0
        self.is_known = asyncio.Event()
        self.is_over = asyncio.Event()
        self.failure: Exception | None = None
        self._when_known = when_known

    @property
    def is_queued(self) -> bool:
        """Whether a request was queued: a later failure need not be the client's fault."""
        return self.is_known.is_set() and self.failure is None

    def queued(self) -> None:
        """Note that vLLM has the request, so that its caller may continue."""
        self._know()

    def failed(self, error: Exception) -> None:
        """Note why the request cannot be queued. Does nothing once a request was queued."""
        if not self.is_known.is_set():
            self.failure = error
            self._know()

    def _know(self) -> None:
        self.is_known.set()
        self._when_known()

    async def result_of(self, calling: Awaitable[T]) -> T:
        """Return the result of `calling`. Raises `failure` as soon as there is a failure; `calling` is cancelled then."""
        task = asyncio.ensure_future(calling)
        is_known = asyncio.ensure_future(self.is_known.wait())
        try:
            await asyncio.wait({task, is_known}, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            return await task
        finally:
            is_known.cancel()
            await _ended(task)


class Entrance:
    """Lets a few calls of each tenant be made ready for the engine at a time; the others wait.

    One thread tokenises, so more calls would not be ready sooner; but validating hundreds of calls in a row blocks the event loop for all other
    calls.
    """

    def __init__(self, num_at_once: int = 4) -> None:
        self._num_at_once = num_at_once
        self._tenants: dict[str, _Tenant] = {}

    async def enter(self, tenant: str) -> Callable[[], None]:
        """Wait for a place. Returns a function that gives the place back, which may be called twice."""
        own = self._tenants.setdefault(tenant, _Tenant(self._num_at_once))
        own.num_users += 1
        try:
            await own.places.acquire()
        except BaseException:
            self._leave(tenant, own)
            raise
        is_left = False

        def leave() -> None:
            """Give the place back, unless that was done before."""
            nonlocal is_left
            if not is_left:
                is_left = True
                own.places.release()
                self._leave(tenant, own)

        return leave

    def _leave(self, tenant: str, own: _Tenant) -> None:
        own.num_users -= 1
        if not own.num_users:
            del self._tenants[tenant]


class _Tenant:
    def __init__(self, num_at_once: int) -> None:
        self.places = asyncio.Semaphore(num_at_once)
        self.num_users = 0


class StartedStream:
    """Events that are read ahead until their call's request is queued, then as they are asked for.

    Args:
        source: closed with this, which aborts its request.
    """

    def __init__(self, source: AsyncIterator[str]) -> None:
        self._source = source
        self._read: list[str] = []
        self._next: asyncio.Task[str] | None = None
        self._is_over = False

    async def begin(self, start: CallStart) -> None:
        """Read until the call's first request is queued or the stream has ended. Raises an earlier failure; the stream is closed then."""
        is_known = asyncio.ensure_future(start.is_known.wait())
        try:
            while not start.is_known.is_set() and not self._is_over:
                reading = self._reading()
                await asyncio.wait({reading, is_known}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and start.failure is None:
                    self._take()
            if start.failure is not None:
                raise start.failure
        except BaseException:
            await self.close()
            raise
        finally:
            is_known.cancel()

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield all events, first the events that were read ahead. Raises errors of the source."""
        try:
            while True:
                for event in self._read:
                    yield event
                self._read.clear()
                if self._is_over:
                    return
                await asyncio.wait({self._reading()})
                self._take()
        finally:
            await self.close()

    def _reading(self) -> asyncio.Task[str]:
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._source))
        return self._next

    def _take(self) -> None:
        """Take over the event that has come, or note the stream's end."""
        reading, self._next = self._next, None
        assert reading is not None
        try:
            self._read.append(reading.result())
        except StopAsyncIteration:
            self._is_over = True

    async def close(self) -> None:
        """Stop reading, and close the source."""
        self._is_over = True
        reading, self._next = self._next, None
        if reading is not None:
            await _ended(reading)
        await self._source.aclose()  # type: ignore[attr-defined]


class ClosingEvents:
    """A reply's events, whose `aclose` also closes the stream that they are made of.

    A generator that was never begun does nothing when it is closed, and its request would stay in the engine.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], stream: StartedStream) -> None:
        self._events = events
        self._stream = stream

    def __aiter__(self) -> ClosingEvents:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._events)

    async def aclose(self) -> None:
        """End the reply. Its request leaves the engine."""
        try:
            await self._events.aclose()
        finally:
            await self._stream.close()


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task if it runs, and return once it has ended. Its errors are ignored."""
    task.cancel()
    with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
        await task
