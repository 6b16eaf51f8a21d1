"""What crosses between a gateway and a node in another process: frames of msgpack over one stream, all answers side by side. Bytes in, messages out.

A frame is its length (u32, little-endian, of what follows), a number (u32: the call or answer that it belongs to, 0 for none) and a message.
Numbers are the gateway's; one is used once in a connection's life. Who takes a connection speaks first:

  node     Challenge          gateway  Hello, with a proof that it knows the token, and a challenge of its own
  node     Welcome            with the node's proof; from here on a NodeReport comes every REPORT_EVERY_S, which is also the heartbeat
  gateway  Generate, Call     node     Deltas … Ended; Reply (of a streamed `serve`: then Events … Ended)
  gateway  Stop               nobody waits for that number any more
  gateway  Notice             a call without a reply
  node     AdvisoryChanged    an advisory of this connection

Where both ends were made by one process, over a pair of sockets, the token is empty and proves nothing: nobody else can be there.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from engine_bridge.adapters.errors import RegistryFailed
from engine_bridge.protocol.errors import (
    BridgeError,
    EngineUnavailable,
    InternalFailure,
    InvalidRequest,
    NotSupported,
    TooBusy,
)
from engine_bridge.protocol.node import (
    AdapterInfo,
    AdapterStats,
    Advisory,
    AdvisoryReport,
    Api,
    ApiSchemas,
    Delta,
    EngineState,
    GenerateRequest,
    GrammarStats,
    JsonReply,
    Progress,
    SchedulingStats,
    TokenizerStats,
)
from engine_bridge.protocol.node_facts import NodeFacts
from engine_bridge.protocol.request_context import RequestContext
from kvtiers.stats import TierStats

PROTOCOL = 1
# Chosen: above the largest body that the gateway takes and the largest whole reply that one request's bounds allow.
MAX_FRAME_BYTES = 256 << 20
# Before the other end has proved itself, all that it may send. Chosen.
MAX_GREETING_BYTES = 4096
REPORT_EVERY_S = 0.25
CHALLENGE_BYTES = 32

_HEAD = struct.Struct("<II")


class WireError(Exception):
    """The other end does not speak this protocol, or not with our token. The connection is of no more use."""


# -- messages ----------------------------------------------------------------------------------------------------------


class NodeReport(Struct, frozen=True, array_like=True):
    """All of a node that the gateway looks at without asking.

    adapters: None: as in the report before. peer_address: host:port where other nodes may ask it for KV, "" for nowhere.
    """

    progress: Progress
    model_name: str
    max_model_len: int
    num_steps: int
    num_rebuilds: int
    kv_tiers: TierStats | None = None
    adapter_stats: AdapterStats | None = None
    tokenizer_stats: TokenizerStats | None = None
    grammar_stats: GrammarStats | None = None
    scheduling_stats: SchedulingStats | None = None
    adapters: list[AdapterInfo] | None = None
    facts: NodeFacts | None = None
    peer_address: str = ""


class Problem(Struct, frozen=True, array_like=True):
    """A BridgeError on its way: its class by name, its text, and what its class keeps beside that."""

    kind: str
    message: str
    code: str = ""
    param: str | None = None
    retry_after_s: float = 0.0


class Message(Struct, frozen=True, array_like=True, tag_field="type", tag=str.lower):
    """Base of all."""


class Challenge(Message, frozen=True):
    nonce: bytes
    protocol: int = PROTOCOL


class Hello(Message, frozen=True):
    proof: bytes
    nonce: bytes


class Welcome(Message, frozen=True):
    """incarnation: another one after each start of the node's process."""

    proof: bytes
    node_id: str
    incarnation: str
    report: NodeReport


class Generate(Message, frozen=True):
    request: GenerateRequest


class Call(Message, frozen=True):
    """arguments: a msgpack array, as METHODS has them."""

    method: str
    arguments: Raw


class Notice(Message, frozen=True):
    method: str
    arguments: Raw


class Stop(Message, frozen=True):
    pass


class Deltas(Message, frozen=True):
    """What came of several answers in one turn of the node's loop, by number."""

    items: list[tuple[int, Delta]]


class Events(Message, frozen=True):
    """The same of streamed calls."""

    items: list[tuple[int, bytes]]


class Ended(Message, frozen=True):
    """No more of this answer. problem: what cut it off, if it was."""

    problem: Problem | None = None


class Reply(Message, frozen=True):
    value: Raw = Raw(b"\xc0")
    problem: Problem | None = None


class Reported(Message, frozen=True):
    report: NodeReport


class AdvisoryChanged(Message, frozen=True):
    report: AdvisoryReport


ToNode = Hello | Generate | Call | Notice | Stop
ToGateway = Challenge | Welcome | Deltas | Events | Ended | Reply | Reported | AdvisoryChanged


class Method(NamedTuple):
    """Of `Node`: what it takes and gives."""

    arguments: Any
    result: Any = None


METHODS: dict[str, Method] = {
    # None: events follow.
    "serve": Method(tuple[Api, Any, dict[str, str], RequestContext], JsonReply | None),
    "cancel": Method(tuple[str], bool),
    "advise": Method(tuple[Advisory]),
    "prefill": Method(tuple[GenerateRequest], int),
    "models": Method(tuple[()], JsonReply),
    "api_schemas": Method(tuple[()], ApiSchemas),
    "engine_metrics": Method(tuple[()], str),
    "load_adapter": Method(tuple[Any], JsonReply),
    "unload_adapter": Method(tuple[Any], JsonReply),
    "pin_adapter": Method(tuple[str, bool], AdapterInfo | None),
    "engine_state": Method(tuple[str, int], EngineState),
    "drain": Method(tuple[float], bool),
}
# After these a report comes before the reply.
ADAPTER_METHODS = frozenset({"load_adapter", "unload_adapter", "pin_adapter"})
# Of the node's `adapters.store.AdapterStore`: what the gateway sends of adapters' files.
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
    "close": Method(tuple[()]),
}

