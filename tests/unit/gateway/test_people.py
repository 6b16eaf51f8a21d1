"""People of a key file: the commands that add, list, disable, export and delete them, and that replace and withdraw their keys."""

import asyncio
import errno
import hashlib
import json
import os
import resource
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway import cli
from gateway.access.auth import KeyRing, generate_key
from gateway.access.key_file import key_file_line, owner_of, parse_line
from gateway.access.person_limits import NAMES, PersonLimits
from gateway.advisories import learned_file
from gateway.advisories.followers import SavedOwner
from gateway.errors import GatewayError, StartupError
from gateway.people.ledger import Day, Ledger, Spent
from gateway.people.roll import changing, read_roll
from gateway.sessions import SessionStore
from gateway.sessions.archive import read_archive
from gateway.shelf.store import NAME as SHELF_NAME
from gateway.shelf.store import PresetBody, Shelf
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.records import owner_tag
from kvtiers.keys import BlockKey, BlockShape

from .stores import ask, chat, end
from .test_pictures import image, put

Run = Callable[..., str]


class Refused(Exception):
    """What a command said instead of doing it."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command over a key file and a data folder of its own; returns what it prints on stdout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir(mode=0o700)
    monkeypatch.setenv("OVERTURE_API_KEY_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("OVERTURE_DATA_DIR", str(tmp_path / "data"))

    def run_it(*argv: str, stdin: str = "") -> str:
        done = CliRunner().invoke(cli.cli, argv, input=stdin)
        if done.exit_code:
            raise Refused(str(done.exception) if isinstance(done.exception, StartupError) else done.output)
        return done.stdout

    return run_it


def ring(folder: Path) -> KeyRing:
    return KeyRing(key_file=folder / "keys")


def old_line(name: str, key: str) -> str:
    """As earlier versions made them."""
    salt = key[:11].encode() + secrets.token_bytes(16)
    return f"{name}:sha256${salt.hex()}${hashlib.sha256(salt + key.encode()).hexdigest()}"


def is_refused(folder: Path, key: str) -> bool:
    with pytest.raises(GatewayError) as caught:
        ring(folder).authenticate(key)
    return caught.value.code == "unauthorized"


def audited(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "data" / "audit.jsonl").read_text().splitlines()
    return [(entry["what"], entry["whom"]) for entry in map(json.loads, lines)]


def test_a_person_keeps_what_is_theirs_over_all_their_keys(run: Run, tmp_path: Path) -> None:
    first = run("users", "add", "ada", "--operator").strip()
    bobs = run("users", "add", "bob").strip()
    ada = ring(tmp_path).authenticate(first)
    assert (
        ada.is_operator and ada.owner == owner_of(first) and not ring(tmp_path).authenticate(bobs).is_operator
    )
    second = run("keys", "new", "--name", "ada", "--key-file", "keys").strip()
    assert ring(tmp_path).authenticate(second) == ada
    with pytest.raises(Refused, match="2 keys"):
        run("keys", "replace", "ada")
    third = run("keys", "replace", "ada", "--key", first[:11]).strip()
    assert is_refused(tmp_path, first) and ring(tmp_path).authenticate(third) == ada
    run("keys", "revoke", "ada", "--all", "--last-operator")
    assert is_refused(tmp_path, second) and is_refused(tmp_path, third)
    fourth = run("keys", "new", "--name", "ada", "--key-file", "keys").strip()
    assert ring(tmp_path).authenticate(fourth) == ada, (
        "who has no key left is still there, with the same role"
    )
    run("users", "disable", "ada", "--last-operator")
    assert is_refused(tmp_path, fourth)
    fifth = run("keys", "replace", "ada").strip()
    assert is_refused(tmp_path, fifth), "a new key of a disabled person is disabled, too"
    run("users", "enable", "ada")
    assert ring(tmp_path).authenticate(fifth) == ada
    assert ring(tmp_path).authenticate(bobs).name == "bob"
    whole = (tmp_path / "keys").read_text() + (tmp_path / "data" / "audit.jsonl").read_text()
    assert not any(key in whole for key in (first, second, third, fourth, fifth, bobs))
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data" / "audit.jsonl").stat().st_mode) == 0o600
    assert audited(tmp_path) == [
        ("person_added", "ada"),
        ("person_added", "bob"),
        ("key_added", "ada"),
        ("key_replaced", "ada"),
        ("key_revoked", "ada"),
        ("key_revoked", "ada"),
        ("key_added", "ada"),
        ("person_disabled", "ada"),
        ("key_replaced", "ada"),
        ("person_enabled", "ada"),
    ]


def test_limits_of_a_person_are_of_all_their_keys_and_stay_when_keys_change(run: Run, tmp_path: Path) -> None:
    first = run("users", "add", "ada").strip()
    ada = owner_of(first)
    shown = run("users", "limit", "ada", "--tokens-per-day", "5000", "--stored-mib", "0")
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["requests-per-min", "the", "server's"],
        ["concurrent-requests", "the", "server's"],
        ["stored-mib", "none"],
        ["tokens-per-day", "5,000"],
    ]
    run("keys", "new", "--name", "ada", "--key-file", "keys")
    run("keys", "replace", "ada", "--key", first[:11])
    run("users", "limit", "ada", "--stored-mib", "server", "--requests-per-min", "60")
    assert run("users", "limit", ada) == run("users", "limit", "ada"), "showing changes nothing"
    limits = PersonLimits(requests_per_min=60, tokens_per_day=5000)
    assert ring(tmp_path).limits_of(ada) == limits
    lines = (tmp_path / "keys").read_text().splitlines()[1:]
    assert len(lines) == 2 and all("requests-per-min=60:tokens-per-day=5000" in line for line in lines)
    run("keys", "revoke", "ada", "--all")
    assert ring(tmp_path).limits_of(ada) == limits
    noted = [json.loads(line) for line in (tmp_path / "data" / "audit.jsonl").read_text().splitlines()]
    about = [entry["about"] for entry in noted if entry["what"] == "person_limited"]
    assert about == ["stored-mib=0 tokens-per-day=5000", "requests-per-min=60 tokens-per-day=5000"]
    with pytest.raises(Refused, match="a whole number"):
        run("users", "limit", "ada", "--stored-mib", "many")


def test_a_change_on_a_full_disk_takes_room_of_the_reserve(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("users", "add", "ada", "--operator")
    key = run("users", "add", "bob").strip()
    (reserve := tmp_path / "data" / "sessions.sqlite3.reserve").write_bytes(bytes(1000))
    synced, needed = os.fsync, 1000

    def fsync(number: int) -> None:
        if reserve.stat().st_size > 1000 - needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(number)

    monkeypatch.setattr(os, "fsync", fsync)
    run("users", "disable", "bob")
    assert is_refused(tmp_path, key)
    needed = 1001
    with pytest.raises(Refused, match="It is as it was"):
        run("users", "enable", "bob")
    assert is_refused(tmp_path, key)


def test_an_export_from_a_full_disk_takes_room_of_the_reserve(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's shared memory wants 32 KiB there while no server has the conversations open."""
    run("users", "add", "ada")

    async def begin() -> None:
        store = await SessionStore.open(tmp_path / "data" / "sessions.sqlite3")
        await store.close()

    asyncio.run(begin())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    truncated = os.truncate

    def truncate(path: Path, num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        truncated(path, num_bytes)

    monkeypatch.setattr(os, "truncate", truncate)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    try:
        run("users", "export", "ada", "--to", "ada.zip")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert zipfile.is_zipfile(tmp_path / "ada.zip")


def test_the_first_person_is_added_though_settings_already_need_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERTURE_TRUSTED_USER_HEADER", "X-Forwarded-User")
    monkeypatch.delenv("OVERTURE_API_KEY_FILE")
    (tmp_path / "overture.toml").write_text('api_key_file = "team/keys"\n')
    (tmp_path / "team").mkdir()
    with pytest.raises(Refused, match="there is no file"):
        run("config")
    key = run("users", "add", "ada", "--operator").strip()
    assert KeyRing(key_file=tmp_path / "team" / "keys").authenticate(key).name == "ada"
    run("config")
    with pytest.raises(Refused, match="Which key file"):
        (tmp_path / "overture.toml").unlink()
        run("users", "list")


def test_what_is_listed_is_what_stands_in_the_file(run: Run, tmp_path: Path) -> None:
    old, key = generate_key(), generate_key()
    (tmp_path / "keys").write_text(f"{old_line('old', old)}\n{key_file_line('new', key)}:disabled\n")
    shown = [json.loads(line) for line in run("users", "list", "--json").splitlines()]
    alike = {"role": "member", "num_keys": 1, "limits": dict.fromkeys(NAMES)}
    assert shown == [
        alike | {"name": "old", "state": "active", "owner": None},
        alike | {"name": "new", "state": "disabled", "owner": owner_of(key)},
    ]
    assert [line.split()[:3] for line in run("keys", "list").splitlines()[1:]] == [
        [old[:11], "old", "member"],
        [key[:11], "new", "member"],
    ]
    assert old not in run("keys", "list") and "?" in run("users", "list")


def test_a_line_of_an_earlier_version_keeps_its_owner_when_its_key_is_replaced(
    run: Run, tmp_path: Path
) -> None:
    """The owner comes from the key alone. A server that has seen the key has noted it; otherwise the old key has to be given."""
    used, unused = generate_key(), generate_key()
    lines = [old_line("used", used), old_line("unused", unused)]
    (tmp_path / "keys").write_text("\n".join(lines) + "\n")
    keys = ring(tmp_path)
    keys.authenticate(used)
    ledger = Ledger.open(tmp_path / "data" / "people.sqlite3")
    ledger.add([], keys.owners_by_line())
    ledger.close()
    new = run("keys", "replace", "used").strip()
    assert ring(tmp_path).authenticate(new).owner == owner_of(used) and is_refused(tmp_path, used)
    with pytest.raises(Refused, match="owner id of unused is not known"):
        run("keys", "replace", "unused")
    with pytest.raises(Refused, match="no key of 'unused'"):
        run("keys", "replace", "unused", "--old-key", stdin=f"{used}\n")
    run("keys", "revoke", "unused")
    assert is_refused(tmp_path, unused), "a key can be withdrawn although its owner is not known"
    newer = run("keys", "replace", "unused", "--old-key", stdin=f"{unused}\n").splitlines()[-1]
    run("users", "enable", "unused")
    assert ring(tmp_path).authenticate(newer).owner == owner_of(unused)


def test_comments_order_and_rights_of_the_file_stay(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    lines = ["# the team", key_file_line("ada", generate_key()), "", old_line("bob", generate_key()), "# end"]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o644)
    run("users", "add", "eve")
    assert path.read_text().splitlines()[:5] == lines
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "a group that reads it still does, and nobody else"
    run("keys", "replace", "eve")
    path.write_text(path.read_text() + "ada:nonsense\n")
    before = path.read_bytes()
    with pytest.raises(Refused, match="line 7, is not of the form"):
        run("users", "disable", "eve")
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["data", "keys"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("users", "add", "ada"), "a person named 'ada' already"),
        (("users", "add", "two words"), "cannot be a name"),
        (("users", "disable", "nobody"), "no person named 'nobody'"),
        (("users", "disable", "twin"), "2 people are named 'twin'. Give the owner id"),
        (("keys", "replace", "ada", "--key", "ov-nothing"), "has no key 'ov-nothing'"),
        (("keys", "new", "--name", "ada", "--operator", "--key-file", "keys"), "does not go with"),
        (("users", "export", "ada", "--to", "missing/ada.zip"), "cannot be made"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    run: Run, tmp_path: Path, argv: tuple[str, ...], says: str
) -> None:
    lines = [key_file_line(name, generate_key()) for name in ("ada", "twin", "twin")]
    (tmp_path / "keys").write_text("\n".join(lines) + "\n")
    with pytest.raises(Refused, match=says):
        run(*argv)
    assert (tmp_path / "keys").read_text().splitlines() == lines


def test_a_person_is_also_found_by_owner_id(run: Run, tmp_path: Path) -> None:
    keys = [generate_key(), generate_key()]
    (tmp_path / "keys").write_text("".join(key_file_line("twin", key) + "\n" for key in keys))
    run("users", "disable", owner_of(keys[1]))
    assert is_refused(tmp_path, keys[1]) and ring(tmp_path).authenticate(keys[0]).name == "twin"


def test_two_commands_at_once_lose_nothing(run: Run, tmp_path: Path) -> None:
    run("users", "add", "first")
    names = [f"n{number}" for number in range(8)]

    def add(name: str) -> None:
        with changing(tmp_path / "keys", {}) as roll:
            roll.add_person(name, is_operator=False)

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line.split()[0] for line in run("users", "list").splitlines()[1:]) == ["first", *names]


