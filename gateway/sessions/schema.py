"""The tables of the session file, and how a file of an older version becomes one of this."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Final

# What a session and a turn count beside their text, chosen a little above what their rows, index entries and figures take, so that many
# small ones are no way around a quota.
SESSION_BYTES: Final = 1024
TURN_BYTES: Final = 512

# Turns keep their order by `seq`. At most one runs in a session: begin_turn looks, the index makes sure.
_SCHEMA_1 = (
    """CREATE TABLE sessions (
        row INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        title TEXT,
        adapter TEXT,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        deleted_at REAL,
        UNIQUE (owner, id)
    )""",
    "CREATE INDEX sessions_by_time ON sessions (owner, updated_at, id) WHERE deleted_at IS NULL",
    "CREATE INDEX sessions_deleted ON sessions (deleted_at) WHERE deleted_at IS NOT NULL",
    """CREATE TABLE turns (
        seq INTEGER PRIMARY KEY,
        session INTEGER NOT NULL REFERENCES sessions (row) ON DELETE CASCADE,
        id TEXT NOT NULL,
        content TEXT NOT NULL,
        answer TEXT NOT NULL DEFAULT '',
        status TEXT NOT NULL CHECK (status IN ('running', 'done', 'stopped', 'failed')),
        adapter TEXT,
        finish_reason TEXT,
        usage TEXT,
        timings TEXT,
        created_at REAL NOT NULL,
        response_id TEXT,
        token_ids BLOB,
        UNIQUE (session, id)
    )""",
    "CREATE UNIQUE INDEX turns_running ON turns (session) WHERE status = 'running'",
    "CREATE INDEX turns_by_id ON turns (id)",
    "CREATE INDEX turns_by_response ON turns (response_id) WHERE response_id IS NOT NULL",
)

# Version 2: whatever is looked up is looked up within one owner, so that no time tells what another one has; and each owner's bytes are
# counted. octet_length() would be SQLite 3.43, so a text's bytes are those of its BLOB.
_SIZE = f"length(CAST({{0}}.content AS BLOB)) + length(CAST({{0}}.answer AS BLOB)) + ifnull(length({{0}}.token_ids), 0) + {TURN_BYTES}"
_ADD_TO_SESSION = "UPDATE sessions SET num_bytes = num_bytes + {} WHERE row = {}.session;"
_ADD_TO_OWNER = "UPDATE owners SET num_bytes = num_bytes + {} WHERE name = {}.owner;"
_ADD_NAMES = """INSERT INTO turn_names (owner, is_response, name, seq)
    SELECT o.row, 0, new.id, new.seq FROM sessions s JOIN owners o ON o.name = s.owner WHERE s.row = new.session
    UNION ALL SELECT o.row, 1, new.response_id, new.seq FROM sessions s JOIN owners o ON o.name = s.owner
    WHERE s.row = new.session AND new.response_id IS NOT NULL;"""
_DROP_NAMES = """DELETE FROM turn_names WHERE owner = (SELECT o.row FROM sessions s JOIN owners o ON o.name = s.owner WHERE s.row = old.session)
    AND seq = old.seq AND (is_response, name) IN (VALUES (0, old.id), (1, old.response_id));"""
_SCHEMA_2 = (
    # is_indexed: whether the table search_<row> holds all of the owner's texts (gateway/sessions/search.py).
    """CREATE TABLE owners (
        row INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        num_bytes INTEGER NOT NULL DEFAULT 0,
        is_indexed INTEGER NOT NULL DEFAULT 0
    )""",
    "INSERT INTO owners (name) SELECT DISTINCT owner FROM sessions",
    """CREATE TABLE turn_names (
        owner INTEGER NOT NULL,
        is_response INTEGER NOT NULL,
        name TEXT NOT NULL,
        seq INTEGER NOT NULL,
        PRIMARY KEY (owner, is_response, name, seq)
    ) WITHOUT ROWID""",
    """INSERT INTO turn_names SELECT o.row, 0, t.id, t.seq
        FROM turns t JOIN sessions s ON s.row = t.session JOIN owners o ON o.name = s.owner ORDER BY 1, 3, 4""",
    """INSERT INTO turn_names SELECT o.row, 1, t.response_id, t.seq FROM turns t JOIN sessions s ON s.row = t.session
        JOIN owners o ON o.name = s.owner WHERE t.response_id IS NOT NULL ORDER BY 1, 3, 4""",
    "DROP INDEX turns_by_id",
    "DROP INDEX turns_by_response",
    "DROP INDEX sessions_deleted",
    "CREATE INDEX sessions_deleted ON sessions (owner, deleted_at) WHERE deleted_at IS NOT NULL",
    f"ALTER TABLE sessions ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT {SESSION_BYTES}",
    f"""UPDATE sessions SET num_bytes = sessions.num_bytes + sizes.turns_bytes
        FROM (SELECT t.session, sum({_SIZE.format("t")}) AS turns_bytes FROM turns t GROUP BY t.session) AS sizes
        WHERE sizes.session = sessions.row""",
    "UPDATE owners SET num_bytes = ifnull((SELECT sum(s.num_bytes) FROM sessions s WHERE s.owner = owners.name), 0)",
    f"""CREATE TRIGGER turns_insert AFTER INSERT ON turns
        BEGIN {_ADD_TO_SESSION.format(_SIZE.format("new"), "new")} {_ADD_NAMES} END""",
    f"""CREATE TRIGGER turns_answer AFTER UPDATE OF answer ON turns BEGIN
        {_ADD_TO_SESSION.format("length(CAST(new.answer AS BLOB)) - length(CAST(old.answer AS BLOB))", "new")} END""",
    f"""CREATE TRIGGER turns_token_ids AFTER UPDATE OF token_ids ON turns BEGIN
        {_ADD_TO_SESSION.format("ifnull(length(new.token_ids), 0) - ifnull(length(old.token_ids), 0)", "new")} END""",
    f"""CREATE TRIGGER turns_delete AFTER DELETE ON turns
        BEGIN {_ADD_TO_SESSION.format(f"(-({_SIZE.format('old')}))", "old")} {_DROP_NAMES} END""",
    f"CREATE TRIGGER sessions_insert AFTER INSERT ON sessions BEGIN {_ADD_TO_OWNER.format('new.num_bytes', 'new')} END",
    f"""CREATE TRIGGER sessions_bytes AFTER UPDATE OF num_bytes ON sessions
        BEGIN {_ADD_TO_OWNER.format("new.num_bytes - old.num_bytes", "new")} END""",
    f"CREATE TRIGGER sessions_delete AFTER DELETE ON sessions BEGIN {_ADD_TO_OWNER.format('(-old.num_bytes)', 'old')} END",
)
# Version 3: the node that has a session's KV, as far as is known.
_SCHEMA_3 = ("ALTER TABLE sessions ADD COLUMN home TEXT",)
# Version 4: whole Responses calls, which clients read by id. They count as the session's bytes. `session` is repeated here because the turn no
# longer exists when the trigger of its deletion runs.
_RESPONSE_SIZE = "length({0}.reply) + length({0}.items)"
_SCHEMA_4 = (
    """CREATE TABLE responses (
        seq INTEGER PRIMARY KEY REFERENCES turns (seq) ON DELETE CASCADE,
        session INTEGER NOT NULL,
        reply BLOB NOT NULL,
        items BLOB NOT NULL,
        previous TEXT
    )""",
    f"""CREATE TRIGGER responses_insert AFTER INSERT ON responses
        BEGIN {_ADD_TO_SESSION.format(_RESPONSE_SIZE.format("new"), "new")} END""",
    f"""CREATE TRIGGER responses_delete AFTER DELETE ON responses
        BEGIN {_ADD_TO_SESSION.format(f"(-({_RESPONSE_SIZE.format('old')}))", "old")} END""",
)
# Version 5: what each turn follows, and which of the versions of a message is chosen (gateway/sessions/tree.py). parent: 0 for a first turn.
_SCHEMA_5 = (
    """CREATE TABLE tree (
        seq INTEGER PRIMARY KEY REFERENCES turns (seq) ON DELETE CASCADE,
        session INTEGER NOT NULL,
        parent INTEGER NOT NULL,
        is_chosen INTEGER NOT NULL
    )""",
    """INSERT INTO tree (seq, session, parent, is_chosen)
        SELECT seq, session, lag(seq, 1, 0) OVER (PARTITION BY session ORDER BY seq), 1 FROM turns""",
    "CREATE INDEX tree_versions ON tree (session, parent)",
    "CREATE UNIQUE INDEX tree_chosen ON tree (session, parent) WHERE is_chosen",
)
# Version 6: a conversation's settings (gateway/sessions/settings.py). A separate table, so that a long system prompt is not written anew with
# each change of its session's row. Its bytes go with the session's, which are taken off as a whole.
_PROMPT_SIZE = "ifnull(length(CAST({0}.system_prompt AS BLOB)), 0)"
_SCHEMA_6 = (
    """CREATE TABLE session_settings (
        session INTEGER PRIMARY KEY REFERENCES sessions (row) ON DELETE CASCADE,
        system_prompt TEXT,
        temperature REAL,
        max_tokens INTEGER,
        outdated_seq INTEGER
    )""",
    f"""CREATE TRIGGER session_settings_insert AFTER INSERT ON session_settings
        BEGIN {_ADD_TO_SESSION.format(_PROMPT_SIZE.format("new"), "new")} END""",
    f"""CREATE TRIGGER session_settings_update AFTER UPDATE OF system_prompt ON session_settings BEGIN
        {_ADD_TO_SESSION.format(f"{_PROMPT_SIZE.format('new')} - {_PROMPT_SIZE.format('old')}", "new")} END""",
)
# Version 7: what a model thought before it answered. It counts as the session's bytes.
_SCHEMA_7 = (
    "ALTER TABLE turns ADD COLUMN reasoning TEXT NOT NULL DEFAULT ''",
    f"""CREATE TRIGGER turns_reasoning AFTER UPDATE OF reasoning ON turns BEGIN
        {_ADD_TO_SESSION.format("length(CAST(new.reasoning AS BLOB)) - length(CAST(old.reasoning AS BLOB))", "new")} END""",
    f"""CREATE TRIGGER turns_delete_reasoning AFTER DELETE ON turns
        BEGIN {_ADD_TO_SESSION.format("(-length(CAST(old.reasoning AS BLOB)))", "old")} END""",
)
# Version 8: whether a person made a session, or a call of an API. Of older ones those are taken for calls' whose every turn can be found as a
# response; the calls of the other APIs left no trace of their origin.
_SCHEMA_8 = (
    "ALTER TABLE sessions ADD COLUMN origin TEXT NOT NULL DEFAULT 'chat' CHECK (origin IN ('chat', 'api'))",
    """UPDATE sessions SET origin = 'api' WHERE EXISTS (SELECT 1 FROM turns t WHERE t.session = sessions.row)
        AND NOT EXISTS (SELECT 1 FROM turns t WHERE t.session = sessions.row AND t.response_id IS NULL)""",
)
# Version 9: sessions that a person keeps at the top of the list, the latest pin first.
_SCHEMA_9 = (
    "ALTER TABLE sessions ADD COLUMN pinned_at REAL",
    "CREATE INDEX sessions_pinned ON sessions (owner, pinned_at) WHERE pinned_at IS NOT NULL",
)
# Version 10: finds an item of a response, input or output, by its own id, so that a client may name it instead of sending it once more.
_ITEM_ID = "CASE item.type WHEN 'object' THEN json_extract(item.value, '$.id') END"
# A text that is no JSON, as of a damaged row, names no items and stops nothing.
_AS_JSON = "CASE WHEN json_valid(CAST({0} AS TEXT)) THEN CAST({0} AS TEXT) ELSE 'null' END"
_ITEMS_OF = f"""SELECT o.row, {_ITEM_ID}, {{0}}.seq FROM sessions s JOIN owners o ON o.name = s.owner,
    (SELECT type, value FROM json_each({_AS_JSON.format("{0}.reply")}, '$.output')
        UNION ALL SELECT type, value FROM json_each({_AS_JSON.format("{0}.items")})) item
    WHERE s.row = {{0}}.session AND typeof({_ITEM_ID}) = 'text'"""
_SCHEMA_10 = (
    """CREATE TABLE response_items (
        owner INTEGER NOT NULL,
        id TEXT NOT NULL,
        seq INTEGER NOT NULL REFERENCES turns (seq) ON DELETE CASCADE,
        PRIMARY KEY (owner, id, seq)
    ) WITHOUT ROWID""",
    "CREATE INDEX response_items_of_turn ON response_items (seq)",
    f"""CREATE TRIGGER responses_items AFTER INSERT ON responses
        BEGIN INSERT OR IGNORE INTO response_items {_ITEMS_OF.format("new")}; END""",
    f"""INSERT OR IGNORE INTO response_items SELECT o.row, {_ITEM_ID}, r.seq
        FROM responses r JOIN sessions s ON s.row = r.session JOIN owners o ON o.name = s.owner,
        json_each({_AS_JSON.format("r.reply")}, '$.output') item WHERE typeof({_ITEM_ID}) = 'text'""",
)
# Version 11: pictures of messages (gateway/sessions/pictures.py), each once for an owner. They count as the owner's bytes, not as a session's.
# is_used: whether a turn has had it. Their data have a table of their own, so that nothing else reads over them.
_PICTURE_SIZE = f"{{0}}.num_bytes + {TURN_BYTES}"
_SCHEMA_11 = (
    """CREATE TABLE pictures (
        row INTEGER PRIMARY KEY,
        owner INTEGER NOT NULL REFERENCES owners (row),
        id TEXT NOT NULL,
        media_type TEXT NOT NULL,
        width INTEGER NOT NULL,
        height INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        given_at REAL NOT NULL,
        is_used INTEGER NOT NULL DEFAULT 0,
        UNIQUE (owner, id)
    )""",
    """CREATE TABLE picture_data (
        picture INTEGER PRIMARY KEY REFERENCES pictures (row) ON DELETE CASCADE,
        data BLOB NOT NULL
    )""",
    """CREATE TABLE turn_pictures (
        seq INTEGER NOT NULL REFERENCES turns (seq) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        picture INTEGER NOT NULL REFERENCES pictures (row),
        PRIMARY KEY (seq, place)
    ) WITHOUT ROWID""",
    "CREATE INDEX turn_pictures_of ON turn_pictures (picture)",
    f"""CREATE TRIGGER pictures_insert AFTER INSERT ON pictures BEGIN
        UPDATE owners SET num_bytes = num_bytes + {_PICTURE_SIZE.format("new")} WHERE row = new.owner; END""",
    f"""CREATE TRIGGER pictures_delete AFTER DELETE ON pictures BEGIN
        UPDATE owners SET num_bytes = num_bytes - ({_PICTURE_SIZE.format("old")}) WHERE row = old.owner; END""",
)
# Version 12: more settings of a conversation (stop: a list of strings as JSON), and the folder that it lies in.
_SCHEMA_12 = (
    "ALTER TABLE session_settings ADD COLUMN top_p REAL",
    "ALTER TABLE session_settings ADD COLUMN stop TEXT",
    "ALTER TABLE session_settings ADD COLUMN seed INTEGER",
    "ALTER TABLE sessions ADD COLUMN folder TEXT",
    "CREATE INDEX sessions_folder ON sessions (owner, folder) WHERE folder IS NOT NULL",
)
# Version 13: the tools that an answer called, with their results, as JSON; they count as the session's bytes. Of a conversation the MCP servers whose
# tools it may use, and the tools that are used without asking (lists of strings as JSON).
_CALLS_SIZE = "ifnull(length(CAST({0}.calls AS BLOB)), 0)"
_SCHEMA_13 = (
    "ALTER TABLE turns ADD COLUMN calls TEXT",
    f"""CREATE TRIGGER turns_calls AFTER UPDATE OF calls ON turns BEGIN
        {_ADD_TO_SESSION.format(f"{_CALLS_SIZE.format('new')} - {_CALLS_SIZE.format('old')}", "new")} END""",
    f"""CREATE TRIGGER turns_delete_calls AFTER DELETE ON turns
        BEGIN {_ADD_TO_SESSION.format(f"(-{_CALLS_SIZE.format('old')})", "old")} END""",
    "ALTER TABLE session_settings ADD COLUMN tools TEXT",
    "ALTER TABLE session_settings ADD COLUMN allowed_tools TEXT",
)
_MIGRATIONS: Final = (
    _SCHEMA_1,
    _SCHEMA_2,
    _SCHEMA_3,
    _SCHEMA_4,
    _SCHEMA_5,
    _SCHEMA_6,
    _SCHEMA_7,
    _SCHEMA_8,
    _SCHEMA_9,
    _SCHEMA_10,
    _SCHEMA_11,
    _SCHEMA_12,
    _SCHEMA_13,
)
SCHEMA_VERSION: Final = len(_MIGRATIONS)

# Of version 1, beside its tables: one search index for all owners.
_OLD_SEARCH_TRIGGERS = (
    *(f"turn_texts_{change}" for change in ("insert", "update", "delete")),
    *(f"session_titles_{change}" for change in ("insert", "update", "delete")),
)
_SECURE_DELETE: Final = ("OFF", "ON", "FAST")  # SQLite takes these words and returns their numbers.
_OLD_SEARCH_TABLES = ("turn_texts", "session_titles")


def version_of(conn: sqlite3.Connection) -> int:
    """Return the schema version of a file; 0 if it has no schema yet."""
    return int(conn.execute("PRAGMA user_version").fetchone()[0])


def migrate(conn: sqlite3.Connection) -> None:
    """Bring the tables up to date, within the caller's transaction. The search index is built apart from this."""
    version = version_of(conn)
    if version == SCHEMA_VERSION:
        return
    for trigger in _OLD_SEARCH_TRIGGERS:
        conn.execute(f"DROP TRIGGER IF EXISTS {trigger}")
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            conn.execute(statement)
    conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def drop_old_search(conn: sqlite3.Connection) -> None:
    """Remove the search index of version 1, if any. This needs the FTS5 module: without it such a table cannot be dropped."""
    # Without zeros over what goes: they would be written to the log first, as much as the index took, over words that are stored anyway.
    with without_zeros(conn):
        for table in _OLD_SEARCH_TABLES:
            conn.execute(f"DROP TABLE IF EXISTS {table}")


@contextlib.contextmanager
def without_zeros(conn: sqlite3.Connection) -> Iterator[None]:
    """Free pages without overwriting them while the context is open. Many builds of SQLite (Debian's) fill freed pages with zeros."""
    (before,) = conn.execute("PRAGMA secure_delete").fetchone()
    conn.execute("PRAGMA secure_delete = OFF").fetchall()
    try:
        yield
    finally:
        conn.execute(f"PRAGMA secure_delete = {_SECURE_DELETE[before]}").fetchall()
