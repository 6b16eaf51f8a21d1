"""A watched folder of adapters: each change is told once, and only when the files have come to rest."""

from __future__ import annotations

import errno
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from engine_bridge.adapters import watch
from engine_bridge.adapters.retries import AdapterRefusal, Retries
from engine_bridge.adapters.watch import Folder, FolderChanges
from tests.adapter_corpus import CONFIG_FILE, WEIGHTS_FILE, make_adapter, write_config

MODULES = {"model.layers.0.self_attn.q_proj": (16, 16)}
NOW = 1_700_000_000.0
LONG_AGO = NOW - 1000
NOTHING = FolderChanges()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "adapters"
    root.mkdir()
    return root


@pytest.fixture
def folder(root: Path) -> Folder:
    return Folder(root, settle_s=2.0)


def stamp(adapter: Path, when: float = LONG_AGO) -> Path:
    """Set the time of change of the adapter's folder and of all that is in it."""
    for path in (*adapter.iterdir(), adapter):
        os.utime(path, (when, when))
    return adapter


def put(root: Path, name: str, *, seed: int = 0, when: float = LONG_AGO) -> Path:
    return stamp(make_adapter(root / name, modules=MODULES, seed=seed), when)


def test_adapters_are_told_once_in_the_order_of_names(root: Path, folder: Folder) -> None:
    two, one = put(root, "two"), put(root, "one")
    assert folder.changes(NOW) == FolderChanges(added=(("one", one), ("two", two)))
    assert folder.changes(NOW) == NOTHING


def test_at_the_start_all_is_told_at_once(root: Path, folder: Folder) -> None:
    law = put(root, "law", when=NOW)
    put(root, ".hidden")
    assert folder.changes(NOW, is_settled=True) == FolderChanges(added=(("law", law),))


def test_what_failed_is_told_again_when_it_is_due_unless_its_files_are_at_fault(root: Path) -> None:
    retries = Retries()
    folder = Folder(root, retries, settle_s=0.0)
    full, broken = put(root, "full"), put(root, "broken")
    assert folder.changes(NOW).added == (("broken", broken), ("full", full))
    retries.failed("full", AdapterRefusal("The disk is full.", "disk_full"), NOW)
    retries.failed("broken", AdapterRefusal("It is broken.", "corrupt_file"), NOW)
    assert folder.changes(NOW + 1) == NOTHING
    assert folder.changes(NOW + 2) == FolderChanges(changed=(("full", full),))
    retries.failed("full", AdapterRefusal("The disk is full.", "disk_full"), NOW + 2)
    assert folder.changes(NOW + 4) == NOTHING, "the waits grow"
    assert folder.changes(NOW + 6) == FolderChanges(changed=(("full", full),))
    for number in range(20):
        retries.failed("full", AdapterRefusal("The disk is full.", "disk_full"), NOW + 6 + number)
    assert folder.changes(NOW + 36) == FolderChanges(changed=(("full", full),)), "but not without end"
    retries.forget("full")
    assert folder.changes(NOW + 100) == NOTHING
    put(root, "broken", seed=1, when=LONG_AGO + 1)
    assert folder.changes(NOW + 101) == FolderChanges(changed=(("broken", broken),)), "its files are others"


def test_a_clock_that_was_set_back_puts_no_try_off() -> None:
    retries = Retries()
    retries.failed("full", AdapterRefusal("The disk is full.", "disk_full"), NOW)
    assert not retries.is_due("full", NOW + 1)
    assert retries.is_due("full", NOW - 1e6)


def test_what_has_failed_for_days_is_still_tried_and_told() -> None:
    """Each try counts, and so does each look at one that stands back."""
    retries = Retries()
    for number in range(40_000):
        retries.failed("full", AdapterRefusal("The disk is full.", "disk_full"), NOW + number)
    assert retries.is_due("full", NOW + 40_010) and not retries.is_due("full", NOW + 40_001)
    assert "tried again" in retries.texts()["full"]


def test_one_stands_back_behind_another_of_its_name_from_elsewhere(root: Path) -> None:
    retries = Retries()
    folder = Folder(root, retries)
    twin = put(root, "twin")
    assert folder.changes(NOW).added
    put(root, "twin", seed=1, when=LONG_AGO + 1)
    assert folder.changes(NOW, {"twin"}) == NOTHING
    assert "loaded from elsewhere" in retries.texts()["twin"]
    assert folder.changes(NOW, {"twin"}) == NOTHING
    assert folder.changes(NOW) == FolderChanges(added=(("twin", twin),)), "the other one was unloaded"
    assert retries.texts() == {}
    assert folder.changes(NOW, {"twin"}) == NOTHING
    shutil.rmtree(twin)
    assert folder.changes(NOW, {"twin"}) == NOTHING, "the other one is not called gone"
    assert retries.texts() == {}


