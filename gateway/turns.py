"""Turns of the chat socket, from an accepted message to an answer on disk, independent of who is listening.

A turn belongs to no socket: sockets follow it, leave it and come back. Its text is held once, as the pieces the engine gave, and every
follower keeps only how many of them it has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import UnsetType, to_builtins

from engine_bridge.errors import BridgeError, EngineUnavailable, InvalidRequest
from engine_bridge.node import ChatMessage, Delta, GenerateRequest, Node, RequestId, Sampling
from gateway.chat_protocol import Message
from gateway.errors import KINDS, GatewayError
from gateway.metrics import Metrics
from gateway.sessions import BeginResult, SessionStore, Turn, TurnStatus, clean_text

log = logging.getLogger(__name__)

KEEP_FINISHED_S = 120.0  # docs/protocol.md, rule 4
KEEP_UNFOLLOWED_S = 30.0  # docs/protocol.md, rule 4


class Follower(Protocol):
    """Someone who wants to know that a turn has more to send."""

    def wake(self, turn: LiveTurn) -> None: ...


class LiveTurn:
    """A turn under way, or over for less than KEEP_FINISHED_S.

    Attributes:
        pieces: the answer so far; `seq` of the protocol is how many of them one has.
        done: the fields of its `done` frame once it is over and stored.
        error: what ended it instead.
    """

    __slots__ = (
        "content",
        "done",
        "error",
        "followers",
        "id",
        "owner",
        "pieces",
        "request_id",
        "session_id",
        "title",
        "unfollowed",
    )

    def __init__(self, owner: str, session_id: str, turn: Turn, title: str | None) -> None:
        self.owner = owner
        self.session_id = session_id
        self.id: str = turn.id
        self.content = turn.content
        self.title = title
        self.request_id = RequestId(f"turn-{uuid.uuid4().hex}")
        self.pieces: list[str] = []
        self.done: dict[str, Any] | None = None
        self.error: GatewayError | None = None
        self.followers: set[Follower] = set()
        self.unfollowed: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        return self.done is not None or self.error is not None

    def wake_followers(self) -> None:
        for follower in self.followers:
            follower.wake(self)


class Turns:
    """Starts turns, keeps the live ones and ends them.

    Args:
        now: wall clock in seconds, for what is stored.
    """

    def __init__(
        self, node: Node, store: SessionStore, metrics: Metrics, now: Callable[[], float] = time.time
    ) -> None:
        self._node = node
        self._store = store
        self._metrics = metrics
        self._now = now
        self._live: dict[tuple[str, str], LiveTurn] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- for sockets -------------------------------------------------------------------------------------------------

    async def ask(self, owner: str, message: Message) -> LiveTurn:
        """Store a message and start its turn, or find the one that it repeats. Raises GatewayError; then nothing was stored.

        Goes on to its end when the caller is cancelled: a stored turn that nobody runs would keep its session busy.
        """
        asking = asyncio.create_task(self._ask(owner, message))
        self._tasks.add(asking)
        asking.add_done_callback(self._tasks.discard)
        return await asyncio.shield(asking)

    def find(self, owner: str, turn_id: str) -> LiveTurn | None:
        return self._live.get((owner, turn_id))

    async def stop(self, owner: str, turn_id: str) -> bool:
        """End a turn that runs; what it has so far is kept. False if it does not run."""
        live = self._live.get((owner, turn_id))
        return live is not None and not live.is_over and await self._node.cancel(live.request_id)

    async def stop_session(self, owner: str, session_id: str) -> None:
        """End whatever runs in a session (it is being deleted)."""
        for live in list(self._live.values()):
            if live.owner == owner and live.session_id == session_id and not live.is_over:
                await self._node.cancel(live.request_id)

    def follow(self, live: LiveTurn, follower: Follower) -> None:
        live.followers.add(follower)
        if live.unfollowed is not None:
            live.unfollowed.cancel()
            live.unfollowed = None

    def unfollow(self, live: LiveTurn, follower: Follower) -> None:
        """A socket left. A turn that nobody follows for KEEP_UNFOLLOWED_S is stopped."""
        live.followers.discard(follower)
        self._watch_unfollowed(live)

    def _watch_unfollowed(self, live: LiveTurn) -> None:
        if not live.followers and not live.is_over and live.unfollowed is None:
            loop = asyncio.get_running_loop()
            live.unfollowed = loop.call_later(KEEP_UNFOLLOWED_S, self._stop_unfollowed, live)

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the running turns; after `timeout_s` stop them. All are stored when this returns."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for live in list(self._live.values()):
            if not live.is_over:
                await self._node.cancel(live.request_id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _ask(self, owner: str, message: Message) -> LiveTurn:
        live = self._live.get((owner, message.id))
        # A failed turn is asked again; any other is followed where it stands, so that sockets that resume it find its pieces.
        if live is not None and live.error is None and message.session_id in (None, live.session_id):
            if live.content != clean_text(message.content):
                raise GatewayError("conflict", "This id is already used for another message.", param="id")
            return live
        self._check_askable(message.adapter)
        begun, session_id = await self._begin(owner, message)
        for replaced in begun.replaced:
            self._live.pop((owner, replaced), None)
        live = LiveTurn(owner, session_id, begun.turn, begun.title)
        self._live[owner, message.id] = live
        if begun.is_new:
            task = asyncio.create_task(self._run(live, begun, message.sampling), name=f"turn {message.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._watch_unfollowed(live)
        else:
            live.pieces = [begun.turn.answer] if begun.turn.answer else []
            live.done = _done_fields(live, begun.turn)
            self._forget_later(live)
        return live

    async def _begin(self, owner: str, message: Message) -> tuple[BeginResult, str]:
        session_id = message.session_id
        if session_id is None:
            session_id = (await self._store.create_session(owner, now=self._now())).id
        try:
            begun = await self._store.begin_turn(
                owner,
                session_id,
                message.id,
                message.content,
                adapter=message.adapter,
                after=message.after,
                now=self._now(),
            )
        except GatewayError:
            if message.session_id is None:
                await self._store.delete(owner, session_id, self._now())
            raise
        return begun, session_id

    def _check_askable(self, adapter: str | None | UnsetType) -> None:
        progress = self._node.progress
        if progress.state != "ready":
            raise unavailable(progress.state, progress.stage)
        if isinstance(adapter, str) and adapter not in {info.name for info in self._node.adapters()}:
            raise GatewayError(
                "unknown_model", f"There is no adapter named {adapter!r} here.", param="adapter"
            )

    async def _run(self, live: LiveTurn, begun: BeginResult, sampling: Sampling) -> None:
        final: Delta | None = None
        error: GatewayError | None = None
        request = GenerateRequest(
            request_id=live.request_id,
            messages=tuple(_messages(begun)),
            adapter=begun.turn.adapter,
            sampling=sampling,
            session_id=live.session_id,
        )
        with self._metrics.turn_running():
            try:
                async with contextlib.aclosing(self._node.generate(request)) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        final = delta
                        if delta.text:
                            live.pieces.append(delta.text)
                            live.wake_followers()
            except BridgeError as failure:
                error = from_bridge(failure)
            except Exception:
                log.exception("turn %s failed", live.id)
                error = GatewayError("internal", "Something went wrong on the server. Its log says what.")
            await self._finish(live, final, error)

    async def _finish(self, live: LiveTurn, final: Delta | None, error: GatewayError | None) -> None:
        """Store how the turn ended, then tell: never the other way round."""
        status: TurnStatus = (
            "failed" if error else ("stopped" if final and final.finish_reason == "stopped" else "done")
        )
        try:
            stored = await self._store.finish_turn(
                live.owner,
                live.session_id,
                live.id,
                answer="".join(live.pieces),
                status=status,
                finish_reason=final.finish_reason if final and not error else None,
                usage=to_builtins(final.usage) if final and final.usage else None,
                timings=to_builtins(final.timings) if final and final.timings else None,
                now=self._now(),
            )
        except GatewayError as failure:
            stored, error = None, failure
        if error is None and stored is None:
            error = GatewayError("not_found", "The session was deleted while this answer was written.")
        if error is not None or stored is None:
            live.error = error
        else:
            live.done = _done_fields(live, stored)
        self._metrics.turn_ended(live.error.code if live.error else status, final)
        live.wake_followers()
        self._forget_later(live)

    def _forget_later(self, live: LiveTurn) -> None:
        def forget() -> None:
            if self._live.get((live.owner, live.id)) is live:
                del self._live[live.owner, live.id]

        asyncio.get_running_loop().call_later(KEEP_FINISHED_S, forget)

    def _stop_unfollowed(self, live: LiveTurn) -> None:
        live.unfollowed = None
        if not live.followers and not live.is_over:
            task = asyncio.create_task(self.stop(live.owner, live.id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def from_bridge(error: BridgeError) -> GatewayError:
    """What a client may see of an error of the bridge."""
    if isinstance(error, EngineUnavailable | InvalidRequest):
        code = error.code if error.code in KINDS else "bad_request"
        return GatewayError(code, str(error), param=getattr(error, "param", None))
    return GatewayError("bad_request", str(error))


def unavailable(state: str, stage: str) -> GatewayError:
    """The error for work that comes while the node is not ready."""
    if state == "starting":
        return GatewayError("starting", f"The engine is starting ({stage}). Try again in a few seconds.")
    if state in ("draining", "closed"):
        return GatewayError("draining", "The server is going down. Try again in a moment.")
    if state == "rebuilding":
        return GatewayError(
            "engine_failed", "The engine failed and is being rebuilt. Try again in a few seconds."
        )
    return GatewayError(
        "engine_failed", "The engine could not be started. The server's log says why.", retryable=False
    )


def _messages(begun: BeginResult) -> list[ChatMessage]:
    messages = []
    for turn in begun.history:
        messages.append(ChatMessage("user", turn.content))
        if turn.answer:
            messages.append(ChatMessage("assistant", turn.answer))
    messages.append(ChatMessage("user", begun.turn.content))
    return messages


def _done_fields(live: LiveTurn, turn: Turn) -> dict[str, Any]:
    return {
        "session_id": live.session_id,
        "finish_reason": turn.finish_reason or turn.status,
        "usage": turn.usage,
        "timings": turn.timings,
        "title": live.title,
    }
