"""A write-ahead log that lost commits is said; one that a crash left as crashes do is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sqlite3
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.sessions import SessionStore
from gateway.sessions.wal import find_damage

NOW = 1_700_000_000.0
NUM_SESSIONS = 10
FRAME = 24 + 4096


async def killed(folder: Path, *, num_sessions: int = NUM_SESSIONS, checkpointed: bool = False) -> Path:
    """A session file with its log and shared memory, as `kill -9` leaves them: copied from a store that is open."""
    store = await SessionStore.open(folder / "live.db")
    await store._writer._execute(
        lambda: store._writer._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    )
    for number in range(num_sessions):
        await store.create_session("ann", session_id=f"s{number}", now=NOW)
    if checkpointed:
        await store._writer._execute(
            lambda: store._writer._conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        )
    path = folder / "copy" / "sessions.db"
    path.parent.mkdir()
    for end in ("", "-wal", "-shm"):
        await asyncio.to_thread(shutil.copy, f"{folder}/live.db{end}", f"{path}{end}")
    await store.close()
    return path


def wal_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def shm_of(path: Path) -> Path:
    return Path(f"{path}-shm")


def copies_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob("*damaged*"))


def commits(data: bytes) -> list[int]:
    """The numbers, from 1, of the frames that end a transaction."""
    num_frames = (len(data) - 32) // FRAME
    return [
        n for n in range(1, num_frames + 1) if struct.unpack_from(">I", data, 32 + (n - 1) * FRAME + 4)[0]
    ]


def change(path: Path, edit: Callable[[bytearray], None]) -> None:
    """Edit the log in place."""
    data = bytearray(wal_of(path).read_bytes())
    edit(data)
    wal_of(path).write_bytes(data)


def flip(frame: int, at: int = 24 + 1000) -> Callable[[bytearray], None]:
    """Turn one bit of a frame over. at: a place in the frame, its header of 24 bytes first."""

    def edit(data: bytearray) -> None:
        data[32 + (frame - 1) * FRAME + at] ^= 0x10

    return edit


async def reopened(path: Path) -> tuple[int, int]:
    """How many sessions are there after a start, and how many frames it said are lost."""
    store = await SessionStore.open(path)
    page, _ = await store.list_sessions("ann")
    await store.close()
    return len(page), store.wal_lost_frames


@pytest.mark.parametrize("has_shared_memory", [True, False], ids=["after kill", "after a power cut"])
async def test_a_bit_flipped_in_the_middle_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_shared_memory: bool
) -> None:
    """The error counts the commits, and a private copy of the log holds what SQLite threw away."""
    path = await killed(tmp_path)
    data = wal_of(path).read_bytes()
    ends = commits(data)
    assert len(ends) == NUM_SESSIONS
    change(path, flip(ends[4] + 1))
    if not has_shared_memory:
        shm_of(path).unlink()
    damaged = wal_of(path).read_bytes()
    with caplog.at_level(logging.ERROR, "gateway.sessions"):
        assert await reopened(path) == (5, ends[-1] - ends[4])
    assert "up to 5 of the last commits" in caplog.text
    (copy,) = copies_of(path)
    assert str(copy) in caplog.text
    assert copy.read_bytes() == damaged and copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", [0, 4, 8, 12, 16, 20, 24, 24 + 4095])
async def test_a_bit_flipped_anywhere_in_a_frame_is_said(tmp_path: Path, at: int) -> None:
    """Page number, size, salts, checksums, the first and the last byte of the page."""
    path = await killed(tmp_path)
    ends = commits(wal_of(path).read_bytes())
    change(path, flip(ends[6], at))
    num_sessions, num_lost = await reopened(path)
    assert (num_sessions, num_lost) == (6, ends[-1] - ends[5])


@pytest.mark.parametrize("at", [0, 8, 16, 24])
async def test_a_bit_flipped_in_the_logs_header_is_said(tmp_path: Path, at: int) -> None:
    """All of the log is lost then."""
    path = await killed(tmp_path)
    ends = commits(wal_of(path).read_bytes())

    def edit(data: bytearray) -> None:
        data[at] ^= 0x10

    change(path, edit)
    assert await reopened(path) == (0, ends[-1])


async def test_the_last_commit_lost_is_known_from_the_shared_memory(tmp_path: Path) -> None:
    """The log alone cannot tell it from a transaction that was being written; the shared memory says that it was committed."""
    path = await killed(tmp_path)
    ends = commits(wal_of(path).read_bytes())
    change(path, flip(ends[-1]))
    assert await reopened(path) == (NUM_SESSIONS - 1, ends[-1] - ends[-2])


async def test_a_log_that_was_cut_short_is_said(tmp_path: Path) -> None:
    """Committed frames that are no longer in the file are as lost as damaged ones."""
    path = await killed(tmp_path)
    ends = commits(wal_of(path).read_bytes())

    def edit(data: bytearray) -> None:
        del data[32 + ends[3] * FRAME :]

    change(path, edit)
    assert await reopened(path) == (4, ends[-1] - ends[3])


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "empty"])
@pytest.mark.parametrize("checkpointed", [True, False])
async def test_a_log_that_is_gone_is_said_unless_the_file_has_it_all(
    tmp_path: Path, is_gone: bool, checkpointed: bool
) -> None:
    """The shared memory knows what was committed, and what of that has reached the file."""
    path = await killed(tmp_path, checkpointed=checkpointed)
    num_frames = commits(wal_of(path).read_bytes())[-1]
    wal_of(path).unlink() if is_gone else wal_of(path).write_bytes(b"")
    expected = (NUM_SESSIONS, 0) if checkpointed else (0, num_frames)
    assert await reopened(path) == expected


def torn_tails(data: bytes) -> dict[str, bytes]:
    """Logs of a process killed in the middle of the transaction that followed `data`: written in order, the commit's frame last."""
    last = data[-FRAME:]
    begun = last[:4] + bytes(4) + last[8:]  # a frame that ends no transaction
    wrong = begun[:16] + b"\xff" * 8 + begun[24:]  # of one whose page was written over since
    return {
        "part of a frame's header": data + begun[:10],
        "a frame's header alone": data + begun[:24],
        "half a page": data + begun[: 24 + 2000],
        "frames without a commit": data + wrong * 3,
        "the header over an old page, commit's frame": data + last[:16] + b"\xff" * 8 + bytes(4096),
        "frames of an older log": data + begun[:8] + bytes(8) + begun[16:] + last[:8] + bytes(8) + last[16:],
        "nothing": data,
    }


