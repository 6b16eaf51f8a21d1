"""The search index: one FTS5 table for each owner, so that a search reads no other owner's texts.

With one index for all, a search first finds every owner's texts and then leaves others' out: its time tells whether another owner wrote a phrase
(17 ms for one in 5,000 of another's turns, 1 ms for one never written). The tables hold no text of their own (`content=''`), and FTS5 removes a
document by the text that it had, so these functions are called before a text changes as well as after.

A title is the document `2 * session + 1`, a turn the document `2 * turn`. A turn enters when it is over: indexing a 4 kB text takes 3 ms and a 1
MB text 340 ms (measured, 2 cores), too long to stand between a message and its first token, and long enough to do it only once.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from gateway.errors import GatewayError
from gateway.sessions import tree
from gateway.sessions.connection import Database, transaction
from gateway.sessions.records import Excerpt, TurnId

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

TRIGRAM_CHARS: Final = 3  # The trigram index finds nothing shorter.
SAY_EVERY_S: Final = 2.0  # Chosen: a start that takes longer than this says how far it is.
MAX_SEARCHES: Final = 2  # Chosen: of one owner, under way or waiting; all owners share one thread.
MAX_SEARCH_S: Final = 5.0  # Chosen: reading a gigabyte of texts takes seconds, and others wait for it.
RETRY_AFTER_S: Final = 1.0  # Chosen: most searches are over by then.
_LOOK_EVERY_STEPS: Final = 1000  # Chosen: of SQLite's machine, between two looks at the clock.
_MERGE_PAGES: Final = 100  # Chosen: 20 ms of the writer's time, measured.
MATCH_CHARS: Final = 120  # Chosen: a longer match fills the place where an excerpt is shown.
BEFORE_CHARS: Final = 30  # Chosen: the match stands near the start, where a narrow list still shows it.
WINDOW_CHARS: Final = 500  # Before a place in a text, and three times as many after it: more than the longest query and an excerpt.
AFTER_CHARS: Final = 90  # Chosen: about three lines of the page's list together with what stands before.
_BUILD_TURNS: Final = 100  # Chosen: how many turns are indexed between two looks at the clock.

_TURN_IS_OVER = "status <> 'running'"
_BY_INDEX = """ AND s.row IN (WITH hits (id) AS MATERIALIZED (SELECT rowid FROM {table} WHERE {table} MATCH ?)
    SELECT id >> 1 FROM hits WHERE id & 1 UNION SELECT t.session FROM hits JOIN turns t ON t.seq = hits.id >> 1 WHERE NOT hits.id & 1)"""
_FOUND_BY_INDEX = """SELECT t.session, t.id, t.seq FROM (SELECT rowid AS document FROM {table} WHERE {table} MATCH ?)
    JOIN turns t ON t.seq = document >> 1 WHERE NOT document & 1 AND t.session IN ({sessions})"""
_FOUND_BY_READING = rf"""SELECT t.session, t.id, t.seq FROM turns t WHERE t.session IN ({{sessions}}) AND t.{_TURN_IS_OVER}
    AND (t.content LIKE ? ESCAPE '\' OR t.answer LIKE ? ESCAPE '\')"""
_BY_READING = rf""" AND (s.title LIKE ? ESCAPE '\' OR EXISTS (SELECT 1 FROM turns t WHERE t.session = s.row AND t.{_TURN_IS_OVER}
    AND (t.content LIKE ? ESCAPE '\' OR t.answer LIKE ? ESCAPE '\')))"""


class SearchOwner(NamedTuple):
    """An owner of sessions. row: of the table `owners`. is_indexed: whether the owner's search table holds all its texts."""

    row: int
    is_indexed: bool


class Search:
    """One search of one client."""

    has_left = False
    """Whether the client has left, so that the search may end."""


class Searches:
    """The searches under way or waiting. Used on the event loop only."""

    def __init__(self) -> None:
        self._num_of: Counter[str] = Counter()

    @contextmanager
    def enter(self, owner: str) -> Iterator[Search]:
        """Hold a place for a search of this owner while the context is open. Raises GatewayError `rate_limited`."""
        if self._num_of[owner] >= MAX_SEARCHES:
            raise GatewayError(
                "rate_limited",
                f"{MAX_SEARCHES} searches with this key are under way already: wait for one to end.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_of[owner] += 1
        one = Search()
        try:
            yield one
        finally:
            one.has_left = True
            self._num_of[owner] -= 1
            if not self._num_of[owner]:
                del self._num_of[owner]


def bounded(conn: sqlite3.Connection, one: Search, work: Callable[..., _T], *args: Any) -> _T:
    """Run ``work(conn, *args)`` and return its result.

    Raises:
        GatewayError: `rate_limited` when it took longer than MAX_SEARCH_S or its client has left.
    """
    until_s = time.monotonic() + MAX_SEARCH_S
    too_long = GatewayError(
        "rate_limited",
        f"The search took longer than {MAX_SEARCH_S:g} s: search for {TRIGRAM_CHARS} characters or more, or delete conversations.",
        retryable=False,
    )
    if one.has_left:
        raise too_long  # The client has left, so any error will do.
    conn.set_progress_handler(lambda: one.has_left or time.monotonic() >= until_s, _LOOK_EVERY_STEPS)
    try:
        return work(conn, *args)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        raise too_long from None
    finally:
        conn.set_progress_handler(None, 0)


def table_of(owner: int) -> str:
    """Return the name of an owner's search table."""
    return f"search_{owner:d}"


def find_owner(conn: sqlite3.Connection, name: str) -> SearchOwner | None:
    """Return the owner of this name; None if the owner never stored anything."""
    found = conn.execute("SELECT row, is_indexed FROM owners WHERE name = ?", (name,)).fetchone()
    return None if found is None else SearchOwner(found[0], bool(found[1]))


def make_owner(conn: Database, name: str) -> SearchOwner:
    """Return the owner of this name; a new one is made, with a search table if this process keeps an index."""
    owner = find_owner(conn, name)
    if owner is not None:
        return owner
    row = conn.execute("INSERT INTO owners (name) VALUES (?)", (name,)).lastrowid
    assert row is not None
    if conn.is_indexing:
        _make_table(conn, row)
        conn.execute("UPDATE owners SET is_indexed = 1 WHERE row = ?", (row,))
    return SearchOwner(row, conn.is_indexing)


def condition(owner: SearchOwner, q: str) -> tuple[str, list[str]]:
    """Return the SQL condition on a session `s` that finds `q`, and its arguments.

    The text is quoted for both query languages, so that nothing in it is an operator.
    """
    if _uses_index(owner, q):
        return _BY_INDEX.format(table=table_of(owner.row)), [_phrase(q)]
    return _BY_READING, [_pattern(q)] * 3


class Found(NamedTuple):
    """The turn in which a search found its text, and the words around it."""

    turn_id: TurnId
    excerpt: Excerpt | None


def found_in(
    conn: sqlite3.Connection, owner: SearchOwner, q: str, sessions: Iterable[int]
) -> dict[int, Found]:
    """Find the turn of each session that holds `q`: the newest one shown, else the newest one of other versions."""
    rows = ",".join(map(str, sessions))
    if _uses_index(owner, q):
        sql, args = _FOUND_BY_INDEX.format(table=table_of(owner.row), sessions=rows), [_phrase(q)]
    else:
        sql, args = _FOUND_BY_READING.format(sessions=rows), [_pattern(q)] * 2
    order = f"ORDER BY t.seq IN ({tree.shown(f'IN ({rows})')} SELECT seq FROM shown), t.seq"
    # The last row of a session wins.
    turns = {row: (turn_id, seq) for row, turn_id, seq in conn.execute(f"{sql} {order}", args)}
    return {row: Found(turn_id, _excerpt(conn, q, seq)) for row, (turn_id, seq) in turns.items()}


def _excerpt(conn: sqlite3.Connection, q: str, seq: int) -> Excerpt | None:
    """Cut the words around `q` out of a turn.

    SQLite finds the place, because it lets other threads run meanwhile. It folds the case of ASCII only, so other letters in another case are
    found only near the start of the text.
    """
    around = "substr({0}, max(1, instr(lower({0}), lower(?1)) - {1}), {2})"
    columns = ", ".join(around.format(name, WINDOW_CHARS, 4 * WINDOW_CHARS) for name in ("content", "answer"))
    return excerpt(q, *conn.execute(f"SELECT {columns} FROM turns WHERE seq = ?2", (q, seq)).fetchone())


def _uses_index(owner: SearchOwner, q: str) -> bool:
    return len(q) >= TRIGRAM_CHARS and owner.is_indexed


def _phrase(q: str) -> str:
    """Return `q` as an FTS5 phrase."""
    return '"' + q.replace('"', '""') + '"'


def _pattern(q: str) -> str:
    """Return a LIKE pattern that finds `q` anywhere."""
    return "%" + re.sub(r"([\\%_])", r"\\\1", q) + "%"


def add_turns(conn: sqlite3.Connection, owner: SearchOwner, where: str, args: tuple[object, ...]) -> None:
    """Index those turns that the SQL condition `where` finds and that are over."""
    if owner.is_indexed:
        conn.execute(
            f"""INSERT INTO {table_of(owner.row)} (rowid, content, answer)
                SELECT seq * 2, content, answer FROM turns WHERE {_TURN_IS_OVER} AND {where}""",
            args,
        )


def drop_turns(conn: sqlite3.Connection, owner: SearchOwner, where: str, args: tuple[object, ...]) -> None:
    """Remove the turns that `where` finds from the index. Call it before their texts change."""
    if owner.is_indexed:
        table = table_of(owner.row)
        conn.execute(
            f"""INSERT INTO {table} ({table}, rowid, content, answer)
                SELECT 'delete', seq * 2, content, answer FROM turns WHERE {_TURN_IS_OVER} AND {where}""",
            args,
        )


def add_title(conn: sqlite3.Connection, owner: SearchOwner, session: int, title: str | None) -> None:
    """Index the present title of a session."""
    if owner.is_indexed and title is not None:
        conn.execute(
            f"INSERT INTO {table_of(owner.row)} (rowid, title) VALUES (?, ?)", (session * 2 + 1, title)
        )


def drop_title(conn: sqlite3.Connection, owner: SearchOwner, session: int, title: str | None) -> None:
    """Remove a title from the index."""
    if owner.is_indexed and title is not None:
        table = table_of(owner.row)
        conn.execute(
            f"INSERT INTO {table} ({table}, rowid, title) VALUES ('delete', ?, ?)", (session * 2 + 1, title)
        )


def forget(conn: sqlite3.Connection, owner: int) -> None:
    """Give an owner's index up; the next `build_missing` makes it anew, and until then a search reads the texts."""
    conn.execute("UPDATE owners SET is_indexed = 0 WHERE row = ?", (owner,))
    conn.execute(f"DROP TABLE IF EXISTS {table_of(owner)}")


def forget_damaged(conn: sqlite3.Connection, name: str) -> None:
    """Give up the damaged index of the owner of this name."""
    owner = find_owner(conn, name)
    if owner is None:
        return
    logger.error(
        "a search index is damaged: its owner's searches read every text until the next start builds it again"
    )
    try:
        forget(conn, owner.row)
    except sqlite3.DatabaseError:
        # The table cannot even be dropped. It is not used any more, and the next start tries again.
        conn.execute("UPDATE owners SET is_indexed = 0 WHERE row = ?", (owner.row,))


def forget_all(conn: sqlite3.Connection) -> None:
    """Mark every index as out of date, because this process cannot keep one. The tables stay: without FTS5 they cannot be dropped."""
    conn.execute("UPDATE owners SET is_indexed = 0 WHERE is_indexed")


def indexed_owners(conn: sqlite3.Connection) -> list[int]:
    """Return the rows of the owners that have an index."""
    return [row for (row,) in conn.execute("SELECT row FROM owners WHERE is_indexed ORDER BY row")]


def merge_some(conn: sqlite3.Connection, owner: int, is_first: bool) -> bool:
    """Do a part of the work that removes dropped texts from an owner's index; return whether there is more to do.

    FTS5 only marks dropped texts and removes them when it merges parts of the index, at times of its choice: after half of 60 texts of 190 kB were
    deleted, the index held 14.4 MB, and 7.1 MB when this had run for 0.3 s.

    Args:
        conn: the writer's connection.
        owner: the owner's row.
        is_first: begin a new round of merging.
    """
    table, before = table_of(owner), conn.total_changes
    num_pages = -_MERGE_PAGES if is_first else _MERGE_PAGES
    conn.execute(f"INSERT INTO {table} ({table}, rank) VALUES ('merge', ?)", (num_pages,))
    return conn.total_changes - before >= 2  # FTS5's own sign that something was merged


def can_index(conn: sqlite3.Connection) -> bool:
    """Return whether this SQLite has FTS5 with trigrams."""
    try:
        conn.execute("CREATE VIRTUAL TABLE temp.probe USING fts5(text, tokenize='trigram')")
    except sqlite3.OperationalError:
        return False
    conn.execute("DROP TABLE temp.probe")
    return True


def build_missing(conn: Database) -> None:
    """Index all texts of the owners without an index. Each owner is one transaction, so a process that dies loses only the last one."""
    todo = [row for (row,) in conn.execute("SELECT row FROM owners WHERE NOT is_indexed ORDER BY row")]
    if todo:
        progress = _Progress(conn, todo)
        for owner in todo:
            transaction(conn, "BEGIN IMMEDIATE", _build, (owner, progress))


class _Progress:
    """Logs how far the index is, once building it takes long."""

    def __init__(self, conn: sqlite3.Connection, owners: list[int]) -> None:
        names = ",".join(f"{row:d}" for row in owners)
        sql = f"SELECT count(*) FROM turn_names WHERE owner IN ({names}) AND NOT is_response"
        self._num_turns = conn.execute(sql).fetchone()[0]
        self._num_done = 0
        self._said_at_s = time.monotonic()

    def add(self, num_turns: int) -> None:
        """Count turns as indexed."""
        self._num_done += num_turns
        if time.monotonic() - self._said_at_s >= SAY_EVERY_S:
            self._said_at_s = time.monotonic()
            logger.info("indexing the conversations: %d of %d turns", self._num_done, self._num_turns)


def _make_table(conn: sqlite3.Connection, owner: int) -> None:
    table = table_of(owner)
    # A table may be left from a time before this SQLite lacked FTS5.
    conn.execute(f"DROP TABLE IF EXISTS {table}")
    # columnsize=0: the lengths of documents serve ranking only.
    conn.execute(
        f"CREATE VIRTUAL TABLE {table} USING fts5(title, content, answer, content='', columnsize=0, tokenize='trigram')"
    )


def _build(conn: sqlite3.Connection, row: int, progress: _Progress) -> None:
    _make_table(conn, row)
    conn.execute("UPDATE owners SET is_indexed = 1 WHERE row = ?", (row,))
    owner = SearchOwner(row, True)
    sql = "SELECT s.row, s.title FROM sessions s JOIN owners o ON o.name = s.owner WHERE o.row = ? AND s.title IS NOT NULL"
    for session, title in conn.execute(sql, (row,)).fetchall():
        add_title(conn, owner, session, title)
    seqs = [
        seq
        for (seq,) in conn.execute("SELECT seq FROM turn_names WHERE owner = ? AND NOT is_response", (row,))
    ]
    for first in range(0, len(seqs), _BUILD_TURNS):
        part = seqs[first : first + _BUILD_TURNS]
        for seq in part:
            add_turns(conn, owner, "seq = ?", (seq,))
        progress.add(len(part))


# -- the words around a match ---------------------------------------------------------------------------------------


def excerpt(q: str, *texts: str) -> Excerpt | None:
    """Cut the first place that holds `q`, in either case, out of the first of the texts that has one.

    Returns None where Python finds no such place: the index folds the case of some letters (ß, İ) in its own way.
    """
    wanted = _folded(q)
    for text in texts:
        if (start := _folded(text).find(wanted)) >= 0:
            return _cut(text, start, start + len(q))
    return None


def _folded(text: str) -> str:
    """Return the text in lower case with every letter at its place. A letter that would become two (İ) stays as it is."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def _cut(text: str, start: int, end: int) -> Excerpt:
    # One blank is kept at both ends, because it separates the match from the words beside it.
    first = max(0, start - BEFORE_CHARS)
    before = _line(text[first:start])
    if first > 0:
        # Not in the middle of a word, where there is a whole one to begin with.
        _, space, whole = before.partition(" ")
        before = "…" + (whole if space and whole.strip() else before)
    last = end + AFTER_CHARS
    return Excerpt(
        before.lstrip(),
        _line(text[start : min(end, start + MATCH_CHARS)]),
        _line(text[end:last]).rstrip() + ("…" if last < len(text) else ""),
    )


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
