"""A disk that is really full, small enough to fill: nothing is lost, and there is always a way to make room.

The file runs itself as a process to be killed: ``python test_session_disk_full.py FILE``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.access.auth import KeyRing
from gateway.access.key_file import key_file_line
from gateway.errors import GatewayError, StartupError
from gateway.people.audit import AuditLog, Entry
from gateway.people.estate import export_to
from gateway.people.ledger import Ledger
from gateway.people.sign_ins import SignIns
from gateway.sessions import RESTORE_WINDOW_S, SessionStore, transactions
from gateway.sessions.pictures import describe
from gateway.sessions.room import Reserve
from gateway.settings.config import Config
from gateway.shelf.store import Shelf
from tests.unit.gateway.front import Gateway
from tests.unit.gateway.test_pictures import image

pytestmark = pytest.mark.slow
NOW = 1_700_000_000.0
DISK_BYTES = 32 << 20
TEXT = " ".join(f"word{number}" for number in range(20_000))  # 190 kB, as much of it again in the index


def tmpfs(folder: Path) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]


def ext4(folder: Path) -> list[str]:
    """On a loop device; its blocks reserved for root go to everybody, for tests run as root."""
    # Without barriers: what is told here does not depend on when the disk below has it, and its flushes took half a minute.
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    return ["mount", "-o", "loop,barrier=0", str(image), str(folder)]


@pytest.fixture(params=[tmpfs, ext4], ids=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own. Skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(request.param(folder), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    # What others have there. What is left is filled turn by turn, and each is indexed and synced.
    (folder / "others").write_bytes(bytes(10 << 20))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Write a file until not one byte more goes on the disk."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


def free_bytes(disk: Path) -> int:
    return shutil.disk_usage(disk).free


async def talk(store: SessionStore, session: str) -> bool:
    """Store a turn of a session of its own; False if the disk is full."""
    try:
        await store.record_turn(
            "ann", session, "t", f"{session} {TEXT}", answer="ok", makes_session=True, now=NOW
        )
    except GatewayError as error:
        assert (error.code, error.retryable) == ("overloaded", True)
        return False
    return True


async def ids(store: SessionStore) -> set[str]:
    return {summary.id for summary in (await store.list_sessions("ann", limit=200))[0]}


async def make_room(store: SessionStore, gone: set[str]) -> None:
    """Delete these sessions for good."""
    for session in sorted(gone):
        await store.delete("ann", session, NOW)
    assert await store.purge(NOW + RESTORE_WINDOW_S + 1) == len(gone)


async def check_sound(disk: Path, sessions: set[str]) -> None:
    """The file is whole, holds these sessions with their texts, and the index finds each or is not used."""
    store = await SessionStore.open(disk / "sessions.db")
    assert await ids(store) == sessions
    for session in sessions:
        (turn,) = (await store.get_session("ann", session)).turns
        assert turn.content == f"{session} {TEXT}"
        found, _ = await store.list_sessions("ann", q=f"{session} word0")
        assert [summary.id for summary in found] == [session]
    await store.close()
    conn = sqlite3.connect(disk / "sessions.db")
    assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    conn.close()


async def test_on_a_full_disk_conversations_can_be_deleted_and_that_makes_room(disk: Path) -> None:
    """What fits is stored, what does not is refused whole; what is deleted is room for others, the reserve included."""
    store = await SessionStore.open(disk / "sessions.db")
    reserve = Reserve(disk / "sessions.db.reserve")
    assert reserve.is_whole
    stored = set()
    while await talk(store, f"s{len(stored)}"):
        stored.add(f"s{len(stored)}")
    await asyncio.to_thread(fill, disk)
    assert len(stored) > 10 and await ids(store) == stored
    gone = {f"s{number}" for number in range(len(stored) // 2)}
    await make_room(store, gone)
    assert free_bytes(disk) > 250_000 * len(gone), "text and index"
    assert reserve.is_whole
    assert await talk(store, "new")
    await store.close()
    await check_sound(disk, stored - gone | {"new"})


async def test_a_start_on_a_full_disk_after_a_kill_loses_nothing_and_can_delete(disk: Path) -> None:
    """The log is read back, what ran is marked, and deleting makes room, though not a byte was free."""
    path = disk / "sessions.db"
    stored = await asyncio.to_thread(run_until_full_and_kill, path)
    await asyncio.to_thread(fill, disk)
    store = await SessionStore.open(path)
    assert await ids(store) == stored | {"running"}
    assert (await store.get_session("ann", "running")).turns[0].status == "failed"
    gone = {"running", *(f"s{number}" for number in range(len(stored) // 2))}
    await make_room(store, gone)
    assert await talk(store, "new")
    await store.close()
    await check_sound(disk, stored - gone | {"new"})


ON_TMPFS = pytest.mark.parametrize("disk", [tmpfs], indirect=True, ids=["tmpfs"])


@ON_TMPFS  # ext4 has a little left, always
async def test_without_a_reserve_the_start_says_that_the_disk_is_full(disk: Path) -> None:
    """As after an upgrade on a full disk: the message says what to do, and once that is done nothing is lost."""
    path = disk / "sessions.db"
    stored = await asyncio.to_thread(run_until_full_and_kill, path)
    for end in (".reserve", "-shm"):  # without the latter, as after a power cut, a start has to make it
        (disk / f"sessions.db{end}").unlink()
    await asyncio.to_thread(fill, disk)
    with pytest.raises(StartupError, match=r"disk .* is full\. Make some room"):
        await SessionStore.open(path)
    (disk / "filler").unlink()
    store = await SessionStore.open(path)
    assert await ids(store) == stored | {"running"}
    await store.close()


@ON_TMPFS  # what makes room is the same on any disk
async def test_a_conversation_larger_than_the_reserve_can_be_deleted(disk: Path) -> None:
    """Part by part, with the log folded back in between."""
    (disk / "others").unlink()
    store = await SessionStore.open(disk / "sessions.db")
    for number in range(4):
        await store.record_turn(
            "ann", "big", f"t{number}", TEXT * 6, answer="ok", makes_session=True, now=NOW
        )
    assert await talk(store, "small")
    while await talk(store, f"more-{len(await ids(store))}"):
        pass
    kept = await ids(store) - {"big"}
    assert Reserve(disk / "sessions.db.reserve").is_whole
    await asyncio.to_thread(fill, disk)
    await make_room(store, {"big"})
    assert free_bytes(disk) > 4 << 20
    assert await talk(store, "after")
    found, _ = await store.list_sessions("ann", q="small word0")
    assert [summary.id for summary in found] == ["small"]
    await store.close()
    await check_sound(disk, kept | {"after"})


@ON_TMPFS
async def test_what_lies_beside_the_conversations_says_that_the_disk_is_full_and_goes_on(disk: Path) -> None:
    """Links, sign-ins, exports and the audit log: refused whole and in words, and nothing of them is lost that was said to be there."""
    shelf, audit = Shelf(disk / "shelf"), AuditLog(disk / "audit.jsonl")
    ledger = await asyncio.to_thread(Ledger.open, disk / "people")
    sign_ins = SignIns(ledger, KeyRing())
    store = await SessionStore.open(disk / "sessions.sqlite3")
    assert await talk(store, "s")
    token = await asyncio.to_thread(shelf.link, "ann", "s", NOW)
    audit.note(Entry(what="signed_in", about="before"))
    await audit.write()
    await asyncio.to_thread(fill, disk)
    for act in (
        asyncio.to_thread(shelf.link, "ann", "other", NOW),
        asyncio.to_thread(shelf.withdraw, "ann", "s"),
        sign_ins.make_link("ann"),
    ):
        with pytest.raises(GatewayError, match="The server's disk is full"):
            await act
    with pytest.raises(StartupError, match=r"ann cannot be exported|cannot be written"):
        await asyncio.to_thread(export_to, disk / "ann.zip", disk, "ann", "ann")
    assert not (disk / "ann.zip").exists()
    for number in range(2000):  # what is left of the file's last page takes some
        audit.note(Entry(what="signed_in", about=str(number)))
    await audit.write()
    (disk / "filler").unlink()
    await audit.write()
    lines = [
        json.loads(line) for line in (disk / "audit.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    assert [line["about"] for line in lines] == ["before", *map(str, range(2000))]
    assert shelf.behind(token).session_id == "s"
    shelf.link("ann", "other", NOW)
    await sign_ins.make_link("ann")
    assert export_to(disk / "ann.zip", disk, "ann", "ann") == 1
    await store.close()
    ledger.close()


@ON_TMPFS
async def test_pictures_are_refused_whole_and_a_message_keeps_those_that_were_stored_before(
    disk: Path,
) -> None:
    store = await SessionStore.open(disk / "sessions.sqlite3")
    pictures = [await asyncio.to_thread(describe, image(shade), 1e6) for shade in (1, 2)]
    await store.create_session("ann", session_id="s", now=NOW)

    async def attach(which: int) -> None:
        await store.pictures.put("ann", pictures[which], image(which + 1), NOW)

    async def send() -> None:
        await store.begin_turn("ann", "s", "t", "What is this?", pictures=[pictures[0].id], now=NOW)

    await attach(0)
    await asyncio.to_thread(fill, disk)
    for act in (attach, lambda _: send()):
        with pytest.raises(GatewayError, match="The server's disk is full; nothing was stored"):
            await act(1)
    assert (await store.get_session("ann", "s")).turns == []
    assert set(await store.pictures.read("ann", [each.id for each in pictures])) == {pictures[0].id}
    (disk / "filler").unlink()
    await send()
    await attach(1)
    (turn,) = (await store.get_session("ann", "s")).turns
    assert [each.id for each in turn.pictures] == [pictures[0].id]
    await store.close()


@ON_TMPFS
async def test_who_has_filled_the_disk_can_be_shut_out(disk: Path) -> None:
    """The key file is written as a new one, for which not a byte is left."""
    ada, bob = "ov-key-of-ada-for-tests-only", "ov-key-of-bob-for-tests-only"
    lines = key_file_line("ada", ada, is_operator=True), key_file_line("bob", bob)
    (disk / "keys").write_text("\n".join(lines) + "\n")
    store = await SessionStore.open(disk / "sessions.sqlite3")
    config = Config(port=0, data_dir=disk, kv_host_gib=0.25, api_key_file=disk / "keys")
    gateway = Gateway(store, config)
    async with gateway.server:
        assert (await gateway.call("GET", "/api/sessions", key=bob)).status == 200
        await asyncio.to_thread(fill, disk)
        shut = await gateway.call("PATCH", "/v1/admin/people/bob", {"state": "disabled"}, key=ada)
        assert (shut.status, shut.body["state"]) == (200, "disabled")
        assert (await gateway.call("GET", "/api/sessions", key=bob)).status == 401
    await store.close()


async def test_the_barest_purge_writes_little_and_leaves_the_index_to_the_next_start(tmp_path: Path) -> None:
    """What is left to do where not even the reserve is enough: no zeros over 1.1 MB of text, no index kept up."""
    log = tmp_path / "sessions.db-wal"
    for purge, most_bytes in ((transactions.purge_some, 2 << 20), (transactions.purge_barely, 200 << 10)):
        store = await SessionStore.open(tmp_path / "sessions.db")
        await store.record_turn("ann", "big", "t", TEXT * 6, answer="ok", makes_session=True, now=NOW)
        if purge is transactions.purge_some:
            assert await talk(store, "small")
        await store.delete("ann", "big", NOW)
        await store._room.fold_log()
        assert await store._writer.transact(purge, NOW + RESTORE_WINDOW_S + 1) == (1, True)
        assert most_bytes // 8 < log.stat().st_size < most_bytes
        found, _ = await store.list_sessions("ann", q="small word0")
        assert [summary.id for summary in found] == ["small"]
        await store.close()
    await check_sound(tmp_path, {"small"})


async def test_the_reserve_leaves_as_much_to_others(disk: Path) -> None:
    """Given up in parts until nothing is left; held again as far as half of what is free goes, and whole once there is room."""
    reserve = Reserve(disk / "reserve")
    assert reserve.take_back() and reserve.is_whole
    assert (disk / "reserve").stat().st_mode & 0o777 == 0o600
    before = free_bytes(disk)
    num_parts = 0
    while reserve.give_some():
        num_parts += 1
        assert not reserve.is_whole
    assert num_parts == 8 and free_bytes(disk) > before
    fill(disk)
    assert not reserve.take_back()
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - (1 << 20))
    assert not reserve.take_back()
    assert (disk / "reserve").stat().st_size <= 513 << 10 <= free_bytes(disk) + (64 << 10)
    (disk / "filler").unlink()
    assert reserve.take_back() and reserve.is_whole


async def fill_up(path: str) -> None:
    """Store turns until the disk is full, saying each; then wait to be killed with one turn running."""
    store = await SessionStore.open(path)
    await store.create_session("ann", session_id="running", now=NOW)
    await store.begin_turn("ann", "running", "t", "question", now=NOW)
    number = 0
    while await talk(store, f"s{number}"):
        print(f"s{number}", flush=True)
        number += 1
    print("full", flush=True)
    await asyncio.Event().wait()


def run_until_full_and_kill(path: Path) -> set[str]:
    """Which sessions a killed process said that it had stored."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, __file__, str(path)]
    stored = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        for line in process.stdout:
            if line == "full\n":
                process.send_signal(signal.SIGKILL)
            else:
                stored.add(line.strip())
    assert process.returncode == -signal.SIGKILL
    return stored


if __name__ == "__main__":
    asyncio.run(fill_up(sys.argv[1]))
