"""A session file or a log of it that goes bad: said as such, remembered, and forgotten once it can be read again."""

import asyncio
import resource
import shutil
import sqlite3
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from gateway.sessions import SessionStore
from gateway.sessions.connection import has_failed
from gateway.sessions.health import is_whole

from .parts import NOW, checkpoint, passes, refused, until


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SessionStore]:
    """A store whose file holds 50 turns and whose log is empty."""
    store = await SessionStore.open(path)
    await store.create_session("ann", session_id="s", now=NOW)
    for number in range(50):
        await store.record_turn("ann", "s", f"t{number}", "x" * 3000, answer="y" * 3000, now=NOW)
    checkpoint(path, "TRUNCATE")
    yield store
    await store.close()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "rubbish at the start": lambda good: b"\xa5" * 8192 + good[8192:],
    "rubbish behind the start": lambda good: good[:4096] + b"\xa5" * (len(good) - 4096),
}


async def test_damage_is_seen_wherever_it_is_and_once_it_is_mended(store: SessionStore, path: Path) -> None:
    """What a server does about it is in tests/integration/test_storage_http.py."""
    good = await asyncio.to_thread(path.read_bytes)
    for kind, damage in DAMAGES.items():
        await asyncio.to_thread(path.write_bytes, damage(good))
        assert not await asyncio.to_thread(is_whole, path), kind
    await asyncio.to_thread(path.write_bytes, good)
    assert await asyncio.to_thread(is_whole, path)


def test_which_errors_are_the_files() -> None:
    def of(code: int) -> sqlite3.Error:
        error = sqlite3.OperationalError("x")
        error.sqlite_errorcode = code
        return error

    for name in ("CORRUPT", "NOTADB", "IOERR_READ"):
        assert has_failed(of(getattr(sqlite3, f"SQLITE_{name}")))
    for name in ("CORRUPT_VTAB", "IOERR_SHMSIZE", "FULL", "BUSY"):
        assert not has_failed(of(getattr(sqlite3, f"SQLITE_{name}")))
    assert not has_failed(sqlite3.OperationalError("x"))


CALLS = {
    "search": lambda store: store.list_sessions("ann", q="question"),
    "rename": lambda store: store.patch("ann", "s", title="another"),
    "edit": lambda store: store.begin_turn("ann", "s", "u", "new", after=None, now=NOW),
    "purge": lambda store: store.purge(NOW + 31),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_a_damaged_index_costs_no_text_and_is_built_again(
    path: Path, caplog: pytest.LogCaptureFixture, call: Callable[[SessionStore], object]
) -> None:
    """Whoever meets it first gives it up; what is stored and found stays the same, and the file has not failed."""
    store = await SessionStore.open(path)
    for session in ("s", "gone"):
        await store.record_turn("ann", session, "t", "a question", answer="hi", makes_session=True, now=NOW)
    await store.delete("ann", "gone", NOW)
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("DELETE FROM search_1_data WHERE id > 10")
    await call(store)
    for number in range(100):  # the index is merged now and then, which reads what is missing
        await store.record_turn("ann", "s", f"v{number}", "another question", answer="hi", now=NOW)
    assert [summary.id for summary in (await store.list_sessions("ann", q="another"))[0]] == ["s"]
    assert not store.has_failed and "index is damaged" in caplog.text
    await store.close()
    store = await SessionStore.open(path)
    assert [summary.id for summary in (await store.list_sessions("ann", q="another question"))[0]] == ["s"]
    await store.close()


@pytest.mark.virtual_time
async def test_a_file_that_can_be_read_but_not_written_has_failed_until_a_write_works(
    store: SessionStore, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.record_turn("ann", "s", "last", "x" * 3000, answer="y" * 3000, now=NOW)
    looks = 0

    def looked_at(file: Path) -> bool:
        nonlocal looks
        looks += 1
        return is_whole(file)

    monkeypatch.setattr("gateway.sessions.health.is_whole", looked_at)
    watching = asyncio.create_task(store.watch())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses whatever would make the log longer than it is, which SQLite calls an I/O error; all else can be written and read.
    wal_stat = await asyncio.to_thread(Path(f"{path}-wal").stat)
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal_stat.st_size, hard))
    try:
        error = await refused(store.record_turn("ann", "s", "lost", "x", answer="y", now=NOW))
        assert error.code == "storage_failed"
        await until(lambda: looks >= 5 or not store.has_failed, 30.0)
        assert store.has_failed
        assert len((await store.get_session("ann", "s")).turns) == 51, "reading goes on"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await until(lambda: not store.has_failed, 30.0)
    watching.cancel()
    await store.record_turn("ann", "s", "next", "x", answer="y", now=NOW)
    assert caplog.text.count("written again") == 1


