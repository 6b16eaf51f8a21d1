"""Conversations on disk: sessions, their turns and the search over them, in one SQLite file.

What the rest of the gateway may rely on:

* A method that returned has its changes on disk (WAL with ``synchronous=FULL``: the commit is synced before it returns).
* A method that raised changed nothing. A *cancelled* one may or may not have taken effect: shield what must be known.
* Each method is one transaction, run as one plain function on the connection's own thread. Transactions never interleave, and the event
  loop never waits for the disk.
* An owner sees its own sessions only; another's are answered as if they did not exist.

Reads go to a second connection, searches to a third: under WAL they see the last commit and never wait for a writer's sync. Times are seconds
since the epoch and are always passed in. Every method raises GatewayError: ``overloaded`` when the disk is full or the file locked by another
program, ``draining`` after ``close``, ``storage_failed`` when the file went bad under a running server, ``quota_exceeded`` where an owner has
stored all that it may.
"""

from gateway.sessions.quota import RESTORE_WINDOW_S
from gateway.sessions.records import (
    BeginResult,
    FinishResult,
    NextPrompt,
    Origin,
    PictureRoom,
    ResponseHistory,
    Session,
    SessionId,
    SessionSettings,
    SessionSummary,
    SettingsPatch,
    StoredPicture,
    StoredResponse,
    Turn,
    TurnCall,
    TurnId,
    TurnStatus,
    answer_messages,
    messages_of,
    question_of,
)
from gateway.sessions.schema import SCHEMA_VERSION
from gateway.sessions.store import SessionStore
from gateway.sessions.text import checked_id, clean_text, title_from

__all__ = [
    "RESTORE_WINDOW_S",
    "SCHEMA_VERSION",
    "BeginResult",
    "FinishResult",
    "NextPrompt",
    "Origin",
    "PictureRoom",
    "ResponseHistory",
    "Session",
    "SessionId",
    "SessionSettings",
    "SessionStore",
    "SessionSummary",
    "SettingsPatch",
    "StoredPicture",
    "StoredResponse",
    "Turn",
    "TurnCall",
    "TurnId",
    "TurnStatus",
    "answer_messages",
    "checked_id",
    "clean_text",
    "messages_of",
    "question_of",
    "title_from",
]
