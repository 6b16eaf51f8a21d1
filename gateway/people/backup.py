"""A copy of all that a server keeps for its people, made while it runs, and a server's data made of such a copy.

Databases are copied by SQLite's online backup: each is as it was at one moment, and nobody waits for it. What can be computed again is left out: KV,
measurements, compiled kernels.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from gateway.advisories import learned_file
from gateway.errors import StartupError
from gateway.people.audit import NAME as AUDIT
from gateway.people.estate import SESSIONS_NAME
from gateway.people.ledger import NAME as LEDGER
from gateway.people.unfinished import hold, locked, new_name, remove_left_files, remove_left_folders
from gateway.sessions.database import StoreInUse, lock
from gateway.shelf.store import NAME as SHELF
from overture_client import __version__

ADAPTERS, CLUSTER_TOKEN = "adapters.db", "cluster-token"
DATABASES = (SESSIONS_NAME, LEDGER, SHELF, ADAPTERS)
LENGTHS = "lengths-*.msgpack"
KEYS = "keys"
# A full disk, a quota, the largest file that a process may write.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Primary codes of SQLite's where it can make no file.
_NO_WRITES = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
LIST_NAME, FORMAT = "backup.json", 1
# Of all files that a backup may have, those beside its databases while they are written among them.
_FILE_NAMES = (
    *(f"{name}*" for name in DATABASES),
    AUDIT,
    learned_file.NAME,
    CLUSTER_TOKEN,
    LENGTHS,
    KEYS,
    LIST_NAME,
)
BUSY_TIMEOUT_S = 60.0  # Chosen: for a server that just rewrites its file, as after an upgrade.


class Contents(msgspec.Struct, frozen=True):
    """`backup.json`: what the backup holds. files: the SHA-256 of each file, by its name; made_at: seconds since the epoch."""

    format: int
    overture: str
    made_at: float
    files: dict[str, str]


def back_up(data_dir: Path, key_file: Path | None, to: Path) -> Contents:
    """Copy a server's data, which may be running, into a new folder for its owner only. What fails leaves no folder.

    The key file comes last, so that it lists every person with a conversation in the backup. This blocks. Raises StartupError.
    """
    if os.path.lexists(to):
        raise StartupError(f"{to} is there already, and nothing is overwritten: name a folder that is new.")
    if not to.absolute().parent.is_dir():
        raise StartupError(
            f"There is no folder {to.absolute().parent} to put the backup into: make it first."
        )
    if not (data_dir / SESSIONS_NAME).is_file():
        raise StartupError(
            f"There are no conversations in {data_dir}: which server? Name its folder with --data-dir."
        )
    parent, new = to.absolute().parent, new_name(to)
    held = None
    try:
        with locked(parent):
            remove_left_folders(parent, _FILE_NAMES)
            new.mkdir(mode=0o700)
            held = hold(new)
        for name in DATABASES:
            if (data_dir / name).is_file():
                _copy_database(data_dir / name, new / name)
        for path in (
            data_dir / AUDIT,
            data_dir / learned_file.NAME,
            data_dir / CLUSTER_TOKEN,
            *data_dir.glob(LENGTHS),
        ):
            _copy_if_there(path, new / path.name)
        if key_file is not None:
            _copy(key_file, new / KEYS)
        files = {path.name: _digest(path) for path in sorted(new.iterdir())}
        contents = Contents(FORMAT, __version__, time.time(), files)
        _write(new / LIST_NAME, msgspec.json.format(msgspec.json.encode(contents)))
        _sync(new)
        new.rename(to)
        _sync(parent)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, (OSError, sqlite3.Error)):
            raise StartupError(f"The backup could not be made: {_said(error, to)}") from error
        raise
    finally:
        if held is not None:
            os.close(held)
    return contents


def restore(backup: Path, data_dir: Path, key_file: Path | None) -> Contents:
    """Make a server's data of a backup. Nothing is overwritten, and what fails leaves nothing behind. This blocks.

    Args:
        backup: the folder that `back_up` made.
        data_dir: the data folder, which is made if missing; it may hold nothing that the backup has.
        key_file: where the key file goes, if the backup has one.

    Raises:
        StartupError: the backup is no backup, of a newer version, or damaged; or something is there already.
    """
    contents = _contents_of(backup)
    places = {name: data_dir / name for name in contents.files if name != KEYS}
    if KEYS in contents.files:
        if key_file is None:
            raise StartupError("The backup has a key file: say where it goes with --key-file.")
        places[KEYS] = key_file
    for name, digest in contents.files.items():
        if not (backup / name).is_file() or _digest(backup / name) != digest:
            raise StartupError(
                f"The backup is damaged: {name} is missing, or not as it was. Nothing was restored."
            )
    for place in [*places.values(), *_left_by(data_dir / name for name in DATABASES)]:
        if os.path.lexists(place):
            raise StartupError(
                f"{place} is there already, and nothing is overwritten. Move it away, or name other places."
            )
    _put_in_place({backup / name: place for name, place in places.items()}, data_dir)
    return contents


def _left_by(databases: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that a killed process leaves beside databases: SQLite would put what they say into a restored one."""
    for database in databases:
        for end in ("-wal", "-shm", "-journal"):
            yield database.with_name(database.name + end)


