"""Frames of the chat socket (docs/protocol.md), as structs: those that the client sends and takes, and the events for its user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType


class ChatError(Exception):
    """A question, or the whole connection, failed.

    code: one of the protocol's, or the client's own `unreachable`. retryable: the same question may succeed later. retry_after_s: seconds after
    which to try again, if the server knows.
    """

    def __init__(
        self, code: str, message: str, retryable: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class KvSources(Struct, frozen=True):
    """Prompt tokens by the tier that their KV came from."""

    device: int = 0
    host: int = 0
    disk: int = 0
    recomputed: int = 0
    peer: int = 0
    """Fetched from another node."""


class Usage(Struct, frozen=True):
    """Token counts of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Timings(Struct, frozen=True):
    """Durations of one answer as the server measured them, in ms. `tpot_ms` is None for a single token."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    kv: KvSources = KvSources()


class Turn(Struct, frozen=True):
    """One user message with its answer, from a session's history."""

    id: str
    content: str = ""
    answer: str = ""
    status: str = "done"
    adapter: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    created_at: float = 0.0
    versions: tuple[str, ...] = ()
    """Ids of all turns that follow the same turn as this one, its own among them, oldest first."""


class Session(Struct, frozen=True):
    """A conversation with the turns that are shown. Times in seconds since the epoch."""

    id: str
    title: str | None = None
    adapter: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    turns: tuple[Turn, ...] = ()


class Model(Struct, frozen=True):
    """The base model (`adapter` false) or one of its adapters."""

    id: str
    adapter: bool = False
    rank: int | None = None


class Ready(Struct, frozen=True, tag_field="type", tag="ready"):
    """The server's greeting. session: the session that the hello has opened; None if it named none."""

    protocol: int = 1
    session: Session | None = None
    models: tuple[Model, ...] = ()
    server: Mapping[str, Any] = {}


class Accepted(Struct, frozen=True, tag_field="type", tag="accepted"):
    """The question is stored. Comes at most once for an `ask`, before its first `Delta`; a dropped socket may swallow it."""

    id: str
    session_id: str
    title: str | None = None
    versions: tuple[str, ...] = ()
    """As for `Turn`."""


class Delta(Struct, frozen=True, tag_field="type", tag="delta"):
    """A piece of the answer, or of what the model thinks before it. `seq` counts the engine's pieces up to here."""

    id: str
    seq: int
    text: str
    reasoning: str = ""


class Restarted(Struct, frozen=True):
    """The server lost the answer and began it anew: forget the text so far, the new one follows."""

    id: str


class Done(Struct, frozen=True, tag_field="type", tag="done"):
    """The answer is complete and on the server's disk. `finish_reason`: "stop", "length" or "stopped"."""

    id: str
    session_id: str
    seq: int = 0
    finish_reason: str | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    title: str | None = None


class ErrorFrame(Struct, frozen=True, tag_field="type", tag="error"):
    """An error that the server sends. id: the turn that it ends, if any."""

    code: str
    message: str = ""
    retryable: bool = False
    retry_after_s: float | None = None
    id: str | None = None

    def as_exception(self) -> ChatError:
        """Return the error as an exception."""
        return ChatError(self.code, self.message or self.code, self.retryable, self.retry_after_s)


class Hello(Struct, frozen=True, tag_field="type", tag="hello", omit_defaults=True):
    """The first frame of a socket. resume: turns under way, with the pieces received."""

    session_id: str | None = None
    resume: list[dict[str, Any]] = []


class Message(Struct, frozen=True, tag_field="type", tag="message"):
    """A question."""

    id: str
    content: str
    session_id: str | UnsetType = UNSET
    adapter: str | None | UnsetType = UNSET
    sampling: Mapping[str, Any] | UnsetType = UNSET
    after: str | None | UnsetType = UNSET
    continues: bool | UnsetType = UNSET
    pictures: list[str] | UnsetType = UNSET


class Stop(Struct, frozen=True, tag_field="type", tag="stop"):
    """A request to end an answer."""

    id: str


class Typing(Struct, frozen=True, tag_field="type", tag="typing"):
    """Word that the user types in a session."""

    session_id: str
    adapter: str | None | UnsetType = UNSET
    draft: str | UnsetType = UNSET


Event: TypeAlias = Accepted | Delta | Restarted | Done
Incoming: TypeAlias = Ready | Accepted | Delta | Done | ErrorFrame
decoder: msgspec.json.Decoder[Incoming] = msgspec.json.Decoder(Ready | Accepted | Delta | Done | ErrorFrame)
encoder = msgspec.json.Encoder()


def without_halves(text: str) -> str:
    """Return a text that a frame can hold: with a question mark for each half character, and for each byte of a terminal that is no UTF-8."""
    return text.encode("utf-8", "replace").decode()
