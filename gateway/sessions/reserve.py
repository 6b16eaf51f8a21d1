"""A file that keeps some of the disk for the time when it is full: deleting writes before it frees."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

# Chosen. Folding the log back lets the file grow by what is new in the log, and frees the log. The log is folded back at 1 MiB
# (`LOG_PAGES`) and one transaction more; where that fails for lack of room, it grows by as much again before the disk is full. So for
# transactions up to 7 MiB this is enough to fold it. Behind larger ones (a body of 16 MiB) it is not, and deletions are only added to the log:
# 120 kB for a text of 1 MB (measured), so that this is room for removing more than 100 MB, which then lets the file become smaller.
RESERVE_BYTES: Final = 16 << 20
_SHARE_OF_DISK: Final = 8  # Chosen: no more than so small a part of a small disk.
_NUM_PORTIONS: Final = 8  # Chosen: given up in parts, so that others on the disk find little of it.


class Reserve:
    """The file. All of this blocks: run it in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_missed = False

    def give_some(self) -> bool:
        """Free a part of what is held; False if nothing is left."""
        try:
            held = self._path.stat().st_size
            if held == 0:
                return False
            portion = -(-self._full_bytes() // _NUM_PORTIONS)
            os.truncate(self._path, max(held - portion, 0))
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("the reserve %s cannot be given up: %s", self._path, error.strerror)
            return False
        logger.warning("the disk is full: a part of the reserve is given up so that something can be deleted")
        return True

    @property
    def room_bytes(self) -> int:
        """What the disk would have free without the reserve."""
        try:
            return self._path.stat().st_size + self._free_bytes()
        except OSError:
            return 0

    @property
    def is_whole(self) -> bool:
        """Whether all of it is held."""
        try:
            return self._path.stat().st_size >= self._full_bytes()
        except OSError:
            return False

    def take_back(self) -> bool:
        """Hold all of it again, or as much as leaves as much to others; whether it is whole now."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return self._say_missed(error.strerror)
        try:
            full, held = self._full_bytes(), os.fstat(fd).st_size
            if held < full:
                size = min(full, held + self._free_bytes() // 2)
                os.posix_fallocate(fd, 0, max(size, 1))
                if size < full:
                    return self._say_missed("the disk is nearly full")
        except OSError as error:
            return self._say_missed(error.strerror)
        finally:
            os.close(fd)
        self._is_missed = False
        return True

    def _say_missed(self, reason: str | None) -> bool:
        if not self._is_missed:
            logger.warning("the reserve for deleting on a full disk cannot be held whole: %s", reason)
        self._is_missed = True
        return False

    def _full_bytes(self) -> int:
        disk = os.statvfs(self._path.parent)
        return min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _SHARE_OF_DISK)

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize
