"""The token ids of turns, stored once each."""

from __future__ import annotations

import bisect
import sqlite3
from typing import Final

# A turn keeps only the ids that it added: in front stands, as one more uint32, how many ids of the turns before it its prompt repeats
# (all of them, as a rule; fewer where the chat template rewrote history). So a session holds each id once, 200 turns of 500 tokens
# 400 kB and not 40 MB; turns that an edit deletes take their own ids along, and what is left is the path that the next prompt repeats.
_ID_BYTES: Final = 4
# Chosen: where prompts repeat little of each other (a template that begins with the time), a session may hold this many times the
# ids of its last turn; then that turn keeps all of its own, and those before it none.
_MAX_STORED_RATIO: Final = 4
MAX_SEQ: Final = (1 << 63) - 1  # Behind every turn.


def token_ids_before(conn: sqlite3.Connection, row: int, seq: int) -> bytes:
    """The ids of the turns that stand before `seq`, put together. Turns without any (failed, from the API) add none."""
    sql = "SELECT token_ids FROM turns WHERE session = ? AND seq < ? AND token_ids IS NOT NULL ORDER BY seq"
    ids = bytearray()
    for (added,) in conn.execute(sql, (row, seq)):
        del ids[int.from_bytes(added[:_ID_BYTES], "little") * _ID_BYTES :]
        ids += memoryview(added)[_ID_BYTES:]
    return bytes(ids)


def store_token_ids(conn: sqlite3.Connection, row: int, seq: int, ids: bytes) -> None:
    """Keep `ids`, all that the engine read and wrote up to the end of the turn at `seq`, as what that turn added."""
    before = token_ids_before(conn, row, seq)
    num_same = _num_common_ids(before, ids)
    added = num_same.to_bytes(_ID_BYTES, "little") + ids[num_same * _ID_BYTES :]
    sql = "SELECT coalesce(sum(length(token_ids)), 0) FROM turns WHERE session = ? AND seq < ?"
    if conn.execute(sql, (row, seq)).fetchone()[0] + len(added) > _MAX_STORED_RATIO * len(ids):
        conn.execute("UPDATE turns SET token_ids = NULL WHERE session = ? AND seq < ?", (row, seq))
        added = bytes(_ID_BYTES) + ids
    conn.execute("UPDATE turns SET token_ids = ? WHERE seq = ?", (added, seq))
    # A failed turn that was asked again in its old place: what stands behind it was added to other ids.
    conn.execute("UPDATE turns SET token_ids = NULL WHERE session = ? AND seq > ?", (row, seq))


def _num_common_ids(one: bytes, other: bytes) -> int:
    """With how many equal ids both begin."""
    longest = min(len(one), len(other)) // _ID_BYTES
    return bisect.bisect_left(
        range(1, longest + 1), True, key=lambda n: one[: n * _ID_BYTES] != other[: n * _ID_BYTES]
    )
