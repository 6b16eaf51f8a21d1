"""The protocol between two nodes, one of which asks the other for KV blocks. Bytes in, messages out; no sockets here.

A frame is the length of its message (u32, little-endian), the length of the raw bytes behind that (u32), the message in msgpack, and those bytes.
The end that accepts a connection speaks first; a connection serves one question:

  lender   Challenge        asker   Hello, with a proof that it knows the cluster's token, and a challenge of its own
  lender   PeerWelcome, with its own proof, and the kind of its blocks
                            asker   Ask, for blocks by their keys, from a layer on
  lender   Offer, of the first of them; then layer by layer, within a layer in the order of the keys, Parts, each with its blocks' raw bytes.
           Cut: only the first blocks of the offer will come. Done. Or Refused in the place of any.

The asker has made the keys from tokens, tenant and adapter of its own. A lender can only give those blocks, or not; their bytes are checked
against the sums that come with them. Whether the bytes are the computed ones cannot be checked: the token is there for that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from engine_bridge.cluster.wire import UNREADABLE, Challenge, Hello, Message, WireError, is_proof, proof_of
from kvtiers.io.block_read import BlockRead
from kvtiers.io.records import checksum
from kvtiers.keys import KEY_BYTES, BlockKey, BlockShape
from kvtiers.lending import CHUNK_BYTES

PEER_PROTOCOL = 2
MAX_GREETING_BYTES = 4096
# Most keys of one question. Chosen: a million tokens in blocks of 32.
MAX_KEYS = 1 << 15
_HEAD = struct.Struct("<II")
_SUM_BYTES = 8
# The role that a proof is of, so that it cannot be sent back.
ASKER, LENDER = "kv asker", "kv lender"

MissReason = Literal["dead", "late", "token", "foreign", "busy", "malformed", "damaged", "absent"]
"""Why a peer gave nothing, or less than it offered: it cannot be reached or was cut off; it took too long; it does not know the token; its blocks are
not of our kind; it has too much to do; it does not keep to the protocol; a block's bytes are not those of its sum; it has none of the blocks."""


class PeerFault(Exception):
    """The other end is of no use. Only this connection is concerned."""

    def __init__(self, reason: MissReason, text: str) -> None:
        super().__init__(text)
        self.reason: MissReason = reason


class PeerWelcome(Message, frozen=True):
    """The lender's proof, and the kind of its blocks."""

    proof: bytes
    fingerprint: str
    num_layers: int
    layer_bytes: int


class BlocksWanted(Message, frozen=True):
    """The asker's question. keys: back to back."""

    fingerprint: str
    first_layer: int
    keys: bytes


class Queued(Message, frozen=True):
    """The question waits behind others'. Repeated until its turn comes, so that the node is not taken for dead."""


class Offer(Message, frozen=True):
    """The blocks that will come. keys: the first of the wanted ones, back to back."""

    keys: bytes


class Parts(Message, frozen=True):
    """A layer of the blocks `first ..`: sums of 8 bytes each; their bytes follow."""

    layer: int
    first: int
    sums: bytes


class Cut(Message, frozen=True):
    """Only the first `num_blocks` of the offer will come."""

    num_blocks: int


class Done(Message, frozen=True):
    """The lender has sent all layers of the offered blocks."""


class Refused(Message, frozen=True):
    """The question is not answered, or no further. reason: `foreign` or `busy`."""

    reason: str


