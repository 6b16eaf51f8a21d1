"""The turns of a session as a tree: an edit or another answer begins a branch beside what was there, and nothing is lost.

Each turn has a parent, the turn that it follows. Turns with the same parent are the versions of one message, and exactly one of them is
*chosen*. The turns that one meets when going from the start through chosen ones are *shown*: they are the conversation as prompts, pages and
exports have it. Choosing a version changes no choice below it, so what followed it last comes back with it.

The tree has a table of its own. Walking along it therefore reads no texts, and a file of an older version need not have its texts written anew.
A parent is always older than its children and so has the lower `seq`: the turns of one path are in order when they are sorted by it.
"""

from __future__ import annotations

import sqlite3
from typing import Final

START: Final = 0
"""The parent of a turn that follows no other. SQLite numbers rows from 1."""

# `path`: the turn whose `seq` is the first parameter, and all that it follows.
PATH: Final = """WITH RECURSIVE path (seq, parent) AS (SELECT seq, parent FROM tree WHERE seq = ?
    UNION ALL SELECT t.seq, t.parent FROM path JOIN tree t ON t.seq = path.parent)"""
# `below`: the turns that follow the one whose `seq` is the first parameter, on every branch.
BELOW: Final = """WITH RECURSIVE below (seq) AS (SELECT seq FROM tree WHERE (session, parent) IN (SELECT session, seq FROM tree WHERE seq = ?)
    UNION ALL SELECT t.seq FROM below JOIN tree b ON b.seq = below.seq JOIN tree t ON t.session = b.session AND t.parent = b.seq)"""


def shown(which: str) -> str:
    """Return SQL for `shown (session, seq)`: the turns shown of the sessions that `which` selects, "= 5" for example."""
    return f"""WITH RECURSIVE shown (session, seq) AS (SELECT session, seq FROM tree WHERE session {which} AND parent = {START} AND is_chosen
        UNION ALL SELECT t.session, t.seq FROM shown JOIN tree t ON t.session = shown.session AND t.parent = shown.seq AND t.is_chosen)"""


def tip(conn: sqlite3.Connection, session: int) -> int:
    """Return the last turn shown of a session; START if it has none."""
    return int(
        conn.execute(f"{shown('= ?')} SELECT ifnull(max(seq), {START}) FROM shown", (session,)).fetchone()[0]
    )


def parent_of(conn: sqlite3.Connection, seq: int) -> int:
    """Return the turn that this one follows, or START."""
    return int(conn.execute("SELECT parent FROM tree WHERE seq = ?", (seq,)).fetchone()[0])


def add(conn: sqlite3.Connection, session: int, seq: int, parent: int) -> None:
    """Let a turn that was just stored follow `parent` (START: none), and show it."""
    sql = "INSERT INTO tree (seq, session, parent, is_chosen) VALUES (?, ?, ?, 0)"
    conn.execute(sql, (seq, session, parent))
    choose(conn, session, seq)


def choose(conn: sqlite3.Connection, session: int, seq: int) -> None:
    """Show a turn: choose it and every turn that it follows."""
    conn.execute(
        f"""{PATH} UPDATE tree SET is_chosen = 0 WHERE session = ? AND is_chosen AND parent IN (SELECT parent FROM path)
            AND seq NOT IN (SELECT seq FROM path)""",
        (seq, session),
    )
    conn.execute(
        f"{PATH} UPDATE tree SET is_chosen = 1 WHERE seq IN (SELECT seq FROM path) AND NOT is_chosen", (seq,)
    )


def remove(conn: sqlite3.Connection, session: int, seq: int) -> None:
    """Remove a turn that is about to be deleted. The turns that follow it then follow its parent."""
    parent, was_chosen = conn.execute("SELECT parent, is_chosen FROM tree WHERE seq = ?", (seq,)).fetchone()
    heir = conn.execute(
        "SELECT seq FROM tree WHERE session = ? AND parent = ? AND is_chosen", (session, seq)
    ).fetchone()
    conn.execute("DELETE FROM tree WHERE seq = ?", (seq,))
    conn.execute(
        "UPDATE tree SET parent = ?, is_chosen = 0 WHERE session = ? AND parent = ?", (parent, session, seq)
    )
    if not was_chosen:
        return
    if heir is None:
        sql = "SELECT seq FROM tree WHERE session = ? AND parent = ? ORDER BY seq DESC LIMIT 1"
        heir = conn.execute(sql, (session, parent)).fetchone()
    if heir is not None:
        conn.execute("UPDATE tree SET is_chosen = 1 WHERE seq = ?", heir)
