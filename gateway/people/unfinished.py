"""What is being made under a hidden name, and has its own name only once it is whole; and the removal of what killed processes left of such work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

_NEW = re.compile(r"\..+\.new-[0-9]+")


def new_name(place: Path) -> Path:
    """Return the name under which this process makes what will lie in a place."""
    return place.with_name(f".{place.name}.new-{os.getpid()}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder locked against other processes that take this lock, where its file system has locks. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def hold(folder: Path) -> int | None:
    """Return a descriptor that marks a folder as being made, until it is closed or its process ends; None where another has it, or locks fail.

    A number of a process would not do: in another container it is another process's.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_left_folders(parent: Path, file_names: Sequence[str]) -> None:
    """Remove folders that no process makes any more (`hold`) and that hold files of these names (patterns) alone. The caller has locked the parent.

    What cannot be removed stays.
    """
    for folder in parent.glob(".*.new-*"):
        if not _NEW.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            is_ours = all(
                any(fnmatchcase(path.name, name) for name in file_names) for path in folder.iterdir()
            )
            if is_ours and (held := hold(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)


def remove_left_files(places: Iterable[Path]) -> None:
    """Remove what was to be put into places by processes that were killed. The caller has locked the folder, so none of them runs. Raises OSError."""
    for place in places:
        for path in place.parent.glob(f".{place.name}.new-*"):
            if _NEW.fullmatch(path.name):
                path.unlink(missing_ok=True)
