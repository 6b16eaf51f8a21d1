import contextlib
import json
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_bridge.adapters.errors import RegistryFailed
from engine_bridge.adapters.registry import AdapterFacts, AdapterRecord, Registry
from tests.unit.engine_bridge.catalog_server import fill_disk

NOW = 1_700_000_000.0
FACTS: dict[str, Any] = {"checksum": 2**63 - 1, "rank": 8, "num_bytes": 2**40, "base_model": "demo/base"}
FACTS["target_modules"] = ("k_proj", "q_proj")


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


def versions_in(path: Path) -> dict[int, AdapterRecord]:
    """The versions in a registry's file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM versions")]
    records = [row | {"target_modules": json.loads(row["target_modules"])} for row in rows]
    return {each["version_id"]: msgspec.convert(each, AdapterRecord, strict=False) for each in records}


def current_in(path: Path) -> list[AdapterRecord]:
    """Those that new requests get, in the order of names."""
    current = [each for each in versions_in(path).values() if each.state in ("ready", "missing")]
    return sorted(current, key=lambda record: record.name)


def register(registry, name="law", path="/a/law", content="h1", signature="s1", now=NOW) -> AdapterRecord:
    facts = AdapterFacts(content_hash=content, signature=signature, **FACTS)
    return registry.register(name, path, facts, now)


def test_names_that_are_no_text_and_a_closed_registry_are_told(path: Path, registry: Registry) -> None:
    assert registry.remove("\ud800", NOW) is None
    with pytest.raises(ValueError):
        register(registry, "\ud800")
    assert versions_in(path) == {}
    assert [register(registry, "'; DROP TABLE versions; --")] == current_in(path)
    for _ in range(2):
        registry.close()
    with pytest.raises(RegistryFailed) as caught:
        registry.known("/a/law", "s1")
    assert caught.value.code == "closed"


def test_threads_that_register_at_once_get_a_version_each(path: Path, registry: Registry) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = threads.map(lambda at: register(registry, f"name{at % 3}", content=str(at)), range(80))
        assert sorted(record.version_id for record in made) == list(range(1, 81))
    assert [record.name for record in current_in(path)] == ["name0", "name1", "name2"]


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
def test_what_is_no_registry_is_set_aside(path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first = Registry(path)
    old = register(first)
    first.close()
    DAMAGE[damage](path)
    damaged = path.read_bytes()
    again = Registry(path)
    assert current_in(path) == []
    assert register(again).version_id > old.version_id, "numbers of the old file do not come again"
    again.close()
    assert set_aside(path) == ["adapters.db.set-aside-1"]
    assert (path.parent / "adapters.db.set-aside-1").read_bytes() == damaged
    assert "set aside" in caplog.text


def test_adapters_of_version_1_keep_number_pin_and_counts_and_are_read_once_more(path: Path) -> None:
    first = Registry(path)
    register(first)
    old = first.set_pinned("law", True)
    first.note_uses({old.version_id: (3, NOW)})
    first.close()
    sql(*TO_VERSION_1)(path)
    registry = Registry(path)
    assert registry.known(old.path, old.signature) is None, "its checksum is of another kind"
    again = registry.register(old.name, old.path, msgspec.structs.replace(old, checksum=7), NOW)
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
    assert len(current_in(path)) == 1, "nothing of the other's log came into the new file"
    again.close()


def test_a_full_disk_is_told_and_leaves_what_was_there(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(path)
    old = register(registry)
    fill_disk(registry)
    for _ in range(3):
        with pytest.raises(RegistryFailed) as caught:
            register(registry, content="h2" * 100_000)
        assert caught.value.code == "disk_full"
    told = [record.levelname for record in caplog.records if "full" in record.message]
    assert told == ["ERROR"], "the log says it once, however often it is tried"
    assert current_in(path) == [old], "the old version is still the current one"
    registry.close()
    again = Registry(path)
    assert current_in(path) == [old]
    assert register(again, content="h2").version_id == old.version_id + 1
    again.close()


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
        assert all(getattr(record, field) == value for field, value in FACTS.items())
        assert record.is_pinned == (old is not None and old.is_pinned)
        self.model[record.version_id] = record
        self.current[name] = record.version_id

    @rule(name=NAMES, now=TIMES)
    def remove(self, name: str, now: float) -> None:
        removed = self.registry.remove(name, now)
        version_id = self.current.pop(name, 0)
        if version_id:
            self.change(version_id, state="removed")
        assert removed == self.model.get(version_id)

    @rule(version_id=st.integers(1, 12))
    def mark_missing(self, version_id: int) -> None:
        was_ready = version_id in self.model and self.model[version_id].state == "ready"
        assert self.registry.mark_missing(version_id) == was_ready
        if was_ready:
            self.change(version_id, state="missing")

    @rule(name=NAMES, is_pinned=st.booleans())
    def pin(self, name: str, is_pinned: bool) -> None:
        pinned = self.registry.set_pinned(name, is_pinned)
        if name in self.current:
            self.change(self.current[name], is_pinned=is_pinned)
        assert pinned == self.model.get(self.current.get(name, 0))

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
        wanted = (path, signature, "ready")
        fitting = [each for each in self.model.values() if (each.path, each.signature, each.state) == wanted]
        newest = max(fitting, key=lambda record: record.version_id, default=None)
        assert self.registry.known(path, signature) == newest

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert versions_in(self.path) == self.model
        current = [each for each in self.model.values() if each.state in ("ready", "missing")]
        assert {each.name: each.version_id for each in current} == self.current
        ready = [record.name for record in self.model.values() if record.state == "ready"]
        assert len(ready) == len(set(ready)), "at most one version of a name is ready"

    def teardown(self) -> None:
        if hasattr(self, "registry"):
            self.registry.close()
            self.folder.cleanup()


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=30, stateful_step_count=30)
