"""A chat turn under way: its answer so far, and who follows it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from engine_bridge.protocol.engine_request import RequestId
from gateway.errors import GatewayError
from gateway.sessions import Turn

log = logging.getLogger(__name__)


class Follower(Protocol):
    """A socket that wants to know when a turn has more to send."""

    def wake(self, turn: LiveTurn) -> None:
        """Note that the turn has more to send, or is over."""


class AnswerPiece(NamedTuple):
    """A piece of an answer as the engine gave it: text, reasoning before it, or the end of the reasoning and the beginning of the text."""

    text: str
    reasoning: str = ""

    @classmethod
    def joined(cls, pieces: Iterable[AnswerPiece]) -> AnswerPiece:
        """Return these pieces as one."""
        pieces = list(pieces)
        return cls("".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces))


class LiveTurn:
    """A turn under way, or over for less than KEEP_FINISHED_S.

    Attributes:
        pieces: the answer and its reasoning so far.
        base_seq: `seq` of the protocol counts from here; 0 for the first try at a turn. A socket that has seen text up to there has seen the pieces
            of an earlier try, or of the answer before it was read back from disk.
        done: the fields of its `done` frame once it is over and stored.
        error: the error that ended it instead.
        generated: ids of the tokens that the engine made, which may spell more than the pieces (a stop string, half a character).
    """

    __slots__ = (
        "base_seq",
        "done",
        "error",
        "followers",
        "generated",
        "id",
        "owner",
        "pieces",
        "question",
        "request_id",
        "session_id",
        "title",
        "unfollowed",
        "versions",
    )

    def __init__(self, owner: str, session_id: str, turn: Turn, title: str | None) -> None:
        self.owner = owner
        self.session_id = session_id
        self.id: str = turn.id
        self.question = turn
        self.title = title
        self.versions = turn.versions
        self.request_id = RequestId(f"turn-{uuid.uuid4().hex}")
        self.pieces: list[AnswerPiece] = []
        self.generated: list[int] = []
        self.base_seq = 0
        self.done: dict[str, Any] | None = None
        self.error: GatewayError | None = None
        self.followers: set[Follower] = set()
        self.unfollowed: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """Whether the turn has ended, and how it ended is stored."""
        return self.done is not None or self.error is not None

    @property
    def seq(self) -> int:
        """The `seq` of a socket that has all pieces so far."""
        return self.base_seq + len(self.pieces)

    def can_resume(self, seq: int) -> bool:
        """Return whether a socket that has seen up to `seq` can go on from there without loss or repetition."""
        return seq == 0 or self.base_seq < seq <= self.seq

    def after(self, seq: int) -> AnswerPiece:
        """Return all pieces, as one, that a socket which has seen up to `seq` (see `can_resume`) has not seen yet."""
        return AnswerPiece.joined(self.pieces[max(seq - self.base_seq, 0) :])

    @property
    def whole(self) -> AnswerPiece:
        """The pieces so far, as one."""
        return AnswerPiece.joined(self.pieces)

    def wake_followers(self) -> None:
        """Tell all sockets that follow the answer that there is more of it."""
        for follower in list(self.followers):
            try:
                follower.wake(self)
            except Exception:
                log.exception("a socket could not be told of more of %s", self.request_id)
