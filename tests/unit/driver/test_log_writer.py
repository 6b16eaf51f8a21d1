"""The decision log's file: whole lines in order, never more than it may have, and never a wait."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from engine_bridge.driver.scheduling.record import LogWriter


def lines(num: int) -> list[bytes]:
    return [b"line %06d\n" % at for at in range(num)]


def test_what_was_taken_is_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = LogWriter(path, 1 << 20)
    assert all(writer.write(line) for line in lines(1000))
    writer.close()
    assert path.read_bytes() == b"".join(lines(1000))
    assert writer.num_bytes == path.stat().st_size and writer.cut is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_ends_at_its_bound_with_a_whole_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    writer = LogWriter(path, 100)
    taken = [line for line in lines(20) if writer.write(line)]
    assert not writer.write(b"\n"), "no hole: also what would still fit is not taken"
    writer.close()
    assert taken == lines(8)
    assert path.read_bytes() == b"".join(taken)
    assert writer.cut == "size" and caplog.text.count("ends here") == 1


def test_a_disk_that_does_not_keep_up_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe that nobody reads is the slowest disk there is."""
    path, slow = tmp_path / "log", tmp_path / "slow"
    os.mkfifo(slow)
    reader = os.open(slow, os.O_RDONLY | os.O_NONBLOCK)
    path.symlink_to(slow)
    writer = SlowWriter(path, 1 << 30, 1 << 20)
    line = b"x" * 9999 + b"\n"
    taken = 0
    while writer.write(line):
        taken += 1
    assert writer.cut == "slow" and "too slow" in caplog.text
    assert (1 << 20) // len(line) - 1 <= taken <= (2 << 20) // len(line), (
        "what the pipe itself holds comes on top"
    )
    written: list[bytes] = []
    os.set_blocking(reader, True)
    reading = threading.Thread(target=lambda: written.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
    reading.start()
    writer.close()
    reading.join(10)
    os.close(reader)
    assert b"".join(written) == line * taken, "what was taken can be replayed"


class SlowWriter(LogWriter):
    """Writes what is there already, in place of making a file."""

    def _make(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY)


def test_a_disk_that_fails_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    writer = FullWriter(tmp_path / "log", 1 << 20)
    writer.write(b"line\n")
    writer.close()
    assert writer.cut == "error" and "No space left" in caplog.text
    assert not writer.write(b"line\n")


class FullWriter(LogWriter):
    def _make(self, path: Path) -> int:
        return os.open("/dev/full", os.O_WRONLY)


def test_the_log_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for text in (b"first\n", b"second\n", b"third\n"):
        writer = LogWriter(path, 100)
        writer.write(text)
        writer.close()
    assert path.read_bytes() == b"third\n"
    assert (tmp_path / "log.1").read_bytes() == b"second\n"


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        LogWriter(tmp_path / "none" / "log", 100)
