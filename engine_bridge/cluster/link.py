"""A gateway's connection to a node: calls and streamed answers, all side by side over one stream socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from engine_bridge.cluster import wire
from engine_bridge.cluster.connection import WireConnection
from engine_bridge.protocol.node import ADVISORY_ENDS, AdvisoryReport

log = logging.getLogger(__name__)


class AnswerBuffer:
    """Pieces of one answer that have not been read yet. The request's own bounds limit them."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.is_over = False

    def put(self, piece: Any) -> None:
        """Add a piece, or the `wire.Ended` behind the last one."""
        self._pieces.put_nowait(piece)

    async def next(self) -> Any:
        """Return the next piece. Raises the error that cut the answer off, StopAsyncIteration after the last piece."""
        if self.is_over:
            raise StopAsyncIteration
        piece = await self._pieces.get()
        if isinstance(piece, wire.Ended):
            self.is_over = True
            if piece.problem is not None:
                raise wire.error_of(piece.problem)
            raise StopAsyncIteration
        return piece


class NodeLink(WireConnection):
    """The gateway's end. Make it by `loop.create_connection(lambda: NodeLink(…), …)`; then `await greeted`.

    Args:
        on_report: called with each report, the first time before `greeted` is done.
        on_lost: called once when the connection has ended, by either end; calls and answers under way have failed by then.

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
        super().__init__(wire.ToGateway, "node")
        self._token, self._on_report, self._on_lost = token, on_report, on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._streams: dict[int, AnswerBuffer] = {}
        self._calls: dict[int, asyncio.Future[wire.Reply]] = {}
        self._advisories: dict[str, Callable[[AdvisoryReport], None]] = {}
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.is_up = False
        self.node_id = self.incarnation = ""
        self.reported_s = self._loop.time()

    # -- the transport's side ------------------------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        """Let all that is under way fail."""
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
            # The KV that was moved for this advisory is lost with the node.
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
            case wire.Pieces(items=items):
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
        """Call a method of METHODS. Raises the node's error; EngineUnavailable for a lost node; InvalidRequest for arguments that cannot be sent."""
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
        """Call a method of NOTICES, which has no reply. Nothing happens while the node is away."""
        if self.is_up:
            self._send(wire.Notice(method, wire.raw(arguments)))

    def stop(self, number: int) -> None:
        """Tell the node that nothing waits for this number any more."""
        if self.is_up:
            self._send(wire.Stop(), number)

    async def send(self, message: wire.Message, number: int) -> None:
        """Send a message when the node reads. Raises EngineUnavailable, InvalidRequest."""
        await self._can_write.wait()
        self._send(message, number)

    def open(self) -> tuple[int, AnswerBuffer]:
        """Return a new number and the buffer for its pieces. Call `close` at the end."""
        number, stream = next(self._numbers), AnswerBuffer()
        self._streams[number] = stream
        return number, stream

    def close(self, number: int) -> None:
        """Forget an answer, and stop the node's work on it if it is not over."""
        stream = self._streams.pop(number, None)
        if stream is not None and not stream.is_over:
            self.stop(number)

    def follow_advisory(self, advisory_id: str, on_change: Callable[[AdvisoryReport], None]) -> None:
        """Call `on_change` with each report of this advisory request until `forget_advisory`."""
        self._advisories[advisory_id] = on_change

    def forget_advisory(self, advisory_id: str) -> None:
        """End what `follow_advisory` began. An unknown id is no error."""
        self._advisories.pop(advisory_id, None)


def _tell(on_change: Callable[[AdvisoryReport], None], report: AdvisoryReport) -> None:
    """Call a follower. An error of it harms neither the connection nor other followers."""
    try:
        on_change(report)
    except Exception:
        log.exception("a follower of an advisory failed")
