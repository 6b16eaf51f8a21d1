"""Copies of what is served: the very content or none, and never a reason not to serve it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine_bridge.adapters.contents import contents_of
from engine_bridge.adapters.copies import CLEAR_EVERY_S, FOLDER_NAME, PAUSE_S, Copies
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.store import AdapterStore
from engine_bridge.protocol.errors import InvalidRequest
from tests.adapter_corpus import WEIGHTS_FILE
from tests.unit.cluster.catalog_node import store_at
from tests.unit.engine_bridge.catalog_server import CatalogServer, put


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return put(tmp_path / "adapters", "law")


def hash_of(path: Path) -> str:
    return contents_of(path).content_hash


def test_a_copy_is_the_same_adapter_and_outlives_its_source(tmp_path: Path, source: Path) -> None:
    copies, wanted = Copies(tmp_path), hash_of(source)
    assert copies.path_of(wanted) == ""
    copies.make(wanted, str(source), [])
    shutil.rmtree(source)
    assert hash_of(Path(copies.path_of(wanted))) == wanted
    copies.make(wanted, str(source), [])  # it is there


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_lies_there_no_longer_is_not_copied(tmp_path: Path, source: Path, is_gone: bool) -> None:
    copies, wanted = Copies(tmp_path), hash_of(source)
    if is_gone:
        shutil.rmtree(source)
    else:
        put(source.parent, "law", seed=1)
    with pytest.raises(AdapterRejected) as refused:
        copies.make(wanted, str(source), [])
    assert refused.value.code == "changed"
    assert copies.path_of(wanted) == "" and not list(tmp_path.glob(f"{FOLDER_NAME}/*"))


def test_a_disk_without_room_leaves_no_half_of_a_copy(tmp_path: Path, source: Path) -> None:
    store, wanted = AdapterStore(tmp_path / "store", free_bytes=1 << 60), hash_of(source)
    with pytest.raises(InvalidRequest) as refused:
        store.copy(wanted, source)
    assert refused.value.code == "no_room" and store.path_of(wanted) == ""
    assert list((tmp_path / "store").iterdir()) == []
    store_at(tmp_path / "store").copy(wanted, source)
    assert store.path_of(wanted)


def test_where_no_copy_can_be_made_it_is_tried_again_after_a_while(tmp_path: Path, source: Path) -> None:
    clock, wanted = Clock(), hash_of(source)
    copies = Copies(tmp_path, clock)
    (tmp_path / FOLDER_NAME).write_text("this is no folder")
    copies.make(wanted, str(source), [])
    (tmp_path / FOLDER_NAME).unlink()
    copies.make(wanted, str(source), [])
    assert copies.path_of(wanted) == "", "not at once"
    clock.now += PAUSE_S
    copies.make(wanted, str(source), [])
    assert copies.path_of(wanted)


def test_what_is_served_no_more_goes_after_a_while(tmp_path: Path, source: Path) -> None:
    clock, server = Clock(), CatalogServer(tmp_path / "state")
    copies = Copies(tmp_path, clock)
    record = server.load("law", source)
    copies.make_missing([record], 1.0)
    kept = Path(copies.path_of(record.content_hash))
    os.utime(kept, (1.0, 1.0))
    copies.make_missing([], 1.0)
    assert kept.is_dir(), "requests under way may need it"
    clock.now += CLEAR_EVERY_S
    copies.make_missing([], 1.0)
    assert not kept.exists()
    server.catalog.close()


def test_what_a_gateway_sent_is_not_copied_once_more(tmp_path: Path, source: Path) -> None:
    copies, wanted = Copies(tmp_path), hash_of(source)
    sent = source.rename(tmp_path / wanted)
    copies.make(wanted, str(sent), [])
    assert not (tmp_path / FOLDER_NAME).exists()


def test_without_a_data_folder_nothing_is_copied(source: Path) -> None:
    copies = Copies(None)
    copies.make(hash_of(source), str(source), [])
    assert copies.path_of(hash_of(source)) == ""


def test_a_version_takes_the_place_of_another_only_with_its_copy(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written over between the reading and the copying, it would be served, and could not be read any more."""
    server = CatalogServer(tmp_path / "state")
    record = server.load("law", source)
    server.catalog.look_after()
    assert server.copies.path_of(record.content_hash)
    put(source.parent, "law", seed=1)
    real = shutil.copyfile

    def copyfile(path: Path, target: Path) -> None:
        real(path, target)
        if path.name == WEIGHTS_FILE:
            put(source.parent, "law", seed=2)
            real(path, target)

    with monkeypatch.context() as patched:
        patched.setattr("engine_bridge.adapters.store.shutil.copyfile", copyfile)
        with pytest.raises(AdapterRejected) as refused:
            server.load("law", source)
    assert refused.value.code == "changed"
    assert server.catalog.current("law") == record
    newest = server.load("law", source)
    assert server.copies.path_of(newest.content_hash) and server.copies.path_of(record.content_hash)
    server.catalog.close()
