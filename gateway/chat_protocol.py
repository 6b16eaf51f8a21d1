"""The chat socket's frames as data: text in, structs out, and back. No I/O, no state. Source: docs/protocol.md."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engine_bridge.node import Sampling
from gateway.errors import GatewayError

PROTOCOL_VERSION = 1

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
    t: Any = None


ClientFrame = Hello | Message | Stop | Typing | WatchEngine | WatchList | Ping

_decoder: msgspec.json.Decoder[ClientFrame] = msgspec.json.Decoder(ClientFrame)
_encoder = msgspec.json.Encoder()


def decode(data: str | bytes, max_bytes: int) -> ClientFrame:
    """A frame from the client. Raises GatewayError `frame_too_large` or `bad_request` with the field at fault."""
    if len(data) > max_bytes or (isinstance(data, str) and len(data.encode("utf-8", "replace")) > max_bytes):
        raise GatewayError("frame_too_large", f"A frame may hold {max_bytes} bytes at most.")
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise GatewayError("bad_request", f"The frame was not understood: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise GatewayError("bad_request", "The frame is not a JSON object.") from error


def frame_id(data: str | bytes) -> str | None:
    """The `id` of a frame that could not be decoded, so that its error can name the turn; None if it has none."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    name = value.get("id") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


def encode(frame: dict[str, Any]) -> bytes:
    """A frame to the client."""
    return _encoder.encode(frame)
