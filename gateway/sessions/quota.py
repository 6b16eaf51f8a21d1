"""What each owner may store: triggers of the schema count the bytes, and `check` is called before anything is stored."""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.sessions.connection import Database

RESTORE_WINDOW_S: Final = 30.0  # docs/protocol.md, DELETE /api/sessions/{id}.

_MIB: Final = 1 << 20
# What can no longer be restored counts no more, though the sweeper may take a minute to remove it.
_COUNTED = """SELECT o.num_bytes - ifnull((SELECT sum(s.num_bytes) FROM sessions s
    WHERE s.owner = o.name AND s.deleted_at IS NOT NULL AND s.deleted_at < ?), 0) FROM owners o WHERE o.name = ?"""


def check(conn: Database, owner: str, added_bytes: int, now: float) -> None:
    """Refuse to store more than the owner may.

    The answer of an accepted message is always kept, so an owner can exceed the limit by the length of its last answers.

    Raises:
        GatewayError: `quota_exceeded`.
    """
    limit = conn.max_bytes_of(owner)
    if limit and stored_bytes(conn, owner, now) + added_bytes > limit:
        raise GatewayError(
            "quota_exceeded",
            f"Your conversations take all of the {limit // _MIB} MiB that this server keeps for you (--max-stored-mib, or your own limit). Delete "
            f"conversations that you no longer need: {RESTORE_WINDOW_S:.0f} s later their room is yours again.",
        )


def stored_bytes(conn: Database, owner: str, now: float) -> int:
    """Return the bytes of the owner's conversations, deleted ones included while they can be restored."""
    found = conn.execute(_COUNTED, (now - RESTORE_WINDOW_S, owner)).fetchone()
    return 0 if found is None else int(found[0])


def size_of(text: str) -> int:
    """Return the bytes that a text takes when stored."""
    return len(text) if text.isascii() else len(text.encode())