def test_what_is_no_folder_with_a_configuration_is_no_adapter(root: Path, folder: Folder) -> None:
    (root / "notes.txt").write_text("hello")
    (root / "empty").mkdir()
    (root / "deep" / "adapter").mkdir(parents=True)
    write_config(root / "deep" / "adapter", MODULES)
    (root / "circle").symlink_to("circle")
    (root / "broken").symlink_to("gone")
    assert folder.changes(NOW) == NOTHING


def test_an_adapter_that_is_a_link_is_told(root: Path, folder: Folder, tmp_path: Path) -> None:
    (root / "linked").symlink_to(put(tmp_path, "real"))
    assert folder.changes(NOW) == FolderChanges(added=(("linked", root / "linked"),))


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_change_of_either_file_is_told_once(root: Path, folder: Folder, name: str) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    os.utime(adapter / name, (LONG_AGO + 1, LONG_AGO + 1))
    assert folder.changes(NOW) == FolderChanges(changed=(("law", adapter),))
    assert folder.changes(NOW) == NOTHING


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_a_change(
    root: Path, folder: Folder, tmp_path: Path
) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    (put(tmp_path, "law", seed=1) / WEIGHTS_FILE).replace(adapter / WEIGHTS_FILE)
    stamp(adapter)
    assert folder.changes(NOW) == FolderChanges(changed=(("law", adapter),))


def test_another_file_beside_the_two_is_no_change(root: Path, folder: Folder) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    (adapter / "README.md").write_text("hello")
    for path in (adapter / "README.md", adapter):
        os.utime(path, (LONG_AGO + 1, LONG_AGO + 1))
    assert folder.changes(NOW) == NOTHING


def test_an_adapter_that_is_gone_is_told_once_and_can_come_back(root: Path, folder: Folder) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    shutil.rmtree(adapter)
    assert folder.changes(NOW) == FolderChanges(removed=("law",))
    assert folder.changes(NOW) == NOTHING
    put(root, "law")
    assert folder.changes(NOW) == FolderChanges(added=(("law", adapter),))


def test_a_folder_without_its_configuration_is_gone(root: Path, folder: Folder) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    (adapter / CONFIG_FILE).unlink()
    assert folder.changes(NOW) == FolderChanges(removed=("law",))


def test_one_whose_files_are_deleted_and_written_anew_is_not_called_gone(root: Path, folder: Folder) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    for path in adapter.iterdir():
        path.unlink()
    os.utime(adapter, (NOW, NOW))
    assert folder.changes(NOW + 1) == NOTHING
    put(root, "law", seed=1, when=NOW + 1)
    assert folder.changes(NOW + 2) == NOTHING
    assert folder.changes(NOW + 3) == FolderChanges(changed=(("law", adapter),))
    (adapter / CONFIG_FILE).unlink()
    os.utime(adapter, (NOW + 3, NOW + 3))
    assert folder.changes(NOW + 4) == NOTHING
    assert folder.changes(NOW + 5) == FolderChanges(removed=("law",)), "nothing came"


