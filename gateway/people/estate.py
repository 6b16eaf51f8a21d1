"""What a person has in the data folder, while no server needs to run: a copy of it, and its end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from gateway.access.auth import tenant_of
from gateway.advisories import learned_file
from gateway.errors import GatewayError, StartupError
from gateway.people.ledger import NAME as LEDGER_NAME
from gateway.people.ledger import Day, Ledger
from gateway.sessions import SCHEMA_VERSION, SessionStore
from gateway.sessions.archive import Archive, file_name
from gateway.sessions.connection import is_full
from gateway.sessions.database import lock, open_reader
from gateway.sessions.listing import ids_of
from gateway.sessions.room import Reserve
from gateway.sessions.schema import version_of
from gateway.sessions.transfers import export
from gateway.shelf.store import NAME as SHELF_NAME
from gateway.shelf.store import Preset, Shelf
from kvtiers.errors import StoreBusy
from kvtiers.io.inspect import erase

SESSIONS_NAME = "sessions.sqlite3"
FIRST_DAY = "0000-00-00"
TELL_EVERY_S = 2.0  # Chosen: a person at a terminal sees that it goes on.


class Erased(NamedTuple):
    """The data of a person that was erased: conversations, and blocks of KV on disk."""

    num_sessions: int
    num_kv_blocks: int


def export_to(to: Path, data_dir: Path, owner: str, name: str) -> int:
    """Write an export into a zip file for its owner only, and return the number of conversations; see `write_export`.

    The file has its name when it is whole. What fails leaves no file; a process that is killed leaves one whose name ends in `.part`.
    Raises StartupError.
    """
    try:
        _refuse(to)
        fd, part = tempfile.mkstemp(dir=to.parent, prefix=f"{to.name}.", suffix=".part")
    except OSError as error:
        raise StartupError(f"{to} cannot be made: {error.strerror}.") from error
    try:
        with open(fd, "r+b") as file:
            num = write_export(file, data_dir / SESSIONS_NAME, data_dir, owner, name)
        _refuse(to)
        os.rename(part, to)
    except BaseException as error:
        Path(part).unlink(missing_ok=True)
        if isinstance(error, OSError):  # what was left to be written when the file was closed
            raise StartupError(f"{to} cannot be written: {error.strerror}.") from error
        raise
    return num


def _refuse(there: Path) -> None:
    """Raise FileExistsError where a file is there already."""
    if os.path.lexists(there):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(there))


def write_export(file: IO[bytes], sessions: Path, data_dir: Path, owner: str, name: str) -> int:
    """Write a person's conversations, usage and presets into a zip file, and return the number of conversations.

    A server may be running over the session file `sessions`. Each conversation is a file that `POST /api/sessions/import` takes. This blocks.
    Raises StartupError.
    """
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            num = 0
            for num, conversation in enumerate(_conversations(sessions, owner), 1):
                text = msgspec.json.format(msgspec.json.encode(conversation), indent=1)
                archive.writestr(f"conversations/{num:05}-{file_name(conversation.title, 'json')}", text)
            days = [{"day": day, **spent._asdict()} for _, day, spent in _usage_in(data_dir, owner)]
            if presets := _presets_in(data_dir, owner):
                archive.writestr("presets.json", msgspec.json.format(msgspec.json.encode(presets), indent=1))
            about = {"name": name, "owner": owner, "exported_at": time.time(), "usage": days}
            archive.writestr("person.json", json.dumps(about, indent=1))
        return num
    except StartupError:
        raise
    except (OSError, sqlite3.Error, GatewayError) as error:
        raise StartupError(f"The conversations of {name} cannot be exported: {error}") from error


def _presets_in(data_dir: Path, owner: str) -> list[Preset]:
    file = data_dir / SHELF_NAME
    return [preset for preset in Shelf(file).presets(owner) if preset.is_own] if file.exists() else []


def _usage_in(data_dir: Path, owner: str) -> list[Day]:
    if not (data_dir / LEDGER_NAME).exists():
        return []
    ledger = Ledger.open(data_dir / LEDGER_NAME)
    try:
        return ledger.days(FIRST_DAY, owner)
    finally:
        ledger.close()


def reserve_in(data_dir: Path) -> Reserve:
    """Return what keeps room on the disk of a data folder."""
    return Reserve(data_dir / f"{SESSIONS_NAME}.reserve")


def _opened(file: Path) -> sqlite3.Connection:
    """Return a connection that reads. While no server has the file open that takes room, on a full disk of the reserve. Raises sqlite3.Error."""
    conn = open_reader(file)
    try:
        version_of(conn)
    except sqlite3.Error as error:
        conn.close()
        if not is_full(error) or not reserve_in(file.parent).give_some():
            raise
        return open_reader(file)
    return conn


def _conversations(file: Path, owner: str) -> Iterator[Archive]:
    """Yield an owner's conversations, the oldest first, as they are at one moment. Raises StartupError, sqlite3.Error."""
    if not file.exists():
        return
    with closing(_opened(file)) as conn:
        if version_of(conn) != SCHEMA_VERSION:
            raise StartupError(
                f"{file} is of another version of Overture. Start the server once with this one, then export."
            )
        conn.execute("BEGIN")
        for session_id in ids_of(conn, owner):
            yield export(conn, owner, session_id)


