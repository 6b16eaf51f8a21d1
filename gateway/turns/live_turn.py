"""A chat turn under way: its answer so far, and who follows it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from engine_bridge.protocol.engine_request import RequestId
from engine_bridge.protocol.node import Delta
from gateway.errors import GatewayError
from gateway.sessions import Turn, TurnCall
from gateway.turns.protocol import Permission

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# Chosen: what was cancelled ends at once; what does not is left to itself.
END_WORK_S = 1.0


class Follower(Protocol):
    """A socket that wants to know when a turn has more to send."""

    def wake(self, turn: LiveTurn) -> None:
        """Note that the turn has more to send, or is over."""


class AnswerPiece(NamedTuple):
    """A piece of an answer: text and reasoning as the engine gave them, or calls of tools that are new or stand differently now."""

    text: str
    reasoning: str = ""
    calls: tuple[TurnCall, ...] = ()

    @classmethod
    def joined(cls, pieces: Iterable[AnswerPiece]) -> AnswerPiece:
        """Return these pieces as one. Of each call it has the latest state."""
        pieces = list(pieces)
        calls = {call.id: call for piece in pieces for call in piece.calls}
        return cls(
            "".join(piece.text for piece in pieces),
            "".join(piece.reasoning for piece in pieces),
            tuple(calls.values()),
        )


class LiveTurn:
    """A turn under way, or over for less than KEEP_FINISHED_S.

    Attributes:
        pieces: the answer and its reasoning so far.
        base_seq: `seq` of the protocol counts from here; 0 for the first try at a turn. A socket that has seen text up to there has seen the pieces
            of an earlier try, or of the answer before it was read back from disk.
        done: the fields of its `done` frame once it is over and stored.
        error: the error that ended it instead.
        generated: ids of the tokens that the engine made in this round, which may spell more than the pieces (a stop string, half a character).
        final: the last delta of this round, so far.
        earlier: the last deltas of earlier rounds, each of which ended with calls of tools.
        is_stopped: set when somebody wishes the answer to end.
        questions: by the id of a call, what the person is asked before it.
        called_s: when the first call of this round was made, in monotonic seconds; None before.
        advisory: what the advisory before the turn was worth, of a turn that has called tools: later ones are of its own rounds.
    """

    __slots__ = (
        "advisory",
        "base_seq",
        "called_s",
        "done",
        "earlier",
        "error",
        "final",
        "followers",
        "generated",
        "id",
        "is_stopped",
        "owner",
        "pieces",
        "question",
        "questions",
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
        self.final: Delta | None = None
        self.earlier: list[Delta] = []
        self.is_stopped = asyncio.Event()
        self.questions: dict[str, asyncio.Future[Permission]] = {}
        self.called_s: float | None = None
        self.advisory: dict[str, Any] | None = None
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
    def has_called(self) -> bool:
        """Whether a round of the answer has ended with calls of tools."""
        return bool(self.earlier) or (self.final is not None and bool(self.final.calls))

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

    def add(self, piece: AnswerPiece) -> None:
        """Add to the answer, and tell its followers."""
        self.pieces.append(piece)
        self.wake_followers()

    async def unless_stopped(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Return what `work` returns; None where the answer was stopped before, which ends the work. Raises what it raises."""
        doing, stopping = asyncio.create_task(work), asyncio.create_task(self.is_stopped.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
        finally:
            stopping.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait({doing}, timeout=END_WORK_S)
        return None

    def wake_followers(self) -> None:
        """Tell all sockets that follow the answer that there is more of it."""
        for follower in list(self.followers):
            try:
                follower.wake(self)
            except Exception:
                log.exception("a socket could not be told of more of %s", self.request_id)