def test_one_that_is_replaced_by_another_folder_is_not_called_gone(
    root: Path, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at just between the two moves."""
    adapter = put(root, "law")
    new = put(tmp_path, "new", seed=1, when=LONG_AGO + 1)
    folder.changes(NOW)
    adapter.rename(tmp_path / "old")
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: new.rename(adapter))
    assert folder.changes(NOW) == NOTHING
    assert folder.changes(NOW) == FolderChanges(changed=(("law", adapter),))


def test_a_renamed_adapter_goes_and_comes(root: Path, folder: Folder) -> None:
    put(root, "old")
    folder.changes(NOW)
    (root / "old").rename(root / "new")
    assert folder.changes(NOW) == FolderChanges(added=(("new", root / "new"),), removed=("old",))


# --- half-copied adapters --------------------------------------------------------------------------------------------------------------


def test_an_adapter_is_held_back_until_its_files_are_at_rest(root: Path, folder: Folder) -> None:
    adapter = put(root, "law", when=NOW)
    assert folder.changes(NOW + 1.9) == NOTHING
    assert folder.changes(NOW + 2.0) == FolderChanges(added=(("law", adapter),))


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, ".adapter_model.safetensors.part", ""])
def test_any_file_that_is_being_written_holds_the_adapter_back(root: Path, folder: Folder, name: str) -> None:
    adapter = put(root, "law")
    (adapter / ".adapter_model.safetensors.part").touch()
    stamp(adapter)
    os.utime(adapter / name, (NOW, NOW))
    assert folder.changes(NOW + 1) == NOTHING
    assert folder.changes(NOW + 2) == FolderChanges(added=(("law", adapter),))


def test_a_change_is_held_back_too_and_the_old_adapter_is_not_called_gone(root: Path, folder: Folder) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    put(root, "law", seed=1, when=NOW)
    assert folder.changes(NOW + 1) == NOTHING
    assert folder.changes(NOW + 2) == FolderChanges(changed=(("law", adapter),))


def test_one_that_is_written_anew_all_the_time_is_told_in_a_short_pause(root: Path, folder: Folder) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    told_s = []
    for second in range(1, 31):
        put(root, "law", seed=second, when=NOW + second)
        assert folder.changes(NOW + second + 0.1) == NOTHING  # it is just being written
        if folder.changes(NOW + second + 0.9) == FolderChanges(changed=(("law", adapter),)):
            told_s.append(second)
    assert told_s[0] <= 10
    assert max(after - before for before, after in pairwise(told_s)) <= 10


def test_a_new_one_is_never_told_before_it_rests(root: Path, folder: Folder) -> None:
    for second in range(30):
        put(root, "law", seed=second, when=NOW + second)
        assert folder.changes(NOW + second + 0.9) == NOTHING


def test_a_time_far_in_the_future_does_not_hold_an_adapter_back(root: Path, folder: Folder) -> None:
    adapter = put(root, "law", when=NOW + 1e6)
    assert folder.changes(NOW) == FolderChanges(added=(("law", adapter),))


def test_one_restless_adapter_does_not_hold_back_the_others(root: Path, folder: Folder) -> None:
    put(root, "busy", when=NOW)
    quiet = put(root, "quiet")
    assert folder.changes(NOW) == FolderChanges(added=(("quiet", quiet),))


def test_an_adapter_without_weights_is_told_and_told_again_when_they_come(root: Path, folder: Folder) -> None:
    adapter = root / "law"
    write_config(adapter, MODULES)
    stamp(adapter)
    assert folder.changes(NOW) == FolderChanges(added=(("law", adapter),))
    put(root, "law")
    assert folder.changes(NOW) == FolderChanges(changed=(("law", adapter),))


# --- names and trouble -----------------------------------------------------------------------------------------------------------------


def test_odd_names_are_skipped_and_logged_once(
    root: Path, folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".hidden", "line\nbreak", "x" * 201, "\udcff", " law", "e\u0301t\u00e9"):
        put(root, name)
    longest = put(root, "y" * 200)
    assert folder.changes(NOW) == FolderChanges(added=(("y" * 200, longest),))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5, "one that is hidden is how a copy is made"
    assert all(len(line) <= 250 and line.isprintable() for line in lines)
    assert folder.changes(NOW) == NOTHING
    assert len(caplog.records) == 5


def test_a_hidden_folder_that_is_no_adapter_is_not_worth_a_word(root: Path, folder: Folder) -> None:
    (root / ".git").mkdir()
    assert folder.changes(NOW) == NOTHING


def test_a_missing_folder_is_empty(root: Path, folder: Folder) -> None:
    put(root, "law")
    folder.changes(NOW)
    shutil.rmtree(root)
    assert folder.changes(NOW) == FolderChanges(removed=("law",))
    root.mkdir()
    put(root, "law")
    assert folder.changes(NOW).added


def test_a_folder_that_cannot_be_read_for_now_has_no_changes_and_is_told_once(
    root: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(root, "law")
    folder.changes(NOW)

    def stale(path: Path) -> object:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(watch.os, "scandir", stale)
        assert folder.changes(NOW) == NOTHING
        assert folder.changes(NOW) == NOTHING
    assert caplog.text.count("Stale file handle") == 1
    assert folder.changes(NOW) == NOTHING, "the adapter is still the one that was told"


def test_an_adapter_that_cannot_be_looked_at_for_now_is_not_gone(
    root: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = put(root, "law")
    folder.changes(NOW)
    real = watch.signature_of

    def fail(path: Path) -> str:
        if path == adapter:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    put(root, "other")
    monkeypatch.setattr(watch, "signature_of", fail)
    assert folder.changes(NOW) == FolderChanges(added=(("other", root / "other"),))