def check_no_server(data_dir: Path) -> None:
    """Raise StoreInUse where a server runs over the data folder."""
    if (data_dir / SESSIONS_NAME).exists():
        os.close(lock(data_dir / SESSIONS_NAME))


def erase_person(data_dir: Path, kv_dir: Path, owner: str, tell: Callable[[int], None]) -> Erased:
    """Erase what a person has in the data folder: conversations, usage, learned habits of the person's agents, and KV on disk.

    No server may run over the folder. The KV goes last, so a store that is held keeps only itself.

    Args:
        data_dir: the data folder.
        kv_dir: the folder of the KV.
        owner: the person.
        tell: is told now and then how many conversations are left.

    Raises:
        StoreInUse: a server runs over the folder, and nothing was erased.
        StartupError: not all could be erased.
    """
    num_sessions = 0
    if (data_dir / SESSIONS_NAME).exists():
        num_sessions = asyncio.run(_erase_sessions(data_dir / SESSIONS_NAME, owner, tell))
    if (data_dir / LEDGER_NAME).exists():
        ledger = Ledger.open(data_dir / LEDGER_NAME)
        try:
            ledger.forget(owner)
        finally:
            ledger.close()
    Shelf(data_dir / SHELF_NAME).erase(owner)
    try:
        _forget_agents(data_dir / learned_file.NAME, owner)
        num_blocks = erase(kv_dir, tenant_of(owner)) if kv_dir.is_dir() else 0
    except StoreBusy as error:
        raise StartupError(f"{error}: the conversations are erased, the KV on disk is not.") from error
    except OSError as error:
        raise StartupError(f"The conversations are erased, but not all else: {error}.") from error
    return Erased(num_sessions, num_blocks)


def erase_left_kv(kv_dir: Path, owner: str, nodes: Collection[str]) -> int:
    """Erase a person's KV in stores that no engine of a running server has, and return the number of blocks.

    A server has left such stores if it had other nodes before, or one engine instead. Nodes erase theirs themselves, also of models before.

    Args:
        kv_dir: the server's folder for KV.
        owner: the person.
        nodes: the names of the server's nodes.

    Raises:
        OSError: a store cannot be written.
    """
    return erase(kv_dir, tenant_of(owner), skips_held=True, but=nodes) if kv_dir.is_dir() else 0


async def _erase_sessions(file: Path, owner: str, tell: Callable[[int], None]) -> int:
    store = await SessionStore.open(file)
    try:
        erasing = asyncio.create_task(store.erase_owner(owner, time.time()))
        while not (await asyncio.wait((erasing,), timeout=TELL_EVERY_S))[0]:
            tell((await store.rows.stored()).get(owner, (0, 0))[1])
        return erasing.result()
    finally:
        await store.close()


def _forget_agents(file: Path, owner: str) -> None:
    known = learned_file.read(file)
    left = [saved for saved in known if saved.name != owner]
    if len(left) != len(known):
        learned_file.write(file, [learned_file.line_of(saved) for saved in left])
