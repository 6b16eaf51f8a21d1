"""The row of a turn, as it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.sessions import pictures
from gateway.sessions.records import StoredPicture, Turn, TurnCall

# Ids have no spaces (`text.is_id`). The inner SELECT is there for its order, which group_concat keeps.
_VERSIONS = """(SELECT group_concat(id, ' ') FROM (SELECT v.id FROM tree own JOIN tree other ON other.session = own.session
    AND other.parent = own.parent JOIN turns v ON v.seq = other.seq WHERE own.seq = turns.seq ORDER BY v.seq))"""
TURN_COLUMNS = (
    "id, content, answer, status, adapter, finish_reason, usage, timings, created_at, reasoning, calls, "
    f"{_VERSIONS}, {pictures.OF_TURN}"
)


def turn_from(columns: Sequence[Any]) -> Turn:
    """Return the turn in a row of TURN_COLUMNS."""
    (
        turn_id,
        content,
        answer,
        status,
        adapter,
        finish_reason,
        usage,
        timings,
        created_at,
        reasoning,
        calls,
        versions,
        shown,
    ) = columns
    return Turn(
        id=turn_id,
        content=content,
        answer=answer,
        status=status,
        adapter=adapter,
        finish_reason=finish_reason,
        usage=None if usage is None else msgspec.json.decode(usage),
        timings=None if timings is None else msgspec.json.decode(timings),
        created_at=created_at,
        reasoning=reasoning,
        versions=versions.split(" "),
        pictures=msgspec.json.decode(shown, type=list[StoredPicture]) if shown else [],
        calls=msgspec.json.decode(calls, type=list[TurnCall]) if calls else [],
    )
