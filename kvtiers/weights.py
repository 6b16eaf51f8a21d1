"""A digest of the weights in a model's folder: of all bytes of its files.

A file is read once. Its digest is remembered, in the process and in a small file, for as long as the file system says that it is the same file with
the same content: the time of the inode's last change is looked at, too, which no copying tool can set back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
from msgspec import Struct
from xxhash import xxh3_128

Report = Callable[[str], None]
"""Is told in a phrase how far the reading has come."""

# Files that people and other programs put beside a model. An engine may read any other file.
HARMLESS_SUFFIXES = frozenset(".gif .jinja .jpeg .jpg .lock .log .md .pdf .png .rst .svg .txt".split())
HARMLESS_NAMES = frozenset(("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "README", "Makefile", "Dockerfile"))
READ_BYTES = 8 << 20
# Chosen: a fast disk wants several reads at once, and more readers would take the processor from others.
NUM_READERS = 4
REPORT_AFTER_S, REPORT_EVERY_S = 2.0, 10.0
# A file that was changed so short a time ago may change again without its times telling, as clocks of file systems tick. Chosen: the slowest.
SETTLED_S = 2.0
MAX_REMEMBERED = 4096
MAX_MEMORY_BYTES = 4 << 20


class _Remembered(Struct, frozen=True):
    """A file's digest, and the file system's facts about the file at that time (`signature`)."""

    signature: str
    digest: str


_in_process: dict[str, _Remembered] = {}


def folder_revision(folder: Path, memory: Path | None = None, report: Report = lambda phrase: None) -> str:
    """Return a digest of the weights in a model's folder, or in a file that is a model, wherever it lies and whatever it is called.

    Args:
        folder: the folder or file.
        memory: a file of digests from earlier runs, written where a file had to be read. None: only this process remembers digests.
        report: called while the reading takes longer than two seconds.
    """
    paths = [path for path in sorted(folder.iterdir()) if _may_matter(path)] if folder.is_dir() else [folder]
    digests = _digests([path.resolve() for path in paths], memory, report)
    whole = hashlib.sha256()
    for path, digest in zip(paths, digests, strict=True):
        name = path.name if path is not folder else ""
        whole.update(f"{name}\0{digest}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:32]


def _may_matter(path: Path) -> bool:
    if path.suffix.lower() in HARMLESS_SUFFIXES or path.name in HARMLESS_NAMES or path.name.startswith("."):
        return False
    return path.is_file()  # reading a pipe would wait for its writer


def _digests(paths: Sequence[Path], memory: Path | None, report: Report) -> list[str]:
    """Return the digest of each file, from memory where the file has not changed."""
    found = {str(path): _known(path, _in_process) for path in paths}
    if memory is not None and not all(found.values()):
        stored = _read(memory)
        found = {name: known or _known(Path(name), stored) for name, known in found.items()}
    read = _read_all([Path(name) for name, known in found.items() if known is None], report)
    settled = {name: each for name, each in read.items() if each.signature}
    _in_process.update({name: known for name, known in found.items() if known} | settled)
    if memory is not None and settled:
        _write(memory, settled)
    return [(found[str(path)] or read[str(path)]).digest for path in paths]


def _known(path: Path, remembered: Mapping[str, _Remembered]) -> _Remembered | None:
    known = remembered.get(str(path))
    with contextlib.suppress(OSError):
        if known is not None and known.signature == _signature(os.stat(path)):
            return known
    return None


def _signature(status: os.stat_result) -> str:
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


# -- reading -----------------------------------------------------------------------------------------------------------


class _Progress:
    """The number of bytes read so far by all readers."""

    def __init__(self) -> None:
        self.num_bytes = 0


def _read_all(paths: Sequence[Path], report: Report) -> dict[str, _Remembered]:
    """Read the files, and return each one's digest, without a signature where it must not be remembered."""
    if not paths:
        return {}
    progress, num_bytes = _Progress(), sum(_size(path) for path in paths)
    with ThreadPoolExecutor(min(NUM_READERS, len(paths)), thread_name_prefix="weights") as readers:
        futures = {str(path): readers.submit(_read_settled, path, progress) for path in paths}
        _report_until_done(futures.values(), progress, num_bytes, report)
    return {name: future.result() for name, future in futures.items()}


def _report_until_done(
    futures: Iterable[Future[_Remembered]], progress: _Progress, num_bytes: int, report: Report
) -> None:
    left, pause_s = set(futures), REPORT_AFTER_S
    while left := wait(left, pause_s).not_done:
        share = min(progress.num_bytes / max(num_bytes, 1), 1.0)
        report(f"reading the model's files once, to tell its KV from that of other weights: {share:.0%}")
        pause_s = REPORT_EVERY_S


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_settled(path: Path, progress: _Progress) -> _Remembered:
    """Return the digest of a file that did not change while it was read; a unique digest for a file that keeps changing."""
    for _ in range(3):
        try:
            with path.open("rb", buffering=0) as file:
                before, now_ns = os.fstat(file.fileno()), time.time_ns()
                digest = _digest(file.readinto, progress)
                after = os.fstat(file.fileno())
        except OSError:
            return _Remembered("", "unreadable")  # an engine of this process cannot read it either
        if _signature(before) == _signature(after):
            is_settled = now_ns - before.st_ctime_ns > SETTLED_S * 1e9
            return _Remembered(_signature(before) if is_settled else "", digest)
    return _Remembered("", uuid.uuid4().hex)


def _digest(read_into: Callable[[memoryview], int | None], progress: _Progress) -> str:
    digest, buffer = xxh3_128(), memoryview(bytearray(READ_BYTES))
    num_bytes = 0
    while num_read := read_into(buffer):
        digest.update(buffer[:num_read])
        num_bytes += num_read
        progress.num_bytes += num_read
    return f"{num_bytes}-{digest.hexdigest()}"


# -- memory ------------------------------------------------------------------------------------------------------------


def _read(memory: Path) -> dict[str, _Remembered]:
    """Return the remembered digests; none where they cannot be read, so that the files are read again."""
    try:
        if memory.stat().st_size > MAX_MEMORY_BYTES:
            return {}
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, _Remembered])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _write(memory: Path, found: Mapping[str, _Remembered]) -> None:
    """Add digests to the memory. Where that fails, or two processes write at once, files are read again another time."""
    kept = {name: each for name, each in _read(memory).items() if name not in found} | dict(found)
    kept = dict(list(kept.items())[-MAX_REMEMBERED:])
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeEncodeError):
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=memory.parent, prefix=f".{memory.name}.", delete=False) as file:
            file.write(msgspec.json.encode(kept))
        try:
            os.replace(file.name, memory)
        except OSError:
            os.unlink(file.name)
            raise
