"""KV straight from node to node: a node asks others for blocks, and lends its own.

All of it runs on the thread of the KV tiers' files, so neither the gateway's loop nor the engine waits for a peer. A peer that is dead, late, foreign
or damaged is a miss: counted, told once in the log, and its blocks are computed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from engine_bridge.cluster import peer_wire as wire
from engine_bridge.cluster.connection import StreamEnd
from engine_bridge.cluster.peer_wire import BorrowerSide, MissReason, PeerFault
from engine_bridge.cluster.trust import Trust
from engine_bridge.cluster.wire import (
    CHALLENGE_BYTES,
    Challenge,
    Hello,
    Message,
    WireError,
    is_proof,
    proof_of,
)
from engine_bridge.policy.costs.decay import FadingShare
from kvtiers.io.block_read import BlockRead
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.lending import Chunk, Loan
from kvtiers.stats import PeerStats
from kvtiers.store import KvStore

log = logging.getLogger(__name__)

# For the greeting, and for the offer of blocks. Chosen: several round trips round the earth, and a wait for others' questions.
GREETING_S = 2.0
# Without a byte in or out for this long the other end counts as hanging. Chosen.
STALL_S = 2.0
# How long a peer is not asked that is dead, late, foreign or without the token. Chosen: nodes come back in tens of seconds.
REST_S = 5.0
# Questions that one node has under way at one peer, and answers that a node gives at once, and connections that may wait for that. Chosen: a few
# fill a network, and more would only share it.
MAX_ASKED, MAX_LENT, MAX_CONNECTIONS = 4, 4, 64
# Bounds of an answer, for its sender and its reader. Chosen: lent and awaited blocks stay in host memory meanwhile.
ANSWER_S, MIN_BYTES_PER_S = 10.0, 4e6
# The longest wait of a question behind others'. Chosen: as long as a slow answer takes.
QUEUE_S = 10.0
# Addresses that are remembered; nodes that were started again have new ones. Chosen.
MAX_KNOWN = 256
# For the share of wanted blocks that peers have: the half-life of an answer, and the blocks that are assumed found at first. Chosen.
FOUND_HALF_LIFE_S, NUM_ASSUMED_BLOCKS = 60.0, 64.0
_RESTING: frozenset[MissReason] = frozenset(("dead", "late", "token", "foreign", "malformed"))


class PeerConfig(Struct, frozen=True, kw_only=True):
    """The settings of a node that lends KV to others.

    Attributes:
        trust: the cluster's; its token is never empty, its certificate for TLS is for networks that others can read.
        host, port: the address to listen at; port 0: any.
        name: the host name that others use; "": the host.
    """

    trust: Trust
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""

    def __repr__(self) -> str:
        return f"PeerConfig(host={self.host!r}, port={self.port})"


class Peering:
    """A node's side of lending and borrowing. `attach` to each store that is opened and `detach` before it is closed; `close` at the end.

    Raises ValueError for a configuration without a token.
    """

    def __init__(self, config: PeerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        if not config.trust.token:
            raise ValueError("KV is lent to nodes that know the cluster's token only; there is none")
        self.token = config.trust.token
        self.clock = clock
        self.stats = PeerStats(is_on=True)
        self.found = FadingShare(FOUND_HALF_LIFE_S, NUM_ASSUMED_BLOCKS)
        """The share of wanted blocks that peers had."""
        self._config = config
        self._listening: socket.socket | None = None
        self._told: set[tuple[str, str]] = set()
        self._io: IoThread | None = None
        self._lender: Lender | None = None

    def open(self) -> str:
        """Listen, if that has not begun. Returns the address for others, host:port. Raises OSError, ClusterError."""
        if self._listening is None:
            trust = self._config.trust
            self._server_ssl, self._client_ssl = trust.server_tls(), trust.client_tls()
            self._listening = self._listen()
        return self.address

    def _listen(self) -> socket.socket:
        place = (self._config.host, self._config.port)
        try:
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            return socket.create_server(place, family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            where = f"{place[0]}:{place[1]}"
            text = f"{error.strerror or error}: other nodes' questions for KV cannot be taken at {where}; name another"
            raise OSError(error.errno, text) from error

    @property
    def address(self) -> str:
        """Return where other nodes may ask, as host:port; "" before `open`."""
        if self._listening is None:
            return ""
        return f"{self._config.name or self._config.host}:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        """Stop lending and listening."""
        self.detach()
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def attach(self, store: KvStore, fingerprint: str, io: IoThread) -> None:
        """Lend this store's blocks, and let it ask others. The store's files are read on `io`."""
        self.open()
        assert self._listening is not None
        self._lender, self._io = Lender(self, store, fingerprint), io
        known: dict[str, Peer] = {}

        def find(address: str) -> Peer | None:
            """Return the peer at an address; None for this node's own, a malformed one, and a peer that is left alone after a failure."""
            peer = known.get(address)
            if len(known) > MAX_KNOWN:
                known.clear()
            if peer is None and (place := _place_of(address)) is not None and address != self.address:
                peer = known[address] = Peer(self, place, fingerprint, store.shape, self._client_ssl)
            return peer if peer is not None and not peer.is_resting else None

        store.use_peers(find)
        io.start(self._lender.listen(self._listening.dup(), self._server_ssl)).result()

    def detach(self) -> None:
        """Stop lending; answers under way are cut off."""
        lender, io, self._lender, self._io = self._lender, self._io, None, None
        if lender is not None and io is not None:
            io.start(lender.close()).result()

    def snapshot(self) -> PeerStats:
        """Copy the figures. From any thread."""
        return replace(self.stats, misses=dict(self.stats.misses), share_found=self.found.at(self.clock()))

    def missed(self, who: str, reason: MissReason, why: object) -> None:
        """Count a question without an answer, and log the first of each peer and reason."""
        self.stats.misses[reason] = self.stats.misses.get(reason, 0) + 1
        if (who, reason) not in self._told and reason != "absent":
            self._told.add((who, reason))
            log.warning("no KV comes from the node at %s (%s: %s); it is computed instead", who, reason, why)

    def refused(self, reason: str, why: object) -> None:
        """Count another node's question that was not answered to its end, and log the first of each reason."""
        self.stats.refusals[reason] = self.stats.refusals.get(reason, 0) + 1
        if ("", reason) not in self._told:
            self._told.add(("", reason))
            log.warning("another node's question for KV was cut off (%s: %s)", reason, why)


