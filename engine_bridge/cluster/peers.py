"""KV straight from node to node: what a node asks another for, and what it lends.

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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from msgspec import Struct

from engine_bridge.cluster import peer_wire as wire
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
from kvtiers.io.io_thread import IoThread
from kvtiers.io.records import Part
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.lending import Chunk, Loan
from kvtiers.stats import PeerStats
from kvtiers.store import KvStore

log = logging.getLogger(__name__)

# Until the other end has proved itself, and until it says what it has. Chosen: several round trips round the earth, and a wait for others' questions.
GREETING_S = 2.0
# Nothing has come, or gone, for so long: the other end hangs. Chosen.
STALL_S = 2.0
# Who cannot be reached, hangs, does not know the token or is of another kind is left alone for so long. Chosen: nodes come back in tens of seconds.
REST_S = 5.0
# Questions that one node has under way at one peer, and answers that a node gives at once, and connections that may wait for that. Chosen: a few
# fill a network, and more would only share it.
MAX_ASKED, MAX_LENT, MAX_CONNECTIONS = 4, 4, 64
# An answer takes so long and is no slower, whoever sends or reads it. Chosen: what is lent or awaited stays in host memory meanwhile.
ANSWER_S, MIN_BYTES_PER_S = 10.0, 4e6
# A question waits so long at most for its turn among others'. Chosen: as long as a slow answer to one of those takes.
QUEUE_S = 10.0
# Addresses that are remembered; nodes that were started again have new ones. Chosen.
MAX_KNOWN = 256
# What peers have of what they are asked for: an answer counts half after so long, and so many blocks are taken to have been found before. Chosen.
FOUND_HALF_LIFE_S, NUM_ASSUMED_BLOCKS = 60.0, 64.0
_RESTING: frozenset[MissReason] = frozenset(("dead", "late", "token", "foreign", "malformed"))


class PeerConfig(Struct, frozen=True, kw_only=True):
    """Where a node lends KV to others, and what they must know.

    host, port: to listen at; port 0: any. name: under which others reach it; "": the host. token: the cluster's, never empty. certificate, key: files
    for TLS, the same on all machines, which a network that others can read needs.
    """

    token: str
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def trust(self) -> Trust:
        return Trust(token=self.token.encode(), cert=str(self.certificate or ""), key=str(self.key or ""))

    def __repr__(self) -> str:
        return f"PeerConfig(host={self.host!r}, port={self.port})"


class Peering:
    """A node's side of lending and borrowing. `attach` to each store that is opened and `detach` before it is closed; `close` at the end.

    Raises ValueError for a configuration without a token.
    """

    def __init__(self, config: PeerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        if not config.token:
            raise ValueError("KV is lent to nodes that know the cluster's token only; there is none")
        self.token = config.token.encode()
        self.clock = clock
        self.stats = PeerStats(is_on=True)
        self.found = FadingShare(FOUND_HALF_LIFE_S, NUM_ASSUMED_BLOCKS)
        """Of the blocks that peers were asked for."""
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
        """ "" before `open`."""
        if self._listening is None:
            return ""
        return f"{self._config.name or self._config.host}:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        self.detach()
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def attach(self, store: KvStore, fingerprint: str, io: IoThread) -> None:
        """Lend what this store has, and let it ask others. The store's files are read on `io`."""
        self.open()
        assert self._listening is not None
        self._lender, self._io = Lender(self, store, fingerprint), io
        known: dict[str, Peer] = {}

        def find(address: str) -> Peer | None:
            peer = known.get(address)
            if len(known) > MAX_KNOWN:
                known.clear()
            if peer is None and (place := _place_of(address)) is not None and address != self.address:
                peer = known[address] = Peer(self, place, fingerprint, store.shape, self._client_ssl)
            return peer if peer is not None and not peer.is_resting else None

        store.use_peers(find)
        io.start(self._lender.listen(self._listening.dup(), self._server_ssl)).result()

    def detach(self) -> None:
        """Lend no more; who is being answered is cut off."""
        lender, io, self._lender, self._io = self._lender, self._io, None, None
        if lender is not None and io is not None:
            io.start(lender.close()).result()

    def snapshot(self) -> PeerStats:
        """From any thread."""
        fields = {name: getattr(self.stats, name) for name in PeerStats.__struct_fields__}
        changing = {"misses": dict(self.stats.misses), "share_found": self.found.at(self.clock())}
        return PeerStats(**fields | changing)

    def missed(self, who: str, reason: MissReason, why: object) -> None:
        """Count it, and tell it the first time."""
        self.stats.misses[reason] = self.stats.misses.get(reason, 0) + 1
        if (who, reason) not in self._told and reason != "absent":
            self._told.add((who, reason))
            log.warning("no KV comes from the node at %s (%s: %s); it is computed instead", who, reason, why)

    def refused(self, reason: str, why: object) -> None:
        """Another node's question was not answered to its end."""
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

    async def read(
        self,
        keys: Sequence[BlockKey],
        part: Part,
        *,
        first_layer: int,
        on_layer: Callable[[int], None],
        on_bad: Callable[[int], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        """See `kvtiers.reader.BlockSource`. Never raises for what a peer does: what has not come when this returns does not come."""
        stats = self._peering.stats
        async with self._turns:
            nonce = secrets.token_bytes(CHALLENGE_BYTES)
            question = BorrowerSide(
                self._peering.token,
                nonce,
                self._fingerprint,
                self._shape,
                keys,
                part,
                first_layer,
                on_layer,
                on_bad,
                on_bytes,
            )
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
            self._peering.found.add(question.num_blocks or 0, len(keys), self._peering.clock())

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
                patience_s = _patience_s(len(question.keys) * self._shape.block_bytes)
                question.on_offer = lambda: patience.reschedule(loop.time() + patience_s)
                await asking.end()
        except TimeoutError as error:
            if question.num_blocks is None:
                raise PeerFault("busy", "the question's turn does not come") from error
            raise PeerFault("late", "it sends too slowly") from error
        finally:
            asking.ignore()
            transport.abort()


class _Asking(asyncio.BufferedProtocol):
    """One question over one connection."""

    def __init__(self, question: BorrowerSide) -> None:
        self._question: BorrowerSide | None = question
        self._frames = wire.PeerFrames(wire.ToAsker)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_received = 0

    async def end(self) -> None:
        """Returns when the question is answered. Raises PeerFault."""
        seen = -1
        while not self._over.done():
            if seen == self._num_received:
                raise PeerFault("late", f"nothing for {STALL_S} s")
            seen = self._num_received
            await asyncio.wait({self._over}, timeout=STALL_S)
        self._over.result()

    def ignore(self) -> None:
        """Whatever comes from now on: nobody wants it, and its place is another's."""
        self._question = None
        if not self._over.cancel():
            self._over.exception()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._num_received += nbytes
        self._frames.received(nbytes)
        try:
            while (question := self._question) is not None and (frame := self._frames.next()) is not None:
                if reply := question.take(*frame, self._frames):
                    self._transport.write(reply)
                if question.is_over:
                    self._question = None
                    self._finish(None)
        except PeerFault as fault:
            self._finish(fault)
        except WireError as error:
            self._finish(PeerFault("malformed", str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        # To a proof that is none there is no other answer.
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
    """Answers other nodes' questions out of one store. All on the loop of its files."""

    def __init__(self, peering: Peering, store: KvStore, fingerprint: str) -> None:
        self.peering, self.store, self.fingerprint = peering, store, fingerprint
        self.turns = asyncio.Semaphore(MAX_LENT)
        self.connections: set[_Lending] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        """Serves this node's blocks on a socket that listens already. Raises `OSError` if that cannot be done."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Lending(self),
            sock=listening,
            ssl=context,
            ssl_handshake_timeout=GREETING_S if context is not None else None,
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [task for connection in list(self.connections) if (task := connection.cut()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


class _Lending(asyncio.BufferedProtocol):
    """One asker."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._frames = wire.PeerFrames(wire.ToLender)
        self._nonce = secrets.token_bytes(CHALLENGE_BYTES)
        self._is_known = False
        self._answering: asyncio.Task[None] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        lender = self._lender
        if len(lender.connections) >= MAX_CONNECTIONS:
            lender.peering.refused("busy", f"more than {MAX_CONNECTIONS} connections")
            self._send(wire.Refused("busy"))
            self._transport.close()
            return
        lender.connections.add(self)
        # What was written has left before more is: the memory that it was read from may then be another's.
        # Of TLS 0 is a limit that nothing is below.
        self._transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0)
        self._greeting = asyncio.get_running_loop().call_later(GREETING_S, self._transport.abort)
        self._send(Challenge(self._nonce, wire.PEER_PROTOCOL))

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._lender.connections:
            self._lender.connections.discard(self)
            self._greeting.cancel()
        self._can_write.set()
        if self._answering is not None:
            self._answering.cancel()

    def cut(self) -> asyncio.Task[None] | None:
        """Returns what is to be waited for."""
        self._transport.abort()
        if self._answering is not None:
            self._answering.cancel()
        return self._answering

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._frames.received(nbytes)
        try:
            while (frame := self._frames.next()) is not None:
                self._take(frame[0])
        except (PeerFault, WireError) as error:
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
            peering.refused(error.reason if isinstance(error, PeerFault) else "malformed", error)
            self._transport.abort()
        except TimeoutError:
            peering.refused("late", "it reads too slowly")
            self._transport.abort()
        except Exception:
            log.exception("lending KV failed")
            self._transport.abort()
        else:
            self._transport.close()

    async def _has_turn(self) -> bool:
        """Wait for a turn, which is to be given back, and say so meanwhile: who hears nothing takes this node for dead. False if none comes."""
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
        """Nothing waits to be sent any more. Raises TimeoutError."""
        async with asyncio.timeout(STALL_S):
            await self._can_write.wait()
        # Else whoever reads as fast as we write would keep everybody else here from their turn.
        await asyncio.sleep(0)


def _patience_s(num_bytes: int) -> float:
    """For an answer of so many at most."""
    return ANSWER_S + num_bytes / MIN_BYTES_PER_S


def _place_of(address: str) -> tuple[str, int] | None:
    """None for what is no address."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 1 << 16 else None
