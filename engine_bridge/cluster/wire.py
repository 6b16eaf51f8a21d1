"""The protocol between a gateway and a node in another process: frames of msgpack over one stream, all answers side by side. Bytes in, messages out.

A frame is its length (u32, little-endian, of what follows), a number (u32: the call or answer that it belongs to, 0 for none) and a message.
Numbers are the gateway's; one is used once in a connection's life. The end that accepts a connection speaks first:

  node     Challenge          gateway  Hello, with a proof that it knows the token, and a challenge of its own
  node     Welcome            with the node's proof; from here on a NodeReport comes every REPORT_EVERY_S, which is also the heartbeat
  gateway  Generate, Call     node     Pieces … Ended; Reply (of a streamed `serve`: then Pieces … Ended)
  gateway  Stop               nothing waits for that number any more
  gateway  Notice             a call without a reply
  node     AdvisoryChanged    an advisory of this connection

Where both ends were made by one process, over a pair of sockets, the token is empty and proves nothing: no other process can reach them.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from engine_bridge.adapters.errors import RegistryFailed
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import (
    BridgeError,
    EngineUnavailable,
    InternalFailure,
    InvalidRequest,
    NotSupported,
    TooBusy,
)
from engine_bridge.protocol.figures import EngineState, NodeFigures, Progress
from engine_bridge.protocol.node import (
    AdapterInfo,
    Advisory,
    AdvisoryReport,
    Api,
    ApiSchemas,
    Delta,
    JsonReply,
    SessionHint,
    SleepMode,
)

PROTOCOL = 5
# Chosen: above the largest body that the gateway takes and the largest whole reply that one request's bounds allow.
MAX_FRAME_BYTES = 256 << 20
# The largest frame before the other end has proved itself. Chosen.
MAX_GREETING_BYTES = 4096
REPORT_EVERY_S = 0.25
CHALLENGE_BYTES = 32

_HEAD = struct.Struct("<II")


class WireError(Exception):
    """The other end does not speak this protocol, or not with our token. The connection is of no more use."""


# -- messages ----------------------------------------------------------------------------------------------------------


class NodeReport(Struct, frozen=True, array_like=True):
    """The facts of a node that the gateway reads without asking.

    adapters: None: as in the report before. peer_address: host:port where other nodes may ask it for KV, "" for nowhere.
    """

    progress: Progress
    model_names: tuple[str, ...]
    max_model_len: int
    figures: NodeFigures
    adapters: list[AdapterInfo] | None = None
    peer_address: str = ""
    max_images: int = 0
    can_use_tools: bool = False


class Problem(Struct, frozen=True, array_like=True):
    """A BridgeError on its way: its class by name, its text, and the further fields of its class."""

    kind: str
    message: str
    code: str = "engine_failed"
    param: str | None = None
    retry_after_s: float = 0.0


class Message(Struct, frozen=True, array_like=True, tag_field="type", tag=str.lower):
    """Base of all messages."""


class Challenge(Message, frozen=True):
    """The first message of the end that accepts the connection. nonce: CHALLENGE_BYTES random bytes."""

    nonce: bytes
    protocol: int = PROTOCOL


class Hello(Message, frozen=True):
    """The answer to a challenge: its proof, and a challenge for the other end."""

    proof: bytes
    nonce: bytes


class Welcome(Message, frozen=True):
    """The node's proof, and its first report. incarnation: differs after each start of the node's process."""

    proof: bytes
    node_id: str
    incarnation: str
    report: NodeReport


class Generate(Message, frozen=True):
    """A request whose answer comes as Pieces, then Ended."""

    request: EngineRequest


class Call(Message, frozen=True):
    """A call of one of METHODS, which is answered by a Reply. arguments: a msgpack array."""

    method: str
    arguments: Raw


class Notice(Message, frozen=True):
    """A call of one of NOTICES, which has no reply."""

    method: str
    arguments: Raw


class Stop(Message, frozen=True):
    """End the work on this number."""


class Pieces(Message, frozen=True):
    """Pieces of several answers and streamed calls, by number, from one turn of the node's loop."""

    items: list[tuple[int, Delta | bytes]]