def _put_in_place(places: Mapping[Path, Path], data_dir: Path) -> None:
    """Copy files to new places: all of them, or none. Each has its name only once it is whole, also where the process is killed.

    Raises StartupError.
    """
    new = {place: new_name(place) for place in places.values()}
    made: list[Path] = []
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(data_dir):
            remove_left_files(places.values())
            for source, place in places.items():
                made.append(new[place])
                _copy(source, new[place])
            for place, copied in new.items():
                if os.path.lexists(place):
                    raise FileExistsError(f"{place} has come meanwhile")
                copied.rename(place)
                made.append(place)
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StartupError(f"The backup could not be restored: {_said(error, data_dir)}") from error
        raise


def _contents_of(backup: Path) -> Contents:
    def refuse(error: Exception) -> NoReturn:
        """Say that this is no backup."""
        raise StartupError(
            f"{backup} is no backup of `overture backup`: {LIST_NAME} cannot be read."
        ) from error

    try:
        contents = msgspec.json.decode((backup / LIST_NAME).read_bytes(), type=Contents)
    except (OSError, ValueError) as error:
        refuse(error)
    if contents.format > FORMAT:
        raise StartupError(
            f"{backup} was made by a newer version of Overture ({contents.overture}). Upgrade first."
        )
    if any(Path(name).name != name or name.startswith(".") for name in contents.files):
        refuse(ValueError("a file outside of the backup"))
    return contents


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database that may be in use. Raises OSError, sqlite3.Error, StartupError."""
    uri = f"{source.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as old:
        if _can_be_read(old):
            _write(target, b"")
            with closing(sqlite3.connect(target)) as new:
                old.backup(new)
        else:
            _copy_with_log(source, target)
    with closing(sqlite3.connect(target)) as new:
        # One file by itself, without a log beside it.
        new.execute("PRAGMA journal_mode = DELETE").fetchall()


def _can_be_read(conn: sqlite3.Connection) -> bool:
    """Return whether SQLite can read a database where it is.

    While no server has it open, SQLite wants to make a file beside it for that, which a full disk does not take, nor one without writes.
    """
    try:
        conn.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in _NO_WRITES:
            return False
        raise
    return True


def _copy_with_log(source: Path, target: Path) -> None:
    """Copy the files of a database that no server has open. Raises OSError, and StoreInUse where one has.

    What a killed process has left beside it belongs to it: SQLite adds the log, and takes back by the journal what was half written.
    """
    held = None
    try:
        held = lock(source.with_name(SESSIONS_NAME))
    except StoreInUse:
        raise
    except StartupError:
        pass  # where nothing can be written no server runs either
    try:
        for end in ("", "-wal", "-journal"):
            _copy_if_there(source.with_name(source.name + end), target.with_name(target.name + end))
    finally:
        if held is not None:
            os.close(held)


def _copy_if_there(source: Path, target: Path) -> None:
    try:
        _copy(source, target)
    except FileNotFoundError:
        target.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    """Copy a file, for its owner only; root's copy belongs to the folder's owner. Raises OSError."""
    with source.open("rb") as old, _made(target) as new:
        shutil.copyfileobj(old, new)
        new.flush()
        folder = target.parent.stat()
        if os.geteuid() == 0 and folder.st_uid != 0:
            os.fchown(new.fileno(), folder.st_uid, folder.st_gid)
        os.fsync(new.fileno())


def _write(target: Path, data: bytes) -> None:
    with _made(target) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Put on disk which files a folder has, where its file system can: those of some networks cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _said(error: OSError | sqlite3.Error, place: Path) -> str:
    """Return the sentence that a person is told of an error while files were written to a place."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in _FULL):
        return f"there is no room left for {place}. Nothing was kept of it."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or place}."
    return f"{error}: {place}."


def _made(target: Path) -> BinaryIO:
    return os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