async def fill(data: Path, owner: str, other: str) -> None:
    """Conversations, usage, learned agents and KV of two people."""
    store = await SessionStore.open(data / "sessions.sqlite3")
    await chat(store, "hers", "one", "two", owner=owner)
    await chat(store, "gone", "three", owner=owner)
    await store.delete(owner, "gone", time.time())
    await chat(store, "his", "four", owner=other)
    await put(store, image(7), owner, time.time())
    shown = await put(store, image(9), owner)
    await ask(store, "hers", "five", owner=owner, pictures=(shown,))
    await end(store, "hers", "five", owner=owner)
    await put(store, image(11), other, time.time())
    await store.close()
    ledger = Ledger.open(data / "people.sqlite3")
    ledger.add([Day(owner, "2026-11-29", Spent(2, 10, 20)), Day(other, "2026-11-29", Spent(1, 1, 1))], {})
    ledger.close()
    saved = [SavedOwner(name=name, agents=[], odds=[], links=[], gaps_s=[]) for name in (owner, other)]
    learned_file.write(data / learned_file.NAME, [learned_file.line_of(each) for each in saved])
    for folder in ("model", "node-2/model"):
        await fill_kv(data / "kv" / folder, owner, other)


async def fill_kv(folder: Path, *owners: str) -> None:
    """A store with a block of each of them."""
    log = await DiskLog.open(folder, "model", BlockShape(num_layers=2, layer_bytes=600), 1 << 20)
    for name in owners:
        letter = name[2].encode()
        assert await log.append(
            [BlockKey(letter * 32)], lambda _b, _l, x=letter: memoryview(x * 600), owner_tag(name)
        )
    await log.close()


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_who_is_erased_leaves_the_file_also_where_the_owner_is_forgotten_by_then(tmp_path: Path) -> None:
    """Of a line of an earlier version only what is erased knew the owner."""
    path = tmp_path / "keys"
    lines = [key_file_line(name, generate_key()) for name in ("ada", "bob")]
    path.write_text("\n".join(lines) + "\n")
    old = parse_line(lines[1])
    assert old is not None
    person = read_roll(path, {old.mark: "k_" + "b" * 32}).find("bob")
    with changing(path, {}) as roll:
        roll.remove(person)
    assert path.read_text() == lines[0] + "\n"


