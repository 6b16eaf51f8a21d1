"""A data folder that others can read is made private, and nothing else is touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gateway.settings.config import Config
from gateway.settings.data_folder import tighten


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder as an older release may have left it, open to everybody."""
    folder = tmp_path / "data"
    store = folder / "kv" / "0123abcd"
    store.mkdir(parents=True)
    (folder / "profiles").mkdir()
    for name in (
        "sessions.sqlite3",
        "sessions.sqlite3-wal",
        "sessions.sqlite3-shm",
        "adapters.db",
        "lengths-1.npz",
    ):
        (folder / name).write_bytes(b"x")
    for name in ("namespace.json", "0.seg"):
        (store / name).write_bytes(b"{}")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o775 if path.is_dir() else 0o664)
    return folder


def test_all_that_holds_conversations_becomes_private(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Folder, databases with what SQLite puts beside them, KV, lengths; said once in one line."""
    config = Config(data_dir=folder)
    with caplog.at_level(logging.WARNING):
        config.prepare_data_dir()
    for path in (folder, *folder.rglob("*")):
        assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
    assert len(caplog.records) == 1 and str(folder) in caplog.text and "6 more" in caplog.text
    caplog.clear()
    config.prepare_data_dir()
    assert not caplog.records


def test_a_private_folder_is_left_as_it_is(folder: Path) -> None:
    """Also its owner's own rights: a file that is only to be read stays so."""
    tighten(folder, folder / "kv")
    (folder / "sessions.sqlite3").chmod(0o400)
    assert tighten(folder, folder / "kv") == []
    assert mode_of(folder / "sessions.sqlite3") == 0o400


def test_what_belongs_to_another_user_is_not_touched(folder: Path) -> None:
    """Neither a file in the folder nor the folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    theirs = folder / "sessions.sqlite3"
    os.chown(theirs, 12345, 12345)
    tighten(folder, folder / "kv")
    assert mode_of(theirs) == 0o664 and mode_of(folder) == 0o700
    folder.chmod(0o755)
    os.chown(folder, 12345, 12345)
    tighten(folder, folder / "kv")
    assert mode_of(folder) == 0o755


def test_a_linked_data_folder_is_followed_and_links_in_it_are_not(folder: Path, tmp_path: Path) -> None:
    """Somebody may have put a link there that points to a file of ours which others are to read."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    outside.chmod(0o644)
    (folder / "sessions.sqlite3").unlink()
    (folder / "sessions.sqlite3").symlink_to(outside)
    (tmp_path / "link").symlink_to(folder)
    Config(data_dir=tmp_path / "link").prepare_data_dir()
    assert mode_of(folder) == 0o700 and mode_of(folder / "adapters.db") == 0o600
    assert mode_of(outside) == 0o644


def test_a_pipe_in_the_folder_is_no_trap(folder: Path) -> None:
    """Opening one would wait for a writer for ever."""
    os.mkfifo(folder / "sessions.sqlite3-pipe", 0o644)
    os.chmod(folder / "sessions.sqlite3-pipe", 0o644)
    tighten(folder, folder / "kv")
    assert mode_of(folder / "sessions.sqlite3-pipe") == 0o644


def test_a_folder_that_others_use_too_keeps_its_rights(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With other folders in it, or sticky as /tmp is, only our files are made private, and the log says what to do."""
    (folder / "somebody").mkdir()
    tighten(folder, folder / "kv")
    assert mode_of(folder) == 0o775 and mode_of(folder / "sessions.sqlite3") == 0o600
    assert "use a folder of its own" in caplog.text
    (folder / "somebody").rmdir()
    folder.chmod(0o1777)
    tighten(folder, folder / "kv")
    assert mode_of(folder) == 0o1777
    folder.chmod(0o755)
    assert tighten(folder, folder / "kv") == [folder]


def test_configured_folders_inside_do_not_make_it_shared(folder: Path) -> None:
    """Adapters may lie in the data folder; theirs are the operator's rights to set."""
    (folder / "adapters").mkdir(mode=0o755)
    (folder / "adapters").chmod(0o755)
    Config(data_dir=folder, adapters_dir=folder / "adapters").prepare_data_dir()
    assert mode_of(folder) == 0o700 and mode_of(folder / "adapters") == 0o755


def test_kv_elsewhere_is_made_private_store_by_store(folder: Path, tmp_path: Path) -> None:
    """A --kv-dir of its own may hold other things: only what is marked as a store of ours is changed."""
    elsewhere = tmp_path / "fast"
    (folder / "kv").rename(elsewhere)
    (elsewhere / "other").mkdir(mode=0o755)
    (elsewhere / "other").chmod(0o755)
    tighten(folder, elsewhere)
    assert mode_of(elsewhere) == 0o775 and mode_of(elsewhere / "other") == 0o755
    assert mode_of(elsewhere / "0123abcd") == 0o700 and mode_of(elsewhere / "0123abcd" / "0.seg") == 0o600
