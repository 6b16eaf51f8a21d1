"""A node on a stream socket: any `Node`, for gateways in other processes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from engine_bridge.adapters.store import AdapterStore
from engine_bridge.cluster import wire
from engine_bridge.cluster.connection import WireConnection
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.protocol.node import AdapterInfo, Advisory, Delta, Node, SseReply

log = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 5.0


class NodeServer:
    """A node and its connections. For each: `loop.create_server(server.connection, …)`, or `connect_accepted_socket`.

    Args:
        token: the token that gateways must prove to know; empty over a pair of sockets.
        on_close: called when a gateway asks for the end of the process, or when the last gateway has left.
        store: for adapters that gateways send; without one they are found at the gateway's paths only.
    """

    def __init__(
        self,
        node: Node,
        node_id: str,
        token: bytes = b"",
        on_close: Callable[[], None] = lambda: None,
        store: AdapterStore | None = None,
    ) -> None:
        self.node, self.node_id, self.token = node, node_id, token
        self.store = store or AdapterStore(None)
        self.incarnation = secrets.token_hex(8)
        self.on_close = on_close
        self.peer_address = ""
        self.connections: set[GatewayConnection] = set()

    def connection(self) -> GatewayConnection:
        """The protocol object for one more connection of a gateway."""
        return GatewayConnection(self)

    def report(self, adapters: list[AdapterInfo] | None) -> wire.NodeReport:
        """Describe the node as it is now. adapters: None: as in the report before."""
        node = self.node
        return wire.NodeReport(
            progress=node.progress,
            model_names=node.model_names,
            max_model_len=node.max_model_len,
            figures=node.figures(),
            adapters=adapters,
            peer_address=self.peer_address,
            max_images=node.max_images,
            can_use_tools=node.can_use_tools,
        )


class GatewayConnection(WireConnection):
    """The node's end: one gateway. Its answers are stopped when it disconnects."""

    def __init__(self, server: NodeServer) -> None:
        super().__init__(wire.ToNode, "gateway")
        self._server, self._node = server, server.node
        self._is_known = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reports: asyncio.Task[None] | None = None
        self._adapters: list[AdapterInfo] | None = None
        self._pieces: list[tuple[int, Delta | bytes]] = []

    # -- the transport's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Challenge the gateway, which has GREETING_TIMEOUT_S to answer."""
        super().connection_made(transport)
        self._greeting = asyncio.get_running_loop().call_later(GREETING_TIMEOUT_S, self._transport.abort)
        self._send(wire.Challenge(self._nonce))

    def connection_lost(self, error: Exception | None) -> None:
        """Stop the gateway's answers; with the last gateway the node may end."""
        self._greeting.cancel()
        self._server.connections.discard(self)
        for task in (*self._tasks.values(), *([self._reports] if self._reports else [])):
            task.cancel()
        self._can_write.set()
        # Over a pair of sockets the other end is the gateway, even where it has ended before it could greet.
        if (self._is_known or not self._server.token) and not self._server.connections:
            self._server.on_close()

    def _send(self, message: wire.Message, number: int = 0) -> None:
        if not self._transport.is_closing():
            self._transport.write(wire.encode(message, number))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take(self, number: int, message: Any) -> None:
        if not self._is_known:
            self._greet(message)
            return
        match message:
            case wire.Generate():
                self._begin(number, self._stream(number, self._node.generate(message.request)))
            case wire.Call(method="serve"):
                self._begin(number, self._serve(number, wire.arguments_of(message)))
            case wire.Call():
                self._begin(number, self._call(number, message.method, wire.arguments_of(message)))
            case wire.Stop():
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case wire.Notice():
                self._note(message.method, wire.arguments_of(message))
            case _:
                raise wire.WireError("a greeting after the greeting")

    def _greet(self, message: Any) -> None:
        token = self._server.token
        if not isinstance(message, wire.Hello) or not wire.is_proof(
            message.proof, token, "gateway", self._nonce
        ):
            raise wire.WireError("it does not know the token")
        self._greeting.cancel()
        self._is_known = True
        self._frames.trust()
        self._server.connections.add(self)
        welcome = wire.Welcome(
            proof=wire.proof_of(token, "node", message.nonce),
            node_id=self._server.node_id,
            incarnation=self._server.incarnation,
            report=self._server.report(self._changed_adapters()),
        )
        self._send(welcome)
        self._reports = asyncio.get_running_loop().create_task(self._report_on())

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        if number == 0 or number in self._tasks:
            work.close()
            raise wire.WireError("a number that is in use")
        task = self._tasks[number] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _note(self, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "close":
            self._server.on_close()
            return
        try:
            if method == "retract":
                self._node.retract(arguments[0], is_expired=arguments[1])
            else:
                getattr(self._node, method)(*arguments)
        except Exception:
            # A gateway expects no answer to a notice, and the answers under way on this connection do not depend on it.
            log.exception("a notice of a gateway's failed (%s)", method)

    async def _report_on(self) -> None:
        while True:
            await asyncio.sleep(wire.REPORT_EVERY_S)
            await self._can_write.wait()
            try:
                self._tell()
            except Exception:
                # An engine that is being closed or built anew may have no figures for a moment; without reports the node would count as dead.
                log.exception("a report could not be made")

    def _tell(self) -> None:
        self._send(wire.Reported(self._server.report(self._changed_adapters())))

    def _changed_adapters(self) -> list[AdapterInfo] | None:
        adapters = self._node.adapters()
        if adapters == self._adapters:
            return None
        self._adapters = adapters
        return adapters

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _call(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            reply = wire.Reply(wire.raw(await self._result(method, arguments)))
            if method in wire.ADAPTER_METHODS:
                # A client that has the reply may ask for the adapter at once.
                self._tell()
        except Exception as error:
            self._refuse(number, error)
        else:
            self._send(reply, number)

    async def _result(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "advise":
            advisory: Advisory = arguments[0]
            return await self._node.advise(advisory, lambda report: self._send(wire.AdvisoryChanged(report)))
        if method in wire.STORE_METHODS:
            return await asyncio.to_thread(getattr(self._server.store, method), *arguments)
        return await getattr(self._node, method)(*arguments)

    async def _serve(self, number: int, arguments: tuple[Any, ...]) -> None:
        try:
            reply = await self._node.serve(*arguments)
            value = wire.raw(None if isinstance(reply, SseReply) else reply)
        except Exception as error:
            self._refuse(number, error)
            return
        self._send(wire.Reply(value), number)
        if isinstance(reply, SseReply):
            await self._stream(number, reply.events)

    async def _stream(self, number: int, pieces: AsyncIterator[Delta] | AsyncIterator[bytes]) -> None:
        problem = None
        try:
            async with aclosing(pieces):  # type: ignore[type-var]
                async for piece in pieces:
                    if not self._pieces:
                        # Pieces of one turn of the loop go in one frame.
                        asyncio.get_running_loop().call_soon(self._flush)
                    self._pieces.append((number, piece))
                    # While the gateway reads slowly, the node merges further pieces.
                    await self._can_write.wait()
        except Exception as error:
            problem = _problem_of(error)
        self._flush()
        self._send(wire.Ended(problem), number)

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._send(wire.Pieces(pieces))

    def _refuse(self, number: int, error: Exception) -> None:
        self._send(wire.Reply(problem=_problem_of(error)), number)


def _problem_of(error: Exception) -> wire.Problem:
    if not isinstance(error, BridgeError):
        log.error("a call of a gateway's failed", exc_info=error)
    return wire.problem_of(error)