class Ended(Message, frozen=True):
    """The end of an answer. problem: the error that cut it off, if one did."""

    problem: Problem | None = None


class Reply(Message, frozen=True):
    """The result of a call, or its error."""

    value: Raw = Raw(b"\xc0")
    problem: Problem | None = None


class Reported(Message, frozen=True):
    """A new report of the node."""

    report: NodeReport


class AdvisoryChanged(Message, frozen=True):
    """A new state of an advisory request that came over this connection."""

    report: AdvisoryReport


ToNode = Hello | Generate | Call | Notice | Stop
ToGateway = Challenge | Welcome | Pieces | Ended | Reply | Reported | AdvisoryChanged


class Method(NamedTuple):
    """A method of `Node`: the types of its arguments and of its result."""

    arguments: Any
    result: Any = None


METHODS: dict[str, Method] = {
    # None: events follow.
    "serve": Method(tuple[Api, Any, dict[str, str], EngineRequest], JsonReply | None),
    "cancel": Method(tuple[str], bool),
    "advise": Method(tuple[Advisory]),
    "prefill": Method(tuple[EngineRequest], int),
    "models": Method(tuple[()], JsonReply),
    "api_schemas": Method(tuple[()], ApiSchemas),
    "engine_metrics": Method(tuple[()], str),
    "load_adapter": Method(tuple[Any], JsonReply),
    "unload_adapter": Method(tuple[Any], JsonReply),
    "pin_adapter": Method(tuple[str, bool], AdapterInfo | None),
    "engine_state": Method(tuple[str, int], EngineState),
    "drain": Method(tuple[float], bool),
    "erase_kv": Method(tuple[str], int),
    "sleep": Method(tuple[SleepMode, float]),
    "wake_up": Method(tuple[()]),
}
# After these a report comes before the reply.
ADAPTER_METHODS = frozenset({"load_adapter", "unload_adapter", "pin_adapter"})
# Methods of the node's `adapters.store.AdapterStore`, by which the gateway sends adapters' files.
STORE_METHODS: dict[str, Method] = {
    "find": Method(tuple[str, str], str),
    "begin": Method(tuple[str, dict[str, int]]),
    "put": Method(tuple[str, str, int, bytes]),
    "finish": Method(tuple[str], str),
    "keep": Method(tuple[list[str]]),
}
METHODS |= STORE_METHODS
NOTICES: dict[str, Method] = {
    "retract": Method(tuple[str, bool]),
    "end_session": Method(tuple[str, str]),
    "hint_session": Method(tuple[SessionHint]),
    "close": Method(tuple[()]),
}

# -- bytes -------------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
# Errors for values of a client's JSON that msgpack cannot carry: integers of more than 64 bits, halves of surrogate pairs, a thousand brackets.
_UNFIT = (OverflowError, UnicodeEncodeError, TypeError, RecursionError)
# Errors of msgspec for bytes that are no message; those for texts that are not UTF-8 and for a thousand brackets are Python's.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_argument_decoders = {
    name: msgspec.msgpack.Decoder(method.arguments) for name, method in (METHODS | NOTICES).items()
}
_result_decoders = {name: msgspec.msgpack.Decoder(method.result) for name, method in METHODS.items()}


class Frame(NamedTuple):
    """A message and its number, 0 for none."""

    number: int
    message: Any


def encode(message: Message, number: int = 0) -> bytes:
    """Encode one frame. Raises InvalidRequest for what msgpack cannot carry, and for more than a frame may hold: the other end would hang up."""
    body = _packed(message)
    if len(body) + 4 > MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"This request is too large to be passed on: {len(body) >> 20:,} MiB.", code="prompt_too_long"
        )
    return _HEAD.pack(len(body) + 4, number) + body


def raw(value: Any) -> Raw:
    """Encode a value for a `Raw` field. Raises InvalidRequest as `encode` does."""
    return Raw(_packed(value))