# -- asking ------------------------------------------------------------------------------------------------------------


class Peer:
    """Another node, as a source of blocks."""

    def __init__(
        self,
        peering: Peering,
        place: tuple[str, int],
        fingerprint: str,
        shape: BlockShape,
        context: ssl.SSLContext | None,
    ) -> None:
        self._peering, self._place, self._ssl = peering, place, context
        self._fingerprint, self._shape = fingerprint, shape
        self._turns = asyncio.Semaphore(MAX_ASKED)
        self._rests_until_s = 0.0

    @property
    def is_resting(self) -> bool:
        """Whether this peer failed so recently that it is not asked again yet."""
        return self._peering.clock() < self._rests_until_s

    async def read(self, wanted: BlockRead) -> None:
        """See `kvtiers.reader.BlockSource`. Raises nothing for a peer's faults: blocks that are missing when this returns will not come."""
        stats = self._peering.stats
        if wanted.turn is not None:
            await wanted.turn.wait()
        async with self._turns:
            nonce = secrets.token_bytes(CHALLENGE_BYTES)
            question = BorrowerSide(self._peering.token, nonce, self._fingerprint, self._shape, wanted)
            stats.num_asked += 1
            began_s = self._peering.clock()
            try:
                await self._put(question)
                if question.num_blocks == 0:
                    self._peering.missed(self._who, "absent", "")
            except PeerFault as fault:
                if fault.reason in _RESTING:
                    self._rests_until_s = self._peering.clock() + REST_S
                self._peering.missed(self._who, fault.reason, fault)
            finally:
                stats.bytes_fetched += question.num_bytes
                if question.num_bytes:
                    stats.bytes_per_s = question.num_bytes / max(self._peering.clock() - began_s, 1e-9)
                stats.num_fetched += question.num_whole
                if question.num_damaged:
                    self._peering.missed(self._who, "damaged", f"{question.num_damaged} blocks")
            self._peering.found.add(question.num_blocks or 0, len(wanted.keys), self._peering.clock())

    @property
    def _who(self) -> str:
        return f"{self._place[0]}:{self._place[1]}"

    async def _put(self, question: BorrowerSide) -> None:
        """Raises PeerFault."""
        host, port = self._place
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GREETING_S):
                transport, asking = await loop.create_connection(
                    lambda: _Asking(question), host, port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            raise PeerFault("dead", str(error) or "it takes no connection") from error
        try:
            async with asyncio.timeout(QUEUE_S) as patience:
                patience_s = _patience_s(len(question.wanted.keys) * self._shape.block_bytes)
                question.on_offer = lambda: patience.reschedule(loop.time() + patience_s)
                await asking.end()
        except TimeoutError as error:
            if question.num_blocks is None:
                raise PeerFault("busy", "the question's turn does not come") from error
            raise PeerFault("late", "it sends too slowly") from error
        finally:
            asking.ignore()
            transport.abort()


class _PeerConnection(StreamEnd, asyncio.BufferedProtocol):
    """One end of a connection between two nodes: cuts bytes into frames, which `_take_frames` handles, and hands faults to `_fail`."""

    def __init__(self, direction: Any) -> None:
        self._frames = wire.PeerFrames(direction)
        super().__init__()
        self._num_received = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes."""
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Take the frames that are whole now."""
        self._num_received += nbytes
        self._frames.received(nbytes)
        try:
            self._take_frames()
        except (PeerFault, WireError) as error:
            self._fail(error)

    @abstractmethod
    def _take_frames(self) -> None:
        """Handle the whole frames. Raises PeerFault, WireError."""

    @abstractmethod
    def _fail(self, error: PeerFault | WireError) -> None:
        """End the connection because of this error."""


class _Asking(_PeerConnection):
    """The asker's connection for one question."""

    def __init__(self, question: BorrowerSide) -> None:
        super().__init__(wire.ToAsker)
        self._question: BorrowerSide | None = question
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def end(self) -> None:
        """Wait for the end of the answer. Raises PeerFault."""
        seen = -1
        while not self._over.done():
            if seen == self._num_received:
                raise PeerFault("late", f"nothing for {STALL_S} s")
            seen = self._num_received
            await asyncio.wait({self._over}, timeout=STALL_S)
        self._over.result()

    def ignore(self) -> None:
        """Drop all further bytes: their place in memory belongs to another reader by now."""
        self._question = None
        if not self._over.cancel():
            self._over.exception()

    def _take_frames(self) -> None:
        while (question := self._question) is not None and (frame := self._frames.next()) is not None:
            if reply := question.take(*frame, self._frames):
                self._transport.write(reply)
            if question.is_over:
                self._question = None
                self._finish(None)

    def _fail(self, error: PeerFault | WireError) -> None:
        self._finish(error if isinstance(error, PeerFault) else PeerFault("malformed", str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        """Let an unanswered question fail."""
        # A lender answers a wrong proof in no other way.
        is_refused = self._question is not None and self._question.has_just_greeted
        self._finish(PeerFault("token" if is_refused else "dead", "it has ended the connection"))

    def _finish(self, fault: PeerFault | None) -> None:
        if self._over.done():
            return
        if fault is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(fault)


# -- lending -----------------------------------------------------------------------------------------------------------


class Lender:
    """Answers other nodes' questions out of one store. Runs on the loop of the store's files."""

    def __init__(self, peering: Peering, store: KvStore, fingerprint: str) -> None:
        self.peering, self.store, self.fingerprint = peering, store, fingerprint
        self.turns = asyncio.Semaphore(MAX_LENT)
        self.connections: set[_Lending] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        """Serve this node's blocks on a listening socket. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Lending(self),
            sock=listening,
            ssl=context,
            ssl_handshake_timeout=GREETING_S if context is not None else None,
        )

    async def close(self) -> None:
        """Cut off all connections."""
        if self._server is not None:
            self._server.close()
        tasks = [task for connection in list(self.connections) if (task := connection.cut()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


class _Lending(_PeerConnection):
    """The lender's connection to one asker."""

    def __init__(self, lender: Lender) -> None:
        super().__init__(wire.ToLender)
        self._lender = lender
        self._nonce = secrets.token_bytes(CHALLENGE_BYTES)
        self._is_known = False
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Challenge the asker, or refuse one too many."""
        super().connection_made(transport)
        lender = self._lender
        if len(lender.connections) >= MAX_CONNECTIONS:
            lender.peering.refused("busy", f"more than {MAX_CONNECTIONS} connections")
            self._send(wire.Refused("busy"))
            self._transport.close()
            return
        lender.connections.add(self)
        # A write is flushed before the next one, since the memory behind it may then belong to another block. For TLS the smallest limit is 1.
        self._transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0)
        self._greeting = asyncio.get_running_loop().call_later(GREETING_S, self._transport.abort)
        self._send(Challenge(self._nonce, wire.PEER_PROTOCOL))

    def connection_lost(self, error: Exception | None) -> None:
        """Stop the answer."""
        if self in self._lender.connections:
            self._lender.connections.discard(self)
            self._greeting.cancel()
        self._can_write.set()
        if self._answering is not None:
            self._answering.cancel()

    def cut(self) -> asyncio.Task[None] | None:
        """Cut the connection. Returns the task to wait for."""
        self._transport.abort()
        if self._answering is not None:
            self._answering.cancel()
        return self._answering

    def _take_frames(self) -> None:
        while (frame := self._frames.next()) is not None:
            self._take(frame[0])

    def _fail(self, error: PeerFault | WireError) -> None:
        self._lender.peering.refused(error.reason if isinstance(error, PeerFault) else "malformed", error)
        self._transport.abort()

    def _send(self, message: Message, num_raw_bytes: int = 0) -> None:
        self._transport.write(wire.encode(message, num_raw_bytes))

    def _take(self, message: Any) -> None:
        if not self._is_known:
            self._greet(message)
        elif isinstance(message, wire.BlocksWanted) and self._answering is None:
            self._greeting.cancel()
            self._answering = asyncio.get_running_loop().create_task(self._answer(message))
        else:
            raise WireError("a second question, or a greeting after the greeting")

    def _greet(self, message: Any) -> None:
        lender, token = self._lender, self._lender.peering.token
        if not isinstance(message, Hello):
            raise WireError("a question before the greeting")
        if not is_proof(message.proof, token, wire.ASKER, self._nonce):
            raise PeerFault("token", "it does not know the cluster's token")
        self._is_known = True
        self._frames.allow(wire.max_ask_bytes())
        shape = lender.store.shape
        proof = proof_of(token, wire.LENDER, message.nonce)
        self._send(wire.PeerWelcome(proof, lender.fingerprint, shape.num_layers, shape.layer_bytes))

    async def _answer(self, ask: wire.BlocksWanted) -> None:
        peering = self._lender.peering
        try:
            keys = wire.keys_of(ask.keys)
            if await self._has_turn():
                await self._lend_in_turn(ask, keys)
            else:
                peering.refused("busy", f"others' questions take longer than {QUEUE_S} s")
                self._send(wire.Refused("busy"))
        except (PeerFault, WireError) as error:
            self._fail(error)
        except TimeoutError:
            peering.refused("late", "it reads too slowly")
            self._transport.abort()
        except Exception:
            log.exception("lending KV failed")
            self._transport.abort()
        else:
            self._transport.close()

    async def _has_turn(self) -> bool:
        """Wait for a turn, to be given back, and send Queued meanwhile, lest the asker take this node for dead. False if no turn comes."""
        waiting = asyncio.ensure_future(self._lender.turns.acquire())
        loop = asyncio.get_running_loop()
        until_s = loop.time() + QUEUE_S
        try:
            while not waiting.done() and loop.time() < until_s:
                await asyncio.wait({waiting}, timeout=STALL_S / 4)
                if not waiting.done():
                    self._send(wire.Queued())
        except BaseException:
            if waiting.done():
                self._lender.turns.release()
            raise
        finally:
            has_turn = waiting.done()
            waiting.cancel()
        return has_turn

    async def _lend_in_turn(self, ask: wire.BlocksWanted, keys: list[BlockKey]) -> None:
        try:
            async with asyncio.timeout(_patience_s(len(keys) * self._lender.store.shape.block_bytes)):
                await self._lend(ask, keys)
        finally:
            self._lender.turns.release()

    async def _lend(self, ask: wire.BlocksWanted, keys: list[BlockKey]) -> None:
        lender = self._lender
        shape = lender.store.shape
        if ask.fingerprint != lender.fingerprint:
            self._send(wire.Refused("foreign"))
            return
        if not 0 <= ask.first_layer < shape.num_layers:
            raise WireError("a layer that there is not")
        loan = lender.store.lend(keys)
        try:
            self._send(wire.Offer(b"".join(keys[: loan.num_blocks])))
            if loan.num_blocks:
                await self._send_all(loan, ask.first_layer, shape)
                lender.peering.stats.num_lent += loan.num_blocks
        finally:
            loan.release()

    async def _send_all(self, loan: Loan, first_layer: int, shape: BlockShape) -> None:
        num_offered = loan.num_blocks
        chunks = cast(Any, loan.chunks(first_layer))
        async with aclosing(chunks):
            async for chunk in cast(AsyncIterator[Chunk], chunks):
                if loan.num_blocks < num_offered:
                    num_offered = loan.num_blocks
                    self._send(wire.Cut(num_offered))
                await self._send_chunk(chunk, shape.layer_bytes)
        if loan.num_blocks < num_offered:
            self._send(wire.Cut(loan.num_blocks))
        else:
            self._send(wire.Done())
        await self._flushed()

    async def _send_chunk(self, chunk: Chunk, layer_bytes: int) -> None:
        sums = wire.sums_of(wire.split(chunk.views, layer_bytes))
        num_bytes = chunk.num_blocks * layer_bytes
        self._send(wire.Parts(chunk.layer, chunk.first, sums), num_bytes)
        for view in chunk.views:
            self._transport.write(view)
        await self._flushed()
        self._lender.peering.stats.bytes_lent += num_bytes

    async def _flushed(self) -> None:
        """Wait until all is sent. Raises TimeoutError."""
        async with asyncio.timeout(STALL_S):
            await self._can_write.wait()
        # Else an asker that reads as fast as we write would keep all others from their turn.
        await asyncio.sleep(0)


def _patience_s(num_bytes: int) -> float:
    """Return the time for an answer of at most `num_bytes`."""
    return ANSWER_S + num_bytes / MIN_BYTES_PER_S


def _place_of(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 1 << 16 else None
