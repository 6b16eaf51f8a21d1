"""A thin layer over the file system, which tests replace to make calls fail.

Only Linux: `preadv`, `flock` and `posix_fadvise` are used as they are there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple, Protocol

from kvtiers.errors import StoreBusy, StoreUnusable

LOCK_NAME = "lock"
DESCRIPTION_NAME = "namespace.json"


class AppendFile(Protocol):
    """The part of an aiofiles handle that is used here."""

    def fileno(self) -> int:
        """The file's descriptor."""

    async def write(self, data: memoryview) -> int:
        """Append bytes, and return how many were written."""
        ...

    async def truncate(self, size: int) -> int:
        """Cut the file to `size` bytes."""
        ...

    async def close(self) -> None:
        """Close the file."""


class FileSystemRoom(NamedTuple):
    """The room of a file system. free_bytes: bytes that this process may still write."""

    total_bytes: int
    free_bytes: int


class Files:
    """System calls, one a method; each raises OSError. Methods that are not async block, so call them in a worker thread."""

    def open_read(self, path: Path) -> int:
        """Return a descriptor for reading. Raises OSError, also for a file that is not regular.

        The kernel does not read ahead: the next bytes are asked for in large pieces, and often lie elsewhere (measured with reading ahead: 1.05 to
        1.44 bytes fetched for each asked byte, and up to 30% less throughput).
        """
        fd = open_regular(path)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the file's size in bytes."""
        return os.fstat(fd).st_size

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Read bytes, perhaps fewer than asked for; b"" at the end of the file."""
        return os.pread(fd, num_bytes, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers, 1024 at most, in order, and return the bytes read; 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        os.unlink(path)

    def room(self, directory: Path) -> FileSystemRoom | None:
        """Return the room of a folder's file system; None where it does not tell."""
        found = os.statvfs(directory)
        if not found.f_blocks:
            return None
        return FileSystemRoom(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    async def create(self, path: Path, pool: Executor) -> AppendFile:
        """Create a file that only its owner may read, for appending, unbuffered. Raises FileExistsError when the name is taken.

        Writes go past the page cache where the file system can (O_DIRECT): the host tier already caches new blocks, and filling the kernel's cache
        too costs the cores that compute (measured: 3 against 8 to 110 ms for 42 MB, the most where memory is fresh).
        """
        # Imported here, because it loads asyncio, which the command line does not need to look at stores.
        import aiofiles  # type: ignore[import-untyped]

        def opener(name: str, flags: int) -> int:
            """Open the new file with O_DIRECT, if possible."""
            fd = os.open(name, flags | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _set_direct(fd, True)
            return fd

        file: AppendFile = await aiofiles.open(path, "ab", buffering=0, opener=opener, executor=pool)
        return file

    async def write(self, file: AppendFile, data: memoryview) -> int:
        """Append `data`, or its first bytes, and return how many.

        Bytes that cannot go past the page cache, such as the rest of a short write, go through it, as do all later bytes of this file.
        """
        try:
            return await file.write(data)
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(file.fileno(), False):
                raise
        return await file.write(data)

    async def truncate(self, file: AppendFile, num_bytes: int) -> None:
        """Cut a file to `num_bytes`."""
        await file.truncate(num_bytes)


def is_full(error: OSError) -> bool:
    """Return whether an error says that the disk, or the owner's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and never wait: opening a pipe would wait for its writer.

    Raises:
        OSError: ELOOP for a symbolic link, EINVAL for a pipe, a device or a folder, and the system's own errors.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError as `open_regular` does."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file as a whole or not at all, also when the power goes; only its owner may read it. Raises OSError."""
    beside = path.with_name(f"{path.name}.tmp")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _set_direct(fd: int, wanted: bool) -> bool:
    """Turn O_DIRECT on or off, and return whether that changed it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) is wanted:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:  # a file system that cannot
        return False
    return True


def read_up_to(files: Files, fd: int, num_bytes: int, offset: int) -> bytes:
    """Read `num_bytes` bytes, fewer only at the end of the file."""
    data = files.pread(fd, num_bytes, offset)
    while len(data) < num_bytes and (more := files.pread(fd, num_bytes - len(data), offset + len(data))):
        data += more
    return data


def fill_up_to(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers from one range of the file, and return the bytes read, fewer than their sum only at the end of the file."""
    total = sum(map(len, buffers))
    done = files.preadv(fd, buffers, offset)
    while 0 < done < total:
        got = files.preadv(fd, _after(buffers, done), offset + done)
        if got == 0:
            break
        done += got
    return done


def _after(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the rest of the buffers behind their first `num_bytes`."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if num_bytes < len(buffer):
            rest.append(buffer[num_bytes:])
        num_bytes = max(num_bytes - len(buffer), 0)
    return rest


class Claim:
    """One process's lock on a store's folder. The system releases it when the process dies."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def is_valid(self) -> bool:
        """Return whether the claimed folder has not been removed, moved or replaced."""
        return is_same_file(self.path, self._fd)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def is_same_file(path: Path, fd: int) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def claim(directory: Path) -> Claim:
    """Lock a store's folder for this process. Raises StoreBusy when another process holds it, OSError when it cannot be locked."""
    path = directory / LOCK_NAME
    while True:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise StoreBusy(
                f"{directory} is in use by another process; stop it or choose another folder"
            ) from error
        except OSError:
            os.close(fd)
            raise
        if is_same_file(path, fd):
            return Claim(path, fd)
        os.close(fd)  # The folder was removed between opening and locking.


def prepare(directory: Path, describe: bytes | None) -> Claim:
    """Make the store's folder, for its owner only, lock it and describe it in `namespace.json`.

    Raises:
        StoreBusy: another process holds it.
        StoreUnusable: it cannot be made, locked or written; the OSError is chained.
    """
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        os.chmod(directory, 0o700)
        held = claim(directory)
    except OSError as error:
        raise StoreUnusable(f"{directory} cannot be used for KV blocks: {error.strerror}") from error
    try:
        if describe is not None:
            _replace(directory / DESCRIPTION_NAME, describe)
    except OSError as error:
        if is_full(error):
            return held  # only people read the description; KV can make room for itself later
        held.release()
        raise StoreUnusable(f"{directory} cannot be written: {error.strerror}") from error
    return held


def _replace(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader sees the old or the new content, never a part. A file with the same content is not touched."""
    try:
        if read_regular(path) == data:
            return
    except OSError:
        pass  # it is not there, or to be replaced
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)