@pytest.mark.parametrize(
    "shutting_out",
    [("keys", "revoke", "ada"), ("users", "disable", "ada"), ("users", "delete", "ada", "--yes")],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_the_last_operator_is_shut_out_only_if_that_is_said(
    shutting_out: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    key = run("users", "add", "ada", "--operator").strip()
    run("users", "add", "bob")
    before = (tmp_path / "keys").read_text()
    with pytest.raises(Refused, match=r"no operator's key.*users add NAME --operator"):
        run(*shutting_out)
    assert (tmp_path / "keys").read_text() == before and ring(tmp_path).authenticate(key).is_operator
    run(*shutting_out, "--last-operator")
    assert is_refused(tmp_path, key)
    new = run("users", "add", "eve", "--operator").strip()
    assert ring(tmp_path).authenticate(new).is_operator


async def test_an_export_that_is_killed_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    owner = "k_" + "a" * 32
    await fill(tmp_path, owner, "k_" + "b" * 32)
    # While it is open all files are there, and the export makes no other.
    store = await SessionStore.open(tmp_path / "sessions.sqlite3")
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom gateway.people.estate import export_to\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        f"export_to(Path('ada.zip'), Path('.'), {owner!r}, 'ada')"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}

    def killed() -> list[str]:
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, timeout=60)
        assert ended.returncode == -signal.SIGXFSZ
        return [path.suffix for path in tmp_path.glob("ada.zip*")]

    assert killed() == [".part"]
    await store.close()


