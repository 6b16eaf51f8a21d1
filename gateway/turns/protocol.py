"""The chat socket's frames as data: text in, structs out, and back. No I/O, no state. Source: docs/protocol.md."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engine_bridge.protocol.node import Sampling
from gateway.errors import GatewayError

PROTOCOL_VERSION = 1
MAX_PARSED_BYTES = 4096  # Chosen: a clock or a counter takes ten.

TurnName = Annotated[str, Meta(min_length=1, max_length=128)]
SessionName = Annotated[str, Meta(min_length=1, max_length=128)]


class Resume(Struct, frozen=True):
    """A turn that was under way on another socket, and the last `seq` seen of it."""

    id: TurnName
    seq: Annotated[int, Meta(ge=0)] = 0


class Hello(Struct, frozen=True, tag="hello"):
    session_id: SessionName | None = None
    resume: Annotated[list[Resume], Meta(max_length=64)] = []
    api_key: str | None = None


class Message(Struct, frozen=True, tag="message"):
    id: TurnName
    content: Annotated[str, Meta(min_length=1)]
    session_id: SessionName | None = None
    adapter: str | None | UnsetType = UNSET
    sampling: Sampling = Sampling()
    after: TurnName | None | UnsetType = UNSET
    priority: int | None = None


class Stop(Struct, frozen=True, tag="stop"):
    id: TurnName


class Typing(Struct, frozen=True, tag="typing"):
    session_id: SessionName | None = None
    adapter: str | None = None
    draft: str | None = None


class WatchEngine(Struct, frozen=True, tag="watch_engine"):
    on: bool = True


class WatchList(Struct, frozen=True, tag="watch_list"):
    pass


class Ping(Struct, frozen=True, tag="ping"):
    """t: any JSON value, to be given back. One of more than MAX_PARSED_BYTES stays `Raw`: a million values take long to make."""

    t: Any = None


class _RawPing(Struct, frozen=True, tag="ping"):
    t: msgspec.Raw = msgspec.Raw(b"null")


ClientFrame = Hello | Message | Stop | Typing | WatchEngine | WatchList | Ping


class _Named(Struct, frozen=True):
    """What of a frame is read only to name it: a frame that holds a million values costs no more than its bytes."""

    id: str | None = None


_decoder = msgspec.json.Decoder(Hello | Message | Stop | Typing | WatchEngine | WatchList | _RawPing)
_encoder = msgspec.json.Encoder()


def decode(data: str | bytes, max_bytes: int) -> ClientFrame:
    """A frame from the client. Raises GatewayError `frame_too_large` or `bad_request` with the field at fault."""
    if len(data) > max_bytes or (isinstance(data, str) and len(data.encode("utf-8", "replace")) > max_bytes):
        raise GatewayError("frame_too_large", f"A frame may hold {max_bytes} bytes at most.")
    try:
        frame = _decoder.decode(data)
        return _ping(frame.t) if isinstance(frame, _RawPing) else frame
    except msgspec.ValidationError as error:
        raise GatewayError("bad_request", f"The frame was not understood: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise GatewayError("bad_request", "The frame is not a JSON object.") from error


def _ping(t: msgspec.Raw) -> Ping:
    return Ping(msgspec.json.decode(t) if len(memoryview(t)) <= MAX_PARSED_BYTES else t)


def frame_id(data: str | bytes) -> str | None:
    """The `id` of a frame that could not be decoded, so that its error can name the turn; None if it has none."""
    try:
        return msgspec.json.decode(data, type=_Named).id
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def encode(frame: dict[str, Any]) -> bytes:
    """A frame to the client."""
    return _encoder.encode(frame)
