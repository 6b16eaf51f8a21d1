"""Any change of a model's files is seen, and what has not changed is not read again."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtiers import weights
from kvtiers.weights import folder_revision

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards of three MiB that nobody has touched for an hour, so far as the server's clock says."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for shard in "12":
        (folder / f"model-{shard}.safetensors").write_bytes(bytes(3 * MIB))
    return folder


@pytest.fixture(autouse=True)
def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    monkeypatch.setattr(weights.time, "time_ns", lambda: real() + 3600 * 10**9)
    monkeypatch.setattr(weights, "_in_process", {})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read whole."""
    found: list[str] = []
    real = weights._read_settled

    def noted(path: Path, progress: Any) -> Any:
        found.append(path.name)
        return real(path, progress)

    monkeypatch.setattr(weights, "_read_settled", noted)
    return found


def edit_keeping_size_and_time(path: Path) -> None:
    """One byte in the middle, as a copying tool that keeps times would leave it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def replace_keeping_size_and_time(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(b"\1" + path.read_bytes()[1:])
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("change", [edit_keeping_size_and_time, replace_keeping_size_and_time])
@pytest.mark.parametrize("restarts", [False, True], ids=["same process", "next process"])
def test_any_byte_counts(model: Path, tmp_path: Path, change: Callable[[Path], None], restarts: bool) -> None:
    memory = tmp_path / "weights.json"
    before = folder_revision(model, memory)
    change(model / "model-2.safetensors")
    if restarts:
        weights._in_process.clear()
    assert folder_revision(model, memory) != before


def test_what_people_lay_beside_a_model_does_not_count(model: Path) -> None:
    before = folder_revision(model)
    for name in ("README.md", "LICENSE", ".gitattributes", "curve.png", "chat_template.jinja"):
        (model / name).write_text("of no weight")
    os.mkfifo(model / "pipe.safetensors")
    (model / "checkpoint-500").mkdir()
    assert folder_revision(model) == before


@pytest.mark.parametrize("content", [b"", b"[]", b'{"/a": 1}', b"\xff", b'{"a": "' + bytes(5 * MIB) + b'"}'])
def test_a_damaged_memory_is_made_anew(model: Path, tmp_path: Path, read: list[str], content: bytes) -> None:
    memory = tmp_path / "weights.json"
    memory.write_bytes(content)
    revision = folder_revision(model, memory)
    weights._in_process.clear()
    assert folder_revision(model, memory) == revision
    assert len(read) == 3


def test_a_file_that_changes_when_read_is_like_no_other(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, path = weights._digest, model / "model-1.safetensors"

    def while_written(read_into: Any, progress: Any) -> str:
        os.utime(path)
        return real(read_into, progress)

    unchanging = folder_revision(model)
    weights._in_process.clear()
    monkeypatch.setattr(weights, "_digest", while_written)
    assert len({unchanging, folder_revision(model), folder_revision(model)}) == 3
