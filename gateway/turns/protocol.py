"""The chat socket's frames as data: text in, structs out, and back. No I/O, no state. Source: docs/protocol.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engine_bridge.protocol.engine_request import Sampling
from gateway.errors import GatewayError
from gateway.half_characters import without_halves
from gateway.json_shape import shape_of

PROTOCOL_VERSION = 1
MAX_PARSED_BYTES = 4096  # Chosen: a clock or a counter takes ten.
MAX_MENDED_VALUES = (
    1024  # Chosen: a message has some ten, and a `hello` that resumes as many turns as it may 130.
)

MAX_TRACEPARENT_CHARS = 64  # W3C Trace Context: 55, of the version that there is.

TurnName = Annotated[str, Meta(min_length=1, max_length=128)]
PictureName = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_PICTURES = 64  # Chosen: a frame names no more; the model's own bound is lower as a rule.
SessionName = Annotated[str, Meta(min_length=1, max_length=128)]
# What a person says to a tool: this once, in this conversation from now on, or no.
Permission = Literal["once", "always", "never"]


class Resume(Struct, frozen=True):
    """A turn that was under way on another socket, and the last `seq` seen of it."""

    id: TurnName
    seq: Annotated[int, Meta(ge=0)] = 0


class Hello(Struct, frozen=True, tag="hello"):
    """The first frame of a socket."""

    session_id: SessionName | None = None
    resume: Annotated[list[Resume], Meta(max_length=64)] = []
    api_key: str | None = None


class Message(Struct, frozen=True, tag="message"):
    """A question.

    pictures: ids of stored pictures that it shows; with some the text may be empty. continues: the known turn of this id goes on, as its answer was
    cut.
    """

    id: TurnName
    content: str
    session_id: SessionName | None = None
    adapter: str | None | UnsetType = UNSET
    sampling: Sampling = Sampling()
    after: TurnName | None | UnsetType = UNSET
    priority: int | None = None
    continues: bool = False
    pictures: Annotated[list[PictureName], Meta(max_length=MAX_PICTURES)] = []
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT_CHARS)] = ""


class Stop(Struct, frozen=True, tag="stop"):
    """The end of an answer, wished by its client."""

    id: TurnName


class Typing(Struct, frozen=True, tag="typing"):
    """Word that a question is being typed."""

    session_id: SessionName | None = None
    adapter: str | None = None
    draft: str | None = None


class Allow(Struct, frozen=True, tag="allow"):
    """What a person says to a tool that an answer would use. id: the turn. call: the call's id."""

    id: TurnName
    call: Annotated[str, Meta(min_length=1, max_length=200)]
    answer: Permission


class WatchEngine(Struct, frozen=True, tag="watch_engine"):
    """A wish to see the engine room, or no longer."""

    on: bool = True


class WatchList(Struct, frozen=True, tag="watch_list"):
    """A wish to hear of changes in the list of conversations."""

    pass


class Ping(Struct, frozen=True, tag="ping"):
    """A sign of life. t: any JSON value, to be given back. A value of more than MAX_PARSED_BYTES stays `Raw`: a million values take long to make."""

    t: Any = None


class _RawPing(Struct, frozen=True, tag="ping"):
    t: msgspec.Raw = msgspec.Raw(b"null")


ClientFrame = Hello | Message | Stop | Allow | Typing | WatchEngine | WatchList | Ping


class _Named(Struct, frozen=True):
    """The part of a frame by which it is named: reading it costs no more than the frame's bytes, whatever else the frame holds."""

    id: str | None = None


_decoder = msgspec.json.Decoder(Hello | Message | Stop | Allow | Typing | WatchEngine | WatchList | _RawPing)
_encoder = msgspec.json.Encoder()


def decode(data: str | bytes, max_bytes: int) -> ClientFrame:
    """Return a frame from the client. Raises GatewayError `frame_too_large` or `bad_request` with the field at fault."""
    if len(data) > max_bytes or (isinstance(data, str) and len(data.encode("utf-8", "replace")) > max_bytes):
        raise GatewayError("frame_too_large", f"A frame may hold {max_bytes} bytes at most.")
    try:
        frame = _frame(data)
        if isinstance(frame, Message) and not frame.content and not frame.pictures:
            raise GatewayError("bad_request", "A message needs a text or a picture.", param="content")
        return _ping(frame.t) if isinstance(frame, _RawPing) else frame
    except msgspec.ValidationError as error:
        raise GatewayError("bad_request", f"The frame was not understood: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise GatewayError("bad_request", "The frame is not a JSON object.") from error


def _frame(data: str | bytes) -> Any:
    """Return what a frame says, with half characters replaced where it has a few values only: it is read on the event loop."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
        whole = without_halves(raw) if shape_of(raw).num_values <= MAX_MENDED_VALUES else None
        if whole is None:
            raise
    return _decoder.decode(whole)


def _ping(t: msgspec.Raw) -> Ping:
    return Ping(msgspec.json.decode(t) if len(memoryview(t)) <= MAX_PARSED_BYTES else t)


def frame_id(data: str | bytes) -> str | None:
    """Return the `id` of a frame that could not be decoded, so that its error can name the turn; None if it has none."""
    try:
        return msgspec.json.decode(data, type=_Named).id
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def encode(frame: dict[str, Any]) -> bytes:
    """Return a frame to the client as JSON."""
    return _encoder.encode(frame)
