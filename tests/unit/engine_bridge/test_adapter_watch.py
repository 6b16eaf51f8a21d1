import os
from itertools import pairwise
from pathlib import Path

import pytest

from engine_bridge.adapters import watch
from engine_bridge.adapters.retries import Retries
from engine_bridge.adapters.watch import Folder, FolderChanges
from tests.adapter_corpus import CONFIG_FILE, WEIGHTS_FILE, make_adapter, write_config

MODULES = {"model.layers.0.self_attn.q_proj": (16, 16)}
NOW = 1_700_000_000.0
LONG_AGO = NOW - 1000


class Watched:
    """A folder, and what it tells."""

    def __init__(self, root: Path) -> None:
        self.root, self.retries = root, Retries()
        root.mkdir()
        self.folder = Folder(root, self.retries, settle_s=2.0)

    def put(self, name: str, *, seed: int = 0, when: float = LONG_AGO) -> Path:
        return stamp(make_adapter(self.root / name, modules=MODULES, seed=seed), when)

    def tells(self, at_s: float = 0.0, /, *, found="", removed="") -> None:
        """Expect these changes, names parted by spaces, and no others, `at_s` after NOW."""
        expected = FolderChanges(
            tuple((name, self.root / name) for name in found.split()), tuple(removed.split())
        )
        assert self.folder.changes(NOW + at_s) == expected


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watch, "LOOK_AGAIN_S", 0.0)
    return Watched(tmp_path / "adapters")


@pytest.fixture
def law(watched: Watched) -> Path:
    """An adapter that was told."""
    path = watched.put("law")
    watched.tells(found="law")
    return path


def stamp(adapter: Path, when: float = LONG_AGO) -> Path:
    """Set the time of change of the adapter's folder and of all that is in it."""
    for path in (*adapter.iterdir(), adapter):
        os.utime(path, (when, when))
    return adapter


def test_adapters_are_told_once_by_name_and_links_are_followed(watched: Watched, tmp_path: Path) -> None:
    one = watched.put("one", when=NOW)
    watched.put(".hidden")
    assert watched.folder.changes(NOW, is_settled=True) == FolderChanges(found=(("one", one),))
    watched.put("two"), one.rename(watched.root / "new")
    (watched.root / "linked").symlink_to(stamp(make_adapter(tmp_path / "real", modules=MODULES)))
    watched.tells(2, found="linked new two", removed="one")
    watched.tells(2)


def test_a_change_is_told_by_the_two_files_alone(watched: Watched, law: Path, tmp_path: Path) -> None:
    (law / "README.md").write_text("hello")
    stamp(law, LONG_AGO)
    watched.folder.changes(NOW)  # setting times back is a change by itself
    for path in (law / "README.md", law):
        os.utime(path, (LONG_AGO + 1, LONG_AGO + 1))
    watched.tells()
    os.utime(law / CONFIG_FILE, (LONG_AGO + 1, LONG_AGO + 1))
    watched.tells(found="law")
    watched.tells()
    (make_adapter(tmp_path / "other", modules=MODULES, seed=1) / WEIGHTS_FILE).replace(law / WEIGHTS_FILE)
    stamp(law)
    watched.tells(found="law")


def test_one_whose_files_are_deleted_and_written_anew_is_not_called_gone(watched: Watched, law: Path) -> None:
    for path in law.iterdir():
        path.unlink()
    os.utime(law, (NOW, NOW))
    watched.tells(1)
    watched.put("law", seed=1, when=NOW + 1)
    watched.tells(2)
    watched.tells(3, found="law")
    (law / CONFIG_FILE).unlink()
    os.utime(law, (NOW + 3, NOW + 3))
    watched.tells(4)
    watched.tells(5, removed="law")  # nothing came


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, ".adapter_model.safetensors.part", ""])
def test_any_file_that_is_being_written_holds_back_its_adapter_alone(watched: Watched, name: str) -> None:
    adapter = watched.put("law")
    watched.put("quiet")
    (adapter / ".adapter_model.safetensors.part").touch()
    stamp(adapter)
    os.utime(adapter / name, (NOW, NOW))
    watched.tells(1.9, found="quiet")
    watched.tells(2.0, found="law")
    watched.put("law", seed=1, when=NOW + 3)
    watched.tells(4)
    watched.tells(5, found="law")


def test_one_that_is_written_anew_all_the_time_is_told_in_a_short_pause(watched: Watched, law: Path) -> None:
    told_s = []
    for second in range(1, 31):
        watched.put("law", seed=second, when=NOW + second)
        watched.tells(second + 0.1)  # it is just being written
        if watched.folder.changes(NOW + second + 0.9) == FolderChanges(found=(("law", law),)):
            told_s.append(second)
    assert told_s[0] <= 10
    assert max(after - before for before, after in pairwise(told_s)) <= 10


def test_what_is_no_adapter_is_passed_over(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    (watched.root / "notes.txt").write_text("hello")
    (watched.root / "empty").mkdir()
    write_config(watched.root / "deep" / "adapter", MODULES)
    for name in ("circle", "broken"):
        (watched.root / name).symlink_to("circle" if name == "circle" else "gone")
    watched.put(".hidden")  # which is how a copy is made
    watched.tells()
    assert caplog.messages == []
    for name in ("line\nbreak", "x" * 201, "\udcff", " law", "e\u0301t\u00e9", "y" * 200):
        watched.put(name)
    watched.tells(found="y" * 200)
    watched.tells()
    assert len(caplog.messages) == 5
    assert all(len(line) <= 250 and line.isprintable() for line in caplog.messages)
