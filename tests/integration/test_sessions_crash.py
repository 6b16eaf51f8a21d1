"""`kill -9` loses no acknowledged turn: a writer process is killed at moments of its own making, and the file is looked at afterwards.

The file runs itself as the writer: ``python test_sessions_crash.py FILE ROUND``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.errors import StartupError
from gateway.sessions import SessionStore

NUM_KILLS = 4
NUM_SESSIONS = 3
NOW = 1_700_000_000.0


def answer_to(turn_id: str) -> str:
    """Long enough to take several database pages, so that a half-written answer would show."""
    return f"answer to {turn_id} " + turn_id * 700


async def write_turns(path: str, round_number: str) -> None:
    """Run turns in several sessions at once until killed, saying each `begin` before and each `ack` after it is asked for and stored."""
    store = await SessionStore.open(path)

    async def talk(session: str) -> None:
        await store.create_session("ann", session_id=session, exist_ok=True, now=NOW)
        for i in range(100_000):
            turn_id = f"{session}-r{round_number}-{i}"
            print(f"begin {session} {turn_id}\n", end="", flush=True)
            await store.begin_turn("ann", session, turn_id, f"ask {turn_id}", now=NOW)
            await store.finish_turn(
                "ann", session, turn_id, answer=answer_to(turn_id), status="done", now=NOW
            )
            print(f"ack {session} {turn_id}\n", end="", flush=True)

    async with asyncio.TaskGroup() as group:
        for n in range(NUM_SESSIONS):
            group.create_task(talk(f"s{n}"))


def start_writer(path: Path, round_number: int) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, __file__, str(path), str(round_number)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )


def run_until_killed(
    path: Path, round_number: int, num_acks: int
) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Kill a writer once it has acknowledged `num_acks` turns; returns the turns begun and those acknowledged, as (session, turn)."""
    said: dict[str, set[tuple[str, str]]] = {"begin": set(), "ack": set()}
    with start_writer(path, round_number) as writer:
        for line in writer.stdout:
            word, session, turn_id = line.split()
            said[word].add((session, turn_id))
            if len(said["ack"]) == num_acks:
                # The writer did not wait for us to read: it is somewhere in a later transaction now. What it says until it dies is
                # still in the pipe and counts as well.
                writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    return said["begin"], said["ack"]


async def check(path: Path, begun: set[tuple[str, str]], acknowledged: set[tuple[str, str]]) -> int:
    """Every acknowledged turn is there, whole and once; no turn runs or came from nowhere. Returns how many had been cut off."""
    store = await SessionStore.open(path)
    found = []
    num_failed = 0
    summaries, _ = await store.list_sessions("ann")
    for summary in summaries:
        for turn in (await store.get_session("ann", summary.id)).turns:
            found.append((summary.id, turn.id))
            assert turn.content == f"ask {turn.id}"
            assert (turn.status, turn.answer) in (("done", answer_to(turn.id)), ("failed", ""))
            assert turn.status == "done" or (summary.id, turn.id) not in acknowledged
            num_failed += turn.status == "failed"
    await store.close()
    assert len(found) == len(set(found))
    assert acknowledged <= set(found) <= begun
    return num_failed


async def test_killed_again_and_again(tmp_path: Path) -> None:
    """One file survives every kill, each in the middle of the writing that followed the one before."""
    path = tmp_path / "sessions.db"
    chance = random.Random(20)
    begun: set[tuple[str, str]] = set()
    acknowledged: set[tuple[str, str]] = set()
    num_failed = 0
    for round_number in range(NUM_KILLS):
        more_begun, more_acknowledged = await asyncio.to_thread(
            run_until_killed, path, round_number, chance.randint(1, 40)
        )
        begun |= more_begun
        acknowledged |= more_acknowledged
        num_failed = await check(path, begun, acknowledged)
    assert len(acknowledged) >= NUM_KILLS
    # Three sessions write all the time, so a kill that never caught one of them between begin and finish would mean a broken test.
    assert num_failed > 0
    conn = sqlite3.connect(path)
    assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    conn.execute("INSERT INTO search_1 (search_1) VALUES ('integrity-check')")
    found = conn.execute(
        "SELECT rowid / 2 FROM search_1 WHERE search_1 MATCH 'content: ask' ORDER BY 1"
    ).fetchall()
    assert found == conn.execute("SELECT seq FROM turns ORDER BY 1").fetchall()
    conn.close()


async def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    """Two servers on one file would declare each other's turns failed; a killed server leaves no lock behind."""
    path = tmp_path / "sessions.db"
    with start_writer(path, 0) as writer:
        await asyncio.to_thread(writer.stdout.readline)
        with pytest.raises(StartupError, match="in use by another process"):
            await SessionStore.open(path)
        writer.send_signal(signal.SIGKILL)
        await asyncio.to_thread(writer.communicate)
    await (await SessionStore.open(path)).close()


if __name__ == "__main__":
    asyncio.run(write_turns(*sys.argv[1:]))
