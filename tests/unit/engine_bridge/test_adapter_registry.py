"""The registry of adapters on real SQLite files: what each method promises, damaged files, a full disk, then all of it against a model."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_bridge.adapters.errors import RegistryFailed
from engine_bridge.adapters.registry import AdapterRecord, Registry

NOW = 1_700_000_000.0
FACTS: dict[str, Any] = {
    "checksum": 2**63 - 1,
    "rank": 8,
    "num_bytes": 2**40,
    "target_modules": ("k_proj", "q_proj"),
    "base_model": "demo/base",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "adapters.db"


@pytest.fixture
def registry(path: Path) -> Iterator[Registry]:
    registry = Registry(path)
    yield registry
    registry.close()


def test_only_its_owner_can_read_it_while_it_is_in_use(path: Path) -> None:
    mask = os.umask(0o022)
    try:
        registry = Registry(path)
        register(registry)
        files = list(path.parent.iterdir())
        assert {file.name for file in files} >= {"adapters.db", "adapters.db-wal"}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        registry.close()
    finally:
        os.umask(mask)


def register(
    registry: Registry,
    name: str = "law",
    path: str = "/a/law",
    content: str = "h1",
    signature: str = "s1",
    now: float = NOW,
) -> AdapterRecord:
    return registry.register(name, path, content_hash=content, signature=signature, now=now, **FACTS)


def states(registry: Registry, *records: AdapterRecord) -> list[str]:
    found = [registry.get(record.version_id) for record in records]
    return [record.state for record in found if record is not None]


def test_a_pipe_is_set_aside_and_a_new_registry_begun(path: Path) -> None:
    os.mkfifo(path)
    with contextlib.closing(Registry(path)) as registry:
        assert register(registry).state == "ready"
    assert path.is_file()
    assert path.with_name("adapters.db.set-aside-1").exists()


# --- versions ------------------------------------------------------------------------------------------------------------------------


def test_what_is_registered_is_kept_over_a_restart(path: Path) -> None:
    first = Registry(path)
    record = register(first)
    first.close()
    again = Registry(path)
    assert again.current("law") == again.get(record.version_id) == record
    assert record == AdapterRecord(
        version_id=1,
        name="law",
        path="/a/law",
        content_hash="h1",
        signature="s1",
        state="ready",
        is_pinned=False,
        added_at=NOW,
        last_used_at=None,
        num_uses=0,
        **FACTS,
    )
    again.close()


def test_the_same_content_is_the_same_version_with_a_new_signature(registry: Registry) -> None:
    old = register(registry)
    new = register(registry, signature="s2", now=NOW + 5)
    assert new == msgspec.structs.replace(old, signature="s2")
    assert registry.known("/a/law", "s1") is None


@pytest.mark.parametrize("change", [{"content": "h2"}, {"path": "/b/law"}])
def test_other_content_or_another_path_replaces_the_version(
    registry: Registry, change: dict[str, str]
) -> None:
    old = register(registry)
    new = register(registry, **change)  # type: ignore[arg-type]
    assert new.version_id > old.version_id
    assert states(registry, old, new) == ["replaced", "ready"]
    assert registry.current("law") == new


def test_content_that_comes_back_is_a_new_version(registry: Registry) -> None:
    first, second, third = (register(registry, content=content) for content in ("h1", "h2", "h1"))
    assert first.version_id < second.version_id < third.version_id
    assert states(registry, first, second, third) == ["replaced", "replaced", "ready"]


def test_a_removed_name_is_gone_and_its_version_can_still_be_looked_up(registry: Registry) -> None:
    record = register(registry)
    removed = registry.remove("law", NOW)
    assert removed is not None and removed.state == "removed"
    assert registry.current("law") is None and registry.all_current() == []
    assert registry.get(record.version_id) == removed
    assert registry.remove("law", NOW) is None, "a second time there is nothing to remove"
    assert register(registry).version_id > record.version_id


def test_numbers_are_not_used_again_when_the_last_version_went_before_a_restart(path: Path) -> None:
    first = Registry(path)
    last = register(first)
    first.remove("law", NOW)
    first.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM versions")
    connection.close()
    again = Registry(path)
    assert register(again).version_id > last.version_id
    again.close()


def test_a_missing_version_stays_current_and_becomes_ready_with_its_files(registry: Registry) -> None:
    record = register(registry)
    assert registry.mark_missing(record.version_id)
    missing = registry.current("law")
    assert missing is not None and missing.state == "missing"
    assert registry.all_current() == [missing]
    assert not registry.mark_missing(record.version_id), "it is missing already"
    assert register(registry) == record


def test_only_a_ready_version_can_be_missed(registry: Registry) -> None:
    old, new = register(registry), register(registry, content="h2")
    registry.remove("law", NOW)
    assert not registry.mark_missing(old.version_id)
    assert not registry.mark_missing(new.version_id)
    assert not registry.mark_missing(999)
    assert states(registry, old, new) == ["replaced", "removed"]


def test_all_current_is_in_the_order_of_names(registry: Registry) -> None:
    for name in ("b", "c", "a"):
        register(registry, name)
    register(registry, "c", content="h2")
    assert [record.name for record in registry.all_current()] == ["a", "b", "c"]


# --- known files ---------------------------------------------------------------------------------------------------------------------


def test_files_that_were_read_before_are_known_by_path_and_signature(registry: Registry) -> None:
    record = register(registry)
    assert registry.known("/a/law", "s1") == record
    assert registry.known("/a/law", "s2") is None
    assert registry.known("/b/law", "s1") is None


def test_files_of_two_names_are_known_by_the_newer(registry: Registry) -> None:
    register(registry, "law")
    newer = register(registry, "law-alias")
    assert registry.known("/a/law", "s1") == newer


@pytest.mark.parametrize(
    "act",
    [
        lambda registry, record: registry.remove("law", NOW),
        lambda registry, record: registry.mark_missing(record.version_id),
        lambda registry, record: register(registry, content="h2", signature="s2"),
    ],
    ids=["removed", "missing", "replaced"],
)
def test_a_version_that_is_not_ready_is_not_known(
    registry: Registry, act: Callable[[Registry, AdapterRecord], object]
) -> None:
    act(registry, register(registry))
    assert registry.known("/a/law", "s1") is None


# --- pins and uses -------------------------------------------------------------------------------------------------------------------


def test_a_pin_goes_with_the_name_to_the_next_version(registry: Registry) -> None:
    register(registry)
    pinned = registry.set_pinned("law", True)
    assert pinned is not None and pinned.is_pinned
    assert register(registry, content="h2").is_pinned
    unpinned = registry.set_pinned("law", False)
    assert unpinned is not None and not unpinned.is_pinned
    assert registry.set_pinned("unheard-of", True) is None


def test_a_name_that_was_removed_comes_back_unpinned(registry: Registry) -> None:
    register(registry)
    registry.set_pinned("law", True)
    registry.remove("law", NOW)
    assert not register(registry).is_pinned


def test_uses_add_up_and_the_last_time_never_goes_back(registry: Registry) -> None:
    one, two = register(registry, "one"), register(registry, "two")
    registry.note_uses({one.version_id: (3, NOW + 9), two.version_id: (1, NOW), 999: (5, NOW)})
    registry.note_uses({one.version_id: (2, NOW + 4)})
    registry.note_uses({})
    used = [registry.get(record.version_id) for record in (one, two)]
    assert [(record.num_uses, record.last_used_at) for record in used if record] == [
        (5, NOW + 9),
        (1, NOW),
    ]


# --- hostile names, threads, ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a\0b", "'; DROP TABLE versions; --", "ü" * 1000, "%", "日本"])
def test_any_text_is_a_name(registry: Registry, name: str) -> None:
    record = register(registry, name)
    assert registry.current(name) == record and len(registry.all_current()) == 1


def test_a_name_that_is_no_text_is_unknown_and_cannot_be_registered(registry: Registry) -> None:
    assert registry.current("\ud800") is None
    assert registry.remove("\ud800", NOW) is None
    with pytest.raises(ValueError):
        register(registry, "\ud800")
    assert registry.all_current() == []
    register(registry)


def test_threads_that_register_at_once_get_a_version_each(registry: Registry) -> None:
    results: list[AdapterRecord] = []

    def work(worker: int) -> None:
        for number in range(20):
            results.append(register(registry, f"name{number % 3}", content=f"{worker}-{number}"))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record.version_id for record in results) == list(range(1, 81))
    assert [record.name for record in registry.all_current()] == ["name0", "name1", "name2"]


def test_a_closed_registry_says_so(path: Path) -> None:
    registry = Registry(path)
    registry.close()
    registry.close()
    with pytest.raises(RegistryFailed) as caught:
        registry.current("law")
    assert caught.value.code == "closed"


def test_a_registry_in_memory_needs_no_file() -> None:
    registry = Registry(None)
    record = register(registry)
    assert record.version_id == 1 and registry.current("law") == record
    registry.close()


# --- the file ------------------------------------------------------------------------------------------------------------------------


def set_aside(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir() if "set-aside" in file.name)


def scribble(path: Path) -> None:
    """Damage every page but the first: the schema is still there."""
    raw = bytearray(path.read_bytes())
    raw[4096:] = b"\xa5" * (len(raw) - 4096)
    path.write_bytes(raw)


def sql(*statements: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return run


TO_VERSION_1 = ("ALTER TABLE versions RENAME COLUMN checksum TO crc32", "PRAGMA user_version = 1")
DAMAGE: dict[str, Callable[[Path], object]] = {
    "no database": lambda path: path.write_bytes(b"not a database at all" * 100),
    "damaged pages": scribble,
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "another program's": sql("DROP TABLE versions", "CREATE TABLE notes (text)", "PRAGMA application_id = 7"),
    "a newer version's": sql("PRAGMA user_version = 99"),
    "a table gone": sql("DROP TABLE versions"),
    "a column gone": sql("ALTER TABLE versions DROP COLUMN rank"),
    "a field that is no JSON": sql("UPDATE versions SET target_modules = '[\"q_proj'"),
    "a number that is a text": sql("UPDATE versions SET checksum = 'many'"),
    "text that is not UTF-8": sql("UPDATE versions SET name = CAST(x'ff' AS TEXT)"),
    "version 1, and a number that is a text": sql("UPDATE versions SET checksum = 'many'", *TO_VERSION_1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_damaged_or_not_ours_is_set_aside_and_a_new_one_begun(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Registry(path)
    old = register(first)
    first.close()
    DAMAGE[damage](path)
    damaged = path.read_bytes()
    again = Registry(path)
    assert again.all_current() == []
    assert register(again).version_id > old.version_id, "numbers of the old file do not come again"
    again.close()
    assert set_aside(path) == ["adapters.db.set-aside-1"]
    assert (path.parent / "adapters.db.set-aside-1").read_bytes() == damaged
    assert "set aside" in caplog.text


def test_adapters_of_version_1_keep_number_pin_and_counts_and_are_read_once_more(path: Path) -> None:
    first = Registry(path)
    register(first)
    old = first.set_pinned("law", True)
    assert old is not None
    first.note_uses({old.version_id: (3, NOW)})
    first.close()
    sql(*TO_VERSION_1)(path)
    registry = Registry(path)
    assert registry.known(old.path, old.signature) is None, "its checksum is of another kind"
    again = registry.register(
        old.name,
        old.path,
        content_hash=old.content_hash,
        signature=old.signature,
        now=NOW,
        **FACTS | {"checksum": 7},
    )
    kept = (again.version_id, again.is_pinned, again.num_uses, again.checksum)
    assert kept == (old.version_id, True, 3, 7)
    assert registry.known(old.path, old.signature) == again
    registry.close()
    assert set_aside(path) == []


def test_another_programs_database_is_whole_where_it_was_set_aside(path: Path) -> None:
    path.with_name("adapters.db.set-aside-1").write_bytes(b"from the time before")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE notes (text)")
        other.execute("INSERT INTO notes VALUES ('only in the log so far')")
        registry = Registry(path)
        register(registry)
        registry.close()
        aside = path.with_name("adapters.db.set-aside-2")
        assert set_aside(path) == [f"adapters.db.set-aside-{end}" for end in ("1", "2", "2-shm", "2-wal")]
        with contextlib.closing(sqlite3.connect(aside)) as moved:
            assert moved.execute("SELECT * FROM notes").fetchall() == [("only in the log so far",)]
    again = Registry(path)
    assert len(again.all_current()) == 1, "nothing of the other's log came into the new file"
    again.close()


def test_an_empty_file_is_a_new_registry(path: Path) -> None:
    path.touch()
    registry = Registry(path)
    assert register(registry).version_id == 1
    registry.close()
    assert set_aside(path) == []


def test_a_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "adapters.db"):
        with pytest.raises(RegistryFailed) as caught:
            Registry(path)
        assert caught.value.code == "registry_failed"
        assert str(tmp_path) not in str(caught.value), "messages may be shown to clients: no paths"


def test_a_full_disk_is_told_and_leaves_what_was_there(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(path)
    old = register(registry)
    assert registry._connection is not None
    num_pages = registry._connection.execute("PRAGMA page_count").fetchone()[0]
    registry._connection.execute(f"PRAGMA max_page_count = {num_pages}")
    for _ in range(3):
        with pytest.raises(RegistryFailed) as caught:
            register(registry, content="h2" * 100_000)
        assert caught.value.code == "disk_full"
    assert [record.levelname for record in caplog.records if "full" in record.message] == ["ERROR"], (
        "the log says it once, however often it is tried"
    )
    assert registry.current("law") == old, "the old version is still the current one"
    registry.close()
    again = Registry(path)
    assert again.all_current() == [old]
    assert register(again, content="h2").version_id == old.version_id + 1
    again.close()


def test_a_file_locked_by_another_program_is_busy(path: Path) -> None:
    registry = Registry(path)
    assert registry._connection is not None
    registry._connection.execute("PRAGMA busy_timeout = 1")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryFailed) as caught:
            register(registry)
        assert caught.value.code == "busy"
        assert registry.all_current() == [], "reading goes on"
    register(registry)
    registry.close()


# --- everything against a model ------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.sampled_from(["/1", "/2"])
CONTENTS = st.sampled_from(["x", "y"])
SIGNATURES = st.sampled_from(["s", "t", "u"])
TIMES = st.integers(0, 100).map(float)


class RegistryMachine(RuleBasedStateMachine):
    """The registry beside a dict of records that says what it should hold."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "adapters.db"
        self.registry = Registry(self.path)
        self.model: dict[int, AdapterRecord] = {}
        self.current: dict[str, int] = {}

    def change(self, version_id: int, **fields: Any) -> None:
        self.model[version_id] = msgspec.structs.replace(self.model[version_id], **fields)

    @rule(name=NAMES, path=PATHS, content=CONTENTS, signature=SIGNATURES, now=TIMES)
    def register(self, name: str, path: str, content: str, signature: str, now: float) -> None:
        record = register(self.registry, name, path, content, signature, now)
        old = self.model.get(self.current.get(name, 0))
        if old is not None and (old.path, old.content_hash) == (path, content):
            assert record.version_id == old.version_id
            self.change(old.version_id, signature=signature, state="ready")
            return
        assert record.version_id > max(self.model, default=0), "numbers strictly increase"
        if old is not None:
            self.change(old.version_id, state="replaced")
        assert (record.name, record.path, record.content_hash) == (name, path, content)
        assert record.signature == signature and record.state == "ready" and record.num_uses == 0
        assert record.is_pinned == (old is not None and old.is_pinned)
        self.model[record.version_id] = record
        self.current[name] = record.version_id

    @rule(name=NAMES, now=TIMES)
    def remove(self, name: str, now: float) -> None:
        removed = self.registry.remove(name, now)
        version_id = self.current.pop(name, None)
        assert (removed is None) == (version_id is None)
        if version_id is not None:
            self.change(version_id, state="removed")

    @rule(version_id=st.integers(1, 12))
    def mark_missing(self, version_id: int) -> None:
        was_ready = version_id in self.model and self.model[version_id].state == "ready"
        assert self.registry.mark_missing(version_id) == was_ready
        if was_ready:
            self.change(version_id, state="missing")

    @rule(name=NAMES, is_pinned=st.booleans())
    def pin(self, name: str, is_pinned: bool) -> None:
        self.registry.set_pinned(name, is_pinned)
        if name in self.current:
            self.change(self.current[name], is_pinned=is_pinned)

    @rule(uses=st.dictionaries(st.integers(1, 12), st.tuples(st.integers(0, 5), TIMES)))
    def note_uses(self, uses: dict[int, tuple[int, float]]) -> None:
        self.registry.note_uses(uses)
        for version_id in uses.keys() & self.model.keys():
            old, (num_uses, used_at) = self.model[version_id], uses[version_id]
            last_used_at = used_at if old.last_used_at is None else max(used_at, old.last_used_at)
            self.change(version_id, num_uses=old.num_uses + num_uses, last_used_at=last_used_at)

    @rule()
    def reopen(self) -> None:
        self.registry.close()
        self.registry = Registry(self.path)

    @rule(path=PATHS, signature=SIGNATURES)
    def known(self, path: str, signature: str) -> None:
        fitting = [
            record
            for record in self.model.values()
            if (record.path, record.signature, record.state) == (path, signature, "ready")
        ]
        newest = max(fitting, key=lambda record: record.version_id, default=None)
        assert self.registry.known(path, signature) == newest

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert {version_id: self.registry.get(version_id) for version_id in self.model} == self.model
        current = [self.model[self.current[name]] for name in sorted(self.current)]
        assert self.registry.all_current() == current
        assert [self.registry.current(name) for name in sorted(self.current)] == current
        ready = [record.name for record in self.model.values() if record.state == "ready"]
        assert len(ready) == len(set(ready)), "at most one version of a name is ready"

    def teardown(self) -> None:
        if hasattr(self, "registry"):
            self.registry.close()
            self.folder.cleanup()


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=40, stateful_step_count=30)
