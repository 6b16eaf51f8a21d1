"""Rights of a data folder: it is for its owner only, even if an older release, a backup or a umask has opened it to others."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# What the server makes in its folder and conversations can be read from: texts, KV, names and lengths. With what SQLite puts beside them.
_OWN_FILES: Final = (
    "sessions.sqlite3*",
    "adapters.db*",
    "lengths-*",
    "agents.jsonl*",
    "audit.jsonl*",
    "people.sqlite3*",
    "profiles/*",
    "cluster-token",
    "weights.json",
)
_OWN_FOLDERS: Final = frozenset({"adapter-copies", "kv", "kernels", "nodes", "profiles", "lost+found"})
_KV_STORE_MARK: Final = "namespace.json"  # In each store's folder: kvtiers/io/files.py.


def tighten(folder: Path, kv_dir: Path | None, known_folders: Iterable[Path | None] = ()) -> list[Path]:
    """Remove the rights of others from a data folder, its files and the KV; return the paths that were changed.

    Files of another user and targets of links stay as they are; a data folder that is itself a link is followed. A folder that holds other
    folders than ours and `known_folders` (adapters, say) is shared with other programs: a data folder of /var/lib or a home must not shut
    everybody else out. In such a folder only the files are changed, and a warning is logged.
    """
    folder = folder.resolve()
    known = {path.resolve() for path in (kv_dir, *known_folders) if path is not None}
    changed = [path for path in _conversations(folder, kv_dir) if _tighten_one(path)]
    if _is_open_to_others(folder):
        if _is_shared(folder, known):
            logger.warning(
                "other users can look into the data folder %s. It is not only this server's, so it is left as it is: "
                "use a folder of its own, or run: chmod 700 %s",
                folder,
                folder,
            )
        elif _tighten_one(folder):
            changed.insert(0, folder)
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        names = ", ".join(str(path) for path in changed[:5])
        logger.warning("could be read by other users, and are private now: %s%s", names, more)
    return changed


def _conversations(folder: Path, kv_dir: Path | None) -> Iterator[Path]:
    """Yield our files and folders that hold readable data."""
    for pattern in _OWN_FILES:
        yield from folder.glob(pattern)
    yield folder / "profiles"
    if kv_dir is None:
        return
    if kv_dir.resolve().is_relative_to(folder):
        yield kv_dir.resolve()
    for mark in kv_dir.glob(f"*/{_KV_STORE_MARK}"):
        yield mark.parent
        yield from mark.parent.iterdir()


def _is_shared(folder: Path, known: set[Path]) -> bool:
    """Return whether other programs may use a folder."""
    if folder.stat().st_mode & stat.S_ISVTX or folder in (Path("/"), Path.home()):
        return True
    subfolders = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return any(
        path.name not in _OWN_FOLDERS and not any(one.is_relative_to(path) for one in known)
        for path in subfolders
    )


def _is_open_to_others(path: Path) -> bool:
    """Return whether this is a file or folder of this user, not a link, that others have rights to."""
    try:
        return _is_ours_and_open(path.lstat())
    except OSError:
        return False


def _is_ours_and_open(status: os.stat_result) -> bool:
    is_kept = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_kept and status.st_uid == os.geteuid() and bool(status.st_mode & _OTHERS)


def _tighten_one(path: Path) -> bool:
    """Remove others' rights; return whether there were any."""
    # Nothing that is private already is opened: closing a database's file drops the locks that this process has on it.
    if not _is_open_to_others(path):
        return False
    try:
        # By descriptor and without following links: in a folder that others can write to, a name may become a link at any moment.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("%s can be read by other users and cannot be made private: %s", path, error.strerror)
        return False
    try:
        status = os.fstat(fd)
        if not _is_ours_and_open(status):
            return False
        os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~_OTHERS)
        return True
    except OSError as error:
        logger.warning("%s can be read by other users and cannot be made private: %s", path, error.strerror)
        return False
    finally:
        os.close(fd)