def _packed(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except _UNFIT as error:
        raise InvalidRequest("This request holds a number or a text that cannot be passed on.") from error


def arguments_of(message: Call | Notice) -> tuple[Any, ...]:
    """Decode a call's arguments. Raises WireError for an unknown method, or arguments that it does not take."""
    decoder = _argument_decoders.get(message.method)
    if decoder is None or (message.method in METHODS) is not isinstance(message, Call):
        raise WireError("no such method")
    try:
        found: tuple[Any, ...] = decoder.decode(message.arguments)
    except UNREADABLE as error:
        raise WireError("arguments that the method does not take") from error
    return found


def result_of(method: str, reply: Reply) -> Any:
    """Decode a call's result. Raises the reply's problem, or WireError for a value that the method does not return."""
    if reply.problem is not None:
        raise error_of(reply.problem)
    try:
        return _result_decoders[method].decode(reply.value)
    except UNREADABLE as error:
        raise WireError("a result that the method does not give") from error


class Frames:
    """Cuts bytes into frames. direction: `ToNode` or `ToGateway`, the messages that the other end may send."""

    def __init__(self, direction: Any) -> None:
        self.max_bytes = MAX_GREETING_BYTES
        self._decoder = msgspec.msgpack.Decoder(direction)
        self._buffer = bytearray()

    def trust(self) -> None:
        """Take large frames from now on: the other end has proved itself."""
        self.max_bytes = MAX_FRAME_BYTES

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole now; read all of them. Raises WireError."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEAD.size:
                size, number = _HEAD.unpack_from(self._buffer, start)
                if not 4 < size <= self.max_bytes:
                    raise WireError(f"a frame of {size} bytes")
                end = start + 4 + size
                if len(self._buffer) < end:
                    break
                yield Frame(number, self._decoded(start + _HEAD.size, end))
                start = end
        finally:
            del self._buffer[:start]

    def _decoded(self, start: int, end: int) -> Any:
        with memoryview(self._buffer) as view, view[start:end] as body:
            try:
                return self._copied(self._decoder.decode(body))
            except UNREADABLE as error:
                raise WireError("a frame that holds no message of ours") from error

    @staticmethod
    def _copied(message: Any) -> Any:
        """Copy what a `Raw` sees of the buffer, which is about to be reused."""
        if isinstance(message, (Call, Notice)):
            return msgspec.structs.replace(message, arguments=message.arguments.copy())
        if isinstance(message, Reply):
            return msgspec.structs.replace(message, value=message.value.copy())
        return message


# -- proofs ------------------------------------------------------------------------------------------------------------


def proof_of(token: bytes, role: str, nonce: bytes) -> bytes:
    """Return the proof that an end knows the token, for one challenge. role: `gateway` or `node`, so that a proof cannot be sent back."""
    return hmac.digest(token, role.encode() + b":" + nonce, "sha256")


def is_proof(proof: bytes, token: bytes, role: str, nonce: bytes) -> bool:
    """Return whether `proof` shows that its sender, in this role, knows the token. Takes equally long for any wrong proof."""
    return hmac.compare_digest(proof, proof_of(token, role, nonce))


# -- errors ------------------------------------------------------------------------------------------------------------

# The fields of each kind of error beside its text.
_KINDS: dict[type[BridgeError], tuple[str, ...]] = {
    InvalidRequest: ("param", "code"),
    EngineUnavailable: ("code",),
    TooBusy: ("retry_after_s",),
    NotSupported: (),
    RegistryFailed: ("code",),
    InternalFailure: (),
}
_KIND_OF = {kind.__name__: kind for kind in _KINDS}
GONE = Problem(
    "EngineUnavailable",
    "The engine that worked on this answer has failed. Send the request again.",
    code="engine_failed",
)


def problem_of(error: Exception) -> Problem:
    """Describe an error for the wire. Errors other than a BridgeError are bugs of the node: their texts stay in its log."""
    for kind, fields in _KINDS.items():
        if isinstance(error, kind):
            return Problem(kind.__name__, str(error), **{name: getattr(error, name) for name in fields})
    return Problem("InternalFailure", "The node failed on this request. Its log says why.")


def error_of(problem: Problem) -> BridgeError:
    """Make the exception that a problem on the wire describes."""
    kind = _KIND_OF.get(problem.kind, EngineUnavailable)
    fields = {name: getattr(problem, name) for name in _KINDS[kind]}
    return kind(problem.message, **fields)
