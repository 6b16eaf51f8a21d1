"""A gateway's connection to a node: calls and streamed answers, all side by side over one stream socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable
from typing import Any, cast

from engine_bridge.cluster import wire
from engine_bridge.protocol.node import ADVISORY_ENDS, AdvisoryReport

log = logging.getLogger(__name__)


class AnswerBuffer:
    """Pieces of one answer that nobody has taken yet. There are no more of them than the answer has: the request's bounds are theirs, too."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.is_over = False

    def put(self, piece: Any) -> None:
        self._pieces.put_nowait(piece)

    async def next(self) -> Any:
        """Raises what cut the answer off, StopAsyncIteration after the last piece."""
        if self.is_over:
            raise StopAsyncIteration
        piece = await self._pieces.get()
        if isinstance(piece, wire.Ended):
            self.is_over = True
            if piece.problem is not None:
                raise wire.error_of(piece.problem)
            raise StopAsyncIteration
        return piece


class NodeLink(asyncio.Protocol):
    """Made by `loop.create_connection(lambda: Link(…), …)`; then `await greeted`.

    Args:
        token: as the node has it.
        on_report: called with each report, the first time before `greeted` is done.
        on_lost: called once when the connection has ended, whoever ended it; what was under way has failed by then.

    Attributes:
        greeted: done when both ends have proved themselves; fails with ConnectionError if they do not.
        reported_s: when the last report came, on the loop's clock.
    """

    def __init__(
        self,
        token: bytes = b"",
        on_report: Callable[[wire.NodeReport], None] = lambda report: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._token, self._on_report, self._on_lost = token, on_report, on_lost
        self._loop = asyncio.get_running_loop()
        self._frames = wire.Frames(wire.ToGateway)
        self._nonce = secrets.token_bytes(wire.CHALLENGE_BYTES)
        self._numbers = itertools.count(1)
        self._streams: dict[int, AnswerBuffer] = {}
        self._calls: dict[int, asyncio.Future[wire.Reply]] = {}
        self._advisories: dict[str, Callable[[AdvisoryReport], None]] = {}
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.is_up = False
        self.node_id = self.incarnation = ""
        self.reported_s = self._loop.time()

    # -- the transport's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for number, message in self._frames.feed(data):
                self._take(number, message)
        except wire.WireError as error:
            log.error("the connection to a node is cut: %s", error)
            self._transport.abort()
        except Exception:
            log.exception("what a node said could not be taken; its connection is cut")
            self._transport.abort()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_up = False
        self._can_write.set()
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError("the node ended the connection"))
        for stream in self._streams.values():
            stream.put(wire.Ended(wire.GONE))
        for reply in self._calls.values():
            if not reply.done():
                reply.set_result(wire.Reply(problem=wire.GONE))
        changes, self._advisories = self._advisories, {}
        for advisory_id, on_change in changes.items():
            # What was moved for it has gone with the node.
            _tell(on_change, AdvisoryReport(advisory_id=advisory_id, session_id="", state="expired"))
        self._on_lost()

    def abort(self) -> None:
        """Cut the connection: the node has not been heard of for too long."""
        self._transport.abort()

    def _send(self, message: wire.Message, number: int = 0) -> None:
        frame = wire.encode(message, number)
        if not self.is_up:
            raise wire.error_of(wire.GONE)
        self._transport.write(frame)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take(self, number: int, message: Any) -> None:
        match message:
            case wire.Deltas(items=items) | wire.Events(items=items):
                for each, piece in items:
                    if (stream := self._streams.get(each)) is not None:
                        stream.put(piece)
            case wire.Ended():
                if (stream := self._streams.get(number)) is not None:
                    stream.put(message)
            case wire.Reply():
                if (reply := self._calls.get(number)) is not None and not reply.done():
                    reply.set_result(message)
            case wire.AdvisoryChanged(report=report):
                self._advisory_changed(report)
            case wire.Reported(report=report):
                self._reported(report)
            case wire.Challenge():
                self._greet(message)
            case wire.Welcome():
                self._welcomed(message)

    def _greet(self, message: wire.Challenge) -> None:
        if message.protocol != wire.PROTOCOL:
            raise wire.WireError(
                f"it speaks version {message.protocol} of the protocol, this is {wire.PROTOCOL}"
            )
        proof = wire.proof_of(self._token, "gateway", message.nonce)
        self._transport.write(wire.encode(wire.Hello(proof, self._nonce)))

    def _welcomed(self, message: wire.Welcome) -> None:
        if self.is_up or not wire.is_proof(message.proof, self._token, "node", self._nonce):
            raise wire.WireError("it does not know the token")
        self._frames.trust()
        self.is_up = True
        self.node_id, self.incarnation = message.node_id, message.incarnation
        self._reported(message.report)
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _reported(self, report: wire.NodeReport) -> None:
        self.reported_s = self._loop.time()
        self._on_report(report)

    def _advisory_changed(self, report: AdvisoryReport) -> None:
        on_change = self._advisories.get(report.advisory_id)
        if report.state in ADVISORY_ENDS:
            self.forget_advisory(report.advisory_id)
        if on_change is not None:
            _tell(on_change, report)

    # -- the gateway's side --------------------------------------------------------------------------------------------

    async def call(self, method: str, *arguments: Any, number: int = 0) -> Any:
        """What a method of METHODS gives. Raises what the node raised; EngineUnavailable when it is gone; InvalidRequest for what cannot be sent."""
        number = number or next(self._numbers)
        reply = self._calls[number] = self._loop.create_future()
        is_answered = False
        try:
            await self._can_write.wait()
            self._send(wire.Call(method, wire.raw(arguments)), number)
            answer = await reply
            is_answered = True
            return wire.result_of(method, answer)
        except wire.WireError as error:
            raise wire.error_of(wire.GONE) from error
        finally:
            del self._calls[number]
            if not is_answered:
                self.stop(number)

    def notice(self, method: str, *arguments: Any) -> None:
        """A method of NOTICES. Nothing happens while the node is away."""
        if self.is_up:
            self._send(wire.Notice(method, wire.raw(arguments)))

    def stop(self, number: int) -> None:
        if self.is_up:
            self._send(wire.Stop(), number)

    async def send(self, message: wire.Message, number: int) -> None:
        """Raises EngineUnavailable, InvalidRequest."""
        await self._can_write.wait()
        self._send(message, number)

    def open(self) -> tuple[int, AnswerBuffer]:
        """A number of its own, and where its pieces come; to be closed by `close`."""
        number, stream = next(self._numbers), AnswerBuffer()
        self._streams[number] = stream
        return number, stream

    def close(self, number: int) -> None:
        """Nobody reads this answer any more. What is still computed of it is stopped."""
        stream = self._streams.pop(number, None)
        if stream is not None and not stream.is_over:
            self.stop(number)

    def follow_advisory(self, advisory_id: str, on_change: Callable[[AdvisoryReport], None]) -> None:
        """Calls `on_change` with each report of this advisory request until `forget_advisory`."""
        self._advisories[advisory_id] = on_change

    def forget_advisory(self, advisory_id: str) -> None:
        """Ends what `follow_advisory` began. An unknown id is no error."""
        self._advisories.pop(advisory_id, None)


def _tell(on_change: Callable[[AdvisoryReport], None], report: AdvisoryReport) -> None:
    """A follower that raises is its own affair: the connection, and who follows other advisories, go on."""
    try:
        on_change(report)
    except Exception:
        log.exception("a follower of an advisory failed")
