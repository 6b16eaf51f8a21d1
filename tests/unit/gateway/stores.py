"""Turns of session files as tests write and read them, all at one time unless they say otherwise."""

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine_bridge.protocol.node import pack_token_ids, unpack_token_ids
from gateway.sessions import SessionStore, Turn

from .parts import NOW


async def ask(
    store: SessionStore,
    session: str,
    turn: str,
    content: str = "hello",
    *,
    owner: str = "ann",
    now: float = NOW,
    **options: Any,
) -> Any:
    return await store.begin_turn(owner, session, turn, content, now=now, **options)


async def end(
    store: SessionStore,
    session: str,
    turn: str,
    answer: str = "hi",
    *,
    owner: str = "ann",
    status: Any = "done",
    now: float = NOW,
    **options: Any,
) -> Turn | None:
    over = await store.finish_turn(owner, session, turn, answer=answer, status=status, now=now, **options)
    return over.turn if over is not None else None


async def chat(store: SessionStore, session: str, *turns: str, owner: str = "ann") -> None:
    """A session with these finished turns; each answer is the turn's id after 're: '."""
    await store.create_session(owner, session_id=session, now=NOW)
    for turn in turns:
        await ask(store, session, turn, f"ask {turn}", owner=owner)
        await end(store, session, turn, f"re: {turn}", owner=owner)


async def talk(store: SessionStore, turn: str, *token_ids: int, **options: Any) -> list[int]:
    """Ask and finish a turn of session s that came to these ids; returns the history's ids that it was asked with."""
    began = await ask(store, "s", turn, **options)
    await end(store, "s", turn, token_ids=pack(token_ids))
    return list(unpack_token_ids(began.history_token_ids))


def pack(token_ids: Iterable[int]) -> bytes:
    return pack_token_ids(list(token_ids))


async def turn_ids(store: SessionStore, session: str = "s", owner: str = "ann") -> list[str]:
    return [turn.id for turn in (await store.get_session(owner, session)).turns]


def rows_of(path: Path, sql: str, *args: object) -> list[Any]:
    """What a query finds in the session file."""
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return conn.execute(sql, args).fetchall()
