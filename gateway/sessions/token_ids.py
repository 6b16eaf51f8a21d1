"""The token ids of turns, stored once each."""

from __future__ import annotations

import bisect
import sqlite3
from typing import Final

from gateway.sessions.tree import BELOW, PATH, parent_of

# A turn keeps only the ids that it added. One more uint32 in front counts the ids of earlier turns that its prompt repeats (all of them, as a
# rule; fewer where the chat template rewrote history). So a session holds each id once, 200 turns of 500 tokens 400 kB and not 40 MB, and
# each version of a message continues the ids of the turns before it.
_ID_BYTES: Final = 4
# Chosen: where prompts repeat little of each other (a template that begins with the time), a path may hold this many times the
# ids of its last turn; beyond that the last turn keeps all its ids, and the other turns of the session keep none.
_MAX_STORED_RATIO: Final = 4


def token_ids_up_to(conn: sqlite3.Connection, last: int) -> bytes:
    """Return the ids of the turn `last` and of the turns that it follows, put together. Failed turns and some of the API have none."""
    sql = f"{PATH} SELECT token_ids FROM path JOIN turns USING (seq) WHERE token_ids IS NOT NULL ORDER BY seq"
    ids = bytearray()
    for (added,) in conn.execute(sql, (last,)):
        del ids[int.from_bytes(added[:_ID_BYTES], "little") * _ID_BYTES :]
        ids += memoryview(added)[_ID_BYTES:]
    return bytes(ids)


def store_token_ids(conn: sqlite3.Connection, row: int, seq: int, ids: bytes) -> None:
    """Store what a turn added to the token ids of its session.

    Args:
        conn: the writer's connection.
        row: of the session.
        seq: of the turn.
        ids: all ids that the engine read and wrote up to the end of the turn at `seq`, as little-endian uint32.
    """
    parent = parent_of(conn, seq)
    before = token_ids_up_to(conn, parent)
    num_same = _num_common_ids(before, ids)
    added = num_same.to_bytes(_ID_BYTES, "little") + ids[num_same * _ID_BYTES :]
    sql = f"{PATH} SELECT coalesce(sum(length(token_ids)), 0) FROM path JOIN turns USING (seq)"
    if conn.execute(sql, (parent,)).fetchone()[0] + len(added) > _MAX_STORED_RATIO * len(ids):
        # Ids of other branches are removed, too, because they continue ids that no longer exist.
        conn.execute("UPDATE turns SET token_ids = NULL WHERE session = ?", (row,))
        added = bytes(_ID_BYTES) + ids
    conn.execute("UPDATE turns SET token_ids = ? WHERE seq = ?", (added, seq))
    drop_token_ids_below(conn, seq)


def drop_token_ids_below(conn: sqlite3.Connection, seq: int) -> None:
    """Remove the ids of the turns that follow a turn, because the ids that they continue have changed."""
    conn.execute(f"{BELOW} UPDATE turns SET token_ids = NULL WHERE seq IN (SELECT seq FROM below)", (seq,))


def _num_common_ids(one: bytes, other: bytes) -> int:
    """Return with how many equal ids both begin."""
    longest = min(len(one), len(other)) // _ID_BYTES
    return bisect.bisect_left(
        range(1, longest + 1), True, key=lambda n: one[: n * _ID_BYTES] != other[: n * _ID_BYTES]
    )