@pytest.mark.virtual_time
async def test_a_file_that_is_moved_away_or_replaced_has_failed_until_it_is_back(
    store: SessionStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is open takes all writes, so nothing else would tell that the next start does not find them."""
    away, watching = path.with_name("away"), asyncio.create_task(store.watch())
    for _ in range(5):
        await passes(30.0)
        assert not store.has_failed
    await asyncio.to_thread(path.rename, away)
    await until(lambda: store.has_failed, 30.0)
    assert caplog.text.count("was moved, removed or replaced") == 1
    await asyncio.to_thread(shutil.copy, away, path)
    for _ in range(5):
        await passes(60.0)
        await asyncio.sleep(0.01)  # looks happen in threads
        assert store.has_failed
    await asyncio.to_thread(away.rename, path)
    await until(lambda: not store.has_failed, 30.0)
    watching.cancel()
    await store.record_turn("ann", "s", "next", "x", answer="y", now=NOW)


NUM_SESSIONS = 10
FRAME = 24 + 4096


class Killed:
    """A session file with its log and shared memory, as `kill -9` leaves them."""

    def __init__(self, path: Path) -> None:
        self.path, self.wal_path = path, Path(f"{path}-wal")
        self.wal = self.wal_path.read_bytes()

    @property
    def ends(self) -> list[int]:
        """The numbers, from 1, of the frames that end a transaction."""
        numbers = range(1, (len(self.wal) - 32) // FRAME + 1)
        return [n for n in numbers if struct.unpack_from(">I", self.wal, 32 + (n - 1) * FRAME + 4)[0]]

    def flip(self, frame: int, at: int = 24 + 1000) -> None:
        """Turn one bit of a frame of the log over. at: a place in the frame, its header of 24 bytes first."""
        place = 32 + (frame - 1) * FRAME + at
        self.wal = self.wal[:place] + bytes([self.wal[place] ^ 0x10]) + self.wal[place + 1 :]
        self.wal_path.write_bytes(self.wal)

    def cut_power(self) -> None:
        """The shared memory is gone, too."""
        Path(f"{self.path}-shm").unlink()

    async def reopened(self) -> tuple[int, int]:
        """How many sessions are there after a start, and how many frames it said are lost."""
        store = await SessionStore.open(self.path)
        page, _ = await store.list_sessions("ann")
        await store.close()
        return len(page), store.wal_lost_frames

    def files(self) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in self.path.parent.iterdir()}

    def put_back(self, files: dict[Path, bytes]) -> None:
        for file, data in files.items():
            file.write_bytes(data)

    def copies(self) -> list[Path]:
        return sorted(self.path.parent.glob("*damaged*"))


async def killed(folder: Path, *, checkpointed: bool = False) -> Killed:
    """Copied from a store that is open."""
    store = await SessionStore.open(folder / "live.db")
    checkpoint(folder / "live.db", "TRUNCATE")
    for number in range(NUM_SESSIONS):
        await store.create_session("ann", session_id=f"s{number}", now=NOW)
    if checkpointed:
        checkpoint(folder / "live.db", "PASSIVE")
    path = folder / "copy" / "sessions.db"
    path.parent.mkdir()
    for end in ("", "-wal", "-shm"):
        await asyncio.to_thread(shutil.copy, f"{folder}/live.db{end}", f"{path}{end}")
    await store.close()
    return Killed(path)


POWER = pytest.mark.parametrize("has_power", [True, False], ids=["after kill", "after a power cut"])


@POWER
@pytest.mark.parametrize("at", [0, 4, 16, 24 + 4095])
async def test_a_bit_flipped_anywhere_in_a_frame_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_power: bool, at: int
) -> None:
    """The error counts the commits, and a private copy of the log holds what SQLite threw away."""
    server = await killed(tmp_path)
    ends = server.ends
    assert len(ends) == NUM_SESSIONS
    server.flip(ends[5], at)
    if not has_power:
        server.cut_power()
    assert await server.reopened() == (5, ends[-1] - ends[4])
    assert "up to 5 of the last commits" in caplog.text
    (copy,) = server.copies()
    assert str(copy) in caplog.text
    assert copy.read_bytes() == server.wal and copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "empty"])
@pytest.mark.parametrize("checkpointed", [True, False])
async def test_a_log_that_is_gone_and_was_needed_is_said(
    tmp_path: Path, is_gone: bool, checkpointed: bool
) -> None:
    """The shared memory knows what was committed, and what of that has reached the file."""
    server = await killed(tmp_path, checkpointed=checkpointed)
    server.wal_path.unlink() if is_gone else server.wal_path.write_bytes(b"")
    expected = (NUM_SESSIONS, 0) if checkpointed else (0, server.ends[-1])
    assert await server.reopened() == expected


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


@POWER
async def test_a_crash_alone_is_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_power: bool
) -> None:
    """Nobody was told that the last transaction is stored, so nothing is said and nothing copied."""
    server = await killed(tmp_path)
    files = server.files()
    for kind, wal in torn_tails(server.wal).items():
        server.put_back(files | {server.wal_path: wal})
        if not has_power:
            server.cut_power()
        assert await server.reopened() == (NUM_SESSIONS, 0), kind
        assert "damaged" not in caplog.text and not server.copies(), kind


async def test_damage_to_what_the_file_has_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite would read old pages out of the sound half of such a log; it is set aside instead."""
    server = await killed(tmp_path, checkpointed=True)
    server.flip(server.ends[4])
    assert await server.reopened() == (NUM_SESSIONS, 0)
    assert "holds all of it already" in caplog.text
    assert len(server.copies()) == 1


async def test_the_newest_damaged_log_is_the_one_that_is_kept(tmp_path: Path) -> None:
    """Damaged starts one after another leave one copy, so that they do not fill the disk."""
    server = await killed(tmp_path)
    server.flip(server.ends[4])
    files = server.files()
    for number in range(3):
        server.put_back(files | {server.wal_path: server.wal + b"x" * number})
        assert (await server.reopened())[1] > 0
    (copy,) = server.copies()
    assert copy.stat().st_size - len(server.wal) == 2
