"""A session file that goes bad under a running store: said as such, remembered, and forgotten once it can be read again."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.errors import GatewayError
from gateway.sessions import SessionStore
from gateway.sessions.connection import has_failed
from gateway.sessions.health import Health, is_whole

NOW = 1_700_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[SessionStore]:
    """A store whose file holds 50 turns and whose log is empty."""
    store = await SessionStore.open(path)
    await store.create_session("ann", session_id="s", now=NOW)
    for number in range(50):
        await store.record_turn("ann", "s", f"t{number}", "x" * 3000, answer="y" * 3000, now=NOW)
    await store._writer._execute(
        lambda: store._writer._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    )
    yield store
    await store.close()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rubbish_at_the_start(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xa5" * 8192)


def rubbish_behind_the_start(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))


DAMAGES = (empty, rubbish_at_the_start, rubbish_behind_the_start)


async def fails(store: SessionStore) -> None:
    with pytest.raises(GatewayError) as failure:
        await store.get_session("ann", "s")
    assert (failure.value.code, failure.value.http_status) == ("storage_failed", 503)
    assert "log says why" in failure.value.message


async def drop_cache(store: SessionStore) -> None:
    """What is cached is read well, however bad the file; a busy server's cache turns over by itself."""
    for connection in (store._reader, store._writer):
        await connection._execute(lambda c=connection: c._conn.execute("PRAGMA shrink_memory"))


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_file_is_said_remembered_and_mended_by_a_sound_one(
    store: SessionStore, path: Path, damage: Callable[[Path], None]
) -> None:
    """Reads fail as `storage_failed`, the store says that it has failed, and with the old bytes back all is well."""
    good = await asyncio.to_thread(path.read_bytes)
    assert not store.has_failed
    damage(path)
    await drop_cache(store)
    await fails(store)
    assert store.has_failed
    watching = asyncio.create_task(store._health.watch((0.01,)))
    await fails(store)
    assert store.has_failed, "nothing has mended it"
    await asyncio.to_thread(path.write_bytes, good)
    async with asyncio.timeout(30):
        while store.has_failed:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert len((await store.get_session("ann", "s")).turns) == 50


async def test_requests_that_fail_for_themselves_do_not_fail_the_file(store: SessionStore) -> None:
    """A missing session, a full quota and a closed store say nothing of the file."""
    for call in (
        store.get_session("ann", "none"),
        store.find_turn("bob", "t"),
        store.restore("ann", "x", NOW),
    ):
        try:
            await call
        except GatewayError as error:
            assert error.code == "not_found"
    assert not store.has_failed


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (sqlite3.SQLITE_CORRUPT, True),
        (sqlite3.SQLITE_CORRUPT_VTAB, False),
        (sqlite3.SQLITE_NOTADB, True),
        (sqlite3.SQLITE_IOERR_READ, True),
        (sqlite3.SQLITE_IOERR_SHMSIZE, False),
        (sqlite3.SQLITE_FULL, False),
        (sqlite3.SQLITE_BUSY, False),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, False),
        (None, False),
    ],
)
def test_which_errors_are_the_files(code: int | None, expected: bool) -> None:
    """Not a damaged index, a full disk, a lock or a broken rule of the schema; nor what is no error of SQLite's."""
    error = sqlite3.OperationalError("x")
    if code is not None:
        error.sqlite_errorcode = code
    assert has_failed(error) is expected


def test_looking_at_a_file_that_is_gone_makes_none(tmp_path: Path) -> None:
    """An empty file in its place would look like a lost database that is well."""
    assert not is_whole(tmp_path / "gone.db")
    assert not list(tmp_path.iterdir())


async def test_a_failure_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many requests meet it."""
    health = Health(path)
    for _ in range(3):
        health.note(sqlite3.DatabaseError("disk image is malformed"))
    assert health.has_failed and caplog.text.count("has failed") == 1


async def damaged_index(path: Path) -> SessionStore:
    """A store in which ann's index has lost its pages, with a deleted session among ann's."""
    store = await SessionStore.open(path)
    for session in ("s", "gone"):
        await store.record_turn("ann", session, "t", "a question", answer="hi", makes_session=True, now=NOW)
    await store.delete("ann", "gone", NOW)
    await store._writer.transact(lambda conn: conn.execute("DELETE FROM search_1_data WHERE id > 10"))
    return store


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
    store = await damaged_index(path)
    await call(store)
    for number in range(300):  # the index is merged now and then, which reads what is missing
        await store.record_turn("ann", "s", f"v{number}", "another question", answer="hi", now=NOW)
    assert [summary.id for summary in (await store.list_sessions("ann", q="another"))[0]] == ["s"]
    assert not store.has_failed and "index is damaged" in caplog.text
    await store.close()
    store = await SessionStore.open(path)
    assert [summary.id for summary in (await store.list_sessions("ann", q="another question"))[0]] == ["s"]
    await store.close()


def log_bytes(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


@contextmanager
def a_disk_that_takes_nothing_more(path: Path) -> Iterator[None]:
    """The kernel refuses whatever would make the log longer than it is, which SQLite calls an I/O error; all else can be written and read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log_bytes(path), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_file_that_can_be_read_but_not_written_has_failed_until_a_write_works(
    store: SessionStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await store.record_turn("ann", "s", "last", "x" * 3000, answer="y" * 3000, now=NOW)
    looks = 0
    whole = store._health._is_whole

    async def looked_at() -> bool:
        nonlocal looks
        looks += 1
        return await whole()

    store._health._is_whole = looked_at  # type: ignore[method-assign]
    watching = asyncio.create_task(store._health.watch((0.01,)))
    with a_disk_that_takes_nothing_more(path):
        with pytest.raises(GatewayError) as failure:
            await store.record_turn("ann", "s", "lost", "x", answer="y", now=NOW)
        assert failure.value.code == "storage_failed"
        async with asyncio.timeout(60):
            while looks < 5:
                assert store.has_failed
                await asyncio.sleep(0.01)
        assert len((await store.get_session("ann", "s")).turns) == 51, "reading goes on"
    async with asyncio.timeout(60):
        while store.has_failed:
            await asyncio.sleep(0.01)
    watching.cancel()
    await store.record_turn("ann", "s", "next", "x", answer="y", now=NOW)
    assert caplog.text.count("written again") == 1


async def test_a_probe_writes_to_the_disk_and_changes_nothing(store: SessionStore, path: Path) -> None:
    before = log_bytes(path)
    assert store._health.write is not None
    await store._health.write()
    assert log_bytes(path) > before
    await store.close()
    again = await SessionStore.open(path)
    assert len((await again.get_session("ann", "s")).turns) == 50
    await again.close()