@pytest.mark.parametrize("kind", sorted(torn_tails(bytes(FRAME))))
@pytest.mark.parametrize("has_shared_memory", [True, False], ids=["after kill", "after a power cut"])
async def test_what_a_crash_leaves_is_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, has_shared_memory: bool
) -> None:
    """Nobody was told that the last transaction is stored, so nothing is said and nothing copied."""
    path = await killed(tmp_path)
    wal_of(path).write_bytes(torn_tails(wal_of(path).read_bytes())[kind])
    if not has_shared_memory:
        shm_of(path).unlink()
    assert await reopened(path) == (NUM_SESSIONS, 0)
    assert "damaged" not in caplog.text
    assert not copies_of(path)


async def test_a_commit_whose_checksums_were_not_yet_mended_is_no_loss_after_a_kill(tmp_path: Path) -> None:
    """SQLite writes the commit's frame and then mends the checksums of frames that it had written over: the shared memory knows."""
    path = await killed(tmp_path)
    data = wal_of(path).read_bytes()
    last = data[-FRAME:]
    begun = last[:4] + bytes(4) + last[8:]
    wal_of(path).write_bytes(data + begun + last)
    assert await reopened(path) == (NUM_SESSIONS, 0)


async def test_damage_to_what_is_in_the_file_already_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite would read old pages out of the sound half of such a log; it is set aside instead."""
    path = await killed(tmp_path, checkpointed=True)
    change(path, flip(commits(wal_of(path).read_bytes())[4]))
    assert await reopened(path) == (NUM_SESSIONS, 0)
    assert "holds all of it already" in caplog.text
    assert len(copies_of(path)) == 1


async def test_copies_are_bounded_and_the_newest_is_the_first(tmp_path: Path) -> None:
    """Five damaged starts leave three copies."""
    path = await killed(tmp_path)
    change(path, flip(commits(wal_of(path).read_bytes())[4]))
    parts = [(file, file.read_bytes()) for file in (path, wal_of(path), shm_of(path))]
    for number in range(5):
        for file, data in parts:
            file.write_bytes(data + (b"x" * number if file == wal_of(path) else b""))
        assert (await reopened(path))[1] > 0
    copies = copies_of(path)
    assert [copy.name[-2:] for copy in copies] == ["-1", "-2", "-3"]
    assert [copy.stat().st_size - len(parts[1][1]) for copy in copies] == [4, 3, 2]


async def test_a_log_in_use_by_another_program_is_left_alone(tmp_path: Path) -> None:
    """Whoever has the database open has read the log already, so nothing is dropped from it now."""
    path = await killed(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM sessions").fetchone() == (NUM_SESSIONS,)
        command = "from gateway.sessions.wal import check_log as c; import sys, pathlib; print(c(pathlib.Path(sys.argv[1])))"
        change(path, flip(commits(wal_of(path).read_bytes())[4]))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", command, str(path), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        assert said == b"0\n"
    assert not copies_of(path)


def test_rubbish_is_no_damage_and_no_crash() -> None:
    """A log of zeros, of anything, and of nothing has no frames that were committed."""
    for data in (b"", bytes(31), bytes(10_000), b"\xa5" * 10_000, b"\x37\x7f\x06\x82" + bytes(10_000)):
        assert find_damage(data, b"") is None
        assert find_damage(data, b"\xa5" * 200) is None
