"""`overture backup` while a server runs, and `overture restore`: the restored server has the people, their keys and their conversations."""

import asyncio
import errno
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from gateway.access.key_file import key_file_line
from gateway.app import Server, build_services
from gateway.errors import StartupError
from gateway.metrics.metrics import Metrics
from gateway.people.backup import DATABASES, back_up, restore
from gateway.people.estate import SESSIONS_NAME
from gateway.people.ledger import NAME as LEDGER
from gateway.people.roll import read_roll
from gateway.settings.config import Config
from gateway.turns.protocol import Message

from .fake_node import FakeNode
from .front import bearer
from .parts import KEY, OTHER, key_file
from .test_people import Refused, Run, run  # noqa: F401 - a fixture


@asynccontextmanager
async def serving(data_dir: Path, keys: Path) -> AsyncIterator[tuple[Server, FakeNode]]:
    """A server as `overture serve` builds it, but for its node."""
    node: Any = FakeNode()
    config = Config(port=0, data_dir=data_dir, api_key_file=keys, drain_timeout_s=1)
    services = await build_services(config, node=node, metrics=Metrics(CollectorRegistry()))
    async with Server(services) as server:
        yield server, node


async def call(server: Server, method: str, path: str, body: Any = None, key: str = KEY) -> Any:
    async with (
        aiohttp.ClientSession(server.url, headers=bearer(key)) as http,
        http.request(method, path, json=body) as reply,
    ):
        assert reply.status < 300, await reply.text()
        return await reply.json() if reply.status != 204 else None


async def get(server: Server, path: str, key: str = KEY) -> Any:
    return await call(server, "GET", path, key=key)


async def test_a_command_has_a_running_server_erase_a_person(
    run: Run,  # noqa: F811
    team: Path,
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "-m", "gateway.cli", "users", "delete", "bob", "--yes"]

    async def command(*options: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own, as the lock on the session file is the process's."""
        return await asyncio.to_thread(
            subprocess.run, [*argv, *options], capture_output=True, text=True, timeout=60
        )

    async with serving(tmp_path / "data", team) as (server, _):
        await get(server, "/api/sessions", OTHER)
        refused = await command("--url", server.url, "--api-key", OTHER)
        assert refused.returncode == 2 and "operator's key" in refused.stderr
        erased = await command("--url", server.url, "--api-key", KEY)
        assert erased.stdout == "Erased bob: 0 conversations, 3 blocks of KV on disk.\n", erased.stderr
    assert [person.name for person in read_roll(team, {}).people()] == ["ada"]


async def test_a_running_server_is_backed_up_and_the_copy_answers_with_its_conversations(
    run: Run,  # noqa: F811
    team: Path,
    tmp_path: Path,
) -> None:
    async with serving(tmp_path / "data", team) as (server, node):
        turns = server.services.turns
        me, _ = (await get(server, "/v1/usage"))["people"]
        done = await turns.ask(me["owner"], Message(id="m1", content="What is a hen?"))
        (await node.asked(0)).finish("A bird.")
        while turns.is_busy(me["owner"]):
            await asyncio.sleep(0)
        await call(server, "PUT", "/api/presets/p", {"name": "Patient", "settings": {"temperature": 0.5}})
        await turns.ask(me["owner"], Message(id="m2", content="Under way."))
        await node.asked(1)
        said = await asyncio.to_thread(run, "backup", "copy")
        assert "sessions.sqlite3" in said and "keys" in said
        await call(server, "POST", "/api/sessions", {"title": "Later"})  # the server goes on
        with pytest.raises(Refused, match="is there already"):
            await asyncio.to_thread(run, "backup", "copy")
        node.cut_off()
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "copy").iterdir()}
    assert {"sessions.sqlite3", "people.sqlite3", "keys", "backup.json"} <= found.keys()
    assert set(found.values()) == {0o600} and stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o700
    await asyncio.to_thread(run, "restore", "copy", "--data-dir", "new", "--key-file", "new-keys")
    async with serving(tmp_path / "new", tmp_path / "new-keys") as (server, _):
        listed = (await get(server, "/api/sessions"))["sessions"]
        assert {session["id"] for session in listed} >= {done.session_id} and len(listed) == 2
        session = await get(server, f"/api/sessions/{done.session_id}")
        assert [turn["answer"] for turn in session["turns"]] == ["A bird."]
        me, _ = (await get(server, "/v1/usage"))["people"]
        assert (me["name"], me["num_sessions"]) == ("ada", 2)
        assert [preset["name"] for preset in (await get(server, "/api/presets"))["presets"]] == ["Patient"]