ToLender = Hello | BlocksWanted
ToAsker = Challenge | PeerWelcome | Queued | Offer | Parts | Cut | Done | Refused
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, num_raw_bytes: int = 0) -> bytes:
    """Encode a frame up to its raw bytes."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body), num_raw_bytes) + body


def sums_of(blocks: Sequence[memoryview]) -> bytes:
    """Return the blocks' checksums, eight bytes each, in the blocks' order."""
    return struct.pack(f"<{len(blocks)}Q", *map(checksum, blocks))


def split(views: Sequence[memoryview], size: int) -> list[memoryview]:
    """Split views of one or several blocks into views of one block each."""
    return [view[start : start + size] for view in views for start in range(0, len(view), size)]


def keys_of(packed: bytes) -> list[BlockKey]:
    """Split packed keys. Raises WireError for a wrong size, or too many."""
    if len(packed) % KEY_BYTES or len(packed) > MAX_KEYS * KEY_BYTES:
        raise WireError("keys of a wrong size, or too many")
    return [BlockKey(packed[start : start + KEY_BYTES]) for start in range(0, len(packed), KEY_BYTES)]


class PeerFrames:
    """Cuts bytes into frames, in one buffer of a bounded size. For `asyncio.BufferedProtocol`, which reads into `space`.

    Args:
        direction: `ToLender` or `ToAsker`, the messages that the other end may send.
    """

    def __init__(self, direction: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(direction)
        self._max_bytes = MAX_GREETING_BYTES
        self._memory = memoryview(bytearray(2 * self._max_bytes))
        self._start = self._end = 0

    def allow(self, max_bytes: int) -> None:
        """Take frames of up to `max_bytes` from now on."""
        memory = memoryview(bytearray(2 * (max_bytes + _HEAD.size)))
        kept = self._end - self._start
        memory[:kept] = self._memory[self._start : self._end]
        self._memory, self._max_bytes, self._start, self._end = memory, max_bytes, 0, kept

    def space(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        kept = self._end - self._start
        if not kept:
            self._start = self._end = 0
        elif self._start and len(self._memory) - self._end < self._max_bytes:
            self._memory[:kept] = bytes(self._memory[self._start : self._end])
            self._start, self._end = 0, kept
        return self._memory[self._end :]

    def received(self, num_bytes: int) -> None:
        """Note that `num_bytes` have been read into `space`."""
        self._end += num_bytes

    def next(self) -> tuple[Any, memoryview] | None:
        """Return the next whole frame: its message and its raw bytes, which must be read before the next `space`. Raises WireError."""
        have = self._end - self._start
        if have < _HEAD.size:
            return None
        size, num_raw = _HEAD.unpack_from(self._memory, self._start)
        if size == 0 or size + num_raw > self._max_bytes:
            raise WireError(f"a frame of {size} and {num_raw} bytes")
        if have < _HEAD.size + size + num_raw:
            return None
        body = self._start + _HEAD.size
        raw = body + size
        self._start = raw + num_raw
        try:
            message = self._decoder.decode(self._memory[body:raw])
        except UNREADABLE as error:
            raise WireError("a frame that holds no message of ours") from error
        if num_raw and not isinstance(message, Parts):
            raise WireError("raw bytes behind a message that has none")
        return message, self._memory[raw : self._start]


class BorrowerSide:
    """The asker's side of one connection. Frames come in by `take`.

    Args:
        nonce: random bytes.
        wanted: the blocks. Their parts are written to only with bytes that were checked.

    Attributes:
        num_blocks: blocks that will come, as far as is known; None before the offer.
        is_over: nothing more will come.
        num_bytes: bytes of undamaged blocks so far.
    """

    def __init__(
        self, token: bytes, nonce: bytes, fingerprint: str, shape: BlockShape, wanted: BlockRead
    ) -> None:
        self._token, self._nonce = token, nonce
        self._fingerprint, self._shape, self.wanted = fingerprint, shape, wanted
        self._asked = b"".join(wanted.keys[:MAX_KEYS])
        self._layer = wanted.first_layer
        self._place = 0
        self._bad: set[int] = set()
        self._turn: type[Message] = Challenge
        self.num_blocks: int | None = None
        self.on_offer: Callable[[], None] = lambda: None
        """Called when the question's turn has come."""
        self.is_over = False
        self.num_bytes = 0

    @property
    def has_just_greeted(self) -> bool:
        """Whether the other end is checking our proof."""
        return self._turn is PeerWelcome

    @property
    def num_damaged(self) -> int:
        """Number of blocks that did not match their checksums."""
        return len(self._bad)

    @property
    def num_whole(self) -> int:
        """Number of blocks whose layers have all come. The reader of the blocks may stop waiting before the other end sends Done."""
        return (self.num_blocks or 0) - self.num_damaged if self._layer == self._shape.num_layers else 0

    def take(self, message: Any, raw: memoryview, frames: PeerFrames) -> bytes:
        """Handle one frame; returns the bytes to send. Raises PeerFault, WireError."""
        match message:
            case Refused():
                raise PeerFault("foreign" if message.reason == "foreign" else "busy", "it has refused")
            case Challenge() if self._turn is Challenge:
                return self._greet(message)
            case PeerWelcome() if self._turn is PeerWelcome:
                return self._ask(message, frames)
            case Queued() if self._turn is Offer:
                pass
            case Offer() if self._turn is Offer:
                self._offered(message)
            case Parts() if self._turn is Parts:
                self._parts(message, raw)
            case Cut() if self._turn is Parts and self._layer < self._shape.num_layers:
                self._cut(message.num_blocks)
            case Done() if self._turn is Parts and self._layer == self._shape.num_layers:
                self.is_over = True
            case _:
                raise WireError(f"{type(message).__name__} out of turn")
        return b""

    def _greet(self, message: Challenge) -> bytes:
        if message.protocol != PEER_PROTOCOL:
            raise PeerFault(
                "foreign", f"it speaks version {message.protocol} of the protocol, this is {PEER_PROTOCOL}"
            )
        self._turn = PeerWelcome
        return encode(Hello(proof_of(self._token, ASKER, message.nonce), self._nonce))

    def _ask(self, message: PeerWelcome, frames: PeerFrames) -> bytes:
        if not is_proof(message.proof, self._token, LENDER, self._nonce):
            raise PeerFault("token", "it does not know the token")
        shape = BlockShape(message.num_layers, message.layer_bytes)
        if (message.fingerprint, shape) != (self._fingerprint, self._shape):
            raise PeerFault(
                "foreign",
                "it serves another model, or computes KV in another way: compare namespace.json in the KV folders of both",
            )
        frames.allow(max_frame_bytes(self._shape, len(self.wanted.keys)))
        self._turn = Offer
        return encode(BlocksWanted(self._fingerprint, self.wanted.first_layer, self._asked))

    def _offered(self, message: Offer) -> None:
        num_blocks = len(message.keys) // KEY_BYTES
        if len(message.keys) % KEY_BYTES or not self._asked.startswith(message.keys):
            raise WireError("an offer of what was not asked for")
        self._turn, self.num_blocks = Parts, len(self.wanted.keys)
        self.on_offer()
        self._cut(num_blocks, is_offer=True)

    def _cut(self, num_blocks: int, *, is_offer: bool = False) -> None:
        assert self.num_blocks is not None
        if not 0 <= num_blocks < self.num_blocks + is_offer:
            raise WireError("a cut that is none")
        for index in range(num_blocks, self.num_blocks):
            if index not in self._bad:
                self.wanted.on_bad(index)
        self.num_blocks = num_blocks
        if num_blocks == 0:
            self.is_over = True
        elif self._place >= num_blocks:
            self._end_layer()

    def _parts(self, message: Parts, raw: memoryview) -> None:
        size = self._shape.layer_bytes
        num = len(message.sums) // _SUM_BYTES
        is_next = (message.layer, message.first) == (self._layer, self._place)
        assert self.num_blocks is not None
        is_fit = num > 0 and len(message.sums) % _SUM_BYTES == 0 and len(raw) == num * size
        if not (
            is_next
            and is_fit
            and self._layer < self._shape.num_layers
            and self._place + num <= self.num_blocks
        ):
            raise WireError("parts that are not the next ones")
        for at, wanted in enumerate(struct.unpack(f"<{num}Q", message.sums)):
            view, block = raw[at * size : (at + 1) * size], message.first + at
            if block in self._bad:
                continue
            if checksum(view) != wanted:
                self._bad.add(block)
                self.wanted.on_bad(block)
                continue
            self.wanted.part(block, message.layer)[:] = view
            self.num_bytes += size
            self.wanted.on_bytes(size)
        self._place += num
        if self._place == self.num_blocks:
            self._end_layer()

    def _end_layer(self) -> None:
        self.wanted.on_layer(self._layer)
        self._layer, self._place = self._layer + 1, 0


def max_frame_bytes(shape: BlockShape, num_keys: int) -> int:
    """Return the size of a lender's largest frame: parts with their sums, or an offer of `num_keys` keys."""
    num_blocks = max(CHUNK_BYTES // shape.layer_bytes, 1)
    parts = num_blocks * (shape.layer_bytes + _SUM_BYTES)
    return max(parts, num_keys * KEY_BYTES) + MAX_GREETING_BYTES


def max_ask_bytes() -> int:
    """Return the size of the longest question, in bytes."""
    return MAX_KEYS * KEY_BYTES + MAX_GREETING_BYTES