# -- bytes -------------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
# What a client's JSON may hold and msgpack cannot: integers of more than 64 bits, halves of surrogate pairs, a thousand brackets.
_UNFIT = (OverflowError, UnicodeEncodeError, TypeError, RecursionError)
# What msgspec raises for bytes that are no message: texts that are not UTF-8 and a thousand brackets are no errors of its own.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_argument_decoders = {
    name: msgspec.msgpack.Decoder(method.arguments) for name, method in (METHODS | NOTICES).items()
}
_result_decoders = {name: msgspec.msgpack.Decoder(method.result) for name, method in METHODS.items()}


class Frame(NamedTuple):
    number: int
    message: Any


def encode(message: Message, number: int = 0) -> bytes:
    """One frame. Raises InvalidRequest for values that msgpack cannot carry."""
    try:
        body = _encoder.encode(message)
    except _UNFIT as error:
        raise InvalidRequest("This request holds a number or a text that cannot be passed on.") from error
    return _HEAD.pack(len(body) + 4, number) + body


def raw(value: Any) -> Raw:
    """A value to be carried as it is. Raises InvalidRequest as `encode` does."""
    try:
        return Raw(_encoder.encode(value))
    except _UNFIT as error:
        raise InvalidRequest("This request holds a number or a text that cannot be passed on.") from error


def arguments_of(message: Call | Notice) -> tuple[Any, ...]:
    """Raises WireError for a method that there is not, or other arguments than it takes."""
    decoder = _argument_decoders.get(message.method)
    if decoder is None or (message.method in METHODS) is not isinstance(message, Call):
        raise WireError("no such method")
    try:
        found: tuple[Any, ...] = decoder.decode(message.arguments)
    except UNREADABLE as error:
        raise WireError("arguments that the method does not take") from error
    return found


def result_of(method: str, reply: Reply) -> Any:
    """Raises the reply's problem, or WireError for what the method does not give."""
    if reply.problem is not None:
        raise error_of(reply.problem)
    try:
        return _result_decoders[method].decode(reply.value)
    except UNREADABLE as error:
        raise WireError("a result that the method does not give") from error


class Frames:
    """Bytes as they come, cut into frames. direction: `ToNode` or `ToGateway`, what the other end may say."""

    def __init__(self, direction: Any) -> None:
        self.max_bytes = MAX_GREETING_BYTES
        self._decoder = msgspec.msgpack.Decoder(direction)
        self._buffer = bytearray()

    def trust(self) -> None:
        """The other end has proved itself."""
        self.max_bytes = MAX_FRAME_BYTES

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now; read all of them. Raises WireError."""
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
        """A `Raw` looks into the buffer, which goes on."""
        if isinstance(message, (Call, Notice)):
            return msgspec.structs.replace(message, arguments=message.arguments.copy())
        if isinstance(message, Reply):
            return msgspec.structs.replace(message, value=message.value.copy())
        return message


# -- proofs ------------------------------------------------------------------------------------------------------------


def proof_of(token: bytes, role: str, nonce: bytes) -> bytes:
    """That an end knows the token, for one challenge. role: `gateway` or `node`, so that none can be sent back."""
    return hmac.digest(token, role.encode() + b":" + nonce, "sha256")


def is_proof(proof: bytes, token: bytes, role: str, nonce: bytes) -> bool:
    """Whether `proof` shows that its sender, in this role, knows the token. Takes equally long for any wrong proof."""
    return hmac.compare_digest(proof, proof_of(token, role, nonce))


# -- errors ------------------------------------------------------------------------------------------------------------

_KINDS: tuple[type[BridgeError], ...] = (
    InvalidRequest,
    EngineUnavailable,
    TooBusy,
    NotSupported,
    RegistryFailed,
    InternalFailure,
)
GONE = Problem(
    "EngineUnavailable",
    "The engine that worked on this answer has failed. Send the request again.",
    code="engine_failed",
)


def problem_of(error: Exception) -> Problem:
    """Other errors than a BridgeError are bugs of the node's: their texts stay there, in its log."""
    for kind in _KINDS:
        if isinstance(error, kind):
            return Problem(
                kind.__name__,
                str(error),
                getattr(error, "code", ""),
                getattr(error, "param", None),
                getattr(error, "retry_after_s", 0.0),
            )
    return Problem("InternalFailure", "The node failed on this request. Its log says why.")


def error_of(problem: Problem) -> BridgeError:
    """The exception that a problem on the wire stands for."""
    match problem.kind:
        case "InvalidRequest":
            return InvalidRequest(problem.message, param=problem.param, code=problem.code)
        case "TooBusy":
            return TooBusy(problem.message, retry_after_s=problem.retry_after_s)
        case "NotSupported":
            return NotSupported(problem.message)
        case "InternalFailure":
            return InternalFailure(problem.message)
        case "RegistryFailed":
            return RegistryFailed(problem.message, code="registry_failed")
        case _:
            return EngineUnavailable(problem.message, code=problem.code or "engine_failed")