def begun(folder: Path) -> None:
    """A server with a key file has run here."""
    key_file(folder, key_file_line("ada", KEY))

    async def begin() -> None:
        async with serving(folder / "data", folder / "keys"):
            pass

    asyncio.run(begin())


def test_nothing_is_overwritten_and_nothing_half_restored(run: Run, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(Refused, match="no conversations in"):
        run("backup", "copy")
    assert not list(tmp_path.glob("*copy*"))
    begun(tmp_path)
    run("backup", "copy")
    with pytest.raises(Refused, match=r"data/\S+ is there already"):
        run("restore", "copy", "--key-file", "elsewhere")
    with pytest.raises(Refused, match="keys is there already"):
        run("restore", "copy", "--data-dir", "new")
    assert not (tmp_path / "new").exists() and not (tmp_path / "elsewhere").exists()
    (tmp_path / "copy" / "people.sqlite3").write_bytes(b"another")
    with pytest.raises(Refused, match=r"damaged: people.sqlite3"):
        run("restore", "copy", "--data-dir", "new", "--key-file", "new-keys")
    for text, why in (
        ("{}", "no backup"),
        (json.dumps({"format": 9, "overture": "9", "made_at": 0, "files": {}}), "newer version"),
        (json.dumps({"format": 1, "overture": "1", "made_at": 0, "files": {"../x": ""}}), "no backup"),
    ):
        (tmp_path / "copy" / "backup.json").write_text(text)
        with pytest.raises(Refused, match=why):
            run("restore", "copy", "--data-dir", "new", "--key-file", "new-keys")
    with pytest.raises(Refused, match="no backup"):
        run("restore", "nowhere", "--data-dir", "new", "--key-file", "new-keys")
    assert not (tmp_path / "new").exists() and not (tmp_path / "new-keys").exists()


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Path:  # noqa: F811
    """A backup of a server with a key file."""
    begun(tmp_path)
    run("backup", "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("fault", ["full", "file_limit", "no_folder", "no_key_file"])
def test_what_is_wrong_with_a_place_is_said_in_a_sentence_and_nothing_stays(
    copy: Path, tmp_path: Path, fault: str
) -> None:
    """The copy is a data folder, too."""
    to = tmp_path / "away" / "backup" if fault == "no_folder" else tmp_path / "backup"
    keys = tmp_path / "nowhere" if fault == "no_key_file" else None
    says = {
        "full": f"there is no room left for {to}. Nothing was kept of it.",
        "file_limit": f"there is no room left for {to}. Nothing was kept of it.",
        "no_folder": f"There is no folder {to.parent} to put the backup into: make it first.",
        "no_key_file": f"No such file or directory: {keys}.",
    }[fault]
    full = OSError(errno.ENOSPC if fault == "full" else errno.EFBIG, "said by the kernel")

    def copied(*_: Any) -> None:
        raise full

    with pytest.MonkeyPatch.context() as patch:
        if fault in ("full", "file_limit"):
            patch.setattr(shutil, "copyfileobj", copied)
        with pytest.raises(StartupError) as told:
            back_up(copy, keys or copy / "keys", to)
    assert str(told.value).endswith(says) and "Errno" not in str(told.value)
    assert not to.exists() and not list(tmp_path.glob(".*.new-*"))


def killed(folder: Path) -> Path:
    """A copy of the data folder as `kill -9` leaves it, behind the backup by a table of one text."""
    left = folder / "left"
    with closing(sqlite3.connect(folder / "data" / SESSIONS_NAME)) as conn:
        conn.execute("CREATE TABLE later (text)")
        conn.execute("INSERT INTO later VALUES ('said last')")
        conn.commit()
        shutil.copytree(folder / "data", left)
    return left


def test_what_a_killed_server_left_beside_its_databases_is_not_put_into_a_restored_one(
    run: Run,  # noqa: F811
    copy: Path,
    tmp_path: Path,
) -> None:
    left, new = killed(tmp_path), tmp_path / "new"
    assert (left / f"{SESSIONS_NAME}-wal").stat().st_size > 0
    for path in left.iterdir():
        if "-wal" in path.name or "-shm" in path.name:
            new.mkdir(exist_ok=True)
            path.rename(new / path.name)
    with pytest.raises(Refused, match=r"sessions.sqlite3-wal is there already"):
        run("restore", "copy", "--data-dir", "new", "--key-file", "new-keys")
    assert not (new / SESSIONS_NAME).exists() and not (tmp_path / "new-keys").exists()


def test_data_on_a_disk_that_takes_no_new_file_is_backed_up(copy: Path, tmp_path: Path) -> None:
    """A full disk, or one without writes: when a backup is wanted most. A pipe in the place of SQLite's shared memory takes no bytes either."""
    left, to = killed(tmp_path), tmp_path / "backup"
    for name in (SESSIONS_NAME, "people.sqlite3"):
        (left / f"{name}-shm").unlink(missing_ok=True)
        os.mkfifo(left / f"{name}-shm")
    back_up(left, None, to)
    with closing(sqlite3.connect(to / SESSIONS_NAME)) as conn:
        assert conn.execute("SELECT text FROM later").fetchall() == [("said last",)]
    assert not list(to.glob("*-wal")) and not list(to.glob("*-shm"))


def test_what_a_killed_process_has_half_written_is_taken_back_in_the_copy(copy: Path, tmp_path: Path) -> None:
    file, to = tmp_path / "data" / LEDGER, tmp_path / "backup"
    code = (
        f"import os, sqlite3\nconn = sqlite3.connect({str(file)!r}, isolation_level=None)\n"
        "conn.execute('CREATE TABLE many (number, text)')\n"
        "conn.executemany('INSERT INTO many VALUES (?, ?)', [(1, 'x' * 500)] * 2000)\n"
        "conn.execute('PRAGMA cache_size = 2')\nconn.execute('BEGIN')\nconn.execute('UPDATE many SET number = 2')\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert file.with_name(f"{LEDGER}-journal").stat().st_size > 0
    back_up(tmp_path / "data", None, to)
    with closing(sqlite3.connect(to / LEDGER)) as conn:
        assert conn.execute("SELECT number, count(*) FROM many GROUP BY number").fetchall() == [(1, 2000)]
    assert not list(to.glob("*-journal"))


def test_a_restore_that_is_killed_leaves_no_half_database(copy: Path, tmp_path: Path) -> None:
    """The process is killed after the first bytes of the last file."""
    listed = json.loads((copy / "backup.json").read_text())
    last = list(listed["files"])[-1]
    new = tmp_path / "new"
    script = (
        "import os, pathlib, signal\n"
        "from gateway.people import backup\n"
        "whole = backup.shutil.copyfileobj\n"
        "def half(old, new):\n"
        f"    if pathlib.Path(old.name).name == {last!r}:\n"
        "        new.write(old.read(10)); new.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    whole(old, new)\n"
        "backup.shutil.copyfileobj = half\n"
        f"backup.restore(pathlib.Path({str(copy)!r}), pathlib.Path({str(new)!r}), pathlib.Path({str(tmp_path / 'new-keys')!r}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (new / last).exists()
    assert list(new.glob(".*.new-*")), "for its owner only, and of no use"
    restore(copy, new, tmp_path / "new-keys")
    assert (new / last).read_bytes() == (copy / last).read_bytes() and not list(new.glob(".*.new-*"))


def test_what_a_killed_backup_left_is_removed_by_the_next_and_one_that_goes_on_is_not(
    copy: Path, tmp_path: Path
) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from gateway.people import backup\n"
        "whole = backup._copy_database\n"
        "def wait_first(source, target):\n"
        "    print(flush=True); sys.stdin.readline(); whole(source, target)\n"
        "backup._copy_database = wait_first\n"
        f"backup.back_up(pathlib.Path({str(tmp_path / 'data')!r}), None, pathlib.Path(sys.argv[1]))\n"
    )

    def begun(name: str) -> subprocess.Popen[bytes]:
        """A backup that has made its folder."""
        argv = [sys.executable, "-c", script, str(tmp_path / name)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        return process

    with begun("going-on") as going_on, begun("killed") as killed:
        killed.kill()
        killed.wait()
        others = tmp_path / ".of-another-program.new-7"
        others.mkdir()
        (others / "notes.txt").write_text("mine")
        assert list(tmp_path.glob(".killed.new-*"))
        back_up(tmp_path / "data", None, tmp_path / "next")
        assert not list(tmp_path.glob(".killed.new-*"))
        assert (others / "notes.txt").exists()
        going_on.communicate(b"\n" * len(DATABASES))
    assert going_on.returncode == 0 and (tmp_path / "going-on" / "backup.json").is_file()