async def test_a_person_is_exported_and_erased(tmp_path: Path) -> None:
    """In processes of their own, because a store that is opened here holds its lock for this process only."""
    owners = ["k_" + "a" * 32, "k_" + "b" * 32]
    lines = [f"{name}:no-key:owner={owner}" for name, owner in zip(("ada", "bob"), owners, strict=True)]
    (tmp_path / "keys").write_text("\n".join(lines) + "\n")
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    await fill(data, *owners)
    shelf = Shelf(data / SHELF_NAME)
    for owner in owners:
        shelf.put(owner, "p", PresetBody(name=f"preset of {owner[-1]}"))
        shelf.link(owner, "s", 0.0)
    environ = {**os.environ, "OVERTURE_API_KEY_FILE": "keys", "OVERTURE_DATA_DIR": "data"}
    environ["PYTHONPATH"] = str(Path(cli.__file__).parents[1])

    def command(*argv: str) -> subprocess.CompletedProcess[str]:
        code = [sys.executable, "-m", "gateway.cli", *argv]
        return subprocess.run(code, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)

    store = await SessionStore.open(data / "sessions.sqlite3")
    done = command("users", "export", "ada", "--to", "ada.zip")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "ada.zip") as archive:
        person = json.loads(archive.read("person.json"))
        assert (person["name"], person["owner"], person["usage"][0]["answer_tokens"]) == (
            "ada",
            owners[0],
            20,
        )
        assert [preset["name"] for preset in json.loads(archive.read("presets.json"))] == ["preset of a"]
        (conversation,) = (name for name in archive.namelist() if name.startswith("conversations/"))
        turns = read_archive(json.loads(archive.read(conversation))).turns
        assert [turn.answer for turn in turns] == ["re: one", "re: two", "hi"]
    assert stat.S_IMODE((tmp_path / "ada.zip").stat().st_mode) == 0o600
    again = command("users", "export", "ada", "--to", "ada.zip")
    assert again.returncode == 2 and "ada.zip cannot be made: File exists" in again.stderr
    refused = command("users", "delete", "ada", "--yes")
    assert refused.returncode == 2 and "OVERTURE_API_KEY=KEY overture users delete ada" in refused.stderr
    assert (tmp_path / "keys").read_text().splitlines() == lines
    await store.close()
    assert b"re: two" in everything_in(data) and b"a" * 600 in everything_in(data)
    done = command("users", "delete", "ada", "--yes")
    assert done.stdout == "Erased ada: 2 conversations, 2 blocks of KV on disk.\n", done.stderr
    (data / "audit.jsonl").unlink()
    left = everything_in(data)
    for trace in (
        b"re: one",
        b"re: two",
        b"re: three",
        b"ask three",
        b"a" * 600,
        b"preset of a",
        image(7),
        image(9),
        owners[0].encode(),
    ):
        assert trace not in left, trace
    assert b"re: four" in left and image(11) in left and b"b" * 600 in left and owners[1].encode() in left
    assert (tmp_path / "keys").read_text().splitlines() == lines[1:]
    refused = command("users", "delete", "bob", "--yes")
    assert refused.returncode == 2 and "last person" in refused.stderr and b"re: four" in everything_in(data)
