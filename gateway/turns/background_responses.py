"""Responses in the background: calls of `/v1/responses` that go on when their client has gone, and can be followed and cancelled by their id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from engine_bridge.protocol.api_errors import cut
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.protocol.node import SseReply, is_for_gateway
from gateway.errors import GatewayError
from gateway.turns.replies import AnswerReader

log = logging.getLogger(__name__)

# How long the events of a stream can still be read after its end, as for chat turns: docs/protocol.md, rule 4.
KEEP_FINISHED_S = 120.0


class BackgroundResponse:
    """A response in the background.

    Attributes:
        is_streamed: whether its events are kept, for sockets that follow it.
        is_ending: whether it was cancelled, or is read to its end and being stored.
    """

    def __init__(self, *, is_streamed: bool) -> None:
        self.is_streamed = is_streamed
        self.reader = AnswerReader("responses")
        self.events: list[bytes] = []
        self.status = "in_progress"
        self.error: GatewayError | BridgeError | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_ending = False
        self.is_over = False
        self._changed = asyncio.Event()

    def add(self, event: bytes) -> None:
        """Take one event."""
        self.reader.feed(event)
        if self.is_streamed and not is_for_gateway(event):
            self.events.append(event)
        self._notify()

    def end(self) -> None:
        """Note that it is over."""
        self.is_over = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def begun(self) -> None:
        """Wait until the response has an id, or is over without one."""
        while self.reader.response_id is None and not self.is_over:
            await self._changed.wait()

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Yield events whose `sequence_number` is above `after`, until it is over, and the comments between them, which have no number."""
        place, number = 0, -1
        while True:
            changed = self._changed
            while place < len(self.events):
                event = self.events[place]
                is_comment = event.startswith(b":")
                place, number = place + 1, number + (not is_comment)
                if number > after or (number == after and is_comment):
                    yield event
            if self.is_over:
                return
            await changed.wait()

    def reply(self) -> dict[str, Any]:
        """Return the response object as it is now. Only once it has begun."""
        reply = self.reader.reply or {}
        if self.reader.is_complete:
            return reply | {"background": True}
        error = {"code": "server_error", "message": cut(str(self.error))} if self.error is not None else None
        return reply | {"background": True, "status": self.status, "error": error}


class BackgroundResponses:
    """The responses of all owners that are under way, and streams that ended less than KEEP_FINISHED_S ago."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, str], BackgroundResponse] = {}
        self._running: dict[BackgroundResponse, str] = {}  # with the owner of each

    async def start(
        self,
        owner: str,
        reply: SseReply,
        *,
        is_streamed: bool,
        scope: Callable[[Awaitable[None]], Awaitable[None]],
        record: Callable[[BackgroundResponse], Awaitable[None]],
        ended: Callable[[], None],
    ) -> BackgroundResponse:
        """Read a stream to its end, whether or not its client stays. Returns once it has an id, or has failed before.

        Args:
            owner: the owner of the response.
            reply: the stream.
            is_streamed: whether its events are kept.
            scope: runs the reading within the bounds of the owner's calls, and raises GatewayError where they ended it.
            record: stores the response.
            ended: called once it is over, in whatever way.
        """
        job = BackgroundResponse(is_streamed=is_streamed)
        job.task = asyncio.create_task(self._run(owner, job, reply, scope, record), name="response")
        self._running[job] = owner
        job.task.add_done_callback(lambda _: self._running.pop(job, None))
        # Also when it was cancelled before it had begun: `begun` must return.
        job.task.add_done_callback(lambda _: job.end())
        job.task.add_done_callback(lambda _: ended())
        await job.begun()
        return job

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        """Return the response of this id; None if it is not under way."""
        return self._by_id.get((owner, response_id))

    def is_busy(self, owner: str) -> bool:
        """Return whether a response of this owner is under way, or is still stored."""
        return owner in self._running.values()

    async def cancel(self, job: BackgroundResponse) -> None:
        """End a response, and return when its answer so far is stored."""
        if job.task is not None and not job.is_over:
            self._stop(job)
            await asyncio.wait({job.task})

    def forget(self, owner: str, response_id: str) -> None:
        """Keep a deleted response's events no longer."""
        self._by_id.pop((owner, response_id), None)

    async def drain(self, timeout_s: float) -> None:
        """Wait for all responses under way; after `timeout_s` cancel them. All are stored when this returns."""
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=timeout_s)
        for job in list(self._running):
            self._stop(job)
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=10.0)

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {job.task for job in self._running if job.task is not None}

    def _stop(self, job: BackgroundResponse) -> None:
        """Read no more of a response. Once only: a second time would disturb the storing."""
        if job.task is not None and not job.is_ending:
            job.is_ending, job.status = True, "cancelled"
            job.task.cancel()

    async def _run(
        self,
        owner: str,
        job: BackgroundResponse,
        reply: SseReply,
        scope: Callable[[Awaitable[None]], Awaitable[None]],
        record: Callable[[BackgroundResponse], Awaitable[None]],
    ) -> None:
        try:
            await scope(self._read(owner, job, reply))
        except asyncio.CancelledError:
            job.status = "cancelled"
        except (GatewayError, BridgeError) as error:
            job.error, job.status = error, "failed"
        except Exception:
            log.exception("a response in the background failed")
            job.error, job.status = GatewayError("internal", "The server failed on this request."), "failed"
        job.is_ending = True
        try:
            if job.reader.response_id is not None:
                await asyncio.shield(record(job))
        finally:
            await reply.events.aclose()  # type: ignore[attr-defined]
            job.end()
            self._forget(owner, job)

    async def _read(self, owner: str, job: BackgroundResponse, reply: SseReply) -> None:
        async with aclosing(reply.events) as events:  # type: ignore[type-var]
            async for event in events:
                is_new = job.reader.response_id is None
                job.add(event)
                if is_new and job.reader.response_id is not None:
                    self._by_id[owner, job.reader.response_id] = job

    def _forget(self, owner: str, job: BackgroundResponse) -> None:
        """Forget a response, which is read from the store from now on; its events are kept a while."""
        key = (owner, job.reader.response_id or "")
        if not job.is_streamed:
            self._by_id.pop(key, None)
            return
        asyncio.get_running_loop().call_later(KEEP_FINISHED_S, self._by_id.pop, key, None)
